"""Laws over every command: help, examples, `--json`, words for wrong usage."""

import json
import re

import click
import pytest

from freetoken.cli.main import COMMANDS, cli, main


def walk(command, path="ft"):
    """Every command below `command` with the words that call it."""
    context = click.Context(command, info_name=path)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        inner = command.get_command(context, name)
        yield f"{path} {name}", inner
        yield from walk(inner, f"{path} {name}")


ALL = dict(walk(cli))
LEAVES = {path: command for path, command in ALL.items() if not isinstance(command, click.Group)}


def get_help(path, command):
    return command.get_help(click.Context(command, info_name=path))


def test_the_commands_of_the_issue_are_there():
    wanted = {
        "probe",
        "plan",
        "apply",
        "status",
        "logs",
        "stop",
        "ctl",
        "chat",
        "model",
        "engine",
        "schema",
        "serve",
        "results",
    }
    assert wanted <= set(COMMANDS)


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_takes_json(path):
    assert "--json" in [name for param in LEAVES[path].params for name in param.opts]


@pytest.mark.parametrize("path", ALL)
def test_help_opens_with_one_sentence_and_ends_with_two_examples(path):
    lines = get_help(path, ALL[path]).rstrip().splitlines()
    assert lines[0].startswith(f"Usage: {path}")
    opening = ALL[path].help.split("\n\n")[0].replace("\n", " ").strip()
    assert re.fullmatch(r"[A-Z].*[.]", opening), opening
    assert not re.search(r"[.!?] [A-Z]", opening), "more than one sentence"
    start = max(index for index, line in enumerate(lines) if line.strip() == "Examples:")
    examples = [line.strip() for line in lines[start + 1 :]]
    assert len(examples) >= 2
    assert all(re.match(r"(.*\| )?ft ", example) for example in examples), examples


@pytest.mark.parametrize("path", ALL)
def test_the_examples_of_a_command_parse(path):
    """Each example names commands that exist and options that they take."""
    epilog = ALL[path].epilog or ""
    for line in re.findall(r"^ *ft (.*)$", epilog, re.M):
        words = re.sub(r"\s*[|>].*", "", line).split()
        command = cli
        while isinstance(command, click.Group):
            words = skip_options(command, words)
            assert words, line
            found = command.get_command(click.Context(command), words[0])
            assert found is not None, f"`ft {line}`: no command `{words[0]}`"
            command, words = found, words[1:]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known, f"`ft {line}`: {sorted(used - known)} unknown"


def skip_options(group, words):
    """`words` without the options of the group at their beginning."""
    while words and words[0].startswith("-"):
        option = next(param for param in group.params if words[0] in param.opts)
        words = words[1:] if option.is_flag else words[2:]
    return words


@pytest.mark.parametrize("path", ALL)
def test_the_short_help_in_the_list_is_the_opening_of_the_help(path):
    name = path.removeprefix("ft ")
    if name in COMMANDS:
        assert COMMANDS[name][1].endswith(".")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message", "where"),
    [
        (["aply"], "`ft` has no command `aply`; did you mean `apply`?", "ft"),
        (["zzz"], "`ft` has no command `zzz`", "ft"),
        (["--sate", "x"], "`ft` has no option `--sate`; did you mean `--state`?", "ft"),
        (["schema", "recipe", "--jsn"], "`ft schema` has no option `--jsn`; did you mean `--json`?", "ft schema"),
        (["schema"], "`ft schema` needs `recipe|profile|workload|plan`", "ft schema"),
        (["schema", "recip"], "`recipe|profile|workload|plan`: `recip` is not one of `recipe`, `profile`, `workload`, "
         "`plan`", "ft schema"),
        (["recipe", "lst"], "`ft recipe` has no command `lst`; did you mean `list`?", "ft recipe"),
        (["results", "--limit", "many"], "`--limit`: `many` is not a valid integer range", "ft results"),
        (["results", "--limit", "0"], "`--limit`: 0 is not in the range 1<=x<=100000", "ft results"),
        (["results", "extra"], "got unexpected extra argument (extra)", "ft results"),
        (["results", "--limit"], "option `--limit` requires an argument", "ft"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_in_our_words_with_exit_code_2(capsys, arguments, message, where):
    assert run(capsys, *arguments) == (2, "", f"error: {message}\nhint: `{where} --help` shows what it takes\n")


def test_wrong_usage_with_json_is_one_error_document(capsys):
    code, out, _ = run(capsys, "import", "--json")
    hint = "`ft import --help` shows what it takes"
    error = {"message": "`ft import` needs `FILE`", "hint": hint, "details": [], "exit_code": 2}
    assert (code, json.loads(out)) == (2, {"error": error})


def test_a_group_without_a_command_shows_its_help_on_stderr(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ft [OPTIONS] COMMAND [ARGS]...")


def test_help_and_version_go_to_stdout(capsys):
    assert run(capsys, "--help")[:2] == (0, get_help("ft", cli) + "\n")
    code, out, err = run(capsys, "--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"ft \d+\.\d+.*\n", out)
