"""The documents say what the code does, and no name is used that is not declared."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlens.telemetry import catalog, semconv, span_catalog

ROOT = Path(__file__).resolve().parents[2]
METRIC = re.compile(r"(?<![:\w])kvlens_[a-z0-9_]+(?![:\w])")
"""Names with a colon are recording rules: ``level:metric:operations``."""
DOTTED = re.compile(r"\b(?:kvlens|kv_offload)\.[a-z0-9_.]*[a-z0-9]")
SUFFIXES = ("_bucket", "_sum", "_count", "_created")
MODULES = ("kvlens.connector", "kvlens.telemetry", "kvlens.dashboard")
# Not names of anything published: what they are says why.
OTHER = {
    "kvlens_transfers": "attribute put on vLLM's worker",
    "kvlens_version": "field of EngineInfo",
    "kvlens_url": "variable of the Grafana dashboards",
    "kvlens.db": "default file of the store",
    "kvlens.theme": "key in the browser's storage",
    "kvlens.name": "another",
    "kvlens_test_": "prefix of databases that tests make",
    "kvlens.io": "domain of Kubernetes annotations",
    "kvlens.service": "unit of systemd",
    "kv_offload.cpu.manager": "module of vLLM",
}


def strings(value):
    return {v for k, v in vars(semconv).items() if isinstance(v, str) and k.startswith(value)}


def declared() -> set[str]:
    names = strings("DASHBOARD_") | strings("SPAN_") | strings("ATTR_")
    for metric in semconv.METRICS:
        names |= {metric.name, metric.otel_name}
    return names | {f"{name}_total" for name in names if METRIC.fullmatch(name)}


def unknown(text: str) -> set[str]:
    known = declared()
    found = set()
    for name in METRIC.findall(text):
        stem = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        if name not in known and stem not in known and name not in OTHER:
            found.add(name)
    for name in DOTTED.findall(text):
        if name not in known and name not in OTHER and not name.startswith(MODULES):
            found.add(name)
    return found


def literals(path: Path) -> str:
    """All string literals of a module that are not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return "\n".join(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    )


def sources() -> list[Path]:
    return [
        path
        for folder in ("connector", "telemetry", "dashboard", "grafana")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".json", ".yml", ".yaml", ".js", ".html"}
        and "vendor" not in path.parts
    ]


def test_no_name_is_used_that_is_not_declared():
    wrong = {}
    for path in sources():
        text = literals(path) if path.suffix == ".py" else path.read_text(encoding="utf-8")
        if names := unknown(text):
            wrong[str(path.relative_to(ROOT))] = names
    assert wrong == {}


def test_documents_use_declared_names_only():
    pages = [*ROOT.glob("*.md")]
    for folder in ("docs", "grafana", "deploy"):
        pages += (ROOT / folder).rglob("*.md")
    wrong = {
        str(page.relative_to(ROOT)): names
        for page in pages
        if (names := unknown(page.read_text(encoding="utf-8")))
    }
    assert len(pages) > 20
    assert wrong == {}


@pytest.mark.parametrize(
    "text",
    ["rate(kvlens_lookup_total[5m])", "kvlens_lookup_seconds_max", "kvlens.tokens.found",
     "kv_offload.requests"],
)  # fmt: skip
def test_a_name_that_is_not_declared_is_found(text):
    assert unknown(text)


@pytest.mark.parametrize(
    "text",
    ["rate(kvlens_lookups_total[5m])", "kvlens_lookup_seconds_bucket", "kvlens.telemetry.records",
     "kvlens.reload_latency", "kv_offload.request"],
)  # fmt: skip
def test_a_name_that_is_declared_is_not(text):
    assert not unknown(text)


def test_every_name_is_explained():
    assert set(catalog.ANSWERS) == set(semconv.METRICS)
    assert {item.name for item in catalog.DASHBOARD} == strings("DASHBOARD_")
    assert {span.name for span in span_catalog.SPANS} == strings("SPAN_")
    explained = {a.name for span in span_catalog.SPANS for a in span.attributes}
    explained |= {a.name for a in (*span_catalog.RESOURCE, *span_catalog.METRIC_RESOURCE)}
    assert explained == strings("ATTR_")
    for answer in catalog.ANSWERS.values():
        assert not unknown(answer.query)
        assert METRIC.search(answer.query)


def test_names_follow_prometheus_and_opentelemetry():
    for metric in semconv.METRICS:
        assert re.fullmatch(r"kvlens_[a-z_]+", metric.name)
        assert not metric.name.endswith(("_total", "_bucket", "_sum", "_count", "_info_total"))
        assert metric.help.endswith(".")
        assert (metric.type == "histogram") == (metric.buckets is not None)
        assert not metric.exemplars or metric.type == "histogram"
        if metric.unit == "s":
            assert metric.name.endswith("_seconds")
    assert len(semconv.METRICS_BY_NAME) == len(semconv.METRICS)
    assert len({m.otel_name for m in semconv.METRICS}) == len(semconv.METRICS)


def test_the_documents_have_not_drifted():
    check = [sys.executable, ROOT / "scripts" / "generate_docs.py", "--check"]
    run = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_prometheus_accepts_the_queries(tmp_path):
    promtool = shutil.which(os.environ.get("KVLENS_TEST_PROMTOOL", "promtool"))
    if promtool is None:
        pytest.skip("no promtool: make setup installs it where it may")
    answers = [*catalog.ANSWERS.values(), *(item.answer for item in catalog.DASHBOARD)]
    rules = [{"record": f"q{n}", "expr": answer.query} for n, answer in enumerate(answers)]
    lines = ["groups:", "- name: queries", "  rules:"]
    for rule in rules:
        lines += [f"  - record: {rule['record']}", f"    expr: '{rule['expr']}'"]
    path = tmp_path / "rules.yml"
    path.write_text("\n".join(lines))
    run = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(rules)} rules found" in run.stdout
