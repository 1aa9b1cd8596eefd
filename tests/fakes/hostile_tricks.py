"""More bundles that must be refused: tricks of zip files and of texts, and few bytes that become many."""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Iterator

import yaml

from freetoken.share import archive
from freetoken.share.archive import EVIDENCE, LOCK, RECIPE
from tests.fakes.hostile import (
    EVIDENCE_VALUE,
    LOCK_VALUE,
    RECIPE_VALUE,
    Case,
    make_base,
    make_recipe_case,
    make_zip,
    parts,
    seal,
)

# --- tricks of the container


def zip_tricks() -> Iterator[Case]:
    base = make_base()
    for method in (9, 12, 14, 93, 95, 98, 99, 0xFFFF):
        yield f"method {method} without a decoder", _patch(base, "<H", method, local=8, central=10)
    for flag, what in ((0x8, "sizes behind the data"), (0x40, "strong encryption"), (0x800, "names in UTF-8"),
                       (0x2000, "an encrypted directory")):  # fmt: skip
        yield f"the flag of {what}", _patch(base, "<H", flag, local=6, central=8)
    yield "the flag of encryption in the directory alone", _patch(base, "<H", 1, central=8)
    yield "a wrong checksum in the directory", _patch(base, "<L", 0xDEADBEEF, central=16)
    yield "a wrong checksum everywhere", _patch(base, "<L", 0xDEADBEEF, local=14, central=16)
    yield "another name in the local header", _patch(base, "<4s", b"b\0ndl"[:4], local=30)
    yield "an offset beyond the end", _patch(base, "<L", len(base) + 1, central=42)
    yield "an offset into another file", _patch(base, "<L", 40, central=42)
    yield "a size that reaches into the next file", _patch(base, "<2L", 5000, 5000, central=20)
    yield "sizes left to zip64", _patch(base, "<2L", 0xFFFFFFFF, 0xFFFFFFFF, central=20)
    yield "a version to come", _patch(base, "<H", 99, local=4, central=6)
    for mode, what in ((stat.S_IFREG | 0o4755, "a setuid program"), (stat.S_IFDIR | 0o755, "a folder"),
                       (stat.S_IFIFO | 0o600, "a pipe"), (stat.S_IFSOCK | 0o600, "a socket"),
                       (stat.S_IFLNK | 0o777, "a link by its mode")):  # fmt: skip
        yield what, _patch(base, "<L", mode << 16, central=38)
    yield "the attributes of DOS", _patch(base, "<L", 0x10, central=38)
    end = base.index(b"PK\5\6")
    yield "a comment of 64 KiB", base[:-2] + struct.pack("<H", 0xFFFF) + b"x" * 0xFFFF
    yield "a comment that is an end", base[:-2] + struct.pack("<H", 22) + base[end:]
    yield "a directory on another disk", _put(base, end + 4, "<2H", 1, 1)
    yield "fewer files than there are", _put(base, end + 8, "<2H", 1, 1)
    yield "more files than there are", _put(base, end + 8, "<2H", 9, 9)
    yield "a directory that begins elsewhere", _put(base, end + 16, "<L", 0)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 4, 4, end - base.index(b"PK\1\2"), 0)
    yield "an end in zip64", base[:end] + wide + struct.pack("<4sLQL", b"PK\6\7", 0, end, 1) + base[end:]
    yield "an end in zip64 that lies", base[:end] + struct.pack("<4sLQL", b"PK\6\7", 0, 1 << 62, 1) + base[end:]
    first = base[base.index(b"PK\1\2") : base.index(b"PK\1\2", base.index(b"PK\1\2") + 1)]
    again = base[:end] + first + base[end:]
    yield (
        "two entries for the same bytes",
        _put(again, end + len(first) + 8, "<2HL", 5, 5, end - len(base) + len(again)),
    )
    for name in ("recipe.yaml\0.sh", "recipe.yaml\0", "\0", "bundle.json\0x", "LOCK.YAML", "Evidence.json", "..", ".",
                 "aux", "recipe.yaml::$DATA", "recipe\uff0eyaml", "lock.yaml.", "~root/x", "-rf",
                 "$HOME/x"):  # fmt: skip
        yield f"one more entry called {name!r}", make_zip({**archive.unpack(base, "base"), name: b"x"})


