"""The cases of all alerts: firing, not firing, series absent, counters reset, field cases."""

from __future__ import annotations

from typing import Any, Final

from grafana import alerts, recording
from grafana.rule_cases import UP, Case, healthy, kv, requests, stock, vl
from kvlens.telemetry import semconv as s
from kvlens.telemetry.semconv import Cause, Verdict

ZERO, LOST, GAPS = "KVOffloadZeroHit", "KVOffloadLostTokens", "KVOffloadStoreGaps"
THRASH, STALL, SLOW = "KVOffloadCapacityThrash", "KVOffloadDeferralStall", "KVOffloadSlowReload"
FAILURES, UNSAFE, BLIND = "KVOffloadStoreFailures", "KVOffloadUnsafeBoundary", "KVLensTelemetryLost"
EVALUATED: Final = [group["name"] for group in (*recording.groups(), *alerts.groups())]
"""promtool 3 goes through groups in any order unless told: alerts after what they read."""
SILENT: Final[dict[str, int]] = {}
_LOST_ALL = (
    healthy()
    | kv(s.SERVED_TOKENS, "0x60")
    | kv(s.SERVABLE_TOKENS, "0x60")
    | requests(Verdict.LOST, "0+2x60")
    | requests(Verdict.FULL, "0x60")
)


def _reload(recent: str, loads: int = 150, *, reset: bool = False) -> dict[str, str]:
    """A day of loads within 0.1 s, then ``loads`` every five minutes within ``recent`` seconds."""
    begin = 0 if reset else 288 * 150
    series: dict[str, str] = {}
    for edge in ("0.1", "0.25", "0.5", "1.0", "+Inf"):
        step = loads if float(edge) >= float(recent) else 0
        values = f"0+150x288 {begin}+{step}x20"
        series |= kv(s.RELOAD_LATENCY, values, part="_bucket", le=edge)
    return series | kv(s.RELOAD_LATENCY, f"0+150x288 {begin}+{loads}x20", part="_count")


