import json
import os
import subprocess
import sys

from freetoken.share.bundle import read_bundle
from tests.fakes.hostile import make_base, make_cases
from tests.fakes.hostile_tricks import make_odd

#: Runs every import in one process, as a user's script would, and tells what was written and how much memory it took.
DRIVER = """
import io, json, os, re, sys
from contextlib import redirect_stderr, redirect_stdout

written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(str(arguments[0]))
    elif event in ("os.rename", "os.mkdir", "os.symlink", "os.link", "subprocess.Popen", "os.system", "os.exec"):
        written.append(f"{event} {arguments[0]}")

from freetoken.cli.main import main
import freetoken.share.receive, freetoken.deploy.prepare, freetoken.cli.import_, freetoken.cli.usage
import cryptography.hazmat.primitives.asymmetric.ed25519
sys.addaudithook(watch)
answers = {}
for name in sorted(os.listdir(sys.argv[1])):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(["import", os.path.join(sys.argv[1], name), *sys.argv[2:]])
        except SystemExit as end:
            answers[name] = (end.code, out.getvalue(), err.getvalue())
# Not getrusage: its peak is inherited from the process that spawned this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"answers": answers, "written": [one for one in written if one != "/dev/null"], "peak": peak}))
"""


def test_the_base_of_all_of_them_is_fine():
    assert read_bundle(make_base(), "base").recipe.name == "mine"


def run_imports(tmp_path, cases, *arguments):
    """What one process says of all `cases`: label -> exit code, stdout, stderr; files written; peak bytes."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    labels = {}
    for number, (label, data) in enumerate(cases):
        labels[f"{number:03}.ftbundle"] = label
        (folder / f"{number:03}.ftbundle").write_bytes(data)
    env = {**os.environ, "FT_STATE": str(tmp_path / "state"), "FT_RUNTIME_DIR": str(tmp_path / "runtime")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), *arguments], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {labels[name]: answer for name, answer in found["answers"].items()}, found["written"], found["peak"]


def is_sentence(said):
    lines = said.splitlines()
    return (
        bool(lines) and lines[0].startswith("error: ") and len(lines[0]) > 20 and "unexpected" not in lines[0]
        and "Traceback" not in said and len(lines) < 12 and said.isascii()
    )  # fmt: skip


def test_hostile_bundles_are_refused_in_a_sentence_and_leave_nothing(tmp_path):
    cases = make_cases()
    assert len(cases) >= 400
    assert len({label for label, _ in cases}) == len(cases)
    answers, written, peak = run_imports(tmp_path, cases, "--apply", "--yes")
    wrong = {
        label: (code, said[:300]) for label, (code, out, said) in answers.items()
        if code != 2 or out or not is_sentence(said)
    }  # fmt: skip
    assert wrong == {}
    assert written == []
    assert peak < 200 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundles"]


def test_bundles_that_ask_for_more_than_any_machine_has_are_planned_or_refused(tmp_path):
    answers, written, _ = run_imports(tmp_path, make_odd(), "--dry-run", "--profile", "rtx-3060-laptop-6gb")
    wrong = {
        label: (code, said[:300]) for label, (code, _, said) in answers.items()
        if code not in (0, 2, 3) or (code and not is_sentence(said))
    }  # fmt: skip
    assert wrong == {}
    assert {code for code, _, _ in answers.values()} == {0, 2, 3}
    assert written == []
