import pytest

from freetoken.adapters import get_adapter
from freetoken.cli.main import main
from freetoken.deploy.lock import find_lock_path, make_lock, write_lock
from freetoken.deploy.prepare import prepare_plan
from freetoken.hardware.fingerprint import compute_fingerprint
from freetoken.hardware.profiles import load_profile
from freetoken.recipe.load import load_recipe
from freetoken.store import open_store
from freetoken.store.rows import ResultRow, RunRow

RECIPE = """
version: 1
name: mine
model: {repo: nvidia/Qwen3.6-35B-A3B-NVFP4}
engine: {name: freetoken, version: ">=0.2.1,<0.3", extra_args: [--page-size, "1", --cors-origins=topsecret]}
workload: agent-8k
settings: {expert_slots: 4000, prefill_chunk_tokens: 4096, cpu_threads: 6}
headroom: desktop
"""


class Machine:
    """A state folder that acts as a machine of its own, with a profile."""

    def __init__(self, folder, profile, monkeypatch, capsys):
        self.folder, self.profile = folder, profile
        self.monkeypatch, self.capsys = monkeypatch, capsys
        folder.mkdir()

    @property
    def hardware(self):
        return load_profile(self.profile)

    def enter(self):
        self.monkeypatch.setenv("FT_STATE", str(self.folder / "state"))
        self.monkeypatch.setenv("FT_RUNTIME_DIR", str(self.folder / "runtime"))
        self.monkeypatch.chdir(self.folder)

    def ft(self, *arguments):
        self.enter()
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        said = self.capsys.readouterr()
        return caught.value.code, said.out, said.err

    def write(self, text=RECIPE, name="mine"):
        self.enter()
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path

    def lock(self, path):
        """Plans the recipe for this machine and writes its lock, as `ft apply` would."""
        self.enter()
        loaded = load_recipe(str(path))
        plan = prepare_plan(loaded, hardware=self.hardware)
        assert plan.kind == "plan", plan.message
        write_lock(make_lock(loaded.recipe, plan, get_adapter(plan.engine)), find_lock_path(path, loaded.recipe.name))
        return plan

    def record(self, plan, *figures, slots=None, failed=(), kind="bench"):
        """Keeps results of `plan` in this machine's store: decode_tps each, at one count of slots."""
        self.enter()
        settings = plan.settings.model_dump(mode="json") | ({"expert_slots": slots} if slots else {})
        with open_store() as store:
            machine = store.record_machine(self.hardware, compute_fingerprint(self.hardware, plan.engine, "0.2.1"))
            for number, decode_tps in enumerate(figures):
                store.record_result(
                    ResultRow(
                        machine_id=machine, recipe_name="mine", workload="agent-8k", engine=plan.engine,
                        model_name=plan.model_name, settings=settings, kind=kind,
                        metrics={"decode_tps": decode_tps, "ttft_ms": 900.0, "odd_figure": 1.0},
                        measured_at=f"2031-05-0{number + 1}T09:30:00+00:00",
                    )
                )  # fmt: skip
            for number, words in enumerate(failed):
                store.record_run(
                    RunRow(
                        id=f"run-{number}", deployment="mine", machine_id=machine, engine=plan.engine,
                        model_name=plan.model_name, outcome="failed", error=words, started_at="2031-05-04T09:30:00",
                        plan={"settings": settings},
                    )
                )  # fmt: skip


@pytest.fixture
def big(tmp_path, monkeypatch, capsys):
    """A machine with a card of 16 GB."""
    return Machine(tmp_path / "big", "rtx-4060-ti-16gb", monkeypatch, capsys)


@pytest.fixture
def small(tmp_path, monkeypatch, capsys):
    """A machine with a card of 6 GB."""
    return Machine(tmp_path / "small", "rtx-3060-laptop-6gb", monkeypatch, capsys)
