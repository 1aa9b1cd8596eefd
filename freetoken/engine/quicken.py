"""What makes decode steps quick on a GPU: set up at the load, graphs captured anew after a resize.

Nothing here may keep a model from being served: what cannot be had is left out, with a sentence that says why.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from freetoken import units
from freetoken.engine import fast_modules
from freetoken.engine.config import EngineConfig
from freetoken.engine.decode_graphs import DecodeGraphs
from freetoken.engine.experts import ExpertRuntime
from freetoken.engine.kernels import decode
from freetoken.engine.rehearsal import rehearse

log = logging.getLogger("freetoken.engine")


def quicken(
    model: Any,
    experts: ExpertRuntime,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
    notes: list[str],
) -> DecodeGraphs | None:
    """The graphs of `model`, captured, and few launches where there are none; a CPU is not bound by them."""
    if device.type != "cuda" or config.decode_graphs == "off":
        return None
    try:
        if (problem := decode.describe(device)) is not None:
            notes.append(problem)
        found = fast_modules.install(model, device, dtype)
        notes.extend(found.notes)
        log.info("decode steps of few launches: %s", found.describe())
        return None if config.decode_graphs == "eager" else _make_graphs(model, experts, found, notes)
    except Exception as error:  # nothing that only makes it faster may keep a model from being served
        notes.append(f"decode steps are the model's own, which is slower: {type(error).__name__}: {error}")
        return None


def renew(model: Any, graphs: DecodeGraphs | None) -> None:
    """Captures `graphs` anew where a resize has moved what they read, so that no request waits for that."""
    if graphs is None or not graphs.is_stale:
        return
    started = time.perf_counter()
    rehearse(model, graphs)
    if graphs.problem is None:
        log.info("%d graphs captured anew in %.1f s", graphs.captured_count, time.perf_counter() - started)
    else:
        log.warning("decode steps are replayed as graphs no more, which is slower: %s", graphs.problem)


def _make_graphs(
    model: Any, experts: ExpertRuntime, found: fast_modules.FastModules, notes: list[str]
) -> DecodeGraphs | None:
    graphs = DecodeGraphs.install(model, experts, found, notes.append)
    if graphs is None:
        return None
    started = time.perf_counter()
    rehearse(model, graphs)
    if graphs.problem is not None:
        notes.append(f"decode steps are not replayed as graphs, which is slower: {graphs.problem}")
    elif not graphs.captured_count:
        notes.append("decode steps are not replayed as graphs so far: at the load none could be captured")
    else:
        log.info(
            "decode steps are replayed as %d graphs, captured in %.1f s, which hold %s of VRAM",
            graphs.captured_count, time.perf_counter() - started, units.format_bytes(graphs.held_bytes),
        )  # fmt: skip
    return graphs
