"""The KV store of all requests: preallocated, counted in tokens, resized live; and the `Cache` a request sees of it.

Keys and values of every full and sliding attention layer stand in one tensor a layer, `[tokens, KV heads, head
dim]`. A request owns a contiguous stretch of tokens (`kv_extents.py`), so a layer hands attention views and no
copies. Sliding layers keep all their tokens too and show the window as a view: that costs memory on such models
(counted by `ModelShape.kv_bytes_per_token` alike), and buys prefix reuse. Linear-attention layers keep
`transformers`' own state layers, one set a request; where a model has any, or a layer kind this room does not
know, prefixes are not reused, because a state cannot be cut back to a shorter prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from freetoken.engine.kv_extents import Extent, ExtentTable
from freetoken.engine.prefix_cache import Entry, PrefixCache
from freetoken.errors import DoesNotFitError


@dataclass(frozen=True)
class KvGeometry:
    """What one token needs: layers that are pooled (index -> window or None), heads, head dims, element bytes."""

    windows: dict[int, int | None]
    kv_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int
    has_state: bool  # linear attention, or a kind of layer that is not pooled

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all pooled layers."""
        return len(self.windows) * self.kv_heads * (self.key_dim + self.value_dim) * self.element_bytes


def read_geometry(config: Any, dtype: torch.dtype) -> KvGeometry:
    """The geometry of the model with this text config, by the layers that `transformers` itself would make for it."""
    windows: dict[int, int | None] = {}
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            windows[index] = None
        elif type(layer) is DynamicSlidingWindowLayer:
            windows[index] = int(layer.sliding_window)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_dim = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or head_dim
    return KvGeometry(
        windows=windows,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        key_dim=key_dim,
        value_dim=getattr(config, "v_head_dim", None) or head_dim,
        element_bytes=dtype.itemsize,
        has_state=len(windows) < len(layers),
    )


class PooledLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of one request: writes into the request's extent, and shows attention a view of it."""

    is_compileable = False
    is_croppable = True

    def __init__(self, pool: KvPool, layer_index: int, extent: Extent, length: int) -> None:
        super().__init__()
        self.pool, self.layer_index, self.extent, self.length = pool, layer_index, extent, length
        self.window = pool.geometry.windows[layer_index]
        self.is_sliding = self.window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the store exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends `[1, heads, n, dim]` and returns the keys and values that these `n` queries may see."""
        count = key_states.shape[-2]
        if self.length + count > self.extent.tokens:
            raise RuntimeError(
                f"{self.length + count} tokens do not fit the {self.extent.tokens} reserved for the request"
            )
        keys, values = self.pool.stores[self.layer_index]
        first, _ = self._visible(count)
        start, end = self.extent.start + self.length, self.extent.start + self.length + count
        keys[start:end] = key_states[0].transpose(0, 1)
        values[start:end] = value_states[0].transpose(0, 1)
        self.length += count
        self.extent.used = max(self.extent.used, self.length)
        seen = slice(self.extent.start + first, end)
        return keys[seen].transpose(0, 1).unsqueeze(0), values[seen].transpose(0, 1).unsqueeze(0)

    def _visible(self, query_length: int) -> tuple[int, int]:
        """(first visible token, how many) for the next `query_length` queries."""
        first = 0 if self.window is None else max(0, self.length - self.window + 1)
        return first, self.length + query_length - first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(KV length, KV offset) of the mask for the next `query_length` queries."""
        first, count = self._visible(query_length)
        return count, first

    def get_seq_length(self) -> int:
        """Tokens written so far."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that the request may write."""
        return self.extent.tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens."""
        self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length = 0


@dataclass(eq=False)
class Reservation:
    """Room for one request: its extent, the `Cache` to call the model with, and the tokens already in it."""

    extent: Extent
    cache: Cache
    cached_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens written so far."""
        return int(self.cache.get_seq_length())


@dataclass(frozen=True)
class KvUse:
    """Tokens of the store by who has them, at one moment between two changes."""

    reserved: int
    cached: int
    total: int


