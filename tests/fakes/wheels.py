"""Tiny wheels made on the spot, and folders that play an index: what an engine's installation is tested from."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ENGINE_FILES = {
    "freetoken/__init__.py": "",
    "freetoken/cli.py": "print('freetoken version 0.2.1')\n",
    "freetoken/kernel.bin": "k" * 4000,
}


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], *, requires: Sequence[str] = (),
    extras: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """A wheel of `files`; `extras` is extra -> requirement."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    for extra, requirement in (extras or {}).items():
        lines += [f"Provides-Extra: {extra}", f'Requires-Dist: {requirement}; extra == "{extra}"']
    members = {
        **files,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path


def make_engine_wheels(folder: Path, version: str = "0.2.1") -> Path:
    """The engine, two packages that it needs and one that its extra `accel` adds."""
    make_wheel(
        folder, "freetoken", version, ENGINE_FILES, requires=("fake-torch>=2",), extras={"accel": "fake-kernels"}
    )
    make_wheel(folder, "fake-torch", "2.14.0", {"fake_torch.py": "x = 1\n"})
    return make_wheel(folder, "fake-kernels", "1.0", {"fake_kernels.py": "x = 2\n"}).parent


def make_index(folder: Path, wheels: Path, *, hashes: dict[str, str] | None = None) -> str:
    """The URL of a PEP 503 index over `wheels`, with true hashes but for the projects in `hashes`."""
    for wheel in wheels.glob("*.whl"):
        project = wheel.name.split("-")[0].replace("_", "-")
        digest = (hashes or {}).get(project) or hashlib.sha256(wheel.read_bytes()).hexdigest()
        page = folder / project / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<a href="{wheel.as_uri()}#sha256={digest}">{wheel.name}</a>\n')
    return folder.as_uri() + "/"


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
