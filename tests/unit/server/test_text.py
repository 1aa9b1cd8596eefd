from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import normalizers

from freetoken.errors import BadFileError, UsageError
from freetoken.paths import package_data
from freetoken.server.text import (
    Detokenizer,
    PromptTooLongError,
    StopScanner,
    TextCodec,
    load_codec,
    longest_partial,
)
from tests.fakes.stock_text import make_codec

TEXT = "naïve 北京 🎉🎉 e\u0301\n<think>x</think>"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return make_codec()


def test_pieces_are_whole_characters_and_add_up_to_the_text(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.add([one]) for one in codec.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    # Every byte is a token here, so a character of four bytes comes with its last one.
    assert pieces[len("naïve 北京 ".encode()) :][:4] == ["", "", "", "🎉"]


def test_ids_may_come_in_any_grouping(codec: TextCodec) -> None:
    ids = codec.encode(TEXT)
    for size in (2, 3, 7, 100):
        detokenizer = Detokenizer(codec)
        parts = [detokenizer.add(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(parts) + detokenizer.flush() == TEXT


def test_bytes_that_never_become_a_character_are_shown_in_the_end(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    assert detokenizer.add([0x61, 0xF0, 0x9F]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_an_endless_row_of_broken_bytes_does_not_stall_the_stream(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    assert len(detokenizer.add([0x80] * 20)) >= 8


def test_special_tokens_are_left_out_unless_asked_for(codec: TextCodec) -> None:
    ids = [*codec.encode("a"), codec.vocabulary["<|im_end|>"], codec.vocabulary["<tool_call>"]]
    assert Detokenizer(codec).add(ids) == "a<tool_call>"
    assert Detokenizer(codec, skip_special=False).add(ids) == "a<|im_end|><tool_call>"


@pytest.mark.parametrize(("stops", "shown", "matched"), [
    (["END"], "one EN ENE two ", "END"),
    (["two", "one"], "", "one"),
    (["NE t"], "one EN E", "NE t"),
    (["never", "\n\n"], "one EN ENE two END three", None),
    ([], "one EN ENE two END three", None),
    ([""], "one EN ENE two END three", None),
])  # fmt: skip
def test_text_before_a_stop_string_is_shown_exactly_whatever_the_pieces(
    stops: list[str], shown: str, matched: str | None
) -> None:
    text = "one EN ENE two END three"
    for size in (1, 2, 3, 5, 100):
        scanner = StopScanner(stops)
        parts = [scanner.add(text[start : start + size]) for start in range(0, len(text), size)]
        assert ("".join(parts) + scanner.flush(), scanner.matched) == (shown, matched)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["STOP"])
    assert [scanner.add(one) for one in ("abcS", "T", "x", "ST", "OP", "more")] == ["abc", "", "STx", "", "", ""]
    assert longest_partial("xxab", ("abc", "b")) == 2


def test_a_chat_is_rendered_with_text_parts_tool_arguments_and_developer_messages(codec: TextCodec) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = codec.render_chat(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        [{"type": "function", "function": {"name": "add"}}],
        {"enable_thinking": True},
    )
    assert text == (
        "<|im_start|>system\ntools: add <|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n(called add a=1)<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert codec.encode_rendered(text)[0] == codec.vocabulary["<|im_start|>"]


@pytest.mark.parametrize(("message", "words"), [
    ({"role": "nobody", "content": "x"}, "could not encode request: TemplateError: nobody may not speak"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "content of type `image_url` is not supported"),
])  # fmt: skip
def test_a_chat_that_cannot_be_rendered_is_told(codec: TextCodec, message: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        codec.render_chat([message], None, {})


def test_a_template_runs_in_a_sandbox() -> None:
    codec = make_codec(template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UsageError, match="SecurityError"):
        codec.render_chat([{"role": "user", "content": "x"}], None, {})


def test_a_model_without_a_template_and_an_empty_prompt_are_told() -> None:
    codec = make_codec(template=None)
    with pytest.raises(UsageError, match="this model has no chat template; use /v1/completions"):
        codec.render_chat([{"role": "user", "content": "x"}], None, {})
    with pytest.raises(UsageError, match="the prompt is empty"):
        codec.encode("")


def test_a_tokenizer_is_loaded_from_its_files_also_with_a_class_nobody_knows(codec: TextCodec, tmp_path: Path) -> None:
    codec.tokenizer.save_pretrained(tmp_path)
    assert load_codec(tmp_path).decode(codec.encode(TEXT)) == TEXT
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "NobodysTokenizer"}))
    loaded = load_codec(tmp_path)
    assert loaded.encode(TEXT) == codec.encode(TEXT)
    assert "hello" in loaded.render_chat([{"role": "user", "content": "hello"}], None, {})


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="the tokenizer cannot be loaded"):
        load_codec(tmp_path)


def test_ids_are_those_of_the_tokenizers_own_call(codec: TextCodec) -> None:
    text = TEXT + "<|im_start|> a<|im_end|>"
    assert codec.encode(text) == codec.tokenizer(text)["input_ids"]
    demo = load_codec(package_data("demo-moe"))
    assert demo.encode(text) == demo.tokenizer(text)["input_ids"]
    assert demo.encode_rendered(text) == demo.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_file_that_cuts_texts_cuts_none_here() -> None:
    tokenizer = make_codec().tokenizer
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert len(TextCodec(tokenizer).encode("x" * 10)) == 10


def test_a_prompt_is_refused_by_its_bytes_or_its_beginning_and_else_by_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec = make_codec()
    seen: list[int] = []
    make_ids = codec._make_ids

    def note(text: str, *, add_special: bool) -> list[int]:
        seen.append(len(text))
        return make_ids(text, add_special=add_special)

    monkeypatch.setattr(codec, "_make_ids", note)
    codec.longest_token_bytes = 100
    with pytest.raises(PromptTooLongError, match="10,001 bytes are 101 tokens at least"):
        codec.encode("x" * 10_001, 100)
    assert seen == []
    with pytest.raises(PromptTooLongError, match="the first 800 of its 10,000 characters are 800 tokens, more than"):
        codec.encode("x" * 10_000, 100)
    assert seen == [800]
    # What is just too long is the engine's to refuse, which knows how much is to be generated.
    assert len(codec.encode("x" * 1600, 100)) == 1600
    assert len(codec.encode("<|endoftext|>" * 99, 100)) == 99


def test_a_token_is_taken_for_at_least_as_long_as_any_text_it_can_stand_for() -> None:
    demo = load_codec(package_data("demo-moe"))
    special = set(demo.tokenizer.all_special_ids)
    ids = [one for one in demo.vocabulary.values() if one not in special]
    # A single id may be a part of a character, and is then shown as one that stands for any.
    texts = [text for one in ids if "\ufffd" not in (text := demo.decode([one]))]
    assert len(texts) > 3000
    assert max(len(text.encode()) for text in texts) <= demo.longest_token_bytes
    demo.tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    assert TextCodec(demo.tokenizer).longest_token_bytes == 4 * demo.longest_token_bytes
