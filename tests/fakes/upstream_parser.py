"""Runs the upstream engine's own argument parser out of its wheel: `python -I -S upstream_parser.py WHEEL < LISTS`.

Nothing is installed: the wheel is read as a zip file, and every module that the parser does not need (torch and the
rest) is played by an empty stand-in. Reads a JSON list of argument lists, prints a JSON list of what was parsed
(`{"values": {...}}`) or why it was refused (`{"error": "..."}`); last come the parser's flags (`{"flags": [...]}`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import types


class AnyType(type):
    """A class that has every attribute, so that annotations, decorators and base classes can be read."""

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make_any(name)

    def __call__(cls, *args, **kwargs):
        # As a decorator it hands back what it decorates.
        if len(args) == 1 and not kwargs and (isinstance(args[0], type) or callable(args[0])):
            return args[0]
        return cls if cls.__dict__.get("is_stub") else super().__call__(*args, **kwargs)

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __int__(cls):
        return 0

    def __lt__(cls, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__


def make_any(name):
    return AnyType(name, (), {"is_stub": True})


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds whatever nobody else finds."""

    def find_spec(self, name, path=None, target=None):
        # What is missing of the engine itself is compiled code.
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = make_any
        module.__version__ = "0"
        return module

    def exec_module(self, module):
        pass


def parse(parse_args, arguments):
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            found = parse_args(arguments, prog="serve")[0]
    except SystemExit:
        return {"error": errors.getvalue().strip().splitlines()[-1]}
    plain = (str, int, float, bool, type(None), list, tuple)
    return {"values": {key: value for key, value in vars(found).items() if isinstance(value, plain)}}


def note_flags(flags):
    """Notes every flag of a parser at the moment in which it is used."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        flags.update(flag for flag in self._option_string_actions if flag.startswith("--"))
        return real(self, *args, **kwargs)

    argparse.ArgumentParser.parse_args = parse_args


def main():
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.append(Missing())
    answers = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        from freetoken.server.args import parse_args
    lists, flags = json.load(sys.stdin), set()
    note_flags(flags)
    found = [parse(parse_args, one) for one in lists]
    json.dump([*found, {"flags": sorted(flags)}], answers)
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
