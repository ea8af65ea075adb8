"""All that the doctor says of one server, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvlens.dashboard.doctor.static import STATIC
from kvlens.dashboard.doctor.unused import unused
from kvlens.dashboard.model.scrape import SOURCE, Reading
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import connectors, signs
from kvlens.dashboard.scrape.checks import examine
from kvlens.dashboard.scrape.findings import FINE, FOUND, Finding, Outcome, percent
from kvlens.dashboard.scrape.window import Window
from kvlens.dashboard.view.format import size
from kvlens.telemetry import __version__
from kvlens.telemetry.semconv import Severity

SCHEMA: Final = 1
_ORDER: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1}


@dataclass(frozen=True)
class Patient:
    """One engine: its windows, the most telling first, and what was found."""

    engine: str
    model: str
    windows: Sequence[Window]
    outcomes: list[Outcome]
    findings: list[Finding]

    @property
    def reading(self) -> Reading:
        """The newest numbers."""
        return self.windows[0].after


@dataclass(frozen=True)
class Report:
    """All engines behind one page."""

    source: str
    """What was looked at, as it may be told to others."""
    patients: list[Patient] = field(default_factory=list)

    @property
    def critical(self) -> bool:
        """Whether anything found is critical."""
        return any(
            finding.severity is Severity.CRITICAL
            for patient in self.patients
            for finding in patient.findings
        )

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "schema_version": SCHEMA,
            "kvlens_version": __version__,
            "source": self.source,
            "findings": [
                {"engine": patient.engine, "model": patient.model, **_finding(finding)}
                for patient in self.patients
                for finding in patient.findings
            ],
            "engines": [_patient(patient) for patient in self.patients],
        }


def diagnose(windows: Sequence[Window], limits: Thresholds) -> Patient:
    """Examine one engine over its windows: a finding of any counts, the first one's word else."""
    outcomes = examine(windows[0], limits)
    for window in windows[1:]:
        later = {outcome.kind: outcome for outcome in examine(window, limits)}
        outcomes = [
            later[known.kind] if known.finding is None and later[known.kind].finding else known
            for known in outcomes
        ]
    found = [outcome.finding for outcome in outcomes if outcome.finding is not None]
    said = {finding.cause for finding in found} | {finding.kind for finding in found}
    for check in STATIC:
        finding = check(windows[0], limits)
        if finding is not None and finding.kind not in said:
            found.append(finding)
    found.sort(key=lambda finding: _ORDER[finding.severity])
    after = windows[0].after
    return Patient(after.engine, after.model, windows, outcomes, found)


def _finding(finding: Finding) -> dict[str, Any]:
    values = asdict(finding)
    return {**values, "severity": str(finding.severity), "confidence": str(finding.confidence)}


def _patient(patient: Patient) -> dict[str, Any]:
    reading, window = patient.reading, patient.windows[0]
    return {
        "engine": patient.engine,
        "model": patient.model,
        "instrumented": reading.instrumented,
        "offloads": reading.offloads,
        "restarted": window.restarted,
        "seconds": window.seconds,
        "numbers": numbers(window),
        "checks": [
            {"kind": item.kind, "status": item.status, "reason": item.reason}
            for item in patient.outcomes
        ],
        "not_used": [asdict(item) for item in unused(window)],
        "connector": reading.other,
    }


def numbers(window: Window) -> dict[str, float | None]:
    """The numbers that matter, as they rose in the window; None where there is no series."""
    names = ("store_bytes", "load_bytes", "external_queries", "external_hits", "local_queries",
             "local_hits", "preemptions", "expected_tokens", "servable_tokens",
             "served_tokens", "tier_queries", "tier_hits", "promotion_failures",
             "stores_skipped", "lookups", "deferred_lookups", "other_stored", "other_loaded",
             SOURCE + "local_compute", SOURCE + "local_cache_hit",
             SOURCE + "external_kv_transfer")  # fmt: skip
    rises: dict[str, float | None] = {
        name: window.rise(name) if window.has(name) else None for name in names
    }
    resident = window.after.resident_chunks
    rises |= {f"waiting.{name}": count for name, count in window.after.waiting.items()}
    return rises | {
        "gpu_cache_usage": window.usage,
        "resident_chunks": sum(resident.values()) if resident else None,
        "capacity_chunks": window.after.capacity_chunks,
    }


