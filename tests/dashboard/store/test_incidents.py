"""Incidents and what people did about them, as every store keeps them."""

from __future__ import annotations

import time

import factory
from noticing import kept

from kvlens.dashboard.model.actions import Action, Handling
from kvlens.dashboard.model.batch import Batch
from kvlens.dashboard.store.base import Store

A = factory.engine()
B = factory.engine("node-b:0", "inc-b1", affected=False, model="other")


def test_detection_state(store: Store) -> None:
    store.save_detection(7, [kept("a")], [("zero_hit", "inc-a1", b"1"), ("d", "x", b"2")])
    store.save_detection(9, [kept("b", "closed", factory.START + 1)], [("d", "x", None)])
    assert store.load_detection() == (9, [("zero_hit", "inc-a1", b"1")])
    assert [item.id for item in store.incidents()] == ["b", "a"]
    assert [item.id for item in store.incidents("open")] == ["a"]
    assert store.incident("a") == kept("a")
    assert store.incident("z") is None
    assert len(store.incidents(changed_since=0)) == 2
    assert store.incidents(changed_since=2**40) == []
    store.append([factory.batch(A, [])])
    assert store.engines()[0].open_incidents == 1


def test_an_old_open_incident_is_found_behind_600_newer_ones(store: Store) -> None:
    old = kept("old")
    of_b = kept("b", opened_at=factory.START + 1, info=B)
    newer = [kept(f"n{n}", "closed", factory.START + 10 + n) for n in range(600)]
    store.save_detection(1, [old, of_b, *newer], [])
    assert [item.id for item in store.incidents("open")] == ["b", "old"]
    assert [item.id for item in store.incidents("open", engine=A.incarnation_id)] == ["old"]
    assert [item.id for item in store.incidents(engine=B.engine_id)] == ["b"]
    assert [item.id for item in store.incidents(at=factory.START)] == ["old"]
    assert store.incidents(at=factory.START - 1) == []
    assert [i.id for i in store.incidents(engine=A.engine_id, at=factory.START + 15)] == ["n5"]
    assert len(store.incidents(changed_since=0)) == len(store.incidents()) == 602
    assert [item.id for item in store.incidents("closed", limit=2)] == ["n599", "n598"]


def test_more_open_incidents_than_any_page_lists_are_all_found(store: Store) -> None:
    store.save_detection(1, [kept(f"n{n}", "open", factory.START + n) for n in range(600)], [])
    assert len(store.incidents("open")) == 600


def test_actions_are_a_log_and_a_state(store: Store) -> None:
    now = factory.START

    def action(ident: str, kind: str, at: float, about: str = "a") -> Action:
        return Action(id=ident, incident_id=about, time=at, kind=kind, who="ana", until=at + 9)

    first, second = action("1", "acknowledge", now), action("2", "silence", now + 10)
    appended = store.append([Batch(actions=[first]), Batch(actions=[second, first])])
    assert list(appended.acted_on) == ["a", "a", "a"]
    store.append([Batch(actions=[action("3", "annotate", now + 20, "b")])])
    assert [entry.id for entry in store.actions()] == ["3", "2", "1"]
    assert store.actions(before=now + 20, limit=1) == [second]
    handling = store.handling(["a", "c"])
    assert (handling["a"].acknowledged_at, handling["a"].silenced_until) == (now, now + 19)
    assert handling["c"] == Handling()
    assert store.handling([]) == {}


def test_an_action_is_a_change_of_its_incident(store: Store) -> None:
    store.save_detection(1, [kept("a"), kept("b")], [])
    later = time.time() + 100
    entry = Action(id="1", incident_id="a", time=later, kind="acknowledge", who="ana")
    store.append([Batch(actions=[entry])])
    assert [item.id for item in store.incidents(changed_since=later)] == ["a"]
