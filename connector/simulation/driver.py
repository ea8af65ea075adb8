"""Runs a scenario: its steps against the engine, its facts into records."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.request import Request, RequestStatus

from kvlens.connector.config import LookupMode
from kvlens.connector.simulation.engine import MAX_TOKENS, VOCABULARY, Engine, build
from kvlens.connector.simulation.medium import SimulationError
from kvlens.connector.simulation.recording import Clock, Records
from kvlens.connector.simulation.runner import FIRST_TOKEN, Runner
from kvlens.connector.simulation.scenario import (
    Backend,
    Prompt,
    Repeat,
    ResetGpuCache,
    ResetOffloadCache,
    Scenario,
    Selection,
    Serve,
    Store,
    Wait,
)
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Depth

_SETTLE_SECONDS = 1.0
"""Idle time at the end: the last requests' stores are decided by then."""


@dataclass(frozen=True)
class Result:
    """What came of one scenario."""

    name: str
    engine: EngineInfo
    requests: list[RequestRecord]
    """In the order in which they finished."""
    waiting: list[RequestRecord]
    """In-flight records of requests that waited long for the tier."""


def simulate(
    scenario: Scenario,
    name: str,
    lookup: LookupMode = LookupMode.CORRECTED,
    depth: Depth | None = None,
) -> Result:
    """Run one scenario on the installed vLLM; raises :class:`SimulationError`."""
    settings = {"lookup": lookup.value}
    if depth is not None:
        settings["depth"] = depth.value
    engine = build(scenario, settings)
    try:
        return _Run(scenario, name, engine).run()
    finally:
        engine.shutdown()