def _patch(data: bytes, form: str, *values: object, local: int | None = None, central: int | None = None) -> bytes:
    """`data` with `values` written into the first local header or the first entry of the directory."""
    for where, offset in ((0, local), (data.index(b"PK\1\2"), central)):
        if offset is not None:
            data = _put(data, where + offset, form, *values)
    return data


def _put(data: bytes, where: int, form: str, *values: object) -> bytes:
    raw = struct.pack(form, *values)
    return data[:where] + raw + data[where + len(raw) :]


# --- tricks of text: what looks like one thing and is read as another


def text_tricks() -> Iterator[Case]:
    good = yaml.safe_dump(RECIPE_VALUE)
    texts = {
        "a name from Python": good + "x: !!python/name:os.system\n", "a module": good + "x: !!python/module:os\n",
        "a set": good + "hardware: !!set {gpu}\n", "binary": good + "description: !!binary aGk=\n",
        "an ordered map": good + "settings: !!omap [gpu: 0]\n", "a local tag": "!recipe\n" + good,
        "a tag by its URI": good + "x: !<tag:yaml.org,2002:python/object/new:os.system> [id]\n",
        "a merge of an alias": "a: &a {port: 22}\n" + good + "serve: {<<: *a}\n",
        "a key that is a list": good + "? [a, b]\n: 1\n", "a key that is an alias": "a: &a name\n" + good + "*a : x\n",
        "a surrogate": good + 'description: "\\ud800"\n', "an escape in a key": good + '"\\e[2J": 1\n',
        "a key that turns around": good + '"\\u202ename": 1\n',
        "an escape in a value": good + 'description: "\\e]0;x\\a"\n',
        "a zero-width name": good.replace("name: mine", 'name: "mi\\u200bne"'),
        "a hexadecimal port": good + "serve: {port: 0x16}\n", "a port in octal": good + "serve: {port: 0o26}\n",
        "a port in base 60": good + "serve: {port: 1:30}\n", "a budget without end": good + "tune: {budget: .inf}\n",
        "a share that is no number": good + "settings: {memory_ratio: .nan}\n",
        "a rate that is no number": good + "good_enough: {decode_tps: .nan}\n",
        "a size without end": good + "settings: {expert_slots: 9e999GiB}\n",
        "a need without end": good + 'hardware: {gpu: {vram: ">=9e999GiB"}}\n',
        "a headroom without end": good + "headroom: .inf\n",
    }  # fmt: skip
    for label, text in texts.items():
        yield f"recipe text: {label}", seal(parts(**{RECIPE: text.encode("utf-8", "surrogatepass")}))
    for encoding in ("utf-16", "utf-32"):
        yield f"recipe text: in {encoding}", seal(parts(**{RECIPE: (good + "# \u00e9\n").encode(encoding)}))
    for host in (
        "0",
        "::ffff:0.0.0.0",
        "localhost.evil.example",
        " 127.0.0.1",
        "127.0.0.1%00.evil.example",
        "127.1",
        "",
    ):
        yield make_recipe_case(f"serve.host {host!r}", serve={"host": host})
    for port in (0, 65535, 65536, -1, 10**30, 80.5):
        yield make_recipe_case(f"serve.port {port}", serve={"port": port})
    model = dict(RECIPE_VALUE["model"])  # type: ignore[call-overload]
    yield make_recipe_case("a repository that only looks like one", model={"repo": "nvid\u0456a/Qwen3.6-35B-A3B-NVFP4"})
    yield make_recipe_case("a repository in wide letters", model={"repo": "\uff4evidia/Qwen3.6"})
    for file in ("../x.gguf", "a/../../x.gguf", "/etc/passwd", "Q4\u041a_M", "-x", "a\n.gguf"):
        yield make_recipe_case(f"model.file {file!r}", model={**model, "file": file})
    yield make_recipe_case("a source of its own", model={**model, "source": "https://evil.example"})
    for version in (
        "@ file:///x",
        "==0.2.1 --index-url=https://evil.example",
        "freetoken==0.2.1",
        "==0.2.1; id",
        "https://x",
    ):
        yield make_recipe_case(f"engine.version {version!r}", engine={"name": "freetoken", "version": version})
    for name, count in (("cpu_threads", 10**9), ("cpu_layers", 40), ("memory_ratio", 1.0)):
        yield make_recipe_case(f"settings.{name}", settings={name: count})
    yield make_recipe_case("arguments that are no list", engine={"name": "freetoken", "extra_args": "--host 0.0.0.0"})
    yield make_recipe_case("variables that nest", engine={"name": "freetoken", "env": {"OMP_NUM_THREADS": {"a": 1}}})
    yield make_recipe_case("a description of two lines", description="fine\nerror: not fine")
    yield make_recipe_case(
        "a workload's description that turns around", workload={"description": "\u202e", "prompt_tokens": 64}
    )
    yield make_recipe_case(
        "a workload's name with a path", workload={"name": "../x", "prompt_tokens": 64, "output_tokens": 8}
    )


