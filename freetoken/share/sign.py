"""Signatures: one ed25519 key of this machine, and the keys of others that this machine trusts.

A signature says who vouches for a bundle, not that it is safe: what an import refuses it refuses signed or not.
`cryptography` is imported when a key is used, so that nothing else pays for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from freetoken import paths
from freetoken.errors import BadFileError, UsageError, did_you_mean
from freetoken.outfile import replace_file
from freetoken.recipe.dump import dump_yaml
from freetoken.recipe.nodes import read_yaml
from freetoken.share.model import Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: Signed with the manifest, so that a signature made for something else never counts here.
_CONTEXT = b"ft-bundle 1\n"
#: Points of small order: under such a key anybody can make signatures.
_WEAK_KEYS = frozenset(
    {
        "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "00" * 32, "00" * 31 + "80",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    }
)  # fmt: skip


class Signer(NamedTuple):
    """Who signed a bundle: `none`, a `trusted` key with its name, an `unknown` one."""

    kind: Literal["none", "trusted", "unknown"]
    public_key: str = ""
    name: str = ""

    def describe(self) -> str:
        """`signed by `ann` (trusted)`, for people."""
        if self.kind == "none":
            return "not signed"
        if self.kind == "trusted":
            return f"signed by `{self.name}`, whose key you trust"
        return f"signed by a key that is not on your trust list: {self.public_key}"


def make_key(*, is_replacing: bool = False) -> str:
    """Makes this machine's key; its public half in hexadecimal. Raises UsageError where there is one already."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = key_path()
    if path.exists() and not is_replacing:
        raise UsageError(f"there is a key already: {read_public_key()}", hint=f"move {path} away to make another one")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = Ed25519PrivateKey.generate()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.private_bytes_raw().hex().encode() + b"\n")
    return key.public_key().public_bytes_raw().hex()


def key_path() -> Path:
    """`<state>/keys/sign.key`: the secret half, readable by its owner alone."""
    return paths.state_dir() / "keys" / "sign.key"


def read_public_key() -> str:
    """The public half of this machine's key."""
    return _read_key().public_key().public_bytes_raw().hex()


def sign(manifest: bytes) -> Signature:
    """A signature over `manifest` with this machine's key. Raises UsageError where there is none."""
    key = _read_key()
    made = key.sign(_CONTEXT + manifest).hex()
    return Signature(public_key=key.public_key().public_bytes_raw().hex(), signature=made)


def verify(manifest: bytes, signature: Signature | None) -> Signer:
    """Who signed `manifest`. Raises BadFileError where the signature is not one of these bytes."""
    if signature is None:
        return Signer("none")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if signature.public_key in _WEAK_KEYS:
        raise BadFileError("the bundle's signature was made with a key that anybody could use")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
        key.verify(bytes.fromhex(signature.signature), _CONTEXT + manifest)
    except (InvalidSignature, ValueError) as error:
        raise BadFileError(
            "the bundle's signature does not belong to its contents: it was altered or forged"
        ) from error
    name = next((name for name, one in read_trusted().items() if one == signature.public_key), None)
    return Signer("trusted", signature.public_key, name) if name else Signer("unknown", signature.public_key)


def trust_path() -> Path:
    """`<state>/trust.yaml`: name -> public key."""
    return paths.state_dir() / "trust.yaml"


def read_trusted() -> dict[str, str]:
    """The keys that this machine trusts, by the name it gave them; its own key is `me`."""
    own = {"me": read_public_key()} if key_path().is_file() else {}
    path = trust_path()
    if not path.is_file():
        return own
    found = read_yaml(path, str(path)).plain()
    if not isinstance(found, dict) or not all(isinstance(one, str) and len(one) == 64 for one in found.values()):
        raise BadFileError(f"{path}: expected `name: public key`, each key 64 hexadecimal digits")
    return {**own, **found}


def trust(name: str, public_key: str) -> None:
    """Puts a key on the trust list under `name`. Raises UsageError for what is no name, no key, or a name taken."""
    known = _read_list()
    if name == "me" or not re.fullmatch(r"[A-Za-z_][\w.-]{0,39}", name, re.ASCII):
        raise UsageError(f"`{name}` cannot be the name of a key: at most 40 letters, digits, `_`, `.` and `-`")
    if not re.fullmatch(r"[0-9a-f]{64}", public_key):
        raise UsageError(f"`{public_key[:80]}` is no public key: 64 hexadecimal digits, as `ft recipe key` prints them")
    if public_key in _WEAK_KEYS:
        raise UsageError("that is a key that anybody could use")
    if known.get(name, public_key) != public_key:
        raise UsageError(
            f"`{name}` is the name of another key: {known[name]}", hint=f"`ft recipe trust {name} --remove` forgets it"
        )
    _write_list({**known, name: public_key})


def forget(name: str) -> None:
    """Takes a key off the trust list. Raises UsageError where there is none of the name."""
    known = _read_list()
    if name not in known:
        raise UsageError(f"no key `{name}` on the trust list{did_you_mean(name, known)}")
    _write_list({key: value for key, value in known.items() if key != name})


def _read_list() -> dict[str, str]:
    return {name: key for name, key in read_trusted().items() if name != "me"}


def _write_list(known: dict[str, str]) -> None:
    path = trust_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, dump_yaml(known).encode())


def _read_key() -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = key_path()
    if not path.is_file():
        raise UsageError("this machine has no key to sign with", hint="`ft recipe key --new` makes one")
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text(encoding="ascii").strip()))
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} is not a key: {error}") from error
