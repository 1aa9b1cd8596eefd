"""An adapter and a planner for the fake engine: what the apply loop needs of other rooms, with known arithmetic.

Slots take 4,096 B each out of a fixed budget; what a failed start taught (residuals) is taken off first.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from freetoken.adapters.base import EngineAdapter, Failure, Knob, LaunchSpec
from freetoken.adapters.control import ControlClient
from freetoken.checkpoint.shape import Attention, Experts, ModelShape, TensorGroup
from freetoken.deploy.tools import Tools
from freetoken.errors import FtError
from freetoken.hardware.model import Disk, Hardware, Ram
from freetoken.planner.memory import Ledger, Limits, Line, MemoryModel, ResolvedSettings
from freetoken.planner.plan import Plan, PlanRequest, Refusal
from freetoken.supervisor.launch import KeeperPolicy
from freetoken.units import GIB, MIB

ENGINE = Path(__file__).with_name("fake_engine.py")
SLOT_BYTES = 4096
#: Slots that the fake machine holds when nothing has been learnt yet.
MOST_SLOTS = 100
OOM = re.compile(r"FakeOutOfMemory: .* need (\d+) B more than there is")


class FakeAdapter(EngineAdapter):
    name = "native"
    title = "fake"
    knobs = (Knob(name="expert_slots", cost="live"), Knob(name="kv_tokens", cost="live"))
    is_embedded = True

    @property
    def memory_model(self) -> MemoryModel:
        raise NotImplementedError("the fake planner needs none")

    @property
    def limits(self) -> Limits:
        raise NotImplementedError("the fake planner needs none")

    def make_launch_spec(
        self, plan: Plan, *, interpreter: str | None = None, engine_env: dict[str, str] | None = None,
        extra_args: tuple[str, ...] = (), api_key_env: str | None = None,
    ) -> LaunchSpec:  # fmt: skip
        s = plan.settings
        options = {
            "--port": plan.port, "--strategy": s.strategy, "--expert-slots": s.expert_slots, "--kv-tokens": s.kv_tokens,
            "--prefill-chunk-tokens": s.prefill_chunk_tokens, "--served-model-name": plan.served_model_name,
        }  # fmt: skip
        if api_key_env:
            options["--api-key-env"] = api_key_env
        flags = [str(part) for pair in options.items() for part in pair]
        return LaunchSpec(
            argv=(sys.executable, str(ENGINE), *flags, *extra_args),
            env=engine_env or {},
            secret_env=(api_key_env,) if api_key_env else (),
            shortened_log=r"Adjust max_tokens to \d+",
            host=plan.host,
            port=plan.port,
            stall_timeout_s=2.0,
            ready_timeout_s=60.0,
            grace_s=1.0,
        )

    def classify_failure(self, text: str, exit_code: int | None = None) -> Failure | None:
        found = OOM.search(text)
        if found:
            missing = int(found[1])
            return Failure(kind="ram_oom", cause=f"{missing} B are missing", line="expert_slots", missing_bytes=missing)
        if "CUDA out of memory" in text:
            return Failure(kind="vram_oom", cause="out of VRAM in the prefill", line="prefill_transient")
        return None


def make_shape() -> ModelShape:
    experts = Experts(
        layers=4, per_layer=32, top_k=4, hidden_size=64, intermediate_size=64, format="f32", expert_bytes=SLOT_BYTES
    )
    return ModelShape(
        name="fake", family="qwen3_moe", architecture="Qwen3MoeForCausalLM", layers=4, hidden_size=64, vocab_size=256,
        max_position_tokens=8192, dtype="f32", experts=experts,
        attention=Attention(kinds=("full",) * 4, heads=4, kv_heads=2, head_dim=16),
        dense=TensorGroup(bytes=MIB), embedding=TensorGroup(bytes=MIB),
    )  # fmt: skip


def make_hardware(_: Path | None = None) -> Hardware:
    return Hardware(
        name="fake machine",
        ram=Ram(total_bytes=16 * GIB, available_bytes=8 * GIB),
        disk=Disk(free_bytes=100 * GIB),
    )


def make_plan(request: PlanRequest, adapter: EngineAdapter, force: bool) -> Plan | Refusal:
    recipe = request.recipe
    learnt = sum(one.bytes for one in request.calibration.residuals if one.key == "expert_slots")
    most = MOST_SLOTS - -(-learnt // SLOT_BYTES)
    wanted = recipe.settings.expert_slots
    slots = most if wanted == "auto" else int(wanted)  # type: ignore[arg-type]
    if slots > most and not force:
        return Refusal(
            recipe_name=recipe.name, engine="native", model_name="fake",
            message=f"`{recipe.name}` needs {slots} slots, {most} fit", missing_bytes=(slots - most) * SLOT_BYTES,
        )  # fmt: skip
    return _plan(request, slots, is_forced=slots > most)


def _plan(request: PlanRequest, slots: int, *, is_forced: bool) -> Plan:
    recipe, settings = request.recipe, request.recipe.settings
    resolved = ResolvedSettings(
        device="cpu",
        expert_slots=slots,
        kv_tokens=2048 if settings.kv_tokens == "auto" else settings.kv_tokens,
        strategy="offload" if settings.strategy == "auto" else settings.strategy,
        prefill_chunk_tokens=256 if settings.prefill_chunk_tokens == "auto" else settings.prefill_chunk_tokens,
    )
    lines = (
        Line(key="runtime", label="runtime", bytes=32 * MIB),
        Line(key="expert_slots", label="expert slots", bytes=slots * SLOT_BYTES),
        Line(key="kv_cache", label="KV cache", bytes=resolved.kv_tokens * 1024),
    )
    return Plan(
        recipe_name=recipe.name, engine="native", engine_version=request.engine_version, model_name="fake",
        model_path=request.model_path, settings=resolved,
        ram=Ledger(kind="ram", total_bytes=16 * GIB, available_bytes=8 * GIB, lines=lines),
        disk=Ledger(kind="disk", total_bytes=100 * GIB, available_bytes=100 * GIB),
        host=recipe.serve.host, port=recipe.serve.port, served_model_name=recipe.name, is_forced=is_forced,
    )  # fmt: skip


def locate(ref: Any, base_dir: Path) -> Any:
    return SimpleNamespace(path=Path("/models/fake"), shape=make_shape(), download_bytes=0, note="")


def fetch(ref: Any, progress: Any) -> Path:
    raise FtError("the fake model is always here")


def make_tools(**changes: Any) -> Tools:
    values: dict[str, Any] = {
        "find_adapter": lambda _: FakeAdapter(),
        "probe": make_hardware,
        "locate": locate,
        "fetch": fetch,
        "make_plan": make_plan,
        "connect": lambda url, key: ControlClient(url, key, timeout_s=5.0),
        "keeper_policy": KeeperPolicy(max_restarts=2, window_s=60, backoff_s=0.05, poll_s=0.1, log_bytes=64 << 10),
    }
    return Tools(**(values | changes))
