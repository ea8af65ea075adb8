"""A trace of real traffic on vLLM's own scheduler: arrivals, prompts and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvlens.connector.config import LookupMode
from kvlens.connector.observer import Observer
from kvlens.connector.simulation.engine import MAX_TOKENS, Engine, build
from kvlens.connector.simulation.medium import SimulationError
from kvlens.connector.simulation.prompts import Prompts
from kvlens.connector.simulation.recording import START_NS, Clock, Records
from kvlens.connector.simulation.runner import Runner
from kvlens.connector.simulation.scenario import Scenario
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.sizing.trace import TraceRequest

MAX_OUTPUT: Final = 16
"""Tokens that a request generates at most: answers stay out of the tier by default, and longer
ones only take time."""
_AHEAD: Final = 2
"""So many times ``max_requests`` may be in the scheduler; further arrivals wait outside."""
_SETTLE_NS: Final = 1_000_000_000


class Watch(Protocol):
    """Takes records as they are made."""

    def finished(self, record: RequestRecord, engine: EngineInfo) -> None:
        """A request has finished."""

    def waiting(self, record: RequestRecord, engine: EngineInfo) -> None:
        """A request has been waiting for the tier for long."""


@dataclass(frozen=True)
class Pace:
    """How a trace is driven."""

    speed: float = 1.0
    """Times as fast as the trace."""
    max_output: int = MAX_OUTPUT


class _Told(Records):
    """Hands records on at once and keeps none."""

    def __init__(self, watch: Watch, info: EngineInfo) -> None:
        super().__init__()
        self._watch = watch
        self._info = info

    def request(self, record: RequestRecord) -> None:
        """Take a finished request."""
        self._watch.finished(record, self._info)

    def deferral(self, record: RequestRecord) -> None:
        """Take an in-flight record."""
        self._watch.waiting(record, self._info)


def drive(
    requests: Iterable[TraceRequest],
    block_tokens: Callable[[], int],
    scenario: Scenario,
    lookup: LookupMode,
    pace: Pace,
    watch: Watch,
    progress: Callable[[], None] | None = None,
) -> EngineInfo:
    """Run a trace on the installed vLLM; raises :class:`SimulationError`.

    Args:
        requests: in order of arrival.
        block_tokens: tokens of a trace block; asked when the first request is there.
        scenario: the engine; its steps are not run.
        lookup: how lookups are done.
        pace: how fast.
        watch: takes the records; none is kept here.
        progress: told of each request that is given to the scheduler.
    """
    engine = build(scenario, {"lookup": lookup.value})
    try:
        run = _Run(scenario, engine, lookup, pace, watch)
        return run.run(requests, block_tokens, progress or (lambda: None))
    finally:
        engine.shutdown()


class _Run:
    def __init__(
        self, scenario: Scenario, engine: Engine, lookup: LookupMode, pace: Pace, watch: Watch
    ) -> None:
        self._scenario, self._engine, self._pace = scenario, engine, pace
        self._scheduler = engine.scheduler
        self._clock = Clock()
        self._info = msgspec.structs.replace(
            engine.connector.info,
            incarnation_id=f"simulation-{lookup.value}",
            started_at=self._clock.seconds,
            host="",
        )
        self._records = _Told(watch, self._info)
        self._recorder = self._clock.recorder = Recorder(
            self._info, self._records, [self._records], wall_offset_ns=0
        )
        engine.connector.connector_scheduler.observe(Observer(self._clock))
        engine.attach_tier()
        drafted = scenario.draft_tokens if scenario.speculative != "none" else 0
        self._runner = Runner(engine, drafted, scenario.accepted_tokens)
        self._oldest: dict[str, int] = {}
        """When requests were given to the scheduler, simulated ns, in that order."""

    def run(
        self,
        requests: Iterable[TraceRequest],
        block_tokens: Callable[[], int],
        progress: Callable[[], None],
    ) -> EngineInfo:
        for number, (arrival, request) in enumerate(self._arrivals(requests), 1):
            if number == 1:
                prompts = Prompts(block_tokens())
            self._until(arrival)
            self._give(number, request, prompts)
            progress()
        while self._runner.busy:
            self._tick()
        end = self._clock.now_ns + _SETTLE_NS
        while self._clock.now_ns < end:
            self._tick()
        self._recorder.flush()
        self._sound()
        return self._info

    def _arrivals(self, requests: Iterable[TraceRequest]) -> Iterator[tuple[int, TraceRequest]]:
        first: float | None = None
        for request in requests:
            first = request.time if first is None else first
            seconds = max(0.0, request.time - first) / self._pace.speed
            yield START_NS + int(seconds * 1e9), request

    def _until(self, arrival: int) -> None:
        """Let the engine work until that time and until there is room for one more."""
        most = _AHEAD * self._scenario.max_requests
        while self._runner.busy and (
            self._clock.now_ns < arrival or len(self._scheduler.requests) >= most
        ):
            self._tick()
        if self._clock.now_ns < arrival:  # nothing to do until then
            self._clock.now_ns = arrival
            self._recorder.poll(arrival)

    def _give(self, number: int, request: TraceRequest, prompts: Prompts) -> None:
        output = max(1, min(request.output_tokens, self._pace.max_output))
        if request.tokens + output > MAX_TOKENS:
            raise SimulationError(
                f"request {number}: {request.tokens:,} prompt tokens; a request has at most "
                f"{MAX_TOKENS:,}"
            )
        name = f"r{number}"
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompts.tokens(request),
                sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
                pooling_params=None,
                arrival_time=self._clock.seconds,
                block_hasher=self._engine.hasher,
            )
        )
        self._oldest[name] = self._clock.now_ns

    def _tick(self) -> None:
        try:
            self._runner.step()
        except SimulationError:
            raise
        except Exception as error:
            raise SimulationError(
                f"vLLM's scheduler failed, which would have ended the engine: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._clock.now_ns += int(self._scenario.step_seconds * 1e9)
        self._recorder.poll(self._clock.now_ns)
        while self._oldest and (name := next(iter(self._oldest))) not in self._scheduler.requests:
            del self._oldest[name]
        if self._oldest:
            waited = (self._clock.now_ns - self._oldest[name]) / 1e9
            if waited > self._scenario.patience:
                raise SimulationError(
                    f"{name} did not end within {self._scenario.patience:g} s; raise gpu_blocks "
                    f"({self._scenario.gpu_blocks:,} now) if a prompt does not fit, or patience"
                )

    def _sound(self) -> None:
        """Raise if the records are not what was asked for."""
        if self._records.errors:
            raise SimulationError(
                f"kvlens itself failed {self._records.errors} times, see the log; please report it"
            )
        if self._records.fallbacks:
            reasons = ", ".join(sorted(reason for (reason,) in self._records.fallbacks))
            raise SimulationError(f"kvlens fell back to vLLM's own lookup ({reasons}), see the log")
