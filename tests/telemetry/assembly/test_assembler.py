from recording import MS, SECOND, Engine, engine, layout

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.semconv import Exit, Verdict

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def count(run, metric, *labels):
    return run.numbers.counters.get((metric.name, labels), 0)


def test_samples_of_a_traced_request_carry_its_trace():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    run.add("b", 130, headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    run.look("b", "doc", 130, None, [(0, 8, None)])
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    keys = set(run.keys("doc", 130)[0])
    job = run.admit("b", 128, keys)
    run.say(facts.TRANSFERRED, job, 4096, 0.5)
    run.say(facts.LOADED, keys)
    assert run.numbers.exemplars == {
        metric.name: [trace] for metric in semconv.METRICS if metric.exemplars
    }


def test_a_cold_request_then_the_same_served():
    run = Engine()
    run.serve_cold("a-0123abcd", "doc", 130)
    run.add("b-0123abcd", 130, headers=HEADERS)
    run.look("b-0123abcd", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    keys = {key for names in run.keys("doc", 130) for key in names}
    run.admit("b-0123abcd", 128, keys)
    run.say(facts.TRANSFERRED, run.jobs, 4096, 0.25)
    run.say(facts.LOADED, keys)
    run.finish("b-0123abcd", "doc", 130)
    cold, full = run.settle()

    assert (cold.verdict, cold.request_id, cold.internal_request_id) == ("cold", "a", "a-0123abcd")
    assert (cold.served_tokens, cold.servable_tokens, cold.expected_tokens) == (0, 0, 0)
    assert (full.verdict, full.served_tokens, full.servable_tokens) == ("full", 128, 128)
    assert (full.expected_tokens, full.lost_tokens) == (128, 0)
    assert full.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert full.parent_span_id == "b7ad6b7169203331"
    (lookup,) = full.lookups
    assert lookup.exit == Exit.SERVED
    assert [(g.kv_group, g.width, g.raw_hits, g.popped) for g in lookup.groups] == [
        (0, 8, 8, 0), (1, 2, 2, 0),
    ]  # fmt: skip
    assert [g.resident for g in lookup.groups] == [[(0, 7)], [(0, 1)]]
    assert lookup.groups[1].state_chunk == 1
    (load,) = full.loads
    assert {g.kv_group: g.loaded for g in load.groups} == {0: 8, 1: 2}
    assert (load.bytes, load.transfer_seconds) == (4096, 0.25)
    assert round(load.latency or 0, 6) == 0.002
    (store,) = cold.stores
    assert {g.kv_group: (g.offered, g.stored) for g in store.groups} == {0: (8, 8), 1: (2, 2)}
    assert store.completed_at is not None

    assert count(run, semconv.REQUESTS, "cold") == count(run, semconv.REQUESTS, "full") == 1
    assert count(run, semconv.LOOKUPS, "miss") == count(run, semconv.LOOKUPS, "served") == 1
    assert count(run, semconv.STORED_CHUNKS, "0", "full_attention") == 8
    assert count(run, semconv.SERVED_CHUNKS, "1", "mamba") == 2
    assert count(run, semconv.SERVED_TOKENS) == 128
    assert run.numbers.gauges[semconv.RESIDENT_CHUNKS.name, ("0", "full_attention")] == 8


def test_a_load_that_fails_was_not_served():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    keys = {key for names in run.keys("doc", 130) for key in names}
    job = run.admit("b", 128, keys)
    run.say(facts.FAILED, (job, 999))
    run.say(facts.LOADED, keys)
    # vLLM asks again, is answered nothing for this request, and computes.
    run.look("b", "doc", 130, 0, [])
    run.admit("b", 0)
    run.say(facts.STARTED, [("b", 0)])
    run.finish("b", "doc", 130)
    record = run.settle()[-1]

    assert (record.verdict, record.cause) == ("lost", "transfer_failed")
    assert (record.served_tokens, record.failed_tokens, record.computed_tokens) == (0, 128, 130)
    assert (record.servable_tokens, record.lost_tokens) == (128, 128)
    assert record.evidence == {"failed_tokens": 128, "servable_tokens": 128}
    assert "the load of 128 failed, and they were computed instead" in record.summary
    (load,) = record.loads
    assert (load.failed, load.latency, load.completed_at is not None) == (True, None, True)
    assert count(run, semconv.SERVED_CHUNKS, "0", "full_attention") == 0
    assert count(run, semconv.SERVED_TOKENS) == 0
    assert count(run, semconv.LOST_TOKENS, "transfer_failed") == 128
    assert not [name for name, _ in run.numbers.counters if "violations" in name]


def test_a_request_that_ends_with_its_failed_load():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    keys = set(run.keys("doc", 130)[0])
    run.say(facts.FAILED, [run.admit("b", 128, keys)])
    run.say(facts.LOADED, keys)
    run.finish("b", "doc", 130, computed=0)
    record = run.settle()[-1]
    assert (record.verdict, record.cause, record.computed_tokens) == (
        "lost", "transfer_failed", None,
    )  # fmt: skip
    assert "and the request ended with it" in record.summary


def test_a_later_load_that_fails_changes_nothing_that_was_served():
    """After a preemption a request may load again, which no total counts."""
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    first, second = (set(run.keys("doc", 130)[0]) for _ in range(2))
    run.admit("b", 128, first)
    run.say(facts.LOADED, first)
    run.say(facts.PREEMPTED, ["b"])
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    run.say(facts.FAILED, [run.admit("b", 128, second)])
    run.say(facts.LOADED, second)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert (record.verdict, record.served_tokens, record.failed_tokens) == ("full", 128, 0)
    assert [load.failed for load in record.loads] == [False, True]


def test_a_store_that_fails_is_not_in_the_tier():
    run = Engine()
    run.add("a", 130)
    keys = [key for names in run.keys("doc", 130) for key in names]
    run.say(facts.OFFERED, "a", keys, keys, [])
    job_keys = tuple(keys)
    run.say(facts.STORE_JOB, "a", 7, job_keys)
    run.say(facts.FAILED, [7])
    run.say(facts.STORED, job_keys, False)
    run.finish("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 0, [(0, 8, 0)])
    run.admit("b", 0)
    run.finish("b", "doc", 130)
    first, second = run.settle()
    assert [store.failed for store in first.stores] == [True]
    assert (second.verdict, second.cause) == ("unstored", "transfer_failed")
    assert count(run, semconv.STORED_CHUNKS, "0", "full_attention") == 0
    assert run.assembler.residency.resident_count(0) == 0


def test_a_job_of_two_ranks_counts_once():
    """Tensor parallel: each rank reports its part, perhaps in different steps."""
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 128, [(0, 8, None), (1, 2, 2)])
    keys = set(run.keys("doc", 130)[0])
    job = run.admit("b", 128, keys)
    run.say(facts.TRANSFERRED, job, 4096, 0.5)
    assert run.numbers.samples.get((semconv.TRANSFER_SECONDS.name, ("load",))) is None
    run.say(facts.TRANSFERRED, job, 4096, 0.25)
    run.say(facts.LOADED, keys)
    run.finish("b", "doc", 130)
    _, served = run.settle()
    assert [(load.bytes, load.transfer_seconds) for load in served.loads] == [(8192, 0.5)]
    assert run.numbers.samples[semconv.TRANSFER_SECONDS.name, ("load",)] == [0.5]


def test_every_group_a_drafter_loses_the_request():
    """F7-like: all groups popped, the recurrent one has nothing left."""
    run = Engine(engine(layout=layout(drafters_used=(0, 1)), block_drop=True, widens=False))
    run.serve_cold("a", "doc", 81)
    run.add("b", 81)
    run.look("b", "doc", 81, 0, [(0, 4, 4)])
    run.admit("b", 0)
    run.finish("b", "doc", 81)
    record = run.settle()[-1]
    assert (record.verdict, record.served_tokens, record.servable_tokens) == ("lost", 0, 64)
    assert record.cause == "drafter_fallback"
    assert record.evidence["drafter_groups_used"] == [0, 1]
    assert record.evidence["drafter_groups_annotated"] == []
    assert record.lookups[0].exit == Exit.POPPED_OUT
    assert record.lost_tokens == record.lost_at_lookup == 64
    assert count(run, semconv.LOST_TOKENS, "drafter_fallback") == 64


def test_servable_is_what_was_resident_at_the_lookup():
    """What is evicted after the lookup was still servable; what comes after was not."""
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 0, [(0, 8, 8), (1, 2, 0)])
    run.admit("b", 0)
    first = run.keys("doc", 130)[0]
    run.store("x", [b"other" + bytes(4)], [b"other" + bytes(4)], evicted=first)
    run.finish("b", "doc", 130)
    run.add("c", 130)
    run.look("c", "doc", 130, 0, [(0, 8, 0)])
    run.admit("c", 0)
    run.finish("c", "doc", 130)
    _, lost, evicted = run.settle()
    assert (lost.verdict, lost.servable_tokens) == ("lost", 128)
    assert (evicted.verdict, evicted.servable_tokens, evicted.cause) == ("evicted", 0, "capacity")
    assert count(run, semconv.EVICTED_CHUNKS, "0", "full_attention") == 8


def test_identical_deferred_lookups_are_coalesced_and_the_wait_is_measured():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    for _ in range(1000):
        run.look("b", "doc", 130, None, [(0, 8, None)])
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    run.admit("b", 128)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    deferred, served = record.lookups
    assert (deferred.exit, deferred.count) == (Exit.DEFERRED_BACKEND, 1000)
    assert (served.exit, served.attempt) == (Exit.SERVED, 2)
    assert (deferred.last_time or 0) - deferred.time > 0.9
    assert round(record.deferral_seconds, 3) == 1.0
    assert count(run, semconv.LOOKUPS, "deferred_backend") == 1000
    assert len(run.numbers.samples[semconv.LOOKUP_SECONDS.name, ()]) == 2  # a, and b's last
    assert [round(s, 3) for s in run.numbers.samples[semconv.DEFERRAL_SECONDS.name, ()]] == [1.0]
    assert record.verdict == "full"


def test_a_stall_is_reported_before_the_request_ends():
    run = Engine()
    run.add("b", 130)
    run.look("b", "doc", 130, None, [(0, 8, None)])
    for _ in range(120):
        run.now += 100 * MS
        run.look("b", "doc", 130, None, [(0, 8, None)])
        run.assembler.tick(run.now)
    assert [round(record.deferral_seconds) for record in run.kept.deferrals] == [1, 6, 11]
    assert {record.verdict for record in run.kept.deferrals} == {str(Verdict.STALLED)}
    assert run.numbers.gauges[semconv.DEFERRED_REQUESTS.name, ()] == 1
    assert run.kept.requests == []
    run.finish("b", "doc", 130, computed=0)
    (record,) = run.settle()
    assert (record.verdict, round(record.deferral_seconds)) == ("stalled", 12)
    waits = run.numbers.samples[semconv.DEFERRAL_SECONDS.name, ()]
    assert [round(wait) for wait in waits] == [12], "one that ends without an answer counts as well"
    assert run.numbers.gauges[semconv.DEFERRED_REQUESTS.name, ()] == 0


def test_a_request_that_was_never_answered_says_what_it_waited_for():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    pending = run.keys("other", 130)
    run.say(facts.OFFERED, "x", pending[0], pending[0], [])  # accepted, and never completed
    for request, prompt in (("b", "doc"), ("c", "other")):
        run.add(request, 130)
        run.look(request, prompt, 130, None, [(0, 8, None)])
        run.now += 12 * SECOND
        run.finish(request, prompt, 130, computed=0)
    _, retried, waited = run.settle()
    assert (retried.verdict, retried.cause, retried.servable_tokens) == (
        "stalled", "retry_stall", 128,
    )  # fmt: skip
    assert retried.evidence["resident_chunks"] == 10
    assert retried.lookups[-1].groups[0].resident == [(0, 7)]
    assert (waited.verdict, waited.cause, waited.servable_tokens) == (
        "stalled", "pending_store", 0,
    )  # fmt: skip
    assert waited.evidence["pending_chunks"] == 8


def test_a_stall_that_ended_says_what_it_had_waited_for():
    """F10, but the write completes after all: nothing is pending when the request is judged."""
    run = Engine()
    keys = run.keys("doc", 130)
    every = keys[0] + keys[1]
    run.say(facts.OFFERED, "x", every, every, [])
    run.add("b", 130)
    for _ in range(12):
        run.look("b", "doc", 130, None, [(0, 8, None)])
        run.now += SECOND
        run.assembler.tick(run.now)
    run.say(facts.STORED, set(every), True)
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    run.admit("b", 128)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert (record.verdict, record.cause, record.served_tokens) == ("stalled", "pending_store", 128)
    assert record.evidence["pending_chunks"] == 0
    assert record.evidence["first_pending_chunk"] == 0
    assert "its write completed only then" in record.summary


def test_an_answer_that_was_not_admitted_is_asked_again():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    for _ in range(2):
        run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    run.admit("b", 128)
    run.look("b", "doc", 130, 64, [(0, 4, 4), (1, 1, 1)])  # after a preemption
    run.admit("b", 64)
    run.say(facts.PREEMPTED, ("b",))
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert [lookup.exit for lookup in record.lookups] == ["not_admitted", "served", "served"]
    assert (record.served_tokens, record.preemptions) == (128, 1)
    assert count(run, semconv.LOOKUPS, "not_admitted") == 1


def test_answers_that_are_not_taken_for_long_take_no_room():
    """Another connector defers under MultiConnector, or no blocks are free: asked at each step."""
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    full = [(0, 8, 8), (1, 2, 2)]
    for _ in range(1000):
        run.look("b", "doc", 130, 128, full)
    run.look("b", "doc", 130, None, [(0, 8, None)])
    for _ in range(3):
        run.look("b", "doc", 130, 128, full)
    run.admit("b", 128)
    for _ in range(2):
        run.look("b", "doc", 130, 128, full)  # after a preemption
    run.admit("b", 128)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert [(lookup.exit, lookup.count) for lookup in record.lookups] == [
        ("not_admitted", 1000), ("deferred_backend", 1), ("not_admitted", 2), ("served", 1),
        ("not_admitted", 1), ("served", 1),
    ]  # fmt: skip
    first = record.lookups[0]
    assert first.last_time is not None
    assert first.time < first.last_time < record.lookups[1].time
    assert count(run, semconv.LOOKUPS, "not_admitted") == 1003
    assert record.served_tokens == 128


def test_the_tail_of_a_drafter_group_that_was_never_offered_is_held_back():
    info = engine(layout=layout(drafters_used=(0,)), block_drop=True, offload_prompt_only=False)
    run = Engine(info)
    run.add("a", 33)
    run.look("a", "doc", 33, 0, [(0, 2, 0)])
    run.admit("a", 0)
    first = run.keys("doc", 48)[0][:2]
    run.store("a", first, first)
    run.finish("a", "doc", 49, computed=48)
    run.settle()
    assert count(run, semconv.HELD_BACK_CHUNKS, "0", "full_attention") == 1


def test_decoded_chunks_that_policy_excludes_are_not_expected():
    run = Engine(engine(layout=layout()))
    run.add("a", 70)
    run.look("a", "doc", 70, 0, [(0, 4, 0)])
    run.admit("a", 0)
    keys = run.keys("doc", 70)
    run.store("a", [*keys[0], *keys[1]], [*keys[0], *keys[1]])
    run.finish("a", "doc", 200)  # 130 tokens were generated
    run.add("b", 200)
    run.look("b", "doc", 200, 64, [(0, 12, 4), (1, 1, 1)])
    run.admit("b", 64)
    run.finish("b", "doc", 200)
    record = run.settle()[-1]
    assert (record.verdict, record.served_tokens, record.expected_tokens) == ("full", 64, 64)


def test_lost_facts_make_residency_unknown_and_nothing_certain():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.assembler.handle((facts.LOST, run.now, 7, True))
    run.add("b", 130)
    run.look("b", "doc", 130, 0, [(0, 8, 0)])
    run.admit("b", 0)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert record.servable_tokens == 0
    assert record.confidence != "certain" or record.cause is None
    assert count(run, semconv.DROPPED_FACTS) == 7


def test_reset_empties_the_tier():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    run.say(facts.RESET)
    run.add("b", 130)
    run.look("b", "doc", 130, 0, [(0, 8, 0)])
    run.admit("b", 0)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert (record.verdict, record.expected_tokens) == ("cold", 0)


def test_sampling_keeps_every_anomalous_request():
    run = Engine(engine(layout=layout(drafters_used=(0, 1)), widens=False), sample_rate=0.0)
    run.serve_cold("a", "doc", 81)
    run.add("b", 81)
    run.look("b", "doc", 81, 0, [(0, 4, 4)])
    run.admit("b", 0)
    run.finish("b", "doc", 81)
    (record,) = run.settle()
    assert (record.verdict, record.sampling_probability) == ("lost", 1.0)
    assert count(run, semconv.REQUESTS, "cold") == 1


def test_a_finished_request_waits_for_its_last_store():
    run = Engine()
    run.add("a", 64)
    run.look("a", "doc", 64, 0, [(0, 3, 0)])
    run.admit("a", 0)
    run.finish("a", "doc", 64)
    keys = run.keys("doc", 64)[0]
    run.say(facts.OFFERED, "a", keys, keys, [])
    job = set(keys)
    run.say(facts.STORE_JOB, "a", 5, job)
    run.assembler.tick(run.now + 100 * MS)
    assert run.kept.requests == []
    run.say(facts.STORED, job, True)
    run.assembler.tick(run.now + 100 * MS)
    (record,) = run.kept.requests
    assert record.stores[0].completed_at == run.now / 1e9
    assert record.finish_time < record.stores[0].completed_at


def test_a_store_that_never_completes_does_not_hold_the_record():
    run = Engine()
    run.add("a", 64)
    run.finish("a", "doc", 64, computed=0)
    keys = run.keys("doc", 64)[0]
    run.say(facts.OFFERED, "a", keys, keys, [])
    run.say(facts.STORE_JOB, "a", 5, set(keys))
    run.assembler.tick(run.now + SECOND)
    assert len(run.kept.requests) == 1
