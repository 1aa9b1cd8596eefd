"""Bundles that must be refused: a seeded generator of hostile files, each with a label that says what is wrong.

A base bundle is changed in one way each: in the container, the manifest, the recipe, the lock, the evidence or the
signature. Where a part is changed the manifest is made to fit, so that the part's own check is what refuses it. More
of them are in `hostile_tricks.py`.
"""

from __future__ import annotations

import io
import json
import random
import stat
import struct
import zipfile
from collections.abc import Iterator
from hashlib import sha256

import yaml

from freetoken.share import archive
from freetoken.share.archive import EVIDENCE, LOCK, MANIFEST, RECIPE, SIGNATURE

Case = tuple[str, bytes]

RECIPE_VALUE = {
    "version": 1, "name": "mine", "model": {"repo": "nvidia/Qwen3.6-35B-A3B-NVFP4"}, "engine": {"name": "freetoken"},
    "workload": {"name": "short", "prompt_tokens": 512, "output_tokens": 64},
}  # fmt: skip
LOCK_VALUE = {
    "version": 1, "recipe": "mine", "ft": "0.1.0", "engine": {"name": "freetoken", "version": "0.2.1"},
    "model": {"name": "nvidia/Qwen3.6-35B-A3B-NVFP4", "repo": "nvidia/Qwen3.6-35B-A3B-NVFP4",
              "files": {"config.json": {"bytes": 2, "sha256": "ab" * 32}}},
    "settings": {"expert_slots": 512, "kv_tokens": 8192}, "slot_bytes": 4096,
}  # fmt: skip
EVIDENCE_VALUE = {
    "version": 1, "engine": "freetoken", "workload": {"name": "short", "sha256": "cd" * 32},
    "planned": {"expert_slots_bytes": 4096},
}  # fmt: skip


def parts(**changes: bytes) -> dict[str, bytes]:
    """The parts of the base bundle, some replaced."""
    base = {
        RECIPE: yaml.safe_dump(RECIPE_VALUE).encode(),
        LOCK: yaml.safe_dump(LOCK_VALUE).encode(),
        EVIDENCE: json.dumps(EVIDENCE_VALUE).encode(),
    }
    return {**base, **changes}


def seal(files: dict[str, bytes], name: str = "mine", **more: bytes) -> bytes:
    """A bundle with a manifest that fits `files`."""
    listed = {one: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for one, data in files.items()}
    manifest = {"format": "ft-bundle", "version": 1, "name": name, "files": listed}
    return archive.pack({MANIFEST: json.dumps(manifest).encode(), **files, **more})


def make_base() -> bytes:
    """The bundle that all are made from; this one is fine."""
    return seal(parts())


def make_cases(seed: int = 20) -> list[Case]:
    """More than 300 hostile bundles."""
    from tests.fakes.hostile_tricks import floods, text_tricks, zip_tricks

    rng = random.Random(seed)
    return [
        *_containers(), *_broken_bytes(rng), *_manifests(), *_recipe_values(), *_recipe_texts(), *_flags(),
        *_variables(), *_locks(), *_evidence(), *_signatures(), *zip_tricks(), *text_tricks(), *floods(),
    ]  # fmt: skip


# --- the container

NAMES = (
    "../recipe.yaml", "../../etc/passwd", "..\\recipe.yaml", "a/../../b", "/etc/cron.d/x", "/recipe.yaml",
    "C:\\x", "c:/x", "\\\\host\\share", "recipe.yaml/", "./recipe.yaml", "recipe.yaml ", "RECIPE.YAML",
    "recipe\u202e.yaml",    "r\u00e9cipe.yaml", "recipe.yam\u217c", "recipe.yaml\n",
    "\u2024\u2024/x", "%2e%2e/x", "nested.zip", "run.sh",
    "__main__.py", ".pth", "con", "~/.bashrc",
)  # fmt: skip


