"""The very rules and boards on a real Prometheus and Alertmanager, fed by real engines.

First an affected engine with vLLM's own lookup: the alert must reach a receiver. Then the newest
one with the corrected lookup, as the same instance: it must resolve, and panels must show data.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from harness import AFFECTED, NEWEST, Server, serve
from prometheus_client.parser import text_string_to_metric_families
from receiver import Receiver, receiving
from stack import Prometheus, start_alertmanager

from grafana import draw, generate
from grafana.panels import ANNOTATIONS
from grafana.promql import VLLM
from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.process import Supervisor
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PLAN = Traffic(documents=5, rounds=1, prompt_tokens=1100, output_tokens=2, vocab=model.TINY.vocab)
"""Documents of which the GPU cache holds two: each comes back evicted."""
ALERT = "KVOffloadZeroHit"
PATIENCE = 120.0
VARIABLES = {
    "$__rate_interval": "15s",
    "$__range": "2m",
    "$model": ".*",
    "$instance": ".*",
    "$engine": ".*",
    "$group": ".*",
}
NO_DATA = {
    "Lookups deferred, 95th percentile": "vLLM creates the series with the first deferred lookup",
    "Store allocation failures": "vLLM creates the series with the first failure",
    "Incidents (kvlens)": "of the dashboard, which is not started here",
}
"""Panels that a healthy run cannot fill, and why."""
NOT_SEEN = {
    "kv_offload_allocation_failure_total",
    "kv_block_idle_before_evict_seconds",
    "kv_offload_lookup_async_delay_seconds",
}
"""Series of vLLM that a healthy run does not have, or only with an option."""


@dataclass
class Story:
    """What was seen on the way."""

    notifications: list[dict[str, Any]] = field(default_factory=list)
    panels: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    page: str = ""
    marks: list[dict[str, Any]] = field(default_factory=list)
    """What the boards' annotation shows while the alert fires."""
    drawings: dict[str, str] = field(default_factory=dict)
    before: int = 0
    """Notifications that came from the first engine."""
    served: float = 0
    """Tokens that the second had served when the alert resolved."""

    def states(self) -> list[str]:
        return [
            alert["status"]
            for note in self.notifications
            for alert in note["alerts"]
            if alert["labels"]["alertname"] == ALERT
        ]


def keep_asking(server: Server, receiver: Receiver, status: str) -> None:
    """Ask the documents in turn, twice at least, until the alert arrived in this state."""
    deadline = time.monotonic() + PATIENCE
    turn = 0
    while turn < 2 * PLAN.documents or not any(
        alert["labels"]["alertname"] == ALERT and alert["status"] == status
        for got in list(receiver.got)
        for alert in got.json["alerts"]
    ):
        assert time.monotonic() < deadline, f"no {status} {ALERT} after {turn} requests"
        server.complete(PLAN.prompt(turn % PLAN.documents), PLAN.output_tokens, f"ask-{turn}")
        turn += 1


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("live")
    engine.write_model(sys.executable, folder / "model", "tiny")
    told = Story()
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        supervisor = stack.enter_context(Supervisor(signals=()))

        def start(version: str, lookup: str) -> Server:
            (folder / lookup).mkdir()
            arm = serve(version, folder / "model", folder / lookup, {"lookup": lookup})
            return stack.enter_context(arm)

        # Both run before the first is asked: an alert must not resolve for want of data.
        stock, corrected = start(AFFECTED, "stock"), start(NEWEST, "corrected")
        address = start_alertmanager(supervisor, folder, f"{receiver.url}/alerts")
        prometheus = Prometheus(supervisor, folder, address)
        prometheus.scrape(stock.url.removeprefix("http://"))
        keep_asking(stock, receiver, "firing")
        told.before = len(receiver.got)
        told.marks = prometheus.query(ANNOTATIONS[0][2])
        prometheus.scrape(corrected.url.removeprefix("http://"))
        keep_asking(corrected, receiver, "resolved")
        told.served = corrected.metric(semconv.SERVED_TOKENS.exposed_name) or 0
        told.panels = ask_panels(prometheus)
        told.drawings = drawings(prometheus, folder / "boards")
        told.page = httpx.get(f"{corrected.url}/metrics", trust_env=False).text
        told.notifications = [got.json for got in receiver.got]
    return told


def drawings(prometheus: Prometheus, folder: Path) -> dict[str, str]:
    """The boards as SVG, by file name."""
    span = ["--start", str(time.time() - 60), "--end", str(time.time()), "--rate", "10s"]
    assert draw.main([prometheus.url, str(folder), *span]) == 0
    return {path.stem: path.read_text() for path in folder.iterdir()}


def ask_panels(prometheus: Prometheus) -> dict[tuple[str, str], list[Any]]:
    """Results of each query of each board, by board and title."""
    found: dict[tuple[str, str], list[Any]] = {}
    for name, module in generate.BOARDS.items():
        for title, expr in generate.expressions(json.loads(generate.encode(module.build()))):
            for variable, value in VARIABLES.items():
                expr = expr.replace(variable, value)
            found.setdefault((name, title), []).append(prometheus.query(expr))
    return found


def test_the_alert_arrives_and_resolves(story: Story) -> None:
    states = story.states()
    assert states[0] == "firing"
    assert states[-1] == "resolved"
    early = story.notifications[: story.before]
    assert all(alert["status"] == "firing" for note in early for alert in note["alerts"])
    assert story.served > 0
    fired = next(
        alert
        for note in story.notifications
        for alert in note["alerts"]
        if alert["labels"]["alertname"] == ALERT
    )
    assert fired["labels"]["severity"] == "critical"
    assert fired["labels"]["form"] == "instrumented"
    assert fired["annotations"]["summary"].startswith(
        f"{engine.MODEL_NAME}, engine 0 at gpu-1:8000: 0 of "
    )
    assert fired["annotations"]["runbook_url"].endswith("/zero_hit.md")


def test_each_panel_shows_data(story: Story) -> None:
    empty = {
        title
        for (_, title), results in story.panels.items()
        if any(not [item for item in result if item["value"][1] != "NaN"] for result in results)
    }
    assert len(story.panels) > 40
    assert ALERT in {mark["metric"]["alertname"] for mark in story.marks}
    # Asked while the alert fires, above; afterwards others may still burn.
    empty -= {ANNOTATIONS[0][0]}
    assert empty == set(NO_DATA), empty ^ set(NO_DATA)


def test_boards_can_be_drawn_without_grafana(story: Story) -> None:
    assert set(story.drawings) == {f"kvlens-{name}" for name in generate.BOARDS}
    for text in story.drawings.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "<polyline" in text


def test_the_list_of_vllm_names_is_true(story: Story) -> None:
    seen: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(story.page):
        for sample in family.samples:
            seen.setdefault(sample.name, (family.type, set()))[1].update(sample.labels)
    for name, listed in VLLM.items():
        if any(name.startswith(stem) for stem in NOT_SEEN):
            continue
        kind, labels = seen[f"vllm:{name}"]
        assert kind == listed["type"], name
        assert labels == {semconv.LABEL_ENGINE, semconv.LABEL_MODEL, *listed["labels"]}, name