def zero_hit() -> list[Case]:
    """Both forms of KVOffloadZeroHit."""
    some = vl("kv_offload_load_bytes_total", "_x20 10000000x40")
    return [
        Case("F1: nothing served of what was computed before", _LOST_ALL,
             {2: SILENT, 12: {ZERO: 1}, 50: {ZERO: 1}},
             {(12, ZERO): "0 of 40.96k tokens that offloading should have served were served"},
             "instrumented"),
        Case("all served", healthy(), {20: SILENT, 59: SILENT}),
        Case("nobody is there", UP, {20: SILENT}),
        Case("no series at all", {}, {20: SILENT}),
        Case("served series absent: not known, so silent",
             {k: v for k, v in _LOST_ALL.items() if "served_tokens" not in k}, {20: SILENT}),
        Case("lost again after a restart, counters from 0 on",
             _LOST_ALL | kv(s.EXPECTED_TOKENS, "0+4096x20 0+4096x40")
             | requests(Verdict.LOST, "0+2x20 0+2x40"), {30: {ZERO: 1}, 50: {ZERO: 1}}),
        Case("N7: counters reset by a restart",
             {name: _reset(values) for name, values in healthy().items()},
             {21: SILENT, 25: SILENT, 40: SILENT}),
        Case("N9: remainders below a chunk",
             _LOST_ALL | kv(s.EXPECTED_TOKENS, "0+32x60"), {20: SILENT, 50: SILENT}),
        Case("N4: nothing to serve", _LOST_ALL | kv(s.EXPECTED_TOKENS, "0x60")
             | requests(Verdict.LOST, "0x60") | requests(Verdict.COLD, "0+9x60"), {40: SILENT}),
        Case("two lost requests are not three", _LOST_ALL | requests(Verdict.LOST, "0 0 1 2x57"),
             {20: SILENT}),
        Case("repaired: resolves when tokens are served",
             _LOST_ALL | kv(s.SERVED_TOKENS, "0x20 4096+4096x39"), {20: {ZERO: 1}, 40: SILENT}),
        Case("F16: stock vLLM, load series absent", stock(), {5: SILENT, 30: {ZERO: 1}},
             {(30, ZERO): "558.8GiB stored in 10 min and nothing loaded, while the GPU cache "
              "evicts and prompts come back"}, "stock"),
        Case("F16, load series present at 0", stock() | vl("kv_offload_load_bytes_total", "0x60"),
             {30: {ZERO: 1}}),
        Case("F16 under the names of OpenMetrics",
             {name.replace("vllm:", "vllm_"): values for name, values in stock().items()},
             {30: {ZERO: 1}}),
        Case("F16 seen by preemptions instead", stock() | vl("kv_cache_usage_perc", "0.7x60")
             | vl("num_preemptions_total", "0+1x60"), {30: {ZERO: 1}}),
        Case("stock vLLM whose first load makes its series", stock() | some,
             {20: {ZERO: 1}, 28: SILENT}),
        Case("an engine with kvlens is judged by its own numbers", stock() | healthy(),
             {30: SILENT}),
        Case("N1: the GPU cache answers", stock() | vl("kv_cache_usage_perc", "0.31x60"),
             {30: SILENT}),
        Case("N3: healthy", stock() | vl("external_prefix_cache_hits_total", "0+2600x60")
             | vl("kv_offload_load_bytes_total", "0+170000000x60")
             | vl("prefix_cache_hits_total", "0x60"), {30: SILENT, 59: SILENT}),
        Case("N4: 2,000 unique prompts, no prefix in common",
             stock() | vl("prefix_cache_hits_total", "0x60"), {30: SILENT, 59: SILENT}),
        Case("N5: the first minutes", stock(), {1: SILENT, 4: SILENT, 10: SILENT}),
        Case("F16 after ten minutes", stock(20), {10: SILENT, 12: {ZERO: 1}}),
        Case("N7: a stock server restarts",
             {name: _reset(values) for name, values in stock().items()}
             | vl("external_prefix_cache_hits_total", "0+2600x20 0x40")
             | vl("kv_offload_load_bytes_total", "0+170000000x20")
             | {'process_start_time_seconds{instance="gpu-1:8000", job="vllm"}': "1x20 2x40"},
             {19: SILENT, 22: SILENT, 29: SILENT}),
        Case("F21: the local hits are preempted requests' own blocks",
             stock() | vl("prefix_cache_queries_total", "0+75000x60")
             | vl("prefix_cache_hits_total", "0+22500x60")
             | vl("external_prefix_cache_queries_total", "0+52500x60")
             | vl("num_preemptions_total", "0+35x60"), {30: SILENT, 59: SILENT}),
        Case("N13: the GPU cache answers nearly everything itself",
             stock() | vl("prefix_cache_queries_total", "0+6000000x60")
             | vl("prefix_cache_hits_total", "0+5880000x60")
             | vl("external_prefix_cache_queries_total", "0+120000x60"),
             {30: SILENT, 59: SILENT}),
        Case("N8: old and flat byte counters", stock()
             | vl("kv_offload_total_bytes_total", "0+60000000000x60", transfer_type="GPU_to_CPU")
             | vl("kv_offload_total_bytes_total", "0x60", transfer_type="CPU_to_GPU"),
             {30: {ZERO: 1}},
             {(30, ZERO): "558.8GiB stored in 10 min and nothing loaded, while the GPU cache "
              "evicts and prompts come back"}, "stock"),
    ]  # fmt: skip


def _reset(values: str) -> str:
    """The same counters, begun again after 20 minutes."""
    start, _, count = values.rpartition("x")
    return f"{start}x20 {start}x{int(count) - 20}" if count.isdecimal() else values


def lost_tokens() -> list[Case]:
    """Burn rates: fast, slow, and over."""
    half = kv(s.SERVED_TOKENS, "0+2048x60")
    return [
        Case("half is lost: both fast windows", healthy() | half, {4: SILENT, 30: {LOST: 2}}),
        Case("half was lost, and is served again",
             healthy(120) | kv(s.SERVED_TOKENS, "0+2048x30 61440+4096x90"),
             {30: {LOST: 2}, 90: {LOST: 1}}),  # the slow windows remember
        Case("half is lost of next to nothing", healthy() | kv(s.SERVABLE_TOKENS, "0+100x60")
             | kv(s.SERVED_TOKENS, "0+50x60"), {50: SILENT}),
        Case("half is lost, counters reset", healthy()
             | kv(s.SERVABLE_TOKENS, "0+4096x20 0+4096x40")
             | kv(s.SERVED_TOKENS, "0+2048x20 0+2048x40"), {40: {LOST: 2}}),
    ]  # fmt: skip