# --- floods: few bytes that become many


def floods() -> Iterator[Case]:
    entry = struct.pack("<4sBBH4H3L5H2L", b"PK\1\2", 20, 3, 20, 0, 0, 0, 33, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    flood = entry * 90_000
    yield "ninety thousand entries", flood + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(flood), 0, 0)

    def lock(label: str, text: str) -> Case:
        return f"flood: lock: {label}", seal(parts(**{LOCK: text.encode()}))

    yield lock("a MiB of scalars", "a: [" + "1," * 500_000 + "1]\n")
    yield lock("a MiB of keys", "{" + ", ".join(f"{index:x}: " for index in range(100_000)) + "}\n")
    yield lock("a MiB of empty lists", "a: [" + "[]," * 340_000 + "[]]\n")
    yield lock("a MiB of text in one key", "a" * 1_000_000 + ": 1\n")
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    yield lock("a bomb of anchors", bomb)
    yield lock("an escape in the model's name", yaml.safe_dump(
        {**LOCK_VALUE, "model": {"name": "a\x1b[2J", "repo": "nvidia/Qwen3.6-35B-A3B-NVFP4"}}))  # fmt: skip
    yield lock("a device", yaml.safe_dump({**LOCK_VALUE, "settings": {"gpu": "GPU-0000"}}))

    def evidence(label: str, text: str) -> Case:
        return f"flood: evidence: {label}", seal(parts(**{EVIDENCE: text.encode()}))

    head = json.dumps(EVIDENCE_VALUE)[:-1]
    failed = head + ', "failed": [{"kind": "x", "day": "2031-05-04", "settings": {'
    yield evidence("a million trials that are none", head + ', "study": [' + "0," * 1_000_000 + "0]}")
    yield evidence("a million empty lists", head + ', "study": [' + "[]," * 650_000 + "[]]}")
    yield evidence("settings without end", failed + ",".join(
        f'"a{index:x}":0' for index in range(160_000)) + "}}]}")  # fmt: skip
    yield evidence("thousands of wrong settings", head + ', "failed": [' + ",".join(
        '{"kind": "x", "day": "y", "settings": {' + ",".join(f'"A{index}":{{}}' for index in range(250)) + "}}"
        for _ in range(38)) + "]}")  # fmt: skip
    yield evidence("thousands of trials that are none", head + ', "study": [' + "0," * 19_000 + "0]}")
    yield evidence("thousands of figures that are none", head + ', "study": [' + ",".join(
        '{"kind": "ok", "settings": {}, "figures": {' + ",".join(f'"A{index}":"x"' for index in range(250)) + "}}"
        for _ in range(70)) + "]}")  # fmt: skip
    yield evidence("forty thousand wrong settings", failed
                   + ",".join(f'"A{index:x}":{{}}' for index in range(20_000)) + "}}]}")  # fmt: skip
    yield evidence("a long text", head + ', "machine": {"gpu": "' + "x" * 1_900_000 + '"}}')
    for label, number in (("too large", "1e999"), ("no number", "NaN"), ("infinite", "-Infinity"), ("long", "9" * 41)):
        yield evidence(f"a size that is {label}", head + f', "machine": {{"ram_bytes": {number}}}}}')
    for label, figure in (("negative", (-1, -1, 0)), ("upside down", (5, 9, 1)), ("outside", (10, 1, 5))):
        median, low, high = figure
        told = {"decode_tps": {"median": median, "low": low, "high": high, "n": 1}}
        one = {"kind": "bench", "day": "2031-05-04", "settings": {}, "figures": told}
        yield evidence(f"a figure that is {label}", json.dumps({**EVIDENCE_VALUE, "measured": [one]}))
    for label, one in (
        ("a day in other digits", {"kind": "x", "day": "\u0662\u0660\u0663\u0661-05-04", "settings": {}}),
        ("a setting in other letters", {"kind": "x", "day": "2031-05-04", "settings": {"strategy": "\u043effload"}}),
        ("a setting beyond all", {"kind": "x", "day": "2031-05-04", "settings": {"kv_tokens": 10**30}}),
    ):
        yield evidence(label, json.dumps({**EVIDENCE_VALUE, "failed": [one]}))
    yield evidence("a mark before it", "\ufeff" + json.dumps(EVIDENCE_VALUE))
    yield evidence("two documents", json.dumps(EVIDENCE_VALUE) * 2)
    value = {**RECIPE_VALUE, "engine": {"name": "freetoken", "extra_args": ["-a"] * 9000}}
    yield "flood: recipe: nine thousand arguments", seal(parts(**{RECIPE: yaml.safe_dump(value).encode()[:65536]}))
    keys = "".join(f"k{index}: 1\n" for index in range(6000))
    yield (
        "flood: recipe: six thousand unknown keys",
        seal(parts(**{RECIPE: (yaml.safe_dump(RECIPE_VALUE) + keys).encode()})),
    )
    twice = "name: mine\n" * 5000
    yield (
        "flood: recipe: a key five thousand times",
        seal(parts(**{RECIPE: (yaml.safe_dump(RECIPE_VALUE) + twice).encode()})),
    )


