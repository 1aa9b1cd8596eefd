"""The Python API on the demo model, from nothing to a measured answer and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken import api
from tests.e2e.life import Lab, make_lab  # noqa: F401


def test_a_deployment_is_made_measured_changed_and_ended(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.yaml").write_text(
        "name: short\nturns: 1\nprompt_tokens: 200\noutput_tokens: 24\nconcurrency: 1\n"
    )
    sets = (f"serve.port={lab.port}", "settings.prefill_chunk_tokens=512")
    steps = []
    try:
        made = api.apply("demo", sets=sets, progress=steps.append)
        assert (made.diff.action, made.proof is not None) == ("launch", True)
        assert {step.phase for step in steps} >= {"plan", "launch", "load", "prove"}
        (view,) = api.status("demo").deployments
        assert (view.condition, view.is_wrong) == ("ready", False)
        measured = api.measure(workload=str(tmp_path / "short.yaml"), repeats=1).result
        assert measured.mean("decode_tps") > 0
        assert 0 < measured.mean("hit_ratio") <= 1
        assert api.results()[0].workload == "short"
        with api.connect() as client:
            before = client.health().instance_id
        resized = api.apply("demo", sets=(*sets, "settings.expert_slots=40"))
        assert resized.diff.action == "resize"
        with api.connect() as client:
            assert (client.health().instance_id, client.cache_status().geometry.moe_cache_size) == (before, 40)
    finally:
        ended = api.stop(everything=True)
    assert [(one.name, one.is_port_free, one.left) for one in ended] == [("demo", True, ())]
