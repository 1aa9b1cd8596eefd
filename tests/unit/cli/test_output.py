import io
import json

from freetoken.cli import output
from freetoken.cli.output import PlainConsole, format_table, print_table, progress, to_json
from freetoken.planner.memory import Line


def test_a_plain_table_lines_figures_up_right_without_blanks_at_the_end():
    rows = [("KV cache", "167,792,640", "formula"), ("runtime", "17", "")]
    assert format_table(("line", "bytes", "source"), rows, ("left", "right", "left"), title="VRAM") == [
        "VRAM",
        "line            bytes  source",
        "KV cache  167,792,640  formula",
        "runtime            17",
    ]


def test_an_empty_table_is_its_heading():
    assert format_table(("a", "b"), [], ("left", "left")) == ["a  b"]


def test_plain_output_needs_no_rich(capsys, monkeypatch):
    monkeypatch.setattr(output, "make_console", None)
    print_table(PlainConsole(), ("a",), [("[not markup]",)], title="t", notes=("n",))
    PlainConsole().print("two", "words")
    assert capsys.readouterr().out == "t\na\n[not markup]\n  n\ntwo words\n"


def test_on_a_terminal_the_same_table_is_drawn_by_rich_and_keeps_brackets(capsys):
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, no_color=True)
    print_table(console, ("what", "GiB"), [("[bold]", "1.50")], align=("left", "right"), title="VRAM")
    drawn = screen.getvalue()
    assert "[bold]" in drawn
    assert "1.50" in drawn
    assert "VRAM" in drawn
    assert "─" in drawn


def test_json_dumps_pydantic_values_wherever_they_are():
    line = Line(key="kv", label="KV", bytes=3)
    assert json.loads(to_json({"lines": [line]})) == {"lines": [line.model_dump(mode="json")]}
    assert to_json("ä") == '"ä"'


def test_progress_off_a_terminal_is_a_line_a_tenth(capsys):
    with progress("fetch", total_bytes=1000) as update:
        for done in range(0, 1001, 25):
            update(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"fetch: {percent} %" for percent in range(0, 101, 10)]
