"""The bundle: recipe, lock, evidence, manifest and signature as one file, and back, typed and checked.

The hashes of the manifest tie the parts together, the signature the manifest to a key. Whatever is wrong with a
bundle is said in one sentence with exit code 2, and before anything is written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from freetoken.deploy.lock import Lock, dump_lock, parse_lock
from freetoken.errors import BadFileError, FtError
from freetoken.recipe.dump import dump_recipe
from freetoken.recipe.findings import describe_errors, raise_findings
from freetoken.recipe.model import Recipe
from freetoken.recipe.nodes import Node, parse_yaml
from freetoken.share import archive
from freetoken.share.allow import refuse_unsafe
from freetoken.share.archive import EVIDENCE, LOCK, MANIFEST, RECIPE, SIGNATURE
from freetoken.share.model import BUNDLE_VERSION, Evidence, Manifest, ManifestFile, Signature
from freetoken.share.sign import Signer, sign, verify

M = TypeVar("M", bound=BaseModel)
SUFFIX = ".ftbundle"
MAX_DEPTH = 16
#: Values in one JSON file, and keys of one object in it: evidence has some thousands and some dozens. A value that is
#: wrong costs some KiB as an error.
MAX_VALUES, MAX_KEYS = 20_000, 256
_MAX_DIGITS = 40
#: Findings that are told one by one.
_MAX_TOLD = 8


@dataclass(frozen=True)
class Bundle:
    """A bundle's contents, typed, with its bytes."""

    recipe: Recipe
    lock: Lock | None
    evidence: Evidence
    signer: Signer
    data: bytes

    @property
    def sha256(self) -> str:
        """Of the whole file."""
        return hashlib.sha256(self.data).hexdigest()


def make_bundle(recipe: Recipe, lock: Lock | None, evidence: Evidence, *, is_signed: bool = False) -> bytes:
    """The bytes of a bundle; the same for the same parts and key. Everything must be portable already."""
    parts = {RECIPE: dump_recipe(recipe).encode()}
    if lock is not None:
        parts[LOCK] = dump_lock(lock).encode()
    parts[EVIDENCE] = _dump(evidence)
    return seal(recipe.name, parts, is_signed=is_signed)


