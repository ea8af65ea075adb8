from __future__ import annotations

from pathlib import Path

import pytest

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.telemetry.semconv import IncidentKind

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", [*Thresholds.model_fields, *map(str, IncidentKind)])
def test_every_kind_and_threshold_is_explained(name: str) -> None:
    assert f"`{name}`" in (DOCS / "incidents.md").read_text()
