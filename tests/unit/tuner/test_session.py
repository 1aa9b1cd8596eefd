import math
import os
import signal
import time
from collections import Counter

import optuna
import pytest

from freetoken import paths
from freetoken.deploy.apply import RefusedError
from freetoken.errors import FtError, UsageError
from freetoken.recipe.load import load_recipe
from freetoken.recipe.model import GoodEnough
from freetoken.share.evidence import gather_evidence
from freetoken.store import open_store
from freetoken.store.rebuild import rebuild_from_runs
from freetoken.tuner import status
from freetoken.tuner.reading import read_study
from freetoken.tuner.seeds import Seeds
from freetoken.tuner.status import read_status
from freetoken.tuner.values import Outcome
from tests.fakes.rigged import RiggedLauncher, make_session

CHUNK = "prefill_chunk_tokens"


class Rigged:
    """Figures by whether a point is the first that was measured: seconds of a turn, and to the first token."""

    def __init__(self, *, default=(10.0, 1.0), others=(6.0, 1.0), unseen=(6.0, 1.0)):
        self.default, self.others, self.unseen, self.first = default, others, unseen, None

    def __call__(self, point, is_unseen, count):
        self.first = self.first or point
        turn_time_s, ttft_s = self.default if point == self.first else self.unseen if is_unseen else self.others
        return turn_time_s * (1 + 0.002 * (count % 3)), ttft_s


class Watch:
    """A clock that starts and measurements move, by so many seconds each."""

    def __init__(self, **takes_s):
        self.now_s, self.takes_s, self.counts = 1000.0, takes_s, Counter()

    def __call__(self):
        return self.now_s

    def tick(self, kind):
        takes = self.takes_s.get(kind, 0.0)
        self.now_s += takes[min(self.counts[kind], len(takes) - 1)] if isinstance(takes, tuple) else takes
        self.counts[kind] += 1


@pytest.fixture
def tune(monkeypatch, tmp_path):
    def run(figures, watch=None, is_default_broken=False, **options):
        tick = watch.tick if watch else lambda kind: None
        launcher = RiggedLauncher(figures, tick, is_default_broken=is_default_broken)
        return make_session(monkeypatch, tmp_path, launcher, **({"clock": watch} if watch else {}), **options).run()

    return run


def list_rows(folder, kind):
    with open_store(folder / "state" / "ft.db") as store:
        return store.list_results(kind=kind)


def read_record(folder, name):
    return read_study(optuna.storages.RDBStorage(f"sqlite:///{folder / 'state' / 'studies.db'}"), name)


def test_a_confirmed_gain_is_written_kept_and_told_with_the_same_figures_everywhere(tune, tmp_path):
    result = tune(Rigged(unseen=(7.0, 1.0)))
    assert (result.confirmation.verdict, result.is_tuned, result.candidate) == ("gain", True, {})
    blocks = [one.turn_time_s for one in result.confirmation.winner_blocks]
    head = result.best_headline
    # Of the search the winner knows 6 s; on unseen prompts it takes 7.
    assert head.figure == result.best_figures["turn_time_s"] == sum(blocks) / 2
    assert head.low < head.figure < head.high
    assert result.baseline_headline.figure == pytest.approx(10.0, rel=0.01)
    text = (tmp_path / "demo.tuned.yaml").read_text()
    assert f"# this: {head.describe()}" in text
    (row,) = list_rows(tmp_path, "tuned")
    assert row.metrics["turn_time_s"] == head.figure
    assert row.metrics["turn_time_s_low"] == head.low
    assert row.metrics["decode_tps_low"] < row.metrics["decode_tps"] < row.metrics["decode_tps_high"]
    assert row.metrics["ttft_ms_low"] < row.metrics["ttft_ms"] == pytest.approx(1000.0)
    assert row.metrics["gain_ratio"] == result.confirmation.gain
    assert row.settings[CHUNK] == result.best[CHUNK]
    assert row.settings["strategy"] == "offload"  # which the recipe fixes: whoever imports the row must know
    record = read_record(tmp_path, result.study)
    assert (record.best_figures, record.baseline_figures) == (head, result.baseline_headline)
    assert read_status(result.study).best_figure == head.figure
    # What an export tells is the confirmed setting too, not the trial that was faster.
    with open_store(tmp_path / "state" / "ft.db") as store:
        recipe = load_recipe(result.tuned_recipe).recipe
        told = gather_evidence(recipe.model_copy(update={"name": "demo"}), None, store).best()
    assert told.kind == "tuned"
    assert told.figures["turn_time_s"].median == pytest.approx(head.figure, rel=1e-3)
    assert told.figures["turn_time_s"].low == pytest.approx(head.low, rel=1e-3)


