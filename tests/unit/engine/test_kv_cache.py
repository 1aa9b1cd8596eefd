from __future__ import annotations

import mmap
import struct

import pytest
import torch
from transformers.cache_utils import DynamicCache

from freetoken.engine.kv_cache import KvPool
from freetoken.engine.sequence import find_cache_argument
from freetoken.errors import DoesNotFitError
from tests.fakes.stock_engine import CONFIGS, make_model


def make_pool(family: str = "qwen3_moe", tokens: int = 64, **options: bool) -> KvPool:
    return KvPool(CONFIGS[family](), tokens, dtype=torch.float32, device=torch.device("cpu"), **options)


def write(pool: KvPool, cache: object, values: list[float]) -> None:
    """Writes one token for every value into every layer; heads and dims all hold the value."""
    g = pool.geometry
    states = torch.tensor(values).view(1, 1, -1, 1)
    for index in g.windows:
        keys, read = cache.update(  # type: ignore[attr-defined]
            states.expand(1, g.kv_heads, -1, g.key_dim), -states.expand(1, g.kv_heads, -1, g.value_dim), index
        )
        assert torch.equal(keys[..., 0], -read[..., 0])


def read(pool: KvPool, start: int, count: int) -> list[float]:
    return [float(one) for one in pool.stores[0][0][start : start + count, 0, 0]]


