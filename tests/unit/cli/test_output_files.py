"""`-o FILE` means the same everywhere: a pipe is written into, a symlink through, a missing folder is refused."""

import os
import threading

import pytest

COMMANDS = {
    "export": ("export", "demo", "-o"),
    "pull": ("pull", "registry", "-o"),
    "from-command": ("recipe", "from-command", "vllm serve org/model", "-o"),
    "from-yaml": ("recipe", "from-yaml", "engine.yaml", "-o"),
}


@pytest.fixture
def folder(ft, tmp_path):
    (tmp_path / "registry").mkdir()
    (tmp_path / "engine.yaml").write_text("model_path: org/model\n")
    assert ft("export", "demo", "-o", "registry/demo.ftbundle")[0] == 0
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_and_a_symlink_get_what_a_file_gets(ft, folder, name):
    command = COMMANDS[name]
    assert ft(*command, "plain")[0] == 0
    data = (folder / "plain").read_bytes()
    os.mkfifo(folder / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((folder / "pipe").read_bytes()), daemon=True)
    reader.start()
    # A recipe is named after its file.
    named = ("--as", "plain") if command[0] == "recipe" else ()
    assert ft(*command, "pipe", *named)[0] == 0
    reader.join(60)
    assert (found, (folder / "pipe").is_fifo()) == ([data], True)
    (folder / "link").symlink_to("real")
    assert ft(*command, "link", *named)[0] == 0
    assert ((folder / "link").is_symlink(), (folder / "real").read_bytes()) == (True, data)


@pytest.mark.parametrize("command", [*COMMANDS.values(), ("db", "backup"), (
    "workload", "record", "--import", "log.jsonl", "--out"
)])  # fmt: skip
def test_a_missing_folder_is_wrong_usage_and_is_not_made(ft, folder, command):
    code, out, err = ft(*command, "none/x.jsonl")
    assert (code, out) == (2, "")
    assert err == "error: cannot write none/x.jsonl: there is no folder none\nhint: mkdir -p none\n"
    assert not (folder / "none").exists()


def test_a_recipe_is_never_written_over(ft, folder):
    (folder / "mine.yaml").write_text("mine\n")
    code, _, err = ft(*COMMANDS["from-command"], "mine.yaml")
    assert (code, err.splitlines()[0]) == (2, "error: mine.yaml exists already")
    assert (folder / "mine.yaml").read_text() == "mine\n"


@pytest.mark.parametrize(("name", "words"), [
    ("pipe", "pipe is a pipe, expected a bundle's file"),
    ("registry", "registry is a folder, expected a bundle's file"),
    ("/dev/null", "/dev/null is a device, expected a bundle's file"), ("no/x", "no/x does not exist"),
])  # fmt: skip
def test_an_import_says_what_is_there_instead_of_a_bundle(ft, folder, name, words):
    os.mkfifo(folder / "pipe")
    code, _, err = ft("import", name)
    assert (code, err.splitlines()[0]) == (2, f"error: {words}")


def test_an_engine_profile_is_no_pipe(ft, folder):
    os.mkfifo(folder / "pipe")
    code, _, err = ft("bench", "bw", "--write-profile", "pipe")
    assert (code, err) == (2, "error: pipe is no plain file, and a profile's rows are added to it\n")
