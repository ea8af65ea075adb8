"""What is done with which vLLM: refused, observed or corrected, and how deep."""

import logging
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kvlens import connector
from kvlens.connector import corrections, describe, offloading, support, symbols, versions
from kvlens.connector.config import ConnectorSettings
from kvlens.connector.symbols import Part, Symbol
from kvlens.telemetry.semconv import Depth

TOO_OLD = ["0.11.0", "0.26.1", "0.27.0"]
NEWER = ["0.99.0", "1.4.0", "unknown", "0.1.dev1+g0123456"]
LAST = versions.SUPPORTED[-1].version
SCHEDULER = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler"
)


def test_this_vllm_has_all_that_is_needed():
    found = support.find()
    assert (found.tested, found.depth, found.lost) == (True, Depth.GROUPS, frozenset())
    assert found.not_seen == []


def test_this_vllm_is_one_of_the_list():
    assert support.vllm_version() in [engine.version for engine in versions.SUPPORTED]


@pytest.mark.parametrize("version", TOO_OLD)
def test_an_older_release_is_refused(monkeypatch, version):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    message = f"vLLM {version} is older than {versions.SUPPORTED[0].version}.*Install vLLM"
    with pytest.raises(support.UnsupportedVLLMError, match=message):
        support.find()


@pytest.mark.parametrize("version", NEWER)
def test_a_newer_release_is_observed_and_said_to_be_untested(monkeypatch, version):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    assert support.find().tested is False


@pytest.mark.parametrize(
    "version", ["0.27.1", "0.27.2", "0.29.0+cpu", "0.32.1.dev4+g01234567", LAST, f"{LAST}.1"]
)
def test_a_version_inside_the_range_is_tested(monkeypatch, version):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    assert support.find().tested is True


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        (Symbol(SCHEDULER, "teleport", Part.LOOKUP, ()), "teleport is gone"),
        (Symbol(SCHEDULER, "_teleported", Part.LOOKUP), "_teleported is gone"),
        (Symbol(f"{SCHEDULER}2", "x", Part.LOOKUP), "OffloadingConnectorScheduler2 is gone"),
        (Symbol("vllm.nowhere", "x", Part.LOOKUP), "vllm.nowhere cannot be imported"),
        (Symbol(SCHEDULER, "request_finished", Part.LOOKUP, ("who",)), "no longer takes who"),
        (
            Symbol(SCHEDULER, "request_finished", Part.LOOKUP, (), exact=True),
            r"now takes \(request",
        ),
        (Symbol(SCHEDULER, "request_finished", Part.LOOKUP, ("request",), exact=True), ""),
        (Symbol(SCHEDULER, "_req_status", Part.LOOKUP), ""),
    ],
)
def test_each_kind_of_missing_symbol_is_named(symbol, problem):
    (found,) = symbols.check(None, (symbol,))
    if problem:
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(found.problem)
    else:
        assert found.problem == ""


def test_a_symbol_is_expected_from_its_release_on_and_until_it_is_not_needed():
    symbol = Symbol("m:C", "x", Part.LOOKUP, since="0.28.0", until="0.30.0")
    expected = [v for v in ("0.27.1", "0.28.0", "0.29.0+cpu", "0.30.0") if
                symbol.expected_in(Version(v))]  # fmt: skip
    assert expected == ["0.28.0", "0.29.0+cpu"]
    assert not symbol.expected_in(None)


def lacking(monkeypatch, part):
    symbol = Symbol(SCHEDULER, "teleport", part, ())
    monkeypatch.setattr(symbols, "SYMBOLS", (*symbols.SYMBOLS, symbol))
    return symbol


@pytest.mark.parametrize("part", [part for part in Part if part.correction])
def test_a_correction_that_lacks_a_name_is_left_out_and_nothing_else(monkeypatch, part):
    lacking(monkeypatch, part)
    found = support.find()
    assert (found.depth, found.lost) == (Depth.GROUPS, {part})
    states = {c.name: c for c in corrections.plan(ConnectorSettings(), found)}
    assert states.pop(part.correction).state == "unknown"
    assert all(item.state in ("active", "not_needed") for item in states.values())