def count_allocated_bytes(tensor: torch.Tensor) -> int:
    """Bytes of whole pages of `tensor` that the kernel has given memory (or swap) to."""
    page = mmap.PAGESIZE
    first, last = -(-tensor.data_ptr() // page), (tensor.data_ptr() + tensor.nbytes) // page
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = struct.unpack(f"={last - first}Q", file.read(8 * (last - first)))
    return page * sum(entry >> 62 != 0 for entry in entries)


@pytest.mark.parametrize(("family", "bytes_per_token", "has_state"), [
    ("qwen3_moe", 3 * 2 * (8 + 8) * 4, False), ("gpt_oss", 4 * 2 * (8 + 8) * 4, False),
    ("qwen3_5_moe", 1 * 2 * (8 + 8) * 4, True),
])  # fmt: skip
def test_bytes_per_token_are_those_of_the_layers_with_keys_and_values(
    family: str, bytes_per_token: int, has_state: bool
) -> None:
    pool = make_pool(family)
    assert (pool.geometry.bytes_per_token, pool.geometry.has_state) == (bytes_per_token, has_state)
    assert pool.bytes == 64 * bytes_per_token


def test_the_store_is_really_allocated_when_it_is_made() -> None:
    pool = make_pool(tokens=1 << 17)
    allocated = sum(count_allocated_bytes(store) for pair in pool.stores.values() for store in pair)
    assert allocated >= 0.99 * pool.bytes
    # What the test counts is not there of itself: pages that the kernel has only promised. (Mapped here, since
    # an allocator hands out pages again that are there from their last use.)
    promised = torch.frombuffer(mmap.mmap(-1, 16 << 20), dtype=torch.uint8)
    assert count_allocated_bytes(promised) < 0.1 * promised.nbytes


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_logits_equal_those_with_the_library_cache_for_any_chunk(family: str, chunk: int) -> None:
    model, pool = make_model(family), make_pool(family)
    ids = [(7 * place + place * place) % 300 for place in range(30)]
    # Something else lies before it in the store, and sliding windows of 8 are passed.
    pool.reserve([1] * 5, 11)
    reservation = pool.reserve(ids, 34)
    assert reservation is not None
    name = find_cache_argument(model)
    caches = (reservation.cache, DynamicCache(config=model.config))
    for start in range(0, len(ids), chunk):
        part = torch.tensor([ids[start : start + chunk]])
        with torch.inference_mode():
            ours, theirs = (model(input_ids=part, use_cache=True, **{name: cache}).logits for cache in caches)
        assert torch.allclose(ours, theirs, atol=1e-5), f"at {start}"
    assert reservation.length == 30


def test_more_tokens_than_reserved_are_refused() -> None:
    pool = make_pool()
    reservation = pool.reserve([1, 2], 3)
    assert reservation is not None
    with pytest.raises(RuntimeError, match="4 tokens do not fit the 3 reserved"):
        write(pool, reservation.cache, [1.0, 2.0, 3.0, 4.0])


def test_a_request_waits_while_others_hold_the_room() -> None:
    pool = make_pool(tokens=64)
    first = pool.reserve([1], 40)
    assert first is not None
    assert pool.reserve([1], 25) is None
    pool.release(first)
    assert pool.reserve([1], 64) is not None


def test_a_finished_request_lends_its_start_to_the_next_one() -> None:
    pool = make_pool(tokens=100)
    first = pool.reserve(list(range(20)), 30)
    assert first is not None
    write(pool, first.cache, [float(one) for one in range(25)])
    pool.release(first, list(range(25)))
    assert (pool.reserved_tokens, pool.cached_tokens) == (0, 25)
    second = pool.reserve([*range(22), 99, 98], 40)
    assert second is not None
    assert (second.cached_tokens, second.length, pool.cached_tokens) == (22, 22, 25)
    assert read(pool, second.extent.start, 22) == [float(one) for one in range(22)]


def test_a_kept_start_is_taken_over_in_place_where_there_is_no_room_for_both() -> None:
    pool = make_pool(tokens=50)
    first = pool.reserve(list(range(20)), 30)
    other = pool.reserve([7], 10)
    assert first is not None
    assert other is not None
    write(pool, first.cache, [float(one) for one in range(20)])
    write(pool, other.cache, [100.0] * 10)
    pool.release(first, list(range(20)))
    second = pool.reserve([*range(18), 99], 40)
    assert second is not None
    assert (second.cached_tokens, pool.cached_tokens, pool.reserved_tokens) == (18, 0, 50)
    assert read(pool, second.extent.start, 18) == [float(one) for one in range(18)]
    assert read(pool, other.extent.start, 10) == [100.0] * 10


def test_kept_starts_give_way_oldest_first() -> None:
    pool = make_pool(tokens=60)
    for base in (0, 100, 200):
        reservation = pool.reserve([base], 20)
        assert reservation is not None
        write(pool, reservation.cache, [float(base)] * 20)
        pool.release(reservation, list(range(base, base + 20)))
    assert pool.reserve([5], 30) is not None
    assert [int(entry.token_ids[0]) for entry in pool.prefixes.entries] == [200]


@pytest.mark.parametrize(("family", "options"), [("qwen3_5_moe", {}), ("qwen3_moe", {"reuse_prefixes": False})])
def test_nothing_is_kept_with_linear_attention_or_when_told_not_to(family: str, options: dict[str, bool]) -> None:
    pool = make_pool(family, **options)
    reservation = pool.reserve([1], 20)
    assert reservation is not None
    pool.release(reservation, list(range(20)))
    assert (pool.can_reuse_prefixes, pool.cached_tokens, pool.table.free_tokens) == (False, 0, 64)


def test_flush_drops_what_is_kept_and_nothing_that_runs() -> None:
    pool = make_pool()
    first, second = pool.reserve([1], 20), pool.reserve([2], 20)
    assert first is not None
    assert second is not None
    pool.release(first, list(range(20)))
    assert (pool.flush(), pool.cached_tokens, pool.reserved_tokens) == (20, 0, 20)


@pytest.mark.parametrize("tokens", [30, 64, 500])
def test_a_resize_keeps_what_running_requests_have_written(tokens: int) -> None:
    pool = make_pool(tokens=64)
    gone, kept = pool.reserve([1], 30), pool.reserve([2], 30)
    assert gone is not None
    assert kept is not None
    write(pool, kept.cache, [5.0] * 12)
    pool.release(gone, list(range(30)))
    pool.resize(tokens)
    assert (pool.tokens, pool.bytes) == (tokens, tokens * pool.geometry.bytes_per_token)
    assert read(pool, kept.extent.start, 12) == [5.0] * 12
    write(pool, kept.cache, [6.0] * 18)
    assert read(pool, kept.extent.start, 30) == [5.0] * 12 + [6.0] * 18


def test_a_resize_below_what_runs_is_refused_with_the_numbers() -> None:
    pool = make_pool(tokens=64)
    assert pool.reserve([2], 30) is not None
    with pytest.raises(DoesNotFitError, match="running requests hold 30 tokens of KV, 29 were asked for"):
        pool.resize(29)


def test_a_resize_that_finds_no_memory_leaves_the_old_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(tokens=64)
    reservation = pool.reserve([2], 30)
    assert reservation is not None
    write(pool, reservation.cache, [5.0] * 12)
    made, real = [], pool._make_store

    def make_store(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(tokens)
        if len(made) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(tokens)

    monkeypatch.setattr(pool, "_make_store", make_store)
    with pytest.raises(torch.OutOfMemoryError):
        pool.resize(200)
    assert made == [200, 200, 64]
    assert (pool.tokens, pool.bytes) == (64, 64 * pool.geometry.bytes_per_token)
    write(pool, reservation.cache, [6.0] * 18)
    assert read(pool, reservation.extent.start, 30) == [5.0] * 12 + [6.0] * 18
