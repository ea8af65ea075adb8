"""What is written when, and that a disk can do nothing worse than lose records."""

import contextlib
import logging
import os
import resource
import shutil
import threading

import pytest
from flights import MIB, entries, files, ids, record, recorder
from waiting import eventually

from kvlens.telemetry import semconv
from kvlens.telemetry.flight import files as flight_files
from kvlens.telemetry.flight import recorder as flight_recorder
from kvlens.telemetry.flight.recorder import FlightRecorder, Mode


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(flight_recorder, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(flight_recorder, "MAX_RETRY_SECONDS", 0.02)


def lines(caplog):
    return [line.getMessage().partition(" (")[0] for line in caplog.records]


def test_anomalies_keep_their_surroundings_and_gaps_say_what_is_not_there(tmp_path):
    taken = recorder(tmp_path, Mode.ANOMALIES, context=2)
    for number in range(20):
        taken.request(record(number, "lost" if number in (7, 8, 16) else "cold"))
    taken.close()
    assert ids(tmp_path) == [f"r{n}" for n in (5, 6, 7, 8, 9, 10, 14, 15, 16, 17, 18)]
    (file,) = files(tmp_path)
    assert len(list(file)) + file.unremarkable == 20
    assert file.unremarkable == 9
    assert file.dropped == 0


def test_skipped_requests_are_unremarkable_and_a_context_of_0_keeps_anomalies_alone(tmp_path):
    taken = recorder(tmp_path, Mode.ANOMALIES, context=0)
    verdicts = ["skipped", "full", "local", "cold", "evicted", "unsafe", "full"]
    for number, verdict in enumerate(verdicts):
        taken.request(record(number, verdict))
    taken.close()
    assert ids(tmp_path) == ["r4", "r5"]


def test_all_are_written_by_default(tmp_path):
    taken = recorder(tmp_path)
    for number in range(50):
        taken.request(record(number))
    taken.close()
    assert ids(tmp_path) == [f"r{n}" for n in range(50)]
    assert taken.dropped == 0


def test_a_record_too_large_for_a_frame_loses_detail_and_says_so(tmp_path):
    taken = recorder(tmp_path, max_bytes=MIB)
    taken.request(record(0, evidence={"much": "x" * 100_000}))
    taken.close()
    (entry,) = entries(tmp_path)
    assert entry.record.truncated
    assert entry.record.verdict == "full"


def test_without_a_folder_there_is_no_recorder():
    assert FlightRecorder.from_settings(None, None, Mode.ALWAYS, 16, MIB) is None


def test_a_full_disk_loses_the_oldest_records_only_and_is_logged_once(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(flight_recorder, "QUEUE_BYTES", 16_384)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    taken = recorder(tmp_path)
    taken.request(record(0))
    eventually(lambda: ids(tmp_path) == ["r0"])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        for number in range(1, 200):
            taken.request(record(number))
        eventually(lambda: taken._away)
        written = ids(tmp_path)
        assert files(tmp_path)[0].damage is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    eventually(lambda: ids(tmp_path)[-1] == "r199")
    taken.close()
    found = ids(tmp_path)
    assert found[: len(written)] == written
    assert taken.dropped > 0
    assert len(found) + taken.dropped == 200
    read = files(tmp_path)
    assert sum(1 for file in read for _ in file) == len(found)
    assert sum(file.dropped for file in read) == taken.dropped
    assert {file.damage for file in read} == {None}
    assert lines(caplog) == [
        f"kvlens: the flight recorder cannot write to {tmp_path}",
        f"kvlens: the flight recorder writes to {tmp_path} again, {taken.dropped} records dropped",
    ]


def test_a_folder_that_vanishes_is_made_anew(tmp_path):
    folder = tmp_path / "recordings"
    taken = recorder(folder)
    taken.request(record(0))
    eventually(lambda: ids(folder) == ["r0"])
    shutil.rmtree(folder)
    taken.request(record(1))
    eventually(lambda: ids(folder) == ["r1"])
    taken.close()
    assert files(folder)[0].number == 1


def test_a_folder_that_cannot_be_written_is_retried_until_it_can(tmp_path, caplog):
    folder = tmp_path / "recordings"
    folder.write_text("a file in its place: not writable by anyone, root included")
    taken = recorder(folder)
    taken.request(record(0))
    eventually(lambda: taken._away)
    assert folder.is_file()
    folder.unlink()
    eventually(lambda: ids(folder) == ["r0"])
    taken.close()
    assert taken.dropped == 0
    assert lines(caplog) == [f"kvlens: the flight recorder cannot write to {folder}"]


@contextlib.contextmanager
def read_only(folder):
    """Nobody may write to the folder meanwhile; root would not be stopped by its mode."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_read_only_folder_is_told_once_and_written_when_it_can_be(tmp_path, caplog):
    folder = tmp_path / "recordings"
    folder.mkdir()
    with read_only(folder):
        taken = recorder(folder)
        taken.request(record(0))
        eventually(lambda: taken._away)
        taken.request(record(1))
    eventually(lambda: ids(folder) == ["r0", "r1"])
    taken.close()
    assert taken.dropped == 0
    assert lines(caplog) == [f"kvlens: the flight recorder cannot write to {folder}"]
    assert "Permission denied" in caplog.records[0].getMessage()


def test_what_never_reached_the_disk_is_counted_at_the_end(tmp_path):
    folder = tmp_path / "recordings"
    folder.write_text("in its place")
    taken = recorder(folder)
    for number in range(5):
        taken.request(record(number))
    taken.close()
    assert taken.dropped == 5
    assert taken.dropped_metric is semconv.DROPPED_RECORDS


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    never = threading.Event()
    reached = threading.Event()

    def hang(fd, data):
        reached.set()
        never.wait()

    monkeypatch.setattr(flight_files, "_write", hang)
    monkeypatch.setattr(flight_recorder, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(flight_recorder, "QUEUE_BYTES", 8192)
    taken = recorder(tmp_path)
    taken.request(record(0))
    assert reached.wait(20)
    for number in range(1, 100):
        taken.request(record(number))
    taken.close()
    assert not never.is_set()
    assert taken.dropped > 80
    never.set()
