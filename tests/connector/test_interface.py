"""The public interface alone, on vLLM's real scheduler: same tokens, no causes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvlens.connector import offloading, support, versions, watch
from kvlens.connector.config import LookupMode
from kvlens.connector.simulation import driver, reading
from kvlens.connector.simulation.medium import SimulationError
from kvlens.dashboard.cli import main
from kvlens.dashboard.detect.offline import detect
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.telemetry import facts
from kvlens.telemetry.semconv import Depth

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.yaml"))
STALLS = {"f10_pending_store", "f11_retry_stall"}


def run(path, depth=Depth.INTERFACE, lookup=LookupMode.STOCK):
    try:
        return driver.simulate(reading.read(path), path.stem, lookup, depth)
    except SimulationError as error:
        pytest.skip(f"this vLLM refuses it: {error}")


def kinds(result):
    incidents = detect(result.engine, result.requests, result.waiting, all_detectors())
    return {str(incident.kind) for incident in incidents}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_it_tells_what_was_served_and_never_a_cause(path):
    seen, groups = run(path), run(path, Depth.GROUPS)
    for one, same in zip(seen.requests, groups.requests, strict=True):
        assert (one.prompt_tokens, one.local_tokens) == (same.prompt_tokens, same.local_tokens)
        assert one.served_tokens == same.served_tokens
        assert one.computed_tokens == same.computed_tokens
        assert (one.depth, same.depth) == ("interface", "groups")
        assert (one.cause, one.causes, one.confidence) == (None, [], "likely")
        assert one.expected_tokens <= max(same.expected_tokens, same.served_tokens) or (
            same.verdict in ("evicted", "unstored", "stalled")
        ), "what was computed before is never more than what could have been kept"


@pytest.mark.parametrize(
    "path", [p for p in SCENARIOS if p.stem.startswith("n")], ids=lambda path: path.stem
)
def test_where_nothing_is_wrong_it_is_silent(path):
    assert kinds(run(path)) == set()


@pytest.mark.parametrize(
    "path", [p for p in SCENARIOS if p.stem in STALLS], ids=lambda path: path.stem
)
def test_stalls_are_seen(path):
    result = run(path)
    assert "deferral_stall" in kinds(result)
    assert result.waiting
    assert {record.depth for record in result.waiting} == {"interface"}


def test_stores_evictions_and_loads_are_seen():
    path = next(p for p in SCENARIOS if p.stem == "f08_capacity_thrash")
    result = run(path)
    assert result.requests[-1].verdict == "evicted"
    assert result.requests[-1].evicted_tokens > 0
    assert sum(store.evictions for record in result.requests for store in record.stores) > 0
    path = next(p for p in SCENARIOS if p.stem == "n05_warm_up")
    loads = [load for record in run(path).requests for load in record.loads]
    assert loads
    assert all(load.latency is not None and load.latency >= 0 for load in loads)


def test_a_drafter_loss_on_an_unknown_release_opens_zero_hit(monkeypatch):
    """As if a later release lost every hit beside a drafter, taken off the list of tested ones."""
    before = [v.version for v in versions.SUPPORTED if v.version != support.vllm_version()]
    older = [Version(v) for v in before if Version(v) < Version(support.vllm_version())]
    monkeypatch.setattr(support, "NEWEST", older[-1] if older else Version("0.0.1"))
    monkeypatch.setattr(OffloadingConnectorScheduler, "_maximal_prefix_lookup", lambda *_: 0)
    path = next(p for p in SCENARIOS if p.stem == "f01_zero_hit")
    result = run(path)
    assert (result.engine.tested, result.engine.depth) == (False, "interface")
    assert [record.verdict for record in result.requests][-3:] == ["lost"] * 3
    assert kinds(result) == {"zero_hit"}


def test_an_unknown_release_is_corrected_only_where_that_is_proved(monkeypatch):
    monkeypatch.setattr(support, "vllm_version", lambda: "0.99.0")
    path = next(p for p in SCENARIOS if p.stem == "f01_zero_hit")
    engine = run(path, Depth.GROUPS, LookupMode.CORRECTED).engine
    assert (engine.depth, engine.tested, engine.lookup) == ("groups", False, "stock")
    assert {item.state for item in engine.corrections} <= {"active", "not_needed", "unknown"}
    assert any("not proved on this release" in sentence for sentence in engine.not_seen)


@pytest.mark.parametrize(
    "answer", [None, 7, (3,), ("many", True), (-5, False), (10**12, True), (None, None)]
)
def test_a_connector_may_answer_anything(monkeypatch, answer):
    """What the connector said reaches vLLM untouched, and nothing of ours is raised."""
    monkeypatch.setattr("kvlens.connector.observer.raise_errors", lambda: False)
    told = []
    observer = watch.InterfaceObserver(SimpleNamespace(append=told.append))
    odd = SimpleNamespace(
        get_num_new_matched_tokens=lambda *_: answer, update_connector_output=lambda *_: "done"
    )
    watch.attach(odd, observer)
    request = SimpleNamespace(
        request_id="a", num_tokens=100, num_prompt_tokens=99, arrival_time=0.0, block_hashes=[]
    )
    assert odd.get_num_new_matched_tokens(request, 10) is answer
    assert odd.update_connector_output(None) == "done"
    lookups = [fact for fact in told if fact[0] == 1]
    assert all(fact[6] is None or 0 <= fact[6] <= 90 for fact in lookups)


def test_a_failed_load_is_not_served():
    told = []
    observer = watch.InterfaceObserver(SimpleNamespace(append=told.append))
    request = SimpleNamespace(request_id="a", num_preemptions=0)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2], [9]))
    observer.allocated(request, blocks, 32)
    output = SimpleNamespace(finished_recving={"a"}, invalid_block_ids={9})
    observer.returned(output)
    assert [f[0] for f in told if f[0] in (facts.RECEIVED, facts.LOAD_FAILED)] == [
        facts.LOAD_FAILED
    ]


def test_compat_tells_what_is_there(tmp_path, capsys):
    path = tmp_path / "compat.json"
    assert main(["compat", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["vllm_version"] == support.vllm_version()
    assert found["depth"] == "groups"
    assert all(symbol["present"] and symbol["lost"] for symbol in found["symbols"])
    assert {item["state"] for item in found["corrections"]} <= {"active", "not_needed"}
    assert f"vLLM {found['vllm_version']}, tested" in capsys.readouterr().out


def test_compat_says_what_is_reduced_and_what_cannot_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(support.symbols, "check", lambda _: [GONE])
    assert main(["compat"]) == 1
    text = capsys.readouterr().out
    assert "at interface depth" in text
    assert "Teleporter is gone" in text
    monkeypatch.setattr(support, "vllm_version", lambda: "0.26.0")
    assert main(["compat"]) == 2
    assert "older than 0.27.1" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["compat", "--json", str(tmp_path / "no" / "where.json")]) == 2
    assert "No such file" in capsys.readouterr().err


GONE = support.Found(
    support.symbols.Symbol("vllm:Teleporter", "go", support.Part.GROUPS), "Teleporter is gone"
)


def test_the_depth_can_be_set():
    result = run(SCENARIOS[0])
    assert result.engine.connector == "OffloadingConnector"
    assert offloading.KVLensOffloadingConnector.__name__ == "KVLensOffloadingConnector"
    assert support.find(Depth.INTERFACE).depth is Depth.INTERFACE
