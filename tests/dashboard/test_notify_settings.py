from __future__ import annotations

import pytest

from kvlens.dashboard.settings import SettingsError, load_settings
from kvlens.dashboard.view.wording import FIELDS

SECRET = "0123456789abcdef"


def test_lists_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_ALERTMANAGER_URLS", "http://am-0:9093/, https://am-1/prefix")
    monkeypatch.setenv("KVLENS_WEBHOOK_URLS", "http://receiver/hook?key=1")
    monkeypatch.setenv("KVLENS_WEBHOOK_SECRET", SECRET)
    settings = load_settings()
    assert settings.alertmanager_urls == ("http://am-0:9093", "https://am-1/prefix")
    assert settings.webhook_urls == ("http://receiver/hook?key=1",)
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"alertmanager_urls": "am-0:9093"}, "alertmanager_urls (KVLENS_ALERTMANAGER_URLS): give"),
        ({"webhook_urls": "file:///etc/passwd", "webhook_secret": SECRET}, "webhook_urls"),
        ({"webhook_urls": "http://x"}, "set KVLENS_WEBHOOK_SECRET"),
        ({"webhook_secret": "short"}, "at least 16 characters"),
        ({"public_url": "kvlens.example"}, "public_url"),
        ({"notify_summary_template": "{kin}"}, "{kin} is not a field: known are kind, severity"),
        ({"notify_summary_template": "{"}, "not a template"),
        ({"notify_description_template": "{kind.__class__}"}, "is not a field"),
        ({"notify_description_template": "{kind!r:>9}"}, "is not a field"),
        ({"runbook_url_template": "https://wiki/{page}"}, "runbook_url_template"),
        ({"alertmanager_resend_seconds": 0}, "alertmanager_resend_seconds"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], told: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(**given)
    assert told in str(error.value)
    assert "short" not in str(error.value)


def test_every_field_may_be_used_in_a_template() -> None:
    template = " ".join(f"{{{name}}}" for name in FIELDS) + " {{literal}}"
    assert load_settings(notify_summary_template=template).notify_summary_template == template
