"""A byte-level tokenizer with a chat template, and a model that says what its prompt tells it to.

`Parrot` keeps token ids in the KV cache it is given and reads them back from there, so a KV store that loses,
mixes up or moves tokens wrongly changes what it says.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

from freetoken.engine.generation import GenerationDefaults
from freetoken.engine.scheduler import Engine
from freetoken.server.text import TextCodec
from tests.fakes.stock_engine import CountingExperts, make_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}(called {{ call.function.name }}
 {%- for name, value in call.function.arguments|items %} {{ name }}={{ value }}{% endfor %}){% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}
"""


def make_codec(*, template: str | None = CHAT_TEMPLATE) -> TextCodec:
    """Every byte is a token; special tokens follow from 256 on."""
    # Byte-level vocabularies write bytes as printable letters: the alphabet, in the order of the bytes.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    backend = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False) for text in PLAIN_ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
    return TextCodec(tokenizer)


class Parrot(torch.nn.Module):
    """Says what stands between the last `[[` and `]]` of its prompt, then ends; else counts on from the last byte."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__()
        self.config = Qwen3MoeConfig(
            vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=8, max_position_embeddings=4096, num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        self.codec = codec
        self.delay_s = 0.0
        self.fail_on = ""
        self.end, self.start = codec.vocabulary["<|im_end|>"], codec.vocabulary["<|im_start|>"]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        use_cache: bool,
        logits_to_keep: int,
    ) -> SimpleNamespace:
        states = input_ids.float().view(1, 1, -1, 1).expand(1, 1, -1, 8)
        keys, _ = past_key_values.update(states, states, 0)
        ids = [int(one) for one in keys[0, 0, :, 0]]
        assert len(ids) == int(position_ids[0, -1]) + 1
        if self.delay_s:
            time.sleep(self.delay_s)
        text = self.codec.decode(ids, skip_special=False)
        if self.fail_on and self.fail_on in text:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        logits = torch.full((1, 1, 300), -50.0)
        logits[0, 0, self._next(ids, text)] = 50.0
        return SimpleNamespace(logits=logits)

    def _next(self, ids: list[int], text: str) -> int:
        opened, closed = _find_last(ids, [91, 91]), _find_last(ids, [93, 93])
        if opened is None or closed is None or closed < opened:
            return (ids[-1] + 1) % 256
        script, after = ids[opened + 2 : closed], ids[closed + 2 :]
        if self.start in after:
            # `<|im_end|>`, a line break, `<|im_start|>`, `assistant` and a line break stand between
            after = after[13:]
            if after[:1] == [self.codec.vocabulary["<think>"]] and script[:1] != after[:1]:
                after = after[2:]
        return script[len(after)] if len(after) < len(script) else self.end


def _find_last(ids: list[int], wanted: list[int]) -> int | None:
    places = [place for place in range(len(ids) - len(wanted) + 1) if ids[place : place + len(wanted)] == wanted]
    return places[-1] if places else None


def make_parrot_engine(codec: TextCodec, **changes: Any) -> Engine:
    """An engine around a `Parrot`; `engine.loaded.model` is it."""
    reuse = changes.pop("reuse_prefixes", True)
    shape = SimpleNamespace(state_bytes_per_sequence=lambda **_: 0)
    model = Parrot(codec)
    loaded: Any = SimpleNamespace(
        model=model, config=model.config, shape=shape, device=torch.device("cpu"), dtype=torch.float32,
        experts=CountingExperts(), memory=lambda: {"dense_weights": 1000}, close=lambda: None,
        engine_config=SimpleNamespace(strategy="offload"), graphs=None,
    )  # fmt: skip
    defaults = GenerationDefaults(stop_token_ids=frozenset({codec.vocabulary["<|im_end|>"]}))
    config: Any = make_config(**({"strategy": "offload", "kv_tokens": 1024} | changes))
    return Engine(loaded, config, defaults=defaults, reuse_prefixes=reuse)
