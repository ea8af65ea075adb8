"""What became of a request's reusable tokens, as far as the public interface tells.

No causes: which group or step lost them is not seen at this depth, and a guess would
send people the wrong way. Every finding is ``likely``: what was computed before is
known, what the connector was asked to keep of it is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlens.telemetry.semconv import Confidence, Verdict
from kvlens.telemetry.verdict.case import Case, Judgement
from kvlens.telemetry.verdict.judge import STALL_SECONDS, UNRESOLVED_SECONDS, did_not_read


def judge(case: Case, connector: str, unit: int, evicted: int = 0, failed: int = 0) -> Judgement:
    """Judge one request.

    Args:
        case: the request; ``servable`` is what was served, ``expected`` what was computed
            before by this engine and is not known to be evicted.
        connector: name of the connector that was asked, for the text.
        unit: tokens between two boundaries that can be served.
        evicted: tokens that were computed before and whose chunks the tier gave up.
        failed: tokens whose load failed.
    """
    unread = None if failed else did_not_read(case)
    if unread is not None:
        return replace(unread, confidence=Confidence.LIKELY)
    return _stalled(case, connector) or _by_numbers(case, connector, unit, evicted, failed)


def _stalled(case: Case, connector: str) -> Judgement | None:
    if case.deferral_seconds < (UNRESOLVED_SECONDS if case.unresolved else STALL_SECONDS):
        return None
    then = "without an answer" if case.unresolved else f"then it served {case.served:,} tokens"
    return _judgement(
        case,
        Verdict.STALLED,
        f"{connector} put the request off for {case.deferral_seconds:.1f} s "
        f"({case.deferrals:,} lookups), {then}.",
        {"deferral_seconds": round(case.deferral_seconds, 3), "deferred_lookups": case.deferrals},
        f"Look for slow or stuck transfers in {connector}'s log at this time.",
    )


def _by_numbers(case: Case, connector: str, unit: int, evicted: int, failed: int) -> Judgement:
    lost = case.expected - case.served
    if failed:
        return _judgement(
            case,
            Verdict.PARTIAL if case.served else Verdict.LOST,
            f"{connector} failed to load {failed:,} tokens that it had promised; the engine "
            f"computed them again.",
            {"failed_tokens": failed},
            f"Look for the failed transfer in {connector}'s log at this time.",
        )
    if lost >= unit:
        served = f"{case.served:,} of" if case.served else "none of"
        return _judgement(
            case,
            Verdict.PARTIAL if case.served else Verdict.LOST,
            f"{connector} served {served} the {case.expected:,} tokens that this engine had "
            f"computed before and no longer had in GPU memory. Which step lost them cannot be "
            f"seen at interface depth.",
            {"expected_tokens": case.expected, "served_tokens": case.served, "unit_tokens": unit},
            "Run `kvlens compat` where vLLM is installed: it names what keeps kvlens from seeing "
            f"more. Then check that {connector} stores, and that its tier is large enough.",
        )
    if evicted >= unit:
        text = f"{connector} served {case.served:,} tokens; it had evicted {evicted:,} more."
        return _judgement(case, Verdict.EVICTED, text, {"evicted_tokens": evicted},
                          "Enlarge the tier if such prompts matter.", evicted)  # fmt: skip
    if case.served:
        return _judgement(case, Verdict.FULL, f"{connector} served {case.served:,} tokens.")
    if case.local:
        return _judgement(
            case, Verdict.LOCAL, f"The GPU cache covered the {case.local:,} tokens that could be "
            "reused.",
        )  # fmt: skip
    return _judgement(case, Verdict.COLD, "This engine had computed no whole chunk of it before.")


def _judgement(
    case: Case,
    verdict: Verdict,
    summary: str,
    evidence: dict[str, Any] | None = None,
    next_step: str = "",
    evicted: int = 0,
) -> Judgement:
    return Judgement(
        verdict,
        summary[0].upper() + summary[1:],
        confidence=Confidence.LIKELY,
        evidence=evidence or {},
        next_step=next_step,
        servable=case.servable,
        expected=case.expected,
        # Whether it was never stored or not found is not told apart here.
        lost_at_store=max(0, case.expected - case.served),
        evicted=evicted,
    )
