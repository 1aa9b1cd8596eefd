"""Streams taken apart: where a read ends says nothing about where an event does."""

import json

import pytest

from freetoken.bench.stream import BadAnswerError, read_answer


def event(**document):
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def text(piece, finish=None):
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


USAGE = event(
    choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
)
DONE = b"data: [DONE]\n\n"


def test_a_stream_gives_text_times_and_counts():
    reads = [(1.0, text("a")), (2.0, text("b")), (3.0, text("c")), (3.5, text("", "length") + USAGE + DONE)]
    answer = read_answer(reads)
    assert (answer.text, answer.pieces_s, answer.last_s) == ("abc", (1.0, 2.0, 3.0), 3.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (7, 2, 3)
    assert (answer.finish_reason, answer.is_estimated) == ("length", False)


def test_an_event_belongs_to_the_read_that_completed_it():
    whole = text("é")
    reads = [(1.0, whole[:9]), (2.0, whole[9:-1]), (3.0, whole[-1:] + text("b")), (4.0, DONE)]
    assert read_answer(reads).pieces_s == (2.0, 3.0)


def test_tokens_without_text_end_with_the_word_that_all_is_done():
    usage = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})
    reads = [(1.0, text("a")), (2.0, text("b")), (4.0, text("", "length")), (4.1, usage + DONE)]
    assert read_answer(reads).last_s == 4.0


def test_without_usage_pieces_are_counted_and_it_says_so():
    answer = read_answer([(1.0, text("a")), (2.0, text("b", "stop")), (3.0, DONE)])
    assert (answer.completion_tokens, answer.is_estimated, answer.prompt_tokens) == (2, True, None)


def test_reasoning_and_tool_calls_are_generated_text_too():
    def delta(**parts):
        return event(choices=[{"index": 0, "delta": parts}])

    first = {"index": 0, "id": "c1", "function": {"name": "ls", "arguments": '{"a"'}}
    reads = [
        (0.5, delta(role="assistant", content="")), (1.0, delta(reasoning_content="hm")), (2.0, delta(content="x")),
        (3.0, delta(tool_calls=[first])), (4.0, delta(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}])),
    ]  # fmt: skip
    answer = read_answer(reads)
    assert answer.pieces_s == (1.0, 2.0, 3.0, 4.0)
    assert (answer.reasoning, answer.text) == ("hm", "x")
    assert answer.tool_calls == ({"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}},)


def test_keep_alive_comments_and_carriage_returns_are_passed_over():
    reads = [(1.0, b": keep-alive\n\n"), (2.0, text("a").replace(b"\n", b"\r\n")), (3.0, DONE)]
    assert read_answer(reads).text == "a"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the engine's answer has no text (finish reason: none)"),
        (text("", "length") + DONE, "the engine's answer has no text (finish reason: length)"),
        (b"data: <html>\n\n", "the engine streamed what is no JSON object: '<html>'"),
        (b"data: [1]\n\n", "the engine streamed what is no JSON object: '[1]'"),
        (text("a") + event(error={"message": "OOM"}), "the engine failed within a stream: OOM"),
    ],
)  # fmt: skip
def test_garbage_is_an_error_with_its_words(data, words):
    with pytest.raises(BadAnswerError) as caught:
        read_answer([(1.0, data)])
    assert caught.value.message == words


def test_an_error_within_a_stream_keeps_its_class():
    error = {"message": "prompt is too long: 9 tokens > 8 maximum", "code": "context_length_exceeded"}
    with pytest.raises(BadAnswerError, match="within a stream: prompt is too long") as failed:
        read_answer([(1.0, event(error=error) + DONE)])
    assert failed.value.code == "context_length_exceeded"
