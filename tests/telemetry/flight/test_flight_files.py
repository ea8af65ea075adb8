"""The format: what was written is read again, wherever the file ends and whoever wrote it."""

import os
import signal
import subprocess
import sys

import pytest
from flights import MIB, entries, files, ids, record, recorder
from recording import engine

from kvlens.telemetry.flight import files as flight_files
from kvlens.telemetry.flight import format as fmt
from kvlens.telemetry.flight.files import SHARE, FlightFiles
from kvlens.telemetry.flight.reader import FlightFile, FlightFileError


def one_file(folder, count=3):
    taken = recorder(folder)
    for number in range(count):
        taken.request(record(number))
    taken.close()
    (path,) = folder.glob("*.kvlens")
    return path


def test_records_and_engine_come_back_as_they_were(tmp_path):
    taken = recorder(tmp_path / "made" / "on the way")
    lost = record(1, "lost", evidence={"n": [1, {"x": None}]}, sampling_probability=0.1)
    taken.request(record(0))
    taken.request(lost)
    taken.deferral(record(2, "stalled"))
    taken.close()
    (file,) = files(tmp_path / "made" / "on the way")
    plain, anomaly, waiting = file
    assert file.engine == engine()
    assert (file.number, file.damage, file.dropped, file.unremarkable) == (0, None, 0, 0)
    assert file.stopped_at is not None
    assert plain.record == record(0)
    assert anomaly.record.evidence == lost.evidence
    assert anomaly.record.sampling_probability == 1.0
    assert [plain.in_flight, anomaly.in_flight, waiting.in_flight] == [False, False, True]


def test_only_this_user_may_read_it(tmp_path):
    path = one_file(tmp_path / "folder")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_cut_off_anywhere_gives_every_complete_record(tmp_path):
    path = one_file(tmp_path)
    whole = path.read_bytes()
    ends = [len(fmt.header(engine(), 0))]
    for number in range(3):
        ends.append(ends[-1] + len(fmt.record_frame(fmt.REQUEST, record(number), MIB)))
    ends.append(len(whole))
    cut = tmp_path / "cut.kvlens"
    near = {end + step for end in ends for step in (-1, 0, 1, fmt.FRAME.size)}
    lengths = sorted({*near, *range(0, len(whole), 61)} & {*range(len(whole) + 1)})
    for length in (length for length in lengths if length >= ends[0]):
        cut.write_bytes(whole[:length])
        file = FlightFile(cut)
        complete = sum(end <= length for end in ends[1:4])
        assert len(list(file)) == complete
        assert (file.damage is None) == (length in ends)
        if file.damage is not None:
            assert "not written to its end" in file.damage
    for length in (length for length in lengths if length < ends[0]):
        cut.write_bytes(whole[:length])
        with pytest.raises(FlightFileError, match=r"cut off|not a kvlens|is empty"):
            FlightFile(cut)


def test_a_flipped_bit_never_passes_for_a_record(tmp_path):
    path = one_file(tmp_path)
    whole = bytearray(path.read_bytes())
    start = len(fmt.header(engine(), 0))
    for position in range(start, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        file = FlightFile(path)
        assert [entry.record for entry in file] == [record(n) for n in range(len(list(file)))]
        assert file.damage is not None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"SQLite format 3\0" * 10, "not a kvlens flight-recorder file"),
        (fmt.HEADER.pack(fmt.MAGIC, 2, 0, 2, 0) + b"{}", "format version 2; this kvlens reads"),
        (fmt.HEADER.pack(fmt.MAGIC, 1, 0, 2, 0) + b"{}", "header is damaged"),
        (fmt.HEADER.pack(fmt.MAGIC, 1, 0, 2**32 - 1, 0) + b"{}", "cut off inside its header"),
    ],
)
def test_a_foreign_or_newer_file_is_refused_by_name(tmp_path, data, said):
    path = tmp_path / "x.kvlens"
    path.write_bytes(data)
    with pytest.raises(FlightFileError, match=said) as error:
        FlightFile(path)
    assert str(path) in str(error.value)


