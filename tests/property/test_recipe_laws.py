import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import FtError
from freetoken.recipe.dump import dump_recipe, dump_yaml
from freetoken.recipe.load import load_recipe
from freetoken.recipe.merge import drop_nulls, merge
from freetoken.recipe.model import Recipe
from freetoken.recipe.nodes import Mark, from_plain, parse_value, parse_yaml

keys = st.sampled_from(["settings", "model", "engine", "kv_tokens", "name", "path", "repo", "serve"])
scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8)
trees = st.recursive(scalars, lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=12)
mappings = st.dictionaries(keys, trees, max_size=4)
# What YAML may hold at all: no control characters, no lone surrogates.
written = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufeff\ufffe\uffff"), max_size=20)


def refusal(call):
    """The FtError that `call` ends with, or None; any other error fails the test."""
    try:
        call()
    except FtError as error:
        return error
    return None


def node(value):
    return from_plain(value, Mark("x"), "recipe")


@given(st.dictionaries(written, written | st.booleans() | st.integers() | st.floats(allow_nan=False), max_size=5))
def test_what_we_write_as_yaml_is_what_we_read(values):
    found = parse_yaml(dump_yaml(values), "x").plain()
    # A float that YAML cannot write as we read it (`1e+16`) comes back as the same number.
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert float(found[key]) == value if isinstance(value, float) else found[key] == value


@given(mappings)
def test_merging_over_nothing_and_under_nothing_changes_nothing(values):
    assert merge(node({}), node(values)).plain() == values
    assert merge(node(values), node({})).plain() == values


@given(mappings, mappings)
def test_what_is_above_wins_wherever_it_says_something(below, above):
    merged = merge(node(below), node(above)).plain()
    for path, leaf in node(above).leaves():
        if not (isinstance(leaf.value, dict)):
            value = merged
            for step in path:
                value = value[step]
            assert value == leaf.value


@given(mappings)
def test_nothing_empty_is_left_after_dropping(values):
    assert all(leaf.value is not None for _, leaf in drop_nulls(node(values)).leaves())


@given(st.text(max_size=60))
def test_any_text_is_a_document_or_a_bad_file(text):
    error = refusal(lambda: parse_yaml(text, "x").plain())
    assert error is None or error.message.startswith("x")


@given(st.text(max_size=40))
def test_any_text_can_be_a_set_value(text):
    parse_value(text, "--set x")


bytes_or_auto = st.one_of(
    st.just("auto"), st.integers(0, 10**6), st.builds(lambda n: {"bytes": n}, st.integers(0, 2**40))
)
recipes = st.fixed_dictionaries({
    "name": st.just("law"),
    "description": written,
    "model": st.one_of(st.just({"repo": "a/b"}), st.builds(lambda name: {"path": name}, written.filter(bool))),
    "engine": st.fixed_dictionaries({
        "env": st.dictionaries(written, written, max_size=3), "extra_args": st.lists(written, max_size=3),
    }),
    "workload": st.fixed_dictionaries({"turns": st.integers(1, 9), "concurrency": st.integers(1, 9)}),
    "settings": st.fixed_dictionaries({
        "expert_slots": bytes_or_auto,
        "memory_ratio": st.one_of(st.just("auto"), st.floats(0.01, 1.0)),
        "gpu": st.one_of(st.integers(0, 7), st.just("auto"), st.just("GPU-1e3")),
        "prefix_cache": st.sampled_from(["auto", True, False]),
    }),
    "headroom": st.one_of(st.sampled_from(["server", "desktop", "wsl"]), st.integers(0, 2**40)),
    "good_enough": st.fixed_dictionaries({"ttft_p95": st.floats(0.001, 1e4)}),
})  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(recipes)
def test_a_dumped_recipe_is_read_back_as_itself(tmp_path_factory, values):
    recipe = Recipe.model_validate(values)
    target = tmp_path_factory.getbasetemp() / "laws" / "recipe.yaml"
    target.parent.mkdir(exist_ok=True)
    target.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(str(target), defaults={}).recipe == recipe


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*Recipe.model_fields, "bogus"]), trees, max_size=5))
def test_any_mapping_is_a_recipe_or_a_bad_file(tmp_path_factory, values):
    target = tmp_path_factory.getbasetemp() / "laws" / "recipe.yaml"
    target.parent.mkdir(exist_ok=True)
    target.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    error = refusal(lambda: load_recipe(str(target), defaults={}))
    assert error is None or (error.exit_code == 2 and all((error.message, *error.details)))
