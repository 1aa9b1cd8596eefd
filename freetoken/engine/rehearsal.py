"""A loaded model tried on a few tokens before anyone waits for it: do its layers' steps add up, can they be captured?

The model itself is called, so that a layer gets what this version of `transformers` gives it: names of arguments and
shapes of positions change between versions. Only the routed experts of the prompt are stood in for; nothing of it is
counted, and slots hold what they held before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from freetoken.engine.fast_modules import check_close, first_line, noise, stand_in
from freetoken.engine.sequence import find_cache_argument

if TYPE_CHECKING:
    from freetoken.engine.decode_graphs import DecodeGraphs
    from freetoken.engine.decode_layers import Layer

_PROMPT, _TOKEN = (1, 21, 34, 55, 8), (13,)
Forward = Callable[..., Any]


@torch.inference_mode()
def check_layers(model: Any, layers: list[Layer], device: torch.device, note: Callable[[str], None]) -> None:
    """Raises where the steps of a layer do not add up to its own forward; one layer of each kind is tried.

    Where an attention cut in three is wrong, it stays whole in all layers, and `note` is told.
    """
    kinds = list({layer.delta is not None: layer for layer in layers}.values())
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(stand_in(layer.block.module))
        cache = DynamicCache(config=model.config)
        with ExitStack() as fed:
            for layer in kinds:
                fed.enter_context(_replaced(layer, _feed_noise(layer)))
            _call(model, cache, _PROMPT, 0, device)
        for layer in kinds:
            try:
                _check(model, layer, cache, device)
            except Exception as error:
                if layer.attention is None:
                    raise
                for one in layers:
                    one.attention = None
                _check(model, layer, cache, device)
                note(f"attention is not replayed as graphs, which is slower: {first_line(error)}")


@torch.inference_mode()
def rehearse(model: Any, graphs: DecodeGraphs) -> None:
    """Has all graphs captured by a decode step that nobody asked for, so that no request waits for that."""
    device = graphs.runtime.device
    try:
        cache = DynamicCache(config=model.config)
        with ExitStack() as stack:
            for layer in graphs.layers:
                stack.enter_context(stand_in(layer.block.module))
            _call(model, cache, _PROMPT, 0, device)
        with graphs.rehearsing(), graphs.runtime.decode():
            _call(model, cache, _TOKEN, len(_PROMPT), device)
    except Exception as error:
        graphs.turn_off(f"{type(error).__name__}: {first_line(error)}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the capturing stream has held for its first runs


def _call(model: Any, cache: Any, token_ids: tuple[int, ...], start: int, device: torch.device) -> None:
    ids = torch.tensor([token_ids], device=device) % model.config.vocab_size
    positions = torch.arange(start, start + len(token_ids), device=device).unsqueeze(0)
    arguments = {find_cache_argument(model): cache}
    model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **arguments)


@contextmanager
def _replaced(layer: Layer, forward: Forward) -> Iterator[None]:
    layer.module.forward = forward
    try:
        yield
    finally:
        del layer.module.forward


def _feed_noise(layer: Layer) -> Forward:
    """The layer's own forward on numbers as large as each other: beside a large residual no error would be seen."""

    def forward(hidden: torch.Tensor, **kwargs: Any) -> Any:
        return layer.original(noise(*hidden.shape, device=hidden.device, dtype=hidden.dtype), **kwargs)

    return forward


def _check(model: Any, layer: Layer, cache: Any, device: torch.device) -> None:
    """One token through the model, in which the layer is compared with its steps."""
    is_checked = False

    def forward(hidden: torch.Tensor, **kwargs: Any) -> Any:
        nonlocal is_checked
        name = "cache" if "cache" in kwargs else "past_key_values"
        token = noise(*hidden.shape, device=hidden.device, dtype=hidden.dtype, seed=6)
        mine = _copy_one(kwargs[name], layer.cache_index)
        right = layer.original(token, **kwargs)
        got = layer.step_plainly(token, kwargs | {name: mine}, mine)
        check_close(got, right, f"layer {type(layer.module).__name__} by its parts")
        is_checked = True
        return right

    with _replaced(layer, forward):
        _call(model, copy.deepcopy(cache), _TOKEN, len(_PROMPT), device)
    if not is_checked:
        raise RuntimeError(f"a layer {type(layer.module).__name__} was not called")


def _copy_one(cache: Any, index: int) -> Any:
    """The cache with one layer's states of its own."""
    copied = copy.copy(cache)
    copied.layers = [copy.deepcopy(one) if number == index else one for number, one in enumerate(cache.layers)]
    return copied
