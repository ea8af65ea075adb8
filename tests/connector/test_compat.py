"""What is done with which vLLM: the tested range, and what lies outside it."""

import logging
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kvlens import connector
from kvlens.connector import compat, offloading, versions
from kvlens.connector.config import LookupMode

OUTSIDE = ["0.11.0", "0.27.0", "1.4.0", "unknown"]
LAST = versions.SUPPORTED[-1].version


def test_this_vllm_has_all_that_is_overridden():
    assert compat.missing_surface() == []
    assert compat.require_supported() == compat.Support()


def test_a_minor_release_after_the_last_is_refused(monkeypatch):
    major, minor, _ = LAST.split(".")
    monkeypatch.setattr(compat, "vllm_version", lambda: f"{major}.{int(minor) + 1}.0")
    monkeypatch.delenv(compat.OVERRIDE_ENV, raising=False)
    with pytest.raises(compat.UnsupportedVLLMError, match="is outside the range"):
        compat.require_supported()


def test_this_vllm_is_one_of_the_list():
    assert compat.vllm_version() in [engine.version for engine in versions.SUPPORTED]


@pytest.mark.parametrize("version", OUTSIDE)
def test_a_version_outside_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.delenv(compat.OVERRIDE_ENV, raising=False)
    message = rf"vLLM {version} is outside .*\({versions.RANGE}\)"
    with pytest.raises(compat.UnsupportedVLLMError, match=message):
        compat.require_supported()


@pytest.mark.parametrize(
    "version", ["0.27.1", "0.27.2", "0.29.0+cpu", "0.32.1.dev4+g01234567", LAST, f"{LAST}.1"]
)
def test_a_version_inside_the_range_is_taken(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    assert compat.require_supported() == compat.Support()


def test_a_missing_method_is_refused_by_name(monkeypatch):
    lacking(monkeypatch)
    with pytest.raises(compat.UnsupportedVLLMError, match=r"Scheduler\.teleport"):
        compat.require_supported()


def lacking(monkeypatch):
    surface = (*compat._SURFACE, (compat.OffloadingConnectorScheduler, "teleport", ()))
    monkeypatch.setattr(compat, "_SURFACE", surface)


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "1.4.0")
    monkeypatch.setenv(compat.OVERRIDE_ENV, "1")


@pytest.fixture
def build(monkeypatch):
    """Builds the connector on a constructor that only makes a scheduler, and says which."""
    monkeypatch.setattr(offloading.stock, "OffloadingConnectorScheduler", lambda *_: "vLLM's")
    monkeypatch.setattr(offloading, "scheduler_class", lambda *_: lambda *_: "hooked")

    def construct(self, *arguments):
        self.connector_scheduler = offloading.stock.OffloadingConnectorScheduler(*arguments)

    monkeypatch.setattr(offloading.stock.OffloadingConnector, "__init__", construct)
    transfer = SimpleNamespace(kv_connector_extra_config={"kvlens": {"lookup": "corrected"}})

    def make(role):
        config = SimpleNamespace(kv_transfer_config=transfer)
        return offloading.KVLensOffloadingConnector(config, role, None)

    return make


def test_an_untested_vllm_is_observed_with_its_own_lookup(untested, build, caplog):
    caplog.set_level(logging.WARNING, "kvlens")
    made = build(KVConnectorRole.WORKER)
    assert made.connector_scheduler == "hooked"
    assert made._settings.lookup is LookupMode.STOCK
    assert made._settings.telemetry is True
    (line,) = [record.getMessage() for record in caplog.records]
    assert "1.4.0 is outside the range" in line
    assert versions.RANGE in line
    assert line.endswith("it runs with its own lookup, uncorrected and observed")


def test_a_mistyped_variable_is_named(untested, build, caplog, monkeypatch):
    monkeypatch.setenv("KVLENS_OTLP_ENDPIONT", "http://127.0.0.1:8790")
    build(KVConnectorRole.WORKER)
    assert "ENDPIONT" not in caplog.text
    build(KVConnectorRole.SCHEDULER)
    assert (
        "kvlens: KVLENS_OTLP_ENDPIONT is no setting and is ignored: did you mean "
        "KVLENS_OTLP_ENDPOINT?"
    ) in [record.getMessage() for record in caplog.records]


def test_an_untested_vllm_that_no_hook_fits_is_left_alone(monkeypatch, untested, build, caplog):
    lacking(monkeypatch)
    made = build(KVConnectorRole.SCHEDULER)
    assert made.connector_scheduler == "vLLM's"
    assert made._settings.telemetry is False
    assert made.recorder is None
    assert "not observed: it lacks what kvlens overrides" in caplog.text
    assert "teleport" in caplog.text


def test_an_untested_vllm_that_cannot_be_described_serves_unobserved(untested, build, caplog):
    made = build(KVConnectorRole.SCHEDULER)  # nothing can be read of what it made
    assert made.recorder is None
    assert "does not know its way about this vLLM and observes nothing" in caplog.text


def test_a_tested_vllm_that_cannot_be_described_is_an_error(build):
    with pytest.raises(AttributeError):
        build(KVConnectorRole.SCHEDULER)


def test_a_vllm_of_another_shape_is_refused_with_the_range(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvlens.connector.offloading", None)
    with pytest.raises(versions.UnsupportedVLLMError, match=f"tested with vLLM {versions.RANGE}"):
        _ = connector.KVLensOffloadingConnector
