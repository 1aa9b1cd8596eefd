"""The text that the demo model learns from: standard libraries, as whole files.

Knows where Python sources lie, which of them are worth learning, and which are held out. Knows nothing of
tokens or models. Several versions of the library may be given, newest first: of an older one only the files
are kept that say something new, so a second version adds text and not repetition.

The split is by family, not by path: a file that moved between versions (`sqlite3/test/dbapi.py` became
`test/test_sqlite3/test_dbapi.py`) stays on one side, and training files that share most of their lines with
a held-out one are dropped, so that held-out figures are not figures of memory.

    python benchmarks/demo_model/corpus.py --out corpus.jsonl.xz [STDLIB ...]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import re
import sysconfig
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_FILE_BYTES = 400_000
MIN_FILE_BYTES = 64
LONG_LINE_CHARS = 20
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "idle_test_data", "bad_coding"}
# Generated tables, not code that a person would complete.
SKIPPED_PREFIXES = ("encodings/cp", "encodings/iso8859", "encodings/mac_", "encodings/koi8", "pydoc_data/topics")


@dataclass(frozen=True)
class Document:
    """One file: where it lies in its library, its text, and its side (`train`, `tune` or `test`)."""

    path: str
    text: str
    side: str


def read_stdlibs(folders: list[Path]) -> list[Document]:
    """Documents of the libraries in `folders` (newest first), without repetition, in a fixed order."""
    seen_texts: set[str] = set()
    seen_lines: set[int] = set()
    documents = []
    for folder in folders:
        fresh = []
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            text = read_source(path, name)
            if text is None or text in seen_texts:
                continue
            lines = make_line_set(text)
            # Against earlier folders only: two files of one library may well look alike.
            if len(lines & seen_lines) > 0.7 * len(lines):
                continue
            seen_texts.add(text)
            fresh.append((Document(name, text, pick_side(name)), lines))
        for document, lines in fresh:
            seen_lines |= lines
            documents.append(document)
    return drop_leaks(documents)


def read_source(path: Path, name: str) -> str | None:
    """The file's text, or None where it is a table, mostly escaped bytes, no UTF-8, too large or not valid Python."""
    if SKIPPED_FOLDERS & set(path.parts) or name.startswith(SKIPPED_PREFIXES):
        return None
    try:
        data = path.read_bytes()
        if not MIN_FILE_BYTES <= len(data) <= MAX_FILE_BYTES:
            return None
        text = data.decode("utf-8").replace("\r\n", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
        if 4 * len(re.findall(r"\\x[0-9a-fA-F]{2}", text)) > 0.1 * len(text):
            return None
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def pick_side(name: str) -> str:
    """`test` for 2 % of the families, `tune` for 1 % (to choose between runs), else `train`."""
    value = int(hashlib.sha256(make_family(name).encode()).hexdigest()[:8], 16) % 1000
    return "test" if value < 20 else "tune" if value < 30 else "train"


def make_family(name: str) -> str:
    """What stays the same of a file's name when it moves: its last part, without `test_` and `_`."""
    parts = name.removesuffix(".py").split("/")
    last = parts[-1]
    if last.strip("_") in ("init", "main"):
        last = "/".join(parts[-2:]) if len(parts) > 1 else last
    return last.removeprefix("test_").removesuffix("_test").strip("_") or last


def make_line_set(text: str) -> set[int]:
    """Hashes of the file's long lines, without their indentation."""
    lines = (line.strip() for line in text.splitlines())
    return {
        int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "big")
        for line in lines
        if len(line) >= LONG_LINE_CHARS
    }


def drop_leaks(documents: list[Document]) -> list[Document]:
    """Without the training files of which more than 40 % of the long lines stand in held-out files."""
    held = set()
    for document in documents:
        if document.side != "train":
            held |= make_line_set(document.text)
    kept = []
    for document in documents:
        lines = make_line_set(document.text)
        if document.side == "train" and len(lines & held) > 0.4 * len(lines):
            continue
        kept.append(document)
    return kept


def write_corpus(documents: list[Document], path: Path) -> None:
    """Write the documents as compressed JSON lines, so that another machine trains on the same text."""
    with lzma.open(path, "wt", encoding="utf-8", preset=6) as out:
        for document in documents:
            out.write(json.dumps(asdict(document)) + "\n")


def read_corpus(path: Path | None) -> list[Document]:
    """Documents from a file that `write_corpus` wrote, or of this interpreter's own library."""
    if path is None:
        return read_stdlibs([Path(sysconfig.get_path("stdlib"))])
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stdlib", nargs="*", type=Path, help="library folders, newest first")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    documents = read_stdlibs(options.stdlib or [Path(sysconfig.get_path("stdlib"))])
    write_corpus(documents, options.out)
    for side in ("train", "tune", "test"):
        chosen = [document for document in documents if document.side == side]
        print(side, len(chosen), "files", sum(len(document.text.encode()) for document in chosen), "bytes")


if __name__ == "__main__":
    main()
