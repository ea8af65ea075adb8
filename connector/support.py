"""What kvlens does with the vLLM that is installed: how deep it sees, and what it may correct.

Releases older than the first one are refused. Every other is observed: at ``groups``
depth where vLLM has all private names that this needs, else at ``interface`` depth,
through the public connector interface. A release that nobody tried is corrected only
where probe and after-probe of a correction pass (``corrections/``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import vllm
from packaging.version import InvalidVersion, Version

from kvlens.connector import symbols, versions
from kvlens.connector.symbols import Found, Part
from kvlens.connector.versions import UnsupportedVLLMError as UnsupportedVLLMError
from kvlens.telemetry.semconv import Depth

OLDEST = Version(versions.SUPPORTED[0].version)
NEWEST = Version(versions.SUPPORTED[-1].version)


@dataclass(frozen=True)
class Support:
    """What is done with one vLLM."""

    version: str
    tested: bool = True
    """Whether the test suite runs on this release."""
    found: list[Found] = field(default_factory=list)
    """Every symbol that this release should have."""
    deepest: Depth = Depth.GROUPS
    """How deep kvlens is allowed to see (setting ``depth``)."""

    @property
    def depth(self) -> Depth:
        """How deep kvlens sees."""
        if Part.GROUPS in self.lost:
            return Depth.INTERFACE
        return self.deepest

    @property
    def lost(self) -> frozenset[Part]:
        """Parts of kvlens that lack a symbol."""
        lost = {found.symbol.part for found in self.found if found.problem}
        if Part.GROUPS in lost:  # everything private stands on it
            lost |= {part for part in Part if part.correction}
        if Part.GROUPS in lost or not self.tested:
            # A search of our own over code that nobody has compared with it proves nothing.
            lost.add(Part.LOOKUP)
        return frozenset(lost)

    @property
    def not_seen(self) -> list[str]:
        """One sentence for each missing symbol, for the log and the engine's page."""
        missing = [
            f"{found.problem}; without it there is no {found.symbol.part.value}"
            for found in self.found
            if found.problem
        ]
        if not self.tested and self.depth is Depth.GROUPS:
            missing.append(
                "lookups of kvlens' own are not proved on this release: vLLM's search answers, "
                "with the corrections whose cure is proved"
            )
        return missing


def vllm_version() -> str:
    """Version of the installed vLLM."""
    return str(vllm.__version__)


def _parsed(installed: str) -> Version | None:
    try:
        version = Version(installed)
    except InvalidVersion:
        return None
    # A build from source without tags calls itself 0.0.0 or "dev"; it is newer than any release.
    return None if version.release[:2] == (0, 0) or version.base_version == "0.1" else version


def find(deepest: Depth = Depth.GROUPS) -> Support:
    """Look at the installed vLLM; raises :class:`UnsupportedVLLMError` if it is too old."""
    installed = vllm_version()
    version = _parsed(installed)
    if version is not None and Version(version.base_version) < OLDEST:
        raise UnsupportedVLLMError(
            f"vLLM {installed} is older than {OLDEST}, the first release that kvlens runs on. "
            f"Install vLLM {OLDEST} or newer, or use the stock OffloadingConnector."
        )
    # Later patch releases of the last minor one are taken for tested too.
    tested = version is not None and version.release[:2] <= NEWEST.release[:2]
    return Support(installed, tested, symbols.check(version), deepest)
