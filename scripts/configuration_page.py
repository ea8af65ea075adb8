"""docs/configuration.md, from the settings models themselves."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvlens.connector.config import SECTION, ConnectorSettings
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.notify_settings import NotifySettings
from kvlens.dashboard.settings import Settings
from kvlens.telemetry.environment import PREFIX

Row = tuple[str, str, str, str]

_INTRO = f"""\
# Configuration

A setting that cannot be used is refused at start, by its name and with what is allowed. A variable
that is nearly one (`{PREFIX}SCRAPPE`) is named at start and ignored.

## Connector

In the `{SECTION}` section of vLLM's `kv_connector_extra_config`, or as environment variable
`{PREFIX}<NAME>` of the engine; the section wins:

```
vllm serve MODEL --kv-transfer-config '{{
  "kv_connector": "KVLensOffloadingConnector", "kv_connector_module_path": "kvlens.connector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {{
    "cpu_bytes_to_use": 17179869184,
    "{SECTION}": {{"otlp_endpoint": "http://127.0.0.1:8790", "lookup": "exact"}}}}}}'
```

All other keys there (`cpu_bytes_to_use`, `block_size`, `spec_name`, …) are vLLM's own.

"""
_DASHBOARD = f"""\
## Dashboard

Environment variables `{PREFIX}<NAME>` of `kvlens serve`; lists have commas between, tables are
JSON. Where an option of that name exists (`--host`, `--port`, `--store`, `--scrape`,
`--read-token`, `--ingest-token`), it wins.

"""
_THRESHOLDS = f"""\
## Detectors

Also `{PREFIX}<NAME>`, for all models. `{PREFIX}MODEL_THRESHOLDS` changes some of them for one
model, by the name that it is served under:

```
export {PREFIX}MODEL_THRESHOLDS='{{"org/chat-27b": {{"eligible_min_tokens": 4096}}}}'
```

"""
_VARIABLES = {
    "KVLENS_NATIVE": "`1` in the environment of a vLLM that runs with "
    "`--kv-offloading-backend native`: its connector is replaced by kvlens', nothing else changes",
    "KVLENS_DEMO_ENGINE_PYTHON": "interpreter with vLLM 0.29.0 and kvlens for `kvlens demo`",
}


def configuration() -> str:
    """Content of docs/configuration.md."""
    own = (
        set(Settings.model_fields) - set(Thresholds.model_fields) - set(NotifySettings.model_fields)
    )
    parts = [_INTRO, _table(_connector())]
    parts += [_DASHBOARD, _table(_fields(Settings, own, _documented(Settings)))]
    parts += ["### Notifications\n\nSee [notifications.md](notifications.md).\n\n"]
    parts += [_table(_fields(NotifySettings, None, _documented(NotifySettings)))]
    parts += [_THRESHOLDS, _table(_fields(Thresholds, None, _documented(Thresholds)))]
    parts += ["## Other variables\n\n| variable | |\n| --- | --- |\n"]
    parts += [f"| `{name}` | {meaning} |\n" for name, meaning in _VARIABLES.items()]
    return "".join(parts)


def _documented(model: type) -> dict[str, str]:
    """Attribute docstrings: the string after each annotated name, with markdown's ticks."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    found = {}
    for line, after in itertools.pairwise(body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            text = ast.get_docstring(ast.Module([after], [])) or ""
            found[line.target.id] = text.replace("``", "`")
    return found


def _connector() -> Iterable[Row]:
    texts = _documented(ConnectorSettings)
    for field in msgspec.structs.fields(ConnectorSettings):
        default = field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory() if callable(field.default_factory) else None
        bounds = next((a for a in get_args(field.type) if isinstance(a, msgspec.Meta)), None)
        limits = {"ge": bounds.ge, "le": bounds.le} if bounds else {}
        yield field.name, _default(default), _bounds(limits), texts[field.name]


def _fields(
    model: type[BaseModel], only: set[str] | None, texts: Mapping[str, str]
) -> Iterable[Row]:
    for name, field in model.model_fields.items():
        if only is not None and name not in only:
            continue
        limits = {
            bound: getattr(item, bound)
            for item in field.metadata
            for bound in ("ge", "gt", "le", "lt")
            if hasattr(item, bound)
        }
        default: Any = field.default
        if default is PydanticUndefined:
            default = Path("~/.local/share/kvlens/kvlens.db")
        yield name, _default(default), _bounds(limits), texts[name]


def _default(value: Any) -> str:
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, (bool, list, dict)):
        return f"`{json.dumps(value)}`"
    if isinstance(value, float):
        return f"`{value:g}`" if value < 1e6 else f"`{value:.0f}`"
    return f"`{getattr(value, 'value', value)}`"


def _bounds(limits: Mapping[str, Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(
        f"{signs[name]} {_number(value)}" for name, value in limits.items() if value is not None
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _table(rows: Iterable[Row]) -> str:
    lines = ["| setting | default | bounds | |", "| --- | --- | --- | --- |"]
    for name, default, bounds, text in rows:
        cell = " ".join(text.split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {bounds} | {cell} |")
    return "\n".join(lines) + "\n\n"
