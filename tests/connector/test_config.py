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


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"lookup": "fast"}, "lookup is one of: stock, corrected"),
        ({"look_up": "stock"}, "look_up"),
        ({"sample_rate": 2}, r"\$\.sample_rate"),
        ({"queue_size": "many"}, r"\$\.queue_size"),
        ({"corrections": "some"}, "corrections"),
        ("stock", 'kv_connector_extra_config\\["kvlens"\\] must be an object'),
    ],
)
def test_a_bad_setting_is_named(section, named):
    with pytest.raises(ConfigError, match=named):
        load({"kvlens": section}, {})
