"""`load_model`: a checkpoint folder -> a model on its device with the experts behind our runtime.

Order: headers and names are checked, then dense parts go to the device tensor by tensor, then the experts. Nothing
is allocated for a checkpoint that cannot be loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from freetoken import units
from freetoken.engine import hf
from freetoken.engine.banks import Bank, DiskBank, Progress, RamBank
from freetoken.engine.config import EngineConfig
from freetoken.engine.convert import CheckpointPlan, DenseParameter, ExpertReader, plan_checkpoint
from freetoken.engine.decode_graphs import DecodeGraphs
from freetoken.engine.experts import ExpertRuntime
from freetoken.engine.files import CheckpointFiles
from freetoken.engine.kernels import packed
from freetoken.engine.linears import HostEmbedding, PackedLinear
from freetoken.engine.offload import OffloadExperts
from freetoken.engine.quicken import quicken
from freetoken.engine.strategies import CpuExperts, FusedExperts
from freetoken.errors import BadFileError, DoesNotFitError, UsageError

if TYPE_CHECKING:
    from freetoken.checkpoint.shape import ModelShape

_READERS = 4
_SHARED = re.compile(r"\.shared_(expert|experts|mlp)\.")
#: Host RAM that is left to the system and to everything else when the bank's place is chosen.
_RAM_RESERVE_BYTES = 2 << 30


@dataclass
class LoadedModel:
    """A model that is ready to run. Close it to give everything back."""

    engine_config: EngineConfig
    #: transformers' causal language model; call it with `input_ids`, `past_key_values`, ...
    model: Any
    #: The text model's config.
    config: Any
    device: torch.device
    dtype: torch.dtype
    experts: ExpertRuntime
    files: CheckpointFiles
    #: Sentences for the log: what was done otherwise than asked, and why.
    notes: list[str] = field(default_factory=list)
    #: Decode steps as CUDA graphs; None on the CPU and where they are switched off.
    graphs: DecodeGraphs | None = None

    @cached_property
    def shape(self) -> ModelShape:
        """The bytes of each part, from the checkpoint's headers."""
        from freetoken.checkpoint.header import read_shape

        return read_shape(self.engine_config.model_path)

    def memory(self) -> dict[str, int]:
        """Bytes really allocated, by ledger key."""
        return {**_dense_memory(self.model), **self.experts.memory()}

    def close(self) -> None:
        """Free the experts and close the files; the model cannot run afterwards."""
        try:
            if self.graphs is not None:
                self.graphs.close()
        finally:
            self.experts.close()
            self.files.close()


