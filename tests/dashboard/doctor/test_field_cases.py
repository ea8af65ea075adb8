"""Field cases that are told by two pages: what must be found, and what must stay silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from metrics_pages import GB, LABELS, f16, page

from kvlens.dashboard.doctor.report import Patient, diagnose
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape.reading import read_page
from kvlens.dashboard.scrape.window import Window

PAGES = Path(__file__).parent / "pages"


def look(before: str, after: str) -> Patient:
    """Examine two pages of one engine."""
    return diagnose([Window(read_page(before)[0], read_page(after)[0])], Thresholds())


def found(patient: Patient) -> list[tuple[str, str, str]]:
    return [(f.kind, str(f.severity), str(f.confidence)) for f in patient.findings]


def real(name: str) -> Patient:
    """Pages of real servers (0.29.0, hybrid with EAGLE), shortened to the families used."""
    return look(*((PAGES / f"{name}-{part}.txt").read_text() for part in ("before", "after")))


def test_f16_a_stock_server_that_loads_nothing() -> None:
    patient = look(*f16())
    assert found(patient) == [("zero_hit", "critical", "likely")]
    finding = patient.findings[0]
    assert finding.evidence["load_bytes_series"] == "absent"
    assert finding.evidence["external_queries"] == 2_100_000
    assert finding.evidence["store_bytes"] == 600 * GB
    assert finding.next_step.startswith("Load KVLensOffloadingConnector")


def variant(**after: Any) -> Patient:
    """F16 with one thing changed on the later page (and no preemption on either)."""
    shape: dict[str, Any] = {
        "stored": 640 * GB, "external": (2_250_000, 0), "local": (4_600_000, 1_500_000),
        "usage": 0.97,
    } | after  # fmt: skip
    usage = min(0.95, shape["usage"])
    before = page(stored=40 * GB, external=(150_000, 0), local=(400_000, 130_000), usage=usage)
    return look(before, page(**shape))


@pytest.mark.parametrize(
    "after",
    [
        {"loaded": 0},  # the series is there, at 0
        {"deprecated": True},
        {"usage": 0.9},
        {"usage": 0.4, "vllm_num_preemptions_total": 12},
        {"usage": 0.4, "vllm_kv_block_idle_before_evict_seconds_count": 12},
        {"usage": 0.4, "local": (4_600_000, 300_000)},  # local hits fell from 33 % to 4 %
    ],
)
def test_f16_in_other_guises(after: dict[str, Any]) -> None:
    assert found(variant(**after)) == [("zero_hit", "critical", "likely")]


@pytest.mark.parametrize(
    "after",
    [
        {"usage": 0.31},  # N1: nothing was ever evicted
        {"external": (2_250_000, 16)},  # it does hit
        {"loaded": 1},
        {"vllm_kv_offload_tiering_read_bytes_total": 5},  # F11: found, if not loaded yet
        {"stored": 40 * GB},  # nothing stored in between
        {"external": (150_000, 0)},  # nothing asked for
        {"external": (159_000, 0)},  # hardly
        {"local": (4_600_000, 130_000), "started": 1_796_900_000},  # N7
        {"stored": 3 * GB},  # N7: counters fell
    ],
)
def test_stock_servers_of_which_too_little_is_known(after: dict[str, Any]) -> None:
    assert found(variant(**after)) == []


def test_a_server_that_never_stored_before_has_to_be_asked_for_more() -> None:
    local = {"local": (900_000, 300_000), "usage": 0.97}
    few = page(stored=9 * GB, external=(150_000, 0), **local)  # type: ignore[arg-type]
    many = page(stored=9 * GB, external=(256_235, 0), **local)  # type: ignore[arg-type]
    assert found(look(page(), few)) == []
    assert found(look(page(), many)) == [("zero_hit", "critical", "likely")]


def test_one_of_two_engines_may_be_the_one() -> None:
    """Data parallel: each engine is judged by its own numbers."""
    second = 'engine="1",model_name="m"'
    before, after = f16()
    texts = [
        before + page(stored=GB, loaded=GB, labels=second),
        after + page(stored=9 * GB, loaded=8 * GB, external=(9e5, 8e5), labels=second),
    ]
    pairs = zip(*map(read_page, texts), strict=True)
    kinds = [[f.kind for f in diagnose([Window(*pair)], Thresholds()).findings] for pair in pairs]
    assert kinds == [["zero_hit"], []]


def test_one_of_two_models_on_one_page_may_be_the_one() -> None:
    """A gateway that puts pages together: each server counts its engines from 0."""
    healthy = 'engine="0",model_name="other"'
    before, after = f16()
    texts = (
        before + page(stored=GB, loaded=GB, external=(9e4, 8e4), labels=healthy),
        after + page(stored=90 * GB, loaded=80 * GB, external=(9e6, 8e6), labels=healthy),
    )
    pairs = zip(*map(read_page, texts), strict=True)
    found = {
        pair[1].model: [f.kind for f in diagnose([Window(*pair)], Thresholds()).findings]
        for pair in pairs
    }
    assert found == {"m": ["zero_hit"], "other": []}


def test_f16_as_open_metrics() -> None:
    def rewritten(text: str) -> str:
        lines = [line.replace("vllm:", "vllm_", 1) for line in text.splitlines()
                 if line[0] != "#"]  # fmt: skip
        return "".join(
            f"# TYPE {line.partition('{')[0].removesuffix('_total')} "
            f"{'counter' if '_total' in line else 'gauge'}\n{line}\n"
            for line in lines
            if "{" in line
        ) + "# EOF\n"  # fmt: skip

    before, after = map(rewritten, f16())
    assert found(look(before, after)) == [("zero_hit", "critical", "likely")]
    cut_off = after.replace("# EOF\n", 'x_bucket{le="1"} 3 # {trace_id="ab"} 0.5 1.5\n')
    assert found(look(before, cut_off)) == [("zero_hit", "critical", "likely")]


def test_f16_without_labels_or_under_the_older_name() -> None:
    for change in (
        lambda text: text.replace('{engine="0",model_name="m"}', ""),
        lambda text: text.replace('engine="0",', ""),
        lambda text: text.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ):
        assert found(look(*map(change, f16()))) == [("zero_hit", "critical", "likely")]


def test_n7_a_restart_shows_in_created_series_too() -> None:
    """Several API servers share a page without a start time; counters have passed the old ones."""

    def told(text: str, created: float) -> str:
        kept = "".join(line for line in text.splitlines(True) if "process_start" not in line)
        return kept + f"vllm:prefix_cache_queries_created{{{LABELS}}} {created}\n"

    before, after = f16()
    assert found(look(told(before, 100.0), told(after, 100.0))) != []
    assert found(look(told(before, 100.0), told(after, 9_000.0))) == []


def test_f17_a_persistent_tier_after_a_restart() -> None:
    tier = {"vllm_kv_offload_tiering_chunk_queries_total": 9_000.0,
            "vllm_kv_offload_tiering_chunk_hits_total": 8_800.0}  # fmt: skip
    before = page(stored=9 * GB, loaded=8 * GB, **tier)
    cold = page(stored=1 * GB, started=1_796_050_000,
                vllm_kv_offload_tiering_chunk_queries_total=5_748)  # fmt: skip
    patient = look(before, cold)
    assert found(patient) == [("hash_seed", "warning", "likely")]
    assert patient.findings[0].evidence == {"probes": 5_748, "hits": 0}
    assert "PYTHONHASHSEED" in patient.findings[0].next_step
    fixed = page(stored=1 * GB, started=1_796_050_000,
                 vllm_kv_offload_tiering_chunk_queries_total=5_872,
                 vllm_kv_offload_tiering_chunk_hits_total=5_872)  # fmt: skip
    assert found(look(before, fixed)) == []


def test_f18_the_usage_gauge_counts_transfers_not_residency() -> None:
    gauge = {"vllm_kv_offload_cpu_cache_usage_perc": 0.0}
    before = page(stored=0, local=(10_000, 5_000), **gauge)
    after = page(stored=3.43 * GB, external=(90_000, 0), local=(95_000, 50_000), **gauge)
    assert found(look(before, after)) == []


def test_f19_failures_while_loads_go_on_are_a_warning() -> None:
    before = page(stored=GB, loaded=GB, external=(1_000, 900))
    after = page(
        stored=80 * GB, loaded=72.3 * GB, external=(5_000_000, 4_900_000), usage=0.98,
        vllm_kv_offload_allocation_failure_total=7_849,
        vllm_kv_offload_tiering_promotion_allocation_failures_total=926,
        vllm_kv_offload_tiering_chunk_queries_total=41_936,
        vllm_kv_offload_tiering_chunk_hits_total=40_942,
    )  # fmt: skip
    patient = look(before, after)
    assert found(patient) == [("store_failures", "warning", "certain")]
    evidence = patient.findings[0].evidence
    assert (evidence["allocation_failures"], evidence["promotion_failures"]) == (7_849, 926)


def test_a_few_failures_are_no_finding() -> None:
    after = page(stored=2, loaded=2, vllm_kv_offload_allocation_failure_total=9)
    assert found(look(page(stored=1, loaded=1), after)) == []
    many_stores = page(stored=2, loaded=2, vllm_kv_offload_allocation_failure_total=50,
                       vllm_kv_offload_store_size_count=1_000_000)  # fmt: skip
    assert found(look(page(stored=1, loaded=1), many_stores)) == []


def test_n1_the_gpu_cache_answers() -> None:
    before = page(stored=0, usage=0.2)
    after = page(stored=80.12 * GB, external=(900_000, 0), local=(4e6, 3e6), usage=0.31)
    assert found(look(before, after)) == []


def test_n1_even_where_the_size_of_the_cache_says_otherwise() -> None:
    size = f'vllm:cache_config_info{{{LABELS},block_size="16",num_gpu_blocks="1000"}} 1\n'
    before = page(stored=GB, usage=0.2) + size
    after = page(stored=80.12 * GB, external=(900_000, 0), local=(4e6, 3e6), usage=0.31) + size
    assert found(look(before, after)) == []
    busier = page(stored=80.12 * GB, external=(900_000, 0), local=(4e6, 3e6), usage=0.6) + size
    assert found(look(before, busier)) == [("zero_hit", "critical", "likely")]


def test_n3_a_healthy_server() -> None:
    before = page(stored=0, loaded=0)
    after = page(stored=12_432_048_128, loaded=10_429_988_864, external=(160_000, 156_800),
                 local=(160_000, 0), usage=0.97)  # fmt: skip
    assert found(look(before, after)) == []


def test_n4_prompts_with_nothing_in_common() -> None:
    before = page(stored=20 * GB, external=(1e6, 0), local=(1e6, 0), usage=0.96)
    after = page(stored=60 * GB, external=(3e6, 0), local=(3e6, 0), usage=0.97)
    patient = look(before, after)
    assert found(patient) == []
    zero_hit = next(item for item in patient.outcomes if item.kind == "zero_hit")
    assert zero_hit.status == "unknown"
    assert "no prompt had a prefix in common" in zero_hit.reason


def test_n5_the_first_minutes() -> None:
    before = page(usage=0.0)
    after = page(stored=3 * GB, external=(90_000, 0), local=(100_000, 10_000), usage=0.95)
    assert found(look(before, after)) == []


def test_n8_both_counters_are_counted_once() -> None:
    before = page(stored=GB, loaded=GB, deprecated=True, external=(10, 5))
    after = page(stored=3 * GB, loaded=2 * GB, deprecated=True, external=(900_000, 800_000))
    patient = look(before, after)
    assert found(patient) == []
    assert patient.windows[0].rise("store_bytes") == 2 * GB


def test_a_real_affected_server() -> None:
    patient = real("stock")
    assert found(patient) == [("zero_hit", "critical", "certain")]
    finding = patient.findings[0]
    assert (finding.cause, finding.evidence["drafter_groups"]) == ("drafter_fallback", "0,1,2")
    assert finding.evidence["expected_tokens"] == finding.lost_tokens == 11_264


def test_a_real_affected_server_that_loses_two_thirds() -> None:
    patient = real("partly")
    assert found(patient) == [("lost_hits", "warning", "certain")]
    assert patient.findings[0].cause == "drafter_fallback"


def test_a_real_corrected_server() -> None:
    assert found(real("corrected")) == []


@pytest.mark.parametrize("name", ["stock", "partly", "corrected"])
def test_the_same_servers_without_kvlens_say_too_little(name: str) -> None:
    """Only an instrumented engine tells what was due: those repeats had no local hit."""
    pages = [
        "".join(line for line in (PAGES / f"{name}-{part}.txt").read_text().splitlines(True)
                if "kvlens_" not in line)
        for part in ("before", "after")
    ]  # fmt: skip
    assert found(look(pages[0], pages[1])) == []
