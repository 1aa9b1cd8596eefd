"""The bundle's container: a zip file that has exactly one form for the same files.

Entries are stored, in a fixed order, with one time stamp and no extra field, so equal contents are equal bytes on
every machine. Reading accepts only that form: the files are written again and must come to the same bytes. With that
nothing can hide in a gap, a comment, a second entry of the same name or a compressed bomb. The writer is ours rather
than `zipfile`'s, whose headers may change with Python's version.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from freetoken.errors import BadFileError

MANIFEST, RECIPE, LOCK, EVIDENCE, SIGNATURE = (
    "bundle.json", "recipe.yaml", "lock.yaml", "evidence.json", "signature.json",
)  # fmt: skip
#: Every file that a bundle may hold, in the order in which they stand in it, with its largest size in bytes.
LIMITS: dict[str, int] = {
    MANIFEST: 16 << 10, RECIPE: 64 << 10, LOCK: 1 << 20, EVIDENCE: 2 << 20, SIGNATURE: 4 << 10,
}  # fmt: skip
MAX_BUNDLE_BYTES = 4 << 20

_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError,
    struct.error,
)  # fmt: skip
_DATE = (1 << 5) | 1  # 1 January 1980, the first day that a zip file knows
_VERSION, _UNIX = 20, 3
_MODE = (stat.S_IFREG | 0o644) << 16


def pack(files: Mapping[str, bytes]) -> bytes:
    """The zip file of `files`, whose names must be those of `LIMITS`."""
    body, directory = bytearray(), bytearray()
    for name in (one for one in LIMITS if one in files):
        data, raw = files[name], name.encode("ascii")
        common = struct.pack("<4H3L2H", 0, 0, 0, _DATE, crc32(data), len(data), len(data), len(raw), 0)
        offset = len(body)
        body += struct.pack("<4sH", b"PK\3\4", _VERSION) + common + raw + data
        head = struct.pack("<4sBBH", b"PK\1\2", _VERSION, _UNIX, _VERSION)
        directory += head + common + struct.pack("<3H2L", 0, 0, 0, _MODE, offset) + raw
    count = sum(one in files for one in LIMITS)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory + end)


def read_bytes(path: Path, shown: str) -> bytes:
    """The bytes of the bundle at `path`. Raises BadFileError: no plain file, or larger than any bundle."""
    try:
        if not path.exists():
            raise BadFileError(f"{shown} does not exist")
        if not path.is_file():
            raise BadFileError(
                f"{shown} is {_describe_place(path)}, expected a bundle's file",
                hint="`ft pull FOLDER` takes one out of a folder" if path.is_dir() else None,
            )
        with path.open("rb") as file:
            data = file.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise BadFileError(f"{shown} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BUNDLE_BYTES:
        raise BadFileError(f"{shown} is larger than {MAX_BUNDLE_BYTES >> 20} MiB, which no bundle is")
    return data


def _describe_place(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() or path.is_socket() else "a device"


def unpack(data: bytes, shown: str) -> dict[str, bytes]:
    """The files of a bundle. Raises BadFileError for anything that `pack` would not have written."""
    if len(data) > MAX_BUNDLE_BYTES:
        raise BadFileError(f"{shown} is larger than {MAX_BUNDLE_BYTES >> 20} MiB, which no bundle is")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_entries(entries, shown)
            files = {entry.filename: _read_entry(archive, entry, shown) for entry in entries}
    except _ZIP_ERRORS as error:
        raise BadFileError(f"{shown} is no bundle: {_plain(str(error)) or 'not a zip file'}") from error
    if pack(files) != data:
        raise BadFileError(
            f"{shown} holds bytes beside its files, or has them in another form than `ft export` writes",
            hint="ask for the file as it was exported; do not pack it again",
        )
    return files


def _check_entries(entries: list[zipfile.ZipInfo], shown: str) -> None:
    if len(entries) > len(LIMITS):
        raise BadFileError(f"{shown} holds {len(entries):,} files, a bundle has at most {len(LIMITS)}")
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename
        problem = _judge_name(name, seen) or _judge_entry(entry)
        if problem:
            raise BadFileError(f"{shown} is refused: `{_plain(name)}` {problem}")
        seen.add(name)


def _judge_name(name: str, seen: set[str]) -> str:
    if name in seen:
        return "is in it twice"
    if name in LIMITS:
        return ""
    if name.startswith(("/", "\\")) or (len(name) > 1 and name[1] == ":"):
        return "is an absolute path"
    if ".." in name.replace("\\", "/").split("/"):
        return "leads out of its folder"
    if not name.isascii() or not name.isprintable():
        return "has characters in its name that no file of a bundle has"
    return f"is no file of a bundle, which has {', '.join(LIMITS)}"


def _judge_entry(entry: zipfile.ZipInfo) -> str:
    mode = entry.external_attr >> 16
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    if entry.flag_bits & 1:
        return "is encrypted"
    if entry.compress_type != zipfile.ZIP_STORED:
        return "is compressed, and the files of a bundle are not"
    if entry.file_size > LIMITS[entry.filename]:
        return f"claims {entry.file_size:,} bytes, {LIMITS[entry.filename]:,} are allowed"
    if entry.file_size != entry.compress_size:
        return "has two sizes"
    return ""


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, shown: str) -> bytes:
    limit = LIMITS[entry.filename]
    with archive.open(entry) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise BadFileError(f"{shown} is refused: `{entry.filename}` has more than {limit:,} bytes")
    return data


def _plain(text: str) -> str:
    """`text` so that a terminal shows it and nothing else happens."""
    return ascii(text[:80])[1:-1]
