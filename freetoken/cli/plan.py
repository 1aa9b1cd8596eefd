"""`ft plan`: ledgers, settings and predicted speed of a recipe or a model, or a reasoned no."""

from __future__ import annotations

import click

from freetoken.cli.complete import complete_engine, complete_profile, complete_recipe, complete_workload
from freetoken.cli.output import emit, examples, json_option, print_error


@click.command(
    "plan",
    epilog=examples(
        "ft plan recipes/qwen3.6-35b-a3b-6gb.yaml --profile rtx-3060-laptop-6gb",
        "ft plan nvidia/Qwen3.6-35B-A3B-NVFP4 --engine freetoken --workload agent-8k",
    ),
)
@click.argument("target", metavar="MODEL_OR_RECIPE", shell_complete=complete_recipe)
@click.option("--profile", metavar="NAME", shell_complete=complete_profile, help="Plan for a machine that is not here.")
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
    target: str, profile: str | None, engine: str | None, workload: str | None, sets: tuple[str, ...], force: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Prove that a model fits this machine, before anything is downloaded.

    MODEL_OR_RECIPE is a recipe's name or file, the name of a model card, a hub repository, or a model's folder.
    Exit code 0: it fits. 3: it does not, and why.
    """
    from freetoken.deploy.prepare import prepare_plan
    from freetoken.deploy.target import load_target

    chosen = (("engine.name", engine), ("workload", workload))
    sets = (*(f"{key}={value}" for key, value in chosen if value is not None), *sets)
    loaded = load_target(target, sets=sets)
    hardware = None
    if profile is not None:
        from freetoken.hardware.profiles import load_profile

        hardware = load_profile(profile)
    answer = prepare_plan(loaded, hardware=hardware, force=force)
    from freetoken.cli import render

    render.say_notes(loaded.notes)
    if answer.kind == "plan":
        emit(answer, as_json=as_json, render=lambda console: render.render_plan(answer, console))
        return 0
    emit(answer, as_json=as_json, render=lambda console: render.render_refusal(answer, console))
    print_error(render.make_refusal_error(answer))
    return 3
