"""What kvlens finds in the vLLM that is installed here, as one JSON object.

``python -m kvlens.connector.survey`` asks the probes that an engine asks at its start.
``docs/compatibility.md`` is made of the answers of all supported releases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from kvlens.connector import compat, corrections
from kvlens.connector.config import ConnectorSettings
from kvlens.connector.corrections import pop_widening

TRAITS: dict[str, Callable[[], bool]] = {
    "widens": lambda: not pop_widening.present(),
    "load window": compat.reaches_load_window,
    "partial tail": compat.loads_partial_tail,
    "chunked local": compat.offloads_chunked_local,
    "unoffloaded groups": compat.bounds_by_other_groups,
    "max_load_tokens": compat.caps_loads,
    "synchronous loads": compat.loads_synchronously,
    "manager lock": compat.locks_manager,
    "lookahead hashes": compat.hashes_look_ahead,
}
"""What a release's own search and its surroundings do; explained in the document."""


def survey() -> dict[str, Any]:
    """``{"version", "corrections": {name: state}, "traits": {name: bool}}``."""
    planned = corrections.plan(ConnectorSettings())
    return {
        "version": compat.vllm_version(),
        "corrections": {item.name: item.state for item in planned},
        "traits": {name: has() for name, has in TRAITS.items()},
    }


if __name__ == "__main__":
    json.dump(survey(), sys.stdout)
