import optuna
import pytest

from freetoken.recipe.model import GoodEnough
from freetoken.tuner.reading import read_study
from freetoken.tuner.values import Outcome
from tests.fakes.studies import finish, make_search
from tests.fakes.tuning import ScriptedLauncher


@pytest.fixture(scope="session")
def storage():
    return optuna.storages.InMemoryStorage()


@pytest.fixture(scope="session")
def study(storage):
    """A finished study of one objective: refused, measured, crashed and invalid trials, a confirmed winner."""

    def fate(number, point):
        return Outcome(kind="crash", violation_bytes=300 << 20, words="out of memory") if number == 2 else None

    search = make_search(storage, "one", launcher=ScriptedLauncher(2, fate), starts=6, trials=14)
    finish(search)
    return read_study(storage, "one")


@pytest.fixture(scope="session")
def pair(storage):
    """A finished study of two objectives with a limit that some trials miss."""
    search = make_search(
        storage, "two", objectives=("ttft", "decode_tps"), starts=5, trials=14, targets=GoodEnough(decode_tps=">=30")
    )
    finish(search)
    return read_study(storage, "two")


@pytest.fixture(scope="session")
def empty(storage):
    """A study that was only just begun."""
    make_search(storage, "empty")
    return read_study(storage, "empty")


@pytest.fixture(scope="session")
def failures(storage):
    """A study in which no engine ever started."""
    launcher = ScriptedLauncher(2, lambda number, point: Outcome(kind="crash", words="<b>no</b> such flag & more"))
    make_search(storage, "failures", launcher=launcher, starts=40, trials=80).run()
    return read_study(storage, "failures")
