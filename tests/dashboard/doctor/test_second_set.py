"""Field cases of the second set, each with other numbers of its kind beside the reported ones."""

from __future__ import annotations

from typing import Any

import pytest
from metrics_pages import GB, LABELS, page

from kvlens.dashboard.doctor.report import Patient, Report, diagnose, text
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape.findings import Finding
from kvlens.dashboard.scrape.reading import read_page
from kvlens.dashboard.scrape.window import Window


def look(before: str, after: str, seconds: float | None = None) -> Patient:
    return diagnose([Window(read_page(before)[0], read_page(after)[0], seconds)], Thresholds())


def found(patient: Patient) -> list[tuple[str, str, str]]:
    return [(f.kind, str(f.severity), str(f.confidence)) for f in patient.findings]


def one(patient: Patient) -> Finding:
    (finding,) = patient.findings
    return finding


def reason(patient: Patient, kind: str) -> str:
    return next(item.reason for item in patient.outcomes if item.kind == kind)


def histogram(name: str, counts: dict[str, float]) -> str:
    return "".join(
        f'vllm:{name}_bucket{{{LABELS},le="{edge}"}} {count}\n' for edge, count in counts.items()
    )


# --- a, F21: the local hits are the preempted requests' own blocks ------------------


@pytest.mark.parametrize(
    ("preemptions", "local", "asked", "stored"),
    [
        (700, (1.5e6, 0.45e6), 1.05e6, 50),
        (1_800, (6e6, 2.1e6), 3.9e6, 220),
        (260, (0.9e6, 0.3e6), 0.6e6, 9),
    ],
)
@pytest.mark.parametrize("history", [False, True])
def test_f21_local_hits_of_preempted_requests_prove_no_reuse(
    preemptions: float, local: tuple[float, float], asked: float, stored: float, history: bool
) -> None:
    """Also where the earlier page tells the same of the time before."""
    share = 0.4 if history else 0.0
    before = page(stored=stored * GB * share, external=(asked * share, 0), usage=0.98,
                  local=(local[0] * share, local[1] * share),
                  vllm_num_preemptions_total=preemptions * share)  # fmt: skip
    after = page(stored=stored * GB * (1 + share), external=(asked * (1 + share), 0), usage=0.99,
                 local=(local[0] * (1 + share), local[1] * (1 + share)),
                 vllm_num_preemptions_total=preemptions * (1 + share))  # fmt: skip
    patient = look(before, after)
    assert found(patient) == []
    assert "preempted requests" in reason(patient, "zero_hit")


def test_f21_prompts_that_come_back_are_seen_beside_preemptions() -> None:
    """Known lengths tell how much of the hits preempted requests can have had."""
    lengths = {"vllm_request_prompt_tokens_sum": 1.5e6, "vllm_request_prompt_tokens_count": 3_000}
    shape: dict[str, Any] = {"external": (1.05e6, 0), "local": (1.5e6, 0.45e6), "usage": 0.99}
    after = page(stored=50 * GB, **shape, vllm_num_preemptions_total=100, **lengths)
    assert found(look(page(stored=0), after)) == [("zero_hit", "critical", "likely")]


# --- b, F22: asked for, and never stored ---------------------------------------------


@pytest.mark.parametrize(
    ("asked", "local", "usage"),
    [(20e6, (33e6, 13.2e6), 0.97), (4e6, (9e6, 5e6), 0.93), (90e6, (100e6, 10e6), 1.0)],
)
def test_f22_nothing_stored(asked: float, local: tuple[float, float], usage: float) -> None:
    before = page(stored=0, loaded=0, usage=usage)
    patient = look(before, page(stored=0, loaded=0, external=(asked, 0), local=local, usage=usage))
    assert found(patient) == [("nothing_stored", "critical", "certain")]
    for word in ("store_threshold", "lazy", "failed stores", "policy"):
        assert word in one(patient).next_step
    assert one(patient).evidence["external_queries"] == asked


def test_f22_without_the_series_but_with_the_connector() -> None:
    """vLLM creates the byte counters at the first store: the lookups' histogram is enough."""
    more = {"vllm_kv_offload_lookup_sync_delay_seconds_count": 9_000.0}
    after = page(external=(20e6, 0), local=(33e6, 13e6), usage=0.97, **more)
    assert found(look(page(usage=0.9), after)) == [("nothing_stored", "critical", "likely")]


