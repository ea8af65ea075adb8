"""The same prompts for every arm, sent over HTTP, and what came back."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvlens.dashboard.demo.model import FIRST_WORD

TIMEOUT_SECONDS = 120.0
COUNTERS = {
    "stored_bytes": "vllm:kv_offload_store_bytes_total",
    "loaded_bytes": "vllm:kv_offload_load_bytes_total",
    "external_queries": "vllm:external_prefix_cache_queries_total",
    "external_hits": "vllm:external_prefix_cache_hits_total",
}
"""What is read from the server's ``/metrics``. The flat byte counters only: the older
``kv_offload_total_bytes`` counts the same bytes. A series may be absent until its first event."""


@dataclass(frozen=True)
class Traffic:
    """Documents asked about in turn: each pushes the ones before it out of the GPU cache."""

    documents: int
    rounds: int
    prompt_tokens: int
    output_tokens: int
    vocab: int

    @property
    def requests(self) -> int:
        """Requests in all rounds."""
        return self.documents * self.rounds

    def prompt(self, document: int) -> list[int]:
        """Token ids of a document, the same in every run."""
        generator = random.Random(document)
        return [generator.randrange(FIRST_WORD, self.vocab) for _ in range(self.prompt_tokens)]


@dataclass(frozen=True)
class TimedAnswer:
    """One request's outcome. Round 0 is the cold one."""

    round: int
    document: int
    first_token_seconds: float
    text: str


class TrafficClient:
    """Talks to one vLLM server."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)
        self._model = model

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def complete(self, prompt: list[int], output_tokens: int, request_id: str) -> tuple[float, str]:
        """Greedy completion of token ids; returns seconds to the first token, and the text."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        first: float | None = None
        text = ""
        began = time.perf_counter()
        headers = {"X-Request-Id": request_id}
        with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if not response.is_success:
                response.read()
                response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if first is None:
                    first = time.perf_counter() - began
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        if first is None:
            raise httpx.RemoteProtocolError(f"request {request_id} was answered without a token")
        return first, text

    def play(self, plan: Traffic, prefix: str) -> Iterator[TimedAnswer]:
        """Send the plan's requests one after another; ids are ``prefix-round-document``."""
        # The first request of a server pays for warming up: not one that is measured.
        other = plan.prompt(plan.documents)[: plan.prompt_tokens // 8]
        self.complete(other, 2, f"{prefix}-warm-up")
        for turn in range(plan.rounds):
            for document in range(plan.documents):
                request_id = f"{prefix}-{turn}-{document}"
                seconds, text = self.complete(plan.prompt(document), plan.output_tokens, request_id)
                yield TimedAnswer(turn, document, seconds, text)

    def counters(self) -> dict[str, int]:
        """Sums of :data:`COUNTERS` over all label sets, 0 where the series is absent."""
        response = self._http.get("/metrics")
        response.raise_for_status()
        return parse_counters(response.text)


def parse_counters(exposition: str) -> dict[str, int]:
    """Read :data:`COUNTERS` from a ``/metrics`` page."""
    keys = {name: key for key, name in COUNTERS.items()}
    totals = dict.fromkeys(COUNTERS, 0.0)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in keys:
                totals[keys[sample.name]] += sample.value
    return {key: int(value) for key, value in totals.items()}