def seal(name: str, parts: dict[str, bytes], *, is_signed: bool = False) -> bytes:
    """The zip file of `parts` with their manifest, signed with this machine's key where asked."""
    files = {one: ManifestFile(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for one, data in parts.items()}
    manifest = _dump(Manifest.model_validate({"name": name, "files": files}))
    whole = {MANIFEST: manifest, **parts}
    if is_signed:
        whole[SIGNATURE] = _dump(sign(manifest))
    return archive.pack(whole)


def read_bundle(data: bytes, shown: str) -> Bundle:
    """The contents of a bundle. Raises BadFileError for whatever is not exactly as `make_bundle` makes it."""
    try:
        return _read(data, shown)
    except FtError as error:
        is_named = isinstance(error, BadFileError) and shown in error.message
        # What the file says is shown, but in characters that only look like what they are.
        message = shown.join(_plain(part) for part in error.message.split(shown)) if is_named else _plain(error.message)
        details = tuple(_plain(one) for one in error.details[:_MAX_TOLD])
        words = message if is_named else f"{shown} is refused: {message}"
        raise BadFileError(words, hint=error.hint, details=details) from error


def _read(data: bytes, shown: str) -> Bundle:
    files = archive.unpack(data, shown)
    for name in (MANIFEST, RECIPE, EVIDENCE):
        if name not in files:
            raise BadFileError(f"{shown} is no bundle: it has no `{name}`")
    manifest = parse_json(Manifest, files[MANIFEST], MANIFEST)
    _check_hashes(manifest, files)
    signature = parse_json(Signature, files[SIGNATURE], SIGNATURE) if SIGNATURE in files else None
    signer = verify(files[MANIFEST], signature)
    recipe = parse_recipe(_decode(files[RECIPE], RECIPE), RECIPE)
    if recipe.name != manifest.name:
        raise BadFileError(f"the recipe is called `{recipe.name}`, the bundle `{manifest.name}`")
    refuse_unsafe(recipe, shown)
    lock = _parse_lock(_decode(files[LOCK], LOCK)) if LOCK in files else None
    evidence = parse_json(Evidence, files[EVIDENCE], EVIDENCE)
    _check_agreement(recipe, lock, evidence)
    return Bundle(recipe, lock, evidence, signer, data)


def parse_recipe(text: str, source: str) -> Recipe:
    """The recipe in `text`, complete by itself: no parent, no workload by name, no defaults of this machine."""
    tree = parse_yaml(text, source)
    if not tree.is_mapping:
        raise BadFileError(f"{source}: expected a recipe")
    version = tree.child("version")
    if version is not None and version.value != 1:
        raise BadFileError(f"{version.mark}: the recipe has version {version.text}, this `ft` reads version 1")
    _check_texts(tree)
    try:
        recipe = Recipe.model_validate(tree.plain())
    except ValidationError as error:
        raise_findings(describe_errors(error, tree, Recipe)[:8])
        raise BadFileError(f"{source}: {error.errors()[0]['msg']}") from error
    from freetoken.recipe.effects import check_effects

    raise_findings(f"{source}: {one.message}" for one in check_effects(recipe) if one.is_fatal)
    return recipe


def _parse_lock(text: str) -> Lock:
    """The lock in `text`, which names no device and holds nothing that a terminal would obey."""
    _check_texts(parse_yaml(text, LOCK))
    lock = parse_lock(text, LOCK)
    for name in ("gpu", "device"):
        if name in lock.settings:
            raise BadFileError(f"{LOCK}: `settings.{name}` names a device of a machine")
    return lock


def _check_hashes(manifest: Manifest, files: dict[str, bytes]) -> None:
    held = files.keys() - {MANIFEST, SIGNATURE}
    if held != set(manifest.files):
        odd = sorted(held ^ set(manifest.files))[0]
        raise BadFileError(f"`{odd}` is {'not in the manifest' if odd in held else 'in the manifest alone'}")
    for name, entry in manifest.files.items():
        found = hashlib.sha256(files[name]).hexdigest()
        if (entry.bytes, entry.sha256) != (len(files[name]), found):
            raise BadFileError(f"`{name}` has SHA-256 {found}, the manifest has {entry.sha256}: it was altered")


def _check_agreement(recipe: Recipe, lock: Lock | None, evidence: Evidence) -> None:
    if evidence.engine != recipe.engine.name:
        raise BadFileError(f"the evidence is of engine `{evidence.engine}`, the recipe runs `{recipe.engine.name}`")
    if lock is None:
        return
    if lock.engine.name != recipe.engine.name:
        raise BadFileError(f"the lock is of engine `{lock.engine.name}`, the recipe runs `{recipe.engine.name}`")
    if lock.model.repo != recipe.model.repo:
        raise BadFileError(f"the lock is of model `{lock.model.repo}`, the recipe runs `{recipe.model.repo}`")


def _check_texts(tree: Node) -> None:
    for path, node in tree.leaves():
        if not all(char.isprintable() for step in path for char in str(step)):
            raise BadFileError(f"{node.mark}: a key holds characters that cannot be printed")
        for one in node.value if isinstance(node.value, list) else [node]:
            if isinstance(one.value, str) and not all(char.isprintable() for char in one.value):
                raise BadFileError(f"{one.mark}: `{'.'.join(map(str, path))}` holds characters that cannot be printed")


def _dump(value: BaseModel) -> bytes:
    plain = value.model_dump(mode="json", exclude_none=True)
    return (json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFileError(f"{name} is not UTF-8 text") from error


def parse_json(model: type[M], data: bytes, name: str, *, max_keys: int = MAX_KEYS) -> M:
    """`data` as a value of `model`; duplicate keys, deep nesting, long numbers and other versions are refused."""

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > max_keys:
            raise ValueError(f"an object has more than {max_keys:,} keys")
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is given twice")
        return found

    text = _decode(data, name)
    if _depth(text) > MAX_DEPTH:
        raise BadFileError(f"{name} is nested deeper than {MAX_DEPTH} levels")
    if text.count(",") + text.count("{") + text.count("[") > MAX_VALUES:
        raise BadFileError(f"{name} holds more than {MAX_VALUES:,} values, which no bundle does")
    try:
        plain = json.loads(
            text, object_pairs_hook=make_object, parse_constant=_no_constant, parse_int=_short_int,
            parse_float=_short_float,
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{name} is not JSON as a bundle has it: {str(error)[:120]}") from error
    version = plain.get("version", BUNDLE_VERSION) if isinstance(plain, dict) else BUNDLE_VERSION
    if type(version) is not int or version != BUNDLE_VERSION:  # True is 1 too
        said = ascii(version)[:20]
        raise BadFileError(
            f"{name} has version {said}, this `ft` reads version {BUNDLE_VERSION}", hint="a newer `ft` may read it"
        )
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(ascii(str(one))[1:-1][:40] for one in first["loc"])
        raise BadFileError(f"{name}: `{where or 'document'}`: {first['msg'][:160]}") from error


def _plain(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _depth(text: str) -> int:
    """How deep brackets nest; those inside texts count too, which only errs to the safe side."""
    depth = deepest = 0
    for one in text:
        if one in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif one in "]}":
            depth -= 1
    return deepest


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _short_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(text)


def _short_float(text: str) -> float:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return float(text)
