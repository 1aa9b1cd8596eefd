"""`ft schema`: the JSON Schemas of what people and programs exchange with `ft`."""

from __future__ import annotations

from typing import Any

import click

from freetoken.cli.output import emit, examples, json_option, to_json

KINDS = ("recipe", "profile", "workload", "plan")


@click.command("schema", epilog=examples("ft schema recipe > recipe.schema.json", "ft schema plan --json"))
@click.argument("kind", type=click.Choice(KINDS), metavar="|".join(KINDS))
@json_option
def command(kind: str, as_json: bool) -> None:
    """Print the JSON Schema of a recipe, profile, workload or plan.

    Editors complete and check YAML with it: `# yaml-language-server: $schema=recipe.schema.json`. A plan's schema
    is that of `ft plan --json`, which is a plan or a refusal.
    """
    schema = make_schema(kind)
    emit(schema, as_json=as_json, render=lambda console: click.echo(to_json(schema)))


def make_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of `kind`."""
    if kind == "recipe":
        from freetoken.recipe.dump import make_recipe_schema

        return make_recipe_schema()
    if kind == "workload":
        from freetoken.recipe.dump import make_workload_schema

        return make_workload_schema()
    if kind == "profile":
        from freetoken.hardware.model import Hardware

        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Hardware.model_json_schema()}
    from pydantic import TypeAdapter

    from freetoken.planner.plan import Plan, Refusal

    answer: TypeAdapter[Plan | Refusal] = TypeAdapter(Plan | Refusal)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **answer.json_schema(mode="serialization")}
