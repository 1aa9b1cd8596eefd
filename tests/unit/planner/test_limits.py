"""Limits of the recipe itself: every finding, in words with both figures."""

import pytest

from freetoken.hardware.model import Software
from freetoken.planner.limits import check_request, is_older
from tests.fakes.planner_cases import make_gpu, make_machine, make_qwen_shape, make_recipe, make_request

NEEDS = {
    "gpu": {"vram": ">=8GiB", "compute_capability": ">=8.9", "driver": ">=590", "cuda": ">=13.1"},
    "ram": {"available": ">=64GiB"},
    "disk": {"free": ">=900GiB"},
    "cpu": {"isa": ["avx512f"], "cores": 16},
}


def messages(recipe, machine=None, **request):
    found = check_request(make_request(recipe, machine or make_machine(make_gpu(6, 5.6)), **request))
    return {finding.check: finding.message for finding in found if finding.is_fatal}


def test_every_need_of_the_recipe_is_told_at_once():
    assert messages(make_recipe(hardware=NEEDS)) == {
        "vram": "`card of 6 GiB` has 6.00 GiB of VRAM, the recipe asks for 8.00 GiB or more",
        "gpu_generation": "`card of 6 GiB` has compute capability 8.6, the recipe asks for 8.9 or newer",
        "driver": "driver is 580.95.05, the recipe asks for 590 or newer",
        "cuda": "cuda is 13.0, the recipe asks for 13.1 or newer",
        "ram": "29.0 GiB of RAM available, the recipe asks for 64.0 GiB or more",
        "disk": "500 GiB of disk free, the recipe asks for 900 GiB or more",
        "cpu_isa": "the CPU lacks avx512f, which the recipe asks for",
        "cpu_cores": "8 usable cores, the recipe asks for 16 or more",
    }


def test_room_on_disk_is_not_asked_for_a_checkpoint_that_is_here():
    assert "disk" not in messages(make_recipe(hardware=NEEDS), model_path="/models/here")


def test_what_a_profile_does_not_say_is_a_word_and_on_this_machine_a_no():
    recipe = make_recipe(hardware={"gpu": {"driver": ">=580"}})
    silent = make_machine(make_gpu(6, 5.6), software=Software())
    found = check_request(make_request(recipe, silent))
    assert [(one.check, one.is_fatal) for one in found] == [("driver", False)]
    here = check_request(make_request(recipe, silent.model_copy(update={"is_probed": True})))
    assert [(one.check, one.is_fatal) for one in here] == [("driver", True)]


def test_a_recipe_that_asks_for_a_gpu_is_refused_without_one():
    assert (
        messages(make_recipe(hardware=NEEDS), make_machine())["gpu"]
        == "the recipe asks for a GPU and there is none here"
    )


def test_a_gpu_that_is_not_there_is_named_beside_those_that_are():
    found = messages(make_recipe(settings={"gpu": 3}))
    assert found == {"gpu_choice": "there is no GPU `3` here; GPUs: 0 (card of 6 GiB)"}


def test_settings_below_the_workload_are_refused():
    work = {"prompt_tokens": 3000, "output_tokens": 1000, "concurrency": 2, "context_tokens": 4096, "name": "pair"}
    recipe = make_recipe(workload=work, settings={"kv_tokens": 4096, "max_running_requests": 1})
    assert messages(recipe) == {
        "kv_tokens": "`settings.kv_tokens` is 4,096, workload `pair` needs 8,192 (2 x 4,096)",
        "max_running_requests": "`settings.max_running_requests` is 1, workload `pair` runs 2 requests at once",
    }


def test_a_workload_beyond_the_models_context_is_refused():
    work = {"name": "huge", "prompt_tokens": 300_000, "output_tokens": 10}
    found = messages(make_recipe(workload=work), shape=make_qwen_shape())
    assert found == {"context": "workload `huge` needs 300,010 tokens of context, `Qwen3.6-35B-A3B-NVFP4` has 262,144"}


def test_another_address_than_the_loopback_needs_a_key():
    assert "api_key" in messages(make_recipe(serve={"host": "0.0.0.0"}))
    assert "api_key" not in messages(make_recipe(serve={"host": "0.0.0.0", "api_key_env": "FREETOKEN_API_KEY"}))


def test_a_port_that_is_taken_now_is_a_word_and_no_refusal():
    request = make_request(make_recipe(), make_machine(make_gpu(6, 5.6)))
    taken = {
        "taken_ports": ("port 1920 is taken by `nginx` (process 7)",),
        "taken_ports_hint": "`--set serve.port=1921`",
    }
    (found,) = check_request(request.model_copy(update=taken))
    assert (found.check, found.message, found.is_fatal) == ("port", "port 1920 is taken by `nginx` (process 7)", False)
    assert found.hint == "`--set serve.port=1921`"


def test_an_installed_engine_outside_the_recipes_range_is_refused():
    recipe = make_recipe(engine={"name": "freetoken", "version": ">=0.2.1,<0.3"})
    assert messages(recipe, engine_version="0.2.1") == {}
    assert messages(recipe, engine_version="0.1.2") == {
        "engine_version": "engine `freetoken` is 0.1.2, the recipe asks for `>=0.2.1,<0.3`"
    }


@pytest.mark.parametrize(
    ("found", "needed", "older"), [("580.95.05", "580", False), ("575.64", "580", True), ("8.0", "8.0", False),
                                   ("7.5", "8.0", True), ("12.0", "8.0", False), ("weird", "1", False)],
)  # fmt: skip
def test_versions_are_compared_as_versions(found, needed, older):
    assert is_older(found, needed) is older
