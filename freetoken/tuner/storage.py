"""The storage of studies: the state folder's SQLite file, or what `--storage` names; and a study in it, opened again.

Any URL that Optuna takes: databases by SQLAlchemy's URLs (`postgresql://`, `mysql://`, `sqlite://`), and `grpc://HOST:PORT`
for Optuna's storage proxy. A driver that is missing is named with the command that installs it; no password is shown.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from freetoken import paths
from freetoken.errors import FtError, UsageError
from freetoken.tuner import history as trials
from freetoken.tuner import sharing
from freetoken.tuner.sharing import GRACE_S, HEARTBEAT_S

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study

    from freetoken.tuner.objectives import Objective
    from freetoken.tuner.sampler import ModelSampler

#: Driver as Python imports it -> what pip installs.
DRIVERS = {
    "psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient", "pymysql": "pymysql",
    "mysql": "mysql-connector-python", "grpc": "grpcio protobuf", "google": "grpcio protobuf",
}  # fmt: skip
#: Two processes that make the tables of an empty database at once stumble over each other: the second look helps.
_ATTEMPTS, _PAUSE_S = 5, 0.5
#: Seconds in which a storage proxy must answer.
PROXY_WAIT_S = 10.0
_RACES = ("already exists", "duplicate key", "UNIQUE constraint", "database is locked", "Duplicate entry")


def open_storage(url: str, *, is_shared: bool = False, sleep: Callable[[float], None] = time.sleep) -> BaseStorage:
    """The storage at `url`, its tables made where they are new. Raises UsageError where it cannot be opened.

    With `is_shared` trials keep a heartbeat where the storage is a database.
    """
    shown = hide_password(url)
    for attempt in range(_ATTEMPTS):
        try:
            return _open(url, is_shared=is_shared)
        except ImportError as error:
            raise _missing_driver(shown, error) from error
        except Exception as error:  # SQLAlchemy's and the drivers' own families, which are not imported here
            is_race = any(one in str(error) for one in _RACES)
            if not is_race or attempt == _ATTEMPTS - 1:
                said = hide_password(str(error).strip().splitlines()[0]).replace(url, shown)
                raise UsageError(f"the storage `{shown}` cannot be opened: {said}") from error
            sleep(_PAUSE_S)
    raise AssertionError("unreachable")


def open_known_storage(url: str | None) -> BaseStorage:
    """The storage at `url`, else this state folder's, for whoever reads studies. Raises UsageError where none is."""
    path = paths.studies_path()
    if url is None and not path.is_file():
        raise UsageError(f"nothing was tuned here yet: there is no {path}", hint="`ft tune RECIPE`")
    file = url.removeprefix("sqlite:///") if url is not None and url.startswith("sqlite:///") else None
    if file and not Path(file).is_file():
        raise UsageError(f"there is no file {file}")
    return open_storage(url or f"sqlite:///{path}")


def _open(url: str, *, is_shared: bool) -> BaseStorage:
    import optuna

    # Other processes of this machine write to the same file; a minute is longer than any of them holds it.
    options = {"connect_args": {"timeout": 60.0}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats and the proxy are called experimental
        if url.startswith("grpc://"):
            address = urlsplit(url)
            if not address.hostname or not address.port:
                raise ValueError("an address `grpc://HOST:PORT` is needed")
            proxy = optuna.storages.GrpcStorageProxy(host=address.hostname, port=address.port)
            proxy.wait_server_ready(timeout=PROXY_WAIT_S)  # else the first question would be what fails
            return proxy
        return optuna.storages.RDBStorage(
            url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_S if is_shared else None,
            grace_period=GRACE_S if is_shared else None,
        )  # fmt: skip


def hide_password(text: str) -> str:
    """`text` with the password of every address in it hidden."""
    return re.sub(r"(://[^:/@\s]*):[^\s]*@", r"\1:***@", text)


def _missing_driver(shown: str, error: ImportError) -> UsageError:
    """Names the driver and the command that installs it into the environment of this very `ft`."""
    name = _find_module(error)
    package = DRIVERS.get(name.partition(".")[0], name)
    named = " ".join(f"'{one}'" if "[" in one else one for one in package.split())
    return UsageError(
        f"the storage `{shown}` needs the Python driver `{name}`, which is not installed",
        hint=f"`{sys.executable} -m pip install {named}`",
    )


def _find_module(error: BaseException | None) -> str:
    """The module that is missing, from the innermost of the errors."""
    name = ""
    while error is not None:
        if isinstance(error, ImportError) and error.name:
            name = error.name
        error = error.__cause__ or error.__context__
    return name or "of this database"


# --- a study in it


def open_study(
    name: str, storage: BaseStorage | str | None, objectives: Sequence[Objective], sampler: ModelSampler
) -> Study:
    """The study `name`, made where it is new. Raises what Optuna raises where the storage cannot be used."""
    import optuna

    # Its warnings speak of packages and internals that nobody who tunes has chosen.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=sampler,
        directions=[one.direction for one in objectives],
        load_if_exists=True,
    )


def recover_stale(study: Study, *, is_shared: bool = False) -> int:
    """Fails the trials that a dead process left RUNNING and enqueues them again; how many there were."""
    stale = sharing.find_stale(study, is_shared=is_shared)
    for number in stale:
        fail_and_requeue(study, number)
    return len(stale)


def fail_trial(study: Study, trial_id: int) -> None:
    """Ends a trial of which nothing will be told."""
    from optuna.trial import TrialState

    study._storage.set_trial_state_values(trial_id, state=TrialState.FAIL)


def fail_and_requeue(study: Study, number: int) -> None:
    """Fails a trial that lost its process and enqueues its point, if it had one, once more."""
    trial = study.get_trials(deepcopy=False)[number]
    fail_trial(study, trial._trial_id)
    times = trial.user_attrs.get("resumed", 0)
    if trial.params and times < 2:
        attributes = {trials.STAGE: trial.user_attrs.get(trials.STAGE, "search"), "resumed": times + 1,
                      trials.REASON: f"trial {number} lost its process"}  # fmt: skip
        study.enqueue_trial(dict(trial.params), user_attrs=attributes)


def describe_failure(error: Exception) -> FtError | None:
    """What a storage that went away in mid-study means; None for any other error."""
    from optuna.exceptions import StorageInternalError

    # A storage proxy's errors come as its own, and its package may not even be installed.
    is_proxy = type(error).__module__.partition(".")[0] == "grpc"
    if not isinstance(error, StorageInternalError) and not is_proxy:
        return None
    said = error.details() if is_proxy and hasattr(error, "details") else str(error.__cause__ or error)
    return FtError(
        f"the storage cannot be used any more: {said.splitlines()[0]}", hint="`--resume` goes on with what was kept"
    )
