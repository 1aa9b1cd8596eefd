import json
import stat

import pytest

from freetoken.share import archive
from freetoken.share.bundle import read_bundle
from freetoken.share.sign import key_path, make_key, read_trusted


def export_signed(machine):
    path = machine.write()
    assert machine.ft("export", "--new-key")[0] == 0
    assert machine.ft("export", str(path), "--sign", "-o", "signed.ftbundle")[0] == 0
    return machine.folder / "signed.ftbundle"


def test_a_signature_by_an_unknown_key_is_told_and_can_be_trusted(big, small):
    file = export_signed(big)
    key = read_bundle(file.read_bytes(), "x").signer.public_key
    code, out, _ = small.ft("import", str(file), "--profile", small.profile, "--dry-run")
    assert (code, f"signed by a key that is not on your trust list: {key}" in out) == (0, True)
    assert small.ft("import", str(file), "--trusted", "--profile", small.profile)[0] == 2
    assert small.ft("import", str(file), "--trust", "ann", "--profile", small.profile)[0] == 2  # nobody to ask
    code, out, _ = small.ft("import", str(file), "--trust", "ann", "--yes", "--trusted", "--profile", small.profile)
    assert (code, "signed by `ann`, whose key you trust" in out) == (0, True)
    assert read_trusted() == {"ann": key}


def test_a_bundle_signed_again_by_somebody_else_is_not_trusted(big, small):
    file = export_signed(big)
    small.ft("import", str(file), "--trust", "ann", "--yes", "--profile", small.profile, "--dry-run")
    other = small.folder / "other.ftbundle"
    files = archive.unpack(file.read_bytes(), "x")
    from freetoken.share.bundle import _dump
    from freetoken.share.sign import sign

    big.monkeypatch.setenv("FT_STATE", str(small.folder / "another"))
    make_key()
    other.write_bytes(archive.pack({**files, archive.SIGNATURE: _dump(sign(files[archive.MANIFEST]))}))
    code, _, said = small.ft("import", str(other), "--trusted", "--profile", small.profile)
    assert code == 2
    assert "it is signed by a key that is not on your trust list" in said


def test_an_altered_bundle_does_not_verify(big, small):
    file = export_signed(big)
    files = archive.unpack(file.read_bytes(), "x")
    files[archive.MANIFEST] = files[archive.MANIFEST].replace(b"}\n", b"} \n")
    file.write_bytes(archive.pack(files))
    code, _, said = small.ft("import", str(file))
    assert code == 2
    assert "does not belong to its contents: it was altered or forged" in said


def test_our_own_key_is_trusted_and_for_our_eyes_alone(big):
    file = export_signed(big)
    assert read_bundle(file.read_bytes(), "x").signer.describe() == "signed by `me`, whose key you trust"
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert big.ft("export", "--new-key")[0] == 2


def test_signing_without_a_key_says_how_to_get_one(big):
    code, _, said = big.ft("export", str(big.write()), "--sign")
    assert code == 2
    assert "`ft recipe key --new` makes one" in said


def test_the_same_bundle_signed_twice_has_the_same_bytes(big):
    first = export_signed(big).read_bytes()
    big.ft("export", "mine.yaml", "--sign", "-o", "again.ftbundle")
    assert (big.folder / "again.ftbundle").read_bytes() == first


def test_keys_are_shown_trusted_and_forgotten(big, small):
    assert big.ft("recipe", "key")[0] == 2
    code, key, said = big.ft("recipe", "key", "--new")
    assert (code, "give it to nobody" in said) == (0, True)
    key = key.strip()
    assert big.ft("recipe", "key")[1].strip() == key
    assert big.ft("recipe", "key", "--new")[0] == 2
    assert big.ft("export", str(big.write()), "--sign", "-o", "signed.ftbundle")[0] == 0
    file = str(big.folder / "signed.ftbundle")
    code, _, said = small.ft("import", file, "--trusted", "--profile", small.profile)
    assert (code, f"hint: `ft recipe trust NAME {key}` trusts it" in said) == (2, True)
    assert small.ft("recipe", "trust", "ann", key)[0] == 0
    assert small.ft("import", file, "--trusted", "--profile", small.profile)[0] == 0
    assert json.loads(small.ft("recipe", "trust", "--json")[1]) == {"ann": key}
    assert small.ft("recipe", "trust", "ann", "--remove")[0] == 0
    assert small.ft("import", file, "--trusted", "--profile", small.profile)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ann",), "which key is `ann`?"), (("ann", "1234"), "`1234` is no public key"),
        (("me", "ab" * 32), "`me` cannot be the name of a key"), (("a b", "ab" * 32), "cannot be the name"),
        (("ann", "01" + "00" * 31), "a key that anybody could use"), (("--remove",), "which key is to be removed?"),
        (("ann", "--remove"), "no key `ann` on the trust list"),
        (("bob", "cd" * 32), "`bob` is the name of another key"),
    ],
)  # fmt: skip
def test_what_cannot_be_trusted_is_said(big, arguments, words):
    assert big.ft("recipe", "trust", "bob", "ab" * 32)[0] == 0
    code, _, said = big.ft("recipe", "trust", *arguments)
    assert (code, words in said) == (2, True), said
    assert read_trusted() == {"bob": "ab" * 32}