@torch.inference_mode(False)
def load_model(config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Load `config.model_path`. `progress(stage, done bytes, all bytes)` is called often, for `dense` and `experts`.

    Raises BadFileError for a checkpoint that cannot be used, UsageError for settings that contradict each other, and
    DoesNotFitError where memory runs out.
    """
    device = _open_device(config)
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    text_config, _ = hf.read_config(config.model_path)
    dtype = _choose_dtype(config, text_config)
    model = hf.build_model(text_config, dtype)
    if config.embed_on_host and device.type == "cuda":
        hf.check_untied(model)
    files = CheckpointFiles(config.model_path)
    notes = [problem] if (problem := packed.describe(device)) else []
    try:
        plan = plan_checkpoint(files, model, dtype)
        hf.rebuild_buffers(model, device)
        _load_dense(files, plan, model, device, dtype, config, progress)
        experts = _make_experts(files, plan, model, device, config, progress, notes)
    except torch.cuda.OutOfMemoryError as error:
        files.close()
        raise DoesNotFitError(f"loading {config.model_path} ran out of VRAM: {_first_line(error)}") from error
    except BaseException:
        files.close()
        raise
    graphs = quicken(model, experts, device, dtype, config, notes)
    if config.trace_path is not None:
        experts.record_trace(config.trace_path, config.model_path.name)
    return LoadedModel(config, model, text_config, device, dtype, experts, files, notes, graphs)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


# ---------------------------------------------------------------------- device and type


def _open_device(config: EngineConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device can be used by this PyTorch", hint="`--device cpu` runs on the CPU")
    # On Hopper and the large Blackwells torch asks cuDNN first, which plans attention anew for every length of the KV:
    # tens of ms in each step that reaches a length for the first time. The other kernels have no such plans.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", _find_gpu(config.gpu))
    torch.cuda.set_device(device)
    return device


def _find_gpu(wanted: str | None) -> int:
    count = torch.cuda.device_count()
    if wanted is None:
        return 0
    if wanted.isdecimal() and int(wanted) < count:
        return int(wanted)
    known = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    for index, uuid in enumerate(known):
        if wanted.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
            return index
    raise UsageError(f"no GPU `{wanted}` is visible, there are {', '.join(f'GPU-{uuid}' for uuid in known)}")


def _choose_dtype(config: EngineConfig, text_config: Any) -> torch.dtype:
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    if config.device == "cpu":
        return torch.float32
    stored = getattr(text_config, "dtype", None) or torch.bfloat16
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    return stored if stored in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16


# ---------------------------------------------------------------------- dense parts


def _load_dense(
    files: CheckpointFiles,
    plan: CheckpointPlan,
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
    progress: Progress | None,
) -> None:
    total = sum(m.weight.nbytes for p in plan.dense for stored in p.sources.values() for m in stored)
    done = 0
    host = _on_host(model, config, device)

    def read(parameter: DenseParameter) -> dict[str, torch.Tensor] | None:
        return None if _stays_packed(parameter, model, device) else parameter.read(files, dtype, model.config)

    with ThreadPoolExecutor(_READERS) as pool:
        for parameter, tensors in _in_order(pool, read, plan.dense):
            if tensors is None:
                _put_packed(files, parameter, model, device, dtype)
            else:
                for name, value in tensors.items():
                    _put(model, name, value, torch.device("cpu") if name in host else device)
            done += sum(m.weight.nbytes for stored in parameter.sources.values() for m in stored)
            if progress is not None:
                progress("dense", done, total)
    for tied, source in hf.tie_weights(model):
        owner, _, name = tied.rpartition(".")
        model.get_submodule(owner)._parameters[name] = model.get_parameter(source)
    if host:
        _wrap_embedding(model)


def _in_order(
    pool: ThreadPoolExecutor, job: Callable[[DenseParameter], Any], items: list[DenseParameter]
) -> Iterator[tuple[DenseParameter, Any]]:
    """Results in order with few jobs ahead, so that host RAM holds few tensors at once."""
    left = iter(items)
    waiting = [(item, pool.submit(job, item)) for item in islice(left, 2 * _READERS)]
    while waiting:
        item, future = waiting.pop(0)
        yield item, future.result()
        waiting.extend((one, pool.submit(job, one)) for one in islice(left, 1))


def _put(model: Any, name: str, value: torch.Tensor, device: torch.device) -> None:
    owner_name, _, key = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    expected = owner._parameters.get(key)
    is_parameter = expected is not None
    expected = expected if is_parameter else owner._buffers[key]
    if tuple(value.shape) != tuple(expected.shape):
        raise BadFileError(
            f"`{name}` is stored with the shape {list(value.shape)}, the model needs {list(expected.shape)}"
        )
    value = value.to(device=device, dtype=expected.dtype)
    if is_parameter:
        owner._parameters[key] = nn.Parameter(value.contiguous(), requires_grad=False)
    else:
        owner._buffers[key] = value


def _stays_packed(parameter: DenseParameter, model: Any, device: torch.device) -> bool:
    only = parameter.only
    if device.type != "cuda" or only is None or only.format not in ("fp8", "nvfp4"):
        return False
    owner = model.get_submodule(parameter.target.rpartition(".")[0])
    return type(owner) is nn.Linear and parameter.target.endswith(".weight")


def _put_packed(
    files: CheckpointFiles, parameter: DenseParameter, model: Any, device: torch.device, dtype: torch.dtype
) -> None:
    stored = parameter.only
    assert stored is not None
    name = parameter.target.rpartition(".")[0]
    linear = model.get_submodule(name)
    columns = stored.weight.shape[-1] * (2 if stored.format == "nvfp4" else 1)
    if (stored.weight.shape[0], columns) != (linear.out_features, linear.in_features):
        raise BadFileError(
            f"`{stored.weight.name}` holds {stored.weight.shape[0]} x {columns} weights, "
            f"the model needs {linear.out_features} x {linear.in_features}"
        )
    weight = files.read(stored.weight).to(device)
    if stored.format == "fp8":
        scale, matrix_scale = stored.read_scale(files, "scale").to(device), None
    else:
        scale = files.read(stored.roles["scale"]).to(device)
        matrix_scale = stored.read_scale(files, "matrix_scale").to(device)
    bias = None if linear.bias is None else linear.bias  # still on meta: `_put` fills it by name
    packed = PackedLinear(weight, scale, matrix_scale, None)
    packed.bias = bias
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, packed)


def _on_host(model: Any, config: EngineConfig, device: torch.device) -> set[str]:
    if not config.embed_on_host or device.type != "cuda":
        return set()
    embedding = model.get_input_embeddings()
    return {f"{name}.weight" for name, module in model.named_modules() if module is embedding}


def _wrap_embedding(model: Any) -> None:
    embedding = model.get_input_embeddings()
    model.set_input_embeddings(HostEmbedding(embedding))


# ---------------------------------------------------------------------- experts


def _make_experts(
    files: CheckpointFiles,
    plan: CheckpointPlan,
    model: Any,
    device: torch.device,
    config: EngineConfig,
    progress: Progress | None,
    notes: list[str],
) -> ExpertRuntime:
    reader = ExpertReader(files, plan.layers, model.config)
    modules = [module for _, module in hf.find_experts(model)]
    bank = _make_bank(reader, device, config, progress, notes)
    try:
        top_k = hf.read_top_k(model)
        experts: ExpertRuntime
        if config.strategy == "fused":
            experts = FusedExperts(bank, modules, device, top_k, progress)
        elif config.strategy == "cpu":
            experts = CpuExperts(bank, modules, device, top_k)
        else:
            experts = OffloadExperts(bank, modules, device, top_k, config.expert_slots)
    except BaseException:
        bank.close()
        raise
    for number, module in enumerate(modules):
        for key in list(module._parameters):
            module._parameters[key] = None  # no stray copy on meta may be mistaken for weights
        object.__setattr__(module, "ft_layer", number)
        object.__setattr__(module, "ft_experts", experts)
    hf.install_experts_function(model, _experts_function)
    return experts


def _experts_function(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls instead of its own experts."""
    result: torch.Tensor = module.ft_experts.forward(module.ft_layer, hidden_states, top_k_index, top_k_weights)
    return result


def _make_bank(
    reader: ExpertReader, device: torch.device, config: EngineConfig, progress: Progress | None, notes: list[str]
) -> Bank:
    if config.strategy == "fused":
        if device.type == "cuda":
            return DiskBank(reader)  # only passes through on its way to the device
        return RamBank(reader, pin=False, progress=progress, note=notes.append)
    needed = sum(layer.layout.nbytes * len(layer.ranges) for layer in reader.layers)
    available = psutil.virtual_memory().available
    place = config.experts_from
    if place == "auto" and config.strategy == "offload" and device.type == "cpu":
        place = "disk"  # slots and bank would be two copies in one memory
    elif place == "auto":
        place = "ram" if needed + _RAM_RESERVE_BYTES <= available else "disk"
        if place == "disk":
            notes.append(
                f"experts are read from the checkpoint on a miss: they need {units.format_bytes(needed)} of RAM, "
                f"{units.format_bytes(available)} are available"
            )
    if place == "disk":
        return DiskBank(reader)
    if needed > available:
        raise DoesNotFitError(
            f"the experts need {units.format_bytes(needed)} of RAM, {units.format_bytes(available)} are available",
            hint="`experts_from: disk` reads them from the checkpoint on a miss",
        )
    return RamBank(reader, pin=device.type == "cuda", progress=progress, note=notes.append)


# ---------------------------------------------------------------------- memory


def _dense_memory(model: Any) -> dict[str, int]:
    """Bytes of everything but experts, by ledger key; a tied head counts as embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = dict.fromkeys(("dense_weights", "embedding", "head", "shared_experts", "rope"), 0)
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(embedding, HostEmbedding) and owner is embedding.embedding:
            key = "host_embedding"
        elif owner is embedding:
            key = "embedding"
        elif owner is head:
            key = "head"
        elif _SHARED.search(name):
            key = "shared_experts"
        else:
            key = "rope" if "rotary" in name else "dense_weights"
        sizes[key] = sizes.get(key, 0) + tensor.untyped_storage().nbytes()
    return {key: size for key, size in sizes.items() if size}
