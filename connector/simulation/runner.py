"""EngineCore's loop and the model runner's part of it, with made-up tokens."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from kvlens.connector.simulation.engine import VOCABULARY, Engine

FIRST_TOKEN = 3
"""Ids below it are left to special tokens."""
_BATCHES = 2
"""Batches in flight with async scheduling, as in EngineCore."""

_INDEXED = "req_id_to_index" in ModelRunnerOutput.__dataclass_fields__
"""Whether an output says where each request is in it; the order of ``req_ids`` does (0.34)."""

Pending = tuple[Any, Callable[[], Any]]
"""A scheduled batch, and what gives its output."""


class Runner:
    """Schedules, "executes" and feeds back, as ``EngineCore.step`` does.

    Args:
        engine: what is driven.
        drafted: tokens drafted per step of a request, 0 without speculation.
        accepted: how many of them the target accepts, step by step, over and over.
    """

    def __init__(self, engine: Engine, drafted: int, accepted: Sequence[int]) -> None:
        self._engine = engine
        self._drafted = drafted
        self._accepted = accepted or [drafted]
        self._async = engine.vllm_config.scheduler_config.async_scheduling
        self._batches: deque[Pending] = deque()
        self._verified: dict[str, int] = {}
        """Steps of each request in which drafts were verified."""

    @property
    def busy(self) -> bool:
        """Whether another step can change anything."""
        scheduler, transfers = self._engine.scheduler, self._engine.transfers
        unfinished = scheduler.has_unfinished_requests() or scheduler.has_finished_requests()
        moving = scheduler.has_requests() and not transfers.only_hung
        return bool(self._batches or unfinished or moving)

    def step(self) -> None:
        """One step of EngineCore: ``step``, or ``step_with_batch_queue`` if async."""
        self._engine.transfers.advance()
        scheduler = self._engine.scheduler
        if scheduler.has_requests():
            batch = scheduler.schedule()
            self._batches.appendleft((batch, self._execute(batch)))
            if self._async and len(self._batches) < _BATCHES:
                return
        if self._batches:
            batch, output = self._batches.pop()
            scheduler.update_from_output(batch, output())
            if self._drafted and not self._async:
                self._draft(batch)

    def _execute(self, batch: Any) -> Callable[[], Any]:
        """The model runner's calls to the connector; the tokens come when asked for."""
        connector, meta = self._engine.worker, batch.kv_connector_metadata
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        connector.start_load_kv(None)
        connector.wait_for_save()
        transferred = KVConnectorOutput(
            **_transferred(connector, batch.finished_req_ids),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        requests = self._engine.scheduler.requests
        ids = list(batch.num_scheduled_tokens)
        # Taken down now: with async scheduling the next batch moves these numbers on.
        samples = [requests[i].num_computed_tokens >= requests[i].num_tokens for i in ids]

        def output() -> Any:
            return ModelRunnerOutput(
                req_ids=ids,
                **(
                    {"req_id_to_index": {name: i for i, name in enumerate(ids)}} if _INDEXED else {}
                ),
                sampled_token_ids=[
                    self._sample(request_id, batch) if complete else []
                    for request_id, complete in zip(ids, samples, strict=True)
                ],
                kv_connector_output=transferred,
            )

        return output

    def _sample(self, request_id: str, batch: Any) -> list[int]:
        request = self._engine.scheduler.requests.get(request_id)
        if request is None:  # aborted while its batch ran
            return [FIRST_TOKEN]
        drafts = len(batch.scheduled_spec_decode_tokens.get(request_id, ()))
        good = 0
        if drafts:
            step = self._verified[request_id] = self._verified.get(request_id, -1) + 1
            good = min(drafts, self._accepted[step % len(self._accepted)])
        start = request.num_output_tokens
        return [output_token(request, start + index) for index in range(good + 1)]

    def _draft(self, batch: Any) -> None:
        scheduler = self._engine.scheduler
        found = (scheduler.requests.get(request_id) for request_id in batch.num_scheduled_tokens)
        decoding = [request for request in found if request and request.num_output_tokens]
        drafts = [
            [output_token(request, request.num_output_tokens + k) for k in range(self._drafted)]
            for request in decoding
        ]
        ids = [request.request_id for request in decoding]
        scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))


def _transferred(connector: Any, finished: set[str]) -> dict[str, Any]:
    """Requests whose transfers have ended, as the worker tells; from 0.34 failed ones, too."""
    if hasattr(connector, "get_transfer_results"):
        return vars(connector.get_transfer_results(finished))
    sent, received = connector.get_finished(finished)
    return {"finished_sending": sent, "finished_recving": received}


def output_token(request: Any, position: int) -> int:
    """Token that the "model" makes at an output position: the same for equal prompts."""
    tail = request.prompt_token_ids[-8:]
    text = f"{request.num_prompt_tokens}/{tail}/{position}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return FIRST_TOKEN + int.from_bytes(digest, "big") % (VOCABULARY - FIRST_TOKEN)
