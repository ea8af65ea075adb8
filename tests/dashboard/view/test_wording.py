from __future__ import annotations

import factory
from noticing import START, WORDING, incident

from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.notify.notifier import wording
from kvlens.dashboard.settings import load_settings
from kvlens.dashboard.view.wording import FIELDS, Notice


def test_labels_route_and_group() -> None:
    assert WORDING.labels(incident()) == {
        "alertname": "KVLensZeroHit",
        "severity": "critical",
        "engine": "node-a:0",
        "model_name": factory.MODEL,
        "cause": "drafter_fallback",
        "incident_kind": "zero_hit",
        "incident": "zero_hit-1",
    }
    assert "cause" not in WORDING.labels(incident(cause=None))


def test_annotations() -> None:
    acknowledged = Handling(acknowledged_by="ana", acknowledged_at=START)
    assert WORDING.annotations(Notice(incident(), acknowledged)) == {
        "summary": "zero_hit on node-a:0",
        "description": "0 of 3,072 served; Upgrade",
        "dashboard_url": "https://kv.example/incidents/zero_hit-1",
        "runbook_url": "https://wiki.example/zero_hit",
        "acknowledged_by": "ana",
    }


def test_what_comes_from_outside_is_no_template() -> None:
    text = WORDING.annotations(Notice(incident(engine_id="{kind}"), Handling()))["summary"]
    assert text == "zero_hit on {kind}"


def test_all_fields_have_values() -> None:
    fields = WORDING.fields(incident(cause=None, next_step="", groups=[]))
    assert tuple(fields) == FIELDS
    assert fields["opened_at"] == "2026-09-21T14:13:20.250000+00:00"
    assert (fields["cause"], fields["next_step"]) == ("unknown", "see the dashboard")


def test_links_lead_to_where_the_dashboard_is() -> None:
    assert wording(load_settings()).dashboard_url == "http://127.0.0.1:8790"
    assert wording(load_settings(host="::1")).dashboard_url == "http://[::1]:8790"
    public = load_settings(public_url="https://kv.example/")
    assert wording(public).url(incident()) == "https://kv.example/incidents/zero_hit-1"
    tokens = {"read_token": "x" * 16, "ingest_token": "y" * 16}
    assert "0.0.0.0" not in wording(load_settings(host="0.0.0.0", **tokens)).dashboard_url