def _containers() -> Iterator[Case]:
    files = archive.unpack(make_base(), "base")
    for name in NAMES:
        yield f"an entry called {name!r}", make_zip({**files, name: b"x"})
    yield "a symbolic link", make_zip(files, link=RECIPE)
    yield "a link out of the folder", make_zip({**files, "link": b"/etc/passwd"}, link="link")
    yield "a device", make_zip(files, mode=stat.S_IFCHR | 0o600)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        yield f"compression {method}", make_zip(files, method=method)
    yield "a bomb of zeros", make_zip({**files, RECIPE: b"\0" * (64 << 20)}, method=zipfile.ZIP_DEFLATED)
    yield "a bomb in the lock", make_zip({**files, LOCK: b"a: [" * (8 << 20)}, method=zipfile.ZIP_BZIP2)
    yield "a comment", make_zip(files, comment=b"hello")
    yield "an extra field", make_zip(files, extra=b"\x55\x54\x05\x00\x01abcd")
    yield "another date", make_zip(files, date=(2031, 5, 4, 0, 0, 0))
    yield "bytes before", b"#!/bin/sh\nrm -rf ~\n" + make_base()
    yield "bytes after", make_base() + b"tail"
    yield "two bundles in one", make_base() + make_base()
    yield "a file twice", make_zip(files, twice=RECIPE)
    yield "a thousand files", make_zip({f"f{index}": b"" for index in range(1000)})
    yield "no files", make_zip({})
    yield "another order", make_zip(dict(reversed(files.items())))
    yield "a size of 4 GiB claimed", _claim(make_base(), 0xFFFFFFFE)
    yield "a size of zero claimed", _claim(make_base(), 0)
    yield "encrypted", _encrypt(make_base())
    yield "a recipe too large", _pack_any({**files, RECIPE: b"#" * (65 << 10)})
    yield "a bundle too large", make_base() + b"\0" * (5 << 20)
    yield "an empty file", b""
    yield "text", b"version: 1\nname: mine\n"
    yield "a zip in the recipe", seal(parts(**{RECIPE: make_base()}))
    yield "gzip", bytes.fromhex("1f8b0800000000000003") + b"x" * 64
    yield "a pickle", b"\x80\x04\x95cos\nsystem\n(S'true'\ntR."
    for missing in (MANIFEST, RECIPE, EVIDENCE):
        yield f"without {missing}", archive.pack({name: data for name, data in files.items() if name != missing})


def _broken_bytes(rng: random.Random) -> Iterator[Case]:
    base = make_base()
    for _ in range(20):
        where = rng.randrange(len(base))
        yield f"cut after {where} bytes", base[:where]
    for _ in range(40):
        where, bit = rng.randrange(len(base)), rng.randrange(8)
        changed = bytearray(base)
        changed[where] ^= 1 << bit
        yield f"bit {bit} of byte {where} turned", bytes(changed)


def make_zip(files, *, method=zipfile.ZIP_STORED, link="", mode=0, comment=b"", extra=b"", date=None, twice=""):  # type: ignore[no-untyped-def]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        for name, data in [*files.items(), *([(twice, files[twice])] if twice else [])]:
            entry = zipfile.ZipInfo(name, date or (1980, 1, 1, 0, 0, 0))
            entry.filename = name  # zipfile would cut it at a NUL and turn backslashes
            kind = stat.S_IFLNK | 0o777 if name == link else mode or stat.S_IFREG | 0o644
            entry.external_attr, entry.compress_type, entry.extra = kind << 16, method, extra
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                target.writestr(entry, data)
        target.comment = comment
    return stream.getvalue()


def _pack_any(files: dict[str, bytes]) -> bytes:
    return archive.pack(files)


def _claim(data: bytes, size: int) -> bytes:
    """The first entry of the directory claims `size` bytes."""
    changed, where = bytearray(data), data.index(b"PK\1\2")
    changed[where + 20 : where + 28] = struct.pack("<2L", size, size)
    return bytes(changed)


def _encrypt(data: bytes) -> bytes:
    changed, where = bytearray(data), data.index(b"PK\1\2")
    changed[where + 8] |= 1
    changed[6] |= 1
    return bytes(changed)


# --- the manifest


