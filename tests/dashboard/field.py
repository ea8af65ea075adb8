"""Records of the field cases, as the connector's verdicts make them (field-cases in docs)."""

from __future__ import annotations

from collections.abc import Iterable

import factory
import msgspec

from kvlens.dashboard.detect.panel import Observed, Panel, all_detectors
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, GroupChunks, Lookup, RequestRecord, Store

INFO = factory.engine()
START = factory.START


def lost(index: int, info: EngineInfo = INFO, **fields: object) -> RequestRecord:
    return msgspec.structs.replace(factory.lost_record(index, info), **fields)


def served(index: int, info: EngineInfo = INFO, **fields: object) -> RequestRecord:
    return msgspec.structs.replace(factory.served_record(index, info), **fields)


def partial(index: int, tokens: int = 512, **fields: object) -> RequestRecord:
    """Served ``tokens`` of 1,024 and lost the rest."""
    missing = 1024 - tokens
    values: dict[str, object] = {
        "verdict": "partial",
        "cause": "drafter_fallback",
        "causes": ["drafter_fallback"],
        "served_tokens": tokens,
        "lost_tokens": missing,
        "lost_at_lookup": missing,
        "next_step": "do this",
        "vetoing_group": 1,
    }
    return served(index, **{**values, **fields})


def evicted(index: int, tokens: int = 1024, slots: int = 20, **fields: object) -> RequestRecord:
    values: dict[str, object] = {
        "verdict": "evicted",
        "cause": "capacity",
        "causes": ["capacity"],
        "served_tokens": 0,
        "servable_tokens": 0,
        "expected_tokens": 0,
        "next_step": "Enlarge the pool",
        "evidence": {"evicted_tokens": tokens, "slots_needed": slots, "capacity_chunks": 293},
    }
    return served(index, **{**values, **fields})


def waiting(index: int, seconds: float, at: float, **fields: object) -> RequestRecord:
    """A request in flight whose lookup has been deferred for ``seconds`` at time ``at``."""
    lookup = Lookup(
        time=at - seconds,
        seconds=1e-5,
        local_tokens=0,
        num_tokens=1100,
        attempt=1,
        exit="deferred_backend",
        count=int(seconds * 4000),
    )
    values: dict[str, object] = {
        "verdict": "stalled",
        "cause": "pending_store",
        "causes": ["pending_store"],
        "deferral_seconds": seconds,
        "finish_time": at,
        "lookups": [lookup],
        "lost_tokens": 0,
        "next_step": "check the worker",
    }
    return lost(index, **{**values, **fields})


def refusing(index: int, refused: int, stores: int = 1, **fields: object) -> RequestRecord:
    """A served request, some of whose stores the tier refused."""
    at = START + 10 + index
    made = [
        Store(
            time=at,
            refused=n < refused,
            groups=[GroupChunks(kv_group=0, offered=4, refused=4 if n < refused else 0)],
        )
        for n in range(stores)
    ]
    return served(index, stores=made, **fields)


def gap(index: int, **fields: object) -> RequestRecord:
    """F2: every 32nd chunk missing, so that the prompt gets what lies before the first gap."""
    evidence = {
        "kv_group": 0,
        "first_gap_chunk": 31,
        "gap_chunks": [31, 63, 95],
        "gaps": 3,
        "tokens_per_chunk": 256,
    }
    shape: dict[str, object] = {
        "cause": "store_gap",
        "causes": ["store_gap"],
        "evidence": evidence,
        "vetoing_group": 0,
    }
    return partial(index, **{**shape, **fields})


def load(index: int, latency: float, chunks: int = 4, info: EngineInfo = INFO) -> RequestRecord:
    at = START + index
    made = served(index, info).loads[0]
    made = msgspec.structs.replace(
        made, time=at, latency=latency, groups=[GroupChunks(kv_group=0, loaded=chunks)]
    )
    return served(index, info, loads=[made], finish_time=at)


class Night:
    """All detectors over one engine; incidents by kind, each as it stands."""

    def __init__(self, info: EngineInfo = INFO, thresholds: ThresholdsFor = defaults) -> None:
        self.info = info
        self.panel = Panel(all_detectors(thresholds))

    def see(self, records: Iterable[RequestRecord], waiting: bool = False) -> Night:
        known = {self.info.incarnation_id: self.info}
        self.panel.observe([Observed(record, waiting) for record in records], known.get)
        return self

    @property
    def incidents(self) -> dict[str, Incident]:
        found = {incident.kind: incident for incident in self.panel.changed.values()}
        assert len(found) == len(self.panel.changed), "one incident of a kind, not several"
        return found

    @property
    def kinds(self) -> set[str]:
        return set(self.incidents)


def thresholds(**changes: float) -> ThresholdsFor:
    made = Thresholds.model_validate(changes)
    return lambda _model: made
