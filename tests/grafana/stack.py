"""Real Prometheus and Alertmanager on free ports, with the project's own files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from grafana import alerts, recording
from grafana.rulefile import dump, shorten
from kvlens.dashboard.demo.engine import free_port, responds
from kvlens.dashboard.demo.process import Supervisor

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
FACTOR = 60
"""How much faster than in production rules run in tests: a minute is a second."""


def tool(command: str, variable: str) -> str:
    """Path of a program; skips the test where there is none."""
    path = shutil.which(os.environ.get(variable, command))
    if path is None:
        pytest.skip(f"no {command}: run `make setup` as root, or name it in {variable}")
    return path


class Prometheus:
    """A Prometheus that scrapes one target, which may be replaced, every second."""

    def __init__(self, supervisor: Supervisor, folder: Path, alertmanager: str = "") -> None:
        binary = tool("prometheus", "KVLENS_TEST_PROMETHEUS")
        self._targets = folder / "targets.json"
        rules = {"groups": shorten([*recording.groups(), *alerts.groups()], FACTOR)}
        (folder / "rules.yml").write_text(dump(rules))
        self.scrape("127.0.0.1:9")
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "vllm",
                    "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": "1s"}],
                }
            ],
        }
        if alertmanager:
            targets = [{"targets": [alertmanager]}]
            config["alerting"] = {"alertmanagers": [{"static_configs": targets}]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            binary,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
            "--log.level=warn",
        ]
        child = supervisor.start("Prometheus", command, folder / "prometheus.log", {})
        child.wait_until(lambda: responds(f"{self.url}/-/ready"), START_SECONDS)

    def scrape(self, address: str) -> None:
        """Scrape ``address`` from now on, as the same instance."""
        text = json.dumps([{"targets": [address], "labels": {"instance": "gpu-1:8000"}}])
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._targets)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Result of an instant query that is a vector."""
        answer = httpx.get(
            f"{self.url}/api/v1/query", params={"query": expr}, trust_env=False, timeout=30
        )
        body = answer.json()
        assert body["status"] == "success", f"{body.get('error')}: {expr}"
        result: list[dict[str, Any]] = body["data"]["result"]
        return result


def start_alertmanager(supervisor: Supervisor, folder: Path, receiver: str) -> str:
    """Alertmanager with the shipped configuration, faster, and ``receiver``; its address."""
    binary = tool("prometheus-alertmanager", "KVLENS_TEST_ALERTMANAGER")
    config = yaml.safe_load((ROOT / "grafana" / "stack" / "alertmanager.yml").read_text())
    config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    config["receivers"][0]["webhook_configs"] = [{"url": receiver, "send_resolved": True}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        binary,
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    child = supervisor.start("Alertmanager", command, folder / "alertmanager.log", {})
    child.wait_until(lambda: responds(f"http://{address}/-/ready"), START_SECONDS)
    return address
