"""`ft plan`: ledgers, settings and predicted speed of a recipe or a model, or a reasoned no."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from freetoken.cli.complete import complete_engine, complete_profile, complete_recipe, complete_workload
from freetoken.cli.output import emit, examples, json_option, note, print_error
from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, PlanRequest

#: What `--suggest` asks of every model where no workload is named.
DEFAULT_WORKLOAD = "agent-8k"


@click.command(
    "plan",
    epilog=examples(
        "ft plan recipes/qwen3.6-35b-a3b-6gb.yaml --profile rtx-3060-laptop-6gb",
        'ft plan --suggest --gpu "RTX 3060 Laptop 6GB" --ram 32GiB',
    ),
)
@click.argument("target", metavar="[MODEL_OR_RECIPE]", required=False, shell_complete=complete_recipe)
@click.option(
    "--suggest", "is_suggest", is_flag=True, help="List what the machine can run well, out of the model cards."
)
@click.option("--profile", metavar="NAME", shell_complete=complete_profile, help="Plan for a machine that is not here.")
@click.option("--gpu", metavar="CARD", help='Plan for a machine with this card, e.g. "RTX 3060 Laptop 6GB"; or `none`.')
@click.option("--ram", metavar="SIZE", help="RAM of that machine (32GiB).")
@click.option("--cpu", metavar="TEXT", help='CPU of that machine, e.g. "Ryzen 7 5800X, 8 cores".')
@click.option(
    "--engine", metavar="NAME", shell_complete=complete_engine, help="Take this engine, as `--set engine.name=NAME`."
)
@click.option(
    "--workload", metavar="NAME", shell_complete=complete_workload, help="Take this workload, as `--set workload=NAME`."
)
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a value of the recipe; repeatable.")
@click.option("--force", is_flag=True, help="Plan what was refused, and mark the plan as forced.")
@json_option
def command(
    target: str | None, is_suggest: bool, profile: str | None, gpu: str | None, ram: str | None, cpu: str | None,
    engine: str | None, workload: str | None, sets: tuple[str, ...], force: bool, as_json: bool,
) -> int:  # fmt: skip
    """Prove that a model fits this machine, before anything is downloaded.

    MODEL_OR_RECIPE is a recipe's name or file, the name of a model card, a hub repository, or a model's folder. The
    machine is this one, or `--profile`, or one made up of `--gpu`, `--ram` and `--cpu`.
    Exit code 0: it fits. 3: it does not, and why.
    """
    hardware = pick_machine(profile, gpu, ram, cpu)
    machine = (("profile", profile), ("gpu", gpu), ("ram", ram), ("cpu", cpu))
    options = " ".join(f"--{name} {shlex.quote(value)}" for name, value in machine if value is not None)
    if is_suggest:
        if target is not None or force:
            raise UsageError("`--suggest` goes through all model cards: it takes no model and no `--force`")
        return _suggest(hardware, engine, workload or DEFAULT_WORKLOAD, sets, options, as_json=as_json)
    if target is None:
        raise UsageError("which model or recipe?", hint="`ft plan --suggest` lists what this machine can run well")
    return _plan(target, hardware, engine, workload, sets, options, force=force, as_json=as_json)


def pick_machine(profile: str | None, gpu: str | None, ram: str | None, cpu: str | None) -> Hardware | None:
    """The machine that the options describe; None for this one. Raises UsageError where they contradict."""
    is_made_up = gpu is not None or ram is not None or cpu is not None
    if profile is not None and is_made_up:
        raise UsageError("`--profile` is a whole machine: give it, or `--gpu`, `--ram` and `--cpu`")
    if profile is not None:
        from freetoken.hardware.profiles import load_profile

        return load_profile(profile)
    if not is_made_up:
        return None
    if gpu is None:
        raise UsageError("`--ram` and `--cpu` describe a machine with `--gpu`", hint="`--gpu none` for one without")
    from freetoken.hardware.catalog import make_what_if

    return make_what_if(gpu, ram, cpu)


def _plan(
    target: str, hardware: Hardware | None, engine: str | None, workload: str | None, sets: tuple[str, ...],
    options: str, *, force: bool, as_json: bool,
) -> int:  # fmt: skip
    from freetoken.deploy.prepare import plan_request, prepare_request
    from freetoken.deploy.target import load_target

    chosen = (("engine.name", engine), ("workload", workload))
    sets = (*(f"{key}={value}" for key, value in chosen if value is not None), *sets)
    loaded = load_target(target, sets=sets)
    request = prepare_request(loaded, hardware=hardware)
    answer = plan_request(request, force=force)
    from freetoken.cli import render

    render.say_notes(loaded.notes)
    if answer.kind == "plan":
        emit(answer, as_json=as_json, render=lambda console: render.render_plan(answer, console))
        if loaded.path is None and not any(one.startswith("engine") for one in sets):
            _say_faster(answer, request)
        return 0
    from freetoken.deploy.suggest import suggest_instead

    refusal = suggest_instead(answer, hardware, workload or DEFAULT_WORKLOAD, options)
    emit(refusal, as_json=as_json, render=lambda console: render.render_refusal(refusal, console))
    print_error(render.make_refusal_error(refusal))
    return 3


def _say_faster(plan: Plan, request: PlanRequest) -> None:
    """A word where the model was named without an engine, and another one than the default is the better choice."""
    from freetoken.deploy.suggest import find_faster_engine

    found = find_faster_engine(plan, request)
    if found is not None:
        name, tps = found
        note(f"note: engine `{name}` would run it at {tps:.3g} tok/s predicted: `--engine {name}`")


def _suggest(
    hardware: Hardware | None, engine: str | None, workload: str, sets: tuple[str, ...], options: str, *,
    as_json: bool,
) -> int:  # fmt: skip
    from freetoken.cli import render
    from freetoken.deploy.suggest import suggest_models

    found = suggest_models(hardware, workload=workload, engine=engine, sets=sets, options=options)
    emit(found, as_json=as_json, render=lambda console: render.render_suggestions(found, console))
    return 0 if found.suggestions else 3
