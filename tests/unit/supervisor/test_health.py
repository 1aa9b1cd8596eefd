"""What an answer of `/health` means, for the engines that are known to answer."""

import json

import pytest

from freetoken.supervisor.health import HealthLook, read_health

UPSTREAM_LOADING = {
    "status": "loading", "phase": "expert_banks", "progress": {"done_bytes": 2, "total_bytes": 8}, "instance_id": "a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        (200, {"status": "ok", "maintenance": "serving", "instance_id": "a"}, HealthLook("ready", instance_id="a")),
        (200, {"status": "ok", "maintenance": "rebuilding"}, HealthLook("busy")),
        (200, {"status": "ok", "maintenance": "failed"}, HealthLook("error")),
        (200, UPSTREAM_LOADING, HealthLook("loading", "expert_banks", 2, 8, instance_id="a")),
        (200, {"status": "error", "message": "boom"}, HealthLook("error", message="boom")),
        (503, {"error": {"message": "Loading model"}}, HealthLook("loading")),
        (200, {"status": "ok"}, HealthLook("ready")),
    ],
)
def test_health_answers_of_known_engines_are_read(code: int, body: dict[str, object], expected: HealthLook) -> None:
    assert read_health(code, json.dumps(body).encode()) == expected


@pytest.mark.parametrize(("code", "expected"), [(200, "ready"), (503, "loading"), (404, "loading")])
def test_an_answer_that_is_no_json_is_judged_by_its_code(code: int, expected: str) -> None:
    assert read_health(code, b"").status == expected


def test_nonsense_in_progress_counts_nothing() -> None:
    body = json.dumps({"status": "loading", "progress": {"done_bytes": "many", "total_bytes": None}}).encode()
    assert read_health(200, body) == HealthLook("loading")
