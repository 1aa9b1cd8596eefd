"""20 function headers, what a model puts after them, and whether that is Python.

Knows nothing of the trainer or its text, so a test loads this file alone.
"""

from __future__ import annotations

import ast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEADS = (
    ("count_words(text)", "Return a dict that maps each word of text to how often it occurs."),
    ("read_lines(path)", "Return the lines of the file at path, without their line ends."),
    ("find_largest(values)", "Return the largest of values, or None when there are none."),
    ("is_palindrome(word)", "Return True if word reads the same backwards."),
    ("write_json(path, data)", "Write data to path as JSON."),
    ("flatten(items)", "Return one list with the items of all lists in items."),
    ("parse_header(line)", "Split a header line into its name and its value."),
    ("connect(host, port, timeout=None)", "Open a socket to host and port and return it."),
    ("join_paths(base, *names)", "Join base and names to one path."),
    ("retry(function, attempts=3)", "Call function until it succeeds, at most attempts times."),
    ("to_hex(data)", "Return the bytes of data as a string of hex digits."),
    ("remove_duplicates(items)", "Return items without repetition, in their order."),
    ("format_size(size)", "Return size as a human readable string."),
    ("load_config(filename)", "Read the configuration file and return its sections as a dict."),
    ("get_extension(filename)", "Return the extension of filename in lower case."),
    ("merge(left, right)", "Merge two sorted lists into one."),
    ("check_type(value, expected)", "Raise TypeError unless value is an instance of expected."),
    ("run_command(args)", "Run a command in a subprocess and return its output."),
    ("make_logger(name, level)", "Return a logger of this name that writes to stderr."),
    ("copy_tree(source, target)", "Copy the directory source to target with all that is in it."),
)


def make_prompts() -> list[str]:
    """The 20 function headers, each with its docstring and nothing after it."""
    return [f'def {head}:\n    """{doc}"""\n' for head, doc in HEADS]


@torch.inference_mode()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_tokens: int = 96
) -> list[str]:
    """What the model puts after each prompt, taking the likeliest token each time."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False).to(
        model.device
    )
    out = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False, temperature=None, top_p=None)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def is_good_completion(prompt: str, completion: str) -> bool:
    """Whether prompt and completion are valid Python up to the last complete statement.

    The cut may take at most half of the completion's lines, and at least one statement of it must be left,
    so that a cut back to the prompt does not count.
    """
    lines = completion.rstrip().split("\n")
    for kept in range(len(lines), max(1, len(lines) // 2) - 1, -1):
        text = prompt + "\n".join(lines[:kept]) + "\n"
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        return len(tree.body) > 1 or len(tree.body[0].body) > 1
    return False
