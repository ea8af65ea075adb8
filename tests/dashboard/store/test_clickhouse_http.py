"""The client against an endpoint on loopback, and its quoting against the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

import pytest
from clickhouse_server import Server
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from receiver import Receiver, receiving

from kvlens.dashboard.store import clickhouse_http
from kvlens.dashboard.store.clickhouse_http import ClickHouseError, Http, quoted
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget, parse

SECRET = "s3cret"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clickhouse_http, "_FIRST_PAUSE", 0.001)


@contextmanager
def client(receiver: Receiver) -> Iterator[Http]:
    http = Http(ClickHouseTarget(receiver.url, "kv", "ana", SECRET))
    yield http
    http.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def test_a_query_is_a_post_with_bound_parameters(receiver: Receiver) -> None:
    with client(receiver) as http:
        assert http.query("SELECT {a:String}", a="x\ty\\", b=1.5) == []
    got = receiver.got[0]
    assert got.body.decode().startswith("SELECT {a:String} SETTINGS ")
    assert got.body.decode().endswith(" FORMAT JSONCompactEachRow")
    query = dict(parse_qsl(urlsplit(got.path).query))
    assert query == {"wait_end_of_query": "1", "param_a": r"x\ty\\", "param_b": "1.5"}
    assert (got.headers["x-clickhouse-user"], got.headers["x-clickhouse-key"]) == ("ana", SECRET)


def test_an_insert_sends_rows_as_json(receiver: Receiver) -> None:
    with client(receiver) as http:
        http.insert("kv.t", [{"a": 1, "b": "é\n"}, {"a": 2, "b": None}], token="it's", window=5)
        http.insert("kv.t", [])
    (got,) = receiver.got
    query = dict(parse_qsl(urlsplit(got.path).query))["query"]
    assert query == (
        r"INSERT INTO kv.t (a, b) SETTINGS token = 'it\'s', window = 5 FORMAT JSONEachRow"
    )
    assert [json.loads(line) for line in got.body.splitlines()] == [
        {"a": 1, "b": "é\n"},
        {"a": 2, "b": None},
    ]


def test_what_passes_is_tried_again(receiver: Receiver) -> None:
    receiver.answers = [503, 503]
    with client(receiver) as http:
        http.command("SELECT 1")
    assert len(receiver.got) == 3
    receiver.answers = [503] * 4
    with client(receiver) as http, pytest.raises(ClickHouseError, match="HTTP 503"):
        http.command("SELECT 1")
    assert len(receiver.got) == 7


@pytest.mark.parametrize(("code", "attempts"), [("60", 1), ("252", 2), ("999", 2), ("x", 1)])
def test_codes_that_pass_are_tried_again_and_others_are_not(
    receiver: Receiver, code: str, attempts: int
) -> None:
    receiver.headers = {"X-ClickHouse-Exception-Code": code}
    receiver.answers = [500, 200]
    with client(receiver) as http:
        if attempts == 1:
            with pytest.raises(ClickHouseError) as error:
                http.command("SELECT 1")
            assert error.value.code == (60 if code == "60" else 0)
        else:
            http.command("SELECT 1")
    assert len(receiver.got) == attempts


def test_a_wrong_password_is_explained_and_not_shown(receiver: Receiver) -> None:
    receiver.headers = {"X-ClickHouse-Exception-Code": "516"}
    receiver.answers = [403]
    with client(receiver) as http, pytest.raises(ClickHouseError) as error:
        http.command("SELECT 1")
    assert "user 'ana' or its password is wrong" in str(error.value)
    assert SECRET not in str(error.value)


def test_nobody_answers() -> None:
    with receiving() as gone:
        pass
    with client(gone) as http, pytest.raises(ClickHouseError) as error:
        http.command("SELECT 1")
    assert "check the address in --store" in str(error.value)
    assert error.value.code == 0


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@examples(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(TEXT, TEXT, st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**63 - 1))
def test_values_come_back_as_they_went(
    clickhouse_server: Server, text: str, other: str, number: float, whole: int
) -> None:
    http = Http(parse(clickhouse_server.url("default")))
    rows = http.query(
        f"SELECT {{text:String}}, {{number:Float64}}, {{whole:Int64}}, [{quoted([other, text])}]",
        text=text,
        number=number,
        whole=whole,
    )
    http.close()
    rows[0][1] = float(rows[0][1])  # a whole one comes as an integer
    assert rows == [[text, number, whole, [other, text]]]


def test_the_engines_errors_carry_their_code(clickhouse_server: Server) -> None:
    http = Http(parse(clickhouse_server.url("default")))
    with pytest.raises(ClickHouseError) as error:
        http.query("SELECT * FROM nowhere")
    assert error.value.code == 60
    http.close()
