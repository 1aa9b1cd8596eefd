"""YAML files to a frozen `Recipe`: parents, overrides and user defaults merged, and for each value where it came from.

Precedence: command line, recipe, parent recipe, user defaults, then the models' own defaults. A key set to `~`
takes an inherited value back to its default. Two merges follow the meaning rather than the shape: `model.repo`
and `model.path` replace one another, and another `engine.name` drops the inherited engine's version range,
arguments and environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from freetoken import paths
from freetoken.errors import BadFileError, UsageError, did_you_mean
from freetoken.recipe.dump import dump_recipe
from freetoken.recipe.effects import check_effects
from freetoken.recipe.findings import describe_errors, dotted, find_model, raise_findings
from freetoken.recipe.lookup import (
    SUFFIXES,
    describe_no_workload,
    find_named,
    find_recipe,
    find_workload,
    list_recipes,
    list_workloads,
    resolve_model_path,
    show_path,
)
from freetoken.recipe.merge import anchor_paths, as_texts, drop_nulls, merge, without_keys
from freetoken.recipe.model import Recipe
from freetoken.recipe.nodes import KeyPath, Mark, Node, from_plain, parse_value, read_yaml, with_origin, without_lines
from freetoken.recipe.workload import Workload

MAX_PARENTS = 16
#: The workload of `ft plan MODEL`, where no recipe names one.
DEFAULT_WORKLOAD = "chat-2k"
#: A run folder keeps its recipe under this name, whatever the recipe is called.
FREE_STEM = "recipe"
_NOT_INHERITED = ("name", "extends", "version")


__all__ = [
    "LoadedRecipe", "dump_recipe", "find_recipe", "list_recipes", "list_workloads", "load_recipe", "load_workload",
    "make_model_recipe", "make_recipe", "resolve_model_path",
]  # fmt: skip


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, where each of its values came from, and the folder that its relative paths belong to."""

    recipe: Recipe
    #: Dotted key -> `command line`, `recipe FILE:LINE`, `parent NAME`, `workload NAME`, `user defaults`, `default`.
    provenance: dict[str, str]
    path: Path | None
    base_dir: Path
    #: What was read and has no effect yet, one sentence each.
    notes: tuple[str, ...] = ()


def load_recipe(
    target: str, *, sets: Sequence[str] = (), base_dir: Path | None = None, defaults: Mapping[str, Any] | None = None
) -> LoadedRecipe:
    """The recipe that `target` names (see `find_recipe`), with the `--set` overrides `sets` on top.

    `defaults` stands in for the `defaults:` of the machine-local file. Raises UsageError where there is no such
    recipe, BadFileError with every finding at once where a file is wrong.
    """
    path = find_recipe(target, base_dir=base_dir)
    findings: list[str] = []
    tree = _read_chain(path, findings)
    _check_name(tree, path, findings)
    return _finish(tree, sets, defaults, findings, path=path, base_dir=path.parent)


def make_model_recipe(model: str, *, sets: Sequence[str] = (), base_dir: Path | None = None) -> LoadedRecipe:
    """A recipe for a bare model: a folder, a hub repository or the name of a card; engine `native` unless set."""
    folder = (base_dir or Path.cwd()) / Path(model).expanduser()
    ref = {"path": str(folder.resolve())} if folder.is_dir() else {"repo": model}
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(model.rstrip("/")).name.lower()).strip("-._")[:80] or "model"
    facts = {"name": name, "description": f"{model}, without a recipe", "model": ref}
    tree = from_plain(facts, Mark(f"model `{model}`"), "command line")
    findings: list[str] = []
    workload = _resolve_workload(
        from_plain({"workload": DEFAULT_WORKLOAD}, Mark("default"), "default"), Path.cwd(), findings
    )
    tree = merge(with_origin(workload, "default"), tree)
    return _finish(tree, sets, None, findings, path=None, base_dir=base_dir or Path.cwd())


def make_recipe(values: Mapping[str, Any], source: str, *, base_dir: Path | None = None) -> LoadedRecipe:
    """The recipe that a file with `values` would be; `source` stands in messages for the file. Raises BadFileError."""
    folder = base_dir or Path.cwd()
    findings: list[str] = []
    tree = _resolve_workload(from_plain(values, Mark(source), source), folder, findings)
    return _finish(tree, (), {}, findings, path=None, base_dir=folder)


