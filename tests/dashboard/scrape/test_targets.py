from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlens.dashboard.scrape.targets import (
    Target,
    TargetError,
    discovered,
    distinct,
    files,
    from_file,
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


YAML = """\
# as for file_sd_configs
- targets: ['a:8000', b:8000]
  labels:
    rack: 3
- targets: [c]
  labels: {__scheme__: https, __metrics_path__: /m}
- targets:
"""


@pytest.mark.parametrize("name", ["targets.yml", "targets.yaml", "targets"])
def test_a_file_in_yaml(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(YAML)
    assert [target.url for target in from_file(tmp_path / name)] == [
        "http://a:8000/metrics", "http://b:8000/metrics", "https://c/m",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["targets.json", "targets.yml"])
def test_json_is_read_under_both_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('[{"targets": ["a:1"], "labels": null}]')
    assert from_file(tmp_path / name) == [Target("a:1", "http://a:1/metrics")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- targets: [a\n", "is no list of targets"),
        ("targets: [a]", "Expected `array`, got `object`"),
        ("- a:8000", "Expected `object`, got `str`"),
        ("- targets: a:8000", "Expected `array | null`, got `str`"),
        ("- targets: [1]", "Expected `str`, got `int`"),
        ("- targets: ['http://a']", "give host:port, and the rest as labels"),
        ("- !!python/object/apply:os.system [true]", "is no list of targets"),
    ],
)
def test_a_file_that_is_no_list_of_targets(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "targets.yml"
    path.write_text(text)
    with pytest.raises(TargetError) as error:
        from_file(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_of_comments_has_no_targets(tmp_path: Path) -> None:
    (tmp_path / "targets.yml").write_text("# none yet\n")
    assert from_file(tmp_path / "targets.yml") == []


def test_files_by_a_pattern(tmp_path: Path) -> None:
    for name in ("b.yml", "a.yml", "c.json"):
        (tmp_path / name).touch()
    assert [path.name for path in files(str(tmp_path / "*.yml"))] == ["a.yml", "b.yml"]
    assert files(str(tmp_path / "z.yml")) == [tmp_path / "z.yml"]  # reading it says what is wrong
    with pytest.raises(TargetError, match=r"\*\.toml matches no file"):
        files(str(tmp_path / "*.toml"))


def test_one_server_named_twice_is_one() -> None:
    twice = [target_of(metrics_url(name)) for name in ("a:1", "http://a:1/metrics")]
    assert list(distinct(twice)) == ["http://a:1/metrics"]
