from __future__ import annotations

import json
from typing import Any

import pytest

from freetoken.server.output import HarmonyParser, OutputParser, TagParser, make_parser

TOOLS = [{
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {
        "a": {"type": "integer"}, "text": {"type": "string"}, "list": {"type": "array"},
    }}},
}]  # fmt: skip


def read(parser: OutputParser, text: str, size: int) -> list[tuple[str, Any]]:
    """Pieces with neighbours of one kind joined."""
    pieces = [piece for start in range(0, len(text), size) for piece in parser.add(text[start : start + size])]
    joined: list[tuple[str, Any]] = []
    for piece in [*pieces, *parser.flush()]:
        if piece.call is not None:
            joined.append(("tool", (piece.call.name, json.loads(piece.call.arguments))))
        elif joined and joined[-1][0] == piece.kind:
            joined[-1] = (piece.kind, joined[-1][1] + piece.text)
        else:
            joined.append((piece.kind, piece.text))
    return joined


CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=text>\n5\n6\n</parameter>\n"
    "<parameter=list>\n[1]\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "pieces"), [
    ("Sure.\n", [("content", "Sure.\n")]),
    (f"Let me see.\n{HERMES}\n{QWEN}", [
        ("content", "Let me see."), ("tool", ("add", {"a": 1})),
        ("tool", ("add", {"a": 12, "text": "5\n6", "list": [1]})),
    ]),
    ("<think>\nhm\n ok\n</think>\n\nYes <b>.", [("reasoning", "hm\n ok"), ("content", "Yes <b>.")]),
    (f"<think>a</think>{HERMES}", [("reasoning", "a"), ("tool", ("add", {"a": 1}))]),
    ("not now: <think>", [("content", "not now: <think>")]),
    ("a <tool_call>nothing</tool_call> b", [("content", "a <tool_call>nothing</tool_call> b")]),
    (HERMES.removesuffix("</tool_call>"), [("tool", ("add", {"a": 1}))]),
    ("x <tool_call>{\"na", [("content", "x <tool_call>{\"na")]),
    ("<think>never ends", [("reasoning", "never ends")]),
    ("a < b", [("content", "a < b")]),
])  # fmt: skip
def test_reasoning_content_and_calls_are_told_apart_whatever_the_pieces(
    text: str, pieces: list[tuple[str, Any]], size: int
) -> None:
    assert read(TagParser(TOOLS), text, size) == pieces


@pytest.mark.parametrize("size", [1, 1000])
def test_without_tools_calls_are_text_and_space_is_kept(size: int) -> None:
    assert read(TagParser(), f"  x {HERMES} \n", size) == [("content", f"  x {HERMES} \n")]


@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_to_a_prompt_that_opened_thinking_begins_as_reasoning(size: int) -> None:
    parser = make_parser("<|im_start|>assistant\n<think>\n", None, is_harmony=False)
    assert read(parser, "well\n</think>\n\nHi", size) == [("reasoning", "well"), ("content", "Hi")]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("text", "pieces"), [
    ("<|channel|>analysis<|message|>We need<|end|><|start|>assistant<|channel|>final<|message|>Hi there<|return|>",
     [("reasoning", "We need"), ("content", "Hi there")]),
    (CALL + "<|call|>", [("tool", ("add", {"a": 1}))]),
    (CALL, [("tool", ("add", {"a": 1}))]),
    ("<|channel|>final<|message|>cut", [("content", "cut")]),
])  # fmt: skip
def test_harmony_channels_are_told_apart(text: str, pieces: list[tuple[str, Any]], size: int) -> None:
    assert read(HarmonyParser(), text, size) == pieces
