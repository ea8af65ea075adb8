"""An OTLP/HTTP receiver that is not ours: decodes the protobuf and keeps it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_SECONDS = 30.0


@dataclass
class Receiver:
    """What has arrived."""

    url: str
    spans: list[Any] = field(default_factory=list)
    """Protobuf spans of everybody."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The newest of each metric, by name."""

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Wait until ``ready`` gives something."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := ready()):
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.1)
        return found

    def named(self, name: str, **attributes: Any) -> list[Any]:
        """Spans of that name with these attributes (dots written as two underscores)."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return [
            span
            for span in list(self.spans)
            if span.name == name and wanted.items() <= values(span.attributes).items()
        ]


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as plain values; arrays as lists."""
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def receive() -> Iterator[Receiver]:
    """Run a receiver on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans += scope.spans
            else:
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for scope in resource.scope_metrics:
                        receiver.metrics |= {metric.name: metric for metric in scope.metrics}
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
