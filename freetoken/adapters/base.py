"""What an engine declares to the rest of the tool. Nothing outside an adapter asks which engine it is.

An adapter turns a `Plan` into a `LaunchSpec`, says what it allocates (`MemoryModel`), what it can run at all
(`Limits`), which knobs it has and what turning one costs, and what its log means. It never starts anything.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from freetoken.adapters.replies import MoeHits
    from freetoken.checkpoint.shape import ModelShape
    from freetoken.hardware.model import Hardware
    from freetoken.planner.memory import Limits, MemoryModel, ResolvedSettings
    from freetoken.planner.plan import Plan, PlanRequest

Capability = Literal["live_resize", "hit_counters", "cache_flush", "cancel", "text_only"]


class AdapterModel(BaseModel):
    """Base of adapter values: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Knob(AdapterModel):
    """A setting that may be turned: its recipe field, and whether that needs a restart."""

    name: str  # field of `recipe.model.Settings`
    cost: Literal["live", "restart"]
    choices: tuple[str | int | float | bool, ...] = ()
    low: float | None = None
    high: float | None = None
    changes_answers: bool = False
    #: Choices that need a Python package which not every environment of the engine has, by its import name.
    packages: dict[str, str] = {}


class LaunchSpec(AdapterModel):
    """How to start an engine. Written to `launch.json` before anything is spawned; holds no secret."""

    argv: tuple[str, ...]
    #: Variables added to the environment. Secrets are named in `secret_env`, never put here.
    env: dict[str, str] = {}
    #: Variables taken out of the environment, e.g. `PYTHONPATH` for an engine with a package of our name.
    unset_env: tuple[str, ...] = ()
    #: Names of variables whose values the engine needs and that are inherited at launch, never written down.
    secret_env: tuple[str, ...] = ()
    #: Working folder; None = the run folder.
    cwd: str | None = None
    host: str = "127.0.0.1"
    port: int
    #: Further ports that the engine takes, each checked before the start.
    extra_ports: tuple[int, ...] = ()
    #: Where readiness is read: HTTP 200 with status `ok` (and maintenance `serving` where that is said).
    ready_path: str = "/health"
    #: Pattern of a log line that tells of a request cut short to fit the KV pool; "" where the engine refuses instead.
    shortened_log: str = ""
    #: Longest silence (no progress in /health, no CPU or I/O of the engine's processes) before it counts as hung.
    stall_timeout_s: float = Field(default=600.0, gt=0)
    ready_timeout_s: float = Field(default=3600.0, gt=0)
    #: Seconds that each of SIGINT and SIGTERM gets before the next one.
    grace_s: float = Field(default=10.0, ge=0)


class Failure(AdapterModel):
    """What a log or an error reply means: cause, ledger line, bytes, and the recipe field to change."""

    kind: Literal[
        "vram_oom", "ram_oom", "plan_floor", "kv_floor", "pin_refused", "port_taken", "bad_flag", "bad_checkpoint",
        "unsupported", "no_gpu", "log_full", "killed", "hang", "engine_died", "paging", "unknown",
    ]  # fmt: skip
    cause: str  # one sentence
    line: str | None = None  # key of the ledger line to blame
    missing_bytes: int | None = None  # the exact overshoot where the message has it
    field: str | None = None  # e.g. `settings.prefill_chunk_tokens`
    hint: str | None = None
    excerpt: str = ""  # the log line it was read from


class EngineNeeds(AdapterModel):
    """What the engine asks of a machine with an NVIDIA GPU; `None` and `()` where it asks nothing."""

    compute_capability: str | None = None
    driver: str | None = None
    cuda_toolkit: str | None = None
    tools: tuple[str, ...] = ()


class DefaultSlots(AdapterModel):
    """What an engine's own rule says: slots, or by how many bytes its start is refused, in its words."""

    slots: int = Field(default=0, ge=0)
    missing_bytes: int = Field(default=0, ge=0)
    words: str = ""


