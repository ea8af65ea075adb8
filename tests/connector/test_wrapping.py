"""A watched connector is the connector itself, less a few methods; and which are watched."""

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvlens.connector import config, inner, plugin, wrapping

OVERRIDDEN = {
    "get_kv_connector_stats",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "shutdown",
}
NAMES = sorted(KVConnectorFactory._registry)


def real_class(name):
    try:
        return KVConnectorFactory._registry[name]()
    except (ImportError, OSError) as error:
        pytest.skip(f"{name} does not import here: {type(error).__name__}: {error}")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.delenv(inner.WRAP_ENV, raising=False)
    monkeypatch.setattr(wrapping, "_names", {})
    plugin.register()


@pytest.fixture
def wrap(monkeypatch):
    monkeypatch.setenv(inner.WRAP_ENV, "1")


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
    shown = inner.shown_to_inner(SimpleNamespace(kv_transfer_config=asked))
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
        shown = inner.shown_to_inner(SimpleNamespace(kv_transfer_config=one))
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
        inner.resolve(asked)
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
