"""What to do next, by cause: something to change, upgrade or configure."""

from __future__ import annotations

from typing import Any

from kvlens.telemetry.semconv import Cause

_CORRECTED = (
    'load KVLensOffloadingConnector with "kvlens": {{"lookup": "corrected"}} in '
    "kv_connector_extra_config, or upgrade vLLM to 0.30.0 or newer"
)

_NEXT: dict[Cause, str] = {
    Cause.DRAFTER_FALLBACK: f"On the affected engine {_CORRECTED}: both pop the last chunk of "
    "annotated drafter groups only.",
    Cause.POP_WITHOUT_WIDENING: f"On the affected engine {_CORRECTED}: both ask a drafter group "
    "for one chunk more than it keeps.",
    Cause.WINDOW_VETO: "Look at kv_group {kv_group} in the chunk strip: if the writer keeps fewer "
    "chunks than the reader asks for, "
    "run the connector with lookup=corrected, whose correction reachable_window stores what a load "
    "needs; or set prefix_cache_retention_interval so that more windows are kept, or upgrade vLLM.",
    Cause.CHUNK_GRANULARITY: "Lower block_size or blocks_per_chunk in kv_connector_extra_config "
    "(largest chunk now: {largest_chunk:,} tokens), if prompts of this length matter.",
    Cause.STORE_GAP: "Find out why chunk {first_gap_chunk} of kv_group {kv_group} is skipped: "
    f"gaps at a fixed distance point to the drafter tail of each prefill batch, so {_CORRECTED}; "
    "else look for aborted requests and failed stores at that time.",
    Cause.TAIL_HELD_BACK: f"On the affected engine {_CORRECTED}: both release the held-back chunk "
    "when its request finishes.",
    Cause.ALLOCATION_FAILURE: "Enlarge the pool (--kv-offloading-size or cpu_bytes_to_use), or "
    "lower the number of requests at a time: slots that are being read or written cannot be "
    "evicted.",
    Cause.TRANSFER_FAILED: "Look for 'KV offload' warnings in the engine's log and for errors of "
    "the device or of the tier's backend: transfers fail. The load is not tried again for the same "
    "request; kv_load_failure_policy in --kv-transfer-config says whether it ends (fail, the "
    "default) or is computed (recompute).",
    Cause.CAPACITY: "Enlarge the pool (--kv-offloading-size or cpu_bytes_to_use): it has "
    "{capacity} slots, this prompt alone takes {slots:,}, and it must hold everything that comes "
    "between two uses of a prompt.",
    Cause.POLICY: "Nothing is broken. To offload these chunks too, change the setting that leaves "
    "them out: offload_prompt_only is {offload_prompt_only}, store_threshold is "
    "{store_threshold}, prefix_cache_retention_interval is {retention_interval} (it keeps windows "
    "at a prompt's end only); a request's own max_offload_tokens counts as well.",
    Cause.HASH_SEED: "Start every engine that shares this tier with the same PYTHONHASHSEED (0, "
    "for example); what was stored under other hashes cannot be found again.",
    Cause.PENDING_STORE: "If it is a single request, it only came before the store was done. If "
    "they add up, check the offload worker of this engine: stores that were accepted do not "
    "complete, and only a restart frees the requests that wait for them.",
    Cause.RETRY_STALL: "Check the tier's backend and its network: it answers 'later' again and "
    "again. Until it is well, take it out of the tiers or cap the load with max_load_tokens.",
    Cause.MISALIGNED_STATE: "Treat this request's output as suspect and reset the prefix cache "
    "(POST /reset_prefix_cache): blocks that were hashed after this load may be wrong too. This "
    "layout is not safe with vLLM's own search: give all groups the same chunk size, or turn "
    "offloading off for this model.",
    Cause.UNWRITTEN_SLOT: "Set offload_prompt_only to true, or " + _CORRECTED + "; then reset "
    "the offload cache, since the chunk lies there under a valid hash.",
    Cause.NOT_ATTRIBUTABLE: "Keep this record: run kvlens inspect on the flight recorder's file "
    "and attach its output to an issue.",
}


class _Known(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


def next_step(cause: Cause, facts: dict[str, Any]) -> str:
    """The next step for ``cause``, with the numbers of this case filled in."""
    return _NEXT[cause].format_map(_Known(facts))
