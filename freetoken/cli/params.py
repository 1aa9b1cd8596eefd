"""Option types and options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from freetoken.errors import UsageError
from freetoken.units import parse_tokens

F = TypeVar("F", bound=Callable[..., Any])


class TokenCount(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A count that may be written with k or m (1024-based): `8192` or `8k`."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The count. Fails with the words of `units`."""
        try:
            return parse_tokens(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def target_options(function: F) -> F:
    """Adds `--name`, `--base-url`, `--api-key-env` and `--timeout`: which engine is meant, and how to reach it."""
    for option in (
        click.option(
            "--timeout", "timeout_s", type=float, default=10.0, show_default=True, help="Seconds for an answer."
        ),
        click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the engine's API key."),
        click.option("--base-url", metavar="URL", help="Address of an engine, instead of a deployment's."),
        click.option("--name", metavar="NAME", help="Which deployment; needed where several run."),
    ):
        function = option(function)
    return function


def read_api_key(variable: str | None) -> str | None:
    """The key in the environment variable; None where none was named. Raises UsageError where it is unset or empty."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UsageError(
            f"`--api-key-env {variable}`: that environment variable is not set", hint=f"export {variable}=..."
        )
    return os.environ[variable]
