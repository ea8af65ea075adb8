"""What the connector says of tiers that outlive an engine, and of the hashes in them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from scheduling import Group, build
from vllm.v1.core import kv_cache_utils

from kvlens.connector import compat, engine_facts


@pytest.mark.parametrize(
    ("tiers", "persistent"),
    [
        (None, False),
        ([], False),
        ([{"type": "example"}, {"type": "p2p"}], False),
        ([{"type": "example"}, {"type": "fs", "root_dir": "/cache"}], True),
        ([{"type": "Ours", "module_path": "our.tier"}], True),
    ],
)
def test_which_tiers_outlive_the_engine(tiers, persistent):
    extra = {} if tiers is None else {"secondary_tiers": tiers}
    assert engine_facts.persistent_tier(SimpleNamespace(extra_config=extra)) is persistent


def test_tiers_below_the_watched_one():
    tiered = SimpleNamespace(manager=SimpleNamespace(secondary_tiers=[object()]))
    assert compat.lower_tiers(tiered) is True
    assert compat.lower_tiers(SimpleNamespace(manager=SimpleNamespace(secondary_tiers=[]))) is False
    assert compat.lower_tiers(build([Group("full_attention", 16)])) is False


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_which_hashes_are_the_same_in_every_process(monkeypatch, algorithm):
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    has_default = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    fixed = has_default and not algorithm.startswith("xxhash")
    assert engine_facts.hash_seed_fixed(config) is fixed
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert engine_facts.hash_seed_fixed(config) is True
