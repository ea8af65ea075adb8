from __future__ import annotations

import json

import pytest

from kvlens.dashboard.scrape.targets import (
    Target,
    TargetError,
    discovered,
    distinct,
    metrics_url,
    target_of,
)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("http://host:8000/", "http://host:8000/metrics"),
        ("https://host/vllm/metrics?a=b", "https://host/vllm/metrics?a=b"),
        (" [::1]:8000 ", "http://[::1]:8000/metrics"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert metrics_url(address) == url


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "is no address"),
        ("ftp://host/", "give http://host:port"),
        ("http://", "is no address"),
        ("host:99999", "port that cannot be"),
        ("host:0", "port that cannot be"),
        ("http://me:secret@host", "credentials in addresses"),
    ],
)
def test_addresses_that_cannot_be(address: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        metrics_url(address)
    assert "secret" not in str(caught.value)


def test_prometheus_service_discovery() -> None:
    data = json.dumps([
        {"targets": ["a:8000", "b:8000"], "labels": {"job": "vllm"}},
        {"targets": ["c"], "labels": {"__scheme__": "https", "__metrics_path__": "/m"}},
        {"targets": []},
    ])  # fmt: skip
    assert discovered(data, "sd") == [
        Target("a:8000", "http://a:8000/metrics"),
        Target("b:8000", "http://b:8000/metrics"),
        Target("c/m", "https://c/m"),
    ]


@pytest.mark.parametrize(
    "data", ["", "{}", '[{"targets": "a"}]', '[{"targets": ["ftp://a"]}]', b"\xff", "[" * 9999]
)
def test_what_is_no_list_of_targets(data: str | bytes) -> None:
    with pytest.raises(TargetError, match=r"^targets\.json"):
        discovered(data, "targets.json")


def test_one_server_named_twice_is_one() -> None:
    twice = [target_of(metrics_url(name)) for name in ("a:1", "http://a:1/metrics")]
    assert list(distinct(twice)) == ["http://a:1/metrics"]
