"""`ft rollback`: live where that is enough, by a restart otherwise, and what runs is given back where it fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from freetoken.deploy.rollback import choose_name, list_good_settings, rollback
from freetoken.deploy.values import ApplyResult
from freetoken.errors import NotReadyError, UsageError
from freetoken.supervisor.launch import read_launch, write_launch
from tests.e2e.life import Lab, make_lab, read_json_output, stop_all  # noqa: F401
from tests.fakes.fake_adapter import make_tools


def go_back(**options: object) -> ApplyResult:
    return rollback("lab", tools=make_tools(), **options)  # type: ignore[arg-type]


def slots() -> list[tuple[str, int, bool]]:
    return [(one.strategy, one.expert_slots, one.is_current) for one in list_good_settings("lab")]


def test_a_live_resize_is_taken_back_live(lab: Lab) -> None:
    lab.apply()
    lab.apply(expert_slots=24)
    assert slots() == [("offload", 24, True), ("offload", 16, False)]
    engine = lab.life().engine
    result = go_back()
    assert [change.describe() for change in result.diff.changes] == ["settings.expert_slots: 24 -> 16 (live)"]
    assert result.diff.action == "resize"
    assert lab.life().engine == engine
    assert lab.view().drift == ()
    # What was declared then is what is declared now, and the way forward is kept as well.
    assert lab.apply().diff.action == "nothing"
    assert go_back().plan.settings.expert_slots == 24
    stop_all()


def test_a_restart_is_taken_back_by_a_restart_with_the_very_plan(lab: Lab) -> None:
    first = lab.apply()
    lab.apply(strategy="cpu")
    preview = go_back(is_dry_run=True)
    assert (preview.kind, preview.diff.action) == ("dry_run", "restart")
    result = go_back()
    assert (result.diff.action, result.plan) == ("restart", first.plan)
    assert result.proof is not None
    assert [one.id for one in list_good_settings("lab") if one.is_current] == [result.run_id]
    stop_all()


def test_what_never_worked_is_left_for_what_did(lab: Lab) -> None:
    lab.apply()
    stop_all()
    with pytest.raises(NotReadyError, match="it answers, but not as planned"):
        lab.apply(engine="--lie-slots, '9'", expert_slots=32)
    assert go_back().plan.settings.expert_slots == 16
    assert lab.life().condition == "ready"
    stop_all()


def test_a_rollback_that_fails_gives_back_what_ran(lab: Lab) -> None:
    lab.apply(engine="--ttft-s, '0'")
    lab.apply(strategy="cpu")
    before = lab.life()
    first = list_good_settings("lab")[-1].id
    launch = lab.state / "runs" / first
    recipe = (launch / "recipe.yaml").read_text()
    (launch / "recipe.yaml").write_text(recipe.replace("--ttft-s", "--exit-at-start"))
    with pytest.raises(NotReadyError) as failed:
        go_back(to=first)
    assert any("what ran before was restored as run" in one for one in failed.value.details)
    after = lab.life()
    assert (after.condition, after.engine != before.engine) == ("ready", True)
    assert lab.view().drift == ()
    stop_all()


def test_a_setting_for_a_card_that_is_gone_is_refused_in_words_and_what_runs_comes_back(lab: Lab) -> None:
    lab.apply()
    lab.apply(strategy="cpu")
    first = list_good_settings("lab")[-1].id
    path = lab.state / "runs" / first / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"settings": plan["settings"] | {"gpu": "GPU-gone"}}))
    with pytest.raises(UsageError, match="GPU-gone"):
        go_back(to=first)
    assert lab.life().condition == "ready"
    stop_all()


def test_what_was_free_before_the_start_is_still_known_after_a_live_resize(lab: Lab) -> None:
    lab.apply()
    run_dir = lab.life().record.folder
    launch = read_launch(run_dir)
    assert launch is not None
    write_launch(run_dir, replace(launch, vram_available_bytes=8 << 30, vram_others={"4": 2 << 30}))
    assert lab.apply(expert_slots=24).diff.action == "resize"
    launch = read_launch(run_dir)
    assert launch is not None
    assert (launch.vram_available_bytes, launch.vram_others) == (8 << 30, {"4": 2 << 30})
    stop_all()


def test_without_another_setting_there_is_nothing_to_go_back_to(lab: Lab) -> None:
    with pytest.raises(UsageError, match="no deployment `lab`; there is: none"):
        choose_name("lab")
    lab.apply()
    assert choose_name(None) == "lab"
    with pytest.raises(UsageError, match="`lab` has never run with another setting that was proven"):
        go_back()
    with pytest.raises(UsageError, match="`lab` has no proven setting `nonsense`"):
        go_back(to="nonsense")
    stop_all()


def test_the_command_lists_what_was_proven(lab: Lab) -> None:
    lab.apply()
    lab.apply(expert_slots=24)
    listed = lab.ft("rollback", "--list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert [one["expert_slots"] for one in read_json_output(listed.stdout)] == [24, 16]
    assert "expert slots" in lab.ft("rollback", "lab", "--list").stdout
    stop_all()
