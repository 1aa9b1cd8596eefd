import hashlib
import sqlite3

import pytest

from freetoken.errors import BadFileError, FtError
from freetoken.store import database, open_store, read_store, schema
from freetoken.store.rows import EventRow


def test_a_fresh_database_has_every_migration_and_wal(path):
    with open_store(path) as store:
        tables = {row[0] for row in store.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert store.connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert database.read_version(store.connection) == schema.VERSION == len(schema.MIGRATIONS)
    assert {"machines", "deployments", "runs", "events", "results", "measured_lines"} <= tables


def test_migrations_are_named_in_their_order():
    assert [one.__name__[:4] for one in schema.MIGRATIONS] == [f"m{n:03d}" for n in range(1, schema.VERSION + 1)]


def test_an_older_database_is_brought_up_and_keeps_its_rows(path, monkeypatch):
    monkeypatch.setattr(database, "MIGRATIONS", schema.MIGRATIONS[:2])
    monkeypatch.setattr(database, "VERSION", 2)
    with open_store(path) as store:
        store.record_event(EventRow(run_id="r1", kind="proven"))
    monkeypatch.setattr(database, "MIGRATIONS", schema.MIGRATIONS)
    monkeypatch.setattr(database, "VERSION", schema.VERSION)
    assert read_store(path) is None  # A reader makes nothing: until someone migrates it there is nothing to read.
    with open_store(path) as store:
        assert [one.kind for one in store.list_events("r1")] == ["proven"]
        assert store.list_measured_lines("r1") == ()


def test_a_failing_migration_leaves_the_old_database(path, monkeypatch):
    def m002_broken(db):
        db["half"].create({"id": int}, pk="id")
        raise sqlite3.OperationalError("no such thing")

    monkeypatch.setattr(database, "MIGRATIONS", schema.MIGRATIONS[:1])
    monkeypatch.setattr(database, "VERSION", 1)
    open_store(path).close()
    monkeypatch.setattr(database, "MIGRATIONS", (schema.MIGRATIONS[0], m002_broken))
    monkeypatch.setattr(database, "VERSION", 2)
    with pytest.raises(FtError, match="no such thing"):
        open_store(path)
    with sqlite3.connect(path) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 1
    assert "runs" in names
    assert "half" not in names


def test_a_newer_database_is_refused_and_not_touched(path):
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 4}")
    connection.close()
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns, sorted(path.parent.iterdir())
    for opening in (open_store, read_store):
        with pytest.raises(BadFileError) as caught:
            opening(path)
        known = f"this `ft` knows versions up to {schema.VERSION}"
        assert caught.value.message == f"{path} has version {schema.VERSION + 4}, {known}; it was left untouched"
        assert caught.value.exit_code == 2
    assert (
        hashlib.sha256(path.read_bytes()).digest(),
        path.stat().st_mtime_ns,
        sorted(path.parent.iterdir()),
    ) == before


@pytest.mark.parametrize(
    "content", [b"not a database at all", b"SQLite format 3\x00", b"SQLite format 3\x00" + b"x" * 4096]
)
def test_a_damaged_file_is_named_with_the_way_out(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(BadFileError) as caught:
        open_store(path)
    assert str(path) in caught.value.message
    assert "ft results --rebuild" in caught.value.hint or "newer `ft`" in caught.value.hint
    assert path.read_bytes() == content


def test_a_page_torn_out_of_the_middle_is_told_as_damage(path):
    with open_store(path) as store:
        store.record_events(EventRow(run_id="r1", kind="k", message=f"{n}" * 200) for n in range(300))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(BadFileError, match="is damaged"), open_store(path) as store:
        store.list_events("r1")


def test_a_folder_where_the_database_should_be_is_told(path):
    path.mkdir(parents=True)
    with pytest.raises(FtError, match=r"ft\.db cannot be read"):
        open_store(path)


def test_a_state_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(FtError, match="state"):
        open_store(tmp_path / "state" / "ft.db")


def test_a_full_disk_costs_the_write_alone(store):
    store.record_event(EventRow(run_id="r1", kind="before"))
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(FtError, match="cannot grow: the disk is full"):
        store.record_events(EventRow(run_id="r1", kind="big", message="x" * 4000 + str(n)) for n in range(50))
    assert [one.kind for one in store.list_events("r1")] == ["before"]


def test_a_read_only_database_is_told(store, monkeypatch):
    store.connection.execute("PRAGMA query_only = ON")
    with pytest.raises(FtError, match="cannot be written"):
        store.record_event(EventRow(run_id="r1", kind="x"))


def test_a_writer_that_never_ends_is_waited_for_and_then_named(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(database.time, "sleep", lambda seconds: None)
    with open_store(path) as store, open_store(path) as other:
        other.connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(FtError, match="is held by another process"):
            store.record_event(EventRow(run_id="r1", kind="x"))
        other.connection.execute("ROLLBACK")
        store.record_event(EventRow(run_id="r1", kind="x"))
        assert len(store.list_events("r1")) == 1


def test_a_change_that_fails_half_way_leaves_nothing(store):
    def change():
        store._tables["events"].insert({"run_id": "r1", "at": "a", "kind": "k", "message": ""})
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        store._write(change)
    assert store.list_events("r1") == ()
    assert not store.connection.in_transaction