@pytest.mark.parametrize(("unseen_s", "verdict"), [(10.02, "no gain"), (14.0, "worse")])
def test_without_a_confirmed_gain_the_baseline_stays_and_nothing_is_written(tune, tmp_path, unseen_s, verdict):
    result = tune(Rigged(unseen=(unseen_s, 1.0)))
    assert (result.confirmation.verdict, result.is_tuned, result.tuned_recipe) == (verdict, False, None)
    assert result.best == result.baseline
    assert result.candidate != result.baseline
    assert result.best_headline == result.baseline_headline
    assert not (tmp_path / "demo.tuned.yaml").exists()
    assert list_rows(tmp_path, "tuned") == ()
    (row,) = list_rows(tmp_path, "confirm")
    assert row.metrics["turn_time_s"] == result.baseline_headline.figure
    assert row.settings[CHUNK] == result.baseline[CHUNK]
    assert len(list_rows(tmp_path, "trial")) == result.trials
    record = read_record(tmp_path, result.study)
    assert record.trial(record.candidate).point[CHUNK] == result.candidate[CHUNK]
    assert record.candidate_figures.figure == pytest.approx(unseen_s, rel=0.01)


def test_where_the_default_does_not_run_the_one_setting_that_does_is_kept(tune, tmp_path):
    result = tune(Rigged(), is_default_broken=True, trials=2)
    assert (result.trials, result.confirmation, result.is_tuned, result.candidate) == (2, None, True, {})
    assert result.best == result.baseline
    assert result.baseline_words == (
        "the engine's default did not work (crash); the first setting that worked stands for it; nothing else was "
        "measured"
    )
    text = (tmp_path / "demo.tuned.yaml").read_text()
    assert f"# {result.baseline_words}\n" in text
    assert load_recipe(result.tuned_recipe).recipe.settings.prefill_chunk_tokens == result.best[CHUNK]
    (row,) = list_rows(tmp_path, "tuned")
    assert row.metrics["turn_time_s"] == result.best_headline.figure == pytest.approx(10.0, rel=0.01)
    assert "gain_ratio" not in row.metrics
    assert read_record(tmp_path, result.study).best_figures == result.best_headline


@pytest.mark.parametrize(
    ("unseen_s", "watch", "verdict", "is_first_kept"),
    [
        (7.0, None, "gain", False),
        (14.0, None, "worse", True),
        (7.0, {"start": 10.0, "measure": (5.0, 5.0, 500.0)}, "unfinished", False),
    ],
)
def test_where_the_default_does_not_run_the_fastest_is_kept_unless_it_was_outdone(
    tune, tmp_path, unseen_s, watch, verdict, is_first_kept
):
    options = {"trials": 3, "budget_s": 400.0} if watch else {}
    result = tune(Rigged(unseen=(unseen_s, 1.0)), Watch(**watch) if watch else None, is_default_broken=True, **options)
    assert result.confirmation.verdict == verdict
    assert result.is_tuned
    assert (result.best == result.baseline) == is_first_kept
    assert (result.candidate != {}) == is_first_kept
    (row,) = list_rows(tmp_path, "tuned")
    assert row.settings[CHUNK] == result.best[CHUNK]
    assert row.metrics["turn_time_s"] == result.best_headline.figure
    assert ("gain_ratio" in row.metrics) == (verdict == "gain")
    assert list_rows(tmp_path, "confirm") == ()


def test_a_study_that_found_nothing_leaves_what_an_earlier_one_confirmed(tune, tmp_path):
    tune(Rigged())
    before = (tmp_path / "demo.tuned.yaml").read_bytes(), list_rows(tmp_path, "tuned")
    result = tune(Rigged(), trials=1)
    assert (result.trials, result.reason, result.confirmation, result.is_tuned) == (1, "1 trial was made", None, False)
    assert result.baseline_words.endswith("; nothing else was measured")
    assert ((tmp_path / "demo.tuned.yaml").read_bytes(), list_rows(tmp_path, "tuned")) == before


