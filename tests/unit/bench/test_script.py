"""Conversations keep the workload's size, whatever the model answers."""

import pytest

from freetoken.bench.script import Script, TextConversation
from freetoken.bench.sizing import Sizer
from freetoken.bench.stream import Answer
from freetoken.recipe.load import load_workload


def make_answer(text: str, prompt_tokens: int, completion_tokens: int) -> Answer:
    return Answer(
        text=text, reasoning="", pieces_s=(1.0,), last_s=2.0, completion_tokens=completion_tokens,
        prompt_tokens=prompt_tokens, cached_tokens=None, finish_reason="length", is_estimated=False,
    )  # fmt: skip


@pytest.mark.parametrize("word", [" mgsk", " return"])
def test_an_answer_that_comes_back_as_more_tokens_leaves_the_next_turns_their_size(word: str) -> None:
    """The tokenizer of this engine gives each byte a token, and its model's tokens are words of five or seven bytes."""
    load = load_workload("agent-8k")
    sizer = Sizer(lambda text: len(text.encode()))
    (conversation,) = Script(load, sizer, seed=1, is_unseen=False, model="m").make_conversations(0)
    assert isinstance(conversation, TextConversation)
    conversation.prepare()
    for turn in range(load.turns):
        request = conversation.make_request(turn)
        assert request.text is not None
        tokens = len(request.text.encode())
        assert 0.9 * request.prompt_tokens < tokens
        # Once a turn has been answered its count is known; the last answer alone is estimated.
        assert tokens <= request.prompt_tokens + 0.25 * load.output_tokens
        conversation.note_answer(turn, make_answer(word * load.output_tokens, tokens, load.output_tokens))


def test_an_answer_of_ordinary_text_is_quoted_whole() -> None:
    load = load_workload("agent-8k")
    (conversation,) = Script(load, Sizer(), seed=1, is_unseen=False, model="m").make_conversations(0)
    assert isinstance(conversation, TextConversation)
    conversation.make_request(0)
    text = "def read(path):\n    return path.read_text()\n" * 20
    conversation.note_answer(0, make_answer(text, 2816, 240))
    assert conversation.history.endswith(text + "\n\n")
