"""Option types and options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from freetoken.errors import UsageError
from freetoken.units import parse_seconds, parse_tokens

F = TypeVar("F", bound=Callable[..., Any])

MOST_WAIT_S = 86_400


class TokenCount(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A count that may be written with k or m (1024-based): `8192` or `8k`."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The count. Fails with the words of `units`."""
        try:
            return parse_tokens(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class WaitTime(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Seconds to wait, also with a unit: `30`, `500ms`, `2m`; more than 0 and at most a day."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds. Fails with the words of `units`, and for what is no time to wait."""
        try:
            seconds = parse_seconds(value)
        except ValueError:
            self.fail(f"`{value}` is no time to wait, expected e.g. `30` or `2m`", param, ctx)
        if not 0 < seconds <= MOST_WAIT_S:
            self.fail(f"`{value}` is not between 0 and {MOST_WAIT_S:,} s, expected e.g. `30` or `2m`", param, ctx)
        return seconds


class EngineUrl(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """An engine's address as people have it: with or without `http://`, and also as the API's own, with `/v1`."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """`http://HOST[:PORT][/PREFIX]`. Fails for what names no host."""
        text = str(value).strip()
        text = text if "://" in text else f"http://{text}"
        try:
            parts = urlsplit(text)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none, a bracket too few
            is_address = False
        if not is_address or any(one.isspace() for one in text):
            self.fail(f"`{value}` is no address of an engine, expected e.g. `http://127.0.0.1:1919`", param, ctx)
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return f"{parts.scheme}://{parts.netloc}{path}"


def target_options(function: F) -> F:
    """Adds `--name`, `--base-url`, `--api-key-env` and `--timeout`: which engine is meant, and how to reach it."""
    for option in (
        click.option(
            "--timeout",
            "timeout_s",
            type=WaitTime(),
            default=10.0,
            show_default=True,
            metavar="TIME",
            help="Seconds for an answer.",
        ),
        click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the engine's API key."),
        click.option(
            "--base-url", type=EngineUrl(), metavar="URL", help="Address of an engine, instead of a deployment's."
        ),
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
