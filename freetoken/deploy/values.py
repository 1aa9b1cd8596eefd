"""What the apply loop hands back: the diff, the proof, the result. Frozen; `--json` dumps exactly these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from freetoken.planner.plan import Plan

Action = Literal["nothing", "resize", "restart", "launch"]


class DeployModel(BaseModel):
    """Base of the room's values: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Change(DeployModel):
    """One thing that is not as declared, and what it takes to make it so."""

    field: str  # `settings.expert_slots`, `engine.extra_args`, ...
    before: Any = None
    after: Any = None
    cost: Literal["live", "restart"] = "restart"

    def describe(self) -> str:
        """`settings.expert_slots: 512 -> 640 (live)`."""
        return f"{self.field}: {_show(self.before)} -> {_show(self.after)} ({self.cost})"


class Diff(DeployModel):
    """Declared against running, and the least that gets there."""

    action: Action
    reason: str
    changes: tuple[Change, ...] = ()


class Proof(DeployModel):
    """What was seen to work: a generation, a full prefill chunk, and the sizes read back. Seconds, tok/s, tokens."""

    proven_at: str
    #: First token of the very first request, which pays for what is done once.
    cold_ttft_s: float
    ttft_s: float
    decode_tps: float | None
    prompt_tokens: int
    completion_tokens: int
    text: str = ""
    chunk_tokens: int
    chunk_prompt_tokens: int
    chunk_ttft_s: float
    expert_slots: int
    kv_tokens: int
    strategy: str | None = None
    #: Ledger key -> bytes that the engine says it has allocated, where it tells.
    measured_bytes: dict[str, int] = {}
    vram_bytes: int = 0
    ram_bytes: int = 0
    instance_id: str | None = None
    #: Attention backend that the engine says it runs, where it tells.
    attention: str | None = None
    #: Seconds of the start in which kernels were compiled: a first start, which no later one is to be held against.
    compile_s: float = 0.0


class ApplyResult(DeployModel):
    """How `ft apply` ended."""

    kind: Literal["applied", "dry_run"] = "applied"
    name: str
    diff: Diff
    plan: Plan
    run_id: str | None = None
    run_dir: str | None = None
    url: str
    model: str
    argv: tuple[str, ...] = ()
    #: Variables that the engine is given; secrets are named, never shown.
    env: dict[str, str] = {}
    proof: Proof | None = None
    #: What failed starts taught, in words, in the order in which it happened.
    corrections: tuple[str, ...] = ()
    duration_s: float = 0.0


class StopOutcome(DeployModel):
    """How a run ended. `left` are pids that even SIGKILL did not end: the kernel holds them."""

    run_id: str
    name: str
    was_running: bool
    how: str
    is_port_free: bool = True
    #: VRAM of the whole card that came back in the meantime; None without a GPU.
    vram_freed_bytes: int | None = None
    left: tuple[int, ...] = ()
    exit_code: int | None = None
    #: What could not be recorded.
    warning: str | None = None


def _show(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
