"""Other connectors' and engines' series: what is read of them, and what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from metrics_pages import GB, page

from kvlens.dashboard.doctor.bundle import bundle
from kvlens.dashboard.doctor.report import Patient, Report, diagnose, text
from kvlens.dashboard.doctor.source import from_files
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import connectors
from kvlens.dashboard.scrape.reading import WANTED, read_page
from kvlens.dashboard.scrape.window import Window
from kvlens.telemetry.semconv import IncidentKind

DOCTOR = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
OLD = 'model_name="some/path",worker_id="%d",role="worker"'


def look(before: str, after: str, seconds: float | None = None) -> Patient:
    return diagnose([Window(read_page(before)[0], read_page(after)[0], seconds)], Thresholds())


def found(patient: Patient) -> list[tuple[str, str, str]]:
    return [(f.kind, str(f.severity), str(f.confidence)) for f in patient.findings]


def exposed(name: str) -> str:
    """As the system itself writes it: the first underscore is a colon for all but two."""
    plain = name.startswith(("lmcache_mp_", "kvbm_"))
    return name if plain else name.replace("_", ":", 1)


def lines(values: dict[str, float], labels: str = "") -> str:
    return "".join(f"{exposed(name)}{{{labels}}} {value}\n" for name, value in values.items())


@pytest.mark.parametrize("series", connectors.SERIES, ids=lambda item: f"{item.name}-{item.counts}")
def test_the_table_in_the_docs_is_the_one_that_is_read(series: connectors.Series) -> None:
    only = "".join(f" ({name} {', '.join(sorted(values - {''}))})"
                   for name, values in series.labels.items())  # fmt: skip
    name = f"`{exposed(series.name)}`{only}"
    row = f"| {series.system} | {name} | {series.meaning} | {series.finding} |"
    assert row in DOCTOR
    assert series.name in WANTED


def test_findings_named_in_the_table_exist() -> None:
    kinds = {str(kind) for kind in IncidentKind}
    named = {word for item in connectors.SERIES for word in item.finding.split("`")[1::2]}
    assert named
    assert named <= kinds


def test_lmcache_beside_vllm_that_stores_and_is_never_hit() -> None:
    """Two ranks count the same tokens; the model is named by its path there."""
    shape = {"local": (6e6, 1.4e6), "usage": 0.96}
    before = page(external=(1e6, 0), **shape)  # type: ignore[arg-type]
    after = page(external=(4.6e6, 0), local=(12e6, 3e6), usage=0.97)
    for rank in (0, 1):
        own = OLD % rank
        before += lines({"lmcache_num_stored_tokens_total": 1e6}, own)
        after += lines({"lmcache_num_stored_tokens_total": 5e6}, own)
    patient = look(before, after)
    assert found(patient) == [("zero_hit", "critical", "likely")]
    assert "4,000,000 tokens (LMCache) were stored" in patient.findings[0].summary
    assert patient.findings[0].evidence["connector"] == "LMCache"


def test_lmcache_that_stores_nothing_needs_no_full_gpu_cache() -> None:
    counters = {"lmcache_num_lookup_tokens_total": 45e6, "lmcache_num_lookup_hits_total": 0.0,
                "lmcache_num_stored_tokens_total": 0.0}  # fmt: skip
    after = page(external=(45e6, 0), local=(50e6, 5e6), usage=0.6) + lines(counters, OLD % 0)
    empty = page() + lines(dict.fromkeys(counters, 0.0), OLD % 0)
    patient = look(empty, after, 1800.0)
    assert found(patient) == [("nothing_stored", "critical", "likely")]
    healthy = counters | {"lmcache_num_stored_tokens_total": 3e6}
    after = page(external=(45e6, 30e6), local=(50e6, 5e6)) + lines(healthy, OLD % 0)
    assert found(look(empty, after, 1800.0)) == []


def test_a_cache_server_has_a_page_of_its_own() -> None:
    names = ("lmcache_mp_lookup_requested_tokens_total", "lmcache_mp_lookup_hit_tokens_total",
             "lmcache_mp_l1_write_chunks_total")  # fmt: skip
    own = 'model_name="m",cache_salt=""'
    before = lines(dict.fromkeys(names, 0.0), own)
    (reading,) = read_page(before)
    assert (reading.other, reading.vllm, reading.model) == ("LMCache server", False, "m")
    after = lines(dict(zip(names, (9e6, 0.0, 0.0), strict=True)), own)
    assert found(look(before, after)) == [("nothing_stored", "critical", "likely")]
    served = lines(dict(zip(names, (9e6, 4e6, 700.0), strict=True)), own)
    assert found(look(before, served)) == []


def sglang(prompt: float, device: float, host: float, **more: float) -> str:
    own = 'model_name="q",engine_type="unified"'
    ranked = [f'{own},tp_rank="{rank}",pool="kv"' for rank in (0, 1)]
    cached = "sglang:cached_tokens_total"
    parts = [f"sglang:prompt_tokens_total{{{own}}} {prompt}\n",
             f'{cached}{{{own},cache_source="device"}} {device}\n',
             f'{cached}{{{own},cache_source="host"}} {host}\n',
             f"sglang:token_usage{{{own}}} {more.pop('usage', 0.95)}\n"]  # fmt: skip
    return "".join(parts) + "".join(lines(more, rank) for rank in ranked)


def test_sglang_whose_host_tier_is_never_hit() -> None:
    stored, loaded = "sglang_hicache_backup_tokens_total", "sglang_load_back_tokens_total"
    before = sglang(1e6, 3e5, 0, **{stored: 9e5})
    patient = look(before, sglang(9e6, 3e6, 0, **{stored: 6e6}))
    assert found(patient) == [("zero_hit", "critical", "likely")]
    evidence = patient.findings[0].evidence
    assert (evidence["other_stored"], evidence["external_queries"]) == (5_100_000, 5_300_000)
    served = sglang(9e6, 3e6, 2e6, **{stored: 6e6, loaded: 2e6})
    assert found(look(before, served)) == []
    assert "SGLang HiCache" in text(Report("x", [patient]))


def test_sglang_without_its_hierarchical_cache_is_not_judged() -> None:
    (reading,) = read_page(sglang(1e6, 3e5, 0))
    assert not reading.offloads
    assert found(look(sglang(1e6, 3e5, 0), sglang(9e6, 3e6, 0))) == []


def test_kvbm_beside_vllm() -> None:
    counters = {"kvbm_offload_blocks_d2h": 9e4, "kvbm_matched_tokens": 0.0}
    before = page(external=(1e5, 0), local=(1e6, 4e5)) + lines(dict.fromkeys(counters, 1e4))
    before = before.replace("kvbm_matched_tokens{} 10000.0", "kvbm_matched_tokens{} 0")
    after = page(external=(4e6, 0), local=(9e6, 3e6), usage=0.97) + lines(counters)
    assert found(look(before, after)) == [("zero_hit", "critical", "likely")]
    loaded = counters | {"kvbm_onboard_blocks_h2d": 4e4}
    assert found(look(before, page(external=(4e6, 2e6), usage=0.97) + lines(loaded))) == []


def test_vllms_second_backend_and_the_mooncake_store() -> None:
    own = 'engine="0",model_name="m"'
    simple = f'vllm:simple_kv_offload_save_outcomes_total{{{own},outcome="%s"}} %d\n'
    mooncake = f'vllm:mooncake_store_operation_keys_total{{{own},operation="%s",status="ok"}} %d\n'
    shape = page(external=(4e6, 0), local=(9e6, 3e6), usage=0.97)
    before = page(external=(1e5, 0), local=(1e6, 4e5))
    for stored, system in ((simple % ("stored", 900), connectors.SIMPLE),
                           (mooncake % ("save_put", 900), connectors.MOONCAKE)):  # fmt: skip
        patient = look(before, shape + stored)
        assert found(patient) == [("zero_hit", "critical", "likely")]
        assert system in patient.findings[0].summary
    dropped = simple % ("stored", 0) + simple % ("dropped_not_hashed", 7_000)
    (finding,) = look(before, shape + dropped).findings
    assert (finding.kind, finding.cause) == ("nothing_stored", "allocation_failure")
    assert "7,000 stores found no room or failed" in finding.summary


def test_a_bundle_of_a_mixed_fleet_tells_the_same_and_names_nobody(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("before.txt", "after.txt")]
    stored = "sglang_hicache_backup_tokens_total"
    for path, content in zip(
        files, (sglang(1e6, 3e5, 0, **{stored: 9e5}), sglang(9e6, 3e6, 0, **{stored: 6e6})),
        strict=True,
    ):  # fmt: skip
        path.write_text(content.replace('"q"', '"secret-model"'))
    pages = from_files(files[0], files[1])
    report = Report(pages.name, [diagnose(pages.windows[0], Thresholds())])
    made = bundle(report, pages.texts)
    assert "secret-model" not in made
    assert 'cache_source=\\"host\\"' in made


# --- numbers that mislead --------------------------------------------------------------


def said(patient: Patient) -> str:
    return text(Report("x", [patient])).partition("Not used:")[2]


def test_the_gauge_of_pinned_chunks_is_named_and_not_used() -> None:
    gauge = {"vllm_kv_offload_cpu_cache_usage_perc": 0.01}
    patient = look(page(stored=0, **gauge), page(stored=9 * GB, loaded=8 * GB, **gauge))
    assert "vllm:kv_offload_cpu_cache_usage_perc" in said(patient)
    assert "no occupancy" in said(patient)


def test_local_hits_that_stay_0_while_repeats_become_faster() -> None:
    def ttft(count: float, seconds: float) -> str:
        return lines({"vllm_time_to_first_token_seconds_count": count,
                      "vllm_time_to_first_token_seconds_sum": seconds})  # fmt: skip

    before = page(local=(1e6, 0)) + ttft(100, 200)
    faster = look(before, page(local=(3e6, 0)) + ttft(300, 280))
    assert "fell from 2.00 s to 0.40 s" in said(faster)
    assert "vllm:prefix_cache_hits" not in said(look(before, page(local=(3e6, 0)) + ttft(300, 600)))


def test_tokens_by_source_stand_in_for_local_hits_at_0() -> None:
    source = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="%s"} %d\n'
    after = page(stored=90 * GB, external=(4e6, 0), local=(9e6, 0), usage=0.97)
    assert found(look(page(stored=0), after)) == []
    patient = look(page(stored=0), after + source % ("local_cache_hit", 3_000_000))
    assert found(patient) == [("zero_hit", "critical", "likely")]
    assert "prompt_tokens_by_source counts 3,000,000" in said(patient)
    given = after + source % ("external_kv_transfer", 2_000_000)
    assert found(look(page(stored=0), given)) == []
