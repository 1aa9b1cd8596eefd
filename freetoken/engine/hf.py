"""Everything that touches the insides of `transformers`, in one place: the model without weights, names, buffers.

Read with versions 5.17 and 5.24. What is used of its internals: the experts registry
(`integrations.moe.ALL_EXPERTS_FUNCTIONS`), the attributes its decorator sets on experts modules and the gate that it
gives them (`_default_apply_gate`), the conversion mapping (`get_model_conversion_mapping` and the transforms'
`rename_source_key` and `operations`), `_init_weights` for rotary buffers, `_get_dtype_plan`, and
`_keys_to_ignore_on_load_unexpected`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from freetoken.errors import BadFileError, UsageError

EXPERTS_FUNCTION = "freetoken"
ExpertsFunction = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Quantisation methods whose tensors `formats` knows.
READABLE_METHODS = ("modelopt", "mxfp4", "fp8")
#: Stored beside weights, never part of a text model here: draft layers, encoders, scales of a quantised KV cache.
_IGNORED = re.compile(
    r"(^|\.)mtp\.|^model\.(visual|vision_tower|audio_tower)\.|^visual\.|\.(k|v|q|prob)_scale$|\.kv_scale$|rotary_emb\.inv_freq$"
)


@dataclass(frozen=True)
class Renamed:
    """What a stored tensor is in the model: the parameter, and the conversion that makes it (None = as it is)."""

    target: str
    converter: WeightConverter | None = None
    pattern: str | None = None


def read_config(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The text model's config, and the quantisation block of config.json ({} where there is none)."""
    if not (folder / "config.json").is_file():
        raise BadFileError(f"{folder} has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadFileError(
            f"{folder / 'config.json'} cannot be used by transformers {transformers.__version__}: {first}"
        ) from error
    quantization = getattr(config, "quantization_config", None) or {}
    text = config.get_text_config()
    quantization = quantization or getattr(text, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = quantization.get("quant_method")
    if method is not None and method not in READABLE_METHODS:
        known = ", ".join(f"`{name}`" for name in READABLE_METHODS)
        raise BadFileError(f"{folder} is quantised by `{method}`, the native engine reads {known} and plain weights")
    if (
        text is not config
        and getattr(config, "tie_word_embeddings", None)
        and "tie_word_embeddings" not in text.to_dict()
    ):
        text.tie_word_embeddings = True
    return text, quantization


def build_model(config: Any, dtype: torch.dtype) -> Any:
    """The causal language model of `config` on the meta device, in evaluation mode, with our experts function set."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # our loader reads the tensors; transformers must not swap modules
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadFileError(
            f"`{config.model_type}` is no causal language model of transformers {transformers.__version__}: {first}"
        ) from error
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        for pattern, wanted in model._get_dtype_plan(dtype).items():
            if re.search(rf"(^|\.){pattern.replace('*', '.*')}(\.|$)", name):
                parameter.data = parameter.data.to(wanted)
    return model


def install_experts_function(model: Any, function: ExpertsFunction) -> None:
    """Route the model's experts modules through `function`."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, function)
    model.set_experts_implementation(EXPERTS_FUNCTION)
    configs: list[Any] = [module.config for _, module in find_experts(model)]
    if lost := [c for c in configs if c._experts_implementation != EXPERTS_FUNCTION]:
        raise BadFileError(
            f"transformers {transformers.__version__} keeps the experts of `{lost[0].model_type}` to itself"
        )


def find_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of all experts that go through the registry, in layer order. Raises BadFileError for none."""
    found = [(name, m) for name, m in model.named_modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise BadFileError(
            f"`{kind}` has no routed experts that transformers {transformers.__version__} lets an engine compute",
            hint="dense models and families whose experts are fixed in code need another engine",
        )
    return found


def has_silu_gate(module: Any) -> bool:
    """Whether an experts module gates by `silu(gate) * up`, gate first, as most families do."""
    own = getattr(type(module), "_apply_gate", None)
    return module.has_gate and own is _default_apply_gate and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def read_top_k(model: Any) -> int:
    """How many routed experts a token uses in a layer."""
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "top_k"):
        value = getattr(model.config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    for module in model.modules():
        if isinstance(value := getattr(module, "top_k", None), int) and value > 0:
            return value
    raise BadFileError(f"the config of `{model.config.model_type}` does not say how many experts a token uses")


class Renamer:
    """Names of stored tensors -> parameters of `model`, by transformers' own conversion mapping."""

    def __init__(self, model: Any) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._known = set(model.state_dict().keys())
        self._ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]

    def is_ignored(self, stored: str) -> bool:
        """Whether a tensor without a place in the model is meant to have none."""
        return bool(_IGNORED.search(stored)) or any(pattern.search(stored) for pattern in self._ignored)

    def rename(self, stored: str) -> Renamed | None:
        """Where the stored tensor belongs, None where the model has no such parameter."""
        name = stored
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in self._converters:
            converted, pattern = converter.rename_source_key(name)
            if pattern is not None:
                target = self._with_prefix(converted)
                return None if target is None else Renamed(target, converter, pattern)
        for candidate in (name, stored):
            if (target := self._with_prefix(candidate)) is not None:
                return Renamed(target)
        return None

    def _with_prefix(self, name: str) -> str | None:
        for candidate in (name, f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}.")):
            if candidate in self._known:
                return candidate
        return None


