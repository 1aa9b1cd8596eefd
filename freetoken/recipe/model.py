"""`Recipe` and its parts: what to run, on what, and what is good enough (DESIGN section 2).

Settings may be `auto`; the planner or the tuner then decides. `load.py` turns files into these values and
keeps for each value where it came from.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from freetoken import units
from freetoken.recipe.workload import Workload

Auto = Literal["auto"]
Strategy = Literal["fused", "offload", "hybrid", "cpu"]
EngineName = Literal["native", "freetoken", "llamacpp", "vllm", "sglang", "ollama", "ktransformers"]
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,79}$"


class TextLike:
    """Marks a text that `pattern` matches as a whole: `Annotated[str, TextLike(r"^[a-z]+$")]`.

    Errors and JSON Schema are those of pydantic's own `pattern`, which is compiled at import: `\\w` with a repeat
    would take a fifth of the time of `ft plan`.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def check(self, value: str) -> str:
        """`value` where it matches."""
        if re.fullmatch(self.pattern, value) is None:
            raise PydanticKnownError("string_pattern_mismatch", {"pattern": self.pattern})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}


def _count_or_size(value: Any) -> Any:
    """`auto`, a count, or a size with a unit (kept as a `Size`)."""
    if not isinstance(value, str) or value == "auto":
        return value
    return int(value) if re.fullmatch(r"\s*\d+\s*", value) else {"bytes": units.parse_bytes(value)}


def _specifier(value: str) -> str:
    # What nearly every recipe says is a range by its looks, and `packaging` is slow to import.
    if re.fullmatch(r"(?:(?:[<>]=?|==|!=)\d+(?:\.\d+)*(?:,|$))*", value):
        return value
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError(f"`{value}` is not a version range, expected e.g. `>=0.2.1,<0.3`") from error
    return value


def _at_least(parse: Any, example: str, input_type: Any) -> Any:
    """Parses `>=X` (or a bare `X`) with `parse`; recipes ask for minima only."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return parse(value)
        text = value.strip()
        if text[:1] in "<=!~" or (text.startswith(">") and not text.startswith(">=")):
            raise ValueError(f"`{value}` is not a minimum, expected e.g. `>={example}`")
        return parse(text.removeprefix(">=").strip())

    return BeforeValidator(read, json_schema_input_type=input_type)


def _version(value: Any) -> str:
    text = str(value)
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,3}", text):
        raise ValueError(f"`{value}` is not a version, expected e.g. `8.0`")
    return text


def _rate(value: Any) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if isinstance(value, bool) or not math.isfinite(rate):
        raise ValueError(f"`{value}` is not a rate in tok/s, expected e.g. `>=20`")
    return rate


Tokens = Annotated[int, BeforeValidator(units.parse_tokens, json_schema_input_type=int | str), Field(ge=1)]
ByteSize = Annotated[int, BeforeValidator(units.parse_bytes, json_schema_input_type=int | str), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(units.parse_seconds, json_schema_input_type=float | str), Field(ge=0)]
MinBytes = Annotated[int, _at_least(units.parse_bytes, "6GiB", int | str), Field(ge=0)]
MinVersion = Annotated[str, _at_least(_version, "8.0", str | float)]
MinRate = Annotated[float, _at_least(_rate, "20", float | str), Field(gt=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
AttentionBackend = Annotated[str, TextLike(r"^[a-z0-9_]+(,[a-z0-9_]+)?$")]


class RecipeModel(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Size(RecipeModel):
    """A size where a count could stand: `expert_slots: 3GiB`."""

    bytes: ByteSize


class GpuNeeds(RecipeModel):
    """What the recipe asks of the GPU; every figure is a minimum."""

    vram: MinBytes | None = None
    compute_capability: MinVersion | None = None
    driver: MinVersion | None = None
    cuda: MinVersion | None = None


class RamNeeds(RecipeModel):
    """What the recipe asks of host memory."""

    available: MinBytes | None = None
    total: MinBytes | None = None


class DiskNeeds(RecipeModel):
    """What the recipe asks of the disk."""

    free: MinBytes | None = None


class CpuNeeds(RecipeModel):
    """What the recipe asks of the CPU."""

    isa: tuple[str, ...] = ()
    cores: int | None = Field(default=None, ge=1)


class HardwareNeeds(RecipeModel):
    """What the recipe asks of a machine: checked, never assumed."""

    gpu: GpuNeeds | None = None
    ram: RamNeeds | None = None
    disk: DiskNeeds | None = None
    cpu: CpuNeeds | None = None


class ModelRef(RecipeModel):
    """Which model: a hub repository or a local path; exactly one of the two."""

    repo: Annotated[str, TextLike(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")] | None = None
    path: str | None = None
    revision: str = "main"
    source: Literal["huggingface", "modelscope"] = "huggingface"
    #: Which GGUF where there are several: a file's name, a pattern, or a part of the name such as `Q4_K_M`.
    file: Annotated[str, TextLike(r"^[\w*?][\w.*?/ -]{0,199}$")] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "ModelRef":
        if (self.repo is None) == (self.path is None):
            raise ValueError("`model` needs exactly one of `repo` and `path`")
        if self.file is not None and ".." in self.file.split("/"):
            raise ValueError(f"`model.file` is `{self.file}`, which leaves the repository")
        return self

    @property
    def include(self) -> tuple[str, ...]:
        """Patterns of the weight files that `file` means; none where it is not given."""
        if self.file is None:
            return ()
        is_whole = self.file.lower().endswith(".gguf") or any(one in self.file for one in "*?")
        return (self.file if is_whole else f"*{self.file}*.gguf",)


class EngineRef(RecipeModel):
    """Which engine, which versions of it, and what else it is given."""

    name: EngineName = "native"
    version: Annotated[str, AfterValidator(_specifier)] = ""
    env: dict[str, str] = {}
    extra_args: tuple[str, ...] = ()


class Serve(RecipeModel):
    """How the server listens and what it hands out."""

    host: str = "127.0.0.1"
    port: int = Field(default=1919, ge=1, le=65534)
    max_output_tokens: Tokens = 2048
    text_only: bool | Auto = "auto"
    #: Name of the environment variable that holds the API key; never the key itself.
    api_key_env: Annotated[str, TextLike(r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None


class Settings(RecipeModel):
    """What the planner or the tuner decides where it says `auto`."""

    gpu: int | str = "auto"
    memory_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | Auto = "auto"
    expert_slots: Annotated[
        Annotated[int, Field(ge=0)] | Size | Auto,
        BeforeValidator(_count_or_size, json_schema_input_type=Annotated[int, Field(ge=0)] | str | Size),
    ] = "auto"
    kv_tokens: Tokens | Auto = "auto"
    max_running_requests: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    strategy: Strategy | Auto = "auto"
    fetch_ratio: Ratio | Auto = "auto"
    attention: AttentionBackend | Auto = "auto"
    prefill_chunk_tokens: Tokens | Auto = "auto"
    prefill_overlap: bool | Auto = "auto"
    prefix_cache: bool | Auto = "auto"
    embed_on_host: bool | Auto = "auto"
    expert_load: Literal["serial", "parallel"] | Auto = "auto"
    cpu_layers: Annotated[int, Field(ge=0)] | Auto = "auto"
    cpu_threads: Annotated[int, Field(ge=1)] | Auto = "auto"
    kv_dtype: Literal["model", "bf16", "fp8"] = "model"
    state_dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"

    def list_fixed(self) -> dict[str, Any]:
        """What is left neither to the planner nor to the model, by name, as JSON has it."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value not in ("auto", "model")}


