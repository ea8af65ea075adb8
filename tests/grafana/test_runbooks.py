"""Each alert, cause and incident kind has a page, and what pages tell to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stack import ROOT

from grafana import alerts
from grafana.check import check
from kvlens.dashboard import cli
from kvlens.dashboard.api.actions import router as actions
from kvlens.dashboard.api.routes import router as reads
from kvlens.telemetry.semconv import Cause, IncidentKind, Verdict

FOLDER = ROOT / "docs" / "runbooks"
INDEX = (FOLDER / "README.md").read_text()
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
HEADINGS = ["## Look, in this order", "## Fix", "## Fixed when"]
QUERY = re.compile(r"```promql\n\s*(.+)\n\s*```")
API = re.compile(r"\$KVLENS(/api/[a-z0-9/]+)(?:\?([^\"]*))?")


def test_each_kind_of_incident_has_a_page_and_each_page_a_kind() -> None:
    assert {path.stem for path in PAGES} == {str(kind) for kind in IncidentKind}
    for kind in IncidentKind:
        assert f"`{kind}` | [{kind}.md]({kind}.md)" in INDEX


def test_each_alert_leads_to_the_page_of_its_kind() -> None:
    for item in alerts.alerts():
        assert f"| `{item.name}` | `{item.kind}` | [{item.kind}.md]" in INDEX
        assert item.name in (FOLDER / f"{item.page}.md").read_text().splitlines()[0]


def test_each_cause_is_explained_on_its_page() -> None:
    for cause in Cause:
        found = re.search(rf"^\| `{cause}` \| \[(\w+\.md)\]", INDEX, re.MULTILINE)
        assert found, cause
        assert f"`{cause}`" in (FOLDER / found[1]).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_says_what_to_look_at_how_to_fix_and_when_it_is_fixed(page: Path) -> None:
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == HEADINGS
    queries = QUERY.findall(text)
    assert len(queries) == text.count("```promql")
    assert all(check(query) for query in queries)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_what_a_page_tells_to_type_exists(page: Path) -> None:
    text = page.read_text()
    paths = {getattr(route, "path", "") for route in (*reads.routes, *actions.routes)}
    for path, query in API.findall(text):
        assert path in paths
        for pair in query.split("&"):
            name, _, value = pair.partition("=")
            assert name in {"verdict", "limit", "min_lost_tokens"}
            assert name != "verdict" or Verdict(value)
    for line in text.splitlines():
        if line.strip().startswith("kvlens "):
            words = line.replace('"', "").split()[1:]
            assert cli._parser().parse_args(words), line


@pytest.mark.parametrize("page", [*PAGES, FOLDER / "README.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (FOLDER / target).is_file(), target
