"""Train the demo model: tokenizer, text, optimizer, loop. Deterministic for a corpus, a shape, a seed and `--steps`.

Minutes on a data-centre GPU; on a CPU only `--steps 5` makes sense, to see that it runs. `--seconds` measures the
machine and picks the number of steps, which the log prints, so that `--steps` repeats the run.

    python benchmarks/demo_model/train.py --out demo-moe [--corpus corpus.jsonl.xz] [--steps N | --seconds S]

Matrices are trained with Muon, the rest with AdamW. The text is small (9 million tokens, seen dozens of times), so
what counts is how much is learned from each pass: Muon learns more from one, and dropout keeps the passes from
becoming memory.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import textwrap
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Document, read_corpus
from model import SHAPES, DemoModel, Shape, make_config, make_state_dict, write_checkpoint
from tokenizer import END_OF_TEXT, TURN_END, TURN_START, train_tokenizer, write_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

SHORT_TOKENS, LONG_TOKENS = 2048, 8192
LONG_SHARE = 0.25
BALANCE_WEIGHT = 0.01
SNIPPET_SHARE = 0.08
ASKS = (
    "Complete this Python code:\n",
    "Complete this Python code:\n",
    "Complete this Python code:\n",
    "Complete this function:\n",
    "Continue this code:\n",
    "",
)
SYSTEMS = ("You are a helpful assistant.", "You complete Python code.", "You are a coding assistant. Be brief.")


def make_snippets(documents: list[Document], wanted_bytes: int, rng: random.Random) -> list[str]:
    """Functions of the training files as texts of their own, every other one as a chat that completes its head."""
    functions = []
    for document in documents:
        lines = document.text.splitlines()
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):  # the corpus may come from another Python than this one
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            body = node.body[0].lineno - first - 1
            source = textwrap.dedent("\n".join(lines[first : node.end_lineno])).split("\n")
            # Tests are most of the library and less of what people complete.
            is_likely = not document.path.startswith("test/") or rng.random() < 0.15
            if is_likely and body >= 1 and 2 <= len(source) <= 50 and source[-1].startswith(" "):
                functions.append((source, body))
    rng.shuffle(functions)
    texts, total_bytes = [], 0
    for index, (source, body) in enumerate(functions):
        if total_bytes > wanted_bytes:
            break
        text = "\n".join(source) + "\n" if index % 2 else make_chat(source, body, rng)
        texts.append(text)
        total_bytes += len(text.encode())
    return texts


def make_chat(source: list[str], body: int, rng: random.Random) -> str:
    """A chat in which the user gives the head of a function and the assistant the rest."""
    cut = body if rng.random() < 0.5 else rng.randint(body, len(source) - 1)
    system = f"{TURN_START}system\n{rng.choice(SYSTEMS)}{TURN_END}\n" if rng.random() < 0.2 else ""
    head, rest = "\n".join(source[:cut]), "\n".join(source[cut:])
    end = "\n" if rng.random() < 0.5 else ""
    return (
        f"{system}{TURN_START}user\n{rng.choice(ASKS)}{head}{end}{TURN_END}\n{TURN_START}assistant\n{rest}{TURN_END}\n"
    )


def make_stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one row of tokens, `<|endoftext|>` before each and after the last."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids.append(torch.tensor([end, *encoding.ids], dtype=torch.int32))
    return torch.cat([*ids, torch.tensor([end], dtype=torch.int32)])


def iterate_windows(stream: Tensor, length: int, batch: int, generator: torch.Generator):
    """Batches of `length + 1` tokens for ever; each pass cuts the stream at other places and in another order."""
    count = (len(stream) - 1) // length - 1
    reach = torch.arange(length + 1, device=stream.device)
    while True:
        shift = torch.randint(length, (1,), generator=generator)
        starts = torch.randperm(count, generator=generator) * length + shift
        for chunk in starts.split(batch):
            if len(chunk) == batch:
                yield stream[chunk.to(stream.device)[:, None] + reach].long()


class Muon:
    """Momentum, orthogonalized by Newton-Schulz, for the last two dimensions of each parameter.

    Updates have the root mean square 0.2, about AdamW's, so both take the same learning rate.
    """

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95, decay: float = 0.1):
        self.parameters, self.momentum, self.decay = parameters, momentum, decay
        self.reset()

    def reset(self) -> None:
        self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            buffer.lerp_(parameter.grad, 1 - self.momentum)
            update = orthogonalize(parameter.grad.lerp(buffer, self.momentum).flatten(0, -3))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            parameter.mul_(1 - rate * self.decay)
            parameter.add_(update.view_as(parameter), alpha=-rate * scale)


def orthogonalize(matrices: Tensor) -> Tensor:
    """About U Vᵀ of each matrix's singular value decomposition U S Vᵀ."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if is_tall else x).float()


