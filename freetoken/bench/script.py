"""Conversations to be held: which request comes next, given what the model answered so far.

Turn n sends the whole history, with the model's real answers in it, as every agent does. Shipped workloads go to
`/v1/completions` as plain text: it works for models without a chat template, templates differ in what they drop from
the history, and nothing but the text itself is counted. Recorded chats go where they came from.

The first line of each conversation differs in every run, so that no prefix cache answers for the engine. The text is
drawn from the seed; only that line is new.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from freetoken.bench.recording import Turn, read_recording
from freetoken.bench.sizing import Sizer
from freetoken.bench.stream import Answer
from freetoken.bench.text import TextSource
from freetoken.errors import BadFileError
from freetoken.recipe.workload import Workload

#: A little warmth keeps answers from going round in circles, which greedy ones soon do; circles fake a hit rate.
TEMPERATURE = 0.7
#: Share of the wanted tokens that a cut by estimate aims at: too long a prompt is refused.
ESTIMATE_AIM = 0.94
#: An answer may come back as so many times its tokens before it is cut: estimates of odd texts are off by as much.
MOST_GROWTH = 2.0
#: Tokens kept free at each end of a turn, where two texts are joined.
JOIN_TOKENS = 2


@dataclass(frozen=True)
class Request:
    """One request to be sent. Token counts are what is wanted; 0 = as recorded, whatever it is."""

    path: str
    body: dict[str, Any]
    prompt_tokens: int
    output_tokens: int
    #: Prompt tokens that this run has sent before, so that a prefix cache may know them.
    reusable_tokens: int
    #: Prompt tokens that cannot be in any cache; None where that depends on the engine.
    fresh_tokens: int | None
    #: The prompt as one text, where it is one.
    text: str | None = None


class Conversation(Protocol):
    """What a run holds with the engine."""

    @property
    def turns(self) -> int:
        """How many turns it has."""

    def prepare(self) -> None:
        """Does what can be done before the clock runs."""

    def make_request(self, turn: int) -> Request:
        """The request of that turn."""

    def note_answer(self, turn: int, answer: Answer) -> None:
        """Takes the answer into the history."""

    def shorten(self, turn: int, surplus_tokens: int | None) -> bool:
        """Makes the prompt of that turn shorter, because it was refused; False where that cannot be."""


def make_nonce() -> str:
    """A line's worth of what no prompt before had."""
    return secrets.token_hex(8)


