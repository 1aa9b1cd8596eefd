"""The upstream engine's own start-up arithmetic (0.1.2 to 0.2.1): slot, KV and state bytes, slots and pages.

Pure functions on integers. They reproduce what the engine computes, its refusals byte for byte included; what it
never checks (workspace, graphs, prefill activations) is `freetoken_memory.py`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.checkpoint.shape import Experts, ModelShape

#: `max(kv_reserve_tokens, ...)` of the engine where no flag is given.
DEFAULT_RESERVE_TOKENS = 8192
#: Marlin's kernel indexes at most this many slots in one pool.
MARLIN_SLOT_CAP = 992


@dataclass(frozen=True)
class AutoPlan:
    """What the engine's automatic plan comes to: slots and KV pages."""

    slots: int
    pages: int
    has_overlap: bool


@dataclass(frozen=True)
class AutoRefusal:
    """The engine's `cache budget too small`: the two byte counts that its message prints."""

    needed_bytes: int
    budget_bytes: int
    slots: int
    pages: int

    @property
    def message(self) -> str:
        """The sentence of the engine, without its advice."""
        return (
            f"cache budget too small: minimum plan (moe={self.slots} slots, kv={self.pages} pages) "
            f"needs {self.needed_bytes} B > budget {self.budget_bytes} B"
        )


def upstream_auto_plan(
    free_bytes: int,
    ratio: float,
    weight_bytes: int,
    fixed_bytes: int,
    page_bytes: int,
    slot_bytes: int,
    experts: int,
    layers: int,
    *,
    overlap: bool = True,
    reserve_tokens: int = DEFAULT_RESERVE_TOKENS,
    page_tokens: int = 1,
    slot_cap: int | None = None,
    pool_minimum_tokens: int = 0,
) -> AutoPlan | AutoRefusal:
    """Slots and KV pages that the engine gives itself, or its refusal.

    `free_bytes` is B, read after the CUDA context and before any weight; `weight_bytes` is W, what loading the
    dense part took; `fixed_bytes` is F, the recurrent-state pool. Experts are greedy: KV gets the reserve and less
    than one slot's worth more until every expert has a slot.
    """
    budget = int(ratio * free_bytes) - weight_bytes - fixed_bytes
    cap = min(layers * experts, slot_cap) if slot_cap is not None else layers * experts
    has_overlap = overlap and cap >= 2 * experts
    least = 2 * experts if has_overlap else experts
    reserve = -(-max(reserve_tokens, pool_minimum_tokens) // page_tokens)
    slots = min(max((budget - reserve * page_bytes) // slot_bytes, least), cap)
    pages = max((budget - slots * slot_bytes) // page_bytes, reserve)
    needed = slots * slot_bytes + pages * page_bytes
    if needed > budget:
        return AutoRefusal(needed, budget, slots, pages)
    return AutoPlan(slots, pages, has_overlap)


def compute_slot_bytes(experts: Experts, kernel: str = "triton") -> int:
    """Bytes of one expert slot on the GPU for the engine's kernel of this format."""
    hidden, inter = experts.hidden_size, experts.intermediate_size
    rows = (experts.projections - 1) * inter  # gate and up, or up alone
    match experts.format:
        case "bf16" | "f16" | "f32":
            return 2 * (rows + inter) * hidden
        case "fp8_block":
            scales = _padded_scales(rows // 128, hidden // 128) + _padded_scales(hidden // 128, inter // 128)
            return (rows + inter) * hidden + 2 * scales
        case "nvfp4":
            each = 4 if kernel in ("triton", "w4a4") else 0  # a global scale a row, fp32
            return rows * (hidden // 2 + hidden // 16 + each) + hidden * (inter // 2 + inter // 16 + each)
        case "mxfp4":
            bias = 2
            return rows * (hidden // 2 + hidden // 32 + bias) + hidden * (inter // 2 + inter // 32 + bias)
        case "ds_fp4":
            return rows * (hidden // 2 + hidden // 32) + hidden * (inter // 2 + inter // 32)
        case _:  # gguf: the file's own rows
            return experts.expert_bytes


def _padded_scales(rows: int, columns: int) -> int:
    """Elements of a bf16 scale table whose columns are widened until its bytes are a multiple of 16."""
    while rows * columns * 2 % 16:
        columns += 1
    return rows * columns


def resident_alpha_bytes(experts: Experts, kernel: str = "triton") -> int:
    """Bytes that per-expert global scales keep on the GPU beside the slots, by kernel."""
    each = {"w4a4": 8, "marlin": 4, "b12x": 8}.get(kernel, 0) if experts.format == "nvfp4" else 0
    return each * experts.count


def compute_slot_cap(experts: Experts, kernel: str = "triton") -> int:
    """Most slots that the kernel can index."""
    return min(experts.count, MARLIN_SLOT_CAP) if kernel == "marlin" else experts.count


def compute_kv_bytes(shape: ModelShape, swa_ratio: float = 0.2) -> int:
    """Bytes of one token in the KV cache; it is never quantised.

    Sliding layers (radix cache) keep `swa_ratio` of the tokens and an 8 B map; MLA layers keep their latent.
    """
    a = shape.attention
    full = 2 * a.head_dim * a.kv_heads * 2 * a.count("full")
    latent = ((a.latent_dim or 0) * a.count("mla") + (a.index_head_dim or 0) * a.index_layers) * 2
    window = compute_window_token_bytes(shape)
    return full + latent + (int(swa_ratio * window) + 8 if window else 0)


def compute_window_token_bytes(shape: ModelShape) -> int:
    """Bytes of one token in all sliding-window layers; 0 without any."""
    a = shape.attention
    return 2 * (a.sliding_head_dim or a.head_dim) * (a.sliding_kv_heads or a.kv_heads) * 2 * a.count("sliding")


def compute_state_slots(max_running_requests: int, *, has_prefix_cache: bool = True) -> int:
    """Recurrent states in the pool: running requests, snapshots of the prefix cache, one for padding."""
    if not has_prefix_cache:
        return max_running_requests + 1
    return 4 * max_running_requests + max(4, int(2 * max_running_requests)) + 1


def compute_fixed_bytes(
    shape: ModelShape, max_running_requests: int, *, has_prefix_cache: bool = True, state_bytes: int = 4
) -> int:
    """F: the state pool of a hybrid model, or the window floor of a sliding-window one."""
    state = shape.state_bytes_per_sequence(state_bytes, 2)
    fixed = state * compute_state_slots(max_running_requests, has_prefix_cache=has_prefix_cache) if state else 0
    window = compute_window_token_bytes(shape)
    if window and shape.attention.sliding_window:
        fixed += window * max_running_requests * (2 * shape.attention.sliding_window + 16 + 128 + 2)
    return fixed


def compute_rope_bytes(shape: ModelShape) -> int:
    """The fp32 table of rotary cosines and sines for every position."""
    return shape.max_position_tokens * shape.rotary_dim * 4


def graph_batch_sizes(max_running_requests: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, then multiples of 8, up to the most, and the most itself."""
    sizes = [size for size in (1, 2, 4) if size <= max_running_requests]
    sizes += list(range(8, max_running_requests + 1, 8))
    return tuple(sorted({*sizes, max_running_requests}))


def choose_page_tokens(shape: ModelShape, attention: str | None) -> int:
    """KV page size that a family or backend forces; 1 otherwise."""
    forced = {"deepseek_v4": 128, "minimax_m3": 128, "qwen4_exp": 64}
    for family, tokens in forced.items():
        if shape.family.startswith(family):
            return tokens
    return 64 if attention is not None and "trtllm" in attention else 1
