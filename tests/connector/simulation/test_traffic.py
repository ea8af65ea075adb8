"""A real trace on vLLM's own scheduler: what is served, against every boundary tried."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvlens.connector import engine_facts
from kvlens.connector.config import LookupMode
from kvlens.connector.simulation import traffic
from kvlens.connector.simulation.medium import SimulationError
from kvlens.connector.simulation.prompts import Prompts
from kvlens.connector.simulation.reading import ScenarioError, parse, read_engine
from kvlens.connector.simulation.traffic import Pace, drive
from kvlens.connector.support import vllm_version
from kvlens.dashboard.cli import main
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.sizing.reading import Trace
from kvlens.telemetry.sizing.trace import TraceRequest
from kvlens.telemetry.verdict.oracle import is_servable

TRACE = Path(__file__).resolve().parents[2] / "traces" / "conversation-2000.jsonl.gz"
LAYOUT = """
layout:  # full attention, states, and a drafter's layers in a group that nobody annotated
  groups:
    - {kind: full_attention, tokens_per_block: 512}
    - {kind: mamba, tokens_per_block: 512}
    - {kind: full_attention, tokens_per_block: 512}
speculative: mtp
"""
AFFECTED = vllm_version() < "0.30"


class Kept:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def finished(self, record: RequestRecord, engine: EngineInfo) -> None:
        self.records.append(record)

    def waiting(self, record: RequestRecord, engine: EngineInfo) -> None:
        pass

    def served(self) -> int:
        return sum(record.served_tokens for record in self.records)

    def reused(self) -> int:
        """Since 0.34 the GPU cache gives up no block beside a drafter, and answers by itself."""
        return self.served() + sum(record.local_tokens for record in self.records)


def driven(mode: str, requests: int, more: str = "", pace: Pace | None = None) -> Kept:
    trace, kept = Trace(TRACE), Kept()
    scenario = parse(f"{LAYOUT}{more}\nsteps: [{{wait: 1}}]")
    first = islice(iter(trace), requests)
    drive(first, lambda: trace.block_tokens, scenario, LookupMode(mode), pace or Pace(), kept)
    return kept


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each answered lookup: the answer, and the best boundary when each one is tried.

    What is resident is asked of vLLM's own manager, key by key.
    """
    found: list[tuple[int, int]] = []
    build = traffic.build

    def watched(scenario: Any, settings: Any) -> Any:
        engine = build(scenario, settings)
        scheduler, layout = engine.connector.connector_scheduler, engine.connector.info.layout
        ask, manager = engine.connector.get_num_new_matched_tokens, scheduler.manager
        look_up = type(manager).lookup  # past the hooks, which would take it for the engine's

        def get(request: Any, local: int, *args: Any, **kwargs: Any) -> Any:
            answer = ask(request, local, *args, **kwargs)
            if answer[0] is not None:
                context = ReqContext(req_id=request.request_id)
                groups = scheduler._req_status[request.request_id].group_states
                hits = [
                    [
                        look_up(manager, key, context) is LookupResult.HIT
                        for key in state.offload_keys
                    ]
                    for state in groups
                ]

                def holds(group: int, chunk: int) -> bool:
                    return chunk < len(hits[group]) and hits[group][chunk]

                count = request.num_tokens
                best = next(
                    (
                        boundary
                        for boundary in range(count - count % 512, local, -512)
                        if is_servable(layout, holds, local, count, boundary)
                    ),
                    local,
                )
                found.append((answer[0], best - local))
            return answer

        engine.connector.get_num_new_matched_tokens = get
        return engine

    monkeypatch.setattr(traffic, "build", watched)
    return found


@pytest.mark.parametrize("mode", ["corrected", "exact"])
@pytest.mark.parametrize("capacity", [60_000, 600])
def test_corrected_and_exact_serve_the_best_boundary(
    tried: list[tuple[int, int]], mode: str, capacity: int
) -> None:
    kept = driven(mode, 120, f"capacity_chunks: {capacity}")
    assert len(kept.records) == 120
    assert len(tried) >= 120
    assert [answer for answer, _ in tried] == [best for _, best in tried]
    assert kept.reused() > 30_000


def test_stock_loses_on_affected_releases_only() -> None:
    stock, corrected = driven("stock", 80), driven("corrected", 80)
    assert corrected.reused() > 0
    if AFFECTED:
        assert stock.served() < 0.1 * corrected.served()
        causes = Counter(record.cause for record in stock.records if record.lost_tokens)
        assert causes.most_common(1)[0][0] == "drafter_fallback"
    else:
        assert stock.served() == corrected.served()
    assert not any(record.lost_tokens for record in corrected.records)


def test_arrivals_follow_the_trace_at_any_speed() -> None:
    times = [request.time for request in islice(iter(Trace(TRACE)), 40)]
    kept = driven("corrected", 40)
    came = sorted(record.arrival_time for record in kept.records)
    assert [at - came[0] for at in came] == pytest.approx(times, abs=0.05)
    fast = driven("corrected", 40, pace=Pace(speed=10))
    came = sorted(record.arrival_time for record in fast.records)
    assert came[-1] - came[0] < times[-1] / 5


def test_outputs_are_cut() -> None:
    kept = driven("corrected", 5, pace=Pace(max_output=3))
    assert {record.output_tokens for record in kept.records} == {3}


def test_a_prompt_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(SimulationError, match="raise gpu_blocks"):
        driven("corrected", 3, "gpu_blocks: 12\npatience: 20")


def test_equal_blocks_give_equal_tokens_and_others_do_not() -> None:
    prompts = Prompts(16)
    one = prompts.tokens(TraceRequest(0, 40, 1, [7, 8, 9]))
    two = prompts.tokens(TraceRequest(0, 40, 1, [7, 2**62, 9]))
    floor = prompts.tokens(TraceRequest(0, 40, 1, [7, 8]))
    assert len(one) == len(two) == len(floor) == 40
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert floor[:32] == one[:32]


def test_an_engine_is_read_without_steps(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(LAYOUT)
    assert read_engine(file).speculative == "mtp"
    file.write_text("speculative: mtp")
    with pytest.raises(ScenarioError, match="missing field layout"):
        read_engine(file)


def test_the_command_puts_lookups_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, out = tmp_path / "engine.yaml", tmp_path / "out.json"
    engine.write_text(LAYOUT)
    command = ["simulate", "--trace", str(TRACE), "--layout", str(engine), "--requests", "60"]
    assert main([*command, "--json", str(out)]) == 0
    arms = json.loads(out.read_text())["arms"]
    assert [arm["lookup"] for arm in arms] == ["stock", "corrected", "exact"]
    assert {arm["requests"] for arm in arms} == {60}
    assert arms[1]["served_tokens"] == arms[2]["served_tokens"]
    assert (arms[1]["served_tokens"] > 0) != engine_facts.hashes_look_ahead()
    assert sum(arms[0]["verdicts"].values()) == 60
    incidents = [one["kind"] for one in arms[0]["incidents"]]
    assert incidents == (["zero_hit"] if AFFECTED else [])
    shown = capsys.readouterr().out
    assert f"{arms[1]['served_tokens']:,}" in shown
    assert ("drafter_fallback" in shown) == AFFECTED


def test_the_command_refuses_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(TRACE.read_bytes()[:300])
    assert main(["simulate", "--trace", str(cut), "--lookup", "exact"]) == 2
    assert "cut off" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(TRACE), "scenario.yaml"]) == 2
    assert "takes no scenario" in capsys.readouterr().err
    assert main(["simulate"]) == 2
    assert "give scenario files or --trace" in capsys.readouterr().err
