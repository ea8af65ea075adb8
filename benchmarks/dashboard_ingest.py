"""Ingest rate, and the time from a lost request to the stream, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import factory
import httpx
from dashboard_process import Watched, wait_until
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from kvlens.telemetry import semconv
from kvlens.telemetry.emit.otel import SpanSink
from kvlens.telemetry.records import EngineInfo, RequestRecord

_BATCH = 512
"""Spans of one export, as the connector sends them."""
_SENDERS = 4
PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Rate(NamedTuple):
    """Requests (not spans) per second of time and of processor time."""

    requests: int
    spans: int
    mib: float
    per_second: float
    per_cpu_second: float


class _Capture(SpanProcessor):
    """Takes the spans that the connector's own sink makes."""

    dropped = 0

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep it."""
        self.spans.append(span)

    def beat(self, heartbeat: Callable[[], None]) -> None:
        """No sign of life: the traffic is the same each time."""


class Exports(NamedTuple):
    """OTLP bodies of some traffic."""

    bodies: list[bytes]
    ids: list[str]
    spans: int


def traffic(count: int, first: int = 0) -> Exports:
    """``count`` requests of one engine as the connector exports them: all their spans."""
    info = factory.engine("bench:0", f"inc-bench-{first}", started_at=time.time() - 3600)
    capture = _Capture()
    sink = SpanSink(info, capture)  # type: ignore[arg-type]
    made = [_record(n, info) for n in range(first, first + count)]
    for record in made:
        sink.request(record)
    spans = capture.spans
    bodies = [
        encode_spans(spans[start : start + _BATCH]).SerializeToString()
        for start in range(0, len(spans), _BATCH)
    ]
    return Exports(bodies, [record.request_id for record in made], len(spans))


def _record(number: int, info: EngineInfo) -> RequestRecord:
    make = factory.lost_record if number % 50 == 0 else factory.served_record
    return make(number, info, chunks=8, finish=time.time() - 60 + number / 1e6)


def send(url: str, bodies: Sequence[bytes]) -> None:
    """Post all bodies from several connections, again after 429."""

    def work(share: Sequence[bytes]) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            for body in share:
                while (answer := client.post("/v1/traces", content=body, headers=PROTOBUF)) and (
                    answer.status_code in (429, 503)
                ):
                    time.sleep(0.05)
                answer.raise_for_status()

    with ThreadPoolExecutor(_SENDERS) as pool:
        list(pool.map(work, [bodies[n::_SENDERS] for n in range(_SENDERS)]))


def rate(server: Watched, exports: Exports, stored: int) -> Rate:
    """Send everything; ``stored`` are the records that the dashboard had before."""
    cpu, began = server.cpu_seconds(), time.perf_counter()
    send(server.url, exports.bodies)
    seconds = time.perf_counter() - began
    wait_until(lambda: records(server.url) - stored >= len(exports.ids), 60)
    return Rate(
        len(exports.ids),
        exports.spans,
        sum(map(len, exports.bodies)) / 2**20,
        len(exports.ids) / seconds,
        len(exports.ids) / (server.cpu_seconds() - cpu),
    )


def records(url: str) -> int:
    """Records that the dashboard stored since it started."""
    name = f"{semconv.DASHBOARD_RECORDS}_total "
    text = httpx.get(f"{url}/metrics", timeout=120).text
    return int(float(next(li for li in text.splitlines() if li.startswith(name)).split()[1]))


def to_stream(url: str, rounds: int) -> list[float]:
    """Seconds from the finish of an engine's third lost request to the incident on the stream."""
    taken = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in range(rounds):
            info = factory.engine(f"late-{number}:0", f"inc-late-{number}-{time.time_ns()}")
            with client.stream("GET", "/api/v1/stream") as response:
                lines = response.iter_lines()
                next(line for line in lines if line == ": ready")
                for index in range(2):
                    _lose(client, info, index)
                finish = time.time()
                _lose(client, info, 2, finish)
                next(line for line in lines if _is_incident_of(line, info))
                taken.append(time.time() - finish)
    return taken


def _lose(client: httpx.Client, info: EngineInfo, index: int, finish: float | None = None) -> None:
    capture = _Capture()
    sink = SpanSink(info, capture)  # type: ignore[arg-type]
    sink.request(factory.lost_record(index, info, finish=finish or time.time()))
    body = encode_spans(capture.spans).SerializeToString()
    client.post("/v1/traces", content=body, headers=PROTOBUF).raise_for_status()


def _is_incident_of(line: str, info: EngineInfo) -> bool:
    if not line.startswith("data: ") or info.incarnation_id not in line:
        return False
    return "opened_at" in json.loads(line[6:])


def ids_of(exports: Exports, count: int) -> Iterator[str]:
    """Some request ids from all over the traffic."""
    step = max(len(exports.ids) // count, 1)
    return iter(exports.ids[::step][:count])
