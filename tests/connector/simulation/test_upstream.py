"""What docs/upstream.md says of vLLM is so on the installed release."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from kvlens.connector.config import LookupMode
from kvlens.connector.simulation.driver import _Run
from kvlens.connector.simulation.engine import build
from kvlens.connector.simulation.reading import read

ROOT = Path(__file__).parents[3]
SCENARIOS = ROOT / "tests" / "scenarios"


def test_the_smallest_reproduction_prints_what_the_document_says():
    text = (ROOT / "docs" / "upstream.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/upstream.md", "exec"), {})
    said = printed.getvalue().strip()
    assert said == "(176, True)"
    assert f"Prints `{said}` on every release" in text


@pytest.mark.parametrize("mode", [LookupMode.STOCK, LookupMode.EXACT])
def test_states_on_top_of_the_wrong_one_go_into_both_caches(mode: LookupMode):
    name = "f13_poisoned_caches"
    engine = build(read(SCENARIOS / f"{name}.yaml"), {"lookup": mode.value})
    run = _Run(read(SCENARIOS / f"{name}.yaml"), name, engine)
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    hashed: set[int] = set()
    stored = []
    update = engine.scheduler.update_from_output
    tier = engine.connector.connector_scheduler.manager
    prepare_store = tier.prepare_store

    def updated(*args):
        for index, block in enumerate(manager.req_to_blocks.get("r2", ())):
            if block.block_hash is not None:
                hashed.add(index)
        return update(*args)

    def offered(keys, context):
        chunks = run._keys(run._requests[int(context.req_id[1:])])
        stored.extend((context.req_id, *chunks[key]) for key in keys if key in chunks)
        return prepare_store(keys, context)

    engine.scheduler.update_from_output, tier.prepare_store = updated, offered
    try:
        served = run.run().requests[0].served_tokens
    finally:
        engine.shutdown()
    assert served == (176 if mode is LookupMode.STOCK else 128)
    # The state after 256 tokens: computed from the one after 192 at token 176, or rightly.
    assert 3 in hashed
    assert ("r2", 1, 3) in stored