@dataclass
class TextConversation:
    """A conversation over texts of the standard library, each turn of the workload's size."""

    workload: Workload
    sizer: Sizer
    prefix: str
    pieces: list[str]
    seed: int
    model: str
    is_prefix_known: bool
    history: str = ""
    #: Tokens of `history` by the engine's own count.
    held_tokens: int = 0
    _cuts: dict[int, str] = field(default_factory=dict)
    #: Pieces that the engine counted before the run, with their tokens.
    _counted: dict[int, str] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return self.workload.turns

    def prepare(self) -> None:
        """Cuts the first prompt, and all further pieces where the engine counts: it is asked nothing while timed."""
        self.make_request(0)
        if self.sizer.can_count:
            tokens = self.workload.prompt_tokens - JOIN_TOKENS
            for turn in range(1, self.turns):
                self._counted[turn] = self.sizer.cut(self.pieces[turn], max(1, tokens))

    def wanted_tokens(self, turn: int) -> int:
        """Tokens of the prompt of `turn`, history included."""
        load = self.workload
        return load.shared_prefix_tokens + (turn + 1) * load.prompt_tokens + turn * load.output_tokens

    def make_request(self, turn: int) -> Request:
        """The request of that turn: the history, and a piece of text that fills it up to its size."""
        if turn not in self._cuts:
            self._cuts[turn] = self._cut(turn)
        prompt = (self.history or self.prefix) + self._cuts[turn]
        load, wanted = self.workload, self.wanted_tokens(turn)
        fresh = wanted if turn == 0 and not (self.is_prefix_known and load.shared_prefix_tokens) else None
        reusable = self.held_tokens if turn else (load.shared_prefix_tokens if self.is_prefix_known else 0)
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": load.output_tokens, "temperature": TEMPERATURE,
            "ignore_eos": True, "seed": self.seed + turn,
        }  # fmt: skip
        return Request("/v1/completions", body, wanted, load.output_tokens, reusable, fresh, prompt)

    def _cut(self, turn: int) -> str:
        held = self.held_tokens if turn else self.sizer.estimate(self.prefix)
        if turn == 0 and self.sizer.can_count:
            held = self.workload.shared_prefix_tokens
        budget = self.wanted_tokens(turn) - held - JOIN_TOKENS
        if turn in self._counted and budget >= self.workload.prompt_tokens - 2 * JOIN_TOKENS:
            return self._counted[turn]
        aim = 1.0 if self.sizer.can_count else ESTIMATE_AIM
        return self.sizer.cut(self.pieces[turn], max(1, int(budget * aim)))

    def note_answer(self, turn: int, answer: Answer) -> None:
        """Takes the answer into the history, and learns from how many tokens the prompt had."""
        prompt = (self.history or self.prefix) + self._cuts[turn]
        if answer.prompt_tokens:
            self.sizer.note(prompt, answer.prompt_tokens)
        self.history = prompt + self._quote(answer) + "\n\n"
        counted = answer.prompt_tokens or self.sizer.estimate(prompt)
        self.held_tokens = counted + answer.completion_tokens + 1

    def _quote(self, answer: Answer) -> str:
        """The answer as it stands in the history: no longer than it was when it was generated.

        A model without training says what no text would be split into, and its words come back as several times as
        many tokens; the turns to come would no longer be of the workload's size.
        """
        text, tokens = answer.text + answer.reasoning, answer.completion_tokens
        is_longer = self.sizer.estimate(text) > MOST_GROWTH * tokens + 8
        return self.sizer.trim(text, tokens) if is_longer else text

    def shorten(self, turn: int, surplus_tokens: int | None) -> bool:
        """Takes the surplus, or 6 %, off the end of this turn's text, and a little more."""
        cut = self._cuts[turn]
        tokens = max(1, self.sizer.estimate(cut))
        share = (surplus_tokens or 0.06 * tokens) * 1.1 / tokens
        self._cuts[turn] = cut[: int(len(cut) * (1 - min(0.9, max(0.01, share))))]
        return len(self._cuts[turn]) > 0.3 * len(cut)


@dataclass
class RecordedConversation:
    """A recorded one, held again: its own messages, and the model's new answers unless they were tool calls."""

    recorded: Sequence[Turn]
    nonce: str
    seed: int
    model: str
    default_output_tokens: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str = ""
    held_tokens: int = 0

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return len(self.recorded)

    def prepare(self) -> None:
        """Nothing: all is there."""

    def make_request(self, turn: int) -> Request:
        """The request of that turn."""
        one = self.recorded[turn]
        output = one.completion_tokens or min(one.max_tokens or self.default_output_tokens, self.default_output_tokens)
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": output, "temperature": TEMPERATURE, "ignore_eos": True,
            "seed": self.seed + turn,
        }  # fmt: skip
        if one.kind == "completion":
            text = self.prompt + (f"# {self.nonce}\n" if turn == 0 else "") + one.prompt
            return Request("/v1/completions", body | {"prompt": text}, 0, output, self.held_tokens, None, text)
        messages = [*self.messages, *one.messages]
        if turn == 0:
            messages[0] = messages[0] | {"content": f"[{self.nonce}]\n{messages[0].get('content') or ''}"}
        body |= {"messages": messages}
        if self.recorded[0].tools:
            body["tools"] = list(self.recorded[0].tools)
        return Request("/v1/chat/completions", body, 0, output, self.held_tokens, None)

    def note_answer(self, turn: int, answer: Answer) -> None:
        """Takes the answer into the history."""
        one, body = self.recorded[turn], self.make_request(turn).body
        self.held_tokens = (answer.prompt_tokens or 0) + answer.completion_tokens
        if one.kind == "completion":
            # Without its answer on record, the next turn's text has it.
            self.prompt = body["prompt"] + (answer.text if one.answer is not None else "")
            return
        following = self.recorded[turn + 1].messages if turn + 1 < self.turns else ()
        # The results of the next turn belong to the calls that were recorded, not to what the model says today.
        is_recorded = bool(following) and following[0].get("role") == "assistant"
        said = [] if is_recorded else [{"role": "assistant", "content": answer.text}]
        self.messages = [*body["messages"], *said]

    def shorten(self, turn: int, surplus_tokens: int | None) -> bool:
        """Never: what was recorded is sent as it is."""
        return False


