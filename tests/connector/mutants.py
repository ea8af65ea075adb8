"""vLLM's private offloading modules, changed as the next release might change them.

:func:`install` compiles them with identifiers renamed or a parameter added, consistently,
so that vLLM itself still works. As a program: ``mutants.py FIRST LAST`` serves a scenario
on each numbered variant, in a process of its own, and prints one JSON object for each.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

PRIVATE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
CHANGED = (PRIVATE, f"{PRIVATE}_connector")
RENAMED = (
    "_maximal_prefix_lookup", "_sliding_window_lookup", "_lookup_complete_chunks", "_req_status",
    "_jobs", "_current_batch_load_jobs", "_events_tracker", "_chunks_being_loaded",
    "_mamba_align_size", "_calc_num_offloadable_tokens", "_reachable_store_block_mask",
    "_build_store_jobs", "_full_attention_groups", "_sliding_window_groups", "_job_counter",
    "group_states", "offload_keys", "transfer_jobs", "num_locally_computed_tokens",
    "partial_tail_boundary", "kv_group_configs", "group_idx", "tokens_per_chunk",
    "hashes_per_chunk",
    "OffloadingConnectorScheduler", "RequestOffloadState", "RequestGroupState",
    "SchedulerOffloadConfig", "GroupOffloadConfig", "TransferJobStatus", "from_spec",
    "storable_chunks", "OffloadingWorkerMetadata", "OffloadPromMetrics",
    "completed_jobs", "sliding_window_size", "req_status",
    "start_chunk_idx", "group_config", "update_offload_keys",
)  # fmt: skip
"""Identifiers that only the changed modules use, so that vLLM itself goes on to work."""
WIDENED = (
    "_maximal_prefix_lookup", "_sliding_window_lookup", "_calc_num_offloadable_tokens",
    "_lookup_complete_chunks", "_lookup", "storable_chunks",
)  # fmt: skip
"""Methods that can be given one more required parameter, first."""


def choose(seed: int) -> list[tuple[str, str]]:
    """``(what, identifier)`` of one to four changes."""
    rng = random.Random(seed)
    pool = [("rename", name) for name in RENAMED] + [("parameter", name) for name in WIDENED]
    return rng.sample(pool, rng.randint(1, 4))


def changed(source: str, changes: list[tuple[str, str]]) -> str:
    """``source`` with the changes made."""
    for what, name in changes:
        if what == "rename":
            source = re.sub(rf"\b{name}\b", f"{name}_next", source)
        else:
            source = re.sub(rf"def {name}\(\s*self,?", f"def {name}(self, next_release,", source)
            source = re.sub(rf"(?<=\.){name}\((?!self)", f"{name}(None, ", source)
    return source


def install(changes: list[tuple[str, str]]) -> None:
    """Change the private modules as they are imported from here on."""

    class Loader(SourceFileLoader):
        def get_code(self, fullname):
            source = Path(self.path).read_text(encoding="utf-8")
            return compile(changed(source, changes), self.path, "exec")

    class Finder(MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if not fullname.startswith(CHANGED):
                return None
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin:
                spec.loader = Loader(fullname, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder())
    for name in [name for name in sys.modules if name.startswith((*CHANGED, "kvlens.connector"))]:
        del sys.modules[name]


def serve(seed: int | None, scenario: Path) -> dict[str, object]:
    """What one variant serves of a scenario, and how deep kvlens saw."""
    from kvlens.telemetry.semconv import Depth

    changes = [] if seed is None else choose(seed)
    told: dict[str, object] = {"seed": seed, "changes": changes}
    try:
        install(changes)
        from kvlens.connector.config import LookupMode
        from kvlens.connector.simulation import reading
        from kvlens.connector.simulation.driver import simulate

        read = reading.read(scenario)
        for name, mode, depth in (
            ("stock", LookupMode.STOCK, Depth.INTERFACE),
            ("served", LookupMode.CORRECTED, None),
        ):
            result = simulate(read, "mutant", mode, depth)
            told[name] = [record.served_tokens for record in result.requests]
        told["depth"] = result.engine.depth
        told["depths"] = sorted({record.depth for record in result.requests})
        told["not_seen"] = result.engine.not_seen
    except BaseException:  # noqa: BLE001 - that is what is to be told
        told["error"] = traceback.format_exc()
    return told


def main() -> None:
    scenario, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    import torch  # noqa: F401 - once, for all variants
    import vllm.v1.core.sched.scheduler  # noqa: F401

    for seed in [None, *range(first, last)]:
        sys.stdout.flush()
        if os.fork() == 0:
            print("RESULT " + json.dumps(serve(seed, scenario)), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
