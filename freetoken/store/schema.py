"""The tables of `ft.db` and the ordered migrations that make them.

A migration is never edited once released: a change is a new function at the end of `MIGRATIONS`. All pending ones
run in one `BEGIN IMMEDIATE` transaction under the file lock that `database.py` holds, and `PRAGMA user_version`
counts them, so that an older tool can tell a newer database from its header alone. sqlite-utils' own `Migrations`
was set aside: it commits each step by itself and keeps no number that can be read without opening the database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite_utils import Database


def m001_machines_deployments_runs(db: Database) -> None:
    """Who ran what, where, and how it ended."""
    db["machines"].create(
        {"id": int, "fingerprint": str, "name": str, "hardware": str, "first_seen": str, "last_seen": str},
        pk="id", not_null={"fingerprint", "hardware", "first_seen", "last_seen"},
    )  # fmt: skip
    db["machines"].create_index(["fingerprint"], unique=True)
    db["deployments"].create(
        {"id": int, "name": str, "run_id": str, "engine": str, "model_name": str, "recipe": str, "action": str,
         "declared_at": str},
        pk="id", not_null={"name", "engine", "recipe", "action", "declared_at"},
    )  # fmt: skip
    db["deployments"].create_index(["name", "declared_at"])
    db["runs"].create(
        {"id": str, "deployment": str, "machine_id": int, "engine": str, "engine_version": str, "model_name": str,
         "started_at": str, "ended_at": str, "outcome": str, "ready_s": float, "exit_code": int, "error": str,
         "plan": str},
        pk="id", not_null={"deployment", "engine", "started_at", "outcome"},
        foreign_keys=[("machine_id", "machines", "id")],
    )  # fmt: skip
    db["runs"].create_index(["deployment", "started_at"])


def m002_events_results(db: Database) -> None:
    """What happened in a run, and what was measured."""
    db["events"].create(
        {"id": int, "run_id": str, "at": str, "kind": str, "message": str, "data": str},
        pk="id", not_null={"run_id", "at", "kind", "message"},
    )  # fmt: skip
    # An event is read from the run's `events.jsonl` by whoever comes along; the second time it is known.
    db["events"].create_index(["run_id", "at", "kind", "message"], unique=True)
    db["results"].create(
        {"id": int, "run_id": str, "machine_id": int, "recipe_name": str, "workload": str, "engine": str,
         "engine_version": str, "model_name": str, "kind": str, "settings": str, "metrics": str, "is_estimated": int,
         "invalid_because": str, "measured_at": str},
        pk="id", not_null={"recipe_name", "workload", "engine", "measured_at"},
        foreign_keys=[("machine_id", "machines", "id")],
    )  # fmt: skip
    db["results"].create_index(["recipe_name", "workload", "measured_at"])


def m003_measured_lines(db: Database) -> None:
    """Planned against measured bytes of each ledger line, with what the difference holds for."""
    db["measured_lines"].create(
        {"run_id": str, "ledger": str, "key": str, "planned_bytes": int, "measured_bytes": int,
         "correction_bytes": int, "engine": str, "engine_version": str, "attention": str, "gpu_generation": str,
         "os": str, "machine_id": int, "recorded_at": str},
        pk=("run_id", "ledger", "key"), not_null={"planned_bytes", "measured_bytes", "engine", "recorded_at"},
    )  # fmt: skip
    db["measured_lines"].create_index(["engine", "engine_version", "gpu_generation", "os"])


MIGRATIONS: tuple[Callable[[Database], None], ...] = (
    m001_machines_deployments_runs,
    m002_events_results,
    m003_measured_lines,
)
VERSION = len(MIGRATIONS)
