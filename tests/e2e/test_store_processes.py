"""Several processes on one `ft.db`, and one that is killed while it writes."""

import json
import signal
import subprocess
import sys
import time

from freetoken.store import open_store

WRITER = """
import sys
from pathlib import Path
from freetoken.store import open_store
from freetoken.store.rows import EventRow
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(count):
    if number % 10 == 0:
        store = open_store(path)
    store.record_event(EventRow(run_id=name, at=f"{number:06d}", kind="k", data={"number": number}))
    if number % 10 == 9:
        store.close()
print("done")
"""


def start_writer(path, name, count):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, str(count)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


def test_eight_processes_that_open_and_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "state" / "ft.db"
    writers = [start_writer(path, f"run{n}", 40) for n in range(8)]
    answers = [writer.communicate(timeout=120) for writer in writers]
    assert [(writer.returncode, *answer) for writer, answer in zip(writers, answers, strict=True)] == [
        (0, "done\n", "")
    ] * 8
    with open_store(path) as store:
        kept = [[one.data["number"] for one in store.list_events(f"run{n}")] for n in range(8)]
        assert store.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert kept == [list(range(40))] * 8


def test_a_writer_killed_at_any_moment_leaves_a_whole_database(tmp_path):
    path = tmp_path / "ft.db"
    for turn in range(4):
        writer = start_writer(path, f"run{turn}", 100_000)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not _has_rows(path, f"run{turn}"):
            time.sleep(0.02)
        time.sleep(0.013 * turn)
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=120)
        with open_store(path) as store:
            assert store.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            numbers = [one.data["number"] for one in store.list_events(f"run{turn}", limit=1_000_000)]
        # What was committed is all there, without a gap.
        assert numbers == list(range(len(numbers)))
        assert numbers


LIMITED = """
import resource, sys
from pathlib import Path
from freetoken.errors import FtError
from freetoken.store import open_store
from freetoken.store.rows import EventRow
path = Path(sys.argv[1])
with open_store(path) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        for number in range(10_000):
            store.record_event(EventRow(run_id="r", at=f"{number:06d}", kind="k", message="x" * 1000))
    except FtError as error:
        print(number, error.message, error.hint, sep="|")
"""


def test_no_more_space_for_the_database_is_told_and_keeps_what_was_committed(tmp_path):
    path = tmp_path / "ft.db"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    number, message, hint = done.stdout.strip().split("|")
    assert done.stderr == ""
    assert message == f"{path} could not be read or written: disk I/O error"
    assert hint == f"is the disk that holds {tmp_path} full, or failing?"
    with open_store(path) as store:
        assert len(store.list_events("r", limit=100_000)) == int(number) > 0
        assert store.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def _has_rows(path, run):
    if not path.exists():
        return False
    with open_store(path) as store:
        return bool(store.list_events(run, limit=1))


def test_results_of_a_damaged_database_say_how_to_rebuild_and_the_rebuild_works(tmp_path):
    (tmp_path / "ft.db").write_bytes(b"rubbish")
    command = [sys.executable, "-m", "freetoken", "--state", str(tmp_path), "results"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"error: {tmp_path / 'ft.db'} is not a SQLite database\n"
        "hint: `ft results --rebuild` sets it aside and makes a new one from the run folders\n"
    )
    rebuilt = subprocess.run([*command, "--rebuild", "--json"], capture_output=True, text=True)
    assert (rebuilt.returncode, json.loads(rebuilt.stdout)) == (0, [])
    assert rebuilt.stderr.startswith("read 0 runs with 0 events and 0 results\nthe old database is kept as ")
