"""Run folders and declarations on disk: `<state>/runs/<id>/` and `<state>/deployments/<name>.json`.

The run folder is the truth of a run: `recipe.yaml`, `plan.json`, `launch.json` (the intent, durable before anything
is spawned), `engine.log`, `events.jsonl`, `keeper.json`, and `report.json` once it is proven. No secret is written.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken import paths
from freetoken.errors import FtError
from freetoken.recipe.model import NAME_PATTERN
from freetoken.supervisor.files import EventLog, describe_os_error, format_now, read_json, write_json, write_text
from freetoken.supervisor.launch import EVENTS_FILE, PLAN_FILE, RECIPE_FILE, REPORT_FILE, Launch, write_launch

if TYPE_CHECKING:
    from freetoken.planner.plan import Plan
    from freetoken.recipe.model import Recipe


#: Under a run folder: what it held before each live resize.
BEFORE_DIR = "before"


def make_run_id(now: datetime | None = None) -> str:
    """An id that sorts by time and that no other `ft` makes: `20310504-093000-125-3fa9c2` (UTC)."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{moment.microsecond // 1000:03d}-{secrets.token_hex(3)}"


def create_run_dir() -> Path:
    """A new, empty run folder. Raises FtError where the state folder cannot be written."""
    try:
        paths.runs_dir().mkdir(parents=True, exist_ok=True)
        while True:
            folder = paths.runs_dir() / make_run_id()
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise FtError(describe_os_error(error, paths.runs_dir())) from error


def write_run(run_dir: Path, recipe: Recipe, plan: Plan, launch: Launch) -> None:
    """Writes recipe and plan, then the intent: when `launch.json` is there, all of it is. Raises FtError."""
    from freetoken.recipe.load import dump_recipe

    try:
        write_text(run_dir / RECIPE_FILE, dump_recipe(_settle_model(recipe, plan)))
        write_text(run_dir / PLAN_FILE, plan.model_dump_json(indent=2) + "\n")
        write_launch(run_dir, launch)
    except OSError as error:
        raise FtError(describe_os_error(error, run_dir), hint="free some space, or choose another `--state`") from error


def _settle_model(recipe: Recipe, plan: Plan) -> Recipe:
    """`recipe` with a relative model path made absolute: it is applied again from its run folder."""
    given = recipe.model.path
    if given in (None, "demo") or Path(str(given)).is_absolute() or plan.model_path is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": plan.model_path})})


def keep_before(run_dir: Path) -> None:
    """Keeps what a proven run holds, before a live resize rewrites it: `ft rollback` goes back to it."""
    if not (run_dir / REPORT_FILE).exists():
        return
    try:
        folder = run_dir / BEFORE_DIR / f"{sum(1 for _ in (run_dir / BEFORE_DIR).glob('*')) + 1:03d}"
        folder.mkdir(parents=True)
        for name in (RECIPE_FILE, PLAN_FILE, REPORT_FILE):
            shutil.copy2(run_dir / name, folder / name)
    except OSError:
        return  # a full disk costs the way back, not the resize


def read_plan(run_dir: Path) -> Plan | None:
    """The plan that a run carries out; None where it cannot be read."""
    from pydantic import ValidationError

    from freetoken.planner.plan import Plan

    try:
        return Plan.model_validate_json((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def read_recipe(run_dir: Path) -> Recipe | None:
    """The recipe of a run, complete; None where it cannot be read."""
    from freetoken.recipe.load import load_recipe

    try:
        return load_recipe(str(run_dir / RECIPE_FILE)).recipe
    except (OSError, FtError):
        return None


def record_event(run_dir: Path, kind: Any, message: str, **data: Any) -> None:
    """Appends an event of `ft` to the run; a full disk is passed over here, the keeper says it."""
    EventLog(run_dir / EVENTS_FILE).append(kind, message, **data)


@dataclass(frozen=True)
class Declaration:
    """What a user asked for under a name and has not taken back: kept in the state folder, so it outlives a reboot."""

    name: str
    run_id: str
    #: False once it was stopped on purpose.
    is_wanted: bool = True
    #: The newest run that was proven: what a failed apply can go back to.
    last_good_run: str | None = None
    declared_at: str = ""


def write_declaration(name: str, run_id: str, *, is_wanted: bool, is_proven: bool = False) -> None:
    """Keeps what `name` stands for now. Raises FtError where the state folder is full."""
    before = read_declaration(name)
    good = run_id if is_proven else (before.last_good_run if before else None)
    path = _declaration_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(Declaration(name, run_id, is_wanted, good, format_now())))
    except OSError as error:
        raise FtError(describe_os_error(error, path)) from error


def read_declaration(name: str) -> Declaration | None:
    """What `name` stands for; None where nothing was ever declared under it."""
    # A name comes from a command line too: it must not lead out of the folder.
    value = read_json(_declaration_path(name)) if re.fullmatch(NAME_PATTERN, name) else None
    known = {one.name for one in fields(Declaration)}
    try:
        return Declaration(**{key: one for key, one in value.items() if key in known}) if value else None
    except TypeError:
        return None


def read_declarations() -> tuple[Declaration, ...]:
    """All of this state folder, by name."""
    folder = paths.state_dir() / "deployments"
    found = (read_declaration(path.stem) for path in sorted(folder.glob("[!.]*.json")))
    return tuple(one for one in found if one is not None)


def forget_declaration(name: str) -> None:
    """Takes away that `name` was ever declared: for what no person asked for, such as a trial of the tuner."""
    with contextlib.suppress(OSError):
        _declaration_path(name).unlink(missing_ok=True)


def _declaration_path(name: str) -> Path:
    return paths.state_dir() / "deployments" / f"{name}.json"