def text(report: Report) -> str:
    """The report as a person reads it, and pastes it into a bug report."""
    lines = [f"kvlens doctor {__version__}: {report.source}"]
    for patient in report.patients:
        lines += ["", *_engine_lines(patient)]
        for number, finding in enumerate(patient.findings, start=1):
            lines += ["", *_finding_lines(number, finding)]
        if not patient.findings:
            lines += ["", "  Nothing wrong was found."]
        lines += ["", *_check_lines(patient)]
    return "\n".join(lines)


def _engine_lines(patient: Patient) -> list[str]:
    reading, window = patient.reading, patient.windows[0]
    rises = numbers(window)
    kind = _kind(reading)
    over = f" over {window.seconds:,.0f} s" if window.seconds is not None else ""
    again = ", restarted in between" if window.restarted else ""
    lines = [f"Engine {patient.engine}, model {patient.model or '?'}: {kind}{over}{again}"]
    if not reading.offloads:
        return [*lines, "  No KV offloading: no KV connector's metrics, vLLM's or other, count."]
    lines.append(
        f"  offload: {_moved(window)}; {signs.hits(window):,.0f} of "
        f"{rises['external_queries'] or 0:,.0f} tokens asked for were hits"
    )
    usage = rises["gpu_cache_usage"]
    lines.append(
        f"  GPU cache: {percent(rises['local_hits'] or 0, rises['local_queries'] or 0)} hits, used "
        f"to {'?' if usage is None else f'{usage:.0%}'}; {rises['preemptions'] or 0:,.0f} "
        f"preemptions"
    )
    if reading.instrumented:
        room = rises["capacity_chunks"]
        lines.append(
            f"  tier: {rises['resident_chunks'] or 0:,.0f} chunks resident of "
            f"{'?' if room is None else f'{room:,.0f}'}; {rises['served_tokens'] or 0:,.0f} of "
            f"{rises['expected_tokens'] or 0:,.0f} expected tokens served"
        )
    return lines


def _kind(reading: Reading) -> str:
    """What kind of server it is."""
    if reading.instrumented:
        version, vllm, lookup = (
            reading.info.get(name, "?") for name in ("version", "vllm_version", "lookup")
        )
        return f"kvlens {version} on vLLM {vllm}, lookup {lookup}"
    if not reading.vllm:
        return reading.other
    what = f"vLLM with {reading.other}" if reading.other else "stock vLLM"
    return f"{what} (what was resident cannot be seen from outside)"


def _moved(window: Window) -> str:
    """What was stored and loaded, as far as a series tells."""
    if not signs.tells_stores(window):
        return "no series tells what was stored"
    if window.after.stores_elsewhere and not window.has("store_bytes"):
        unit = connectors.UNITS.get(window.after.other, "chunks")
        stored, loaded = (window.rise(name) for name in (connectors.STORED, connectors.LOADED))
        return f"{stored:,.0f} {unit} stored, {loaded:,.0f} loaded"
    stored, loaded = window.rise("store_bytes"), window.rise("load_bytes")
    return f"{size(stored)} stored, {size(loaded)} loaded"


def _finding_lines(number: int, finding: Finding) -> list[str]:
    head = f"  {number}. {finding.severity.upper()} {finding.kind} (confidence: "
    head += f"{finding.confidence}{f', status: {finding.status}' if finding.status else ''})"
    evidence = ", ".join(f"{name}={value}" for name, value in finding.evidence.items())
    summary = finding.summary[0].upper() + finding.summary[1:]
    return [
        head, f"     {summary}.", f"     Evidence: {evidence}",
        f"     Next step: {finding.next_step}",
    ]  # fmt: skip


def _check_lines(patient: Patient) -> list[str]:
    marks = {FINE: "fine", FOUND: "FOUND"}
    return [
        "  Checked:",
        *(
            f"    {marks.get(item.status, 'unknown'):8}{item.kind}: {item.reason}"
            for item in patient.outcomes
        ),
        *_unused_lines(patient),
    ]


def _unused_lines(patient: Patient) -> list[str]:
    left_out = unused(patient.windows[0])
    return (
        ["  Not used:", *(f"    {item.series}: {item.reason}" for item in left_out)]
        if (left_out)
        else []
    )
