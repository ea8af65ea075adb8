import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvlens.connector import plugin


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    registry = dict(KVConnectorFactory._registry)
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    return registry


def test_registers_by_name_any_number_of_times(registry, monkeypatch):
    monkeypatch.delenv(plugin.NATIVE_ENV, raising=False)
    stock = registry["OffloadingConnector"]
    plugin.register()
    plugin.register()
    assert registry["KVLensOffloadingConnector"]().__name__ == "KVLensOffloadingConnector"
    assert registry["OffloadingConnector"] is stock


def test_native_backend_gets_kvlens_when_asked(registry, monkeypatch):
    monkeypatch.setenv(plugin.NATIVE_ENV, "1")
    plugin.register()
    assert registry["OffloadingConnector"]().__name__ == "KVLensOffloadingConnector"