class EngineAdapter(ABC):
    """One engine. Stateless; all arguments are values."""

    name: ClassVar[str]
    title: ClassVar[str]  # for people
    known_versions: ClassVar[str] = ""  # a PEP 440 range
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    knobs: ClassVar[tuple[Knob, ...]] = ()
    #: What `ft doctor` holds this machine against.
    needs: ClassVar[EngineNeeds] = EngineNeeds()
    #: True where the engine ships in this package and needs no environment of its own.
    is_embedded: ClassVar[bool] = False
    #: False where this version plans for the engine and does not start it.
    is_launched: ClassVar[bool] = True
    #: Ports it takes, from `serve.port` on.
    port_count: ClassVar[int] = 1
    #: The package that `ft engine install` puts into an environment of its own, and its versions, newest first.
    distribution: ClassVar[str | None] = None
    installable: ClassVar[tuple[str, ...]] = ()
    #: Bytes on disk that such an environment takes, by extra (`""` = none); an estimate.
    install_bytes: ClassVar[dict[str, int]] = {}

    #: Flags that a recipe from elsewhere may carry in `engine.extra_args`, each with the pattern of its value ("" =
    #: it takes none). Nothing that loads code, opens the network wider, names a file or turns a check off.
    shared_args: ClassVar[dict[str, str]] = {}
    #: The same for variables in `engine.env`.
    shared_env: ClassVar[dict[str, str]] = {}

    @property
    @abstractmethod
    def memory_model(self) -> "MemoryModel":
        """What the engine allocates."""

    @property
    @abstractmethod
    def limits(self) -> "Limits":
        """What the engine can run at all."""

    @abstractmethod
    def make_launch_spec(self, plan: "Plan", *, interpreter: str | None = None,
                         engine_env: dict[str, str] | None = None, extra_args: tuple[str, ...] = (),
                         api_key_env: str | None = None) -> LaunchSpec:  # fmt: skip
        """The command line and environment that carry out `plan`. `interpreter` runs the engine's own environment."""

    @abstractmethod
    def classify_failure(self, text: str, exit_code: int | None = None) -> Failure | None:
        """What the end of the log (or an error message) says went wrong; None where nothing is recognised."""

    def measure_lines(self, plan: "Plan", log: str, reserved_bytes: int) -> dict[str, int]:
        """Ledger key -> bytes that a start took, for lines that its API does not tell; see an adapter that has some."""
        return {}

    def uses_gpu(self, hardware: "Hardware", gpu: int | str) -> bool:
        """Whether it would run on the GPU of `hardware` called `gpu` (`auto`: the usual one); else on the CPU."""
        return hardware.pick_gpu(gpu) is not None

    def default_attention(self, shape: "ModelShape") -> str | None:
        """The attention backend that a plan takes where the recipe leaves it open; None where there is no choice."""
        return None

    def default_settings(self, request: "PlanRequest") -> dict[str, object]:
        """What the engine would choose by itself where it is told nothing, by field name; the tuner's baseline.

        Fields that are left out are as the planner has them.
        """
        return {}

    def default_slots(self, request: "PlanRequest", settings: "ResolvedSettings") -> DefaultSlots | None:
        """The expert slots that the engine gives itself for `settings` where it is told none, by its own rule.

        None where it has no rule of its own: then the planner's answer stands for it.
        """
        return None

    def parse_effective(self, log: str) -> dict[str, str]:
        """Settings that the log says are really in force, by field name, where the API does not tell them."""
        return {}

    def parse_compile_s(self, log: str) -> float:
        """Seconds of the start in which kernels were compiled, as the log tells; 0 where a cache had them."""
        return 0.0

    def parse_hits(self, log: str, slot_bytes: int = 0) -> "MoeHits | None":
        """Expert lookups of the latest decode steps, where the log tells them and the API does not."""
        return None

    def live_changes(self, old: "ResolvedSettings", new: "ResolvedSettings") -> tuple[str, ...] | None:
        """Names of the settings that differ where all of them can be turned live; None where a restart is needed.

        Equal settings give an empty tuple.
        """
        live = {knob.name for knob in self.knobs if knob.cost == "live"}
        before, after = old.model_dump(), new.model_dump()
        changed = tuple(key for key in after if before[key] != after[key])
        return changed if all(key in live for key in changed) else None
