"""``kvlens canary`` on a server that is right, and on servers that are wrong in many ways."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from canary_server import MODEL, Asked, Behaviour, CanaryServer

from kvlens.dashboard.canary.plan import Plan
from kvlens.dashboard.canary.run import first_difference
from kvlens.dashboard.cli import main

OK, MISMATCH, USAGE, INCONCLUSIVE = range(4)
SMALL = ["--conversations", "6", "--turns", "3", "--prompt-tokens", "300", "--output-tokens", "8"]
Serve = Callable[[Behaviour], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[CanaryServer] = []

    def start(behaviour: Behaviour) -> str:
        servers.append(CanaryServer(behaviour))
        return servers[-1].url

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def canary(serve: Serve, tmp_path: Path) -> Callable[[Behaviour], tuple[int, dict[str, Any]]]:
    """Exit code and ``--json`` of a run."""

    def run(behaviour: Behaviour) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "report.json"
        code = main(["canary", serve(behaviour), *SMALL, "--json", str(path)])
        return code, json.loads(path.read_text())

    return run


Canary = Callable[[Behaviour], "tuple[int, dict[str, Any]]"]


def test_a_right_server_is_ok(canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = canary(Behaviour())
    assert code == OK
    assert report["status"] == "ok"
    assert (report["model"], report["seed"], report["conversations"]) == (MODEL, 0, 6)
    assert report["reloaded_conversations"] == 6
    assert report["answers"] == 2 * report["turns"] > report["reloaded_answers"] > 0
    assert report["served_tokens"] > 1000
    assert report["evicted_by"] == "reset"
    assert report["mismatches"] == []
    assert capsys.readouterr().out.startswith("ok: ")


def test_a_wrong_token_after_a_reload_is_found(
    canary: Canary, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = canary(
        Behaviour(answer=lambda asked: asked.wrong_at(5) if asked.reloaded else asked.right())
    )
    assert code == MISMATCH
    assert report["status"] == "mismatch"
    found = report["mismatches"]
    assert len(found) == report["reloaded_answers"] > 0
    assert {one["position"] for one in found} == {5}
    assert all(one["reloaded_tokens"] > 0 for one in found)
    assert {one["asked"] for one in found} == {"going_on", "again"}
    assert "token 5 of the answer differs" in capsys.readouterr().out


def test_one_wrong_answer_of_all_is_enough(canary: Canary) -> None:
    wrong: list[int] = []

    def answer(asked: Asked) -> list[int]:
        if asked.reloaded and not wrong:
            wrong.append(asked.number)
        return asked.wrong_at(0) if asked.number in wrong else asked.right()

    code, report = canary(Behaviour(answer=answer))
    assert code == MISMATCH
    (found,) = report["mismatches"]
    assert found["position"] == 0


def test_an_answer_that_stops_early_is_a_mismatch(canary: Canary) -> None:
    code, report = canary(
        Behaviour(answer=lambda asked: asked.right()[: 4 if asked.reloaded else None])
    )
    assert code == MISMATCH
    assert {one["position"] for one in report["mismatches"]} == {4}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(tier=False), "nothing was reloaded"),
        (Behaviour(counters=False), "no counters"),
        (Behaviour(foreign_tokens=10_000), "other requests"),
    ],
    ids=["no tier", "no counters", "other traffic"],
)
def test_what_shows_nothing_is_not_ok(
    canary: Canary, behaviour: Behaviour, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = canary(behaviour)
    assert code == INCONCLUSIVE
    assert report["status"] == "inconclusive"
    assert reason in report["reason"]
    assert report["served_tokens"] == report["reloaded_answers"] == 0
    assert capsys.readouterr().out.startswith("inconclusive: ")


def test_a_mismatch_counts_even_where_nothing_is_known_to_be_reloaded(canary: Canary) -> None:
    code, report = canary(
        Behaviour(
            counters=False,
            answer=lambda asked: asked.wrong_at(2) if asked.reloaded else asked.right(),
        )
    )
    assert code == MISMATCH
    assert {one["reloaded_tokens"] for one in report["mismatches"]} == {None}


def test_without_a_way_to_reset_other_prompts_fill_the_gpu_cache(canary: Canary) -> None:
    code, report = canary(Behaviour(reset=False, gpu_tokens=2048))
    assert (code, report["evicted_by"]) == (OK, "prompts")
    assert report["reloaded_conversations"] == 6


def test_a_reset_that_fails_while_blocks_are_stored_is_tried_again(canary: Canary) -> None:
    code, report = canary(Behaviour(failing_resets=5))
    assert (code, report["evicted_by"]) == (OK, "reset")


def test_rounding_is_told_from_wrong_kv(canary: Canary) -> None:
    """Computed in pieces, whatever the cache, another token wins: not the tier's fault."""
    code, report = canary(
        Behaviour(
            answer=lambda asked: (
                asked.wrong_at(3) if asked.local + asked.reloaded else asked.right()
            )
        )
    )
    assert code == OK
    assert report["rounded_answers"] >= report["reloaded_answers"] > 0
    assert report["unstable_answers"] == 0


