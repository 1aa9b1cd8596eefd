"""`ft plan --suggest` and machines made up on the command line."""

import itertools
import shlex

import pytest

from freetoken.planner.plan import Plan, Refusal
from freetoken.planner.suggest import LEAST_TPS, Suggestions


def suggest(ft_json, *options):
    code, document = ft_json("plan", "--suggest", *options)
    return code, Suggestions.model_validate(document)


def test_a_6_gb_laptop_runs_the_smallest_quantisation_of_qwen36_and_gpt_oss(ft_json):
    code, found = suggest(ft_json, "--gpu", "RTX 3060 Laptop 6GB", "--ram", "32GiB")
    assert code == 0
    chosen = {one.model: (one.checkpoint, one.engine, one.limited_by) for one in found.suggestions}
    assert chosen["qwen3.6-35b-a3b"] == ("qwen3.6-35b-a3b-nvfp4", "freetoken", "pcie")
    assert chosen["gpt-oss-20b"] == ("gpt-oss-20b", "freetoken", "pcie")
    assert next(one for one in found.suggestions if one.model == "qwen3.6-35b-a3b").command == (
        "ft plan qwen3.6-35b-a3b-nvfp4 --engine freetoken --workload agent-8k --gpu 'RTX 3060 Laptop 6GB' --ram 32GiB"
    )
    assert {"glm-4.7", "deepseek-v4-flash", "mixtral-8x7b"} <= {one.model for one in found.unsuitable}


def test_a_bigger_card_runs_more_and_each_model_faster(ft_json):
    machines = (("RTX 3060 Laptop 6GB", "32GiB"), ("RTX 3060 12GB", "32GiB"), ("RTX 4090 24GB", "64GiB"))
    found = [suggest(ft_json, "--gpu", gpu, "--ram", ram)[1] for gpu, ram in machines]
    speeds = [{one.model: one.decode_tps for one in each.suggestions} for each in found]
    for poor, rich in itertools.pairwise(speeds):
        assert poor.keys() <= rich.keys()
        assert all(rich[model] > tps for model, tps in poor.items())
    assert "qwen3-30b-a3b" in speeds[2]


def test_what_can_be_started_comes_before_what_can_only_be_planned(ft_json, ft):
    _, found = suggest(ft_json, "--gpu", "RTX 4090", "--ram", "64GiB")
    best = next(one for one in found.suggestions if one.model == "qwen3.6-35b-a3b")
    assert (best.engine, best.is_launched, best.limited_by) == ("freetoken", True, "vram")
    assert best.parameters == pytest.approx(35e9, rel=0.03)
    assert best.active_parameters == pytest.approx(3e9, rel=0.25)
    options = ("--gpu", "RTX 4090", "--ram", "64GiB")
    _, only = suggest(ft_json, *options, "--engine", "llamacpp")
    gguf = next(one for one in only.suggestions if one.model == "qwen3.6-35b-a3b")
    assert (gguf.checkpoint, gguf.is_launched) == ("qwen3.6-35b-a3b-q4_k_m", False)
    assert gguf.decode_tps > best.decode_tps
    _, out, _ = ft("plan", "--suggest", *options, "--engine", "llamacpp")
    assert "llamacpp (plan only)" in out
    assert "GGUF (q4_k, q6_k, q8_0)" in out


def test_a_model_without_an_engine_is_told_of_a_faster_one(ft):
    where = ("--profile", "rtx-3060-12gb")
    code, _, err = ft("plan", "qwen3.6-35b-a3b-nvfp4", *where)
    assert code == 0
    assert "note: engine `freetoken` would run it at " in err
    assert err.rstrip().endswith("tok/s predicted: `--engine freetoken`")
    for chosen in (("--engine", "native"), ("--set", "engine.name=native")):
        assert "would run it" not in ft("plan", "qwen3.6-35b-a3b-nvfp4", *where, *chosen)[2]
    assert "would run it" not in ft("plan", "demo", *where)[2]
    # Where the link is what limits, the other engine is a quarter faster, which is not worth a word.
    assert "would run it" not in ft("plan", "qwen3.6-35b-a3b-nvfp4", "--profile", "rtx-3060-laptop-6gb")[2]