def losses() -> list[Case]:
    """Gaps and capacity."""
    gap = kv(s.LOST_TOKENS, "0+512x60", cause=str(Cause.STORE_GAP))
    evicted = kv(s.EVICTED_TOKENS, "0+8192x60") | requests(Verdict.EVICTED, "0+1x60")
    few = requests(Verdict.EVICTED, "0x10 2x49")
    return [
        Case("F2: gaps in what is stored", healthy() | gap, {10: {GAPS: 1}},
             {(10, GAPS): "5.12k tokens behind gaps in what is stored were computed again in 30m"}),
        Case("F15: tails held back", healthy()
             | kv(s.LOST_TOKENS, "0+64x60", cause=str(Cause.TAIL_HELD_BACK)), {40: {GAPS: 1}}),
        Case("lost for another cause", healthy()
             | kv(s.LOST_TOKENS, "0+512x60", cause=str(Cause.POLICY)), {40: SILENT}),
        Case("gaps, counter reset", healthy()
             | kv(s.LOST_TOKENS, "0+512x20 0+512x40", cause=str(Cause.STORE_GAP)), {30: {GAPS: 1}}),
        Case("F8: evicted before it comes back", healthy() | evicted, {4: SILENT, 20: {THRASH: 1}},
             {(20, THRASH): "66.67% of the tokens that came back had been evicted"}),
        Case("a little is evicted", healthy() | evicted | kv(s.EVICTED_TOKENS, "0+2048x60"),
             {40: SILENT}),
        Case("two evicted requests are not three", healthy() | evicted | few, {40: SILENT}),
        Case("evicted, counters reset", healthy() | kv(s.EVICTED_TOKENS, "0+8192x20 0+8192x40")
             | requests(Verdict.EVICTED, "0+1x20 0+1x40"), {40: {THRASH: 1}}),
    ]  # fmt: skip


def faults() -> list[Case]:
    """Stalls, refused stores, unsafe boundaries, slow reloads."""
    delays = "kv_offload_lookup_async_delay_seconds_bucket"
    inf, ten = {"le": "+Inf"}, {"le": "10.0"}
    failing = vl("kv_offload_allocation_failure_total", "0+5x60")
    return [
        Case("F10: a request waits", healthy() | kv(s.DEFERRED_REQUESTS, "0x9 1x50"),
             {9: SILENT, 11: {STALL: 1}},
             {(11, STALL): "1 requests wait, or waited over 10 s, for an answer of the tier"}),
        Case("F11: requests gave up", healthy() | requests(Verdict.STALLED, "0x9 1x50"),
             {8: SILENT, 12: {STALL: 1}, 40: SILENT}),
        Case("an answer after 10 s", healthy()
             | kv(s.DEFERRAL_SECONDS, "0x9 1x50", part="_bucket", **inf), {12: {STALL: 1}}),
        Case("an answer within 10 s", healthy()
             | kv(s.DEFERRAL_SECONDS, "0x9 1x50", part="_bucket", **inf)
             | kv(s.DEFERRAL_SECONDS, "0x9 1x50", part="_bucket", **ten), {12: SILENT}),
        Case("stock: an answer after 10 s", UP | vl(delays, "0x9 3x50", **inf)
             | vl(delays, "0x9 2x50", **ten), {12: {STALL: 1}}),
        Case("stock: answers within 10 s", UP | vl(delays, "0x9 3x50", **inf)
             | vl(delays, "0x9 3x50", **ten), {12: SILENT}),
        Case("stalls, counter reset", healthy() | requests(Verdict.STALLED, "5x9 0x50"),
             {12: SILENT}),
        Case("F19: the tier refuses stores while it serves",
             healthy() | kv(s.REFUSED_CHUNKS, "0+10x60"), {4: SILENT, 20: {FAILURES: 1}},
             {(20, FAILURES): "50 stores refused for want of a slot that can be evicted"}),
        Case("stores are refused from the first on, none succeeded",
             UP | kv(s.REFUSED_CHUNKS, "0+10x60"), {4: SILENT, 20: {FAILURES: 1}}),
        Case("a few of many stores are refused",
             healthy() | kv(s.REFUSED_CHUNKS, "0+3x60") | kv(s.STORED_CHUNKS, "0+4000x60"),
             {40: SILENT}),
        Case("refusals, counter reset", healthy() | kv(s.REFUSED_CHUNKS, "900x20 0x40"),
             {22: SILENT, 40: SILENT}),
        Case("stock: stores fail, and none succeeds", UP | failing, {40: {FAILURES: 1}}),
        Case("stock: stores fail among many", UP | failing
             | vl("kv_offload_store_size_count", "0+9000x60"), {40: SILENT}),
        Case("F12: state of another position", healthy() | requests(Verdict.UNSAFE, "0x9 2x50"),
             {8: SILENT, 10: {UNSAFE: 1}, 50: {UNSAFE: 1}},
             {(10, UNSAFE): "2 requests got, or stored, KV data of another position"}),
        Case("unsafe before a restart only", healthy() | requests(Verdict.UNSAFE, "2x9 0x50"),
             {30: SILENT}),
    ]  # fmt: skip


