from __future__ import annotations

from kvlens.connector.config import ConnectorSettings
from kvlens.dashboard.settings import Settings
from kvlens.telemetry.environment import misspelt

OTHERS = ("KVLENS_NATIVE", "KVLENS_DEMO_ENGINE_PYTHON")


def test_what_is_nearly_a_setting_is_named_with_the_one_that_was_meant() -> None:
    environ = {
        "KVLENS_LOOKUPS": "exact",
        "KVLENS_FLIGHTRECORDER": "/var/log",
        "KVLENS_LOOKUP": "exact",
        "KVLENS_ANYTHING": "1",
        "LOOKUPS": "1",
        "PATH": "/bin",
    }
    found = misspelt(environ, ConnectorSettings.__struct_fields__)
    assert [sentence.partition(" ")[0] for sentence in found] == [
        "KVLENS_FLIGHTRECORDER", "KVLENS_LOOKUPS",
    ]  # fmt: skip
    assert found[0].endswith("did you mean KVLENS_FLIGHT_RECORDER?")


def test_no_setting_of_one_part_passes_for_a_mistyped_one_of_the_other() -> None:
    connector, dashboard = ConnectorSettings.__struct_fields__, set(Settings.model_fields)
    for mine, others in ((connector, dashboard), (dashboard, connector)):
        environ = dict.fromkeys([*OTHERS, *(f"KVLENS_{name.upper()}" for name in others)], "1")
        assert misspelt(environ, mine) == []