@pytest.mark.parametrize(
    ("more", "cause", "severity"),
    [
        ({"vllm_kv_offload_stores_skipped_total": 4_000}, "policy", "warning"),
        ({"vllm_kv_offload_allocation_failure_total": 9}, "allocation_failure", "critical"),
    ],
)
def test_f22_says_what_explains_it(more: dict[str, float], cause: str, severity: str) -> None:
    after = page(stored=0, external=(20e6, 0), local=(33e6, 13e6), usage=0.97, **more)
    finding = one(look(page(stored=0), after))
    assert (finding.kind, finding.cause, str(finding.severity)) == (
        "nothing_stored", cause, severity,
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"usage": 0.4},  # a lazy connector stores only when the GPU cache evicts
        {"external": (50_000, 0)},  # hardly asked yet
        {"external": (20e6, 9e6)},  # somebody stores
        {"stored": 5.0},
        {"local": (33e6, 32.5e6)},  # the GPU cache answers by itself
        {"vllm_kv_offload_tiering_write_bytes_total": 7.0},
    ],
)
def test_f22_where_it_is_no_fault(change: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"stored": 0, "external": (20e6, 0), "local": (33e6, 13e6),
                             "usage": 0.97} | change  # fmt: skip
    kinds = [kind for kind, _, _ in found(look(page(stored=0, usage=0.3), page(**shape)))]
    assert "nothing_stored" not in kinds


def test_f22_is_a_warning_until_it_lasts() -> None:
    after = page(stored=0, external=(2e7, 0), local=(33e6, 13e6), usage=0.97)
    severities = [str(one(look(page(stored=0), after, at)).severity) for at in (60.0, 600.0)]
    assert severities == ["warning", "critical"]


# --- c, F23: another connector that tells nothing of its own --------------------------


@pytest.mark.parametrize(
    ("asked", "local", "usage"),
    [(3e6, (5e6, 1.6e6), 0.95), (0.8e6, (2e6, 0.3e6), 0.91), (60e6, (90e6, 30e6), 1.0)],
)
def test_f23_another_connector(asked: float, local: tuple[float, float], usage: float) -> None:
    patient = look(page(usage=usage), page(external=(asked, 0), local=local, usage=usage))
    assert found(patient) == [("zero_hit", "warning", "guess")]
    assert "KV connector" in one(patient).summary
    assert "store_bytes" not in one(patient).evidence


@pytest.mark.parametrize(
    "more",
    [
        {"vllm_generation_tokens_total": 500, "vllm_request_success_total": 500},  # prefills only
        {"vllm_nixl_xfer_time_seconds_count": 5},
        {"vllm_nixl_num_kv_expired_reqs_total": 0},
    ],
)
def test_f23_a_server_that_prefills_for_others_is_not_judged(more: dict[str, float]) -> None:
    assert (
        found(look(page(), page(external=(3e6, 0), local=(5e6, 1.6e6), usage=0.95, **more))) == []
    )


# --- d, F24: hardly any ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "loaded", "asked", "hits"),
    [(150, 2.5, 2.5e6, 50_000), (36, 0.4, 7e5, 9_000), (2_000, 60, 4e7, 1.2e6)],
)
@pytest.mark.parametrize("local", [(0, 0), (5e6, 2.2e6), (4e6, 0)])
def test_f24_low_hits(
    stored: float, loaded: float, asked: float, hits: float, local: tuple[float, float]
) -> None:
    before = page(stored=0, loaded=0, usage=0.95)
    after = page(stored=stored * GB, loaded=loaded * GB, external=(asked, hits), local=local,
                 usage=0.99, vllm_kv_offload_load_size_count=25)  # fmt: skip
    patient = look(before, after)
    assert found(patient) == [("low_hits", "warning", "guess")]
    finding = one(patient)
    assert finding.evidence["hit_ratio"] == pytest.approx(hits / asked, abs=1e-5)
    assert finding.evidence["tokens_per_load"] == int(hits / 25)
    assert "may mean" in finding.next_step


def test_f24_says_that_all_loads_are_alike() -> None:
    after = page(stored=150 * GB, loaded=2.5 * GB, external=(2.5e6, 50_000), usage=0.99)
    sizes = histogram("kv_offload_load_size", {"1e+08": 0, "5e+08": 24, "1e+09": 25, "+Inf": 25})
    assert "96% of the loads" in one(look(page(stored=0), after + sizes)).summary


