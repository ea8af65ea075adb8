"""Rules, boards and runbooks that come with the dashboard.

They live elsewhere in the source tree (``grafana/``, ``docs/runbooks/``); the
packages below this one are those folders.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

PUBLISHED_RUNBOOKS = "https://github.com/kvlens/kvlens/blob/main/docs/runbooks"
"""Where the alerts' ``runbook_url`` leads in the files as they are checked in."""
LOCAL = "http://127.0.0.1:8790"
"""Where their boards look for the dashboard."""


@cache
def _texts(folder: str, suffix: str) -> dict[str, str]:
    return {
        item.name: item.read_text(encoding="utf-8")
        for item in sorted(files(f"{__name__}.{folder}").iterdir(), key=lambda item: item.name)
        if item.name.endswith(suffix)
    }


def rule_files(runbooks: str | None = None) -> dict[str, str]:
    """Prometheus rule files by name; alerts lead to ``runbooks`` (a base URL), if given."""
    found = _texts("rules", ".yml")
    if runbooks is None:
        return dict(found)
    base = runbooks.rstrip("/")
    return {name: text.replace(PUBLISHED_RUNBOOKS, base) for name, text in found.items()}


def board_files(dashboard: str | None = None) -> dict[str, str]:
    """Grafana boards as JSON, by file name; they link to ``dashboard``, if given."""
    found = _texts("boards", ".json")
    if dashboard is None:
        return dict(found)
    here = json.dumps(dashboard.rstrip("/"))
    return {name: text.replace(json.dumps(LOCAL), here) for name, text in found.items()}


def runbook_pages() -> dict[str, str]:
    """Runbooks as Markdown, by kind of incident; ``README`` is their index."""
    return {name.removesuffix(".md"): text for name, text in _texts("runbooks", ".md").items()}