def test_what_alone_keeps_a_hard_limit_is_taken_though_it_is_no_faster(tune):
    # The default answers late; the others do not, and take as long for the whole.
    figures = Rigged(default=(10.0, 3.0), others=(10.02, 1.0), unseen=(10.02, 1.0))
    result = tune(figures, targets=GoodEnough(ttft_p95="2s"))
    assert (result.confirmation.verdict, result.is_tuned, result.missed) == ("no gain", True, ())
    assert result.warnings == ("it is taken for keeping the hard limit on `ttft_p95`, which the baseline misses",)


def test_what_is_faster_and_breaks_a_hard_limit_on_unseen_prompts_is_not_taken(tune):
    result = tune(Rigged(unseen=(6.0, 3.0)), targets=GoodEnough(ttft_p95="2s"))
    assert (result.confirmation.verdict, result.is_tuned, result.missed) == ("gain", False, ())
    assert result.warnings == ("it is not taken: it misses the hard limit on `ttft_p95`, which the baseline keeps",)


def test_search_and_confirmation_fit_into_the_budget(tune):
    watch = Watch(start=10.0, resize=1.0, measure=5.0)
    result = tune(Rigged(), watch, budget_s=150.0, trials=50)
    assert result.is_tuned
    assert (result.duration_s, result.warnings) == (watch.now_s - 1000, ())
    assert 75 < result.duration_s <= 150


def test_a_budget_that_became_too_short_to_confirm_says_so_and_changes_nothing(tune, tmp_path):
    # The second start takes so much longer than the first that the time for the confirmation is gone.
    result = tune(Rigged(), Watch(start=(10.0, 40.0), measure=5.0), budget_s=100.0, trials=50)
    words = result.confirmation.describe()
    assert words.startswith("not confirmed: the budget of 1 min 40 s was too short: ")
    assert " s were left, the confirmation takes about " in words
    assert not result.is_tuned
    assert not (tmp_path / "demo.tuned.yaml").exists()
    assert result.duration_s <= 100


def test_a_confirmation_ends_with_the_budget(tune):
    # Measurements get slower and slower once the search is over.
    watch = Watch(start=10.0, measure=(5.0, 5.0, 60.0))
    result = tune(Rigged(), watch, budget_s=100.0, trials=2)
    assert result.confirmation.describe() == "not confirmed: the budget ended after 2 of 4 measurements"
    assert not result.is_tuned


def test_a_budget_of_less_than_one_trial_is_exceeded_in_words(tune):
    result = tune(Rigged(), Watch(start=10.0, measure=5.0), budget_s=5.0)
    assert (result.trials, result.is_tuned, result.duration_s) == (1, False, 15.0)
    assert result.warnings == (
        "the budget of 5.00 s was exceeded by 10.0 s: a start or a measurement that has begun is not cut short, and "
        "what ran before is started again in any case",
    )


def test_all_rows_of_a_study_come_back_when_the_database_is_lost(tune, tmp_path):
    def read_rows():
        with open_store(tmp_path / "state" / "ft.db") as store:
            return [one.model_dump(exclude={"id"}) for one in store.list_results()]

    result = tune(Rigged())
    before = read_rows()
    assert [one["kind"] for one in before] == ["tuned", *["trial"] * result.trials]
    (tmp_path / "state" / "ft.db").unlink()
    report = rebuild_from_runs(paths.runs_dir(), paths.database_path(), status.folder())
    assert (report.results, report.skipped) == (len(before), ())
    assert read_rows() == before


def test_a_second_study_on_the_device_is_refused_before_anything_is_started(monkeypatch, tmp_path):
    session = make_session(monkeypatch, tmp_path, RiggedLauncher(Rigged()))
    session.check_lock()
    with session._take_lock(session.prepare()):
        other = make_session(monkeypatch, tmp_path, RiggedLauncher(Rigged()))
        with pytest.raises(FtError, match="one study at a time: ft tune of `demo`"):
            other.check_lock()
    session.check_lock()


