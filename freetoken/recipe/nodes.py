"""YAML with places: every key and value keeps its file, line and column, and its text as written.

Only the composer of PyYAML's safe loader is used, no constructor, so no tag can make an object. What a scalar is
follows YAML 1.2's core rules, because 1.1's surprise people: `on` stays a text (a field that wants a boolean still
takes it), `010` is ten and not eight, `1:30` is a text. A number that would not be written back the same way
(`8.10`, `08`) stays a text too, and the field it belongs to parses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from freetoken.errors import BadFileError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 24
#: Values of one file with every alias expanded: a bomb of anchors stops here.
MAX_NODES = 20_000

#: libyaml where PyYAML has it: twenty times faster on a large file, the same nodes.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG_KINDS = ("null", "bool", "int", "float", "str", "map", "seq", "timestamp", "merge", "value")
_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in _TAG_KINDS)

KeyPath: TypeAlias = tuple["str | int", ...]

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE, _FALSE = frozenset({"true", "True", "TRUE"}), frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


@dataclass(frozen=True)
class Mark:
    """Where something stands. `line` and `column` count from 1; `line` is 0 where there is no file."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Node:
    """A value with its place: a scalar, a list, or a mapping whose keys have places too."""

    value: Any  # a scalar; list[Node]; dict[str, Node]
    mark: Mark
    #: Who gave it, as provenance tells it: `command line`, `recipe FILE:LINE`, `parent NAME`, `user defaults`.
    origin: str = ""
    #: The text of a scalar as written.
    text: str = ""
    key_marks: dict[str, Mark] = field(default_factory=dict)
    #: True for a mapping that replaces what it is merged over.
    is_whole: bool = False

    @property
    def is_mapping(self) -> bool:
        """True for a mapping."""
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """The value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, path: KeyPath) -> tuple[Node, int]:
        """The deepest node on `path`, and how many of its steps lead there."""
        node = self
        for depth, step in enumerate(path):
            child = node.child(step)
            if child is None:
                return node, depth
            node = child
        return node, len(path)

    def child(self, step: str | int) -> Node | None:
        """The value under a key or an index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(step)
        if isinstance(self.value, list) and isinstance(step, int) and step < len(self.value):
            found: Node = self.value[step]
            return found
        return None

    def leaves(self, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """Every scalar and list with its path; an empty mapping counts as a leaf."""
        if isinstance(self.value, dict) and self.value:
            for key, child in self.value.items():
                yield from child.leaves((*prefix, key))
        else:
            yield prefix, self


def read_yaml(path: Path, shown: str | None = None) -> Node:
    """The document in the file at `path`; `shown` is how messages name it.

    Raises BadFileError: not there, no plain file, over 1 MiB, no UTF-8, no YAML, a key twice, too deep.
    """
    name = shown or str(path)
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is not a plain file" if path.exists() else "does not exist"
            raise BadFileError(f"{name} {what}")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadFileError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise BadFileError(f"{name} is larger than 1 MiB, which no recipe, profile or workload needs")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadFileError(f"{name}:{line}: not UTF-8 text") from error
    return parse_yaml(text, name)


def parse_yaml(text: str, source: str) -> Node:
    """The document in `text`. Raises BadFileError with line and column where it is no YAML of ours."""
    try:
        _check_depth(text, source)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise BadFileError(_describe_yaml_error(error, source)) from error
    except yaml.YAMLError as error:
        raise BadFileError(f"{source}: not YAML: {str(error).splitlines()[0]}") from error
    if root is None:
        return Node({}, Mark(source, 1, 1))
    reader = _Reader(source)
    node = reader.read(root, 0)
    if reader.findings:
        raise BadFileError(reader.findings[0], details=tuple(reader.findings[1:]))
    return node


def parse_value(text: str, source: str) -> Node:
    """A value as `--set` takes it: YAML where that means something, else the text itself."""
    try:
        node = parse_yaml(text, source)
    except BadFileError:
        node = Node(text, Mark(source), text=text)
    if text.strip() == "":
        node = Node(None, Mark(source))
    return without_lines(node, Mark(source))


def from_plain(value: Any, mark: Mark, origin: str) -> Node:
    """A node tree of plain values that share one place."""
    if isinstance(value, Mapping):
        children = {str(key): from_plain(one, mark, origin) for key, one in value.items()}
        return Node(children, mark, origin, key_marks=dict.fromkeys(children, mark))
    if isinstance(value, (list, tuple)):
        return Node([from_plain(one, mark, origin) for one in value], mark, origin)
    return Node(value, mark, origin, text=str(value))


def without_lines(node: Node, mark: Mark) -> Node:
    """The same tree with every place replaced by `mark`."""
    if isinstance(node.value, dict):
        children = {key: without_lines(child, mark) for key, child in node.value.items()}
        return replace(node, value=children, mark=mark, key_marks=dict.fromkeys(children, mark))
    if isinstance(node.value, list):
        return replace(node, value=[without_lines(child, mark) for child in node.value], mark=mark)
    return replace(node, mark=mark)


def with_origin(node: Node, origin: str, *, has_line: bool = False) -> Node:
    """The same tree with `origin` on every node; `has_line` adds the node's file and line."""
    said = f"{origin} {node.mark}" if has_line else origin
    if isinstance(node.value, dict):
        children = {key: with_origin(child, origin, has_line=has_line) for key, child in node.value.items()}
        return replace(node, value=children, origin=said)
    if isinstance(node.value, list):
        return replace(node, value=[with_origin(one, origin, has_line=has_line) for one in node.value], origin=said)
    return replace(node, origin=said)


def parse_scalar(text: str) -> Any:
    """What a plain (unquoted) scalar means: None, a boolean, a number, or the text."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text) and len(text) < 40:
        return int(text)
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    if _FLOAT.fullmatch(text):
        number = float(text)
        if "e" in text.lower():
            return int(number) if number.is_integer() and abs(number) < 1e18 else number
        return number if repr(number) == text else text
    return text


def _check_depth(text: str, source: str) -> None:
    # Before composing: the composer recurses, and thousands of brackets would end in a RecursionError; and it keeps
    # half a KiB for each value, which a MiB of them would turn into a quarter of a GiB.
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if count > 2 * MAX_NODES:
            raise BadFileError(f"{source}: more than {MAX_NODES:,} values")
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise BadFileError(f"{source}:{line}: nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1


def _describe_yaml_error(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
    problem = re.sub(r"'([^']*)'", r"`\1`", error.problem or str(error))
    if "cannot start any token" in problem and "\\t" in problem:
        problem = "a tab where YAML wants blanks"
    if "mapping values are not allowed" in problem:
        problem += " (a `:` too many, or a blank missing after it)"
    if "comment or" in problem and "line break" in problem:
        problem = 'a text that begins with `>` or `|` needs quotes, e.g. `">=8.0"`'
    return f"{where}: not YAML: {problem}"


class _Reader:
    """Turns composed nodes into ours; gathers what is wrong with keys instead of stopping at the first."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.findings: list[str] = []
        self.count = 0

    def read(self, node: yaml.Node, depth: int) -> Node:
        mark = self._mark(node)
        self.count += 1
        if self.count > MAX_NODES:
            raise BadFileError(f"{mark}: more than {MAX_NODES:,} values once its aliases are expanded")
        if depth > MAX_DEPTH:  # Only a chain of aliases gets here, or one that holds itself.
            raise BadFileError(f"{mark}: nested deeper than {MAX_DEPTH} levels once its aliases are expanded")
        if node.tag not in _TAGS:
            self.findings.append(f"{mark}: the tag `{node.tag}` is not read; only plain YAML is")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, mark, depth)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(one, depth + 1) for one in node.value], mark)
        if not isinstance(node, yaml.ScalarNode):
            raise BadFileError(f"{mark}: not a value")
        # A plain scalar is ours to resolve; a quoted one or a block is a text.
        text = str(node.value)
        return Node(text if node.style else parse_scalar(text), mark, text=text)

    def _read_mapping(self, node: yaml.MappingNode, mark: Mark, depth: int) -> Node:
        children: dict[str, Node] = {}
        key_marks: dict[str, Mark] = {}
        for key_node, value_node in node.value:
            place = self._mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.findings.append(f"{place}: a key must be a plain text")
                continue
            key = str(key_node.value)
            if key == "<<":
                self.findings.append(f"{place}: merge keys (`<<`) are not read; use `extends`")
            elif key in children:
                self.findings.append(f"{place}: `{key}` is given twice, first in line {key_marks[key].line}")
            else:
                children[key], key_marks[key] = self.read(value_node, depth + 1), place
        return Node(children, mark, key_marks=key_marks)

    def _mark(self, node: yaml.Node) -> Mark:
        return Mark(self.source, node.start_mark.line + 1, node.start_mark.column + 1)