def _manifests() -> Iterator[Case]:
    files = archive.unpack(make_base(), "base")
    good = json.loads(files[MANIFEST])

    def make(label: str, text: str | bytes) -> Case:
        data = text.encode() if isinstance(text, str) else text
        return f"manifest: {label}", archive.pack({**files, MANIFEST: data})

    for value in (0, 2, 99, "1", None, [1], 1.5, True):
        yield make(f"version {value!r}", json.dumps({**good, "version": value}))
    yield make("another format", json.dumps({**good, "format": "zip"}))
    yield make("another name", json.dumps({**good, "name": "other"}))
    yield make("a name with a path", json.dumps({**good, "name": "../../x"}))
    yield make("an unknown key", json.dumps({**good, "run": "rm -rf ~"}))
    wrong = {**good["files"], RECIPE: {**good["files"][RECIPE], "sha256": "0" * 64}}
    yield make("a wrong hash", json.dumps({**good, "files": wrong}))
    short = {**good["files"], RECIPE: {**good["files"][RECIPE], "bytes": 1}}
    yield make("a wrong size", json.dumps({**good, "files": short}))
    yield make("a file left out", json.dumps({**good, "files": {RECIPE: good["files"][RECIPE]}}))
    yield make("a file too many", json.dumps({**good, "files": {**good["files"], "../x": good["files"][RECIPE]}}))
    yield make("a key twice", json.dumps(good)[:-1] + ', "name": "mine"}')
    yield make("deep", '{"a":' * 2000 + "1" + "}" * 2000)
    yield make("a long number", json.dumps(good)[:-1] + ', "n": ' + "9" * 5000 + "}")
    yield make("infinity", json.dumps({**good, "version": float("inf")}))
    yield make("no object", "[]")
    yield make("no JSON", "format: ft-bundle")
    yield make("no UTF-8", b"\xff\xfe{}")
    yield make("surrogates", '{"format": "\\ud800"}')


# --- the recipe


def make_recipe_case(label: str, **changes: object) -> Case:
    return f"recipe: {label}", seal(parts(**{RECIPE: yaml.safe_dump({**RECIPE_VALUE, **changes}).encode()}))


def _recipe_values() -> Iterator[Case]:
    for value in (0, 2, 10**30, "one", [1]):
        yield make_recipe_case(f"version {value!r}", version=value)
    for path in ("/etc", "../../model", "~/model", "//host/share", "C:\\model", "$HOME/x", "demo/../../x"):
        yield make_recipe_case(f"model.path {path}", model={"path": path})
    for repo in ("../../x", "a/b/c", "https://host/x", "a/..", "-x/y", "a/b;rm"):
        yield make_recipe_case(f"model.repo {repo}", model={"repo": repo})
    for revision in ("../../x", "main/../../x", "-x", "a b", "refs/../x", "$(id)", "\u2025/x"):
        yield make_recipe_case(f"model.revision {revision!r}", model={**RECIPE_VALUE["model"], "revision": revision})  # type: ignore[dict-item]
    for host in ("0.0.0.0", "::", "192.168.1.4", "*", "evil.example", "127.0.0.1 --api-key x"):
        yield make_recipe_case(f"serve.host {host}", serve={"host": host})
    yield make_recipe_case("a port of the system", serve={"port": 22})
    yield make_recipe_case("a secret as key", serve={"api_key_env": "AWS_SECRET_ACCESS_KEY"})
    yield make_recipe_case("a parent", extends="/etc/passwd")
    yield make_recipe_case("a recording", workload={"text": "recorded", "recording": "/etc/passwd"})
    yield make_recipe_case("a workload by name", workload="../../x")
    yield make_recipe_case("a device", settings={"gpu": "GPU-00000000-0000-0000-0000-000000000000"})
    yield make_recipe_case("quality turned down", settings={"kv_dtype": "fp8"})
    yield make_recipe_case("an unknown key", hooks={"before": "rm -rf ~"})
    yield make_recipe_case("another name", name="other")
    yield make_recipe_case("a name with a path", name="../x")
    yield make_recipe_case("text that turns around", description="safe \u202e elif")
    yield make_recipe_case("control characters", description="a\x1b[2Jb")
    yield make_recipe_case("a long text", description="x" * 20_000)
    yield make_recipe_case("an engine that nobody drives", engine={"name": "vllm"})
    yield make_recipe_case("an engine of its own", engine={"name": "/bin/sh"})


def _recipe_texts() -> Iterator[Case]:
    good = yaml.safe_dump(RECIPE_VALUE)
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    texts = {
        "deep": "a: " + "[" * 3000 + "]" * 3000, "deep mappings": "{a: " * 1500 + "1" + "}" * 1500,
        "a bomb of anchors": bomb, "an anchor in itself": good + "x: &a [*a]\n",
        "an object": good + "x: !!python/object/apply:os.system ['true']\n", "a tag": good + "x: !run true\n",
        "a merge": good + "<<: {a: 1}\n", "a key twice": good + "name: mine\n", "two documents": good + "---\na: 1\n",
        "a list": "- a\n", "nothing": "", "no YAML": "a: [", "tabs": "a:\n\tb: 1\n", "NUL": "a: \0\n",
        "a directive": "%YAML 9.9\n---\n" + good,
    }  # fmt: skip
    for label, text in texts.items():
        yield f"recipe text: {label}", seal(parts(**{RECIPE: text.encode()}))
    yield "recipe text: no UTF-8", seal(parts(**{RECIPE: b"\xff\xfe"}))


