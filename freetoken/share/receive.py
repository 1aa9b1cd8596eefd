"""`ft import` in one call: read, check who signed, plan for this machine, keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.errors import BadFileError, UsageError
from freetoken.recipe.load import LoadedRecipe
from freetoken.share.archive import read_bytes
from freetoken.share.bundle import Bundle, read_bundle
from freetoken.share.compare import Comparison, compare
from freetoken.share.imports import imports_dir, keep
from freetoken.share.sign import trust, verify

if TYPE_CHECKING:
    from freetoken.hardware.model import Hardware
    from freetoken.planner.plan import Plan, Refusal


@dataclass(frozen=True)
class Received:
    """What came of an import; `path` is None where nothing was kept."""

    bundle: Bundle
    comparison: Comparison
    answer: Plan | Refusal
    path: Path | None


def receive(
    file: Path, *, name: str | None = None, is_kept: bool = True, is_replacing: bool = False,
    is_trusted_only: bool = False, profile: str | None = None, hardware: Hardware | None = None,
    trust_as: str | None = None, confirm_trust: Callable[[str], bool] | None = None,
) -> Received:  # fmt: skip
    """Judges the bundle at `file` for this machine (or for `profile`), and keeps it.

    Raises BadFileError with exit code 2 for whatever is wrong with it; nothing was written then.
    """
    return receive_bytes(
        read_bytes(file, str(file)), file.name, name=name, is_kept=is_kept, is_replacing=is_replacing,
        is_trusted_only=is_trusted_only, profile=profile, hardware=hardware, trust_as=trust_as,
        confirm_trust=confirm_trust,
    )  # fmt: skip


def receive_bytes(
    data: bytes, shown: str, *, name: str | None = None, is_kept: bool = True, is_replacing: bool = False,
    is_trusted_only: bool = False, profile: str | None = None, hardware: Hardware | None = None,
    trust_as: str | None = None, confirm_trust: Callable[[str], bool] | None = None,
) -> Received:  # fmt: skip
    """The same for the bytes of a bundle that messages call `shown`."""
    bundle = read_bundle(data, shown)
    if trust_as is not None:
        bundle = _add_trust(bundle, trust_as, confirm_trust)
    if is_trusted_only and bundle.signer.kind != "trusted":
        key = bundle.signer.public_key
        hint = f"`ft recipe trust NAME {key}` trusts it" if key else "ask its author for a signed one"
        raise BadFileError(f"{shown} is refused: it is {bundle.signer.describe()}", hint=hint)
    if profile is not None:
        from freetoken.hardware.profiles import load_profile

        hardware = load_profile(profile)
    recipe = bundle.recipe if name is None else bundle.recipe.model_copy(update={"name": name})
    origins = {f"settings.{key}": "bundle" for key in recipe.settings.list_fixed()}
    loaded = LoadedRecipe(recipe, origins, None, imports_dir().absolute())
    comparison, fitted, answer = compare(bundle, loaded, hardware=hardware)
    path = keep(bundle, fitted.recipe, is_replacing=is_replacing) if is_kept else None
    return Received(bundle, comparison, answer, path)


def _add_trust(bundle: Bundle, name: str, confirm: Callable[[str], bool] | None) -> Bundle:
    signer = bundle.signer
    if signer.kind == "none":
        raise UsageError("the bundle is not signed, so there is no key to trust")
    if signer.kind == "unknown":
        if confirm is None or not confirm(f"trust {signer.public_key} as `{name}`?"):
            raise UsageError(f"{signer.public_key} was not put on the trust list", hint="`--yes` answers for you")
        trust(name, signer.public_key)
    from freetoken.share.archive import MANIFEST, SIGNATURE, unpack
    from freetoken.share.model import Signature

    files = unpack(bundle.data, bundle.recipe.name)
    signature = Signature.model_validate_json(files[SIGNATURE])
    return Bundle(bundle.recipe, bundle.lock, bundle.evidence, verify(files[MANIFEST], signature), bundle.data)
