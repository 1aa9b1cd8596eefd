"""Modules that are read when something in them is first asked for, though others import them at once.

pydantic imports `importlib.metadata` for plugins that `ft` switches off, and with it come e-mail, sockets and zip
files, and `secrets`, with it OpenSSL, for a type that `ft` does not have; `difflib` is for messages that most runs
never print. Together they are a tenth of `ft plan`.

Set aside: `importlib.util.LazyLoader`, whose modules load as soon as a second `import` looks at their `__spec__`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

#: Module -> functions that others take out of it by name at once. Of the standard library, without effects at import.
LATER = {"importlib.metadata": ("entry_points",), "secrets": (), "difflib": ()}
#: Modules that are not to be had at all: httpx does without its own command line, and so without rich.
NEVER = ("httpx._main",)
_lock = threading.RLock()


class LaterModule(ModuleType):
    """Reads itself when an attribute is missed; other threads wait for that."""

    #: Neither while the import machinery dresses it, nor once more while it is read.
    _can_read = False

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if type(self) is LaterModule:
                loader = self.__spec__.loader if self._can_read and self.__spec__ is not None else None
                if loader is None:
                    raise AttributeError(f"module `{self.__name__}` has no attribute `{name}`")
                self._can_read = False
                loader.exec_module(self)
                self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(self, name)


class _Loader:
    """The loader of a module, but for what it makes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LaterModule(spec.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def import_later(modules: Mapping[str, Sequence[str]] = LATER) -> None:
    """Has `import NAME` give a module that is read at its first use. Does nothing for one that is there already."""
    for name in NEVER:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for name, functions in modules.items():
        if name in sys.modules or (spec := find_spec(name)) is None or spec.loader is None:
            continue
        spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        sys.modules[name] = module = module_from_spec(spec)
        for function in functions:
            setattr(module, function, _forward(module, function))
        # As an import does: others say `importlib.metadata` after a plain `import importlib.metadata`.
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        module._can_read = True  # type: ignore[attr-defined]


def _forward(module: ModuleType, name: str) -> Callable[..., Any]:
    """Stands in for the function `name` of `module`; when called it reads the module, which replaces it there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(module, name) is call:
            delattr(module, name)
        return getattr(module, name)(*args, **kwargs)

    return call
