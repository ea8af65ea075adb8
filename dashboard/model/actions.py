"""What people did about incidents: an append-only log, and the state that follows from it.

The log is the audit trail and the state at once, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

ACKNOWLEDGE: Final = "acknowledge"
UNACKNOWLEDGE: Final = "unacknowledge"
SILENCE: Final = "silence"
ANNOTATE: Final = "annotate"


class Action(msgspec.Struct, kw_only=True, frozen=True):
    """One entry of the log. Times are this machine's, Unix seconds."""

    id: str
    """Unique: the same action twice is kept once."""
    incident_id: str
    time: float
    kind: str
    """``acknowledge``, ``unacknowledge``, ``silence`` or ``annotate``."""
    who: str
    """The name that was given; whoever holds the read token can give any."""
    address: str = ""
    """Network address that the request came from."""
    text: str = ""
    until: float | None = None
    """End of a silence; one that is not after ``time`` ends a silence."""


class Note(msgspec.Struct, kw_only=True, frozen=True):
    """What somebody wrote on an incident."""

    time: float
    who: str
    text: str


class Handling(msgspec.Struct, kw_only=True, frozen=True):
    """What became of an incident in people's hands."""

    acknowledged_at: float | None = None
    acknowledged_by: str | None = None
    silenced_until: float | None = None
    """No notifications until then."""
    silenced_by: str | None = None
    annotations: tuple[Note, ...] = ()
    """Oldest first, with the notes of acknowledgements and silences."""
    acted_at: float | None = None
    """Time of the newest action."""

    def silenced(self, now: float) -> bool:
        """Whether notifications are held back at ``now``."""
        return self.silenced_until is not None and now < self.silenced_until


def by_incident(idents: Iterable[str], actions: Iterable[Action]) -> dict[str, Handling]:
    """Handling of each of ``idents``, from all their actions, oldest first."""
    found: dict[str, list[Action]] = {ident: [] for ident in idents}
    for action in actions:
        found[action.incident_id].append(action)
    return {ident: fold(log) for ident, log in found.items()}


def fold(actions: Iterable[Action]) -> Handling:
    """Follow the actions of one incident, oldest first."""
    state = Handling()
    for action in actions:
        changes: dict[str, object] = {"acted_at": action.time}
        if action.kind == ACKNOWLEDGE:
            changes |= {"acknowledged_at": action.time, "acknowledged_by": action.who}
        elif action.kind == UNACKNOWLEDGE:
            changes |= {"acknowledged_at": None, "acknowledged_by": None}
        elif action.kind == SILENCE:
            lasting = action.until is not None and action.until > action.time
            changes |= {
                "silenced_until": action.until if lasting else None,
                "silenced_by": action.who if lasting else None,
            }
        if action.text:
            note = Note(time=action.time, who=action.who, text=action.text)
            changes["annotations"] = (*state.annotations, note)
        state = msgspec.structs.replace(state, **changes)
    return state