def test_records_of_a_newer_schema_are_refused(tmp_path):
    path = tmp_path / "x.kvlens"
    path.write_bytes(fmt.header(engine(schema_version=99), 0))
    with pytest.raises(FlightFileError, match=r"schema version 99.*upgrade kvlens"):
        FlightFile(path)
    newer = fmt.record_frame(fmt.REQUEST, record(0, schema_version=99), MIB)
    path.write_bytes(fmt.header(engine(), 0) + newer)
    with pytest.raises(FlightFileError, match="schema version 99"):
        list(FlightFile(path))


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(FlightFileError, match=r"cannot be read|not a regular file"):
        FlightFile(tmp_path / "x")


def test_files_are_rotated_within_the_bound_and_the_newest_stay(tmp_path):
    taken = FlightFiles(tmp_path, engine(), MIB)
    frame = fmt.record_frame(fmt.REQUEST, record(0, summary="x" * 5000), MIB)
    for _ in range(3 * MIB // len(frame)):
        taken.append(frame)
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= MIB
    numbers = [file.number for file in files(tmp_path)]
    assert len(numbers) == SHARE
    assert numbers == list(range(numbers[0], numbers[0] + SHARE))
    assert numbers[0] > 0
    taken.close()


def test_the_bound_covers_engines_that_ended_and_spares_those_that_run(tmp_path):
    frame = fmt.record_frame(fmt.REQUEST, record(0, summary="x" * 50_000), MIB)
    ended, running, new = (
        FlightFiles(tmp_path, engine(incarnation_id=name, started_at=at), MIB)
        for at, name in enumerate(("ended", "running", "new"))
    )
    foreign = tmp_path / "notes.kvlens"
    foreign.write_bytes(b"not ours")
    running.append(frame)
    for _ in range(20):
        ended.append(frame)
    ended.close()
    for _ in range(60):
        new.append(frame)
    names = [path.name.split("-")[1] for path in tmp_path.glob("*-*.kvlens")]
    assert "ended" not in names
    assert names.count("running") == 1
    assert names.count("new") > SHARE // 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MIB
    assert foreign.exists()
    running.close()
    new.close()


KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from flights import ids, record, recorder
taken = recorder(Path(sys.argv[1]), max_bytes=1 << 30)  # nothing may be rotated away
for number in range(500):
    taken.request(record(number))
while len(ids(Path(sys.argv[1]))) < 500:
    time.sleep(0.01)
print("written", flush=True)
number = 500
while True:
    taken.request(record(number))
    number += 1
    while len(taken._queue) > 100:  # far from full: nothing may be dropped
        time.sleep(0.0001)
"""


def test_after_kill_9_everything_up_to_the_last_complete_record_is_there(tmp_path):
    paths = [path for path in sys.path if path]
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), *paths], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found = ids(tmp_path)
    assert len(found) >= 500
    assert found == [f"r{number}" for number in range(len(found))]
    assert all(file.stopped_at is None for file in files(tmp_path))


def test_a_file_is_read_while_it_is_written(tmp_path):
    taken = FlightFiles(tmp_path, engine(), MIB)
    frame = fmt.record_frame(fmt.REQUEST, record(0), MIB)
    taken.append(frame)
    assert len(entries(tmp_path)) == 1
    taken.append(frame)
    assert len(entries(tmp_path)) == 2
    taken.close()


def test_a_file_has_its_name_only_with_a_complete_header(tmp_path, monkeypatch):
    """Whoever reads the folder, at any moment or after a kill, finds no stub."""
    seen = []

    def write(fd, data):
        seen.append(list(tmp_path.glob("*.kvlens")))
        os.write(fd, data)

    monkeypatch.setattr(flight_files, "_write", write)
    made = FlightFiles(tmp_path, engine(), 8 * MIB)
    made.append(b"")
    made.close()
    assert seen[0] == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".kvlens"]
    assert files(tmp_path)[0].engine == engine()
