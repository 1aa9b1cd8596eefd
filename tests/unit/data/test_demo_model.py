"""The bundled demo model: its figures, its tokenizer and chat template, and whether it really completes code."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "freetoken" / "data" / "demo-moe"
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((MODEL / "config.json").read_text())


@pytest.fixture(scope="module")
def shapes() -> dict[str, list[int]]:
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 -- no mapping


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def load_completions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("completions", ROOT / "benchmarks/demo_model/completions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_is_a_small_qwen3_moe_with_8k_positions(config: dict) -> None:
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_hidden_layers"] >= 4
    assert config["num_experts"] >= 32
    assert config["num_experts_per_tok"] == 4
    assert config["max_position_embeddings"] == 8192
    assert config["head_dim"] in (32, 64)
    assert not config["hidden_size"] % 16
    assert not config["moe_intermediate_size"] % 16


def test_checkpoint_has_at_most_8_million_parameters_in_bf16(shapes: dict) -> None:
    assert sum(math.prod(shape) for shape in shapes.values()) <= 8_000_000
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in shapes} == {"BF16"}


def test_checkpoint_names_one_tensor_for_each_projection_of_each_expert(config: dict, shapes: dict) -> None:
    experts = {name for name in shapes if ".experts." in name}
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(config["num_hidden_layers"])
        for expert in range(config["num_experts"])
        for part in ("gate", "up", "down")
    }


def test_folder_is_at_most_16_mib_and_says_that_it_is_a_demo() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16 * 2**20
    assert "\nA demo that completes code, and no more than that" in (MODEL / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        Path(__file__).read_text(),
        "def f(x):\n\treturn '\u00e9\u4e16\U0001f600' + \"\\x00\"\r\n\n\n    # trailing   \n",
        " ",
        "".join(map(chr, range(256))),
    ],
)
def test_tokenizer_gives_any_text_back(tokenizer: PreTrainedTokenizerBase, config: dict, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids == ids
    assert max(ids) < config["vocab_size"] == len(tokenizer)


def test_special_tokens_are_one_token_each_and_end_generation(tokenizer: PreTrainedTokenizerBase, config: dict) -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text())
    ids = tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"]
    assert ids == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert generation["eos_token_id"] == [ids[2], ids[0]]
    assert config["eos_token_id"] == tokenizer.eos_token_id == ids[2]
    assert config["pad_token_id"] == tokenizer.pad_token_id == ids[0]


def test_chat_template_renders_turns_and_the_start_of_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_renders_tools_calls_and_their_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"function": {"name": "read", "arguments": {"path": "x"}}}
    written = {"function": {"name": "read", "arguments": '{"path": "y"}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, written]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    head, _, rest = text.partition("</tools>")
    assert (
        head == f"<|im_start|>system\n# Tools\n\nFunctions that you may call, as JSON, one a line:\n<tools>\n"
        f"{json.dumps(TOOL)}\n"
    )
    assert rest.partition("<|im_end|>\n")[2] == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read", "arguments": {"path": "y"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_completion_counts_only_when_a_statement_of_it_is_left() -> None:
    is_good = load_completions().is_good_completion
    head = 'def f(a):\n    """Doc."""\n'
    assert is_good(head, "    b = a\n    return (b +")
    assert is_good(head, "    return a\n")
    assert not is_good(head, "    # nothing but a comment\n")
    assert not is_good(head, "    return (((")
    assert not is_good(head, "    return a\n  x = (\n 1\n2\n3\n")


def test_at_least_10_of_20_completions_of_function_headers_parse(tokenizer: PreTrainedTokenizerBase) -> None:
    module = load_completions()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    prompts = module.make_prompts()
    # The likeliest token each time: nothing is drawn, so every run of it is the seeded run.
    completions = module.complete(model, tokenizer, prompts)
    good = [module.is_good_completion(*pair) for pair in zip(prompts, completions, strict=True)]
    assert len(good) == 20
    assert sum(good) >= 10, completions
