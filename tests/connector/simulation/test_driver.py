"""What the simulated engine does: preemption, aborts, speculation, time, determinism."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from vllm.config.cache import MambaCacheMode

from kvlens.connector import compat, engine_facts
from kvlens.connector.config import LookupMode
from kvlens.connector.simulation import report
from kvlens.connector.simulation.driver import Result, simulate
from kvlens.connector.simulation.medium import SimulationError
from kvlens.connector.simulation.reading import parse
from kvlens.connector.simulation.recording import START_NS

FULL = "{kind: full_attention, tokens_per_block: 16}"
WINDOW = "{kind: sliding_window, tokens_per_block: 16, window: 64}"
CHUNKED = "{kind: chunked_local, tokens_per_block: 16, attention_chunk: 64}"
MAMBA = "{kind: mamba, tokens_per_block: 64}"
ONCE = "{prompt: {seed: 1, tokens: 300}}"
AGAIN = f"[{ONCE}, {{reset_gpu_cache: true}}, {ONCE}]"


def run(steps: str, groups: tuple[str, ...] = (FULL,), more: str = "", mode: str = "corrected"):
    text = f"layout: {{groups: [{', '.join(groups)}]}}\nsteps: {steps}\n{more}\n"
    return simulate(parse(text), "test", LookupMode(mode))


def served(result: Result) -> list[int]:
    return [record.served_tokens for record in result.requests]


@pytest.mark.parametrize("scheduling", ["false", "true"])
@pytest.mark.parametrize("speculative", ["none", "eagle", "mtp", "eagle\nlookahead_hashes: false"])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, MAMBA), (FULL, CHUNKED)])
def test_a_prompt_comes_back_from_the_tier(groups, speculative, scheduling):
    # EAGLE's pop and chunked local attention do not go together; from 0.34 on nothing is popped.
    pops = "false" in speculative or (
        speculative != "none" and not engine_facts.hashes_look_ahead()
    )
    if CHUNKED in groups and (pops or not compat.offloads_chunked_local()):
        with pytest.raises(SimulationError, match=r"vLLM(.s scheduler failed| refuses)"):
            run(AGAIN, groups, f"speculative: {speculative}")
        return
    result = run(
        AGAIN, groups, f"speculative: {speculative}\nasync_scheduling: {scheduling}\n"
        "accepted_tokens: [2, 0, 1]\nmax_batched_tokens: 64",
    )  # fmt: skip
    cold, again = result.requests
    assert (cold.verdict, cold.output_tokens, cold.finish_reason) == ("cold", 8, "length")
    assert again.verdict == "full"
    assert again.served_tokens >= 192
    assert again.output_tokens == 8
    assert [load.completed_at is not None for load in again.loads] == [True]


@pytest.mark.skipif(
    not engine_facts.hashes_look_ahead(), reason="this vLLM's hashes do not look ahead"
)
def test_hashes_look_ahead_with_drafts_unless_switched_off():
    groups = (FULL.replace("}", ", drafter: true}"), MAMBA.replace("64", "16"))
    by_default, on, off = (
        run(AGAIN, groups, f"speculative: eagle\nretention_interval: all\n{more}")
        for more in ("", "lookahead_hashes: true", "lookahead_hashes: false")
    )
    assert [result.engine.layout.hash_lookahead for result in (by_default, on, off)] == [1, 1, 0]
    assert [group.drafter_used for group in on.engine.layout.groups] == [False, False]
    assert [group.drafter_used for group in off.engine.layout.groups] == [True, False]
    # 18 chunks; the last one of the drafter group is popped only where its hash proves nothing.
    assert served(by_default) == served(on) == [0, 288]
    assert served(off) == [0, 272]
    popped = [group.popped for group in by_default.requests[1].lookups[-1].groups]
    widths = [group.width for group in by_default.requests[1].lookups[-1].groups]
    assert popped == [0, 0]
    assert widths == [18, 18]


def test_lookahead_hashes_where_there_are_none_are_refused():
    with pytest.raises(SimulationError, match=r"`lookahead_hashes` needs vLLM 0\.34 or newer"):
        run(AGAIN, (FULL,), "lookahead_hashes: true")


def test_equal_scenarios_give_equal_records():
    first, second = run(AGAIN, (FULL, WINDOW)), run(AGAIN, (FULL, WINDOW))
    assert report.as_json([(first, [])]) == report.as_json([(second, [])])
    assert first.requests[0].arrival_time == START_NS / 1e9


def test_the_json_is_the_documented_one():
    (scenario,) = msgspec.json.decode(report.as_json([(run(AGAIN), [])]))
    assert scenario.keys() == {
        "scenario", "vllm_version", "lookup", "corrections", "requests", "incidents",
    }  # fmt: skip
    assert (scenario["scenario"], scenario["lookup"]) == ("test", "corrected")
    record = scenario["requests"][1]
    assert record["verdict"] == "full"
    assert {"prompt_tokens", "local_tokens", "served_tokens", "servable_tokens",
            "expected_tokens", "lost_tokens", "cause",
            "vetoing_group"} <= record.keys()  # fmt: skip
    group = record["lookups"][0]["groups"][0]
    assert (group["kv_group"], group["width"], group["raw_hits"], group["popped"]) == (0, 18, 18, 0)
    assert group["resident"] == [[0, 17]]


def test_the_table_has_a_row_per_request_and_says_what_went_wrong():
    text = report.as_text(run("[{prompt: {seed: 1, tokens: 300}, times: 3, unique: true}]"), [])
    assert text.startswith("test: vLLM ")
    assert "r1 to r3     300" in text
    lost = run("[{prompt: {seed: 1, tokens: 300}, drop_chunks: {0: [3]}}, {reset_gpu_cache: true}, "
               "{prompt: {seed: 1, tokens: 300}}]")  # fmt: skip
    text = report.as_text(lost, [])
    assert "partial  store_gap" in text
    assert "\n  r2: 48 of 288 reusable tokens were served" in text
    assert "\n    next: " in text


def test_few_gpu_blocks_preempt_and_all_requests_still_end():
    result = run(
        "[{prompt: {seed: 1, tokens: 200}, times: 6, unique: true, together: true, "
        "max_tokens: 120}]",
        more="gpu_blocks: 60",
    )
    assert sum(record.preemptions for record in result.requests) > 0
    assert {record.output_tokens for record in result.requests} == {120}


def test_an_aborted_request_ends_when_the_client_gives_up():
    result = run(
        "[{prompt: {seed: 1, tokens: 300}, max_tokens: 1000, abort_after: 0.5}]", (FULL, WINDOW)
    )
    (record,) = result.requests
    assert record.finish_reason == "abort"
    assert 0.5 <= record.finish_time - record.arrival_time < 0.6


def test_transfers_take_their_steps():
    quick, slow = (
        run(AGAIN, more=f"transfer_steps: {{load: {steps}}}\nstep_seconds: 0.1")
        for steps in (1, 20)
    )
    assert [quick.requests[1].loads[0].latency, slow.requests[1].loads[0].latency] == [
        pytest.approx(0.1), pytest.approx(2.0),
    ]  # fmt: skip


def test_limits_on_what_is_offloaded_and_loaded():
    capped = AGAIN.replace("tokens: 300}}]", "tokens: 300}, max_load_tokens: 100}]")
    stored = AGAIN.replace("tokens: 300}}, {r", "tokens: 300}, max_offload_tokens: 160}, {r")
    assert served(run(stored)) == [0, 160]
    # Releases before max_load_tokens exists load all that there is.
    assert served(run(capped))[1] in (96, 288)


def test_offloading_of_generated_tokens_and_the_turn_after():
    steps = ("[{prompt: {seed: 1, tokens: 100}, max_tokens: 60}, {reset_gpu_cache: true}, "
             "{prompt: {seed: 2, tokens: 200, continues: 1}}]")  # fmt: skip
    assert served(run(steps, more="offload_prompt_only: false")) == [0, 144]
    assert served(run(steps)) == [0, 96]


def test_the_gpu_cache_serves_until_it_is_emptied_and_the_tier_too():
    result = run("[{prompt: {seed: 1, tokens: 300}, times: 2}, {reset_gpu_cache: true}, "
                 "{reset_offload_cache: true}, {prompt: {seed: 1, tokens: 300}}]")  # fmt: skip
    assert [r.local_tokens for r in result.requests] == [0, 288, 0]
    assert [r.verdict for r in result.requests] == ["cold", "local", "cold"]


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        ("[{prompt: {seed: 1, tokens: 300}}]", "gpu_blocks: 8\npatience: 5",
         r"steps\[0\]: r1 did not end within 5 s; raise gpu_blocks"),
        ("[{prompt: {seed: 1, tokens: 300, continues: 2}}]", "",
         "there is no earlier request 2 to continue"),
        ("[{store: {seed: 1, tokens: 300}}]", "capacity_chunks: 4",
         r"no room for 18 chunks; raise capacity_chunks \(4 now\)"),
    ],
)  # fmt: skip
def test_a_scenario_that_cannot_go_on_says_why(steps, more, said):
    with pytest.raises(SimulationError, match=said):
        run(steps, more=more)


def test_mamba_cache_mode_all_runs_where_vllm_has_it():
    state = "{kind: mamba, tokens_per_block: 16}"
    text = f"layout: {{mamba_cache_mode: all, groups: [{FULL}, {state}]}}\nsteps: {AGAIN}\n"
    if "all" in get_args(MambaCacheMode):
        assert simulate(parse(text), "test").requests[1].served_tokens >= 272
    else:
        with pytest.raises(SimulationError, match="mamba_cache_mode"):
            simulate(parse(text), "test")