def load_workload(name: str, *, base_dir: Path | None = None) -> Workload:
    """The workload of that name, or in that file.

    Raises UsageError where there is none, BadFileError where it is wrong.
    """
    path = find_workload(name, base_dir or Path.cwd())
    if path is None:
        raise UsageError(
            describe_no_workload(name), hint="shipped: " + ", ".join(f"`{one}`" for one, _ in list_workloads())
        )
    tree = read_yaml(path, show_path(path))
    findings: list[str] = []
    _check_name(tree, path, findings)
    workload = _validate(Workload, drop_nulls(tree), findings)
    raise_findings(findings)
    assert isinstance(workload, Workload)
    return workload


def _read_chain(path: Path, findings: list[str]) -> Node:
    """The file and its parents, merged, each value with its place and origin."""
    chain: list[Path] = []
    trees: list[Node] = []
    current: Path | None = path
    while current is not None:
        chain.append(current)
        origin, has_line = ("recipe", True) if len(chain) == 1 else (f"parent {current.stem}", False)
        tree = with_origin(_read_mapping(current), origin, has_line=has_line)
        tree = _resolve_workload(tree, current.parent, findings)
        trees.append(tree if current.parent == path.parent else anchor_paths(tree, current.parent))
        current = _find_parent(tree, chain)
    merged = trees[-1]
    for tree in reversed(trees[:-1]):
        merged = merge(without_keys(merged, _NOT_INHERITED), tree)
    return merged


def _read_mapping(path: Path) -> Node:
    tree = read_yaml(path, show_path(path))
    if not tree.is_mapping:
        raise BadFileError(f"{show_path(path)}: expected a mapping, such as `name: {path.stem}`")
    return tree


def _find_parent(tree: Node, chain: list[Path]) -> Path | None:
    node = tree.child("extends")
    if node is None or node.value is None:
        return None
    name = node.text
    if not isinstance(node.value, str) or not name:
        raise BadFileError(f"{node.mark}: `extends` is {name or 'a mapping'}, expected the name or path of a recipe")
    here = chain[-1]
    if "/" in name or name.endswith(SUFFIXES):
        parent: Path | None = here.parent / Path(name).expanduser()
        if not parent.is_file():  # type: ignore[union-attr]
            raise BadFileError(f"{node.mark}: `extends` names {name}, which does not exist")
    else:
        # A recipe may extend the shipped one of its own name, so the file itself is not looked at.
        others = (folder for folder in (here.parent, *paths.search_dirs("recipes")))
        parent = find_named(name, others, but=here if name == here.stem else None)
        if parent is None:
            known = [one for one, _ in list_recipes()]
            raise BadFileError(f"{node.mark}: no recipe `{name}` to extend{did_you_mean(name, known)}")
    assert parent is not None
    seen = [one.resolve() for one in chain]
    if parent.resolve() in seen:
        circle = " -> ".join(f"`{one.stem}`" for one in [*chain[seen.index(parent.resolve()) :], parent])
        raise BadFileError(f"{node.mark}: `extends` goes in a circle: {circle}")
    if len(chain) >= MAX_PARENTS:
        raise BadFileError(f"{node.mark}: more than {MAX_PARENTS} recipes extend one another")
    return parent


def _resolve_workload(tree: Node, base_dir: Path, findings: list[str]) -> Node:
    """`workload: NAME` replaced by what its file says; a mapping stays as it is."""
    node = tree.child("workload")
    if node is None or not isinstance(node.value, str):
        return tree
    path = find_workload(node.value, base_dir)
    if path is None:
        findings.append(f"{node.mark}: {describe_no_workload(node.value)}")
        return replace(tree, value={**tree.value, "workload": Node({}, node.mark, node.origin)})
    try:
        found = _read_mapping(path)
        _check_name(found, path, findings)
    except BadFileError as error:
        findings += [error.message, *error.details]
        return replace(tree, value={**tree.value, "workload": Node({}, node.mark, node.origin)})
    found = with_origin(found, f"workload {path.stem}")
    return replace(tree, value={**tree.value, "workload": replace(found, origin=node.origin, is_whole=True)})


def _check_name(tree: Node, path: Path, findings: list[str]) -> None:
    node = tree.child("name")
    if path.stem == FREE_STEM or node is None or not node.text or node.text == path.stem:
        return
    findings.append(f"{node.mark}: `name` is `{node.text}`, expected `{path.stem}` as the file is called")


def _read_defaults(defaults: Mapping[str, Any] | None) -> Node | None:
    if defaults is not None:
        return from_plain(defaults, Mark("user defaults"), "user defaults")
    path = paths.local_file()
    if not path.is_file():
        return None
    node = _read_mapping(path).child("defaults")
    if node is None or node.value is None:
        return None
    if not node.is_mapping:
        raise BadFileError(f"{node.mark}: `defaults` is `{node.text}`, expected a mapping such as `headroom: desktop`")
    return without_keys(with_origin(node, "user defaults"), _NOT_INHERITED)


