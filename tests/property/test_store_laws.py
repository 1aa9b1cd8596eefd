import itertools
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.store import open_store
from freetoken.store.rows import EventRow, ResultRow

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6,
)  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory()
_RUNS = itertools.count()
_STORE = open_store(Path(_FOLDER.name) / "ft.db")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(texts, texts, st.dictionaries(texts, values, max_size=3)), max_size=5))
def test_events_of_any_content_come_back_in_order(events):
    run = next(_RUNS)
    rows = [EventRow(run_id=str(run), at=f"{index:04d}", kind=kind, message=message, data=data)
            for index, (kind, message, data) in enumerate(events)]  # fmt: skip
    _STORE.record_events(rows)
    assert [one.model_copy(update={"id": None}) for one in _STORE.list_events(str(run))] == rows


@settings(max_examples=40, deadline=None)
@given(
    texts,
    st.dictionaries(texts, values, max_size=3),
    st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False)),
)
def test_results_of_any_content_come_back(recipe, chosen, metrics):
    run = next(_RUNS)
    row = ResultRow(run_id=str(run), recipe_name=recipe, workload="w", engine="native", model_name="m",
                    settings=chosen, metrics=metrics)  # fmt: skip
    number = _STORE.record_result(row)
    assert _STORE.list_results(run_id=str(run)) == (row.model_copy(update={"id": number}),)