class _Run:
    def __init__(self, scenario: Scenario, name: str, engine: Engine) -> None:
        self._scenario = scenario
        self._name = name
        self._engine = engine
        self._scheduler = engine.scheduler
        self._clock = Clock()
        self._records = Records()
        self._info = msgspec.structs.replace(
            engine.connector.info,
            incarnation_id=f"simulation-{name}",
            started_at=self._clock.seconds,
            host="",
        )
        self._recorder = self._clock.recorder = Recorder(
            self._info, self._records, [self._records], wall_offset_ns=0
        )
        engine.connector.observe(self._clock)
        self._tier = engine.attach_tier()
        drafted = scenario.draft_tokens if scenario.speculative != "none" else 0
        self._runner = Runner(engine, drafted, scenario.accepted_tokens)
        self._made = 0
        self._requests: dict[int, Any] = {}
        self._where = ""

    def run(self) -> Result:
        self._steps(self._scenario.steps, "steps")
        self._pass(_SETTLE_SECONDS)
        self._recorder.flush()
        if self._records.errors:
            raise SimulationError(
                f"kvlens itself failed {self._records.errors} times, see the log; please report it"
            )
        if self._records.fallbacks:
            reasons = ", ".join(sorted(reason for (reason,) in self._records.fallbacks))
            raise SimulationError(f"kvlens fell back to vLLM's own lookup ({reasons}), see the log")
        return Result(self._name, self._info, self._records.requests, self._records.waiting)

    def _steps(self, steps: Sequence[Any], path: str) -> None:
        for index, step in enumerate(steps):
            where = self._where = f"{path}[{index}]"
            if isinstance(step, Repeat):
                for _ in range(step.repeat):
                    self._steps(step.steps, f"{where}.steps")
            elif isinstance(step, Serve):
                self._serve(step)
            elif isinstance(step, Store):
                self._store(step)
            elif isinstance(step, Wait):
                self._pass(step.wait)
            elif isinstance(step, Backend):
                self._engine.transfers.state = step.backend
            elif isinstance(step, ResetGpuCache):
                if not self._scheduler.reset_prefix_cache():
                    raise self._error("the GPU cache cannot be emptied while blocks are in use")
            elif isinstance(step, ResetOffloadCache):
                self._scheduler.reset_connector_cache()

    def _serve(self, step: Serve) -> None:
        requests = [self._request(step, number) for number in range(step.times)]
        for batch in [requests] if step.together else [[request] for request in requests]:
            started = self._clock.now_ns
            for request in batch:
                request.arrival_time = self._clock.seconds
                self._scheduler.add_request(request)
            self._until_idle(batch, started, step.abort_after)

    def _until_idle(self, batch: list[Any], started: int, abort_after: float | None) -> None:
        """Run until the requests have ended and their stores too, or hang."""
        while self._runner.busy:
            self._tick()
            waited = (self._clock.now_ns - started) / 1e9
            left = [request for request in batch if not request.is_finished()]
            if left and abort_after is not None and waited >= abort_after:
                self._scheduler.finish_requests(
                    [request.request_id for request in left], RequestStatus.FINISHED_ABORTED
                )
            elif waited > max(self._scenario.patience, abort_after or 0):
                names = ", ".join(request.request_id for request in left) or "a transfer"
                raise self._error(
                    f"{names} did not end within {self._scenario.patience:g} s; raise gpu_blocks "
                    f"if a prompt does not fit, or give the requests abort_after"
                )

    def _tick(self) -> None:
        try:
            self._runner.step()
        except SimulationError as error:
            raise self._error(str(error)) from error
        except Exception as error:
            raise self._error(
                f"vLLM's scheduler failed, which would have ended the engine: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._clock.now_ns += int(self._scenario.step_seconds * 1e9)
        self._recorder.poll(self._clock.now_ns)

    def _pass(self, seconds: float) -> None:
        end = self._clock.now_ns + int(seconds * 1e9)
        while self._clock.now_ns < end:
            self._tick()

    def _request(self, step: Serve, number: int) -> Any:
        prompt = step.prompt
        if step.unique:
            prompt = msgspec.structs.replace(prompt, seed=prompt.seed + number)
        params = {
            name: value
            for name in ("max_load_tokens", "max_offload_tokens")
            if (value := getattr(step, name)) is not None
        }
        request = self._new(
            prompt,
            SamplingParams(
                max_tokens=step.max_tokens,
                ignore_eos=True,
                skip_reading_prefix_cache=step.skip_reading_prefix_cache or None,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
        )
        if step.drop_chunks or step.only_chunks:
            self._tier.restrict(request.request_id, lambda keys: self._kept(step, request, keys))
        return request

    def _new(self, prompt: Prompt, sampling: Any) -> Any:
        self._made += 1
        if prompt.tokens + sampling.max_tokens > MAX_TOKENS:
            raise self._error(f"a request has at most {MAX_TOKENS:,} tokens")
        request = self._requests[self._made] = Request(
            request_id=f"r{self._made}",
            prompt_token_ids=self._tokens(prompt),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=self._clock.seconds,
            block_hasher=self._engine.hasher,
        )
        return request

    def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.continues is not None:
            earlier = self._requests.get(prompt.continues)
            if earlier is None or not earlier.is_finished():
                raise self._error(f"there is no earlier request {prompt.continues} to continue")
            begin = list(earlier.all_token_ids)[: prompt.tokens]
            return begin + _draw(str(prompt.seed), prompt.tokens - len(begin))
        shared = prompt.tokens if prompt.diverge_after is None else prompt.diverge_after
        tokens = _draw(str(prompt.seed), shared)
        return tokens + _draw(f"{prompt.seed}/{self._made}", prompt.tokens - shared)

    def _error(self, what: str) -> SimulationError:
        return SimulationError(f"{self._where}: {what}")

    def _store(self, step: Store) -> None:
        """Put a prompt's chunks into the tier as a store of another engine would."""
        request = self._new(step.store, SamplingParams(max_tokens=1))
        keys = self._kept(step, request, self._keys(request))
        manager = self._engine.connector.connector_scheduler.manager
        context = ReqContext(req_id=request.request_id)
        output = manager.prepare_store(keys, context)
        if output is None:
            raise self._error(
                f"the tier has no room for {len(keys):,} chunks; raise capacity_chunks "
                f"({self._scenario.capacity_chunks:,} now)"
            )
        manager.complete_store(set(output.keys_to_store), context)
        self._recorder.poll(self._clock.now_ns)

    def _kept(self, step: Selection, request: Any, keys: Iterable[bytes]) -> list[bytes]:
        """Those of a request's keys that the step lets through to the tier."""
        chunks = self._keys(request)
        return [key for key in keys if key not in chunks or step.keeps(*chunks[key])]

    def _keys(self, request: Any) -> dict[bytes, tuple[int, int]]:
        """Offload keys of a request's complete chunks so far: ``(kv_group, chunk)`` of each."""
        hashes = request.block_hashes
        keys = {}
        for group in self._info.layout.groups:
            per_chunk = group.tokens_per_chunk // self._engine.tokens_per_hash
            for chunk in range(len(hashes) // per_chunk):
                key = make_offload_key(hashes[(chunk + 1) * per_chunk - 1], group.kv_group)
                keys[key] = (group.kv_group, chunk)
        return keys


def _draw(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]
