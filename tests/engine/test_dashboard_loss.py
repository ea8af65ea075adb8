"""Killing the dashboard in the middle of traffic changes nothing for the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import NEWEST, serve

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.engine import free_port
from kvlens.dashboard.demo.observe import Dashboard
from kvlens.dashboard.demo.process import Supervisor
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=4, rounds=4, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)


def test_a_dead_dashboard_costs_one_warning_and_counted_spans(
    tiny_model: Path, tmp_path: Path
) -> None:
    with Supervisor(signals=()) as supervisor:
        dashboard = Dashboard.start(supervisor, free_port(), tmp_path)
        # The smallest queue, so that it overflows soon.
        settings = {"otlp_endpoint": dashboard.url, "span_queue_size": 64}
        with serve(NEWEST, tiny_model, tmp_path, settings) as server:
            texts = []
            for answer in server.client.play(PLAN, "loss"):
                texts.append(answer.text)
                if len(texts) == PLAN.documents:
                    assert dashboard.records("test", at_least=1)
                    dashboard.close()
                    supervisor.stop(dashboard.child)
            assert texts == texts[: PLAN.documents] * PLAN.rounds
            dropped = semconv.DROPPED_SPANS.exposed_name
            server.flush_until(lambda: (server.metric(dropped) or 0) > 0)
            assert server.metric(semconv.OBSERVER_ERRORS.exposed_name) == 0
            assert len(server.log_lines("does not take spans")) == 1
            for trouble in (" ERROR ", "Traceback"):
                assert server.log_lines(trouble) == []