@pytest.mark.parametrize(
    "change",
    [
        {"external": (2.5e6, 0.5e6), "loaded": 60 * GB},  # healthy
        {"external": (2.5e6, 50_000), "loaded": 60 * GB},  # most of what is stored is loaded
        {"external": (2.5e6, 50_000), "usage": 0.3},  # the GPU cache does not evict
        {"external": (2.5e6, 50_000), "local": (1e8, 9.6e7)},  # it answers by itself
    ],
)
def test_f24_where_it_is_no_fault(change: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"stored": 150 * GB, "loaded": 2.5 * GB, "usage": 0.99} | change
    assert found(look(page(stored=0, loaded=0, usage=0.3), page(**shape))) == []


# --- F28: the GPU's own cache ----------------------------------------------------------

POOL = 400_000
CONFIG = f'vllm:cache_config_info{{{LABELS},block_size="16",num_gpu_blocks="25000"%s}} 1\n'
LONG = {"50000.0": 0, "100000.0": 40, "200000.0": 100, "+Inf": 100}


@pytest.mark.parametrize("window", ["", ',sliding_window="4096"'])
def test_f28_hits_that_stop_without_an_eviction(window: str) -> None:
    before = page(local=(1e6, 0.8e6), usage=0.4) + CONFIG % window
    after = page(local=(5e6, 0.8e6), usage=0.45) + CONFIG % window
    patient = look(before, after)
    assert found(patient) == [("local_hits_lost", "warning", "guess")]
    assert "no fault of the offload tier" in one(patient).next_step


@pytest.mark.parametrize("hits", [0.9e6, 2.4e6])
def test_f28_none_beyond_a_quarter_of_the_pool_while_the_tier_serves_them(hits: float) -> None:
    """Every prompt was computed, or loaded, from its start: no long one found anything here."""
    lengths = histogram("request_prompt_tokens", LONG)
    lengths += histogram("request_prefill_kv_computed_tokens", LONG)
    after = page(stored=9 * GB, loaded=8 * GB, external=(9e6, hits), local=(9e6, 0), usage=0.97)
    told = after + lengths + CONFIG % ',sliding_window="4096"'
    patient = look(page(stored=0, loaded=0), told)
    assert found(patient) == [("local_hits_lost", "warning", "likely")]
    assert f"a quarter of the pool of {POOL:,}" in one(patient).summary
    assert one(patient).evidence["long_prompts"] == 60
    shorter = LONG | {"100000.0": 70}  # some were computed in part: they found something
    found_some = after + histogram("request_prompt_tokens", LONG) + CONFIG % ""
    found_some += histogram("request_prefill_kv_computed_tokens", shorter)
    assert found(look(page(stored=0, loaded=0), found_some)) == []


def test_f28_is_no_offload_incident_and_eviction_is_no_f28() -> None:
    before = page(stored=9 * GB, local=(1e6, 0.8e6), external=(1e5, 0), usage=0.4)
    after = page(stored=90 * GB, local=(5e6, 0.8e6), external=(4e6, 0), usage=0.45)
    assert [kind for kind, _, _ in found(look(before, after))] == ["local_hits_lost"]
    full = page(stored=90 * GB, local=(5e6, 0.8e6), external=(4e6, 0), usage=0.97)
    assert [kind for kind, _, _ in found(look(before, full))] == ["zero_hit"]


# --- F30: a first tier without room -----------------------------------------------------


@pytest.mark.parametrize(("hits", "failed"), [(13, 4), (2, 1), (900, 300)])
def test_f30_promotions_that_find_no_room(hits: float, failed: float) -> None:
    before = page(stored=GB, local=(1e5, 5e4), usage=0.95)
    after = page(
        stored=40 * GB, external=(2.1e6, 0), local=(4e6, 1.3e6), usage=0.97,
        vllm_kv_offload_tiering_chunk_queries_total=hits + 60,
        vllm_kv_offload_tiering_chunk_hits_total=hits,
        vllm_kv_offload_tiering_promotion_allocation_failures_total=failed,
    )  # fmt: skip
    patient = look(before, after)
    assert found(patient) == [("capacity_thrash", "warning", "certain")]
    finding = one(patient)
    assert finding.cause == "capacity"
    assert finding.evidence["promotion_allocation_failures"] == failed
    assert finding.evidence["tier_hits"] == hits
    assert "first tier" in finding.next_step


