"""`PlanRequest`, `Plan` and `Refusal`: what the planner is asked and what it answers.

A `Plan` is a frozen value: what `ft plan` shows is exactly what `ft apply` carries out.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
from typing import Any, Literal

from pydantic import Field

from freetoken.checkpoint.shape import ModelShape
from freetoken.hardware.model import Hardware
from freetoken.planner.memory import Admission, Finding, Ledger, PlannerModel, ResolvedSettings
from freetoken.recipe.model import Recipe


class Residual(PlannerModel):
    """How far past launches were off, per line: measured minus planned, in bytes. Read from the store."""

    key: str
    bytes: int
    runs: int = 1
    #: What those launches had planned for the line without any correction, mean bytes; None where nobody knows.
    planned_bytes: int | None = None


class Calibration(PlannerModel):
    """What is known from earlier runs on this machine; all optional."""

    residuals: tuple[Residual, ...] = ()
    #: `c` of the hit-rate law h = (1+c) f / (1 + c f); None = the published prior.
    hit_curve_c: float | None = None
    #: Fixed time per decode step, seconds.
    step_overhead_s: float | None = None
    #: Mean absolute error of past plans on this machine, 0 to 1, and over how many launches.
    mean_error_ratio: float | None = None
    launches: int = 0
    #: Settings of the best tuned result of this machine and workload, by field name.
    tuned: dict[str, Any] = {}
    tuned_from: str | None = None


class PlanRequest(PlannerModel):
    """Everything the answer depends on."""

    recipe: Recipe
    hardware: Hardware
    shape: ModelShape
    engine_version: str | None = None
    calibration: Calibration = Calibration()
    #: Absolute path of the checkpoint where it is already here, else None.
    model_path: str | None = None
    #: Whether a file of a tokenizer lies in the model's folder; None where nothing is known of that.
    has_tokenizer: bool | None = None
    #: Bytes of the checkpoint that still have to be downloaded.
    download_bytes: int = Field(default=0, ge=0)
    #: Where the model was found or its figures were read, in words.
    model_note: str = ""
    #: VRAM that our own running deployment of this recipe would give back.
    reclaimable_vram_bytes: int = Field(default=0, ge=0)
    #: Ports of this machine that the engine would need and somebody else holds now, in words, and the way out.
    taken_ports: tuple[str, ...] = ()
    taken_ports_hint: str | None = None
    #: Value provenance from the recipe loader: `settings.kv_tokens` -> `command line`, `recipe`, `parent NAME`, ...
    provenance: dict[str, str] = {}


class Prediction(PlannerModel):
    """Predicted speed with a range, and what limits it. Rates in tok/s, times in seconds."""

    decode_tps: float
    decode_tps_low: float
    decode_tps_high: float
    prefill_tps: float
    ttft_s: float
    ttft_low_s: float | None = None
    ttft_high_s: float | None = None
    #: Mean seconds of a turn of the recipe's workload, prompt and output together.
    mean_turn_time_s: float | None = None
    hit_ratio: float | None = None
    miss_bytes_per_token: int | None = None
    limited_by: Literal["vram", "pcie", "dram", "disk", "overhead", "compute"]
    prefill_limited_by: Literal["pcie", "compute", "disk", "dram"] = "compute"
    notes: tuple[str, ...] = ()

    def turn_time_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds of one turn: prefill of `prompt_tokens`, then decode of `output_tokens`."""
        return prompt_tokens / self.prefill_tps + output_tokens / self.decode_tps


class Repair(PlannerModel):
    """A change that turns a no into a yes: what, as `--set` arguments, and what it costs."""

    description: str
    sets: dict[str, str] = {}
    frees_bytes: int = 0
    predicted_decode_tps: float | None = None


class Plan(PlannerModel):
    """A yes: resolved settings, ledgers, prediction, and where every value came from."""

    kind: Literal["plan"] = "plan"
    recipe_name: str
    engine: str
    engine_version: str | None = None
    model_name: str
    model_path: str | None = None
    #: Bytes that a download would still move, and where the model's figures come from.
    download_bytes: int = Field(default=0, ge=0)
    model_note: str = ""
    settings: ResolvedSettings
    #: Slots that the engine starts with where the recipe says `grow`; it then grows live to `settings.expert_slots`.
    start_slots: int | None = None
    #: `settings.kv_tokens` -> `recipe`, `planner: what the workload needs`, `tuned result 17`, ...
    provenance: dict[str, str] = {}
    vram: Ledger | None = None
    ram: Ledger
    disk: Ledger
    prediction: Prediction | None = None
    findings: tuple[Finding, ...] = ()  # warnings only
    admission: Admission | None = None
    host: str = "127.0.0.1"
    port: int = 1919
    served_model_name: str = ""
    max_output_tokens: int = 2048
    #: The planner said no and `--force` overrode it.
    is_forced: bool = False
    hardware_name: str = ""
    #: Past error of plans on this machine, in words; empty where there is none.
    track_record: str = ""


class Refusal(PlannerModel):
    """A reasoned no: every finding, the missing bytes, the line to blame, and what would make it a yes."""

    kind: Literal["refusal"] = "refusal"
    recipe_name: str
    engine: str
    model_name: str
    download_bytes: int = Field(default=0, ge=0)
    model_note: str = ""
    message: str
    findings: tuple[Finding, ...] = ()
    missing_bytes: int = 0
    ledger: Literal["vram", "ram", "disk"] | None = None
    blamed_line: str | None = None
    #: The least demanding settings that were tried, with their ledgers, so that the arithmetic can be shown.
    settings: ResolvedSettings | None = None
    vram: Ledger | None = None
    ram: Ledger | None = None
    disk: Ledger | None = None
    admission: Admission | None = None
    repairs: tuple[Repair, ...] = ()
    #: Nearest model, quantisation, engine or card that would work, in words.
    alternatives: tuple[str, ...] = ()
