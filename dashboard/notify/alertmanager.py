"""Alertmanager, API v2: open incidents are alerts, sent again and again until they close."""

from __future__ import annotations

import logging
import time
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from kvlens.dashboard.model.incident import OPEN
from kvlens.dashboard.notify.sender import Retry, Sender, post
from kvlens.dashboard.selfmetrics import NotifyMetrics
from kvlens.dashboard.view.wording import Notice, Wording, rfc3339
from kvlens.telemetry.semconv import LABEL_INCIDENT

_CHUNK: Final = 100
"""Alerts in one request."""
_MISSED: Final = 4
"""Missed repetitions after which Alertmanager resolves the alerts of a dashboard that died."""
_logger = logging.getLogger(__name__)


class _Alert(NamedTuple):
    notice: Notice
    labels: dict[str, str]
    """An alert's identity; kept as first sent, since an incident's cause may change."""


class Alertmanager(Sender):
    """One Alertmanager. A cluster of them is several: alerts go to each (its own advice)."""

    def __init__(
        self,
        url: str,
        client: httpx.Client,
        metrics: NotifyMetrics,
        wording: Wording,
        resend: float,
        capacity: int,
    ) -> None:
        """``resend`` are seconds, ``capacity`` the closed incidents kept for an outage."""
        super().__init__(url, client, metrics)
        self.every = resend
        self._wording = wording
        self._capacity = capacity
        self._open: dict[str, _Alert] = {}
        self._closed: dict[str, _Alert] = {}
        self._silences: dict[str, float] = {}
        """End of the silence that Alertmanager was told of, by incident."""

    @property
    def waiting(self) -> int:
        """Closed incidents that it has not heard of."""
        return len(self._closed)

    def tell(self, notice: Notice) -> None:
        """Take a new state of an incident; never blocks."""
        ident = notice.incident.id
        with self._lock:
            known = self._open.pop(ident, None) or self._closed.pop(ident, None)
            labels = known.labels if known else self._wording.labels(notice.incident)
            alerts = self._open if notice.incident.state == OPEN else self._closed
            alerts[ident] = _Alert(notice, labels)
            if len(self._closed) > self._capacity:
                # It resolves by itself when it is not sent again.
                del self._closed[next(iter(self._closed))]
                self._metrics.dropped.inc()
        self._wake.set()

    def release(self) -> None:
        """Do not repeat open incidents any more; another dashboard does."""
        with self._lock:
            self._open.clear()

    def work(self) -> None:
        """Send all open incidents and those that closed; raises :class:`Retry`."""
        with self._lock:
            alerts = [*self._open.values(), *self._closed.values()]
        now = time.time()
        for start in range(0, len(alerts), _CHUNK):
            chunk = alerts[start : start + _CHUNK]
            body = _json([self._payload(alert, now) for alert in chunk])
            answer = post(self._client, f"{self._url}/api/v2/alerts", body, {})
            self._check(answer, len(chunk))
            self._forget(chunk)
        for alert in alerts:
            self._silence(alert.notice, now)

    def _payload(self, alert: _Alert, now: float) -> dict[str, Any]:
        notice, incident = alert.notice, alert.notice.incident
        # Engines' clocks may be ahead, but nothing ends before it starts.
        starts = min(incident.opened_at, now)
        if incident.state == OPEN:
            ends = now + _MISSED * (self.every or 0.0)
        else:
            ends = max(min(incident.closed_at or now, now), starts)
        return {
            "labels": alert.labels,
            "annotations": self._wording.annotations(notice),
            "startsAt": rfc3339(starts),
            "endsAt": rfc3339(ends),
            "generatorURL": self._wording.url(incident),
        }

    def _check(self, answer: httpx.Response, count: int) -> None:
        if answer.is_success:
            self._metrics.sent.inc(count)
            return
        # 400: it took the valid alerts of the request, and would refuse the others again.
        self._metrics.failed.inc(count)
        _logger.error(
            "Alertmanager %s refused alerts: HTTP %d %s",
            self._name(),
            answer.status_code,
            answer.text[:200],
        )

    def _forget(self, chunk: list[_Alert]) -> None:
        """Closed incidents need no repetition once they are delivered."""
        with self._lock:
            for alert in chunk:
                ident = alert.notice.incident.id
                if self._closed.get(ident) is alert:
                    del self._closed[ident]
                    self._silences.pop(ident, None)

    def _silence(self, notice: Notice, now: float) -> None:
        """Make Alertmanager's silence of this incident what people set here."""
        ident, until = notice.incident.id, notice.handling.silenced_until
        wanted = until if until is not None and until > now else None
        if notice.incident.state != OPEN or self._silences.get(ident) == wanted:
            return
        self._expire_silences(ident)
        if wanted is not None:
            silence = {
                "matchers": [
                    {"name": LABEL_INCIDENT, "value": ident, "isRegex": False, "isEqual": True}
                ],
                "startsAt": rfc3339(now),
                "endsAt": rfc3339(wanted),
                "createdBy": notice.handling.silenced_by or "kvlens",
                "comment": f"silenced in kvlens: {self._wording.url(notice.incident)}",
            }
            self._check(post(self._client, f"{self._url}/api/v2/silences", _json(silence), {}), 1)
            self._silences[ident] = wanted
        else:
            self._silences.pop(ident, None)

    def _expire_silences(self, ident: str) -> None:
        """End what was set before, also by an earlier process of ours."""
        try:
            found = self._client.get(
                f"{self._url}/api/v2/silences", params={"filter": f'{LABEL_INCIDENT}="{ident}"'}
            )
            found.raise_for_status()
            for silence in found.json():
                if silence["status"]["state"] != "expired":
                    self._client.delete(f"{self._url}/api/v2/silence/{silence['id']}")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise Retry(f"silences: {type(error).__name__}: {error}") from error


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
