from __future__ import annotations

import json
import random
from pathlib import Path

import factory
import msgspec
import pytest
from flown import fly

from kvlens.dashboard.cli import main
from kvlens.dashboard.detect.panel import Observed, Panel, all_detectors
from kvlens.dashboard.flight.replay import CORRECTED, EXACT, MODES, STOCK, replay
from kvlens.telemetry.records import (
    Correction,
    EngineInfo,
    GroupLayout,
    GroupLookup,
    Layout,
    Lookup,
    Range,
    RequestRecord,
)
from kvlens.telemetry.verdict.oracle import is_servable


def group(kv_group: int, kind: str, chunk: int, **more: object) -> GroupLayout:
    fields = {
        "kv_group": kv_group,
        "group_kind": kind,
        "tokens_per_block": chunk,
        "tokens_per_chunk": chunk,
        **more,
    }
    return msgspec.convert(fields, GroupLayout)


def engine_of(*groups: GroupLayout, **more: object) -> EngineInfo:
    layout = Layout(groups=list(groups), tokens_per_hash=1)
    return msgspec.structs.replace(factory.engine(), layout=layout, **more)


def looked(
    engine: EngineInfo,
    tokens: int,
    resident: dict[int, list[Range]],
    served: int = 0,
    local: int = 0,
    **more: object,
) -> RequestRecord:
    """A record of one lookup over what was resident, served as told."""
    groups = [
        GroupLookup(
            kv_group=g.kv_group,
            group_kind=g.group_kind,
            tokens_per_chunk=g.tokens_per_chunk,
            resident=resident.get(g.kv_group, []),
            pass_number=1,
            width=1,
        )
        for g in engine.layout.groups
    ]
    lookup = Lookup(
        time=factory.START,
        seconds=1e-5,
        local_tokens=local,
        num_tokens=tokens,
        attempt=1,
        exit="served" if served else "vetoed",
        result=served,
        groups=groups,
    )
    values = {"served_tokens": served, "lookups": [lookup], "prompt_tokens": tokens, **more}
    return msgspec.structs.replace(factory.lost_record(0), **values)


def test_f1_every_group_popped() -> None:
    info = engine_of(
        group(0, "full_attention", 2128, drafter_used=True),
        *[group(g, "mamba", 2128, drafter_used=True) for g in (1, 2, 3)],
        block_drop=True,
        widens=False,
    )
    for stored, stock in ((1, 0), (2, 1), (3, 2), (17, 16)):
        held = {g: [(0, stored - 1)] for g in range(4)}
        outcome = replay(looked(info, 2128 * 20, held), info)
        assert outcome is not None
        assert outcome.would_serve == {
            STOCK: stock * 2128,
            CORRECTED: stored * 2128,
            EXACT: stored * 2128,
        }
        assert outcome.saved(EXACT) == stored * 2128
        assert not outcome.unsafe


def test_a_corrected_engine_knows_what_stock_would_have_served() -> None:
    corrections = [
        Correction(name=name, state="active") for name in ("drafter_fallback", "pop_widening")
    ]
    info = engine_of(
        group(0, "full_attention", 512),
        group(1, "mamba", 512),
        block_drop=True,
        corrections=corrections,
    )
    outcome = replay(looked(info, 1100, {0: [(0, 1)], 1: [(0, 1)]}, served=1024), info)
    assert outcome is not None
    assert outcome.would_serve == {STOCK: 512, CORRECTED: 1024, EXACT: 1024}


def test_f13_an_unsafe_boundary_is_served_by_stock_alone() -> None:
    info = engine_of(group(0, "full_attention", 16), group(1, "mamba", 64))
    record = looked(info, 300, {0: [(0, 10)], 1: [(0, 3)]}, served=176, verdict="unsafe")
    outcome = replay(record, info)
    assert outcome is not None
    assert outcome.would_serve == {STOCK: 176, CORRECTED: 128, EXACT: 128}
    assert outcome.unsafe
    assert outcome.saved(EXACT) == -48


def test_exact_serves_what_corrected_misses_and_caps_hold() -> None:
    # A window of 65 needs one chunk of 64; vLLM's search asks for two.
    info = engine_of(group(0, "full_attention", 64), group(1, "sliding_window", 64, window=65))
    record = looked(info, 300, {0: [(0, 3)], 1: [(3, 3)]})
    outcome = replay(record, info)
    assert outcome is not None
    assert (outcome.would_serve[CORRECTED], outcome.would_serve[EXACT]) == (0, 256)
    record.lookups[0].cap = record.lookups[0].load_cap = 100
    capped = replay(record, info)
    assert capped is not None
    assert capped.would_serve[EXACT] == 0


def test_a_partial_tail_is_taken_as_served_and_cut_ranges_are_a_lower_bound() -> None:
    info = engine_of(group(0, "full_attention", 64))
    record = looked(info, 300, {0: [(0, 3)]}, served=272)
    record.lookups[0].exit = "partial_tail"
    record.lookups[0].groups[0].truncated = True
    outcome = replay(record, info)
    assert outcome is not None
    assert set(outcome.would_serve.values()) == {272}
    assert outcome.lower_bound


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "skipped"},
        {"lookups": []},
        {
            "lookups": [
                msgspec.structs.replace(
                    looked(factory.engine(), 1100, {}).lookups[0], num_tokens=10**15
                )
            ]
        },
        {
            "lookups": [
                msgspec.structs.replace(
                    looked(factory.engine(), 1100, {}).lookups[0],
                    groups=[
                        GroupLookup(
                            kv_group=0,
                            group_kind="full_attention",
                            tokens_per_chunk=512,
                            raw_hits=2,
                            pass_number=1,
                        )
                    ],
                )
            ]
        },
    ],
)
def test_a_record_that_tells_too_little_is_not_replayed(change: dict[str, object]) -> None:
    info = factory.engine()
    record = looked(info, 1100, {g: [(0, 1)] for g in range(3)})
    assert replay(record, info) is not None
    assert replay(msgspec.structs.replace(record, **change), info) is None


