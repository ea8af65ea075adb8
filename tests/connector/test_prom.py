"""Our metrics in vLLM's registry: complete at start, right afterwards."""

from types import SimpleNamespace

import prometheus_client
import pytest

pytest.importorskip("vllm")

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)

from kvlens.connector import own_metrics, prom
from kvlens.telemetry import semconv
from kvlens.telemetry.emit.prometheus import StatsSink
from kvlens.telemetry.records import EngineInfo, GroupLayout, Layout

LABELS = {"model_name": "tiny", "engine": "0"}


def engine_info():
    group = GroupLayout(
        kv_group=0, group_kind="full_attention", tokens_per_block=16, tokens_per_chunk=16
    )
    return EngineInfo(
        engine_id="e", incarnation_id="i", model="tiny", started_at=0, kvlens_version="0",
        vllm_version="0", layout=Layout(groups=[group], tokens_per_hash=16), capacity_chunks=7,
    )  # fmt: skip


@pytest.fixture
def metrics(monkeypatch):
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    transfer = SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": 1})
    config = SimpleNamespace(kv_transfer_config=transfer)
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    yield prom.KVLensPromMetrics(config, types, ["model_name", "engine"], {0: ["tiny", "0"]})
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def value(name, **labels):
    return prometheus_client.REGISTRY.get_sample_value(name, {**LABELS, **labels})


def test_all_closed_children_are_there_with_0_at_start(metrics):
    for metric in semconv.METRICS:
        if metric.labels == semconv.GROUP_LABELS or metric is semconv.INFO:
            continue
        name = metric.exposed_name + ("_count" if metric.type == "histogram" else "")
        for item in metric.values[0] if metric.labels else [None]:
            labels = {metric.labels[0]: item} if metric.labels else {}
            assert value(name, **labels) == 0, (name, labels)


def test_the_first_stats_create_the_groups_children(metrics):
    group = {"kv_group": "0", "group_kind": "full_attention"}
    assert value("kvlens_pops_total", **group) is None
    sink = StatsSink(engine_info())
    stats = prom.merge(None, sink.take())
    metrics.observe(stats.data)
    assert value("kvlens_group_info", **group) == 1
    assert value("kvlens_capacity_chunks") == 7
    for metric in semconv.METRICS:
        if metric.labels == semconv.GROUP_LABELS and metric is not semconv.GROUP_INFO:
            name = metric.exposed_name + ("_count" if metric.type == "histogram" else "")
            assert value(name, **group) == 0, name


def test_ours_and_vllms_travel_together(metrics):
    theirs = OffloadingConnectorStats()
    theirs.increase_counter("vllm:kv_offload_load_bytes", 5)
    sink = StatsSink(engine_info())
    sink.count(semconv.SERVED_TOKENS, 64)
    sink.count(semconv.LOOKUPS, 2, ("miss",))
    sink.observe(semconv.LOOKUP_SECONDS, 2.5e-5)
    metrics.observe(prom.merge(theirs, sink.take()).data)
    metrics.observe({})
    assert value("vllm:kv_offload_load_bytes_total") == 5
    assert value("kvlens_served_tokens_total") == 64
    assert value("kvlens_lookups_total", exit="miss") == 2
    assert value("kvlens_lookup_seconds_count") == 1
    assert value("kvlens_lookup_seconds_bucket", le="2e-05") == 0
    assert value("kvlens_lookup_seconds_bucket", le="3e-05") == 1


def test_samples_carry_the_trace_of_their_request(metrics):
    sink = StatsSink(engine_info())
    sink.observe(semconv.RELOAD_LATENCY, 0.2, trace_id="4bf92f3577b34da6a3ce929d0e0e4736")
    sink.observe(semconv.RELOAD_LATENCY, 0.3)
    samples = sink.take().data["kvlens_reload_latency_seconds"][()]
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(samples))
    metrics.observe({"types": {}, "data": {"kvlens_reload_latency_seconds": {(): wire}}})
    # Without vLLM's own families, two of which have one name under OpenMetrics.
    names = [f"kvlens_reload_latency_seconds_{part}" for part in ("bucket", "count", "sum")]
    ours = prometheus_client.REGISTRY.restricted_registry(names)
    (family,) = text_string_to_metric_families(generate_latest(ours).decode())
    exemplars = [sample.exemplar for sample in family.samples if sample.exemplar]
    assert [(e.labels, e.value) for e in exemplars] == [
        ({"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}, 0.2)
    ]
    assert value("kvlens_reload_latency_seconds_count") == 2


def test_vllms_log_leaves_ours_out():
    stats = prom.LoggedStats()
    stats.increase_counter("vllm:kv_offload_load_bytes", 5)
    sink = StatsSink(engine_info())
    sink.count(semconv.LOOKUPS, 2, ("miss",))
    sink.observe(semconv.LOOKUP_SECONDS, 1e-5)
    sink.observe(semconv.LOOKUP_SECONDS, 1e-5, trace_id="4bf92f3577b34da6a3ce929d0e0e4736")
    merged = prom.merge(stats, sink.take())
    assert merged.reduce() == {"vllm:kv_offload_load_bytes": 5}


def test_a_second_engine_in_one_process_starts_anew(metrics):
    metrics.observe(prom.merge(None, StatsSink(engine_info()).take()).data)
    own_metrics.forget_earlier_engine()
    assert value("kvlens_capacity_chunks") is None


def test_stats_that_we_cannot_read_do_not_reach_vllm(metrics, monkeypatch, caplog):
    monkeypatch.setattr(own_metrics, "raise_errors", lambda: False)
    bad = {"types": {}, "data": {"kvlens_lookups": {("a", "b", "c"): 1}}}
    for _ in range(3):
        metrics.observe(bad)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "kvlens could not record its metrics; serving is not affected" in line
    assert value("kvlens_observer_errors_total") == 3
