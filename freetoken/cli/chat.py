"""`ft chat`: a conversation with the running model, in a terminal or from a pipe (one line = one turn)."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from freetoken.cli.output import describe_error, examples, json_option, note, print_error, to_json
from freetoken.cli.params import target_options
from freetoken.cli.target import connect
from freetoken.errors import FtError, UsageError

if TYPE_CHECKING:
    from freetoken.adapters.control import ControlClient

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"
#: A line that is meant for `ft chat` and not for the model; a path has a second slash, a sentence a blank.
_COMMAND = re.compile(r"/[\w?-]*\s*")


@click.command("chat", epilog=examples("ft chat", 'echo "What is a mixture of experts?" | ft chat --max-tokens 200'))
@target_options
@click.option("--system", metavar="TEXT", help="System message of every conversation.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of an answer; else the engine's own default.")
@click.option("--temperature", type=click.FloatRange(0), help="0 is greedy; else the model's own default.")
@json_option
def command(
    name: str | None, base_url: str | None, api_key_env: str | None, timeout_s: float, system: str | None,
    max_tokens: int | None, temperature: float | None, as_json: bool,
) -> int:  # fmt: skip
    """Chat with the running model.

    Piped, a line is a turn. With `--json` all answers come as one document at the end.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with connect(name, base_url, api_key_env, timeout_s) as client:
        chat = Chat(
            client, system, {key: value for key, value in options.items() if value is not None}, as_json=as_json
        )
        if not sys.stdin.isatty():
            return chat.run(line.rstrip("\n") for line in sys.stdin)
        note(f"{client.health().model or client.base_url}: {HELP}")
        return chat.run(_read_lines(), is_terminal=True)


class Chat:
    """The conversation so far; answers go to stdout as they come."""

    def __init__(
        self, client: ControlClient, system: str | None, options: dict[str, Any], *, as_json: bool = False
    ) -> None:
        self._client, self._options, self._as_json = client, options, as_json
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._start)
        self.answers: list[dict[str, Any]] = []

    def run(self, lines: Iterable[str], *, is_terminal: bool = False) -> int:
        """One turn a line; the exit code (a terminal goes on after telling what failed).

        Raises UsageError where a pipe says nothing.
        """
        if not self._as_json:
            return self._run(lines, is_terminal)
        document: dict[str, Any] = {"answers": self.answers}
        try:
            code = self._run(lines, is_terminal)
        except FtError as error:
            document["error"], code = describe_error(error), error.exit_code
            print_error(error)
        click.echo(to_json(document))
        return code

    def _run(self, lines: Iterable[str], is_terminal: bool) -> int:
        code, has_spoken = 0, False
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            if text == "/reset":
                self.messages = list(self._start)
            elif text in ("/help", "/?"):
                note(HELP)
            elif _COMMAND.fullmatch(line):
                note(f"`{text}` is no command: {HELP}; a blank before it sends it to the model")
                code, has_spoken = UsageError.exit_code, True
            elif text:
                code, has_spoken = max(code, self._turn(line, is_terminal)), True
        if not has_spoken and not is_terminal:
            raise UsageError("nothing was said: stdin is empty", hint='echo "What is a mixture of experts?" | ft chat')
        return 0 if is_terminal else code

    def _turn(self, line: str, is_terminal: bool) -> int:
        self.messages.append({"role": "user", "content": line})
        started = time.monotonic()
        try:
            answer, usage = self._answer(is_terminal)
        except FtError as error:
            self.messages.pop()
            if not is_terminal:
                raise
            hint = (
                "; /reset forgets the conversation" if getattr(error, "code", None) == "context_length_exceeded" else ""
            )
            note(f"error: {error.message}{hint}")
            return 1
        self.messages.append({"role": "assistant", "content": answer})
        if is_terminal and usage:
            seconds = time.monotonic() - started
            note(f"({usage['completion_tokens']} tokens in {seconds:.1f} s)")
        return 0

    def _answer(self, is_terminal: bool) -> tuple[str, dict[str, Any] | None]:
        """(the answer's text, its usage); on a terminal Ctrl-C ends the answer and keeps what there is."""
        pieces: list[str] = []
        usage: dict[str, Any] | None = None
        ignored = (KeyboardInterrupt,) if is_terminal else ()
        deltas = self._client.chat(self.messages, **self._options)
        # Closing the stream closes the connection, which is what tells the engine to stop.
        with contextlib.closing(deltas), contextlib.suppress(*ignored):
            for delta in deltas:
                usage = delta.get("usage") or usage
                if is_terminal and (thought := delta.get("reasoning_content")):
                    click.secho(thought, dim=True, nl=False, err=True)
                if piece := delta.get("content"):
                    pieces.append(piece)
                    if not self._as_json:
                        click.echo(piece, nl=False)
        answer = "".join(pieces)
        if self._as_json:
            self.answers.append({"role": "assistant", "content": answer, "usage": usage})
        else:
            click.echo("")
        return answer, usage


def _read_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for `input`
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo("", err=True)
            return
