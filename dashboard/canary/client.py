"""The server that is examined: greedy answers, its counters, a way to empty its GPU cache."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import httpx

from kvlens.dashboard.scrape.page import PageError, parse
from kvlens.dashboard.scrape.targets import metrics_url

TIMEOUT_SECONDS: Final = 300.0
SETTLE_SECONDS: Final = 2.0
"""How long a request's counters may come after its answer."""
_QUERIES: Final = "vllm_external_prefix_cache_queries_total"
_HITS: Final = "vllm_external_prefix_cache_hits_total"
_CACHE: Final = "vllm_cache_config_info"
_NAMES: Final = {_QUERIES, _HITS, _CACHE}


class CanaryError(Exception):
    """The canary cannot run; the message says what to change."""


class CacheCounters(NamedTuple):
    """Tokens asked of and found in the offload tier, all requests since the server's start."""

    queries: int
    hits: int


class ServerClient:
    """Talks to one vLLM server."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """Raises :class:`CanaryError` for an address that cannot be one."""
        try:
            url = metrics_url(address)
        except ValueError as error:
            raise CanaryError(str(error)) from error
        # Either address that people have at hand will do.
        self._base = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        self._metrics = f"{self._base}/metrics"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False, headers=headers)
        self.model = ""

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def connect(self) -> int:
        """Find the model that is served; returns the longest prompt with answer, in tokens."""
        answer = self._json(self._call("GET", f"{self._base}/v1/models"))
        try:
            first = answer["data"][0]
            self.model, longest = str(first["id"]), int(first["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CanaryError(
                f"{self._base}/v1/models names no model with its max_model_len: give the address "
                "of a vLLM OpenAI server"
            ) from error
        return longest

    def ask(self, prompt: list[int], output_tokens: int, salt: str | None = None) -> list[int]:
        """Greedy answer to token ids.

        With a ``salt`` that was never used before, nothing can be reused: neither the
        GPU cache nor the offload tier knows blocks of that salt.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        answer = self._json(self._call("POST", f"{self._base}/v1/completions", body))
        try:
            tokens = answer["choices"][0]["token_ids"]
            if not isinstance(tokens, list):
                raise TypeError(type(tokens).__name__)
        except (KeyError, IndexError, TypeError) as error:
            raise CanaryError(
                "the server returns no token ids for `return_token_ids`: give the address of a "
                "vLLM server of a supported release"
            ) from error
        return tokens

    def reset(self) -> bool | None:
        """Empty the GPU's prefix cache; None if this server has no such call."""
        try:
            response = self._http.post(f"{self._base}/reset_prefix_cache")
        except httpx.HTTPError as error:
            raise CanaryError(f"{self._base} does not answer ({error}): is it up?") from error
        if not response.is_success:
            return None
        try:
            return bool(response.json()["success"])
        except (ValueError, KeyError, TypeError):
            return True  # earlier releases say nothing, and do it

    def cache_tokens(self) -> int | None:
        """Tokens that surely fill the GPU cache, None if the server does not tell."""
        sizes = [
            int(labels["num_gpu_blocks"]) * int(labels["block_size"])
            for labels, _ in self._page().get(_CACHE, [])
            if labels.get("num_gpu_blocks", "").isdecimal()
            and labels.get("block_size", "").isdecimal()
        ]
        return sum(sizes) or None

    def counters(self) -> CacheCounters | None:
        """The counters now; None if the server has none."""
        page = self._page()
        if _QUERIES not in page or _HITS not in page:
            return None
        queries, hits = (int(sum(one.value for one in page[name])) for name in (_QUERIES, _HITS))
        return CacheCounters(queries, hits)

    def counters_after(self, before: CacheCounters) -> CacheCounters | None:
        """The counters, as soon as they have moved: they may come after the answer."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            now = self.counters()
            if now is None or now.queries != before.queries or time.monotonic() > deadline:
                return now
            time.sleep(0.01)

    def _page(self) -> Any:
        text = self._call("GET", self._metrics).text
        try:
            return parse(text, _NAMES)
        except PageError as error:
            raise CanaryError(f"{self._metrics}: {error}") from error

    def _call(self, method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise CanaryError(f"{url} does not answer ({error}): is the server up?") from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise CanaryError(f"{url} wants a key: set VLLM_API_KEY to the server's")
        if response.status_code == httpx.codes.BAD_REQUEST:
            # What the server says may hold parts of the prompt: it is not repeated.
            raise CanaryError(
                f"{url} refuses the request: --prompt-tokens, --output-tokens or --vocab may be "
                "too large for this model"
            )
        if not response.is_success:
            raise CanaryError(
                f"{url} answers with HTTP status {response.status_code}: give the address of a "
                "vLLM OpenAI server"
            )
        return response

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise CanaryError(
                f"{response.url} answers with something other than JSON: give the address of a "
                "vLLM OpenAI server"
            ) from error