class KvPool:
    """A store of `tokens` tokens. The scheduler's thread alone may change it; `use` and `bytes` may be read by any."""

    def __init__(
        self, config: Any, tokens: int, *, dtype: torch.dtype, device: torch.device, reuse_prefixes: bool = True
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.geometry = read_geometry(config, dtype)
        self.can_reuse_prefixes = reuse_prefixes and not self.geometry.has_state
        self.prefixes = PrefixCache()
        self.table = ExtentTable(tokens, self._move)
        self.stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stores = {index: self._make_store(tokens) for index in self.geometry.windows}
        #: Replaced as a whole after every change, so that other threads never see half of one.
        self.use = KvUse(0, 0, tokens)

    @property
    def tokens(self) -> int:
        """Tokens that the store holds."""
        return self.table.capacity

    @property
    def bytes(self) -> int:
        """Bytes that the store really takes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.stores.values())

    @property
    def cached_tokens(self) -> int:
        """Tokens held by finished requests, given up as soon as somebody needs the room."""
        return self.prefixes.tokens

    @property
    def reserved_tokens(self) -> int:
        """Tokens that running requests have reserved, written or not."""
        return self.tokens - self.table.free_tokens - self.cached_tokens

    def reserve(self, prompt_ids: Sequence[int], tokens: int) -> Reservation | None:
        """Room for `tokens` tokens, started from a kept prefix where one fits; None while there is no room."""
        if tokens > self.table.free_tokens + self.cached_tokens:
            return None
        entry, shared = None, 0
        if self.can_reuse_prefixes:
            entry, shared = self.prefixes.find(np.asarray(prompt_ids, dtype=np.int64))
        self._make_room(tokens, keep=entry)
        if tokens <= self.table.free_tokens:
            extent = self.table.allocate(tokens)
            if entry is not None:
                self.prefixes.touch(entry)
                self._move(entry.extent.start, extent.start, shared)
        else:
            extent = self._adopt(entry, shared, tokens)
        extent.used = shared
        self._note_use()
        return Reservation(extent, self._make_cache(extent, shared), shared)

    def release(self, reservation: Reservation, written_ids: Sequence[int] | None = None) -> None:
        """Gives the room back; with `written_ids` (whose KV stands there) it is kept while nobody needs the room."""
        extent = reservation.extent
        if written_ids is None or not self.can_reuse_prefixes or not len(written_ids):
            self.table.free(extent)
        else:
            self.table.shrink(extent, len(written_ids))
            extent.used = len(written_ids)
            for unneeded in self.prefixes.add(np.asarray(written_ids, dtype=np.int64), extent):
                self.table.free(unneeded)
        self._note_use()

    def flush(self) -> int:
        """Drops all kept prefixes; the answer is how many tokens they held."""
        dropped = self.cached_tokens
        self._make_room(self.tokens)
        self._note_use()
        return dropped

    def resize(self, tokens: int) -> None:
        """Makes the store `tokens` long; what running requests hold stays, kept prefixes go where they are in the way.

        One layer is copied at a time, so that the transient is one layer and not a second store. Raises
        DoesNotFitError when running requests hold more, MemoryError or torch.OutOfMemoryError when there is no
        memory for it; the old store is then in place again.
        """
        if tokens < self.reserved_tokens:
            raise DoesNotFitError(f"running requests hold {self.reserved_tokens} tokens of KV, {tokens} were asked for")
        while self.table.capacity - self.table.free_tokens > tokens:
            self._drop(self.prefixes.pop_oldest())
        self.table.pack()
        old = self.tokens
        try:
            self._resize_stores(tokens)
        except (MemoryError, RuntimeError):
            self._resize_stores(old)
            raise
        finally:
            self._note_use()
        self.table.set_capacity(tokens)
        self._note_use()

    def _note_use(self) -> None:
        self.use = KvUse(self.reserved_tokens, self.cached_tokens, self.tokens)

    def _resize_stores(self, tokens: int) -> None:
        """Gives every layer's store `tokens` places; the written part of the (packed) extents is kept."""
        kept = max((one.start + one.used for one in self.table.extents), default=0)
        for index, (keys, values) in self.stores.items():
            if keys.shape[0] != tokens:
                fresh = self._make_store(tokens)
                fresh[0][:kept], fresh[1][:kept] = keys[:kept], values[:kept]
                self.stores[index] = fresh

    def _make_store(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed, not merely reserved: a host's lazy pages would make the ledger line a promise instead of a fact."""
        g = self.geometry
        keys = torch.zeros((tokens, g.kv_heads, g.key_dim), dtype=self.dtype, device=self.device)
        return keys, torch.zeros((tokens, g.kv_heads, g.value_dim), dtype=self.dtype, device=self.device)

    def _make_cache(self, extent: Extent, length: int) -> Cache:
        cache = DynamicCache(config=self.config)
        for index in self.geometry.windows:
            cache.layers[index] = PooledLayer(self, index, extent, length)
        return cache

    def _make_room(self, tokens: int, keep: Entry | None = None) -> None:
        """Drops the least recently used prefixes until `tokens` are free, or only `keep` is left."""
        while self.table.free_tokens < tokens:
            oldest = self.prefixes.pop_oldest(keep)
            if oldest is None:
                return
            self._drop(oldest)

    def _adopt(self, entry: Entry | None, shared: int, tokens: int) -> Extent:
        """Turns the extent of `entry` itself into the request's: there is no room for both."""
        if entry is None:  # pragma: no cover - `reserve` has counted that free and kept tokens suffice
            raise RuntimeError(f"no room for {tokens} tokens")
        self.prefixes.entries.remove(entry)
        self.table.shrink(entry.extent, min(shared, tokens))
        self.table.grow(entry.extent, tokens)
        return entry.extent

    def _drop(self, entry: Entry | None) -> None:
        if entry is not None:
            self.table.free(entry.extent)

    def _move(self, source: int, target: int, count: int) -> None:
        """Copies `count` tokens inside the store, layer by layer, so that overlapping ranges are safe."""
        for keys, values in self.stores.values():
            for tensor in (keys, values):
                tensor[target : target + count] = tensor[source : source + count].clone()


def state_bytes(cache: Cache) -> int:
    """Bytes of the recurrent states that `cache` holds now; 0 before its first forward."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = (*layer.conv_states.values(), *layer.recurrent_states.values())
            total += sum(state.nbytes for state in states if state is not None)
    return total
