"""What kvlens finds in the vLLM that is installed here, as one JSON object.

``python -m kvlens.connector.survey`` asks the probes that an engine asks at its start.
``docs/compatibility.md`` is made of the answers of all supported releases, and
``kvlens compat`` shows those of one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from kvlens.connector import support
from kvlens.connector.config import ConnectorSettings
from kvlens.telemetry.semconv import Depth


def traits() -> dict[str, bool]:
    """What a release's own search and its surroundings do; explained in the document."""
    from kvlens.connector import compat, engine_facts
    from kvlens.connector.corrections import pop_widening

    asked: dict[str, Callable[[], bool]] = {
        "widens": lambda: not pop_widening.present(),
        "load window": compat.reaches_load_window,
        "partial tail": compat.loads_partial_tail,
        "chunked local": compat.offloads_chunked_local,
        "unoffloaded groups": compat.bounds_by_other_groups,
        "max_load_tokens": compat.caps_loads,
        "synchronous loads": compat.loads_synchronously,
        "manager lock": compat.locks_manager,
        "lookahead hashes": engine_facts.hashes_look_ahead,
    }
    return {name: has() for name, has in asked.items()}


def survey() -> dict[str, Any]:
    """``{"version", "corrections": {name: state}, "traits": {name: bool}}``."""
    found = compat()
    states = {item["name"]: item["state"] for item in found["corrections"]}
    return {"version": found["vllm_version"], "corrections": states, "traits": traits()}


def compat() -> dict[str, Any]:
    """What ``kvlens compat --json`` writes; raises ``UnsupportedVLLMError`` if vLLM is too old.

    ``vllm_version``, ``tested``, ``depth``, ``symbols`` (``name``, ``present``, ``lost``: what
    is lost without it, ``problem``, ``signature``) and ``corrections`` (``name``, ``state``,
    ``reason``).
    """
    found = support.find()
    return {
        "vllm_version": found.version,
        "tested": found.tested,
        "depth": str(found.depth),
        "symbols": [
            {
                "name": one.symbol.path,
                "present": not one.problem,
                "lost": one.symbol.part.value,
                "problem": one.problem,
                "signature": one.signature,
            }
            for one in found.found
        ],
        "corrections": _corrections(found),
    }


def _corrections(found: support.Support) -> list[dict[str, str]]:
    if found.depth is Depth.INTERFACE:
        return []
    from kvlens.connector import corrections

    planned = corrections.plan(ConnectorSettings(), found)
    return [{"name": item.name, "state": item.state, "reason": item.reason} for item in planned]


if __name__ == "__main__":
    json.dump(survey(), sys.stdout)
