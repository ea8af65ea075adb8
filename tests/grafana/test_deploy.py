"""Configuration of the stack and of deployments, each by its own tool or its own schema."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from stack import ROOT, tool

from grafana import generate
from kvlens.connector import config
from kvlens.dashboard.settings import Settings

GRAFANA, DEPLOY = ROOT / "grafana", ROOT / "deploy"
BASE, EXAMPLES = DEPLOY / "kubernetes" / "base", DEPLOY / "kubernetes" / "examples"
KUBERNETES = "1.31"
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Kustomization"}
"""Kinds that Kubernetes itself has no schema for."""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    text = (GRAFANA / "stack" / "prometheus.yml").read_text()
    token = tmp_path / "token"
    token.write_text("0" * 16)
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/kvlens-read-token", str(token)))
    shutil.copy(GRAFANA / "stack" / "targets.json", tmp_path)
    shutil.copytree(GRAFANA / "rules", tmp_path / "rules")
    promtool = tool("promtool", "KVLENS_TEST_PROMTOOL")
    out = run(promtool, "check", "config", tmp_path / "prometheus.yml")
    assert "2 rule files found" in out


def test_alertmanager_takes_its_configuration() -> None:
    amtool = tool("amtool", "KVLENS_TEST_AMTOOL")
    assert "SUCCESS" in run(amtool, "check-config", GRAFANA / "stack" / "alertmanager.yml")


def test_alertmanager_groups_what_prometheus_and_the_dashboard_send() -> None:
    """Both name kind, model and engine alike, so that an incident is one page."""
    route = load(GRAFANA / "stack" / "alertmanager.yml")["route"]
    from grafana.alerts import alerts
    from kvlens.telemetry import semconv

    known = {semconv.LABEL_INCIDENT_KIND, semconv.LABEL_MODEL, semconv.LABEL_ENGINE}
    assert set(route["group_by"]) == known
    assert all(semconv.LABEL_INCIDENT_KIND in item.rule()["labels"] for item in alerts())


def test_the_compose_file_follows_the_specification() -> None:
    # Its package is not imported: only the schema in it is wanted.
    spec = find_spec("check_jsonschema")
    assert spec is not None
    assert spec.origin is not None
    schema = Path(spec.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    compose = load(GRAFANA / "compose.yaml")
    jsonschema.validate(compose, json.loads(schema.read_text()))
    for name, service in compose["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = (GRAFANA / source).exists() if source.startswith(".") else compose["volumes"]
            assert known is True or source in known, volume


def test_settings_in_deployments_exist() -> None:
    known = {f"KVLENS_{name.upper()}" for name in Settings.model_fields}
    for path in (
        GRAFANA / "compose.yaml",
        DEPLOY / "Dockerfile",
        BASE / "deployment.yaml",
        DEPLOY / "systemd" / "kvlens.service",
        DEPLOY / "README.md",
    ):
        names = set(re.findall(r"KVLENS_[A-Z_]+[A-Z]", path.read_text()))
        assert names
        assert names - {"KVLENS_ALERTMANAGER_URLS", "KVLENS_PUBLIC_URL"} <= known, path


def test_grafana_finds_sources_and_boards() -> None:
    sources = load(GRAFANA / "provisioning" / "datasources" / "kvlens.yaml")["datasources"]
    uids = {source["uid"] for source in sources}
    exemplars = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert {item["datasourceUid"] for item in exemplars} <= uids
    provider = load(GRAFANA / "provisioning" / "dashboards" / "kvlens.yaml")["providers"][0]
    mounts = load(GRAFANA / "compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./dashboards:{provider['options']['path']}:ro" in mounts


def manifests() -> list[tuple[str, dict[str, Any]]]:
    paths = [*BASE.glob("*.yaml"), *EXAMPLES.glob("*/podmonitor.yaml")]
    return [
        (f"{path.parent.name}/{path.name}", item)
        for path in sorted(paths)
        for item in yaml.safe_load_all(path.read_text())
    ]


@pytest.mark.parametrize(("name", "manifest"), manifests(), ids=lambda item: str(item)[:40])
def test_manifests_follow_the_schemas_of_kubernetes(name: str, manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"], name
    if manifest["kind"] in CUSTOM:
        assert manifest["kind"] == "Kustomization" or manifest["metadata"]["name"]
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_kustomize_builds_base_and_examples() -> None:
    kubectl = tool("kubectl", "KVLENS_TEST_KUBECTL")
    for folder in (BASE, *sorted(EXAMPLES.iterdir())):
        built = list(yaml.safe_load_all(run(kubectl, "kustomize", folder)))
        kinds = [item["kind"] for item in built]
        assert kinds.count("ConfigMap") == len(generate.BOARDS)
        assert {"Deployment", "Service", "NetworkPolicy", "PrometheusRule"} <= set(kinds)
        assert ("PodMonitor" in kinds) == (folder != BASE)


def test_the_base_lists_what_is_there() -> None:
    listed = {Path(name).name for name in load(BASE / "kustomization.yaml")["resources"]}
    there = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert listed == there | {"dashboards"}
    boards = load(GRAFANA / "dashboards" / "kustomization.yaml")["configMapGenerator"]
    files = {name for item in boards for name in item["files"]}
    assert files == {path.name for path in (GRAFANA / "dashboards").glob("*.json")}


def test_pods_are_confined() -> None:
    pod = load(BASE / "deployment.yaml")["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    confined = pod["containers"][0]["securityContext"]
    assert confined["readOnlyRootFilesystem"] is True
    assert confined["allowPrivilegeEscalation"] is False
    assert confined["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("example", ["production-stack", "llm-d"])
def test_engines_of_the_examples_take_the_connectors_settings(example: str) -> None:
    values = (EXAMPLES / example / "values.yaml").read_text()
    arguments = re.findall(r"--kv-transfer-config=.*", json.dumps(yaml.safe_load(values)))
    assert len(arguments) == 1
    parsed = yaml.safe_load(values)
    holder = (
        parsed["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"]
        if example == "production-stack"
        else parsed["decode"]["containers"][0]["args"]
    )
    transfer = json.loads(holder[0].removeprefix("--kv-transfer-config="))
    assert transfer["kv_connector"] == "KVLensOffloadingConnector"
    settings = config.load(transfer["kv_connector_extra_config"], {})
    assert settings.lookup is config.LookupMode.CORRECTED


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "KVLENS_TEST_SYSTEMD_ANALYZE")
    text = (DEPLOY / "systemd" / "kvlens.service").read_text()
    unit = tmp_path / "kvlens.service"
    unit.write_text(text.replace("/opt/kvlens/bin/kvlens", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kvlens.service:" not in done.stderr


def test_the_image_is_not_root_and_lists_what_it_copies() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    user = [line for line in lines if line.startswith("USER ")]
    assert user == ["USER 10001:10001"]
    kept = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for line in lines:
        if line.startswith("COPY ") and not line.startswith("COPY --from"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert source in kept or source.split("/")[0] in kept, source
