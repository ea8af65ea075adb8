"""The rule files, by the real promtool, and what holds for every alert."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from stack import ROOT, tool

from grafana import alerts, recording, rule_tests
from grafana.rulefile import dump, shorten
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.telemetry.semconv import IncidentKind

RULES = ROOT / "grafana" / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"
NAMES = {
    "KVOffloadZeroHit",
    "KVOffloadLostTokens",
    "KVOffloadStoreGaps",
    "KVOffloadCapacityThrash",
    "KVOffloadDeferralStall",
    "KVOffloadSlowReload",
    "KVOffloadStoreFailures",
    "KVOffloadUnsafeBoundary",
    "KVLensTelemetryLost",
}
CASES = {
    case.name: case
    for part in ("zero_hit", "lost_tokens", "losses", "faults", "telemetry", "days")
    for case in getattr(rule_tests, part)()
}


NEWER = ROOT / ".build" / "prometheus-3" / "usr" / "bin" / "promtool"
"""Of Prometheus 3, where set-up could have it (scripts/newer_prometheus.py)."""
PROMTOOLS = [None, *([NEWER] if NEWER.is_file() else [])]


def promtool(*arguments: str | Path, by: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(by or tool("promtool", "KVLENS_TEST_PROMTOOL")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def version(of: Path | None) -> str:
    return "newer" if of else "system"


@pytest.mark.parametrize("by", PROMTOOLS, ids=version)
def test_rules_are_valid(by: Path | None) -> None:
    run = promtool("check", "rules", *sorted(RULES.glob("*.yml")), by=by)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("SUCCESS") == 2


@pytest.mark.parametrize("by", PROMTOOLS, ids=version)
@pytest.mark.parametrize("name", sorted(rule_tests.files([])))
def test_alerts_fire_and_stay_silent_as_they_must(name: str, by: Path | None) -> None:
    run = promtool("test", "rules", RULES / "tests" / name, by=by)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_wrong_rule_fails_its_test(tmp_path: Path) -> None:
    """The tests test: with a threshold changed, promtool says so."""
    groups = yaml.safe_load(dump({"groups": [*recording.groups(), *alerts.groups()]}))
    text = dump(groups).replace(">= 256", ">= 1")
    (tmp_path / "rules.yml").write_text(text)
    (tmp_path / "losses.test.yml").write_text(
        dump(rule_tests.files(["rules.yml"])["zero-hit.test.yml"])
    )
    run = promtool("test", "rules", tmp_path / "losses.test.yml")
    assert run.returncode == 1
    assert "KVOffloadZeroHit" in run.stdout + run.stderr


def test_all_alerts_are_there() -> None:
    assert {item.name for item in alerts.alerts()} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_alert_is_tested_in_every_way(name: str) -> None:
    firing = [case for case in CASES.values() if any(name in due for due in case.firing.values())]
    silent = [
        case for case in CASES.values() if not any(name in due for due in case.firing.values())
    ]
    assert firing
    assert any("reset" in case.name or "restart" in case.name for case in firing + silent)
    assert any(not case.series for case in silent), "absent series"


@pytest.mark.parametrize("number", ["N1", "N3", "N4", "N5", "N7", "N9"])
def test_field_cases_that_must_stay_silent(number: str) -> None:
    cases = [case for name, case in CASES.items() if name.startswith(f"{number}:")]
    assert cases
    assert all(not due for case in cases for due in case.firing.values())


def test_alerts_say_what_a_reader_needs() -> None:
    for item in alerts.alerts():
        rule = item.rule()
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["labels"]["incident_kind"] in {str(kind) for kind in IncidentKind}
        page = rule["annotations"]["runbook_url"].rpartition("/")[2]
        assert (RUNBOOKS / page).is_file(), page
        assert "$labels.instance" in rule["annotations"]["summary"]
        number = "{{ $value" in rule["annotations"]["summary"]
        assert number or item.labels.get("form") == "absent", item.name


def test_recording_rules_are_named_by_convention() -> None:
    pattern = re.compile(r"[a-z_]+:(kvlens|vllm)_[a-z_]+:[a-z_]+[0-9]*[smhd]?")
    for name in recording.recorded():
        assert pattern.fullmatch(name), name


def test_numbers_are_the_detectors() -> None:
    limits = Thresholds()
    zero = alerts.zero_hit()
    assert f">= {limits.zero_hit_requests}" in zero[0].expr
    assert f">= {limits.scrape_queries_tokens}" in zero[1].expr
    assert f"> {limits.capacity_thrash_share}" in alerts.losses()[1].expr


def test_shortened_rules_keep_their_thresholds() -> None:
    groups = alerts.groups()
    quick = shorten(groups, 60)
    for before, after in zip(groups[0]["rules"], quick[0]["rules"], strict=True):
        outside = re.compile(r"\[[^]]+\]|offset \d+[smhd]")
        assert outside.sub("", after["expr"]) == outside.sub("", before["expr"])
        assert after["annotations"] == before["annotations"]
    assert quick[0]["rules"][0]["for"] == "1s"
    assert "[10s]" in quick[0]["rules"][0]["expr"]
