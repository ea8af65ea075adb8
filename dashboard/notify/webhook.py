"""Signed JSON to any receiver, as `Standard Webhooks`_ has it: libraries exist to verify it.

.. _Standard Webhooks: https://www.standardwebhooks.com
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import time
import uuid
from collections import deque
from typing import Final, NamedTuple

import httpx
import msgspec

from kvlens.dashboard.notify.sender import Sender, post
from kvlens.dashboard.selfmetrics import NotifyMetrics
from kvlens.dashboard.view.as_json import incidents_json
from kvlens.dashboard.view.wording import Notice, Wording, rfc3339

_SECRET_PREFIX: Final = "whsec_"
_LONGEST_WAIT: Final = 6 * 3600.0
"""Seconds after which a message is given up."""
_logger = logging.getLogger(__name__)


class Message(NamedTuple):
    """One message: the same id and body at each attempt."""

    id: str
    body: bytes
    made_at: float


def message(event: str, notice: Notice, wording: Wording, now: float) -> Message:
    """Say that ``event`` (``incident.opened``, …) happened at ``now``."""
    (incident,) = incidents_json([notice.incident], lambda _: {notice.incident.id: notice.handling})
    body = {
        "type": event,
        "timestamp": rfc3339(now),
        "data": {
            "incident": incident,
            "dashboard_url": wording.url(notice.incident),
            "annotations": wording.annotations(notice),
        },
    }
    return Message(f"msg_{uuid.uuid4().hex}", msgspec.json.encode(body), now)


def sign(secret: str, ident: str, timestamp: int, body: bytes) -> str:
    """Value of ``webhook-signature``: HMAC-SHA256 over id, time and body."""
    signed = f"{ident}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(_key(secret), signed, "sha256")).decode()


def _key(secret: str) -> bytes:
    if secret.startswith(_SECRET_PREFIX):
        try:
            return base64.b64decode(secret[len(_SECRET_PREFIX) :], validate=True)
        except binascii.Error:
            pass  # text that only looks like it
    return secret.encode()


class Webhook(Sender):
    """One receiver: messages in order, each until it is taken, refused or too old."""

    def __init__(
        self, url: str, client: httpx.Client, metrics: NotifyMetrics, secret: str, capacity: int
    ) -> None:
        """``capacity`` messages are kept for a receiver that does not answer."""
        super().__init__(url, client, metrics)
        self._secret = secret
        self._queue: deque[Message] = deque()
        self._capacity = capacity

    @property
    def waiting(self) -> int:
        """Messages that are still to be sent."""
        return len(self._queue)

    def put(self, item: Message) -> None:
        """Queue a message; never blocks, drops the oldest when full."""
        with self._lock:
            self._queue.append(item)
            if len(self._queue) > self._capacity:
                self._queue.popleft()
                self._metrics.dropped.inc()
        self._wake.set()

    def work(self) -> None:
        """Send all that is queued; raises :class:`Retry`."""
        while (item := self._head()) is not None:
            if time.time() - item.made_at > _LONGEST_WAIT:
                self._done(item)
                self._metrics.failed.inc()
                continue
            timestamp = int(time.time())
            headers = {
                "webhook-id": item.id,
                "webhook-timestamp": str(timestamp),
                "webhook-signature": sign(self._secret, item.id, timestamp, item.body),
            }
            answer = post(self._client, self._url, item.body, headers)
            self._done(item)
            (self._metrics.sent if answer.is_success else self._metrics.failed).inc()
            if not answer.is_success:
                _logger.error("webhook %s refused: HTTP %d", self._name(), answer.status_code)

    def _head(self) -> Message | None:
        with self._lock:
            return self._queue[0] if self._queue else None

    def _done(self, item: Message) -> None:
        """Take it off, unless it was dropped for newer ones while it was sent."""
        with self._lock:
            if self._queue and self._queue[0] is item:
                self._queue.popleft()