def test_wrong_kv_is_found_beside_rounding(canary: Canary) -> None:
    def answer(asked: Asked) -> list[int]:
        if asked.reloaded:
            return asked.wrong_at(1)
        return asked.wrong_at(6) if asked.local else asked.right()

    code, report = canary(Behaviour(answer=answer))
    assert code == MISMATCH
    assert {one["position"] for one in report["mismatches"]} == {1}


def test_a_server_that_never_repeats_itself_shows_nothing(canary: Canary) -> None:
    def answer(asked: Asked) -> list[int]:
        return [asked.number % 400, *asked.right()[1:]]

    code, report = canary(Behaviour(answer=answer))
    assert code == INCONCLUSIVE
    assert report["unstable_answers"] == report["answers"] > 0
    assert "differ even when each is recomputed" in report["reason"]


def test_recomputing_uses_a_salt_of_its_own(canary: Canary) -> None:
    behaviour = Behaviour()
    canary(behaviour)
    salts = [asked.salt for asked in behaviour.asked if asked.salt is not None]
    assert salts
    assert len(set(salts)) == len(salts)
    assert all(asked.reloaded == 0 for asked in behaviour.asked if asked.salt is not None)


def test_reports_hold_no_token_ids(canary: Canary, capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour(
        answer=lambda asked: asked.wrong_at(5) if asked.reloaded else asked.right()
    )
    _, report = canary(behaviour)
    captured = capsys.readouterr()
    everything = json.dumps(report) + captured.out + captured.err
    for asked in behaviour.asked:
        for tokens in (asked.prompt, asked.right()):
            if len(tokens) > 2:
                assert str(tokens[:3])[1:-1] not in everything
    assert not [
        value
        for value in report.values()
        if isinstance(value, list) and value and not isinstance(value[0], dict)
    ]


def test_the_same_seed_says_the_same(canary: Canary) -> None:
    first, second = Behaviour(), Behaviour()
    canary(first)
    canary(second)
    assert [one.prompt for one in first.asked] == [one.prompt for one in second.asked]


def test_a_plan_keeps_to_its_sizes() -> None:
    plan = Plan(40, 7, turns=4, prompt_tokens=500, output_tokens=16, vocab=50)
    for conversation in plan.all():
        assert 2 <= len(conversation.turn_tokens) <= 4
        assert all(conversation.turn_tokens)
        assert {token for said in conversation.turn_tokens for token in said} <= set(range(3, 50))
        total = sum(map(len, conversation.turn_tokens)) + 16 * (len(conversation.turn_tokens) - 1)
        assert 250 <= total <= 500
    other = Plan(40, 8, turns=4, prompt_tokens=500, output_tokens=16, vocab=50)
    assert plan.all()[0].turn_tokens != other.all()[0].turn_tokens


@pytest.mark.parametrize("turns", [1, 2, 9])
def test_a_plan_of_the_least_size_works(turns: int) -> None:
    plan = Plan(20, 0, turns, prompt_tokens=turns * 10, output_tokens=8, vocab=50)
    assert plan.least_prompt == plan.prompt_tokens
    assert all(all(one.turn_tokens) for one in plan.all())


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [0, 2, 3]) == 0
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], []) is None


@pytest.mark.parametrize(
    ("behaviour", "arguments", "message"),
    [
        (Behaviour(), ["--prompt-tokens", "5000"], "give at most 2040"),
        (Behaviour(), ["--prompt-tokens", "20"], "need at least 30"),
        (Behaviour(), ["--vocab", "4"], "--vocab 4: give at least 5"),
        (Behaviour(), ["--json", "/nowhere/report.json"], "--json /nowhere/report.json"),
        (Behaviour(token_ids=False), [], "returns no token ids"),
        (Behaviour(api_key="secret"), [], "VLLM_API_KEY"),
    ],
)
def test_what_cannot_run_says_what_to_change(
    serve: Serve,
    behaviour: Behaviour,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["canary", serve(behaviour), *SMALL, *arguments]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith("kvlens canary: ")
    assert message in error


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ftp://host", "http://127.0.0.1:1/v1"])
def test_an_address_without_a_server(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["canary", address]) == USAGE
    assert "kvlens canary: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--conversations", "0"], ["--seed", "-1"], ["--turns", "x"]]
)
def test_bad_numbers_are_bad_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["canary", "http://127.0.0.1:1", *arguments])
    assert caught.value.code == USAGE


def test_a_key_is_taken_from_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert main(["canary", serve(Behaviour(api_key="secret")), *SMALL]) == OK


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/metrics"])
def test_any_address_of_the_server_will_do(serve: Serve, end: str) -> None:
    assert main(["canary", serve(Behaviour()) + end, *SMALL]) == OK


def test_ctrl_c_ends_it_without_a_traceback(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(asked: Asked) -> list[int]:
        os.kill(os.getpid(), signal.SIGINT)
        return asked.right()

    # A test run in the background of a script has been told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["canary", serve(Behaviour(answer=interrupted)), *SMALL]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "ended before it was done" in capsys.readouterr().err
