"""What vLLM asks of a connector's class: kvlens' answers as the stock one does."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvlens.connector.offloading import KVLensOffloadingConnector

OVERRIDDEN = {
    "build_connector_worker_meta",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "get_kv_connector_stats",
    "register_cross_layers_kv_cache",
    "register_kv_caches",
    "shutdown",
}
"""Each of them calls vLLM's own and adds to it."""


def theirs(name):
    return getattr(OffloadingConnector, name, None), getattr(KVLensOffloadingConnector, name)


@pytest.mark.parametrize(
    "name", sorted(n for n in dir(KVConnectorBase_V1) if not n.startswith("_"))
)
def test_what_is_not_added_to_is_vllms_own(name):
    stock, ours = (getattr(item, "__func__", item) for item in theirs(name))
    assert (ours is stock) == (name not in OVERRIDDEN)


@pytest.mark.parametrize("name", ["supports_lookahead_block_hashes", "kv_cache_access"])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_questions_about_the_class(name, role):
    stock, ours = theirs(name) if hasattr(KVConnectorBase_V1, name) else (None, None)
    if ours is None:
        pytest.skip("this vLLM does not ask")
    config = SimpleNamespace(kv_role=role, kv_connector_extra_config={})
    assert ours(config) == stock(config)
    if name == "supports_lookahead_block_hashes":
        assert ours(config) is True


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_questions_about_an_instance(params):
    stock, ours = (object.__new__(cls) for cls in (OffloadingConnector, KVLensOffloadingConnector))
    request = SimpleNamespace(kv_transfer_params=params)
    assert hasattr(ours, "may_load_async") == hasattr(stock, "may_load_async")
    if hasattr(stock, "may_load_async"):
        assert ours.may_load_async(request) == stock.may_load_async(request)
    if hasattr(stock, "requires_kv_delivery"):
        assert ours.requires_kv_delivery == stock.requires_kv_delivery
