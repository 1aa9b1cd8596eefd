"""A recipe and a lock as they travel: bytes and tokens instead of one machine's counts, no paths, no devices.

Doing it twice changes nothing, which is what makes export, import, export come to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from freetoken.errors import UsageError
from freetoken.recipe.model import Recipe, Size
from freetoken.recipe.workload import Workload
from freetoken.share.allow import LOOPBACK, MACHINE_COUNTS, list_allowed, split_arguments, split_environment

if TYPE_CHECKING:
    from collections.abc import Callable


def make_portable(recipe: Recipe, slot_bytes: int, say: Callable[[str], None] = lambda _: None) -> Recipe:
    """`recipe` as it may leave this machine; `say` is told what was left out. `slot_bytes` is one expert slot's size.

    Raises UsageError where the model is a folder of this machine, which nobody else has.
    """
    if recipe.model.path not in (None, "demo"):
        raise UsageError(
            f"`{recipe.name}` runs a model from a folder of this machine, which nobody else has",
            hint="`--set model.repo=OWNER/NAME` where it is on a hub",
        )
    update = {
        "extends": None,
        "settings": _portable_settings(recipe, slot_bytes, say),
        "engine": _portable_engine(recipe, say),
        "serve": _portable_serve(recipe, say),
        "workload": make_portable_workload(recipe.workload, say),
    }
    return recipe.model_copy(update=update)


def make_portable_workload(workload: Workload, say: Callable[[str], None] = lambda _: None) -> Workload:
    """The counts of `workload`; a recording stays here, its counts are taken with shipped text."""
    if workload.text != "recorded" and workload.recording is None:
        return workload
    say("the recording of the workload is left out; its counts travel, with shipped text")
    return workload.model_copy(update={"text": "code", "recording": None})


def hash_workload(workload: Workload) -> str:
    """SHA-256 over what the workload asks: two with the same hash may be compared."""
    plain = make_portable_workload(workload).model_dump(mode="json", exclude={"name", "description", "recording"})
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _portable_settings(recipe: Recipe, slot_bytes: int, say: Callable[[str], None]) -> object:
    settings = recipe.settings
    update: dict[str, object] = {}
    for name in ("gpu", *MACHINE_COUNTS):
        if getattr(settings, name) != "auto":
            update[name] = "auto"
            say(f"`settings.{name}` belongs to this machine and travels as `auto`")
    if isinstance(settings.expert_slots, int):
        if slot_bytes:
            update["expert_slots"] = Size(bytes=settings.expert_slots * slot_bytes)
        else:
            update["expert_slots"] = "auto"
            say("`settings.expert_slots` travels as `auto`: the size of a slot is not known without a lock")
    return settings.model_copy(update=update)


def _portable_engine(recipe: Recipe, say: Callable[[str], None]) -> object:
    args, env = list_allowed(recipe.engine.name)
    kept_args, refused = split_arguments(recipe.engine.extra_args, args)
    kept_env, more = split_environment(recipe.engine.env, env)
    for sentence in (*refused, *more):
        say(f"left out: {sentence}")
    return recipe.engine.model_copy(update={"extra_args": tuple(kept_args), "env": kept_env})


def _portable_serve(recipe: Recipe, say: Callable[[str], None]) -> object:
    serve = recipe.serve
    update: dict[str, object] = {}
    if serve.host not in LOOPBACK:
        update["host"] = "127.0.0.1"
        say("`serve.host` travels as 127.0.0.1")
    if serve.api_key_env is not None:
        update["api_key_env"] = None
        say("`serve.api_key_env` stays here")
    return serve.model_copy(update=update)
