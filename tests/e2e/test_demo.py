"""`ft apply recipes/demo.yaml` with the real native engine and the bundled model, as a user and as CI meet it.

One deployment serves the whole module, and its tests run in the order in which they stand: each leaves it running
for the next. What fakes already prove (`test_life_*.py`) is repeated only where the real engine could answer
otherwise. No process may outlive the module.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken import paths
from freetoken.adapters.control import ControlClient
from freetoken.residency import read_trace, replay
from tests.e2e.life import MARKER, REPO, find_free_port, find_orphans, wait_for

DEMO = paths.package_data("demo-moe")
PROMPT = "def read_lines(path):\n"
TOKENS = 160
#: Generous: a machine that runs other work beside needs many times what an idle one does.
WAIT_S = 240


class Demo:
    """A state folder and a port of its own, and `ft` as a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.port = folder, folder / "state", find_free_port()
        self.trace = folder / "routing.trace"
        self.token = uuid.uuid4().hex
        self.environment = {
            **os.environ, "FT_STATE": str(self.state), "FT_RUNTIME_DIR": str(folder / "runtime"), MARKER: self.token,
            "OMP_NUM_THREADS": "1", "FT_TRACE": str(self.trace),
        }  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sets(self, *more: str) -> list[str]:
        # A small chunk keeps the proof short; one thread keeps answers the same on every machine.
        pairs = (f"serve.port={self.port}", "settings.prefill_chunk_tokens=256", "settings.cpu_threads=1", *more)
        return [word for pair in pairs for word in ("--set", pair)]

    def start(self, *arguments: str, max_file_bytes: int | None = None) -> subprocess.Popen[str]:
        def limit() -> None:
            if max_file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

        return subprocess.Popen(
            [sys.executable, "-m", "freetoken", *arguments], cwd=REPO, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, preexec_fn=limit,
        )  # fmt: skip

    def ft(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def apply(self, *more: str) -> dict[str, Any]:
        code, out, err = self.ft("apply", "recipes/demo.yaml", "--json", *self.sets(*more))
        assert code == 0, err
        return json.loads(out)  # type: ignore[no-any-return]

    def status(self) -> dict[str, Any]:
        code, out, err = self.ft("status", "demo", "--json")
        assert code in (0, 6), err
        return json.loads(out)["deployments"][0]  # type: ignore[no-any-return]

    def wait_answer(self) -> None:
        def ask() -> bool:
            with ControlClient(self.url, timeout_s=5) as client:
                try:
                    return client.health().status == "ok"
                except Exception:
                    return False

        wait_for(ask, WAIT_S)

    def stop(self) -> None:
        assert self.ft("stop", "--all")[0] == 0


def make_demo(folder: Path) -> Iterator[Demo]:
    demo = Demo(folder)
    yield demo
    demo.stop()
    # A keeper that has written the end needs a moment to leave.
    deadline = time.monotonic() + 10
    while (orphans := find_orphans(demo.token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for orphan in orphans:
        os.kill(int(orphan.split()[0]), signal.SIGKILL)
    assert orphans == [], f"left behind: {orphans}"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """The deployment that all tests of this module share."""
    yield from make_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Demo]:
    """A state folder in which nothing runs."""
    yield from make_demo(tmp_path)


@pytest.fixture(scope="module")
def expected() -> str:
    """What stock `transformers` writes after PROMPT, the likeliest token each time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    return str(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))


# -- one deployment, from its launch to its end --------------------------------------------------------------------


def test_apply_serves_the_demo_and_a_second_apply_changes_nothing(demo: Demo) -> None:
    first = demo.apply()
    assert (first["diff"]["action"], first["model"]) == ("launch", "demo-moe")
    assert first["proof"]["chunk_prompt_tokens"] >= 256
    assert first["proof"]["strategy"] == "offload"
    engine = demo.status()["engine_pid"]
    again = [demo.apply() for _ in range(2)]
    assert [one["diff"]["action"] for one in again] == ["nothing", "nothing"]
    # Two seconds where the cores are free; on a crowded machine it may take what the planning itself takes there.
    assert min(one["duration_s"] for one in again) < 2 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert demo.status()["engine_pid"] == engine


def test_the_text_is_the_models_own(demo: Demo, expected: str) -> None:
    code, out, err = demo.ft(
        "ctl", "generate", "--echo", "--ignore-eos", "--max-tokens", str(TOKENS), PROMPT
    )  # fmt: skip
    assert (code, out) == (0, PROMPT + expected + ("" if expected.endswith("\n") else "\n"))
    assert re.fullmatch(rf"\[{TOKENS} tokens, first after [\d.]+ m?s, [\d.,]+ tok/s\]\n", err)
    code, out, _ = demo.ft("ctl", "generate", "--stop", "\ndef ", "--max-tokens", str(TOKENS), PROMPT)
    compile(PROMPT + out, "the demo's completion", "exec")


def test_slots_resized_by_apply_and_by_ctl_in_mid_answer_leave_the_engine_and_the_answer(
    demo: Demo, expected: str
) -> None:
    engine, texts = demo.status()["engine_pid"], []

    def answer() -> None:
        with ControlClient(demo.url, timeout_s=60) as client:
            texts.append("".join(client.generate(PROMPT, TOKENS, ignore_eos=True)))

    readers = [threading.Thread(target=answer) for _ in range(3)]
    for reader in readers:
        reader.start()
    with ControlClient(demo.url, timeout_s=60) as client:
        assert client.rebuild(expert_slots=7).moe_cache_size == 7
    resized = demo.apply("settings.expert_slots=40")
    for reader in readers:
        reader.join(WAIT_S)
    assert resized["diff"]["action"] == "resize"
    assert texts == [expected] * 3
    view = demo.status()
    rows = {row["field"]: row for row in view["rows"]}
    assert (view["engine_pid"], view["drift"]) == (engine, [])
    assert [rows["expert_slots"][key] for key in ("declared", "planned", "measured")] == [40, 40, 40]


def test_counted_hits_equal_the_replay_of_what_was_served(demo: Demo) -> None:
    with ControlClient(demo.url, timeout_s=60) as client:
        hits = client.stats().moe_hits
    assert hits is not None
    assert hits.hits > 0
    assert hits.misses > 0

    def whole() -> bool:
        replayed = replay(read_trace(demo.trace))
        return (replayed.lookups, replayed.hits) == (hits.lookups, hits.hits)

    wait_for(whole)


def test_a_killed_keeper_leaves_the_engine_and_the_next_command_adopts_it(demo: Demo, expected: str) -> None:
    before = demo.status()
    os.kill(before["keeper_pid"], signal.SIGKILL)
    after = demo.status()
    assert after["engine_pid"] == before["engine_pid"]
    assert after["keeper_pid"] not in (None, before["keeper_pid"])
    assert after["condition"] == "ready"
    with ControlClient(demo.url, timeout_s=60) as client:
        assert "".join(client.generate(PROMPT, TOKENS, ignore_eos=True)) == expected


def test_a_killed_engine_comes_back_with_its_sizes(demo: Demo, expected: str) -> None:
    before = demo.status()
    os.kill(before["engine_pid"], signal.SIGKILL)
    wait_for(lambda: demo.status()["restarts"] == 1, WAIT_S)
    demo.wait_answer()
    after = wait_for(lambda: (found := demo.status())["condition"] == "ready" and found, WAIT_S)
    assert after["engine_pid"] != before["engine_pid"]
    assert next(row["measured"] for row in after["rows"] if row["field"] == "expert_slots") == 40
    with ControlClient(demo.url, timeout_s=60) as client:
        assert "".join(client.generate(PROMPT, TOKENS, ignore_eos=True)) == expected
    code, out, _ = demo.ft("logs", "demo", "--events")
    assert code == 0
    assert [word for word in ("engine_exited", "engine_restarting", "engine_ready") if word not in out] == []


def test_eight_commands_at_once_leave_one_engine_and_no_error(demo: Demo) -> None:
    engine = demo.status()["engine_pid"]
    apply = ("apply", "recipes/demo.yaml",
             *demo.sets("settings.expert_slots=40"))  # fmt: skip
    commands = [
        apply, apply, ("status",), ("results",), ("logs", "demo"), ("ctl", "stats"), ("plan", "demo"),
        ("ctl", "generate", PROMPT),
    ]  # fmt: skip
    running = [demo.start(*command) for command in commands]
    ended = [(process.communicate(timeout=WAIT_S), process.returncode) for process in running]
    assert [code for _, code in ended] == [0] * 8, [output[1] for output, _ in ended]
    assert demo.status()["engine_pid"] == engine


def test_a_taken_port_is_told_before_anything_is_started(demo: Demo) -> None:
    code, _, err = demo.ft("apply", "recipes/demo.yaml", "--name", "second", *demo.sets())
    assert code == 1, err
    assert f"error: port {demo.port} is taken by the deployment `demo` (`ft stop demo`)\n" in err
    assert len(list((demo.state / "runs").iterdir())) == 1


def test_another_strategy_restarts_it(demo: Demo, expected: str) -> None:
    before = demo.status()
    assert demo.apply("settings.strategy=fused")["diff"]["action"] == "restart"
    after = demo.status()
    assert after["engine_pid"] != before["engine_pid"]
    assert (after["condition"], after["drift"]) == ("ready", [])
    with ControlClient(demo.url, timeout_s=60) as client:
        assert "".join(client.generate(PROMPT, TOKENS, ignore_eos=True)) == expected


def test_stop_ends_everything_and_says_so(demo: Demo) -> None:
    assert demo.ft("stop", "demo")[:2] == (0, "demo: stopped on request: engine ended by SIGINT\n")
    wait_for(lambda: find_orphans(demo.token) == [])
    assert demo.ft("stop", "demo")[:2] == (0, "`demo` does not run\n")
    assert demo.status()["condition"] == "stopped"


# -- what is ended in the middle, or lacks space -------------------------------------------------------------------


def test_an_apply_killed_while_it_loads_is_adopted_and_its_small_files_are_kept_small(
    empty: Demo, expected: str
) -> None:
    """The first `ft` lets no file grow beyond 40 KiB, and is killed; its keeper and engine inherit the limit."""
    apply = ("apply", "recipes/demo.yaml", *empty.sets())
    process = empty.start(*apply, max_file_bytes=40 << 10)
    assert process.stderr is not None
    for line in process.stderr:
        if "] load: " in line:
            break
    process.kill()
    process.communicate()
    code, out, err = empty.ft(*apply)
    assert code == 0, err
    assert "] adopt: adopting run " in err
    assert out.startswith("demo: "), out
    (run,) = (empty.state / "runs").iterdir()
    engine = empty.status()["engine_pid"]
    with ControlClient(empty.url, timeout_s=60) as client:
        wait_for(lambda: client.complete("a", 1) and (run / "engine.log.1").exists(), WAIT_S)
        assert "".join(client.generate(PROMPT, TOKENS, ignore_eos=True)) == expected
    assert empty.status()["engine_pid"] == engine


def test_a_disk_without_space_and_a_log_without_space_are_told_and_leave_nothing(
    empty: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = empty.ft("apply", "recipes/demo.yaml", *empty.sets(), max_file_bytes=4 << 10)
    assert code == 1
    assert "error: no space for " in err
    assert err.splitlines()[-1] == "hint: free some space, or choose another `--state`"
    assert find_orphans(empty.token) == []

    from dataclasses import replace

    from freetoken.deploy.apply import apply_recipe
    from freetoken.deploy.tools import DEFAULT_TOOLS
    from freetoken.errors import NotReadyError
    from freetoken.recipe.load import load_recipe

    for name in ("FT_STATE", "FT_RUNTIME_DIR", MARKER):
        monkeypatch.setenv(name, empty.environment[name])
    recipe = load_recipe("recipes/demo.yaml", sets=empty.sets()[1::2], base_dir=REPO)
    with pytest.raises(NotReadyError, match="engine not started: no space for /dev/full: No space left on device"):
        apply_recipe(recipe, tools=replace(DEFAULT_TOOLS, log="/dev/full"))


def test_broken_model_files_are_refused_in_words_before_anything_is_started(empty: Demo) -> None:
    whole = (DEMO / "model.safetensors").read_bytes()
    lie = struct.pack("<Q", 10 * len(whole)) + whole[8:]
    for name, content, words in (
        ("cut", whole[:8_000_000], "model.safetensors: truncated: tensor `"),
        ("lie", lie, "model.safetensors: claims a header of 160,"),
        ("none", b"", "model.safetensors"),
    ):
        folder = empty.folder / name
        shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "model.safetensors").write_bytes(content)
        others = [("plan", str(folder)), ("serve", str(folder), "--port", "0")] if name == "cut" else []
        for command in (("apply", str(folder)), *others):
            code, _, err = empty.ft(*command)
            assert (code, words in err, "Traceback" in err) == (2, True, False), err
    assert not (empty.state / "runs").exists()


def test_a_misspelt_key_is_told_with_its_line_and_the_nearest_one(empty: Demo) -> None:
    text = (REPO / "recipes" / "demo.yaml").read_text()
    line = next(number for number, one in enumerate(text.splitlines(), 1) if one.strip().startswith("strategy:"))
    recipe = empty.folder / "demo.yaml"
    recipe.write_text(text.replace("strategy:", "stratgy:"))
    code, out, err = empty.ft("apply", str(recipe))
    assert (code, out) == (2, "")
    assert err == f"error: {recipe}:{line}: unknown key `settings.stratgy`; did you mean `settings.strategy`?\n"


def test_an_odd_place_to_print_to_costs_no_traceback(empty: Demo) -> None:
    command = f"{sys.executable} -m freetoken status"

    def run(redirection: str, *without: str) -> tuple[int, str]:
        environment = {key: value for key, value in empty.environment.items() if key not in without}
        found = subprocess.run(
            ["bash", "-c", f"{command} {redirection}"], env=environment, cwd=REPO, stderr=subprocess.PIPE, text=True
        )
        return found.returncode, found.stderr

    assert run(">&-") == (0, "")
    assert run("<&-") == (0, "")
    assert run("| true") == (0, "")
    assert run(">/dev/full") == (1, "error: stdout cannot be written: No space left on device\n")
    assert run("", "HOME", "XDG_RUNTIME_DIR", "FT_RUNTIME_DIR") == (0, "")