def test_what_exact_serves_is_servable_and_no_mode_that_is_safe_serves_more() -> None:
    rng = random.Random(7)
    for _ in range(300):
        kinds = rng.choices(["full_attention", "sliding_window", "mamba"], k=rng.randint(1, 3))
        groups = [
            group(
                i,
                kind,
                rng.choice([4, 8, 16]),
                drafter_used=rng.random() < 0.3,
                window=rng.randint(1, 40) if kind == "sliding_window" else None,
            )
            for i, kind in enumerate(kinds)
        ]
        info = engine_of(*groups)
        tokens = rng.randint(1, 120)
        local = rng.randrange(tokens) // 16 * 16
        resident: dict[int, list[Range]] = {}
        for one in groups:
            first = rng.randint(0, 6)
            resident[one.kv_group] = [(0, first), (first + 2, rng.randint(first + 2, 40))]
        outcome = replay(looked(info, tokens, resident, local=local), info)
        assert outcome is not None

        def holds(kv_group: int, chunk: int, held: dict[int, list[Range]] = resident) -> bool:
            return any(first <= chunk <= last for first, last in held[kv_group])

        exact, corrected = outcome.would_serve[EXACT], outcome.would_serve[CORRECTED]
        for served in (exact, corrected):
            safe = is_servable(info.layout, holds, local, tokens, local + served)
            assert not served or safe
        assert corrected <= exact


@pytest.fixture
def night(tmp_path: Path) -> Path:
    """An engine that loses every request, and one that serves."""
    bad, good = factory.engine(), factory.engine("b", "inc-b", affected=False)
    fly(tmp_path / "rec", bad, [factory.lost_record(n) for n in range(6)])
    fly(tmp_path / "rec", good, [factory.served_record(n, good) for n in range(4)])
    return tmp_path / "rec"


def test_the_report_of_a_bad_night(night: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(night)]) == 1
    said = capsys.readouterr()
    rows = {" ".join(row[:-4]): row[-4:] for row in map(str.split, said.out.splitlines()) if row}
    assert rows["lost, drafter_fallback"] == ["6", "0", "6,144", "+6,144"]
    assert rows["full"] == ["4", "4,096", "4,096", "+0"]
    assert rows["all"] == ["10", "4,096", "10,240", "+6,144"]
    assert "6 of 10 requests would have been served more by the exact search." in said.out
    assert "critical zero_hit of node-a:0" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.err == ""


def test_incidents_are_those_of_a_dashboard_and_the_same_each_time(
    night: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for name in ("one.json", "two.json"):
        assert main(["replay", str(night), "--json", str(tmp_path / name)]) == 1
        texts.append((tmp_path / name).read_text())
    capsys.readouterr()
    assert texts[0] == texts[1]
    document = json.loads(texts[0])
    bad = factory.engine()
    panel = Panel(all_detectors())
    panel.observe([Observed(factory.lost_record(n)) for n in range(6)], lambda _: bad)
    found = document["incidents"]
    assert {one["id"] for one in found} == panel.changed.keys()
    assert found
    assert {one["close_reason"] for one in found} == {"engine_gone"}
    assert document["would_serve"] == {"stock": 4096, "corrected": 10240, "exact": 10240}
    assert len(document["requests"]) == 10
    assert {tuple(one["would_serve"]) for one in document["requests"]} == {MODES}


def test_a_good_recording_is_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = factory.engine(affected=False)
    fly(tmp_path, good, [factory.served_record(n, good) for n in range(20)])
    assert main(["replay", str(tmp_path), "--lookup", "corrected"]) == 0
    out = capsys.readouterr().out
    assert "BY CORRECTED" in out
    assert "No incident." in out


def test_an_unsafe_request_alone_is_critical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = engine_of(group(0, "full_attention", 16), group(1, "mamba", 64))
    fly(tmp_path, info, [looked(info, 300, {0: [(0, 10)], 1: [(0, 3)]}, 176, verdict="unsafe")])
    assert main(["replay", str(tmp_path)]) == 1
    assert (
        "Served an unsafe boundary (the output may be wrong): 1 request." in capsys.readouterr().out
    )


def test_a_torn_recording_is_replayed_as_far_as_it_goes(
    night: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in night.iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    assert main(["replay", str(night)]) == 1
    said = capsys.readouterr()
    assert "of 8 requests" in said.out
    assert said.err.count("was not written to its end") == 2


def test_json_that_cannot_be_written_is_exit_code_2(
    night: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(night), "--json", str(night)]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_setting_that_cannot_be_is_exit_code_2(
    night: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_PORT", "many")
    assert main(["replay", str(night)]) == 2
    assert "port" in capsys.readouterr().err
