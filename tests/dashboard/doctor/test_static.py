from __future__ import annotations

import pytest
from metrics_pages import page

from kvlens.dashboard.doctor.report import diagnose
from kvlens.dashboard.doctor.static import layout_of, shortest_served
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape.findings import Finding
from kvlens.dashboard.scrape.reading import read_page
from kvlens.dashboard.scrape.window import Window

F6 = "0:full_attention/12288,1:mamba/1536"


def instrumented(
    layout: str,
    drafters: str = "",
    *,
    lookup: str = "corrected",
    prompts: dict[str, int] | None = None,
    capacity: int = 1_000_000,
    labels: str = "",
) -> str:
    """A page of an engine with kvlens; ``prompts`` are cumulative counts by edge."""
    own = 'engine="0",model_name="m"'
    lines = [
        f"kvlens_expected_tokens_total{{{own}}} 0",
        f"kvlens_capacity_chunks{{{own}}} {capacity}",
        f'kvlens_info{{{own},version="0.1.0",vllm_version="0.32.0",lookup="{lookup}",'
        f'layout="{layout}",drafter_groups="{drafters}"{labels}}} 1',
        *(f'vllm:request_prompt_tokens_bucket{{{own},le="{edge}"}} {count}'
          for edge, count in (prompts or {}).items()),
    ]  # fmt: skip
    return page(stored=1, loaded=1) + "\n".join(lines) + "\n"


def findings(text: str, before: str | None = None) -> list[Finding]:
    reading = read_page(text)[0]
    window = Window(read_page(before or text)[0], reading)
    return diagnose([window], Thresholds()).findings


def test_f6_prompts_that_no_boundary_fits() -> None:
    prompts = {"10000.0": 60, "20000.0": 100, "+Inf": 100}
    (finding,) = findings(instrumented(F6, prompts=prompts))
    assert (finding.kind, str(finding.severity)) == ("chunk_granularity", "warning")
    assert finding.summary.startswith("prompts under 12,288 tokens can never be served")
    assert "60.0% of the prompts" in finding.summary
    assert finding.evidence["chunk_tokens"] == [1536, 12288]
    assert "block_size" in finding.next_step


def test_f6_without_traffic_it_is_still_true_and_with_long_prompts_no_matter() -> None:
    assert [f.kind for f in findings(instrumented(F6))] == ["chunk_granularity"]
    long = {"10000.0": 1, "20000.0": 100, "+Inf": 100}
    assert findings(instrumented(F6, prompts=long)) == []


@pytest.mark.parametrize(
    "layout",
    [
        "0:full_attention/512,1:mamba/512",
        "0:full_attention/16,1:mamba/64",
        "0:full_attention/12288",
        "nonsense",
        "0:full_attention/zero",
        "",
    ],
)
def test_ordinary_layouts_are_fine(layout: str) -> None:
    assert findings(instrumented(layout)) == []


def test_shortest_served_prompt_by_definition() -> None:
    def shortest(layout: str, drafters: str = "") -> int:
        made = layout_of(read_page(instrumented(layout, drafters))[0])
        assert made is not None
        return shortest_served(made)

    assert shortest("0:full_attention/16") == 16
    assert shortest("0:full_attention/16,1:mamba/64") == 65  # the last token is computed anew
    assert shortest("0:mamba/1536,1:mamba/1024") == 3073  # their states meet at 3,072
    assert shortest("0:full_attention/16", "0") == 32  # one to pop


def test_every_group_a_drafter_is_the_fingerprint() -> None:
    both = "0:full_attention/512,1:mamba/512"
    (finding,) = findings(instrumented(both, "0,1"))
    assert (finding.kind, str(finding.confidence)) == ("drafter_fallback", "likely")
    assert finding.evidence["drafter_groups"] == "0,1"
    assert findings(instrumented(both, "0")) == []
    assert findings(instrumented("0:full_attention/512", "0")) == []


def test_f9_a_pool_smaller_than_the_longest_prompt() -> None:
    prompts = {"5000.0": 10, "10000.0": 11, "+Inf": 11}
    layout = "0:full_attention/66,1:mamba/66"
    (finding,) = findings(instrumented(layout, prompts=prompts, capacity=43))
    assert (finding.kind, finding.evidence["slots_needed"]) == ("capacity", 76)
    assert "it has 43" in finding.summary
    assert findings(instrumented(layout, prompts=prompts, capacity=76)) == []


@pytest.mark.parametrize(
    ("labels", "kinds"),
    [
        (',hash_seed="random",persistent_tier="true"', ["hash_seed"]),
        (',hash_seed="fixed",persistent_tier="true"', []),
        (',hash_seed="random",persistent_tier="false"', []),
    ],
)
def test_f17_as_the_engine_tells_it(labels: str, kinds: list[str]) -> None:
    assert [f.kind for f in findings(instrumented("0:mamba/16", labels=labels))] == kinds


def test_f17_as_the_hash_algorithm_suggests() -> None:
    config = 'vllm:cache_config_info{engine="0",prefix_caching_hash_algo="%s"} 1\n'
    tier = page(stored=1, vllm_kv_offload_tiering_chunk_queries_total=5)
    (finding,) = findings(tier + config % "xxhash")
    assert (finding.kind, str(finding.confidence)) == ("hash_seed", "guess")
    assert findings(tier + config % "sha256") == []
    assert findings(page(stored=1) + config % "xxhash") == []


def test_f20_layouts_that_stock_search_is_not_safe_with() -> None:
    layout = "0:full_attention/3584,1:full_attention/4,2:mamba/3584,3:sliding_window/64"
    prompts = {"5000.0": 0, "10000.0": 9, "+Inf": 9}
    (finding,) = findings(instrumented(layout, lookup="stock", prompts=prompts))
    assert (finding.kind, str(finding.severity)) == ("unsafe_boundary", "warning")
    assert findings(instrumented(layout, lookup="exact", prompts=prompts)) == []


@pytest.mark.parametrize(
    ("series", "kind", "severity"),
    [
        ('kvlens_requests_total{%s,verdict="unsafe"} 1', "unsafe_boundary", "critical"),
        ('kvlens_requests_total{%s,verdict="stalled"} 1', "deferral_stall", "warning"),
        ('kvlens_requests_total{%s,verdict="stalled"} 3', "deferral_stall", "critical"),
        ('kvlens_lost_tokens_total{%s,cause="store_gap"} 512', "store_gaps", "warning"),
        ("kvlens_dropped_spans_total{%s} 7", "telemetry_lost", "warning"),
        ('kvlens_lookup_fallback{%s,reason="invariant"} 1', "lookup_fallback", "warning"),
        ('kvlens_lookup_fallback{%s,reason="operator"} 1', None, None),
        ('kvlens_refused_chunks_total{%s,kv_group="0"} 12', "store_failures", "warning"),
        ('kvlens_requests_total{%s,verdict="evicted"} 3', "capacity_thrash", "warning"),
        ('kvlens_requests_total{%s,verdict="evicted"} 2', None, None),
        ('kvlens_requests_total{%s,verdict="cold"} 2000', None, None),
    ],
)
def test_instrumented_numbers(series: str, kind: str | None, severity: str | None) -> None:
    base = instrumented("0:full_attention/16")
    found = findings(base + series % 'engine="0",model_name="m"' + "\n", base)
    expected = [] if kind is None else [(kind, severity)]
    assert [(f.kind, str(f.severity)) for f in found] == expected
    assert all(finding.next_step for finding in found)
