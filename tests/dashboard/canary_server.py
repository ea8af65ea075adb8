"""A stand-in for a vLLM server with a GPU cache and an offload tier, right or wrong."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK = 16
MODEL = "fake"
Answer = Callable[["Asked"], list[int]]


@dataclass(frozen=True)
class Asked:
    """One request, and what of its prompt the caches had."""

    prompt: list[int]
    tokens: int
    salt: str | None
    local: int
    reloaded: int
    number: int

    def right(self) -> list[int]:
        """What a model that computes says: it depends on the whole prompt."""
        rng = random.Random(str(self.prompt))
        return [rng.randrange(3, 400) for _ in range(self.tokens)]

    def wrong_at(self, position: int) -> list[int]:
        """The same, with one other token."""
        answer = self.right()
        answer[position] += 1
        return answer


@dataclass
class Behaviour:
    """How the server is made."""

    answer: Answer = Asked.right
    tier: bool = True
    counters: bool = True
    reset: bool = True
    failing_resets: int = 0
    """So many resets fail first, as while blocks are being stored."""
    gpu_tokens: int = 4096
    foreign_tokens: int = 0
    """Asked of the tier by others between two of ours."""
    longest: int = 2048
    token_ids: bool = True
    api_key: str | None = None
    asked: list[Asked] = field(default_factory=list)


class CanaryServer:
    """Serves until it is closed."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._gpu: dict[tuple[Any, ...], int] = {}
        self._tier: set[tuple[Any, ...]] = set()
        self._queries = self._hits = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.get(self)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.post(self, json.loads(body or b"{}"))

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        poll = {"poll_interval": 0.02}
        threading.Thread(target=self._http.serve_forever, kwargs=poll, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/metrics":
            return reply(handler, 200, self._metrics())
        key = self.behaviour.api_key
        if key is not None and handler.headers.get("Authorization") != f"Bearer {key}":
            return reply(handler, 401, "{}")
        if handler.path == "/v1/models":
            model = {"id": MODEL, "max_model_len": self.behaviour.longest}
            return reply(handler, 200, json.dumps({"data": [model]}))
        return reply(handler, 404, "{}")

    def post(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        behaviour = self.behaviour
        if handler.path == "/reset_prefix_cache" and behaviour.reset:
            behaviour.failing_resets -= 1
            done = behaviour.failing_resets < 0
            if done:
                self._gpu.clear()
            return reply(handler, 200, json.dumps({"success": done}))
        if handler.path != "/v1/completions":
            return reply(handler, 404, "{}")
        assert body["temperature"] == 0
        assert body["ignore_eos"]
        if len(body["prompt"]) + body["max_tokens"] > behaviour.longest:
            return reply(handler, 400, f"too long: {body['prompt']}")
        with self._lock:
            tokens = self._complete(body)
        choice = {"token_ids": tokens} if behaviour.token_ids else {"text": "w"}
        return reply(handler, 200, json.dumps({"choices": [choice]}))

    def _complete(self, body: dict[str, Any]) -> list[int]:
        prompt, salt = body["prompt"], body.get("cache_salt")
        prefixes = [(salt, *prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
        local = max((len(one) - 1 for one in prefixes if one in self._gpu), default=0)
        found = max((len(one) - 1 for one in prefixes if one in self._tier), default=0)
        reloaded = max(0, found - local) if self.behaviour.tier else 0
        self._queries += len(prompt) - local + self.behaviour.foreign_tokens
        self._hits += reloaded
        asked = Asked(prompt, body["max_tokens"], salt, local, reloaded, len(self.behaviour.asked))
        self.behaviour.asked.append(asked)
        for prefix in prefixes:
            self._gpu.pop(prefix, None)
            self._gpu[prefix] = BLOCK
            self._tier.add(prefix)
        while sum(self._gpu.values()) > self.behaviour.gpu_tokens:
            del self._gpu[next(iter(self._gpu))]
        return self.behaviour.answer(asked)

    def _metrics(self) -> str:
        size = f'num_gpu_blocks="{self.behaviour.gpu_tokens // BLOCK}",block_size="{BLOCK}"'
        page = f'vllm:cache_config_info{{engine="0",{size}}} 1\n'
        if self.behaviour.counters:
            for name, value in (("queries", self._queries), ("hits", self._hits)):
                page += f'vllm:external_prefix_cache_{name}_total{{engine="0"}} {value}\n'
        return page


def reply(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
