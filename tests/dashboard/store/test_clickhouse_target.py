from __future__ import annotations

import pytest

from kvlens.dashboard.settings import SettingsError, load_settings
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget, parse

SECRET = "s3cret/word"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clickhouse://ch/kv", ClickHouseTarget("http://ch:8123", "kv")),
        (
            "clickhouse://ana:s3cret%2Fword@ch.example:9999/kv_1?cluster=prod-1",
            ClickHouseTarget("http://ch.example:9999", "kv_1", "ana", SECRET, "prod-1"),
        ),
        ("clickhouse://[::1]/kv?secure=1", ClickHouseTarget("https://[::1]:8443", "kv")),
        ("clickhouse://ch:8443/kv?secure=true", ClickHouseTarget("https://ch:8443", "kv")),
    ],
)
def test_addresses(text: str, expected: ClickHouseTarget) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("clickhouse://", "not an address"),
        ("clickhouse:///kv", "not an address"),
        ("clickhouse://ch:port/kv", "not an address"),
        ("clickhouse://ch", "name a database"),
        ("clickhouse://ch/a/b", "name a database"),
        ("clickhouse://ch/kv;DROP", "name a database"),
        ("clickhouse://ch/kv?cluster=a'b", "cluster is a name"),
        ("clickhouse://ch/kv?tls=1", "tls: known options are cluster and secure"),
        ("clickhouse://ch/kv?secure=yes", "secure is 1"),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(store=text.replace("://", f"://ana:{SECRET.replace('/', '%2F')}@"))
    assert told in str(error.value)
    assert str(error.value).startswith("store (KVLENS_STORE): ")
    assert "s3cret" not in str(error.value)


def test_the_password_is_never_shown() -> None:
    address = "clickhouse://ana:s3cret%2Fword@ch/kv?cluster=c"
    settings = load_settings(store=address)
    assert settings.clickhouse is not None
    assert settings.clickhouse.password == SECRET
    for text in (repr(settings), settings.store_name, repr(settings.clickhouse)):
        assert "s3cret" not in text
    assert settings.store_name == "clickhouse://ch:8123/kv?cluster=c"


def test_the_password_may_come_from_its_own_setting() -> None:
    settings = load_settings(store="clickhouse://ana@ch/kv", clickhouse_password=SECRET)
    assert settings.clickhouse == ClickHouseTarget("http://ch:8123", "kv", "ana", SECRET)
    assert load_settings(store="/tmp/x.db").clickhouse is None
