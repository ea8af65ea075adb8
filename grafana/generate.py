"""Write the dashboards and rule files, or check that they are what the code says.

python -m grafana.generate                    write
python -m grafana.generate --check            compare, and check every expression
python -m grafana.generate --runbooks URL     alerts lead to your copy of docs/runbooks
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana import alerts, recording, rule_tests
from grafana.boards import engine, fleet, stock
from grafana.check import CheckError, check
from grafana.rulefile import dump

ROOT: Final = Path(__file__).resolve().parents[1]
BOARDS: Final = {"fleet": fleet, "engine": engine, "stock": stock}
_LABEL_VALUES: Final = re.compile(r"label_values\((.+), (\w+)\)")
_ANY_VLLM: Final = re.compile(r'\{__name__=~"vllm\[:_\](\w+)"\}')


def encode(board: Dashboard) -> str:
    """JSON of a board."""
    return json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def round_trip(text: str) -> str:
    """``text`` read and written again by the SDK: what it does not know is missing afterwards."""
    register_default_plugins()
    return encode(Dashboard.from_json(json.loads(text)))


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and expression of each query, annotation and variable of a board's JSON."""
    for panel in board["panels"]:
        for inner in (panel, *panel.get("panels", ())):
            for target in inner.get("targets", ()):
                yield inner["title"], target["expr"]
    for annotation in board["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in board["templating"]["list"]:
        if found := _LABEL_VALUES.fullmatch(str(variable.get("query", ""))):
            selector = _ANY_VLLM.sub(r"vllm:\1", found[1])
            yield f"variable {variable['name']}", f"count by ({found[2]}) ({selector})"


def outputs(runbooks: str = alerts.RUNBOOKS) -> dict[Path, str]:
    """All generated files by their path."""
    files = {
        ROOT / "grafana" / "dashboards" / f"kvlens-{name}.json": encode(module.build())
        for name, module in BOARDS.items()
    }
    record, alert = recording.groups(), alerts.groups(runbooks)
    files[ROOT / "grafana" / "rules" / "kvlens-recording.yml"] = dump({"groups": record})
    files[ROOT / "grafana" / "rules" / "kvlens-alerts.yml"] = dump({"groups": alert})
    rules = ["../kvlens-recording.yml", "../kvlens-alerts.yml"]
    for name, content in rule_tests.files(rules).items():
        files[ROOT / "grafana" / "rules" / "tests" / name] = dump(content)
    files[ROOT / "deploy" / "kubernetes" / "base" / "prometheusrule.yaml"] = dump(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "kvlens", "labels": {"app.kubernetes.io/name": "kvlens"}},
            "spec": {"groups": [*record, *alert]},
        }
    )
    return files


def problems(files: dict[Path, str]) -> list[str]:
    """What is wrong with the generated files themselves."""
    found = []
    for path, text in files.items():
        named: list[tuple[str, str]] = []
        if path.suffix == ".json":
            named = list(expressions(json.loads(text)))
            if round_trip(text) != text:
                found.append(f"{path.name}: the SDK does not give back what it read")
        for title, expr in named:
            try:
                check(expr)
            except CheckError as error:
                found.append(f"{path.name}: {title}: {error}")
    for item in (*recording.groups(), *alerts.groups()):
        for rule in item["rules"]:
            try:
                check(rule["expr"])
            except CheckError as error:
                found.append(f"{rule.get('alert') or rule['record']}: {error}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 if anything is wrong or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--runbooks", default=alerts.RUNBOOKS, help="address of docs/runbooks")
    options = parser.parse_args(arguments)
    files = outputs(options.runbooks)
    wrong = problems(files)
    for path, text in files.items():
        if options.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                wrong.append(
                    f"{path.relative_to(ROOT)} is not what the code says: run without --check"
                )
        elif not wrong:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