FLAGS: dict[str, tuple[str, ...]] = {
    "freetoken": (
        "--api-key=x", "--host=0.0.0.0", "--cors-origins=*", "--allowed-local-media-path=/",
        "--allowed-media-domains=*",        "--model=/etc",
        "--mmproj=/x.gguf", "--hf-overrides={}", "--moe-cache-split=profile:/etc/passwd",
        "--shell-mode", "--trust-remote-code", "--dummy-weight", "--quant-backend=/tmp/x.so", "--api-k=x",
        "--port=80", "--page-size=$(id)", "--page-size=9999999999999", "--tool-call-parser=../x", "-c", "; rm -rf ~",
    ),
    "llamacpp": (
        "--lora=/x", "--rpc=host:1", "--chat-template-file=/etc/passwd", "--log-file=/x", "--slot-save-path=/",
        "--model-url=http://host/x", "--hf-repo=a/b", "--grammar-file=/x", "--host=0.0.0.0", "--path=/", "--api-key=x",
        "--hos=0.0.0.0", "--flash-attn=on --host=0.0.0.0", "--numa=distribute\n--host=0.0.0.0", "--", "-", "",
        "--api-key-file=/x", "--ssl-key-file=/x", "--threads-batch=\u0664", "-fa=on;id", "--jinja=/x", "--props",
    ),
    "native": ("--trace=/etc/cron.d/x", "--host=0.0.0.0", "--api-key-env=HOME", "--config=/x", "@/etc/passwd"),
}  # fmt: skip


def _flags() -> Iterator[Case]:
    for engine, flags in FLAGS.items():
        for flag in flags:
            evidence = json.dumps({**EVIDENCE_VALUE, "engine": engine}).encode()
            value = {**RECIPE_VALUE, "engine": {"name": engine, "extra_args": [flag]}}
            files = parts(**{RECIPE: yaml.safe_dump(value).encode(), EVIDENCE: evidence})
            del files[LOCK]
            yield f"{engine} with {flag}", seal(files)
    pair = {**RECIPE_VALUE, "engine": {"name": "freetoken", "extra_args": ["--host", "0.0.0.0"]}}
    yield "freetoken with --host 0.0.0.0", seal(parts(**{RECIPE: yaml.safe_dump(pair).encode()}))


VARIABLES = (
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PATH",
    "HOME", "BASH_ENV", "ENV", "IFS", "HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HTTPS_PROXY", "SSL_CERT_FILE",
    "TRITON_CACHE_DIR", "CUDA_INJECTION64_PATH", "NVCC_PREPEND_FLAGS", "CC", "CXX", "FREETOKEN_API_KEY",
    "FREETOKEN_API_LOG_DIR", "FREETOKEN_KERNEL_CACHE_DIR", "FREETOKEN_ALLOW_CUDA_MISMATCH",
    "FREETOKEN_DISABLE_KERNEL_CACHE_VERSION_CHECK", "FREETOKEN_SKIP_BANK_PIN", "TORCH_LOAD", "TORCHINDUCTOR_CACHE_DIR",
    "GCONV_PATH", "NODE_OPTIONS", "GIT_SSH_COMMAND", "OMP_TOOL_LIBRARIES", "CUDA_VISIBLE_DEVICES", "HTTP_PROXY",
    "https_proxy", "ALL_PROXY", "NO_PROXY", "HF_HUB_OFFLINE", "TMPDIR", "PYTHONBREAKPOINT", "PYTHONWARNINGS",
    "ld_preload", "LD_PRELOAD=x", "OMP_NUM_THREADS ", "OMP_NUM_THREADS=1 LD_PRELOAD", "A\nLD_PRELOAD", "", "CUDA_HOME",
    "GGML_BACKEND_PATH", "XDG_CONFIG_HOME", "SHELL",
)  # fmt: skip