@pytest.mark.parametrize("budget_s", [0.0, -5.0, math.nan, math.inf])
def test_a_budget_that_is_no_time_is_refused_with_an_example(monkeypatch, tmp_path, budget_s):
    with pytest.raises(UsageError, match="holds no trial") as caught:
        make_session(monkeypatch, tmp_path, RiggedLauncher(Rigged()), budget_s=budget_s)
    assert (caught.value.exit_code, caught.value.hint) == (2, "`ft tune RECIPE --budget 45m`")


def test_a_soak_runs_the_winner_beyond_the_budget_and_is_told_everywhere(tune, tmp_path):
    watch = Watch(start=5.0, measure=20.0)
    result = tune(Rigged(unseen=(7.0, 1.0)), watch, soak_s=600.0)
    assert result.is_tuned
    assert result.soak.startswith("stable over 30 rounds in 10 min")
    assert f"# {result.soak}" in (tmp_path / "demo.tuned.yaml").read_text()
    assert read_record(tmp_path, result.study).result.soak == result.soak


@pytest.mark.parametrize("is_default_broken", [False, True])
def test_a_winner_that_dies_in_the_soak_is_not_taken(tune, tmp_path, is_default_broken):
    figures = Rigged(unseen=(7.0, 1.0))
    state = {"soaking": 0}

    def die(point, is_unseen, count):
        # The confirmation takes four measurements on unseen prompts.
        state["soaking"] += is_unseen
        return figures(point, is_unseen, count) if state["soaking"] <= 4 + 3 else None

    result = tune(die, Watch(start=5.0, measure=20.0), soak_s=600.0, is_default_broken=is_default_broken)
    assert result.confirmation.verdict == "gain"
    assert result.soak.startswith("what was found is not stable: crash after 3 rounds")
    assert result.best == result.baseline != result.candidate
    assert result.warnings == ("it is not taken: it did not last through the soak",)
    # Where the default runs there is no need of another; else what was measured to run first is all that there is.
    assert (result.is_tuned, (tmp_path / "demo.tuned.yaml").exists()) == (is_default_broken, is_default_broken)
    if is_default_broken:
        # It is told as what it is: neither the proof nor the crash of the other setting.
        head = (tmp_path / "demo.tuned.yaml").read_text().split("version:")[0]
        assert f"# {result.baseline_words}" in head
        assert "confirmed" not in head
        assert "stable" not in head
        (row,) = list_rows(tmp_path, "tuned")
        assert "gain_ratio" not in row.metrics


def die_once_unseen(figures):
    return lambda point, is_unseen, count: None if is_unseen else figures(point, is_unseen, count)


def test_the_only_setting_that_runs_is_not_written_where_it_dies_in_the_soak(tune, tmp_path):
    figures = die_once_unseen(Rigged())
    result = tune(figures, Watch(start=5.0, measure=20.0), soak_s=600.0, is_default_broken=True, trials=2)
    assert (result.is_tuned, (tmp_path / "demo.tuned.yaml").exists()) == (False, False)
    assert any("nothing is written" in one for one in result.warnings)


def test_a_default_that_dies_in_the_soak_is_not_said_to_be_left(tune):
    result = tune(die_once_unseen(Rigged()), Watch(start=5.0, measure=20.0), soak_s=600.0, trials=1)
    assert result.soak.startswith("not stable: crash")
    assert result.warnings == ()


def test_a_soak_that_the_planner_refuses_to_begin_says_nothing_of_the_winner(tune, monkeypatch):
    real = RiggedLauncher.start

    def start(self, point):
        if self.log.count("unseen") == 4:
            return Outcome(kind="refused", violation_bytes=5, words="5 bytes are missing")
        return real(self, point)

    monkeypatch.setattr(RiggedLauncher, "start", start)
    result = tune(Rigged(unseen=(7.0, 1.0)), Watch(start=5.0, measure=20.0), soak_s=600.0)
    assert (result.is_tuned, result.soak) == (True, "it could not begin: 5 bytes are missing")


def test_only_the_seconds_that_a_soak_took_are_beside_the_budget(tune):
    watch = Watch(start=5.0, measure=(20.0,) * 3 + (40.0,))
    result = tune(die_once_unseen(Rigged()), watch, soak_s=600.0, trials=1, budget_s=30.0)
    assert any("was exceeded by" in one for one in result.warnings) == (30.0 < 25.0)
    long = Watch(start=5.0, measure=(60.0, 5.0))
    result = tune(die_once_unseen(Rigged()), long, soak_s=600.0, trials=1, budget_s=30.0)
    assert any("was exceeded by 35.0 s" in one for one in result.warnings)


