"""Studies as `ft tune` leaves them, made by the tuner's own search on a simulated machine."""

from __future__ import annotations

from freetoken.tuner.confirm import confirm
from freetoken.tuner.objectives import make_limits, pick_objectives
from freetoken.tuner.record import LimitFacts, StudyFacts, StudyResult, write_facts, write_result
from freetoken.tuner.study import Budget, Search
from tests.fakes.tuning import ScriptedLauncher, make_site


def make_facts(site, objectives=("turn_time",), **changes):
    fields = {
        "recipe": "demo", "target": "recipes/demo.yaml", "engine": "native", "engine_version": "0.1.0",
        "model": "demo-moe", "workload": "code-4k", "workload_words": "1 turn", "is_named_workload": True,
        "machine": "NVIDIA GeForce RTX 3060, 12.0 GiB; 8 cores", "objectives": objectives, "knobs": tuple(site.space),
        "ft_version": "0.1.0", "began_at": "2031-05-04T09:30:00+00:00",
    }  # fmt: skip
    return StudyFacts(**(fields | changes))


def make_search(storage=None, name="demo-code-4k-turn_time-0123abcd", *, seed=2, objectives=("turn_time",), starts=4,
                trials=12, targets=None, launcher=None, **changes):  # fmt: skip
    """A search with its facts written, not yet run."""
    site = make_site(seed)
    limits = make_limits(targets) if targets is not None else ()
    search = Search(
        site, launcher or ScriptedLauncher(seed), pick_objectives(objectives), limits,
        Budget(starts=starts, trials=trials), storage, name, seed=0, stop_rule=None,
    )  # fmt: skip
    told = tuple(LimitFacts(one.name, one.bound, one.is_upper) for one in limits)
    write_facts(search.study, make_facts(site, objectives, limits=told, **changes))
    return search


def finish(search):
    """Runs the search to its end, confirms and writes the result; what `ft tune` would have done."""
    end = search.run()
    default = next(one for one in end.observations if one.measurement)
    proof = None
    if end.best is not None and end.best.point != default.point:
        proof = confirm(search.launcher, search.site.space, default.point, end.best.point, search.objectives[0])
    result = StudyResult(
        reason=end.reason, finished_at="2031-05-04T10:15:00.000Z", duration_s=2700.0,
        best=search.site.space.canonical(end.best.point) if end.best else {}, baseline=default.point,
        baseline_words="the engine's default did not work (refused); the first setting that worked stands for it",
        confirmation=proof, tuned_recipe="demo.tuned.yaml",
    )  # fmt: skip
    write_result(search.study, result)
    return end