def test_without_the_names_of_groups_depth_the_interface_is_left(monkeypatch):
    lacking(monkeypatch, Part.GROUPS)
    found = support.find()
    assert found.depth is Depth.INTERFACE
    assert {part for part in Part if part.correction} < found.lost
    assert found.not_seen == [
        f"OffloadingConnectorScheduler.teleport is gone; without it there is no {Part.GROUPS.value}"
    ]


@pytest.fixture
def build(monkeypatch):
    """Builds the connector on a constructor that only makes a scheduler, and says which."""
    monkeypatch.setattr(offloading.stock, "OffloadingConnectorScheduler", lambda *_: "vLLM's")

    def construct(self, *arguments):
        self.connector_scheduler = offloading.stock.OffloadingConnectorScheduler(*arguments)

    monkeypatch.setattr(offloading.stock.OffloadingConnector, "__init__", construct)
    transfer = SimpleNamespace(kv_connector_extra_config={"kvlens": {"lookup": "corrected"}})

    def make(role):
        config = SimpleNamespace(kv_transfer_config=transfer)
        return offloading.KVLensOffloadingConnector(config, role, None)

    return make


def test_a_mistyped_variable_is_named(build, caplog, monkeypatch):
    lacking(monkeypatch, Part.GROUPS)
    caplog.set_level(logging.WARNING, "kvlens")
    monkeypatch.setattr(offloading, "raise_errors", lambda: False)
    monkeypatch.setenv("KVLENS_OTLP_ENDPIONT", "http://127.0.0.1:8790")
    build(KVConnectorRole.WORKER)
    assert "ENDPIONT" not in caplog.text
    build(KVConnectorRole.SCHEDULER)
    assert (
        "kvlens: KVLENS_OTLP_ENDPIONT is no setting and is ignored: did you mean "
        "KVLENS_OTLP_ENDPOINT?"
    ) in [record.getMessage() for record in caplog.records]


def test_an_engine_that_cannot_be_described_serves_unobserved(build, caplog, monkeypatch):
    lacking(monkeypatch, Part.GROUPS)
    monkeypatch.setattr(offloading, "raise_errors", lambda: False)
    made = build(KVConnectorRole.SCHEDULER)  # nothing can be read of its configuration
    assert made.connector_scheduler == "vLLM's"
    assert made.recorder is None
    assert "cannot describe this engine and observes nothing" in caplog.text


def test_in_tests_of_a_supported_release_our_errors_are_raised(build, monkeypatch):
    lacking(monkeypatch, Part.GROUPS)
    with pytest.raises(AttributeError):
        build(KVConnectorRole.SCHEDULER)


def test_a_scheduler_that_cannot_be_built_with_hooks_is_vllms_own(build, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "kvlens")
    monkeypatch.setattr(offloading, "raise_errors", lambda: False)

    def refuses(*_):
        raise TypeError("another constructor")

    monkeypatch.setattr("kvlens.connector.scheduler.scheduler_class", lambda *_: refuses)
    made = build(KVConnectorRole.WORKER)
    assert made.connector_scheduler == "vLLM's"
    assert "hooks do not fit this vLLM (TypeError: another constructor)" in caplog.text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FullAttentionSpec", "full_attention"),
        ("MLAAttentionSpec", "full_attention"),
        ("SlidingWindowMLASpec", "sliding_window"),
        ("ChunkedLocalAttentionSpec", "chunked_local"),
        ("MambaSpec", "mamba"),
        ("CrossAttentionSpec", "CrossAttentionSpec"),
    ],
)
def test_kinds_are_read_from_the_name_of_the_spec(name, kind):
    assert describe.group_kind(type(name, (), {})()) == kind


def test_a_vllm_of_another_shape_is_refused_with_the_range(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvlens.connector.offloading", None)
    with pytest.raises(versions.UnsupportedVLLMError, match=f"tested with vLLM {versions.RANGE}"):
        _ = connector.KVLensOffloadingConnector
