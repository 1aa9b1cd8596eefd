"""Merging the layers of a recipe, as trees that keep their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from freetoken.recipe.nodes import KeyPath, Node


def merge(below: Node, above: Node, path: KeyPath = ()) -> Node:
    """`above` over `below`: mappings key by key, anything else replaces; `~` removes what is below."""
    if above.is_whole or not (below.is_mapping and above.is_mapping):
        return above
    kept = {key: child for key, child in below.value.items() if key not in _displaced(path, below, above)}
    for key, child in above.value.items():
        kept[key] = merge(kept[key], child, (*path, key)) if key in kept else child
    if path == ("workload",) and above.value and "name" in below.value and "name" not in above.value:
        kept["name"] = _mark_as_changed(below.value["name"])
    return replace(above, value=kept, key_marks={**below.key_marks, **above.key_marks}, is_whole=below.is_whole)


def _mark_as_changed(name: Node) -> Node:
    # Results are kept by workload name: figures of a changed one must not stand beside those of the original.
    text = name.text if name.text.endswith("-changed") else f"{name.text}-changed"
    return replace(name, value=text, text=text)


def _displaced(path: KeyPath, below: Node, above: Node) -> frozenset[str]:
    """Inherited keys that make no sense beside what `above` says."""
    if path == ("model",):
        if "path" in above.value:
            return frozenset({"repo", "revision", "source"})
        if "repo" in above.value:
            is_same = "repo" in below.value and below.value["repo"].value == above.value["repo"].value
            return frozenset({"path"} if is_same else {"path", "revision", "source"})
    if path == ("engine",) and "name" in above.value:
        name = below.value["name"].value if "name" in below.value else "native"
        if name != above.value["name"].value:
            return frozenset({"version", "env", "extra_args"})
    return frozenset()


def anchor_paths(tree: Node, folder: Path) -> Node:
    """The tree with its relative paths made absolute, for a file of another folder than the recipe's."""
    for path in (("model", "path"), ("workload", "recording")):
        node, depth = tree.find(path)
        if depth == 2 and isinstance(node.value, str) and node.value != "demo":
            absolute = str((folder / Path(node.value).expanduser()).resolve())
            parent = tree.value[path[0]]
            changed = replace(parent, value={**parent.value, path[1]: replace(node, value=absolute)})
            tree = replace(tree, value={**tree.value, path[0]: changed})
    return tree


def without_keys(tree: Node, keys: Sequence[str]) -> Node:
    """The mapping less some of its keys."""
    return replace(tree, value={key: child for key, child in tree.value.items() if key not in keys})


def as_texts(tree: Node, places: Sequence[KeyPath]) -> Node:
    """The tree with the numbers and booleans at `places` taken as the texts that were written; itself where none is."""
    for place in places:
        node, depth = tree.find(place)
        if depth == len(place) and isinstance(node.value, (bool, int, float)):
            tree = _replace_at(tree, place, replace(node, value=node.text))
    return tree


def _replace_at(tree: Node, path: KeyPath, node: Node) -> Node:
    if not path:
        return node
    step = path[0]
    child = tree.child(step)
    assert child is not None
    fresh = _replace_at(child, path[1:], node)
    if isinstance(step, int):
        return replace(tree, value=[*tree.value[:step], fresh, *tree.value[step + 1 :]])
    return replace(tree, value={**tree.value, step: fresh})


def drop_nulls(tree: Node) -> Node:
    """The tree less the keys that are `~`: their defaults hold."""
    if not tree.is_mapping:
        return tree
    kept = {key: drop_nulls(child) for key, child in tree.value.items() if child.value is not None}
    return replace(tree, value=kept)
