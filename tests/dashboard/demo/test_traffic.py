from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from kvlens.dashboard.demo.traffic import Traffic, TrafficClient, parse_counters

PLAN = Traffic(documents=2, rounds=2, prompt_tokens=16, output_tokens=2, vocab=100)
METRICS = """
# TYPE vllm:kv_offload_store_bytes counter
vllm:kv_offload_store_bytes_total{engine="0",model_name="m"} 100.0
vllm:kv_offload_store_bytes_total{engine="1",model_name="m"} 20.0
vllm:kv_offload_store_bytes_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:kv_offload_total_bytes counter
vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="GPU_to_CPU"} 120.0
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 3740.0
"""


class FakeServer(BaseHTTPRequestHandler):
    """Streams two chunks for every completion, and keeps what it was asked."""

    requests: list[tuple[str, dict[str, Any]]] = []
    silent = False

    def do_GET(self) -> None:
        self._answer(METRICS)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.headers["X-Request-Id"], body))
        words = [] if self.silent else [f"w{body['prompt'][0]}", " w7"]
        chunks = [json.dumps({"choices": [{"text": word}]}) for word in words]
        self._answer("".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrafficClient]:
    monkeypatch.setattr(FakeServer, "requests", [])
    with HTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client = TrafficClient(f"http://127.0.0.1:{server.server_port}", "m")
        yield client
        client.close()
        server.shutdown()
        thread.join()


def test_every_round_sends_the_same_prompts_greedily(client: TrafficClient) -> None:
    answers = list(client.play(PLAN, "demo"))
    ids = [request_id for request_id, _ in FakeServer.requests]
    assert ids == ["demo-warm-up", "demo-0-0", "demo-0-1", "demo-1-0", "demo-1-1"]
    bodies = [body for _, body in FakeServer.requests]
    assert bodies[1] == bodies[3]
    assert bodies[1]["prompt"] != bodies[2]["prompt"]
    assert all(body["temperature"] == 0 and body["stream"] for body in bodies)
    assert [(answer.round, answer.document) for answer in answers] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert answers[0].text == f"w{PLAN.prompt(0)[0]} w7"
    assert all(answer.first_token_seconds > 0 for answer in answers)


def test_an_answer_without_a_token_is_an_error(
    client: TrafficClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "silent", True)
    with pytest.raises(httpx.RemoteProtocolError, match="without a token"):
        client.complete([5], 1, "id")


def test_counters_sum_over_engines_and_are_zero_when_absent(client: TrafficClient) -> None:
    assert client.counters() == {
        "stored_bytes": 120,
        "loaded_bytes": 0,
        "external_queries": 3740,
        "external_hits": 0,
    }
    assert parse_counters("") == dict.fromkeys(client.counters(), 0)


def test_prompts_differ_and_use_only_words_of_the_vocabulary() -> None:
    prompts = [PLAN.prompt(document) for document in range(PLAN.documents + 1)]
    for prompt in prompts:
        assert len(prompt) == PLAN.prompt_tokens
        assert 3 <= min(prompt) <= max(prompt) < PLAN.vocab
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
