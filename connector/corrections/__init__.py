"""Corrections of vLLM's offloading scheduler: one module per defect.

Each module defines ``NAME``, ``SUMMARY`` and ``FIXED_IN`` (the first vLLM
release without the defect, None while there is none), ``present()`` (does the
installed vLLM have it? answered by running vLLM's own code on a small case),
``apply(base)``, which returns a subclass of an ``OffloadingConnectorScheduler``
class that does not, and ``cured(cls, rng)``: does such a class answer a made-up case
as it should? A correction is engaged only if it answers all of them.
"""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

from kvlens.connector.config import ConfigError, ConnectorSettings, LookupMode
from kvlens.connector.corrections import (
    drafter_fallback,
    held_back_tail,
    load_start,
    pop_widening,
    reachable_window,
    token_watermark,
)
from kvlens.connector.support import Support
from kvlens.telemetry.records import Correction

ALL: tuple[ModuleType, ...] = (
    drafter_fallback,
    pop_widening,
    held_back_tail,
    load_start,
    token_watermark,
    reachable_window,
)


PROOF_CASES = 200
"""Made-up cases that a corrected class must answer before it is used."""


def plan(settings: ConnectorSettings, support: Support | None = None) -> list[Correction]:
    """Decide for each correction whether it is applied, and why.

    ``support`` tells which private names are missing; by default none is.
    """
    lost = {part.correction for part in support.lost} if support is not None else set()
    names = [module.NAME for module in ALL]
    wanted = settings.corrections
    if isinstance(wanted, list) and (unknown := sorted(set(wanted) - set(names))):
        raise ConfigError(
            f"kvlens connector setting corrections: unknown {', '.join(unknown)}; "
            f"known are {', '.join(names)}"
        )
    planned = []
    for module in ALL:
        if settings.lookup is LookupMode.STOCK:
            state, reason = "off", "lookup is stock"
        elif wanted == "none" or (isinstance(wanted, list) and module.NAME not in wanted):
            state, reason = "off", "switched off by the setting corrections"
        elif module.NAME in lost:
            state, reason = "unknown", "this vLLM lacks a name that it needs"
        else:
            state, reason = _probe(module)
        planned.append(Correction(name=module.NAME, state=state, reason=reason))
    return planned


class _Silent:
    """A logger that says nothing; the probes' made-up cases are nobody's news."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _probe(module: ModuleType) -> tuple[str, str]:
    # Replaced, not muted: vLLM's ``info_once`` would count a muted message as said.
    logger, scheduler.logger = scheduler.logger, _Silent()
    try:
        present = module.present()
    except Exception as error:  # noqa: BLE001 - a probe runs vLLM's code on made-up objects
        return "unknown", f"the probe failed: {type(error).__name__}: {error}"
    finally:
        scheduler.logger = logger
    fixed = f"fixed in {module.FIXED_IN}" if module.FIXED_IN else "in all releases that have it"
    if present and (problem := _uncured(module)) is not None:
        return "unknown", f"this vLLM has the defect, but its cure is not proved: {problem}"
    if present:
        return "active", f"this vLLM has the defect ({fixed}): {module.SUMMARY}"
    return "not_needed", f"this vLLM does not have the defect ({fixed})"


def _uncured(module: ModuleType) -> str | None:
    """Why the corrected class cannot be trusted on this vLLM; None if it is cured."""
    rng = Random(0)
    logger, scheduler.logger = scheduler.logger, _Silent()
    try:
        corrected = module.apply(scheduler.OffloadingConnectorScheduler)
        wrong = sum(not module.cured(corrected, rng) for _ in range(PROOF_CASES))
    except Exception as error:  # noqa: BLE001 - a vLLM that it was not written for
        return f"{type(error).__name__}: {error}"
    finally:
        scheduler.logger = logger
    return f"{wrong} of {PROOF_CASES} made-up cases are still wrong" if wrong else None


def apply(base: type[Any], planned: list[Correction]) -> type[Any]:
    """Subclass of ``base`` with the active corrections."""
    active = {item.name for item in planned if item.state == "active"}
    for module in ALL:
        if module.NAME in active:
            base = module.apply(base)
    return base


def widens(planned: list[Correction]) -> bool:
    """Whether every drafter group is asked for one chunk more, corrected or not."""
    state = {item.name: item.state for item in planned}[pop_widening.NAME]
    if state in ("active", "not_needed"):
        return True
    try:
        return not pop_widening.present()
    except Exception:  # noqa: BLE001 - a vLLM that the probe does not fit is newer than the defect
        return True