def convert(renamed: Renamed, tensors: dict[str, list[torch.Tensor]], config: Any) -> dict[str, torch.Tensor]:
    """Run the conversion on the collected tensors (source pattern -> tensors): full target names -> tensors."""
    assert renamed.converter is not None
    values: Any = tensors
    for operation in renamed.converter.operations:
        values = operation.convert(
            values,
            source_patterns=renamed.converter.source_patterns,
            target_patterns=renamed.converter.target_patterns,
            full_layer_name=renamed.target,
            model=None,
            config=config,
            missing_keys=None,
        )
    plain = {key: value[0] if isinstance(value, list) else value for key, value in values.items()}
    for key in plain:
        if key in renamed.target:
            prefix, _, suffix = renamed.target.partition(key)
            return {prefix + name + suffix: value for name, value in plain.items()}
    return plain


def rebuild_buffers(model: Any, device: torch.device) -> None:
    """Compute what no checkpoint stores (rotary frequencies and the like) and put all other buffers on `device`.

    Buffers are filled with NaN first, so that one which the family's own initialisation does not reach is seen.
    """
    owners: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        local = {key: value for key, value in module.named_buffers(recurse=False) if value.is_meta}
        for key, value in local.items():
            fresh = torch.full(value.shape, torch.nan) if value.is_floating_point() else torch.zeros(value.shape)
            module._buffers[key] = fresh.to(value.dtype)
        if any(key in module._non_persistent_buffers_set for key in local):
            owners.append((name, module))
    with torch.no_grad():
        for _, module in owners:
            model._init_weights(module)  # parameters are on meta still: touching them costs and changes nothing
    for name, module in owners:
        for key in module._non_persistent_buffers_set & module._buffers.keys():
            value = module._buffers[key]
            if value is not None and value.is_floating_point() and value.isnan().any():
                raise BadFileError(
                    f"the buffer `{name}.{key}` is not stored and transformers does not say how to make it"
                )
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None:
                module._buffers[key] = value.to(device)


def tie_weights(model: Any) -> Iterator[tuple[str, str]]:
    """Pairs (parameter, the one it shares) that config ties, as full names."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(m): name for name, m in model.named_modules()}
    if output is not None and embedding is not None:
        yield f"{names[id(output)]}.weight", f"{names[id(embedding)]}.weight"


def check_untied(model: Any) -> None:
    """Raises UsageError where embedding and head share one weight, which can lie in one place only."""
    if any(True for _ in tie_weights(model)):
        raise UsageError("`embed_on_host` needs an embedding of its own, this model ties it to the head")
