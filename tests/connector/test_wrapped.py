"""A watched connector behaves as without us, whatever it does; its stats and metrics too."""

import json
from types import SimpleNamespace

import msgspec
import prometheus_client
import pytest

pytest.importorskip("vllm")

from prometheus_client import Counter, Gauge, Histogram
from test_observer import Facts
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from kvlens.connector import observer as observing
from kvlens.connector import watch, wrapped, wrapping
from kvlens.telemetry import facts, semconv


class InnerStats(KVConnectorStats):
    def aggregate(self, other):
        assert type(other) is InnerStats
        return InnerStats(data={"n": self.data["n"] + other.data["n"]})

    def reduce(self):
        return dict(self.data)

    def is_empty(self):
        return not self.data["n"]

    def reset(self):
        self.data["n"] = 0


class Inner:
    """As much of a connector as the engine calls here."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.given = vllm_config, role, kv_cache_config
        self.answer = (0, False)
        self.stats = None

    def _do(self, *_args):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _do
    update_connector_output = request_finished = on_new_request = shutdown = _do

    def get_kv_connector_stats(self):
        return self.stats

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return InnerStats(data=data or {"n": 0})

    @classmethod
    def build_prom_metrics(cls, *_args):
        return None


def engine_config(extra=None):
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="Inner",
            kv_role="kv_both",
            engine_id="e",
            kv_connector_extra_config=extra or {},
        ),
        model_config=SimpleNamespace(served_model_name="tiny", model="tiny"),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_index=0),
        speculative_config=None,
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
    )


def caches():
    import torch

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


@pytest.fixture
def make():
    made = []

    def build(role=KVConnectorRole.SCHEDULER, kv_cache_config=None, cls=Inner, **extra):
        one = wrapping.subclass(cls)(engine_config(extra), role, kv_cache_config or caches())
        made.append(one)
        return one

    yield build
    for one in made:
        if one._kvlens is not None:
            one._kvlens.close()


@pytest.fixture
def production(monkeypatch):
    """Contain errors of ours, as outside tests."""
    for module in (observing, wrapped, wrapping):
        monkeypatch.setattr(module, "raise_errors", lambda: False)


def calls():
    request = SimpleNamespace(request_id="r", num_tokens=40, num_prompt_tokens=40)
    output = KVConnectorOutput()
    return [
        ("on_new_request", (request,)),
        ("get_num_new_matched_tokens", (request, 16)),
        ("update_state_after_alloc", (request, object(), 16)),
        ("build_connector_meta", (object(),)),
        ("update_connector_output", (output,)),
        ("request_finished", (request, [1])),
        ("shutdown", ()),
    ]


def outcome(connector, name, args):
    try:
        return getattr(connector, name)(*args)
    except Exception as error:  # noqa: BLE001
        return error


ANSWERS = [
    RuntimeError("theirs"), None, (None, False), (-5, True), (10_000, False), (3.5, None),
    "nonsense", (True, True, True),
]  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_the_engine_sees_what_it_would_without_us(make, production, answer):
    watched, alone = make(), Inner(engine_config(), KVConnectorRole.SCHEDULER, caches())
    assert watched._kvlens is not None
    watched.answer = alone.answer = answer
    for name, args in calls():
        assert outcome(watched, name, args) is outcome(alone, name, args), name
        again = outcome(watched, name, args)  # and still after a hook of ours went off
        assert again is answer


def test_what_the_connector_is_given_is_what_vllm_gave(make):
    groups = caches()
    one = make(KVConnectorRole.WORKER, groups, blocks=1)
    vllm_config, role, kv_cache_config = one.given
    assert vllm_config.kv_transfer_config.kv_connector_extra_config == {"blocks": 1}
    assert (role, one._kvlens) == (KVConnectorRole.WORKER, None)
    assert kv_cache_config is groups


def test_an_engine_that_we_cannot_describe_runs_unwatched(make, production, caplog):
    one = make(kv_cache_config=SimpleNamespace())
    assert one._kvlens is None
    assert outcome(one, "get_num_new_matched_tokens", (None, 0)) == (0, False)
    (line,) = [r.getMessage() for r in caplog.records if "kvlens cannot watch" in r.getMessage()]
    assert "Inner" in line


def test_an_error_of_the_inner_constructor_is_the_same():
    class Broken(Inner):
        def __init__(self, *args):
            raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        wrapping.subclass(Broken)(engine_config(), KVConnectorRole.SCHEDULER, caches())


def test_the_recording_is_closed_even_if_the_inner_shutdown_raises(make):
    one = make()
    closed = []
    one._kvlens.close = lambda: closed.append(True)
    one.answer = RuntimeError("theirs")
    with pytest.raises(RuntimeError, match="theirs"):
        one.shutdown()
    assert closed


def test_an_answer_beyond_the_prompt_is_recorded_as_the_prompt():
    sink = Facts()
    watcher = watch.InterfaceObserver(sink)
    watcher.came = lambda request: None
    request = SimpleNamespace(request_id="r", num_tokens=40, block_hashes=[b"1", b"2"])
    watcher.matched(0, request, 16, (10_000, False))
    watcher.matched(0, request, 16, (-3, False))
    answers = [fact[6] for fact in sink if fact[0] == facts.LOOKUP]
    assert answers == [24, 0]


# Stats and metrics.


def test_stats_of_the_inner_connector_keep_their_behaviour(make):
    one = make()
    one.stats = InnerStats(data={"n": 2})
    first = one.get_kv_connector_stats()
    assert not first.is_empty()
    assert first.reduce() == {"n": 2}
    cls = type(one)
    for wire in (
        json.loads(json.dumps(first.data)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(first.data)),
    ):
        assert wire["inner"] == {"n": 2}
        assert any(name == semconv.INFO.name for name, _, _ in wire["kvlens"])
        logged = cls.build_kv_connector_stats(wire)
        assert logged.ours is None
        assert logged.aggregate(cls.build_kv_connector_stats(wire)).reduce() == {"n": 4}
    worker = make(KVConnectorRole.WORKER)
    assert worker.get_kv_connector_stats() is None
    worker.stats = InnerStats(data={"n": 3})
    both = worker.get_kv_connector_stats().aggregate(first)
    assert both.data["inner"] == {"n": 5}
    assert both.data["kvlens"] == first.data["kvlens"]


def test_our_numbers_alone_give_no_log_line(make):
    alone = make().get_kv_connector_stats()
    assert not alone.is_empty()
    logged = wrapping.subclass(Inner).build_kv_connector_stats(alone.data)
    assert logged.is_empty()


@pytest.fixture
def registry():
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    yield registry
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def test_all_watched_connectors_of_a_server_share_one_set_of_metrics(make, registry):
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    labels, values = ["model_name", "engine"], {0: ["tiny", "0"]}

    class Other(Inner):
        pass

    told = []

    class Theirs(Inner):
        @classmethod
        def build_prom_metrics(cls, *_args):
            return SimpleNamespace(observe=lambda data, engine: told.append((data, engine)))

    kinds = [Inner, Other, Theirs]
    made = [
        wrapping.subclass(cls).build_prom_metrics(engine_config(), types, labels, values)
        for cls in kinds
    ]
    for metrics, cls in zip(made, kinds, strict=True):
        one = make(cls=cls)
        one.stats = InnerStats(data={"n": 1})
        metrics.observe(one.get_kv_connector_stats().data, 0)
    assert told == [({"n": 1}, 0)]
    shown = {
        sample.labels["connector"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == semconv.INFO.exposed_name and sample.labels["depth"] == "interface"
    }
    assert shown == {"Inner", "Other", "Theirs"}
    # The next engine of this process starts anew.
    wrapping.subclass(Inner).build_prom_metrics(engine_config(), types, labels, dict(values))
    assert not [
        s for f in registry.collect() for s in f.samples if s.name == semconv.INFO.exposed_name
    ]
