"""Each correction: where its defect is, and what it changes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from packaging.version import Version
from scheduling import Group, Request, add, build, served, store_all
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import RequestStatus

from kvlens.connector import corrections, engine_facts, support
from kvlens.connector.config import ConfigError, load
from kvlens.connector.corrections import switch as switching

AFFECTED = Version(support.vllm_version()) < Version("0.30")
NAMES = [module.NAME for module in corrections.ALL]


def without(name):
    """Settings with every correction but one."""
    return {"corrections": [other for other in NAMES if other != name]}


def test_the_probes_tell_which_vllm_is_affected():
    planned = {item.name: item.state for item in corrections.plan(load({}, {}))}
    newer = planned.pop("reachable_window")
    assert planned == dict.fromkeys(planned, "active" if AFFECTED else "not_needed")
    assert newer == ("not_needed" if AFFECTED else "active")


def test_stock_mode_and_switches_turn_corrections_off():
    for settings in ({"lookup": "stock"}, {"corrections": "none"}, {"corrections": []}):
        planned = corrections.plan(load({"kvlens": settings}, {}))
        assert {item.state for item in planned} == {"off"}
    only = corrections.plan(load({"kvlens": {"corrections": ["load_start"]}}, {}))
    assert [i.name for i in only if i.state != "off"] == ["load_start"]


def test_an_unknown_correction_is_named():
    with pytest.raises(ConfigError, match=r"unknown turbo; known are drafter_fallback"):
        corrections.plan(load({"kvlens": {"corrections": ["turbo"]}}, {}))


def test_a_probe_that_fails_leaves_the_correction_out(monkeypatch):
    module = corrections.ALL[0]

    def broken():
        raise AttributeError("gone")

    monkeypatch.setattr(module, "present", broken)
    item = corrections.plan(load({}, {}))[0]
    assert (item.state, item.reason) == (
        "unknown",
        "the probe failed: AttributeError: gone",
    )


# F1: one full-attention and three recurrent groups, chunk 2128, none annotated.
@pytest.mark.parametrize("chunks", [1, 2, 3, 17])
def test_drafter_fallback(chunks):
    groups = [Group("full_attention", 2128), *[Group("mamba", 2128)] * 3]

    def run(settings):
        scheduler = build(groups, settings=settings, tokens_per_hash=2128)
        request = Request("a", 2128 * chunks + 5, tokens_per_hash=2128)
        store_all(scheduler, request)
        return served(scheduler, request)

    assert run({}) == 2128 * chunks
    assert run(without("drafter_fallback")) == 2128 * (chunks - 1 if AFFECTED else chunks)


# F7: full-attention drafter chunk 16 beside recurrent 64, prompt of 81 tokens, all stored.
def test_pop_widening():
    groups = [Group("full_attention", 16, drafter=True), Group("mamba", 64)]

    def run(settings):
        scheduler = build(groups, settings=settings)
        request = Request("a", 81)
        store_all(scheduler, request)
        return served(scheduler, request)

    assert run({}) == 64
    assert run(without("pop_widening")) == (0 if AFFECTED else 64)


def finish(scheduler, request, blocks):
    """Finish a request whose groups hold ``blocks`` blocks; returns chunks offered."""
    status = add(scheduler, request)
    for group in status.group_states:
        group.block_ids = list(range(1, blocks + 1))
    request.status = RequestStatus.FINISHED_STOPPED
    offered = []
    prepare = scheduler.manager.prepare_store

    def record(keys, *args):
        offered.extend(keys)
        return prepare(keys, *args)

    scheduler.manager.prepare_store = record
    scheduler.request_finished(request)
    scheduler._build_store_jobs(
        SimpleNamespace(num_scheduled_tokens={}, finished_req_ids={request.request_id})
    )
    return len(offered)


# F15: the last complete chunk of a drafter group at finish.
def test_held_back_tail():
    def run(settings):
        groups = [Group("full_attention", 16, drafter=True)]
        scheduler = build(groups, settings=settings, offload_prompt_only=False)
        return finish(scheduler, Request("a", 17, output_tokens=16), blocks=3)

    assert run({}) == 2
    assert run(without("held_back_tail")) == (1 if AFFECTED else 2)


# F14: generation ends on a block boundary; the last sampled token has no KV.
def test_token_watermark():
    def run(settings):
        groups = [Group("full_attention", 16)]
        scheduler = build(groups, settings=settings, offload_prompt_only=False)
        return finish(scheduler, Request("a", 17, output_tokens=15), blocks=2)

    assert run({}) == 1
    assert run(without("token_watermark")) == (2 if AFFECTED else 1)


def block(block_id, block_hash=None, is_null=False):
    return SimpleNamespace(block_id=block_id, block_hash=block_hash, is_null=is_null)


# #52807: a recurrent group holds an unhashed block below the local boundary.
def test_load_start():
    def run(settings):
        groups = [Group("full_attention", 16), Group("mamba", 16)]
        scheduler = build(groups, settings=settings, block_drop=False)
        request = Request("a", 50)
        store_all(scheduler, request)
        assert served(scheduler, request, local_tokens=32) == 16
        attention = [block(1, b"1"), block(2, b"2"), block(3)]
        recurrent = [block(4), block(5, b"5"), block(6)]
        scheduler.update_state_after_alloc(
            request, KVCacheBlocks(blocks=(attention, recurrent)), 16
        )
        (job,) = scheduler._current_batch_load_jobs.values()
        return job.dst_spec.block_ids.tolist()

    assert run({}) == [3, 6]
    if AFFECTED:
        with pytest.raises(AssertionError):
            run(without("load_start"))
    else:
        assert run(without("load_start")) == [3, 6]


# F4 on today's releases: the window that is kept ends where no load can.
@pytest.mark.parametrize(
    ("groups", "boundary"),
    [
        ([Group("mamba", 64)], 256),
        ([Group("full_attention", 16, drafter=True)], 272),
        ([Group("sliding_window", 16, window=64, drafter=True)], 272),
    ],
)
def test_reachable_window(groups, boundary):
    layout = [Group("full_attention", 16), Group("sliding_window", 16, window=64), *groups]
    needed = set(range((boundary - 63) // 16, boundary // 16))

    def kept(settings):
        scheduler = build(layout, settings=settings, retention_interval=0)
        return chunks_kept(scheduler, 1, prompt=300)

    assert needed <= kept({})
    if not AFFECTED:
        stock = kept(without("reachable_window"))
        assert not needed <= stock <= kept({})
        assert len(kept({}) - stock) <= 64 // 16, "at most one more window"


@pytest.mark.parametrize(
    ("groups", "boundary"),
    [([Group("mamba", 64)], 128), ([Group("full_attention", 16, drafter=True)], 176)],
)
def test_reachable_window_at_a_junction(groups, boundary):
    """Full attention, its pop included, reached 176 tokens: only a state may lie lower."""
    layout = [Group("full_attention", 16), Group("sliding_window", 16, window=64), *groups]

    def kept(settings, junction):
        scheduler = build(layout, settings=settings, retention_interval=0)
        return chunks_kept(scheduler, 1, prompt=300, junction=junction)

    needed = set(range((boundary - 63) // 16, boundary // 16))
    assert needed <= kept({}, 176)
    if not AFFECTED:
        stock = kept(without("reachable_window"), 176)
        own = kept({}, 0) - kept(without("reachable_window"), 0)
        assert kept({}, 176) - stock - own == needed - stock


@pytest.mark.skipif(
    not engine_facts.hashes_look_ahead(), reason="this vLLM's hashes do not look ahead"
)
def test_reachable_window_where_nothing_is_popped():
    """vLLM's own window, up to 288, is right beside a drafter group; beside states it is not."""
    layout = [Group("full_attention", 16, drafter=True), Group("sliding_window", 16, window=64)]

    def kept(settings, *more):
        scheduler = build([*layout, *more], settings=settings, retention_interval=0, lookahead=1)
        return chunks_kept(scheduler, 1, prompt=300, lookahead=1)

    assert kept({}) == kept(without("reachable_window")) >= {14, 15, 16, 17}
    beside_states = Group("mamba", 64)
    assert kept({}, beside_states) - kept(without("reachable_window"), beside_states) == {12, 13}


