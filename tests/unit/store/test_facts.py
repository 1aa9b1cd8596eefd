from freetoken.store.rows import DeploymentRow, LineContext, ResultRow, RunFacts, RunRow


def make_facts(hardware, at, action, **run):
    row = RunRow(id="r1", deployment="demo", engine="native", model_name="m", started_at=at, **run)
    deployment = DeploymentRow(
        name="demo", run_id="r1", engine="native", model_name="m", recipe={}, action=action, declared_at=at
    )
    result = ResultRow(recipe_name="demo", workload="w", engine="native", model_name="m", kind="proof", measured_at=at)
    return RunFacts(fingerprint="f", hardware=hardware, run=row, deployment=deployment, results=(result,),
                    context=LineContext(engine="native"))  # fmt: skip


def test_a_resize_adds_to_its_run_and_leaves_its_start(store, hardware):
    store.record_facts(make_facts(hardware, "2031-01-01T10", "launch", outcome="ready"))
    store.record_facts(make_facts(hardware, "2031-01-01T11", "resize", outcome="ready"))
    assert [run.started_at for run in store.list_runs()] == ["2031-01-01T10"]
    assert [one.action for one in store.list_deployments()] == ["resize", "launch"]
    assert [one.measured_at for one in store.list_results()] == ["2031-01-01T11", "2031-01-01T10"]