def _variables() -> Iterator[Case]:
    for name in VARIABLES:
        yield make_recipe_case(f"variable {name}", engine={"name": "freetoken", "env": {name: "/tmp/x.so"}})
    yield make_recipe_case("a value with a command", engine={"name": "freetoken", "env": {"OMP_NUM_THREADS": "1;id"}})
    yield make_recipe_case(
        "a value in other digits", engine={"name": "freetoken", "env": {"OMP_NUM_THREADS": "\u0664"}}
    )
    yield make_recipe_case("a name in other case", engine={"name": "freetoken", "env": {"omp_num_threads": "4"}})


# --- lock, evidence, signature


def _locks() -> Iterator[Case]:
    def make(label: str, **changes: object) -> Case:
        return f"lock: {label}", seal(parts(**{LOCK: yaml.safe_dump({**LOCK_VALUE, **changes}).encode()}))

    file = {"bytes": 2, "sha256": "ab" * 32}
    model = dict(LOCK_VALUE["model"])  # type: ignore[call-overload]
    for name in ("../x", "/etc/passwd", "a/../../x", "c:\\x", "a\u202eb", "a//b", "", "x" * 300):
        yield make(f"a file called {name[:20]!r}", model={**model, "files": {name: file}})
    yield make("version 2", version=2)
    yield make("no hash", model={**model, "files": {"a": {"bytes": 1, "sha256": "xyz"}}})
    yield make("a negative size", model={**model, "files": {"a": {"bytes": -1, "sha256": "ab" * 32}}})
    yield make("another model", model={**model, "repo": "other/model"})
    yield make("another engine", engine={"name": "native", "version": "1"})
    yield make("a version with a command", engine={"name": "freetoken", "version": "$(id)"})
    yield make("settings that nest", settings={"expert_slots": {"a": 1}})
    yield make("an unknown key", script="id")


def _evidence() -> Iterator[Case]:
    def make(label: str, value: object) -> Case:
        return f"evidence: {label}", seal(parts(**{EVIDENCE: json.dumps(value).encode()}))

    for version in (0, 2, "x"):
        yield make(f"version {version!r}", {**EVIDENCE_VALUE, "version": version})
    yield make("another engine", {**EVIDENCE_VALUE, "engine": "native"})
    yield make("an unknown key", {**EVIDENCE_VALUE, "note": "x"})
    yield make("a GPU that turns around", {**EVIDENCE_VALUE, "machine": {"gpu": "RTX \u202e"}})
    yield make("a size beyond all", {**EVIDENCE_VALUE, "machine": {"ram_bytes": 1 << 62}})
    yield make("settings that are code", {**EVIDENCE_VALUE, "planned": {"strategy": "__import__('os')"}})
    yield make("a thousand trials", {**EVIDENCE_VALUE, "study": [{"settings": {}, "kind": "ok"}] * 1000})
    figure = {"median": "nan", "low": 0, "high": 1, "n": 1}
    measured = {"kind": "bench", "day": "2031-05-04", "settings": {}, "figures": {"decode_tps": figure}}
    yield make("a figure that is no number", {**EVIDENCE_VALUE, "measured": [measured]})
    yield "evidence: deep", seal(parts(**{EVIDENCE: b"[" * 5000}))


def _signatures() -> Iterator[Case]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = key.public_key().public_bytes_raw().hex()
    files = archive.unpack(make_base(), "base")
    right = key.sign(b"ft-bundle 1\n" + files[MANIFEST]).hex()

    def make(label: str, **changes: object) -> Case:
        value = {"algorithm": "ed25519", "public_key": public, "signature": right, **changes}
        return f"signature: {label}", archive.pack({**files, SIGNATURE: json.dumps(value).encode()})

    yield make("forged", signature="0" * 128)
    yield make("of the manifest without its context", signature=key.sign(files[MANIFEST]).hex())
    yield make("of another bundle", signature=key.sign(b"ft-bundle 1\nother").hex())
    yield make("by another key", public_key="ab" * 32)
    yield make("by a key that anybody has", public_key="01" + "00" * 31, signature="01" + "00" * 63)
    yield make("by zeros", public_key="00" * 32, signature="00" * 64)
    yield make("with another algorithm", algorithm="none")
    yield make("too short", signature="ab")
    yield make("with a key too many", extra=1)
    other = seal(parts(**{RECIPE: yaml.safe_dump({**RECIPE_VALUE, "description": "changed"}).encode()}))
    altered = archive.unpack(other, "other")
    signed = {"algorithm": "ed25519", "public_key": public, "signature": right}
    yield "signature: of what was there before", archive.pack({**altered, SIGNATURE: json.dumps(signed).encode()})