class GoodEnough(RecipeModel):
    """Targets: durations are upper limits, rates are lower ones."""

    ttft_p50: Seconds | None = None
    ttft_p95: Seconds | None = None
    itl_p95: Seconds | None = None
    turn_time: Seconds | None = None
    decode_tps: MinRate | None = None
    prefill_tps: MinRate | None = None


class Tune(RecipeModel):
    """How `ft tune` searches where its command line does not say."""

    objective: Literal["turn_time", "decode_tps", "ttft", "throughput", "efficiency"] = "turn_time"
    budget: Seconds = 45 * 60.0
    trials: Annotated[int, Field(ge=1)] | None = None


class Recipe(RecipeModel):
    """One recipe, complete: defaults, parents and overrides already merged in."""

    version: Literal[1] = 1
    name: Annotated[str, TextLike(NAME_PATTERN)]
    description: str = ""
    extends: str | None = None
    hardware: HardwareNeeds = HardwareNeeds()
    model: ModelRef
    engine: EngineRef = EngineRef()
    serve: Serve = Serve()
    workload: Workload
    settings: Settings = Settings()
    allow_quality_changes: tuple[Literal["kv_dtype", "state_dtype"], ...] = ()
    grow: bool = False
    headroom: Literal["server", "desktop", "wsl"] | ByteSize = "server"
    good_enough: GoodEnough = GoodEnough()
    tune: Tune = Tune()

    @model_validator(mode="after")
    def _quality_is_asked_for(self) -> "Recipe":
        for knob in ("kv_dtype", "state_dtype"):
            if getattr(self.settings, knob) != "model" and knob not in self.allow_quality_changes:
                value = getattr(self.settings, knob)
                raise ValueError(
                    f"`settings.{knob}` is `{value}`, which changes answers; list it: `allow_quality_changes: [{knob}]`"
                )
        return self