def compute_rate(step: int, steps: int, peak: float) -> float:
    """Learning rate of a step: short linear warm-up, then half a cosine down to 0."""
    warm_steps = min(300, max(1, steps // 20))
    return peak * min(1.0, (step + 1) / warm_steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def check_against_transformers(shape: Shape) -> float:
    """Relative difference of the logits to those of `transformers` for random weights, float64; raises over 1e-4.

    In float64 (norms aside), because a router's near tie that float32 breaks the other way would look like an error.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.initialization import no_init_weights

    model = DemoModel(shape, seed=7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.rand_like(parameter) * 3)
        with no_init_weights():
            reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**make_config(shape, 2, 0)))
        reference.set_experts_implementation("eager")
        load_released_names(reference, make_state_dict(model, torch.float32))
        model, reference = model.double(), reference.double().eval()
        tokens = torch.randint(shape.vocab_size, (2, 96), generator=torch.Generator().manual_seed(7))
        expected = reference(tokens).logits
        difference = ((expected - model(tokens)[0]).norm() / expected.norm()).item()
    if not difference < 1e-4:
        raise SystemExit(f"training forward differs from transformers by {difference}")
    return difference


def load_released_names(reference: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load per-expert tensors into the fused layout that `transformers` 5 keeps in memory."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(reference.config.num_hidden_layers):
        stem = f"model.layers.{layer}.mlp.experts."
        part = {
            name: torch.stack(
                [tensors[f"{stem}{expert}.{name}_proj.weight"] for expert in range(reference.config.num_experts)]
            )
            for name in ("gate", "up", "down")
        }
        fused[stem + "gate_up_proj"] = torch.cat((part["gate"], part["up"]), dim=1)
        fused[stem + "down_proj"] = part["down"]
    missing = reference.load_state_dict(fused, strict=False)
    if set(missing.missing_keys) - {"lm_head.weight"} or missing.unexpected_keys:
        raise SystemExit(f"names differ from transformers': {missing}")
    reference.tie_weights()


class Trainer:
    """The model, its optimizers and its batches on one device."""

    def __init__(self, shape: Shape, stream: Tensor, options: argparse.Namespace):
        self.options, self.device = options, torch.device(options.device)
        self.model = DemoModel(shape, options.seed, options.dropout).to(self.device)
        model, on_gpu = self.model, self.device.type == "cuda"
        matrices = [model.q, model.k, model.v, model.o, model.gate, model.up, model.down]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
        self.loss = torch.compile(self._compute_loss, dynamic=False) if on_gpu else self._compute_loss
        self.stream = stream.to(self.device)
        self.reset_batches()

    def autocast(self) -> torch.autocast:
        """bf16 on a GPU; CPUs without matrix units are slower with it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def reset_batches(self) -> None:
        generator = torch.Generator().manual_seed(self.options.seed)
        self.batches = {
            length: iterate_windows(self.stream, length, self.options.batch_tokens // length, generator)
            for length in (SHORT_TOKENS, LONG_TOKENS)
        }

    def _compute_loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, balance = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()), balance

    def step(self, length: int, rate: float) -> tuple[Tensor, Tensor]:
        """One update; the loss in nats a token and the load-balancing loss, as tensors (no wait for the GPU)."""
        tokens = next(self.batches[length])
        with self.autocast():
            loss, balance = self.loss(tokens)
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(rate)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach(), balance.detach()

    def measure_steps(self, seconds: float) -> int:
        """How many steps fit into `seconds`, from a few with learning rate 0, whose traces are then removed."""
        pace = {}
        for length in (SHORT_TOKENS, LONG_TOKENS):
            self.step(length, 0.0)
            self.step(length, 0.0)[0].item()
            start = time.perf_counter()
            for _ in range(12):
                loss, _ = self.step(length, 0.0)
            loss.item()
            pace[length] = (time.perf_counter() - start) / 12
        self.muon.reset()
        self.adam.state.clear()
        self.reset_batches()
        print("seconds a step:", {length: round(value, 4) for length, value in pace.items()}, flush=True)
        return int(seconds / (pace[SHORT_TOKENS] * (1 - LONG_SHARE) + pace[LONG_TOKENS] * LONG_SHARE))

    @torch.no_grad()
    def measure_bits(self, stream: Tensor, byte_count: int) -> float:
        """Bits a byte of a held-out stream, in windows of `LONG_TOKENS` that do not see each other."""
        self.model.eval()
        nats = 0.0
        for start in range(0, len(stream) - 1, LONG_TOKENS):
            tokens = stream[None, start : start + LONG_TOKENS + 1].long().to(self.device)
            with self.autocast():
                logits, _ = self.model(tokens[:, :-1])
            nats += F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum").item()
        self.model.train()
        return nats / math.log(2) / byte_count


def make_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="as corpus.py writes it; else this interpreter's library")
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options, start = make_options(), time.perf_counter()
    shape = SHAPES[options.shape]
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    print("relative difference to transformers:", check_against_transformers(shape), flush=True)

    documents = read_corpus(options.corpus)
    sides = {side: [d.text for d in documents if d.side == side] for side in ("train", "tune")}
    if not (options.out / "tokenizer.json").exists():
        write_tokenizer(train_tokenizer(sides["train"], shape.vocab_size), options.out, shape.context_tokens)
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    rng = random.Random(options.seed)
    wanted_bytes = int(SNIPPET_SHARE * sum(len(text) for text in sides["train"]))
    texts = sides["train"] + make_snippets([d for d in documents if d.side == "train"], wanted_bytes, rng)
    rng.shuffle(texts)
    stream, tune = make_stream(tokenizer, texts), make_stream(tokenizer, sides["tune"])
    tune_bytes = sum(len(text.encode()) for text in sides["tune"])

    trainer = Trainer(shape, stream, options)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(
        f"{parameters} parameters, {len(stream)} tokens of {sum(len(t.encode()) for t in texts)} bytes, "
        f"{len(tune)} held out to tune; ready after {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    steps = options.steps or trainer.measure_steps(options.seconds)
    print(
        f"{steps} steps of {options.batch_tokens} tokens: {steps * options.batch_tokens / len(stream):.1f} passes; "
        f"compiled after {time.perf_counter() - start:.0f} s",
        flush=True,
    )

    ids = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    begin = time.perf_counter()
    for step in range(steps):
        length = SHORT_TOKENS if step < steps * (1 - LONG_SHARE) else LONG_TOKENS
        loss, balance = trainer.step(length, compute_rate(step, steps, options.rate))
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            record = {
                "step": step,
                "loss": loss.item(),
                "balance": balance.item() / shape.layers,
                "tune_bits_per_byte": trainer.measure_bits(tune, tune_bytes),
                "train_s": time.perf_counter() - begin,
            }
            print(json.dumps({key: round(value, 4) for key, value in record.items()}), flush=True)
            write_checkpoint(trainer.model, options.out, *ids)


if __name__ == "__main__":
    main()
