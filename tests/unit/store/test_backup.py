import csv
import io
import json
import sqlite3
import threading

import pytest

from freetoken.cli.main import main
from freetoken.errors import BadFileError, UsageError
from freetoken.store import open_store
from freetoken.store.backup import backup, check, restore
from freetoken.store.rows import ResultRow


def make_result(number, **changes):
    values = {
        "recipe_name": "demo", "workload": "code-4k", "engine": "native", "model_name": "demo-moe",
        "metrics": {"decode_tps": 10.0 + number}, "settings": {"expert_slots": number},
        "measured_at": f"2031-05-04T09:30:{number:02}+00:00",
    }  # fmt: skip
    return ResultRow(**(values | changes))


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "ft.db"
    with open_store(target) as store:
        for number in range(20):
            store.record_result(make_result(number))
    return target


@pytest.fixture
def ft(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FT_STATE", str(tmp_path))

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        said = capsys.readouterr()
        return caught.value.code, said.out, said.err

    return call


def test_a_backup_restores_to_an_equal_database(path, tmp_path):
    before = check(path)
    backup(path, tmp_path / "copy.db")
    with open_store(path) as store:
        store.record_result(make_result(21))
    assert check(path).sha256 != before.sha256
    after = restore(tmp_path / "copy.db", path)
    assert (after.sha256, after.tables, after.version) == (before.sha256, before.tables, before.version)
    assert check(tmp_path / after.kept.rsplit("/", 1)[-1]).tables["results"] == 21


def test_a_backup_taken_during_writes_is_whole_and_restores_to_an_equal_database(path, tmp_path):
    """Writers go on all the time; a backup holds a state that was, and every writer's rows in their order."""
    is_over = threading.Event()
    written = [0, 0]

    def write(writer):
        with open_store(path) as store:
            while not is_over.is_set():
                store.record_result(make_result(0, recipe_name=f"writer-{writer}", metrics={"number": written[writer]}))
                written[writer] += 1

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for one in writers:
        one.start()
    try:
        reports = [backup(path, tmp_path / f"copy-{number}.db") for number in range(4)]
    finally:
        is_over.set()
        for one in writers:
            one.join()
    assert min(written) > 0
    assert [one.tables["results"] for one in reports] == sorted(one.tables["results"] for one in reports)
    with open_store(tmp_path / "copy-3.db") as store:
        for number in range(2):
            rows = store.list_results(recipe=f"writer-{number}", limit=100_000)
            assert sorted(row.metrics["number"] for row in rows) == list(range(len(rows)))
    expected = check(tmp_path / "copy-2.db")
    assert restore(tmp_path / "copy-2.db", path).sha256 == expected.sha256


def test_a_process_that_has_the_database_open_sees_what_was_restored(path, tmp_path):
    backup(path, tmp_path / "copy.db")
    with open_store(path) as store:
        store.record_result(make_result(30))
        restore(tmp_path / "copy.db", path)
        assert len(store.list_results()) == 20
        store.record_result(make_result(31))
    assert check(path).tables["results"] == 21


def test_a_damaged_database_is_told_and_can_be_replaced(path, tmp_path):
    backup(path, tmp_path / "copy.db")
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(BadFileError, match="is not a SQLite database"):
        check(path)
    report = restore(tmp_path / "copy.db", path)
    assert report.tables["results"] == 20
    assert report.kept is not None


def test_a_damaged_backup_replaces_nothing(path, tmp_path):
    copy = tmp_path / "copy.db"
    backup(path, copy)
    data = bytearray(copy.read_bytes())
    for where in range(4096, len(data), 512):
        data[where : where + 64] = b"\xff" * 64
    copy.write_bytes(data)
    before = check(path)
    with pytest.raises(BadFileError):
        restore(copy, path)
    assert check(path).sha256 == before.sha256


def test_a_row_that_nobody_can_read_is_found(path):
    with sqlite3.connect(path) as connection:
        connection.execute('UPDATE results SET metrics = \'{"decode_tps": "fast"}\' WHERE id = 3')
    with pytest.raises(BadFileError, match="holds a row in `results` that cannot be read"):
        check(path)


def test_what_is_no_database_of_ours_replaces_nothing(path, ft, tmp_path):
    empty, other = tmp_path / "empty.db", tmp_path / "other.db"
    empty.touch()
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE notes (text)")
    connection.execute("PRAGMA user_version = 3")
    connection.commit()
    connection.close()
    before = check(path).sha256
    for file in (empty, other):
        code, _, said = ft("db", "restore", str(file), "--yes")
        assert (code, "is no database of `ft`" in said, "take another copy" in said) == (2, True, True)
    assert check(path).sha256 == before


def test_a_restore_asks_first_and_names_what_it_cannot_write(path, ft, tmp_path):
    backup(path, tmp_path / "copy.db")
    code, _, said = ft("db", "restore", str(tmp_path / "copy.db"))
    assert (code, "nobody can be asked here whether to replace" in said) == (2, True)
    code, _, said = ft("db", "backup", str(path / "copy.db"))
    assert (code, f"cannot write {path / 'copy.db'}: {path} is no folder" in said) == (2, True)


def test_a_backup_overwrites_nothing(path, tmp_path):
    (tmp_path / "copy.db").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        backup(path, tmp_path / "copy.db")


def test_the_commands_back_up_check_and_restore(path, ft, tmp_path):
    assert ft("db", "backup", str(tmp_path / "copy.db"))[0] == 0
    code, out, _ = ft("db", "check", "--json")
    assert (code, json.loads(out)["tables"]["results"]) == (0, 20)
    assert ft("db", "restore", str(tmp_path / "copy.db"), "--yes")[0] == 0
    assert ft("db", "check", str(tmp_path / "none.db"))[0] == 2
    path.write_bytes(b"x" * 200)
    assert ft("db", "check")[0] == 2


def test_results_are_exported_as_csv_and_json(path, ft):
    with open_store(path) as store:
        store.record_result(make_result(40, recipe_name="=evil()", metrics={"ttft_ms": 5.0}))
    code, out, _ = ft("results", "--export", "csv", "--limit", "2")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["recipe_name"] for row in rows] == ["'=evil()", "demo"]
    assert [(row["metrics.ttft_ms"], row["metrics.decode_tps"]) for row in rows] == [("5.0", ""), ("", "29.0")]
    assert rows[1]["settings.expert_slots"] == "19"
    code, out, _ = ft("results", "--export", "json", "--limit", "2")
    assert [row["metrics"] for row in json.loads(out)] == [{"ttft_ms": 5.0}, {"decode_tps": 29.0}]
