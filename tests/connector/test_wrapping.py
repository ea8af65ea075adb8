"""A watched connector is the connector itself, less a few methods, whatever it does."""

import inspect
import json
from types import SimpleNamespace

import msgspec
import prometheus_client
import pytest

pytest.importorskip("vllm")

from prometheus_client import Counter, Gauge, Histogram
from test_observer import Facts
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from kvlens.connector import config, plugin, watch, wrapped, wrapping
from kvlens.connector import observer as observing
from kvlens.telemetry import facts, semconv

OVERRIDDEN = {
    "get_kv_connector_stats",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "shutdown",
}
NAMES = sorted(KVConnectorFactory._registry)
KEEPS = ("shared_storage_path", "elsewhere")


def real_class(name):
    try:
        return KVConnectorFactory._registry[name]()
    except (ImportError, OSError) as error:
        pytest.skip(f"{name} does not import here: {type(error).__name__}: {error}")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.delenv(wrapping.WRAP_ENV, raising=False)
    monkeypatch.setattr(wrapping, "_names", {})
    plugin.register()


@pytest.fixture
def wrap(monkeypatch):
    monkeypatch.setenv(wrapping.WRAP_ENV, "1")


def transfer(name, extra=None, module=None):
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", engine_id="e", kv_connector_module_path=module,
        kv_connector_extra_config=extra or {},
    )  # fmt: skip


def asks_for(name, extra=None, module=None, **settings):
    inner = {"name": name, "extra_config": extra or {}}
    if module:
        inner["module_path"] = module
    return {"kvlens": {"inner": inner, **settings}}


# The contract: every class that imports here.


@pytest.mark.parametrize("name", [n for n in NAMES if n != "MultiConnector"])
def test_all_but_a_few_methods_are_the_inner_ones(name):
    real = real_class(name)
    ours = wrapping.subclass(real)
    if name == "KVLensOffloadingConnector":
        assert ours is real
        return
    assert ours is not real
    names = {n for n in {*dir(real), *dir(KVConnectorBase_V1)} if not n.startswith("__")}
    assert len(names & set(dir(KVConnectorBase_V1))) > 25
    for attribute in sorted(names - {"_abc_impl"}):
        theirs = inspect.getattr_static(real, attribute)
        same = inspect.getattr_static(ours, attribute) is theirs
        assert same == (attribute not in OVERRIDDEN), attribute
    assert (ours.__name__, ours.__qualname__, ours.__module__, ours.__doc__) == (
        real.__name__, real.__qualname__, real.__module__, real.__doc__,
    )  # fmt: skip
    assert supports_hma(ours) == supports_hma(real)
    assert ours.__abstractmethods__ == real.__abstractmethods__
    assert wrapping.subclass(real) is wrapping.subclass(ours) is ours


def test_multi_connector_changes_in_nothing_but_its_construction():
    real = real_class("MultiConnector")
    ours = wrapping.subclass(real)
    for attribute in set(dir(real)) - {"__init__", "__dict__", "_abc_impl"}:
        if attribute in ("__module__", "__qualname__", "__doc__", "__name__"):
            assert getattr(ours, attribute) == getattr(real, attribute)
            continue
        theirs = inspect.getattr_static(real, attribute)
        mine = inspect.getattr_static(ours, attribute)
        assert mine is theirs or mine == theirs or attribute.startswith("__"), attribute


# Which connectors are watched.


def test_nothing_is_watched_unless_asked_for():
    stock = real_class("OffloadingConnector")
    assert KVConnectorFactory.get_connector_class(transfer("OffloadingConnector")) is stock
    assert KVConnectorFactory.get_connector_class_by_name("OffloadingConnector") is stock


def test_the_environment_wraps_whatever_is_configured(wrap):
    found = KVConnectorFactory.get_connector_class(transfer("OffloadingConnector"))
    assert found is wrapping.subclass(real_class("OffloadingConnector"))
    assert KVConnectorFactory.get_connector_class_by_name("OffloadingConnector") is found
    corrected = transfer("KVLensOffloadingConnector", module="kvlens.connector")
    assert KVConnectorFactory.get_connector_class(corrected).__module__.startswith("kvlens.")