class Script:
    """Makes the conversations of each repeat. No text comes twice, whatever the repeat."""

    def __init__(
        self, workload: Workload, sizer: Sizer, *, seed: int, is_unseen: bool, model: str, base_dir: Path | None = None
    ) -> None:  # fmt: skip
        self._workload, self._sizer, self._seed, self._model = workload, sizer, seed, model
        self.notes: list[str] = []
        self._recorded: list[Sequence[Turn]] = []
        if workload.text == "recorded":
            self._recorded = self._pick(_read(workload, base_dir), is_unseen)
        else:
            self._source = TextSource(workload.text, seed, is_unseen=is_unseen)

    @property
    def is_recorded(self) -> bool:
        """Whether requests are replayed."""
        return bool(self._recorded)

    def _pick(self, found: Sequence[Sequence[Turn]], is_unseen: bool) -> list[Sequence[Turn]]:
        kept_back = [one for index, one in enumerate(found) if index % 4 == 3]
        if not kept_back:
            if is_unseen:
                self.notes.append(
                    f"the recording has {len(found)} conversations, too few to keep any back: all are used"
                )
            return list(found)
        return kept_back if is_unseen else [one for index, one in enumerate(found) if index % 4 != 3]

    def take_text(self, characters: int) -> str:
        """Text of the workload's kind for calibration and warm-up, which no conversation will have."""
        return TextSource("code", self._seed).take(characters) if self.is_recorded else self._source.take(characters)

    def make_conversations(self, repeat: int) -> list[Conversation]:
        """What is held at once in one repeat."""
        seed = random.Random(f"{self._seed} {repeat}").randrange(1 << 30)
        if self.is_recorded:
            return [
                RecordedConversation(one, make_nonce(), seed + 1000 * index, self._model, self._workload.output_tokens)
                for index, one in enumerate(self._recorded)
            ]
        load, sizer = self._workload, self._sizer
        room = sizer.characters_for(load.prompt_tokens)
        prefix = f"# session {make_nonce()}\n"
        if load.shared_prefix_tokens:
            text = prefix + self._source.take(sizer.characters_for(load.shared_prefix_tokens))
            prefix = sizer.cut(text, load.shared_prefix_tokens)
        conversations: list[Conversation] = []
        for index in range(load.concurrency):
            first = f"\n# part {make_nonce()}\n" if load.shared_prefix_tokens else f"# part {make_nonce()}\n"
            pieces = [(first if turn == 0 else "\n") + self._source.take(room) for turn in range(load.turns)]
            conversations.append(TextConversation(
                load, sizer, prefix if load.shared_prefix_tokens else "", pieces, seed + 1000 * index, self._model,
                is_prefix_known=index > 0,
            ))  # fmt: skip
        return conversations


def _read(workload: Workload, base_dir: Path | None) -> tuple[Sequence[Turn], ...]:
    if not workload.recording:
        raise BadFileError(f"workload `{workload.name}` has `text: recorded`, but no `recording`")
    return read_recording((base_dir or Path.cwd()) / Path(workload.recording).expanduser())
