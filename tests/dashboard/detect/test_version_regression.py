"""``version_regression``, and how often it errs: measured on made-up fleets, with fixed seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import factory
import msgspec
from field import INFO, START, Night, served, thresholds

from kvlens.dashboard.detect.version_regression import VersionRegression
from kvlens.dashboard.model.incident import Incident
from kvlens.telemetry.records import EngineInfo, RequestRecord

OLD = msgspec.structs.replace(INFO, vllm_version="0.31.0", incarnation_id="old", started_at=START)
NEW = msgspec.structs.replace(
    INFO, vllm_version="0.32.0", incarnation_id="new", started_at=START + 5_000
)


def request(index: int, info: EngineInfo, share: float, weight: float = 1.0) -> RequestRecord:
    """A request that was served ``share`` of 1,024 tokens."""
    tokens = int(1024 * share)
    verdict = "full" if tokens == 1024 else "partial" if tokens else "lost"
    return served(
        index,
        info,
        served_tokens=tokens,
        lost_tokens=1024 - tokens,
        verdict=verdict,
        cause=None if tokens == 1024 else "window_veto",
        sampling_probability=1 / weight,
        finish_time=info.started_at + index,
    )


def traffic(
    draw: random.Random, info: EngineInfo, number: int, lost: float, sample: float = 1.0
) -> Iterator[RequestRecord]:
    """Requests of which a share ``lost`` gets nothing; served ones are sampled."""
    # The same few records again and again: half a million of them are looked at.
    nothing, everything = request(0, info, 0.0), request(0, info, 1.0, 1 / sample)
    for _ in range(number):
        if draw.random() < lost:
            yield nothing
        elif draw.random() < sample:
            yield everything


def run(draw: random.Random, old: float, new: float, sample: float = 1.0) -> list[Incident]:
    """1,000 requests of the old version, then 1,000 of the new one."""
    detector = VersionRegression()
    found = [detector.observe(r, OLD) for r in traffic(draw, OLD, 1_000, old, sample)]
    found += [detector.observe(r, NEW) for r in traffic(draw, NEW, 1_000, new, sample)]
    return [incident for incident in found if incident is not None]


def test_false_alarms_are_rarer_than_the_stated_error() -> None:
    """Two versions that lose 20 % alike: at most 1 of 1,000 may be told worse.

    400 fleets, a quarter of them sampled at 10 %: no alarm. Were the rate above
    0.75 %, that would have a probability of less than 5 %.
    """
    alarms = sum(
        bool(run(random.Random(seed), 0.2, 0.2, 0.1 if seed % 4 == 0 else 1.0))
        for seed in range(400)
    )
    assert alarms == 0


def test_a_drop_by_a_quarter_is_found_in_each_of_a_hundred_fleets() -> None:
    assert all(run(random.Random(seed), 0.05, 0.3) for seed in range(100))


def test_it_names_both_versions_and_their_shares() -> None:
    incident = run(random.Random(1), 0.0, 1.0)[0]
    assert (incident.kind, incident.severity, incident.cause) == (
        "version_regression",
        "warning",
        "window_veto",
    )
    assert incident.evidence["served_share"] == 0.0
    assert incident.evidence["last_good_served_share"] == 1.0
    assert "vLLM 0.32.0" in incident.evidence["version"]
    assert "vLLM 0.31.0" in incident.evidence["last_good_version"]
    assert incident.next_step.startswith("Go back to vLLM 0.31.0")
    assert (incident.incarnation_id, incident.engines) == ("new", [NEW.engine_id])


def test_a_better_version_is_no_regression() -> None:
    assert run(random.Random(1), 0.5, 0.0) == []


def test_the_one_after_a_bad_one_is_held_against_the_last_good() -> None:
    detector, draw = VersionRegression(), random.Random(1)
    newest = msgspec.structs.replace(
        NEW, vllm_version="0.33.0", incarnation_id="newest", started_at=START + 9_000
    )
    found: list[Incident | None] = []
    for info, lost in ((OLD, 0.0), (NEW, 0.9), (newest, 0.9)):
        found += [detector.observe(r, info) for r in traffic(draw, info, 500, lost)]
    names = {i.incarnation_id: i.evidence["last_good_version"] for i in found if i is not None}
    assert names.keys() == {"new", "newest"}
    assert all("0.31.0" in name for name in names.values())


def test_long_prompts_count_for_their_tokens() -> None:
    """One request in ten holds 90 % of the tokens, and the new version loses those."""

    def mixed(info: EngineInfo, lost: bool) -> Iterator[RequestRecord]:
        for index in range(2_000):
            long = index % 10 == 0
            record = request(index, info, 0.0 if long and lost else 1.0)
            scale = 80 if long else 1
            yield msgspec.structs.replace(
                record, expected_tokens=1024 * scale, served_tokens=record.served_tokens * scale
            )

    detector = VersionRegression()
    for record in mixed(OLD, lost=False):
        assert detector.observe(record, OLD) is None
    found = [detector.observe(record, NEW) for record in mixed(NEW, lost=True)]
    assert any(found)


def regressed() -> VersionRegression:
    """With an open incident of the new version."""
    detector, draw = VersionRegression(), random.Random(1)
    for record in traffic(draw, OLD, 500, 0.0):
        detector.observe(record, OLD)
    assert any(detector.observe(r, NEW) for r in traffic(draw, NEW, 100, 0.9))
    return detector


def test_it_closes_when_the_last_engine_of_the_version_ends() -> None:
    detector = regressed()
    assert detector.end("old", START + 9_999) is None
    gone = detector.end("new", START + 9_999)
    assert gone is not None
    assert (gone.state, gone.close_reason) == ("closed", "engine_gone")
    assert detector.end("new", START + 9_999) is None


def test_it_closes_when_the_version_has_caught_up() -> None:
    detector = regressed()
    later = [detector.observe(r, NEW) for r in traffic(random.Random(2), NEW, 20_000, 0.0)]
    last = [incident for incident in later if incident is not None][-1]
    assert (last.state, last.close_reason) == ("closed", "recovered")
    assert last.evidence["served_share"] > 0.98


def test_engines_alike_are_one_version_and_thresholds_hold() -> None:
    other = factory.engine("node-z:7", "inc-z", started_at=START + 77)
    night = Night(thresholds=thresholds(version_regression_requests=1000))
    same = next(part for part in night.panel.parts() if part.kind == "version_regression")
    assert isinstance(same, VersionRegression)
    for info in (INFO, other):
        for record in traffic(random.Random(1), info, 400, 0.0):
            same.observe(record, info)
    state = msgspec.msgpack.decode(same.dump(INFO.model) or b"")
    assert len(state["variants"]) == 1
    assert state["variants"][0]["engines"] == [INFO.engine_id, "node-z:7"]
    assert state["variants"][0]["looks"] == 0
