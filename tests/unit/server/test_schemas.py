from __future__ import annotations

from typing import Any

import pytest

from freetoken.errors import UsageError
from freetoken.server.anthropic_api import make_chat_body
from freetoken.server.schemas import ChatBody, CompletionBody, MessagesBody

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("fields", "words"), [
    ({"n": 2}, "`n` is 2"), ({"logit_bias": {"1": 5}}, "`logit_bias`"), ({"logprobs": True}, "`logprobs`"),
    ({"functions": [{}]}, "use `tools`"), ({"response_format": {"type": "json_object"}}, "`json_object`"),
    ({"tool_choice": "required"}, "cannot force a call"), ({"stop": ["a"] * 17}, "`stop` has 17 strings"),
])  # fmt: skip
def test_what_a_chat_cannot_have_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ChatBody.model_validate({"messages": HELLO} | fields).refuse_unsupported()


@pytest.mark.parametrize("fields", [
    {"n": 1}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}, {"user": "me", "store": False},
    {"stop": "a"},
])  # fmt: skip
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    ChatBody.model_validate({"messages": HELLO} | fields).refuse_unsupported()


@pytest.mark.parametrize(("fields", "words"), [
    ({"echo": True}, "`echo`"), ({"suffix": "x"}, "`suffix`"), ({"logprobs": 1}, "`logprobs`"),
    ({"best_of": 2}, "`best_of`"), ({"prompt": [1, 2]}, "token ids"), ({"prompt": []}, "a text or a list"),
    ({"prompt": ["a", "b"], "stream": True}, "only one prompt"),
])  # fmt: skip
def test_what_a_completion_cannot_have_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    with pytest.raises(UsageError, match=words):
        body.refuse_unsupported()


def test_template_options_come_from_the_request_but_never_the_template_itself() -> None:
    body = ChatBody.model_validate({
        "messages": HELLO, "reasoning_effort": "high", "thinking": {"type": "disabled"},
        "chat_template_kwargs": {"chat_template": "{{ 1 }}", "tokenize": True, "add_vision_id": False},
    })  # fmt: skip
    assert body.template_options == {"add_vision_id": False, "reasoning_effort": "high", "enable_thinking": False}


def test_an_anthropic_request_becomes_a_chat() -> None:
    body = MessagesBody.model_validate({
        "max_tokens": 9, "temperature": 0.5, "stop_sequences": ["X"], "system": [{"type": "text", "text": "short"}],
        "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "and now?"},
            ]},
        ],
    })  # fmt: skip
    chat = make_chat_body(body)
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert chat.messages == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "ok", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "and now?"},
    ]
    described = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert chat.offered_tools == [{"type": "function", "function": described}]
    assert (chat.token_limit, chat.temperature, chat.stops) == (9, 0.5, ["X"])


@pytest.mark.parametrize(("fields", "words"), [
    ({"tool_choice": {"type": "any"}}, "cannot force a call"),
    ({"tools": [{"type": "web_search", "name": "web"}]}, "tool `web` has no `input_schema`"),
])  # fmt: skip
def test_what_an_anthropic_request_cannot_have_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_chat_body(MessagesBody.model_validate({"max_tokens": 1, "messages": HELLO} | fields))
