import sys

import pytest

from freetoken.errors import UsageError
from freetoken.tuner import storage as storages
from freetoken.tuner.storage import hide_password, open_known_storage, open_storage


def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(UsageError) as caught:
        open_storage("postgresql+psycopg2://ann:secret@db.example/ft")
    assert caught.value.message == (
        "the storage `postgresql+psycopg2://ann:***@db.example/ft` needs the Python driver `psycopg2`, "
        "which is not installed"
    )
    assert caught.value.hint == f"`{sys.executable} -m pip install psycopg2-binary`"


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("postgresql+psycopg://h/d", "psycopg", "'psycopg[binary]'"),
        ("mysql+pymysql://h/d", "pymysql", "pymysql"),
        ("mysql://h/d", "MySQLdb", "mysqlclient"),
        ("grpc://127.0.0.1:13000", "grpc", "grpcio protobuf"),
    ],
)
def test_every_kind_of_storage_names_its_own_driver(monkeypatch, url, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"needs the Python driver `{module}`") as caught:
        open_storage(url)
    assert caught.value.hint.endswith(f"pip install {package}`")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "the storage `nonsense` cannot be opened: "),
        ("grpc://nowhere", "an address `grpc://HOST:PORT` is needed"),
        ("grpc://127.0.0.1:9", "GRPC connection timeout"),
        ("sqlite:////no/such/folder/s.db", "unable to open database file"),
    ],
)
def test_an_address_that_leads_nowhere_is_told(monkeypatch, url, said):
    monkeypatch.setattr(storages, "PROXY_WAIT_S", 0.2)
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    assert said in caught.value.message


def test_no_password_is_shown_whatever_it_holds():
    assert hide_password("postgresql://ann:p@ss:w/rd@h:5432/d?x=1") == "postgresql://ann:***@h:5432/d?x=1"
    assert hide_password("postgresql://h:5432/d") == "postgresql://h:5432/d"
    assert hide_password("sqlite:///a.db") == "sqlite:///a.db"


def test_two_that_make_the_tables_at_once_try_again(monkeypatch, tmp_path):
    real, tries, waits = storages._open, [], []

    def stumble(url, *, is_shared):
        tries.append(url)
        if len(tries) < 3:
            raise RuntimeError('relation "studies" already exists')
        return real(url, is_shared=is_shared)

    monkeypatch.setattr(storages, "_open", stumble)
    assert open_storage(f"sqlite:///{tmp_path / 's.db'}", sleep=waits.append).get_all_studies() == []
    assert len(waits) == 2
    tries.clear()
    monkeypatch.setattr(storages, "_ATTEMPTS", 2)
    with pytest.raises(UsageError, match="already exists"):
        open_storage("sqlite://", sleep=waits.append)


def test_reading_studies_makes_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("FT_STATE", str(tmp_path))
    with pytest.raises(UsageError, match="nothing was tuned here yet") as caught:
        open_known_storage(None)
    assert caught.value.hint == "`ft tune RECIPE`"
    with pytest.raises(UsageError, match="there is no file"):
        open_known_storage(f"sqlite:///{tmp_path / 'no.db'}")
    assert list(tmp_path.iterdir()) == []
