from __future__ import annotations

import pytest
from metrics_pages import page

from kvlens.dashboard.scrape.page import PageError, parse, total
from kvlens.dashboard.scrape.reading import read, read_page
from kvlens.dashboard.scrape.window import Window, restarted

OPEN_METRICS = """\
# TYPE vllm_kv_offload_store_bytes counter
vllm_kv_offload_store_bytes_total{engine="0",model_name="m"} 12.0 # {trace_id="abc"} 1.0 1.0
# EOF
"""


def test_text_and_open_metrics_are_read_alike() -> None:
    text = 'vllm:kv_offload_store_bytes_total{engine="0",model_name="m"} 12\n'
    for source in (text, OPEN_METRICS):
        assert total(parse(source), ["vllm_kv_offload_store_bytes_total"]) == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!doctype html><title>login</title>", "HTML or XML.*give the address of /metrics"),
        ("", "holds no samples"),
        ("# HELP a b\n", "holds no samples"),
        ("a 1\nthis is a log line\n", "line 2 is no Prometheus metric: 'this is a log line'"),
        ("# EOF\nvllm 1\n# EOF", "OpenMetrics"),
    ],
)
def test_what_is_no_page_says_where(text: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        parse(text)


def test_not_a_number_is_no_value() -> None:
    assert parse("a NaN\nb 1\nc +Inf\nd -1e308\n") == {"b": [({}, 1.0)]}


def test_the_deprecated_counters_are_the_same_bytes() -> None:
    """N8: never their sum; either may be missing, and a spec of one's own leaves the old at 0."""
    both = read_page(page(stored=7, loaded=5, deprecated=True))[0].counters
    assert (both["store_bytes"], both["load_bytes"]) == (7, 5)
    old = 'vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="%s"} 9\n'
    only_old = read_page(old % "GPU_to_CPU" + old % "CPU_to_GPU")[0].counters
    assert (only_old["store_bytes"], only_old["load_bytes"]) == (9, 9)
    larger = read_page(page(stored=11) + old % "GPU_to_CPU")[0].counters
    assert larger["store_bytes"] == 11


def test_children_of_a_histogram_are_summed() -> None:
    lines = [
        "vllm:kv_offload_lookup_async_delay_seconds_bucket"
        f'{{engine="0",tier="{tier}",le="{edge}"}} {n}\n'
        for tier, count in (("a", 3), ("b", 0))
        for edge, n in (("1.0", 1), ("10.0", 1), ("+Inf", 1 + count))
    ]
    (reading,) = read_page("".join(lines))
    assert reading.counters["delays_beyond"] == 3


def test_engines_of_one_server_are_told_apart() -> None:
    second = 'engine="1",model_name="m"'
    readings = read_page(page(stored=1) + page(stored=2, labels=second))
    assert [(r.engine, r.counters["store_bytes"]) for r in readings] == [("0", 1), ("1", 2)]


def test_a_page_without_labels_is_one_engine() -> None:
    reading = read_page("vllm:kv_offload_store_bytes_total 3\n")[0]
    assert (reading.engine, reading.model, reading.counters["store_bytes"]) == ("0", "", 3)


def test_other_pages_have_no_engines() -> None:
    assert read(parse("node_load1 0.5\n")) == []


def test_size_of_the_gpu_cache() -> None:
    info = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"%s} 1\n'
    assert read_page(page() + info % "")[0].gpu_tokens == 1600
    assert read_page(page() + info % ',kv_cache_size_tokens="2674"')[0].gpu_tokens == 2674
    assert read_page(page() + info % ',kv_cache_size_tokens="None"')[0].gpu_tokens == 1600


def test_a_window_counts_rises() -> None:
    before, after = (read_page(page(stored=value))[0] for value in (3, 10))
    window = Window(before, after)
    assert (window.rise("store_bytes"), window.rise("load_bytes")) == (7, 0)
    assert not window.has("load_bytes")
    assert Window(None, after).rise("store_bytes") == 10


@pytest.mark.parametrize(
    "after",
    [
        page(stored=10, loaded=1, started=1_796_000_100),
        page(stored=2, loaded=1),
        page(stored=10),  # children are created anew, at their first use
    ],
)
def test_a_restart_is_not_a_regression(after: str) -> None:
    """N7: another start time, a counter that fell, or one that vanished."""
    earlier, later = read_page(page(stored=3, loaded=1))[0], read_page(after)[0]
    assert restarted(earlier, later)
    assert Window(earlier, later).rise("store_bytes") == later.counters["store_bytes"]


def test_delays_beyond_the_last_bucket() -> None:
    name = "vllm:kv_offload_lookup_async_delay_seconds_bucket"
    lines = [f'{name}{{engine="0",model_name="m",le="{le}"}} {n}'
             for le, n in (("0.1", 5), ("10.0", 7), ("+Inf", 9))]  # fmt: skip
    assert read_page("\n".join(lines) + "\n")[0].counters["delays_beyond"] == 2