def test_suggestions_are_ranked_fit_and_name_no_model_twice(ft_json):
    _, found = suggest(ft_json, "--profile", "rtx-3060-12gb")
    rates = [one.decode_tps for one in found.suggestions]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) >= LEAST_TPS
    models = [one.model for one in (*found.suggestions, *found.unsuitable)]
    assert len(models) == len(set(models))
    assert all(one.reason for one in found.unsuitable)


def test_every_suggested_command_plans(ft_json):
    _, found = suggest(ft_json, "--gpu", "RTX 3060 12GB", "--ram", "32GiB")
    for one in found.suggestions:
        code, document = ft_json(*shlex.split(one.command)[1:])
        assert (code, Plan.model_validate(document).prediction.decode_tps) == (0, pytest.approx(one.decode_tps))


def test_nothing_runs_well_on_an_old_machine_and_the_exit_code_says_so(ft):
    code, out, _ = ft("plan", "--suggest", "--gpu", "none", "--ram", "8GiB")
    assert code == 3
    assert "nothing among the model cards runs well here" in out
    assert "of RAM missing: needs" in out


def test_a_machine_made_up_on_the_command_line_is_planned_for(ft_json):
    options = ("--engine", "freetoken", "--gpu", "RTX 3060 Laptop 6GB", "--ram", "32GiB", "--cpu", "Ryzen 9, 8 cores")
    code, document = ft_json("plan", "qwen3.6-35b-a3b-nvfp4", *options)
    plan = Plan.model_validate(document)
    assert (code, plan.hardware_name) == (0, "what if: RTX 3060 Laptop 6GB, 31 GiB RAM")
    assert plan.vram.total_bytes == 6 * 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("x", "--profile", "rtx-3060-12gb", "--gpu", "RTX 3060"), "`--profile` is a whole machine"),
        (("x", "--ram", "8GiB"), "`--ram` and `--cpu` describe a machine with `--gpu`"),
        (("x", "--gpu", "RTX 3060 Laptop 6GB", "--ram", "-5GiB"), "-5GiB"),
        (("x", "--gpu", "RTX 3060 Laptop 6GB", "--ram", "much"), "much"),
        (("x", "--gpu", "RTX 9999"), "no card `RTX 9999`"),
        (("x", "--gpu", "RTX 3060"), "`RTX 3060` stands for several cards"),
        ((), "which model or recipe?"),
        (("x", "--suggest"), "it takes no model"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(ft, options, message):
    code, _, err = ft("plan", *options)
    assert code == 2
    assert message in err


def test_a_refusal_without_a_repair_names_what_does_run_here(ft_json):
    code, document = ft_json("plan", "glm-4.7", "--engine", "freetoken", "--gpu", "RTX 3060 12GB", "--ram", "32GiB")
    refusal = Refusal.model_validate(document)
    assert (code, refusal.repairs) == (3, ())
    assert any(
        one.startswith("`ft plan qwen3.6-35b-a3b-nvfp4 --engine freetoken --workload agent-8k --gpu 'RTX 3060 12GB'")
        for one in refusal.alternatives
    )


def test_another_quantisation_of_the_same_model_is_named_first_and_a_card_that_would_hold_it(ft_json):
    options = ("--engine", "freetoken", "--gpu", "RTX 3060 Laptop 6GB", "--ram", "32GiB")
    code, document = ft_json("plan", "qwen3.6-35b-a3b-bf16", *options)
    refusal = Refusal.model_validate(document)
    assert (code, refusal.repairs) == (3, ())
    instead = [one for one in refusal.alternatives if one.startswith("`ft plan ")]
    assert instead
    assert all("qwen3.6-35b-a3b-" in one for one in instead)
