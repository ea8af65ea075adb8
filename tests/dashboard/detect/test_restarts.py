"""Every detector goes on after a restart where it stopped, whatever was open."""

from __future__ import annotations

import msgspec
from field import INFO, START, Night, evicted, gap, load, lost, partial, refusing, served, waiting

from kvlens.dashboard.detect.offline import detect
from kvlens.dashboard.detect.panel import Observed, Panel, all_detectors
from kvlens.dashboard.model.incident import Incident
from kvlens.telemetry.records import RequestRecord


def spread(record: RequestRecord, at: float) -> RequestRecord:
    loads = [msgspec.structs.replace(load, time=at) for load in record.loads]
    return msgspec.structs.replace(record, finish_time=at, loads=loads)


def night() -> list[Observed]:
    """Three hundred requests in which everything happens once."""
    records: list[RequestRecord] = [
        *(load(n, 0.04) for n in range(80)),
        *(partial(n) for n in range(80, 90)),
        *(gap(n) for n in range(90, 93)),
        *(evicted(n, tokens=40_000) for n in range(93, 99)),
        *(refusing(n, 1) for n in range(99, 115)),
        *(load(n, 0.4) for n in range(115, 150)),
        served(150, verdict="unsafe", cause="misaligned_state"),
        served(151, dropped=5),
        *(lost(n) for n in range(152, 190)),
        *(served(n) for n in range(190, 300)),
    ]
    records = [spread(record, START + 10 * n) for n, record in enumerate(records)]
    observed = [Observed(record) for record in records]
    waits = [waiting(400 + n, 11, START + 1000.5 + n) for n in range(3)]
    return sorted(
        observed + [Observed(r, waiting=True) for r in waits], key=lambda item: item.order
    )


def run(observations: list[Observed], saved: Panel | None = None) -> tuple[Panel, list[Incident]]:
    """Go through them one by one, as if each were a commit of its own."""
    panel = Panel(all_detectors())
    if saved is not None:
        for part in saved.parts():
            for key in part.dirty:
                state = part.dump(key)
                if state is not None:
                    panel.load(str(part.kind), key, state)
    told: list[Incident] = []
    for item in observations:
        panel.observe([item], lambda _: INFO)
        told += panel.changed.values()
        panel.changed.clear()
    return panel, told


def test_any_restart_gives_the_same_incidents() -> None:
    observations = night()
    _, whole = run(observations)
    assert {incident.kind for incident in whole} == {
        "zero_hit",
        "lost_hits",
        "store_gaps",
        "capacity_thrash",
        "deferral_stall",
        "slow_reload",
        "store_failures",
        "unsafe_boundary",
        "telemetry_lost",
    }
    for cut in range(1, len(observations), 23):
        before, first = run(observations[:cut])
        _, rest = run(observations[cut:], before)
        assert first + rest == whole, cut


def test_a_replay_of_the_recording_ends_as_the_night_did() -> None:
    observations = night()
    _, told = run(observations)
    last = {incident.id: incident for incident in told}
    records = [item.record for item in observations if not item.waiting]
    reports = [item.record for item in observations if item.waiting]
    offline = detect(INFO, records[::-1], reports, all_detectors())
    assert {incident.id: incident for incident in offline} == last


def test_incidents_can_be_written_and_read_again() -> None:
    for incident in Night().see(item.record for item in night()).panel.changed.values():
        again = msgspec.json.decode(msgspec.json.encode(incident), type=Incident)
        assert again == incident
        assert incident.summary
        assert incident.scope.since <= incident.scope.until
