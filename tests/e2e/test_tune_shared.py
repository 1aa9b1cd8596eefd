"""Two `ft tune` on one study, in a PostgreSQL server or behind a storage proxy: two machines, as far as they can tell.

Planner, session, study, storage and server are real; what a trial measures is arithmetic (`ft_tune_fake`).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetoken.errors import UsageError
from freetoken.store import open_store
from freetoken.tuner.reading import read_study
from freetoken.tuner.storage import open_storage
from tests.fakes.ports import find_free_port
from tests.fakes.postgres import PASSWORD, serve_postgres

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server():
    with serve_postgres() as url:
        yield url


class Machine:
    """A machine of its own, as far as `ft` can tell."""

    def __init__(self, folder, url):
        self.folder, self.url = folder, url
        folder.mkdir()
        shutil.copy(REPO / "recipes" / "demo.yaml", folder / "demo.yaml")
        self.env = {**os.environ, "FT_STATE": str(folder / "state"), "FT_RUNTIME_DIR": str(folder / "run")}

    def start(self, *arguments, **env):
        command = [sys.executable, "-m", "tests.fakes.ft_tune_fake", *arguments, "--storage", self.url]
        return subprocess.Popen(command, env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                cwd=REPO)  # fmt: skip

    def tune(self, *arguments, **env):
        # Long enough for the other one to come along, whatever else the machine does.
        env.setdefault("FT_FAKE_PAUSE_S", "0.7")
        return self.start("tune", str(self.folder / "demo.yaml"), "--workload", "code-4k", "--json", *arguments, **env)


@pytest.fixture
def machines(server, tmp_path):
    return [Machine(tmp_path / name, server) for name in ("left", "right")]


def end(process):
    out, err = process.communicate(timeout=300)
    assert PASSWORD not in out + err
    return process.returncode, out, err


def tune_both(machines, gate, *arguments):
    """Both begin at once, however long either takes to import what it needs."""
    running = [one.tune(*arguments, FT_FAKE_GATE=str(gate)) for one in machines]
    return [end(one) for one in running]


def test_two_that_begin_at_once_share_the_work_of_one_study(server, machines, tmp_path):
    ended = tune_both(machines, tmp_path / "gate", "--trials", "10")
    assert [code for code, _, _ in ended] == [0, 0], [err[-2000:] for _, _, err in ended]
    results = [json.loads(out) for _, out, _ in ended]
    assert results[0]["study"] == results[1]["study"]
    storage = open_storage(server)
    study = read_study(storage, results[0]["study"])
    measured = [one for one in study.trials if one.state == "measured"]
    assert study.machines == 2
    assert {one.machine for one in measured} == {1, 2}
    # One baseline, and no trial that nobody ended.
    assert [one.stage for one in measured].count("default") == 1
    assert {one.state for one in study.trials} <= {"measured", "refused", "lost"}
    assert all(one.reason.startswith("gave way to trial") for one in study.trials if one.state == "lost")
    # A start is an engine's on one machine, and no two were begun with the same setting.
    owners, firsts = {}, {}
    for one in measured:
        owners.setdefault(one.start, set()).add(one.machine)
        firsts.setdefault(one.start, tuple(sorted(one.point.items())))
    assert all(len(one) == 1 for one in owners.values())
    assert len(set(firsts.values())) == len(firsts), firsts
    # Each saw trials of the other: it judged more than it measured itself.
    for machine, result in zip(machines, results, strict=True):
        with open_store(machine.folder / "state" / "ft.db") as store:
            own = len(store.list_results(kind="trial"))
        assert 1 <= own < result["trials"]
    assert len(study.results) == 2
    for one in machines:
        kept = "".join(path.read_text(errors="replace") for path in one.folder.rglob("*.json"))
        assert PASSWORD not in kept
    code, out, err = end(machines[0].start("report", "demo", "-o", str(tmp_path / "r.html"), "--json"))
    assert code == 0, err
    assert "on 2 equal machines" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert json.loads(out)["trials"] == len(study.trials)


def test_one_that_comes_later_goes_on_with_what_the_other_knows_and_after_the_end_begins_anew(server, machines):
    arguments = ("--trials", "3", "--objective", "decode_tps")
    first, second = machines
    killed = first.tune(*arguments, FT_FAKE_KILL_AT="2")
    assert end(killed)[0] == -signal.SIGKILL
    code, out, err = end(second.tune(*arguments))
    assert code == 0, err[-2000:]
    assert "which has not ended yet" in err
    joined = json.loads(out)
    study = read_study(open_storage(server), joined["study"])
    # The dead one's baseline counts; the trial that it had in hand may still be its own.
    assert [one.stage for one in study.trials if one.state == "measured"].count("default") == 1
    assert [one.state for one in study.trials].count("running") == 1
    code, out, err = end(first.tune(*arguments, "--resume"))
    assert code == 0, err[-2000:]
    assert "1 trial(s) of a process that is gone" in err
    assert json.loads(out)["study"] == joined["study"]
    code, out, err = end(second.tune(*arguments))
    assert code == 0, err[-2000:]
    assert json.loads(out)["study"] == f"{joined['study']}.2"


@pytest.fixture
def proxy(tmp_path):
    """Optuna's own proxy in front of a SQLite file: its address."""
    pytest.importorskip("grpc")
    port = find_free_port()
    serve = (
        "import optuna; storage = optuna.storages.RDBStorage('sqlite:///proxy.db');"
        f"optuna.storages.run_grpc_proxy_server(storage, host='127.0.0.1', port={port})"
    )
    with (tmp_path / "proxy.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", serve], cwd=tmp_path, stdout=log, stderr=log)
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_machines_that_reach_a_proxy_alone_share_a_study_too(proxy, tmp_path):
    machines = [Machine(tmp_path / name, proxy) for name in ("left", "right")]
    wait_for_proxy(proxy)
    ended = tune_both(machines, tmp_path / "gate", "--trials", "6")
    assert [code for code, _, _ in ended] == [0, 0], [err[-2000:] for _, _, err in ended]
    study = read_study(open_storage(proxy), json.loads(ended[0][1])["study"])
    measured = [one for one in study.trials if one.state == "measured"]
    assert {one.machine for one in measured} == {1, 2}
    assert [one.stage for one in measured].count("default") == 1
    assert not any("Warning" in err for _, _, err in ended)


def wait_for_proxy(url):
    """A busy machine needs its time to import what the proxy is made of."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return open_storage(url)
        except UsageError:
            if time.monotonic() > deadline:
                raise
