import pytest

from kvlens.connector.config import ConfigError, LookupMode, load


def test_defaults():
    settings = load({}, {})
    assert settings.lookup is LookupMode.CORRECTED
    assert settings.corrections == "auto"
    assert settings.telemetry is True
    assert settings.otlp_endpoint is None
    assert settings.sample_rate == 1.0


def test_file_wins_over_environment():
    settings = load(
        {"kvlens": {"lookup": "stock"}},
        {"KVLENS_LOOKUP": "corrected", "KVLENS_SAMPLE_RATE": "0.25"},
    )
    assert settings.lookup is LookupMode.STOCK
    assert settings.sample_rate == 0.25


def test_environment_names_corrections_and_switches():
    settings = load(
        {}, {"KVLENS_CORRECTIONS": "load_start, pop_widening", "KVLENS_TELEMETRY": "off"}
    )
    assert settings.corrections == ["load_start", "pop_widening"]
    assert settings.telemetry is False


def test_a_flight_recorder_is_off_until_it_has_a_folder():
    assert load({}, {}).flight_recorder is None
    settings = load(
        {"kvlens": {"flight_recorder_mode": "anomalies"}},
        {"KVLENS_FLIGHT_RECORDER": "/var/lib/kvlens", "KVLENS_FLIGHT_RECORDER_CONTEXT": "3"},
    )
    assert settings.flight_recorder == "/var/lib/kvlens"
    assert settings.flight_recorder_mode.value == "anomalies"
    assert (settings.flight_recorder_context, settings.flight_recorder_max_bytes) == (3, 2**28)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"lookup": "fast"}, "lookup is one of: stock, corrected"),
        ({"look_up": "stock"}, "look_up"),
        ({"sample_rate": 2}, r"\$\.sample_rate"),
        ({"queue_size": "many"}, r"\$\.queue_size"),
        ({"corrections": "some"}, "corrections"),
        ({"flight_recorder_mode": "never"}, "flight_recorder_mode is one of: always, anomalies"),
        ({"flight_recorder_max_bytes": 1000}, r"\$\.flight_recorder_max_bytes"),
        ({"flight_recorder_context": -1}, r"\$\.flight_recorder_context"),
        ("stock", 'kv_connector_extra_config\\["kvlens"\\] must be an object'),
    ],
)
def test_a_bad_setting_is_named(section, named):
    with pytest.raises(ConfigError, match=named):
        load({"kvlens": section}, {})


def test_headers_come_from_the_environment_as_opentelemetry_writes_them():
    settings = load({}, {"KVLENS_OTLP_HEADERS": "x-scope-orgid=team-a, authorization=Basic%20a2V5"})
    assert settings.otlp_headers == {"x-scope-orgid": "team-a", "authorization": "Basic a2V5"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [("KVLENS_TELEMETRY", "flase"), ("KVLENS_OTLP_METRICS", ""), ("KVLENS_OTLP_HEADERS", "secret")],
)
def test_a_bad_variable_is_named(variable, text):
    with pytest.raises(ConfigError, match=variable) as error:
        load({}, {variable: text})
    assert "secret" not in str(error.value)