@pytest.mark.parametrize("module", [None, "kvlens.connector"])
def test_the_inner_connector_is_found_and_sees_its_own_configuration(module):
    asked = transfer("KVLensConnector", asks_for("ExampleConnector", {"a": 1}), module)
    found = KVConnectorFactory.get_connector_class(asked)
    assert found is wrapping.subclass(real_class("ExampleConnector"))
    assert (asked.kv_connector, asked.kv_connector_module_path) == ("ExampleConnector", None)
    assert KVConnectorFactory.get_connector_class(asked) is found
    if hasattr(KVConnectorFactory, "supports_hma_config"):
        assert not KVConnectorFactory.supports_hma_config(asked)
    shown = wrapping.shown_to_inner(SimpleNamespace(kv_transfer_config=asked))
    assert shown.kv_transfer_config.kv_connector_extra_config == {"a": 1}


def test_vllm_finds_the_inner_connector_by_name():
    asked = transfer("KVLensConnector", asks_for("NixlConnector"))
    if not hasattr(asked, "has_connector"):
        pytest.skip("this vLLM does not ask so")
    assert asked.has_connector("NixlConnector")
    child = {"kv_connector": "KVLensConnector", "kv_connector_extra_config": asks_for("X")}
    assert transfer("MultiConnector", {"connectors": [child]}).has_connector("X")


def test_the_children_of_an_inner_multi_connector_are_watched():
    children = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": {"a": name}}
        for name in ("OffloadingConnector", "ExampleConnector")
    ]
    asked = transfer("KVLensConnector", asks_for("MultiConnector", {"connectors": children}))
    found = KVConnectorFactory.get_connector_class(asked)
    assert found is wrapping.subclass(real_class("MultiConnector"))
    for child in asked.kv_connector_extra_config["connectors"]:
        one = KVTransferConfig(**child)
        real = real_class(child["kv_connector"])
        assert KVConnectorFactory.get_connector_class(one) is wrapping.subclass(real)
        shown = wrapping.shown_to_inner(SimpleNamespace(kv_transfer_config=one))
        extra = shown.kv_transfer_config.kv_connector_extra_config
        assert extra == {"a": child["kv_connector"]}


def test_a_sibling_of_the_same_class_has_our_class_and_is_not_recorded():
    children = [
        {"kv_connector": "KVLensConnector", "kv_connector_extra_config": asks_for("A", {"a": 1})},
        {"kv_connector": "A", "kv_connector_extra_config": {"a": 2}},
        {"kv_connector": "B"},
    ]
    asked = transfer("MultiConnector", {"connectors": children})
    for _ in range(2):
        wrapping.resolve(asked)
    first, second, third = asked.kv_connector_extra_config["connectors"]
    assert [c["kv_connector"] for c in (first, second, third)] == ["A", "A", "B"]
    assert config.load(first["kv_connector_extra_config"], {}).telemetry
    assert not config.load(second["kv_connector_extra_config"], {}).telemetry
    assert second["kv_connector_extra_config"]["a"] == 2
    assert third == children[2]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"kvlens": {}},
        {"kvlens": 1},
        {"kvlens": {"inner": "ExampleConnector"}},
        {"kvlens": {"inner": {"nmae": "ExampleConnector"}}},
        asks_for("KVLensConnector"),
    ],
)
def test_a_wrong_inner_is_told_with_what_to_write(extra):
    with pytest.raises(config.ConfigError, match=r'"inner": \{"name": .*KVLENS_WRAP=1'):
        KVConnectorFactory.get_connector_class(transfer("KVLensConnector", extra))


def test_without_the_plugin_the_error_says_so():
    import kvlens.connector

    with pytest.raises(config.ConfigError, match="VLLM_PLUGINS"):
        _ = kvlens.connector.KVLensConnector


# A connector that does anything.


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
        kv_transfer_config=transfer("Inner", extra),
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
