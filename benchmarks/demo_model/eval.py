"""Measure the saved demo model as any user would run it: stock `transformers`, bf16 weights, nothing of the trainer.

Bits a byte on held-out files, how many of 20 completions parse, and how local the routing is.

    python benchmarks/demo_model/eval.py freetoken/data/demo-moe --corpus corpus.jsonl.xz
"""

from __future__ import annotations

import argparse
import json
import math
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from completions import complete, is_good_completion, make_prompts
from corpus import read_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@torch.inference_mode()
def measure_bits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Bits that one file costs, its end included; past the context it goes on in a window that starts afresh."""
    window = model.config.max_position_embeddings
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ids = torch.tensor([end, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], end])
    nats = 0.0
    for start in range(0, len(ids) - 1, window - 1):
        part = ids[None, start : start + window].to(model.device)
        logits = model(part).logits[0, :-1].float()
        nats += F.cross_entropy(logits, part[0, 1:], reduction="sum").item()
    return nats / math.log(2)


@torch.inference_mode()
def measure_routing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, float]:
    """How routing behaves over one text, token by token; the `chance_` figures are those of uniform routing."""
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"]
    ids = ids[:, :4096].to(model.device)
    logits = model(ids, output_router_logits=True).router_logits
    layers, experts = len(logits), model.config.num_experts
    top_k = model.config.num_experts_per_tok
    chosen = torch.stack([layer.float().topk(top_k).indices for layer in logits]).cpu()
    used = torch.nn.functional.one_hot(chosen, experts).sum(2).float()
    share = used.mean(1) / top_k * experts
    figures = {
        "repeat_ratio": ((used[:, 1:] * used[:, :-1]).sum(-1) / top_k).mean().item(),
        "chance_repeat_ratio": top_k / experts,
        "least_expert_share": share.min().item(),
        "largest_expert_share": share.max().item(),
    }
    shuffled = torch.stack(
        [
            torch.rand(ids.shape[1], experts, generator=torch.Generator().manual_seed(layer)).topk(top_k).indices
            for layer in range(layers)
        ]
    )
    for ratio in (0.25, 0.5):
        slots = int(ratio * layers * experts)
        figures[f"lru_hit_ratio_{ratio}"] = replay_lru(chosen, slots)
        figures[f"chance_lru_hit_ratio_{ratio}"] = replay_lru(shuffled, slots)
    return figures


def replay_lru(chosen: torch.Tensor, slots: int) -> float:
    """Hit rate of one LRU of `slots` experts over all layers, for `chosen` of shape layers, tokens, top k."""
    resident: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = lookups = 0
    for token in chosen.transpose(0, 1).tolist():
        for layer, experts in enumerate(token):
            for expert in experts:
                key, lookups = (layer, expert), lookups + 1
                if key in resident:
                    hits += 1
                    resident.move_to_end(key)
                    continue
                resident[key] = None
                if len(resident) > slots:
                    resident.popitem(last=False)
    return hits / lookups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpus", type=Path, help="as corpus.py writes it; else this interpreter's library")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show", action="store_true", help="print the completions")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(options.device).eval()

    prompts = make_prompts()
    completions = complete(model, tokenizer, prompts)
    good = [is_good_completion(*pair) for pair in zip(prompts, completions, strict=True)]
    if options.show:
        for prompt, completion, is_good in zip(prompts, completions, good, strict=True):
            print("#", "parses" if is_good else "DOES NOT PARSE", f"\n{prompt}{completion}\n")
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Complete this Python code:\n{prompt}"}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt in prompts[:4]
        ]
        for chat, answer in zip(chats, complete(model, tokenizer, chats), strict=True):
            print(f"# chat\n{chat}{answer}\n")
    print(json.dumps({"good_completions": sum(good), "of": len(good)}), flush=True)

    test = [document for document in read_corpus(options.corpus) if document.side == "test"]
    longest = max(test, key=lambda document: len(document.text))
    print(json.dumps(measure_routing(model, tokenizer, longest.text)), flush=True)
    sizes = [len(document.text.encode()) for document in test]
    bits = [measure_bits(model, tokenizer, document.text) for document in test]
    for document, size, value in zip(test, sizes, bits, strict=True) if options.show else []:
        print(f"{value / size:.3f} {size:7} {document.path}")
    print(json.dumps({"test_bits_per_byte": sum(bits) / sum(sizes), "files": len(test), "bytes": sum(sizes)}))


if __name__ == "__main__":
    main()
