import pytest

pytest.importorskip("vllm")

from kvlens.connector import compat


def test_this_vllm_has_all_that_is_overridden():
    assert compat.missing_surface() == []
    assert compat.require_supported() is None


@pytest.mark.parametrize("version", ["0.11.0", "1.4.0"])
def test_a_version_outside_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    monkeypatch.delenv(compat.OVERRIDE_ENV, raising=False)
    with pytest.raises(compat.UnsupportedVLLMError, match=f"{compat.TESTED[0]} to"):
        compat.require_supported()


def test_a_version_outside_the_range_runs_when_told(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "1.4.0")
    monkeypatch.setenv(compat.OVERRIDE_ENV, "1")
    assert "1.4.0 is outside the range" in (compat.require_supported() or "")


def test_a_missing_method_is_refused_by_name(monkeypatch):
    surface = (*compat._SURFACE, (compat.OffloadingConnectorScheduler, "teleport", ()))
    monkeypatch.setattr(compat, "_SURFACE", surface)
    with pytest.raises(compat.UnsupportedVLLMError, match=r"Scheduler\.teleport"):
        compat.require_supported()
