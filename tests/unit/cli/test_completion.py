import pytest


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ft pl", ["plain,plan"]),
        ("ft recipe ", [f"plain,{one}" for one in ("from-command", "from-yaml", "key", "list", "show", "trust")]),
        ("ft plan mi", ["plain,mine", "file,mi"]),
        ("ft plan mine --profile rtx-3060-12gb", ["plain,rtx-3060-12gb", "plain,rtx-3060-12gb-wsl"]),
        ("ft plan mine --workload a", ["plain,agent-32k", "plain,agent-8k"]),
        ("ft plan mine --engine na", ["plain,native"]),
        ("ft schema w", ["plain,workload"]),
        ("ft plan mine --js", ["plain,--json"]),
    ],
)
def test_the_shell_is_offered_commands_options_and_names(ft, monkeypatch, tmp_path, words, offered):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("not even read")
    monkeypatch.setenv("_FT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    code, out, _ = ft()
    assert (code, out.splitlines()) == (0, offered)
