from __future__ import annotations

import pytest

from kvlens.dashboard.settings import Settings, SettingsError, load_settings
from kvlens.telemetry import environment

TOKEN = "0123456789abcdef"
SERVICE_LINKS = {
    "KVLENS_SERVICE_HOST": "10.0.0.7",
    "KVLENS_SERVICE_PORT": "8790",
    "KVLENS_SERVICE_PORT_HTTP": "8790",
    "KVLENS_PORT": "tcp://10.0.0.7:8790",
    "KVLENS_PORT_8790_TCP": "tcp://10.0.0.7:8790",
    "KVLENS_PORT_8790_TCP_PROTO": "tcp",
    "KVLENS_PORT_8790_TCP_PORT": "8790",
    "KVLENS_PORT_8790_TCP_ADDR": "10.0.0.7",
}
"""What Kubernetes puts into every pod beside a Service ``kvlens``."""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"KVLENS_{name.upper()}", raising=False)


def test_defaults_stay_on_this_machine() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.loopback) == ("127.0.0.1", 8790, True)
    assert settings.store.endswith("kvlens/kvlens.db")


def test_environment_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_PORT", "9000")
    monkeypatch.setenv("KVLENS_ALLOWED_HOSTS", "a.example,b.example")
    settings = load_settings(store="sqlite:///var/lib/k.db", host=None)
    assert (settings.port, settings.host) == (9000, "127.0.0.1")
    assert settings.store == "/var/lib/k.db"
    assert settings.allowed_hosts == ("a.example", "b.example")


def test_kubernetes_may_tell_of_a_service_of_this_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    assert load_settings().port == 8790
    assert load_settings(port=9000).port == 9000
    assert environment.misspelt(SERVICE_LINKS, Settings.model_fields) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert load_settings(host=host).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "kvlens.example"])
def test_beyond_loopback_tokens_are_required(host: str) -> None:
    with pytest.raises(SettingsError, match="read_token is required to listen on"):
        load_settings(host=host)
    with pytest.raises(SettingsError, match="set KVLENS_INGEST_TOKEN"):
        load_settings(host=host, read_token=TOKEN)
    assert not load_settings(host=host, read_token=TOKEN, ingest_token=TOKEN).loopback


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "store",
            "postgres://db",
            r"'postgres://' is not known: give a file path, sqlite://",
        ),
        ("store", "sqlite://relative.db", "needs an absolute path"),
        ("store", ":memory:", "does not name a file"),
        ("store", "folder/", "does not name a file"),
        ("port", "70000", "less than or equal to 65535"),
        ("read_token", "short", "at least 16"),
        ("ingest_token", "sixteen \u00fcmlauts!!", "printable ASCII"),
        ("queue_batches", 0, "greater than or equal to 1"),
        ("zero_hit_accident", 1, "less than 1"),
        ("trace_url_template", "https://jaeger.example/", "contains {trace_id} once"),
        ("trace_url_template", "javascript:{trace_id}", r"http\(s\) URL"),
    ],
)
def test_errors_name_the_field_and_the_remedy(field: str, value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(**{field: value})
    assert str(caught.value).startswith(f"{field} (KVLENS_{field.upper()}): ")


def test_unknown_setting() -> None:
    with pytest.raises(SettingsError, match=r"prot: no such setting; known are .*host, port"):
        load_settings(prot=1)


def test_tokens_are_not_shown() -> None:
    settings = load_settings(read_token=TOKEN)
    assert TOKEN not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        load_settings(read_token="hush")
    assert "hush" not in str(caught.value)


def test_trace_url() -> None:
    settings = load_settings(trace_url_template="https://jaeger.example/trace/{trace_id}")
    assert settings.trace_url("ab12") == "https://jaeger.example/trace/ab12"
    assert settings.trace_url("") is None
    assert load_settings().trace_url("ab12") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{bad", r"model_thresholds \(KVLENS_MODEL_THRESHOLDS\): it is not JSON .*example"),
        ('["m"]', "Input should be a valid dictionary"),
        ('{"m": {"lost_hits_share": "x"}}', "m.lost_hits_share: Input should be a valid number"),
        ('{"m": {"lost_hits_share": 7}}', "model_thresholds of 'm': lost_hits_share: Input should"),
        ('{"m": {"lost_hit_share": 0.7}}', "lost_hit_share: no such threshold; known are "),
    ],
)
def test_thresholds_of_models_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("KVLENS_MODEL_THRESHOLDS", text)
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_thresholds_of_a_model_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_MODEL_THRESHOLDS", '{"m": {"lost_hits_share": 0.7}}')
    monkeypatch.setenv("KVLENS_ZERO_HIT_REQUESTS", "5")
    settings = load_settings()
    assert settings.thresholds("m") is settings.thresholds("m")
    assert (settings.thresholds("m").lost_hits_share, settings.thresholds("n")) == (0.7, settings)
    assert settings.thresholds("m").zero_hit_requests == 5
    other = settings.model_copy(update={"model_thresholds": {"m": {"lost_hits_share": 0.2}}})
    assert other.thresholds("m").lost_hits_share == 0.2
