"""Every engine that `ft` can drive, listed by hand. An engine is one file here and one line in `ADAPTERS`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from freetoken.errors import UsageError

if TYPE_CHECKING:
    from freetoken.adapters.base import EngineAdapter

#: Engine name -> `module:class`, imported on demand so that `ft --help` stays fast.
ADAPTERS: dict[str, str] = {
    "native": "freetoken.adapters.native:NativeAdapter",
    "freetoken": "freetoken.adapters.freetoken:FreetokenAdapter",
    "llamacpp": "freetoken.adapters.llamacpp:LlamaCppAdapter",
}
#: Engines that a recipe may name and that no adapter drives yet.
PLANNED: tuple[str, ...] = ("vllm", "sglang", "ollama", "ktransformers")


def get_adapter(name: str) -> EngineAdapter:
    """The adapter of the engine `name`. Raises UsageError where `ft` cannot drive it."""
    target = ADAPTERS.get(name)
    if target is None:
        known = ", ".join(f"`{one}`" for one in ADAPTERS)
        raise UsageError(
            f"engine `{name}` cannot be driven by this version",
            hint=f"engines it can drive: {known}; `--engine NAME` plans the model for one of them",
        )
    module, _, attribute = target.partition(":")
    adapter: EngineAdapter = getattr(import_module(module), attribute)()
    return adapter
