"""A subscriber to the KV events that an engine publishes, as a router would be one."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

STORED, REMOVED, OFFLOADED = "BlockStored", "BlockRemoved", "CPU"
_TOPIC, _POLL_MILLISECONDS = "kv", 100


class Subscriber:
    """Counts the blocks of all events about the offload tier."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, _TOPIC)
        # vLLM connects to an address, and binds only to a wildcard.
        self._endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._blocks: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    @property
    def arguments(self) -> tuple[str, str]:
        """Arguments of the server that make it publish here."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": _TOPIC,
            "endpoint": self._endpoint,
        }
        return "--kv-events-config", json.dumps(config)

    def offloaded(self, kind: str) -> int:
        """Blocks that :data:`STORED` or :data:`REMOVED` events have named so far."""
        with self._lock:
            return self._blocks[kind]

    def _listen(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MILLISECONDS):
                _topic, _number, payload = self._socket.recv_multipart()
                self._take(msgspec.msgpack.decode(payload))
        self._socket.close(linger=0)

    def _take(self, batch: list[Any]) -> None:
        _time, events = batch[:2]
        with self._lock:
            for event in events:
                if event.get("medium") == OFFLOADED:
                    self._blocks[event["type"]] += len(event["block_hashes"])


@contextmanager
def subscribe() -> Iterator[Subscriber]:
    """Listen where a server is going to publish."""
    subscriber = Subscriber()
    subscriber._thread.start()
    try:
        yield subscriber
    finally:
        subscriber._stop.set()
        subscriber._thread.join()