def chunks_kept(scheduler, group, prompt, junction=0, lookahead=0):
    """Chunks of ``group`` that a prompt, computed in one step, offers to the tier."""
    request = Request("a", prompt, shared_prefix_boundary=junction, lookahead=lookahead)
    status = add(scheduler, request)
    for state, config in zip(status.group_states, scheduler.config.kv_group_configs, strict=True):
        state.block_ids = list(range(1, prompt // config.tokens_per_block + 1))
    request.num_computed_tokens = 0
    offered = []
    prepare = scheduler.manager.prepare_store
    scheduler.manager.prepare_store = lambda keys, *more: (
        offered.extend(keys) or prepare(keys, *more)
    )
    scheduler._build_store_jobs(
        SimpleNamespace(num_scheduled_tokens={"a": prompt}, finished_req_ids=set())
    )
    keys = status.group_states[group].offload_keys
    return {index for index, key in enumerate(keys) if key in set(offered)}


def test_a_window_that_is_reached_already_costs_nothing():
    layout = [Group("full_attention", 16), Group("sliding_window", 16, window=64)]

    def kept(settings):
        scheduler = build(layout, settings=settings, block_drop=False, retention_interval=0)
        return chunks_kept(scheduler, 1, prompt=300)

    assert kept({}) == kept(without("reachable_window"))


ACTIVE = [
    module
    for module, item in zip(corrections.ALL, corrections.plan(load({}, {})), strict=True)
    if item.state == "active"
]


@pytest.mark.parametrize("module", ACTIVE, ids=lambda module: module.NAME)
def test_without_its_cure_a_correction_is_not_engaged(monkeypatch, module):
    """The after-probe: it fails on vLLM's own code, so that it can tell a cure from none."""
    monkeypatch.setattr(module, "apply", lambda base: base)
    if hasattr(module, "_WithoutBlockDrop"):
        monkeypatch.setattr(module, "_WithoutBlockDrop", lambda config: config)
    if hasattr(module, "_Released"):
        monkeypatch.setattr(module, "_Released", RequestOffloadState)
    planned = {item.name: item for item in corrections.plan(load({}, {}))}
    assert planned[module.NAME].state == "unknown"
    assert "its cure is not proved" in planned[module.NAME].reason


@pytest.mark.parametrize("module", ACTIVE, ids=lambda module: module.NAME)
def test_a_cure_that_raises_is_not_engaged(monkeypatch, module):
    def broken(*_):
        raise TypeError("another shape")

    monkeypatch.setattr(module, "cured", broken)
    planned = {item.name: item for item in corrections.plan(load({}, {}))}
    assert planned[module.NAME].reason.endswith("not proved: TypeError: another shape")


def test_a_correction_that_fails_while_serving_is_off_and_stock_answers(monkeypatch, caplog):
    monkeypatch.setattr(switching, "raise_errors", lambda: False)
    told, switch = [], switching.Switch("load_start")
    scheduler = SimpleNamespace(observer=SimpleNamespace(failed=lambda *args: told.append(args)))
    calls = []

    def change():
        calls.append(1)
        raise KeyError("gone")

    assert [switch(scheduler, change, "stock") for _ in range(3)] == ["stock"] * 3
    assert len(calls) == len(told) == 1
    assert caplog.text.count("off until the engine restarts") == 1
    with monkeypatch.context() as raising:
        raising.setattr(switching, "raise_errors", lambda: True)
        with pytest.raises(KeyError):
            switching.Switch("load_start")(scheduler, change, "stock")