def _apply_sets(tree: Node, sets: Sequence[str], findings: list[str]) -> Node:
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise UsageError(f"`--set {text}` is not `KEY=VALUE`", hint="e.g. `--set settings.expert_slots=512`")
        if key in ("extends", "version"):
            raise UsageError(f"`--set {key}` is not possible; `{key}` belongs to a recipe's file")
        source = f"--set {text}"
        node = with_origin(parse_value(value, source), "command line")
        for step in reversed(key.split(".")):
            node = Node({step: node}, Mark(source), "command line", key_marks={step: Mark(source)})
        node = _resolve_workload(node, Path.cwd(), findings)
        tree = merge(tree, without_lines(anchor_paths(node, Path.cwd()), Mark(source)))
    return tree


def _finish(
    tree: Node, sets: Sequence[str], defaults: Mapping[str, Any] | None, findings: list[str], *,
    path: Path | None, base_dir: Path,
) -> LoadedRecipe:  # fmt: skip
    """Defaults below, overrides above, validated; every finding told at once."""
    if (below := _read_defaults(defaults)) is not None:
        tree = merge(_resolve_workload(anchor_paths(below, paths.state_dir()), paths.state_dir(), findings), tree)
    tree = drop_nulls(_apply_sets(tree, sets, findings))
    recipe = _validate(Recipe, tree, findings)
    if not isinstance(recipe, Recipe):
        # pydantic tells such a check too where it is the only finding, but without the place.
        cross = _cross_findings(tree)
        told = {one.partition(": ")[2] for one in cross}
        raise_findings([one for one in findings if one.partition(": ")[2] not in told] + cross)
        raise AssertionError("a failed validation has findings")
    provenance = make_provenance(recipe, tree)
    effects = check_effects(recipe)
    findings += [f"{_place(tree, one.key)}: {one.message}" for one in effects if one.is_fatal]
    raise_findings(findings)
    notes = tuple(one.message for one in effects if not one.is_fatal)
    return LoadedRecipe(recipe, provenance, path, base_dir.absolute(), notes)


def _validate(model: type[BaseModel], tree: Node, findings: list[str]) -> BaseModel | None:
    """The value of `tree`, or None with its findings added.

    Where a field wants a text and the file has `4090`, the text as written is taken: a second try with it.
    """
    for _ in range(2):
        try:
            return model.model_validate(tree.plain())
        except ValidationError as error:
            texts = [one["loc"] for one in error.errors(include_url=False) if one["type"] == "string_type"]
            fixed = as_texts(tree, texts)
            if fixed is tree:
                findings += describe_errors(error, tree, model)
                return None
            tree = fixed
    try:
        return model.model_validate(tree.plain())
    except ValidationError as error:
        findings += describe_errors(error, tree, model)
        return None


def _cross_findings(tree: Node) -> list[str]:
    """Checks of several sections, which pydantic leaves out while any field is wrong."""
    allowed = tree.child("allow_quality_changes")
    listed = allowed.plain() if allowed is not None else []
    found = []
    for knob in ("kv_dtype", "state_dtype"):
        node, depth = tree.find(("settings", knob))
        if depth == 2 and node.value != "model" and knob not in (listed if isinstance(listed, list) else []):
            found.append(
                f"{node.mark}: `settings.{knob}` is `{node.text}`, which changes answers; "
                f"list it: `allow_quality_changes: [{knob}]`"
            )
    return found


def _place(tree: Node, key: str) -> Mark:
    return tree.find(tuple(key.split(".")))[0].mark


def make_provenance(recipe: Recipe, tree: Node) -> dict[str, str]:
    """Where each value of `recipe` came from, by dotted key; `default` where no file and nobody said it."""
    origins: dict[str, str] = {}
    _gather_origins(Recipe, recipe, tree, (), origins)
    if (workload := tree.child("workload")) is not None:
        origins["workload"] = workload.origin
    return origins


def _gather_origins(
    model: type[BaseModel], value: BaseModel | None, tree: Node, path: KeyPath, origins: dict[str, str]
) -> None:  # fmt: skip
    for name, field in model.model_fields.items():
        inner, here = find_model(field.annotation), (*path, name)
        node, depth = tree.find(here)
        held = getattr(value, name, None)
        if inner is not None and (held is None or isinstance(held, BaseModel)):
            _gather_origins(inner, held, tree, here, origins)
        else:
            origins[dotted(here)] = node.origin or "default" if depth == len(here) else "default"
