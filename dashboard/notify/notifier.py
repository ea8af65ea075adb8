"""Tells Alertmanagers and webhooks what became of incidents, off the writer's thread."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import httpx

from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.model.incident import CLOSED, OPEN, Incident
from kvlens.dashboard.notify.alertmanager import Alertmanager
from kvlens.dashboard.notify.webhook import Webhook, message
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.view.wording import Notice, Wording
from kvlens.telemetry import __version__

OPENED: Final = "incident.opened"
CHANGED: Final = "incident.changed"
"""Severity, verdict or cause: not each further request."""
CLOSED_EVENT: Final = "incident.closed"
ACKNOWLEDGED: Final = "incident.acknowledged"
UNACKNOWLEDGED: Final = "incident.unacknowledged"
SILENCED: Final = "incident.silenced"
UNSILENCED: Final = "incident.unsilenced"
ANNOTATED: Final = "incident.annotated"
_DESPITE_SILENCE: Final = frozenset({CLOSED_EVENT, SILENCED, UNSILENCED})
_GRACE: Final = 2.0
"""Seconds that receivers get at the end."""
_logger = logging.getLogger(__name__)


class Notifier:
    """Fans out to the receivers of the settings; without any it costs nothing."""

    def __init__(
        self,
        settings: Settings,
        handling: Callable[[Sequence[str]], dict[str, Handling]],
        metrics: SelfMetrics,
    ) -> None:
        """``handling`` is the store's: what people did about incidents."""
        self._handling = handling
        self._errors = metrics.errors
        self._wording = wording(settings)
        self._known: dict[str, Notice] = {}
        secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret else ""
        self._webhooks = [
            Webhook(url, _client(settings), metrics.webhooks, secret, settings.notify_queue)
            for url in settings.webhook_urls
        ]
        token = settings.alertmanager_token
        bearer = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}
        self._alertmanagers = [
            Alertmanager(
                url,
                _client(settings, bearer),
                metrics.alertmanagers,
                self._wording,
                settings.alertmanager_resend_seconds,
                settings.notify_queue,
            )
            for url in settings.alertmanager_urls
        ]
        metrics.notify_waiting.set_function(lambda: sum(s.waiting for s in self._senders))

    @property
    def _senders(self) -> Sequence[Webhook | Alertmanager]:
        return [*self._webhooks, *self._alertmanagers]

    def start(self) -> None:
        """Start the threads."""
        for sender in self._senders:
            sender.start()

    def adopt(self, open_incidents: Sequence[Incident]) -> None:
        """Take over incidents that are open already: only Alertmanager is told, again."""
        done = self._handling([incident.id for incident in open_incidents])
        for incident in open_incidents:
            notice = Notice(incident, done[incident.id])
            self._known[incident.id] = notice
            for alertmanager in self._alertmanagers:
                alertmanager.tell(notice)

    def release(self) -> None:
        """Leave open incidents to another dashboard; nobody is told that they closed."""
        self._known.clear()
        for alertmanager in self._alertmanagers:
            alertmanager.release()

    def stop(self) -> None:
        """Stop; what waits gets one more try, all receivers together a short grace."""
        for sender in self._senders:
            sender.end()
        deadline = time.monotonic() + _GRACE
        for sender in self._senders:
            sender.join(max(deadline - time.monotonic(), 0.0))

    def incident(self, incident: Incident) -> None:
        """Take a new state of an incident. Never blocks on a receiver, never raises."""
        if not self._senders:
            return
        try:
            self._tell(Notice(incident, self._handling([incident.id])[incident.id]))
        except Exception:
            self._errors.inc()
            _logger.exception("an incident could not be notified of")

    def _tell(self, notice: Notice) -> None:
        ident, now = notice.incident.id, time.time()
        known = self._known.get(ident)
        if known is None and notice.incident.state == CLOSED:
            return  # nobody was told that it opened, or it closed long ago
        if notice.incident.state == OPEN:
            self._known[ident] = notice
        else:
            self._known.pop(ident, None)
        for alertmanager in self._alertmanagers:
            alertmanager.tell(notice)
        for event in events(known, notice):
            if event in _DESPITE_SILENCE or not notice.handling.silenced(now):
                made = message(event, notice, self._wording, now)
                for webhook in self._webhooks:
                    webhook.put(made)


def events(before: Notice | None, after: Notice) -> list[str]:
    """What happened between two states of an incident, for those who are told of events."""
    if before is None:
        return [OPENED]
    old, new = before.handling, after.handling
    found = []
    if _gist(before.incident) != _gist(after.incident):
        found.append(CHANGED)
    if old.acknowledged_at != new.acknowledged_at:
        found.append(UNACKNOWLEDGED if new.acknowledged_at is None else ACKNOWLEDGED)
    if old.silenced_until != new.silenced_until:
        found.append(UNSILENCED if new.silenced_until is None else SILENCED)
    if len(old.annotations) < len(new.annotations) and not found:
        found.append(ANNOTATED)
    if after.incident.state == CLOSED:
        found.append(CLOSED_EVENT)
    return found


def _gist(incident: Incident) -> tuple[str, str, str | None]:
    return incident.severity, incident.verdict, incident.cause


def wording(settings: Settings) -> Wording:
    """Templates and links as configured."""
    host = settings.host if settings.host not in ("0.0.0.0", "::") else socket.gethostname()
    default = f"http://[{host}]" if ":" in host else f"http://{host}"
    return Wording(
        settings.public_url or f"{default}:{settings.port}",
        settings.notify_summary_template,
        settings.notify_description_template,
        settings.runbook_url_template,
    )


def _client(settings: Settings, headers: dict[str, str] | None = None) -> httpx.Client:
    return httpx.Client(
        timeout=settings.notify_timeout_seconds,
        headers={"User-Agent": f"kvlens/{__version__}", **(headers or {})},
    )