def make_odd() -> list[Case]:
    """Bundles that ask for more than any machine has: refused, planned otherwise, or said to be too large."""
    cases = []
    for label, change in (
        ("slots", {"settings": {"expert_slots": 10**30}}),
        ("slots in bytes", {"settings": {"expert_slots": "9999999TiB"}}),
        ("tokens", {"settings": {"kv_tokens": 10**15}}), ("a chunk", {"settings": {"prefill_chunk_tokens": 10**12}}),
        ("requests", {"settings": {"max_running_requests": 1024}}), ("a headroom", {"headroom": "9999999TiB"}),
        ("a workload", {"workload": {"prompt_tokens": 10**12, "output_tokens": 10**12, "turns": 1000}}),
        ("a need", {"hardware": {"gpu": {"vram": ">=9999999TiB"}, "ram": {"available": ">=9999999TiB"}}}),
        ("a target", {"good_enough": {"decode_tps": ">=1e300"}}), ("a budget", {"tune": {"budget": "99999999h"}}),
        ("a size with 300 digits", {"settings": {"expert_slots": "9" * 300 + "GiB"}}),
    ):  # fmt: skip
        value = {**RECIPE_VALUE, **change}
        cases.append((label, seal(parts(**{RECIPE: yaml.safe_dump(value).encode()}))))
    return cases