def days() -> list[Case]:
    """What needs days of history, at a sample every five minutes."""
    slow = healthy(860) | kv(s.SERVED_TOKENS, "0+3932x860")
    return [
        Case("4 % for days: the slow windows only", slow, {4200: {LOST: 2}}),
        Case("reloads three times as slow", UP | _reload("0.5"), {1400: SILENT, 1480: {SLOW: 1}},
             {(1480, SLOW): "95 % of reloads end within 487.5ms, more than twice as long as in the "
              "day before"}),
        Case("reloads as fast as ever", UP | _reload("0.1"), {1480: SILENT}),
        Case("too few slow reloads to tell", UP | _reload("0.5", 9), {1480: SILENT}),
        Case("slow reloads, counters reset", UP | _reload("0.5", reset=True), {1480: {SLOW: 1}}),
        Case("an engine of today has no day before", UP
             | kv(s.RELOAD_LATENCY, "0+150x20", part="_bucket", le="+Inf")
             | kv(s.RELOAD_LATENCY, "0+150x20", part="_count"), {90: SILENT}),
    ]  # fmt: skip


def telemetry() -> list[Case]:
    """kvlens itself."""
    gone = {k: _until(20, v) for k, v in healthy().items() if not k.startswith("up{")}
    down = {'up{instance="gpu-1:8000", job="vllm"}': "1x20 0x40"}
    return [
        Case("facts are dropped", healthy() | kv(s.DROPPED_FACTS, "0x9 7x50"),
             {8: SILENT, 11: {BLIND: 1}, 40: SILENT},
             {(11, BLIND): "7 facts, spans or records were dropped, or errors contained, "
              "in 10 min"}, "dropped"),
        Case("facts are dropped, no other series",
             UP | kv(s.DROPPED_FACTS, "0x9 7x50"), {8: SILENT, 11: {BLIND: 1}}),
        Case("facts are dropped, and spans",
             healthy() | kv(s.DROPPED_FACTS, "0x9 7x50") | kv(s.DROPPED_SPANS, "0x9 5x50"),
             {11: {BLIND: 1}},
             {(11, BLIND): "12 facts, spans or records were dropped, or errors contained, "
              "in 10 min"}, "dropped"),
        Case("dropped before a restart only", healthy() | kv(s.DROPPED_FACTS, "7x9 0x50"),
             {15: SILENT}),
        Case("the engine does not answer", down | gone, {24: SILENT, 32: {BLIND: 1}},
             {(32, BLIND): "its metrics of kvlens are missing though it had them half an "
              "hour ago"}, "absent"),
        Case("started again without kvlens", UP | gone, {32: {BLIND: 1}}),
        Case("the engine was taken away", gone, {32: SILENT}),
        Case("a stock server was never different", stock()
             | vl("external_prefix_cache_hits_total", "0+9000x60"), {32: SILENT}),
    ]  # fmt: skip


def _until(minute: int, values: str) -> str:
    return f"{values.rpartition('x')[0]}x{minute} stale"


def files(rules: list[str]) -> dict[str, dict[str, Any]]:
    """Contents of promtool's test files by name; ``rules`` are paths from there."""
    cases = {"zero-hit": zero_hit(), "lost-tokens": lost_tokens(), "losses": losses(),
             "faults": faults(), "telemetry": telemetry(), "days": days()}  # fmt: skip
    return {
        f"{name}.test.yml": {
            "rule_files": rules,
            "group_eval_order": EVALUATED,
            "evaluation_interval": "5m" if name == "days" else "1m",
            "tests": [case.test("5m" if name == "days" else "1m") for case in found],
        }
        for name, found in cases.items()
    }
