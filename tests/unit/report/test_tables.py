import json
import shlex

from freetoken.recipe.load import load_recipe
from freetoken.report import tables
from freetoken.tuner.confirm import Confirmation
from freetoken.tuner.history import average
from freetoken.tuner.record import StudyResult


def test_the_summary_counts_trials_starts_and_crashes_and_says_why_it_ended(study):
    measured = sum(one.measurement is not None for one in study.trials)
    assert tables.summarise(study) == (
        f"{len(study.trials)} trials ({measured} measured) in {study.starts} starts, 1 crash, 45 min 00 s. "
        f"It ended because {study.result.reason}."
    )


def test_a_study_without_a_result_says_that_nothing_is_confirmed(failures, empty):
    assert tables.summarise(empty) == (
        "0 trials (0 measured) in 0 starts, 0 crashes. The study was interrupted: nothing is confirmed yet."
    )
    assert tables.describe_winner(failures) == ["No setting could be measured, so there is no winner."]
    assert tables.compare_figures(failures) == []
    assert tables.list_settings(failures) == []
    assert [title for title, _ in tables.make_commands(failures)] == ["search again"]


def test_the_winner_is_told_with_its_interval_or_that_there_is_no_gain(study):
    proof = Confirmation(verdict="no gain", objective="turn_time", gain=0.01, gain_low=-0.02, gain_high=0.04)
    told = study.model_copy(update={"results": (study.results[0].model_copy(update={"confirmation": proof}),)})
    assert "no gain on unseen prompts: +1.0% (95 %: -2.0% to +4.0%)" in tables.describe_winner(told)[1]
    assert study.results[0].confirmation.describe() in tables.describe_winner(study)[1]


def test_figures_of_baseline_and_best_stand_side_by_side_with_the_change(study):
    rows = {row.label: row for row in tables.compare_figures(study)}
    # Those of the confirmation, not of a trial that happened to be fast.
    proof = study.results[0].confirmation
    base, best = (average(one) for one in (proof.baseline_blocks, proof.winner_blocks))
    turn = rows["turn time (s)"]
    assert turn.change == f"{best.turn_time_s / base.turn_time_s - 1:+.1%}"
    assert turn.is_better == (best.turn_time_s < base.turn_time_s)
    assert rows["peak memory (GiB)"].is_better is None
    assert "energy (J/token)" not in rows


def test_settings_that_do_nothing_under_the_strategy_are_left_blank(study):
    rows = {row.name: row for row in tables.list_settings(study)}
    assert set(rows) == {one.name for one in study.facts.knobs}
    strategy = study.trial(study.best).point["strategy"]
    assert bool(rows["fetch_ratio"].best) == (strategy == "hybrid")
    assert rows["strategy"].best == strategy
    assert rows["expert_slots"].cost == "live"


def test_the_commands_name_every_knob_that_counts_and_survive_a_shell(study):
    (_, run), (_, search) = tables.make_commands(study)
    words = shlex.split(run)
    assert words[:3] == ["ft", "apply", "recipes/demo.yaml"]
    sets = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    assert sets[0] == "workload=code-4k"
    best = study.trial(study.best)
    assert f"settings.prefill_chunk_tokens={best.point['prefill_chunk_tokens']}" in sets
    assert f"settings.embed_on_host={str(best.point['embed_on_host']).lower()}" in sets
    assert search == "ft tune recipes/demo.yaml --workload code-4k --objective turn_time"


def test_a_workload_without_a_name_stands_in_the_commands_as_a_value(study):
    value = json.dumps({"name": "tiny", "prompt_tokens": 300, "output_tokens": 48, "context_tokens": 1024})
    facts = study.facts.model_copy(update={"is_named_workload": False, "workload": "tiny", "workload_set": value})
    (_, run), (_, search) = tables.make_commands(study.model_copy(update={"facts": facts}))
    assert shlex.split(run)[3:5] == shlex.split(search)[3:5] == ["--set", f"workload={value}"]
    workload = load_recipe("demo", sets=(f"workload={value}",)).recipe.workload
    assert (workload.name, workload.prompt_tokens, workload.kv_tokens) == ("tiny", 300, 1024)


def test_the_table_has_every_trial_with_its_reason_and_only_what_differs(study):
    headings, rows, same = tables.list_trials(study)
    assert headings == ["turn_time (s)", "decode_tps (tok/s)"]
    assert [row.number for row in rows] == [str(one.number) for one in study.trials]
    crash = next(row for row in rows if row.kind == "crash")
    assert crash.outcome == "crash: out of memory"
    assert crash.figures == ("", "")
    assert crash.planned
    assert sum("(best" in row.outcome or ", best" in row.outcome for row in rows) == 1
    for name in (part.split(" = ")[0] for part in same.split(", ")):
        assert all(f"{name}=" not in row.settings for row in rows)


def test_the_front_of_two_objectives_is_a_table_in_order(pair, study):
    rows = tables.list_front(pair)
    assert [row.number for row in rows] == [str(one.number) for one in pair.front]
    assert len(rows[0].figures) == 2
    assert tables.list_front(study) == []


def test_results_of_other_processes_are_told_too(study):
    proof = study.results[0].confirmation
    other = StudyResult(reason="r", finished_at="2031-05-04T10:00:00.000Z", confirmation=proof)
    told = tables.describe_winner(study.model_copy(update={"results": (study.results[0], other)}))
    assert told[-1] == f"Another process of this study: {proof.describe()}."


def test_a_figure_that_is_another_under_a_second_name_is_told_once(study):
    def same(head):
        found = head.measurement
        told = found.model_copy(update={"ttft_p95_s": found.ttft_s, "total_decode_tps": 4 * found.decode_tps})
        return head.model_copy(update={"measurement": told})

    heads = {"baseline_figures": same(study.baseline_figures), "best_figures": same(study.best_figures)}
    told = study.model_copy(update=heads)
    labels = [row.label for row in tables.compare_figures(told)]
    assert "TTFT p95 (s)" not in labels
    assert "decode of all requests (tok/s)" in labels


def test_what_was_found_and_not_taken_stands_beside_the_baseline_under_that_name(study):
    told = study.model_copy(
        update={"candidate": study.best, "candidate_figures": study.best_figures, "best": study.baseline,
                "best_figures": study.baseline_figures}
    )  # fmt: skip
    assert tables.name_rival(told) == "found, not taken"
    assert tables.compare_figures(told) == tables.compare_figures(study)
    words = tables.describe_winner(told)
    assert words[0] == (
        f"The baseline stays: trial {study.baseline}, {study.baseline_words}. Trial {study.best} was found and not "
        "taken."
    )
    assert words[-1] == f"Found, not taken: {study.best_figures.describe()}."