IMPORTED = Seeds(({CHUNK: 512},), "found on another machine")


class WithImported:
    """Seconds of a turn: the default's, those of the setting that came with the recipe, and those of all others."""

    def __init__(self, imported_s, others_s, unseen_imported_s, unseen_others_s):
        self.search, self.unseen = (imported_s, others_s), (unseen_imported_s, unseen_others_s)
        self.default = None

    def __call__(self, point, is_unseen, count):
        is_imported = point[CHUNK] == 512
        if self.default is None and not is_imported:
            self.default = point
        imported_s, others_s = self.unseen if is_unseen else self.search
        found = imported_s if is_imported else 10.0 if point == self.default else others_s
        return found * (1 + 0.002 * (count % 3)), 1.0


def test_the_winner_is_held_against_what_came_with_the_recipe_too(tune, tmp_path):
    result = tune(WithImported(8.0, 6.0, 8.0, 6.0), seeds=IMPORTED)
    assert result.is_tuned
    assert result.best[CHUNK] != 512
    versus = result.confirmation.imported
    assert (versus.verdict, versus.gain) == ("gain", pytest.approx(8 / 6 - 1, rel=0.02))
    assert result.confirmation.gain == pytest.approx(10 / 6 - 1, rel=0.02)
    told = f"against the best imported setting {versus.describe_interval()}"
    assert told in (tmp_path / "demo.tuned.yaml").read_text()
    assert read_record(tmp_path, result.study).result.confirmation.imported == versus


def test_an_imported_setting_that_outdoes_the_winner_takes_its_place(tune, tmp_path):
    result = tune(WithImported(8.0, 6.0, 6.5, 7.5), seeds=IMPORTED)
    assert result.is_tuned
    assert result.best[CHUNK] == 512
    assert result.confirmation.verdict == "gain"
    assert result.confirmation.gain == pytest.approx(10 / 6.5 - 1, rel=0.02)
    assert result.best_headline.figure == pytest.approx(6.5, rel=0.01)
    assert any("outdid what the search found" in one for one in result.warnings)
    (row,) = list_rows(tmp_path, "tuned")
    assert row.settings[CHUNK] == 512


def test_what_won_the_search_as_an_imported_setting_is_compared_once(tune):
    result = tune(WithImported(5.0, 6.0, 5.0, 6.0), seeds=IMPORTED)
    assert result.best[CHUNK] == 512
    assert result.confirmation.imported is None


def test_an_imported_setting_is_taken_where_the_winner_alone_misses_a_hard_limit(tune):
    times = WithImported(8.0, 6.0, 8.0, 6.0)

    def figures(point, is_unseen, count):
        turn_time_s, _ = times(point, is_unseen, count)
        is_late = is_unseen and point[CHUNK] != 512 and point != times.default
        return turn_time_s, 3.0 if is_late else 1.0

    result = tune(figures, seeds=IMPORTED, targets=GoodEnough(ttft_p95="2s"))
    assert (result.is_tuned, result.best[CHUNK]) == (True, 512)
    assert result.confirmation.gain == pytest.approx(10 / 8 - 1, rel=0.02)
    assert any("is taken where what the search found is not" in one for one in result.warnings)


def test_an_imported_setting_that_outdoes_the_winner_but_misses_a_limit_is_not_taken(tune):
    times = WithImported(8.0, 6.0, 6.5, 7.5)

    def figures(point, is_unseen, count):
        turn_time_s, _ = times(point, is_unseen, count)
        return turn_time_s, 3.0 if is_unseen and point[CHUNK] == 512 else 1.0

    result = tune(figures, seeds=IMPORTED, targets=GoodEnough(ttft_p95="2s"))
    assert result.is_tuned
    assert result.best[CHUNK] != 512
    assert result.confirmation.imported.verdict == "worse"


