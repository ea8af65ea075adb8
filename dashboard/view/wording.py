"""What a notification says: fields for templates, labels and annotations."""

from __future__ import annotations

import string
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.model.incident import Incident
from kvlens.telemetry import semconv

FIELDS: Final = (
    "kind",
    "severity",
    "state",
    "engine",
    "model",
    "verdict",
    "cause",
    "confidence",
    "summary",
    "next_step",
    "lost_tokens",
    "requests",
    "groups",
    "incident",
    "opened_at",
    "url",
)
"""What a template may name."""
_ALERT_PREFIX: Final = "KVLens"


@dataclass(frozen=True)
class Notice:
    """An incident as it is now, and what people did about it."""

    incident: Incident
    handling: Handling


def check_template(template: str) -> None:
    """Raise ``ValueError`` if a template does not consist of text and ``{field}``s."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"not a template: {error}") from error
    for _, name, spec, conversion in parts:
        if name is not None and (name not in FIELDS or spec or conversion):
            raise ValueError(f"{{{name}}} is not a field: known are {', '.join(FIELDS)}")


@dataclass(frozen=True)
class Wording:
    """Templates and the dashboard's address, from the settings."""

    dashboard_url: str
    summary: str
    description: str
    runbook_url: str | None = None

    def url(self, incident: Incident) -> str:
        """The incident's page."""
        return f"{self.dashboard_url}/incidents/{incident.id}"

    def runbook(self, incident: Incident) -> str:
        """The page that says what to do: the configured one, else the dashboard's own."""
        if self.runbook_url is None:
            return f"{self.dashboard_url}/runbooks/{incident.kind}"
        return self.runbook_url.format_map(self.fields(incident))

    def fields(self, incident: Incident) -> dict[str, str]:
        """All of :data:`FIELDS`; unknown ones are empty or say so."""
        return {
            "kind": incident.kind,
            "severity": incident.severity,
            "state": incident.state,
            "engine": incident.engine_id,
            "model": incident.model,
            "verdict": incident.verdict,
            "cause": incident.cause or "unknown",
            "confidence": incident.confidence,
            "summary": incident.summary,
            "next_step": incident.next_step or "see the dashboard",
            "lost_tokens": f"{incident.lost_tokens:,}",
            "requests": f"{incident.requests:,}",
            "groups": ", ".join(map(str, incident.groups)),
            "incident": incident.id,
            "opened_at": rfc3339(incident.opened_at),
            "url": self.url(incident),
        }

    def labels(self, incident: Incident) -> dict[str, str]:
        """What routes, groups and identifies the alert; names as in the engines' metrics."""
        labels = {
            semconv.LABEL_ALERT: _ALERT_PREFIX
            + "".join(word.capitalize() for word in incident.kind.split("_")),
            semconv.LABEL_SEVERITY: incident.severity,
            semconv.LABEL_ENGINE: incident.engine_id,
            semconv.LABEL_MODEL: incident.model,
            semconv.LABEL_CAUSE: incident.cause or "",
            semconv.LABEL_INCIDENT_KIND: incident.kind,
            semconv.LABEL_INCIDENT: incident.id,
        }
        return {name: value for name, value in labels.items() if value}

    def annotations(self, notice: Notice) -> dict[str, str]:
        """What people read."""
        fields = self.fields(notice.incident)
        found = {
            "summary": self.summary.format_map(fields),
            "description": self.description.format_map(fields),
            "dashboard_url": fields["url"],
        }
        found["runbook_url"] = self.runbook(notice.incident)
        if notice.handling.acknowledged_by is not None:
            found["acknowledged_by"] = notice.handling.acknowledged_by
        return found


def rfc3339(time: float) -> str:
    """Unix seconds as RFC 3339 with microseconds, UTC."""
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="microseconds")
