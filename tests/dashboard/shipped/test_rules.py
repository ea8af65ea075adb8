"""`kvlens rules` and the dashboard's runbooks: what a `pip install` alone brings."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from kvlens.dashboard import shipped
from kvlens.dashboard.cli import main
from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings
from kvlens.telemetry.semconv import IncidentKind

ROOT = Path(__file__).resolve().parents[3]


def test_they_are_the_files_of_the_source_tree() -> None:
    for found, folder in (
        (shipped.rule_files(), "grafana/rules"),
        (shipped.board_files(), "grafana/dashboards"),
        ({f"{kind}.md": text for kind, text in shipped.runbook_pages().items()}, "docs/runbooks"),
    ):
        assert found
        for name, text in found.items():
            assert text == (ROOT / folder / name).read_text(encoding="utf-8")


def test_rules_and_boards_are_written_and_lead_to_the_dashboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "on the way"
    assert main(["rules", str(folder), "--dashboard", "https://kvlens.example/"]) == 0
    alerts = (folder / "kvlens-alerts.yml").read_text()
    assert "runbook_url: https://kvlens.example/runbooks/zero_hit.md" in alerts
    assert shipped.PUBLISHED_RUNBOOKS not in alerts
    board = json.loads((folder / "kvlens-fleet.json").read_text())
    (variable,) = (v for v in board["templating"]["list"] if v["name"] == "kvlens_url")
    assert variable["query"] == "https://kvlens.example"
    said = capsys.readouterr().out
    assert all(str(path) in said for path in folder.iterdir())


def test_without_an_address_they_are_as_published(tmp_path: Path) -> None:
    assert main(["rules", str(tmp_path)]) == 0
    for name, text in {**shipped.rule_files(), **shipped.board_files()}.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("bad", ["kvlens.example", "ftp://kvlens.example", "http://"])
def test_what_is_no_address_is_named(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rules", str(tmp_path / "rules"), "--dashboard", bad]) == 2
    assert repr(bad) in capsys.readouterr().err
    assert not (tmp_path / "rules").exists()


def test_a_folder_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["rules", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_dashboard_shows_a_page_for_each_kind(tmp_path: Path) -> None:
    settings = Settings(store=str(tmp_path / "kvlens.db"), port=0)
    with running(settings) as url, httpx.Client(base_url=url, trust_env=False) as client:
        index = client.get("/runbooks").raise_for_status().text
        for kind in IncidentKind:
            page = client.get(f"/runbooks/{kind}").raise_for_status().text
            assert page == client.get(f"/runbooks/{kind}.md").raise_for_status().text
            assert "<h2>" in page
            assert "](" not in page
            assert f'href="/runbooks/{kind}"' in index
        assert client.get("/runbooks/..%2Fsecrets").status_code == 404
