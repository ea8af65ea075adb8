"""Back to vLLM's own lookup: by an operator's file, or for good when an invariant fails."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from brute_force import allocate, run
from test_exact_lookup import F13

from kvlens.connector import exact_lookup
from kvlens.connector.boundary import UnconfirmedError
from kvlens.connector.fallback import StockFallback
from kvlens.connector.observer import Observer
from kvlens.telemetry import facts
from kvlens.telemetry.facts import parse
from kvlens.telemetry.semconv import Fallback


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def observed(result):
    """Facts of what the scheduler does from here on."""
    sink = []
    result.scheduler.observe(Observer(SimpleNamespace(append=sink.append)))
    return sink


def look_up(result):
    return result.scheduler.get_num_new_matched_tokens(result.request, 0)[0]


def kinds(sink, *wanted):
    return [parse(fact) for fact in sink if fact[0] in wanted]


@pytest.fixture
def in_production(monkeypatch):
    """Errors of ours are contained, as they are outside of tests."""
    monkeypatch.setattr(exact_lookup, "raise_errors", lambda: False)


def test_an_operators_file_brings_vllms_own_lookup_back_while_it_exists(tmp_path, caplog):
    result, clock, file = run(F13, "exact"), Clock(), tmp_path / "stock"
    lookup = result.scheduler.boundary_lookup
    lookup.fallback = StockFallback(str(file), clock)
    sink = observed(result)
    assert look_up(result) == 128
    file.touch()
    assert look_up(result) == 128, "the file is looked for once a second"
    clock.now += 1
    with caplog.at_level(logging.WARNING):
        assert look_up(result) == 176
    file.unlink()
    clock.now += 1
    assert look_up(result) == 128
    assert f"{file} exists" in caplog.text
    told = [(fact.reason, fact.active) for fact in kinds(sink, facts.FALLBACK)]
    assert told == [(Fallback.OPERATOR, True), (Fallback.OPERATOR, False)]


def test_the_file_is_not_looked_for_at_every_lookup(monkeypatch):
    looks = []
    monkeypatch.setattr("os.path.exists", lambda path: bool(looks.append(path)))
    clock = Clock()
    fallback = StockFallback("/stock", clock)
    for step in range(50):
        clock.now = step / 10
        assert not fallback.active()
    assert len(looks) == 5


def test_without_a_file_nothing_is_looked_for(monkeypatch):
    monkeypatch.setattr("os.path.exists", lambda path: pytest.fail(f"looked for {path}"))
    assert not StockFallback().active()


@pytest.mark.parametrize("mode", ["exact", "corrected"])
def test_a_search_that_fails_serves_nothing_and_then_as_vllm_does(
    mode, monkeypatch, in_production, caplog
):
    result = run(F13, mode)
    sink = observed(result)
    monkeypatch.setattr(exact_lookup.Search, "largest", lambda *_: 1 / 0)
    assert look_up(result) == 0
    monkeypatch.undo()
    assert [look_up(result) for _ in range(3)] == [176] * 3
    assert caplog.text.count("an invariant of the lookup failed (ZeroDivisionError") == 1
    errors = kinds(sink, facts.ERROR, facts.FALLBACK)
    assert [type(fact).__name__ for fact in errors] == ["ObserverError", "FellBack"]
    assert errors[1].reason == Fallback.INVARIANT


def test_a_search_that_fails_is_an_error_in_tests(monkeypatch):
    result = run(F13, "exact")
    monkeypatch.setattr(exact_lookup.Search, "largest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        look_up(result)


def promise_too_little(result):
    """Make allocation ask for more than the lookup has promised."""
    answers = result.scheduler.boundary_lookup._answers
    answers["request"] = answers["request"]._replace(boundary=64)


def test_loading_what_was_not_found_is_an_error_in_tests():
    result = run(F13, "exact")
    promise_too_little(result)
    with pytest.raises(UnconfirmedError, match="5 of 9 chunks"):
        allocate(result)


def test_loading_what_was_not_found_ends_exact_lookups_and_not_the_engine(in_production, caplog):
    result = run(F13, "exact")
    sink = observed(result)
    promise_too_little(result)
    assert len(allocate(result)) == 9, "its blocks are promised: the load goes on"
    (record,) = caplog.records
    assert "5 of 9 chunks to be loaded were not found" in record.getMessage()
    assert len(kinds(sink, facts.ERROR)) == len(kinds(sink, facts.FALLBACK)) == 1
    assert result.scheduler.boundary_lookup.fallback.active()


def test_an_answer_is_forgotten_with_its_request():
    result = run(F13, "exact")
    lookup = result.scheduler.boundary_lookup
    assert set(lookup._answers) == {"request"}
    allocate(result)
    assert lookup._answers == {}
    again = run(replace(F13, tokens=400), "exact")
    again.scheduler.boundary_lookup.forget("request")
    assert again.scheduler.boundary_lookup._answers == {}