@pytest.mark.parametrize(("budget_s", "start_s", "measure_s"), [(600.0, 60.0, 20.0), (100.0, 10.0, 5.0)])
def test_time_for_the_imported_setting_is_kept_only_where_the_search_can_spare_it(tune, budget_s, start_s, measure_s):
    watch = Watch(start=start_s, measure=measure_s)
    result = tune(WithImported(8.0, 6.0, 8.0, 6.0), watch, seeds=IMPORTED, budget_s=budget_s, trials=None)
    assert result.trials > 1
    assert result.baseline_words == "the engine's own default"
    assert result.confirmation.verdict == "gain"
    assert not any("exceeded" in one for one in result.warnings)
    if result.confirmation.imported is None:
        assert any("the imported setting was not compared" in one for one in result.warnings)


@pytest.mark.parametrize("has_seed", [True, False])
def test_a_search_that_could_go_on_leaves_room_for_all_three(tune, has_seed):
    """Each setting is better than the one before it, so that only the time ends the search."""
    known = {}

    def figures(point, is_unseen, count):
        key = tuple(sorted(point.items()))
        return known.setdefault(key, 10.0 * 0.93 ** len(known)), 1.0

    watch = Watch(start=60.0, resize=60.0, measure=20.0)
    seeds = IMPORTED if has_seed else None
    result = tune(figures, watch, seeds=seeds, budget_s=1100.0, trials=None)
    assert result.reason.startswith("the time is used up")
    assert (result.confirmation.imported is not None) == has_seed
    assert result.duration_s <= 1100.0
    # Three need five starts and six measurements, two need three and four.
    assert 1100.0 - result.duration_s < 250.0


def test_a_setting_that_nobody_held_against_the_default_is_not_written(tune, tmp_path):
    """The only trial was the imported setting."""
    result = tune(WithImported(8.0, 6.0, 8.0, 6.0), seeds=IMPORTED, trials=1)
    assert (result.is_tuned, (tmp_path / "demo.tuned.yaml").exists()) == (False, False)
    assert result.baseline_words.startswith("no default; the first setting that worked stands for it")


def test_what_the_planner_refuses_is_no_study(monkeypatch, tmp_path):
    launcher = RiggedLauncher(Rigged())
    session = make_session(monkeypatch, tmp_path, launcher)
    session.loaded = load_recipe(str(tmp_path / "demo.yaml"), sets=("settings.kv_tokens=1024",))
    for act in (session.preview, session.run):
        with pytest.raises(RefusedError, match=r"`settings\.kv_tokens` is 1,024, workload `code-4k` needs 4,096"):
            act()
    assert launcher.log == []


def test_energy_is_no_objective_where_nothing_measures_it(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="nothing on this device measures energy"):
        make_session(monkeypatch, tmp_path, RiggedLauncher(Rigged()), objectives=("efficiency",)).run()


def test_ctrl_c_while_the_last_engine_is_ended_loses_nothing(monkeypatch, tmp_path):
    launcher = RiggedLauncher(Rigged(unseen=(7.0, 1.0)))
    session = make_session(monkeypatch, tmp_path, launcher)

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    def stop():
        if launcher.log.count("unseen") == 4:
            interrupt()

    monkeypatch.setattr(launcher, "stop", stop)
    monkeypatch.setattr(session, "_restore", interrupt)
    result = session.run()
    assert result.is_tuned
    assert result.warnings == ("`demo`, which ran before, was not started again: interrupted",)
    assert read_status(result.study).state == "done"


def test_a_resumed_study_tells_the_time_and_the_trials_of_all_its_processes(tune):
    watch = Watch(start=60.0, measure=20.0)
    first = tune(Rigged(), watch, trials=2)
    second = tune(Rigged(), watch, trials=2, is_resuming=True)
    assert second.duration_s > first.duration_s + 100.0
    found = read_status(second.study)
    assert (found.trials, found.starts) == (second.trials, second.starts) != (0, 0)


def test_of_two_objectives_a_setting_that_the_front_leaves_out_is_not_confirmed(tune):
    """A hair better in the first by noise alone, and clearly worse in the second."""
    figures = Rigged(default=(2.0, 0.2835), others=(2.15, 0.2829), unseen=(2.15, 0.2829))
    result = tune(figures, objectives=("ttft", "decode_tps"))
    assert [one["point"] for one in result.front] == [result.baseline]
    assert result.confirmation is None
