"""The tuned recipe as a file: what was measured is fixed in it, and nothing else."""

from pathlib import Path

import pytest

from freetoken.adapters import get_adapter
from freetoken.recipe.load import LoadedRecipe, load_recipe
from freetoken.tuner.outcome import TuneResult
from freetoken.tuner.site import PlannedSite
from freetoken.tuner.space import make_space
from freetoken.tuner.written import write_tuned_recipe
from tests.fakes.planner_cases import make_gpu, make_machine, make_recipe, make_request


@pytest.mark.parametrize(("strategy", "threads"), [("offload", "auto"), ("hybrid", 2)])
def test_what_does_nothing_under_the_strategy_stays_open(tmp_path, monkeypatch, strategy, threads):
    monkeypatch.setenv("FT_STATE", str(tmp_path))
    request, adapter = make_request(make_recipe(), make_machine(make_gpu(8, 7.6))), get_adapter("freetoken")
    site = PlannedSite(request, adapter, make_space(request, adapter))
    winner = site.space.clip(
        {"strategy": strategy, "cpu_threads": 2, "expert_slots": 300, "prefill_chunk_tokens": 1024}
    )
    result = TuneResult(
        study="s", recipe="r", workload="w", objectives=("turn_time",), reason="", trials=1, starts=1, crashes=0,
        duration_s=1.0, soak="not to be written of its own accord",
    )  # fmt: skip
    loaded, warnings = LoadedRecipe(recipe=request.recipe, path=None, base_dir=tmp_path, provenance={}), []
    path = write_tuned_recipe(loaded, site, winner, result, ["proven so and so", ""], warnings)
    head = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert head == ["# tuned for `agent`: turn_time", "# proven so and so"]
    settings = load_recipe(path).recipe.settings
    assert (settings.strategy, settings.expert_slots, settings.prefill_chunk_tokens) == (strategy, 300, 1024)
    assert settings.cpu_threads == threads