# --- F11, as far as a page tells ----------------------------------------------------------


def test_f11_a_request_that_is_deferred_for_good() -> None:
    own = LABELS + ',reason="deferred"'
    waiting = f"vllm:num_requests_waiting_by_reason{{{own}}} %d\n"
    tier = "vllm_kv_offload_tiering_chunk_queries_total"
    before = page(stored=GB, **{tier: 9.0}) + waiting % 1
    after = page(stored=GB, **{tier: 36_146.0}) + waiting % 1
    assert found(look(before, after, 60.0)) == [("deferral_stall", "warning", "guess")]
    assert found(look(before, after + waiting % 0, 5.0)) == []
    moving = page(stored=GB, vllm_request_success_total=4, **{tier: 36_146.0}) + waiting % 1
    assert found(look(before, moving, 60.0)) == []


def test_lookups_that_hold_up_the_scheduler() -> None:
    slow = {"0.5": 90, "1.0": 95, "+Inf": 99}
    name = "kv_offload_lookup_sync_delay_seconds"
    after = page(stored=2 * GB, loaded=GB) + histogram(name, slow)
    patient = look(page(stored=GB, loaded=0), after)
    assert found(patient) == [("deferral_stall", "warning", "certain")]
    assert "4 lookups took over 1 s each" in one(patient).summary


# --- N11 to N14 ------------------------------------------------------------------------------


@pytest.mark.parametrize("hits", [3e6, 2.99e6])
@pytest.mark.parametrize("local", [(0, 0), (3e6, 0), (3.2e6, 0.2e6)])
def test_n11_prefill_decode_separation(hits: float, local: tuple[float, float]) -> None:
    after = page(external=(3e6, hits), local=local, usage=0.95)
    patient = look(page(), after)
    assert found(patient) == []
    assert "normal where another server prefills" in text(Report("x", [patient]))


@pytest.mark.parametrize(("local", "share"), [(0.928, 0.94), (0.97, 0.8), (0.91, 0.99)])
def test_n12_a_healthy_pair_of_caches(local: float, share: float) -> None:
    asked = 8e7 * (1 - local)
    after = page(stored=300 * GB, loaded=250 * GB, external=(asked, share * asked),
                 local=(8e7, local * 8e7), usage=0.96)  # fmt: skip
    assert found(look(page(stored=GB, loaded=GB), after)) == []


@pytest.mark.parametrize(("share", "asked", "stored"), [(0.98, 1.2e6, 90), (0.95, 9e6, 700)])
@pytest.mark.parametrize("usage", [0.5, 0.99])
@pytest.mark.parametrize("offload", [True, False])
def test_n13_what_the_gpu_cache_does_not_have_is_new(
    share: float, asked: float, stored: float, usage: float, offload: bool
) -> None:
    queries = asked / (1 - share)
    before = page(stored=GB if offload else None, external=(10_000, 0), local=(5e5, 4.9e5))
    after = page(stored=stored * GB if offload else None, external=(asked, 0),
                 local=(queries, share * queries), usage=usage)  # fmt: skip
    assert found(look(before, after)) == []


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("version", ["", "0.30.0", "0.32.1", "0.34.0"])
def test_n14_sha256_has_a_fixed_seed(algorithm: str, version: str) -> None:
    config = f'vllm:cache_config_info{{engine="0",prefix_caching_hash_algo="{algorithm}"}} 1\n'
    info = f'kvlens_info{{{LABELS},vllm_version="{version}"}} 1\n' if version else ""
    probes = "vllm_kv_offload_tiering_chunk_queries_total"
    before = page(stored=9 * GB, loaded=GB, **{probes: 9_000.0}) + config + info
    cold = page(stored=GB, started=1_796_050_000, **{probes: 5_748.0}) + config + info
    assert found(look(before, cold)) == []
    xxhash = [text.replace(algorithm, "xxhash") for text in (before, cold)]
    assert found(look(xxhash[0], xxhash[1])) == [("hash_seed", "warning", "likely")]
    old = [text.replace("0.30.0", "0.28.0") for text in (before, cold)]
    if version == "0.30.0":
        assert found(look(old[0], old[1])) == [("hash_seed", "warning", "likely")]
