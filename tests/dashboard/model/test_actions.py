from __future__ import annotations

import pytest

from kvlens.dashboard.model.actions import Action, Handling, Note, by_incident, fold


def action(number: int, kind: str, **fields: object) -> Action:
    given = {"who": "ana", **fields}
    return Action(id=str(number), incident_id="i", time=float(number), kind=kind, **given)  # type: ignore[arg-type]


def test_nothing_done() -> None:
    assert fold([]) == Handling()
    assert not Handling().silenced(0.0)


def test_the_newest_acknowledgement_counts() -> None:
    log = [action(1, "acknowledge", who="ana"), action(2, "acknowledge", who="ben")]
    assert (fold(log).acknowledged_by, fold(log).acknowledged_at) == ("ben", 2.0)
    taken_back = fold([*log, action(3, "unacknowledge")])
    assert (taken_back.acknowledged_by, taken_back.acknowledged_at) == (None, None)
    assert taken_back.acted_at == 3.0


@pytest.mark.parametrize(("until", "silent"), [(100.0, True), (5.0, False), (None, False)])
def test_a_silence_lasts_until_its_end(until: float | None, silent: bool) -> None:
    log = [action(1, "silence", until=50.0), action(5, "silence", until=until, who="ben")]
    state = fold(log)
    assert state.silenced(60.0) is silent
    assert state.silenced_by == ("ben" if silent else None)
    assert not state.silenced(100.0)


def test_every_text_becomes_a_note() -> None:
    log = [
        action(1, "annotate", text="pool too small?"),
        action(2, "acknowledge"),
        action(3, "silence", until=9.0, text="rolling back", who="ben"),
    ]
    assert fold(log).annotations == (
        Note(time=1.0, who="ana", text="pool too small?"),
        Note(time=3.0, who="ben", text="rolling back"),
    )


def test_an_incident_without_actions_has_a_handling_too() -> None:
    assert by_incident(["i", "j"], [action(1, "acknowledge")])["j"] == Handling()
