import json

from freetoken.recipe.dump import dump_recipe, make_recipe_schema, make_workload_schema
from freetoken.recipe.load import load_recipe


def test_a_dumped_recipe_loads_as_the_same_recipe(base, write, folder):
    settings = "settings: {expert_slots: 1536MiB}\ngood_enough: {ttft_p95: 250ms}\n"
    write("x", f"name: x\nextends: base\ndescription: '010'\n{settings}")
    loaded = load_recipe("x")
    target = folder / "runs" / "recipe.yaml"
    target.parent.mkdir()
    target.write_text(dump_recipe(loaded.recipe))
    again = load_recipe(str(target), defaults={})
    assert again.recipe == loaded.recipe.model_copy(update={"extends": None})
    assert again.notes == ()
    assert "expert_slots: 1536MiB" in target.read_text()


def test_a_relative_model_path_is_anchored_when_asked(write, folder):
    write("x", "name: x\nmodel: {path: weights}\nworkload: chat-2k\n")
    loaded = load_recipe("x")
    assert f"path: {folder / 'recipes' / 'weights'}\n" in dump_recipe(loaded.recipe, base_dir=loaded.base_dir)
    assert "path: weights\n" in dump_recipe(loaded.recipe)


def test_schemas_are_json_and_know_what_a_file_may_say():
    recipe, workload = make_recipe_schema(), make_workload_schema()
    json.dumps([recipe, workload])
    assert recipe["properties"]["workload"]["anyOf"] == [
        {"type": "string", "description": "name or path of a workload"}, {"$ref": "#/$defs/Workload"},
    ]  # fmt: skip
    assert (recipe["then"], recipe["else"]) == ({"required": ["name"]}, {"required": ["name", "model", "workload"]})
    kv_tokens = recipe["$defs"]["Settings"]["properties"]["kv_tokens"]
    assert kv_tokens["anyOf"] == [
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 1}, {"const": "auto", "type": "string"},
    ]  # fmt: skip
    assert workload["properties"]["output_tokens"]["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert recipe["additionalProperties"] is False
