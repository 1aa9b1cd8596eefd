"""`ft ctl` and `ft chat` against a server, in-process."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.adapters.control import ControlClient
from freetoken.cli.main import main
from freetoken.supervisor.register import Deployment, write_record
from tests.fakes.http_server import serve
from tests.fakes.stock_text import make_codec, make_parrot_engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    codec = make_codec()
    with serve(make_parrot_engine(codec), codec) as (url, _):
        yield url


@pytest.fixture(autouse=True)
def empty_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("FT_STATE", str(tmp_path / "state"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def test_health_stats_and_cache_status_print_the_documents(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ctl", "--base-url", url, "health")
    assert (code, out.splitlines()[0].split()) == (0, ["status", "ok"])
    for verb in (("stats",), ("cache", "status")):
        code, out, _ = run(capsys, "ctl", "--base-url", url, *verb, "--json")
        with ControlClient(url) as client:
            expected = (client.stats() if verb == ("stats",) else client.cache_status()).model_dump(mode="json")
        assert (code, json.loads(out).keys()) == (0, expected.keys())
    # The upstream engine's command takes `--json` before the verb.
    assert json.loads(run(capsys, "ctl", "--json", "--base-url", url, "health")[1])["status"] == "ok"


def test_rebuild_takes_counts_with_k_and_says_how_it_ended(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ctl", "--base-url", url, "cache", "rebuild", "--moe", "9", "--kv", "2k")
    assert (code, out.split(" (")[0]) == (0, "ok: 9 expert slots, 2048 KV pages")
    code, out, err = run(capsys, "ctl", "--base-url", url, "cache", "rebuild", "--moe", "1k")
    assert (code, out.split(" (")[0]) == (1, "rejected: 9 expert slots, 2048 KV pages")
    assert (
        err == "requested 1024 expert slots, outside 2 to 18 of the strategy `offload`; old cache kept, still serving\n"
    )
    code, _, err = run(capsys, "ctl", "--base-url", url, "cache", "rebuild")
    assert (code, "give `--moe N`, `--kv TOKENS` or both" in err) == (2, True)


def test_generate_requests_and_flush(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ctl", "--base-url", url, "generate", "abc", "--max-tokens", "4")
    assert (code, out) == (0, "defg\n")
    assert re.fullmatch(r"\[4 tokens, first after [\d.]+ m?s(, [\d.,]+ tok/s)?\]\n", err)
    code, out, _ = run(capsys, "ctl", "--base-url", url, "requests")
    assert (code, out.splitlines()[-2].split()[:2]) == (0, ["/v1/completions", "200"])
    assert run(capsys, "ctl", "--base-url", url, "cache", "flush")[:2] == (0, "prefix cache dropped\n")


def test_generate_echoes_the_prompt_reads_it_from_stdin_and_ends_before_a_text(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl = ("ctl", "--base-url", url, "generate", "--max-tokens", "9")
    assert run(capsys, *ctl, "--echo", "--stop", "g", "abc")[:2] == (0, "abcdef\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("ab"))
    code, out, _ = run(capsys, *ctl, "--json", "--stop", "ef", "-")
    found = json.loads(out)
    assert (code, found["text"], found["finish_reason"], found["prompt_tokens"]) == (0, "cd", "stop", 2)
    code, out, err = run(capsys, *ctl, "--stop", "d", "abc")
    assert (code, out) == (0, "\n")
    assert err == "[nothing: the model ended at once; `--ignore-eos` goes on after its stop token]\n"


def test_a_dead_address_is_told_with_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ctl", "--base-url", "127.0.0.1:9", "health")
    assert (code, err.splitlines()[0]) == (
        1, "error: http://127.0.0.1:9 cannot be reached: [Errno 111] Connection refused",
    )  # fmt: skip


def test_without_a_deployment_the_way_to_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ctl", "health")
    assert (code, err.splitlines()) == (2, [
        "error: no deployment runs",
        "hint: `ft apply recipes/demo.yaml` starts one; `--base-url http://127.0.0.1:1919` names any engine",
    ])  # fmt: skip


def test_several_deployments_are_listed_and_a_name_chooses(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from freetoken.supervisor.process import identify_self

    own = identify_self()
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        write_record(Deployment(
            run_id=f"r{number}", name=name, run_dir=str(tmp_path / name), state_dir=str(tmp_path), engine="native",
            model="parrot", host="127.0.0.1", port=int(url.rsplit(":", 1)[1]), keeper=own, engine_process=own,
        ))  # fmt: skip
    code, _, err = run(capsys, "ctl", "health")
    assert code == 2
    assert err.startswith(f"error: 2 deployments run: `one` at {url} (")
    assert err.splitlines()[-1] == "hint: `--name one`"
    code, out, _ = run(capsys, "ctl", "--name", "two", "health")
    assert (code, out.splitlines()[0].split()) == (0, ["status", "ok"])
    assert run(capsys, "ctl", "--name", "three", "health")[2].startswith(
        "error: no deployment `three` runs, but `one` at "
    )


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run(capsys, "chat", *arguments)


def test_a_piped_chat_answers_each_line_with_the_conversation_so_far(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "say [[Hello 🎉]]\n\nand [[more]]\n/reset\n[[again]]\n/exit\n[[never]]\n"
    code, out, err = chat(capsys, monkeypatch, lines, "--base-url", url, "--system", "be brief", "--temperature", "0")
    assert (code, out, err) == (0, "Hello 🎉\nmore\nagain\n", "")
    with ControlClient(url) as client:
        prompts = [entry.prompt_tokens for entry in client.requests(limit=512).entries[-3:]]
    assert prompts[0] is not None
    assert prompts[1] is not None
    assert prompts[2] is not None
    assert prompts[2] < prompts[0] < prompts[1]


def test_a_chat_prints_one_document_with_json_and_cuts_at_max_tokens(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = chat(capsys, monkeypatch, "[[abcdef]]\n[[x]]\n", "--base-url", url, "--json", "--max-tokens", "3")
    document = json.loads(out)
    assert (code, [one["content"] for one in document["answers"]]) == (0, ["abc", "x"])
    assert document["answers"][0]["usage"]["completion_tokens"] == 3


def test_a_chat_that_fails_keeps_the_answers_so_far_in_its_one_document(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "[[fine]]\n" + "x" * 5000 + "\n"
    code, out, err = chat(capsys, monkeypatch, lines, "--base-url", url, "--json")
    document = json.loads(out)
    assert (code, [one["content"] for one in document["answers"]]) == (1, ["fine"])
    assert "prompt is too long: " in document["error"]["message"]
    assert err.startswith("error: ")


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_chat_with_nothing_to_say_is_wrong_usage(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    code, out, err = chat(capsys, monkeypatch, "\n", "--base-url", url, *more)
    assert (code, err.splitlines()[0]) == (2, "error: nothing was said: stdin is empty")
    assert out == "" if not more else json.loads(out)["error"]["exit_code"] == 2


def test_a_command_that_the_chat_does_not_know_is_not_sent_to_the_model(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "/nosuch\n /said [[a]]\n/usr/bin [[b]]\n/etc is [[c]]\n"
    code, out, err = chat(capsys, monkeypatch, lines, "--base-url", url)
    assert (code, out) == (2, "a\nb\nc\n")
    assert err.startswith("`/nosuch` is no command: /reset forgets the conversation, /exit")


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_address_that_apply_prints_is_taken_everywhere(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    assert json.loads(run(capsys, "ctl", "--base-url", url + suffix, "stats", "--json")[1])["model"]["id"] == "parrot"
    assert run(capsys, "ctl", "--base-url", f" {url.removeprefix('http://')}{suffix}", "health")[0] == 0
    assert chat(capsys, monkeypatch, "[[a]]\n", "--base-url", url + suffix)[:2] == (0, "a\n")


@pytest.mark.parametrize(
    "wrong", ["", "http://", "ftp://host", "http://host:port", "http://host:99999", "a b", "http://[::1"]
)
@pytest.mark.parametrize("command", [("ctl", "--base-url", "{}", "health"), ("chat", "--base-url", "{}"), (
    "bench", "run", "--base-url", "{}"
), ("workload", "record", "--listen", "0", "--out", "x.jsonl", "--base-url", "{}")])  # fmt: skip
def test_what_is_no_address_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], wrong: str
) -> None:
    code, _, err = run(capsys, *(one.format(wrong) for one in command))
    assert (code, err.splitlines()[0]) == (
        2, f"error: `--base-url`: `{wrong}` is no address of an engine, expected e.g. `http://127.0.0.1:1919`",
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "0", "soon", "1e300", "2000000"])
@pytest.mark.parametrize("command", [("ctl", "--timeout", "{}", "health"), ("chat", "--timeout", "{}"), (
    "ctl", "cache", "rebuild", "--moe", "9", "--wait", "{}"
)])  # fmt: skip
def test_what_is_no_time_to_wait_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], wrong: str
) -> None:
    code, _, err = run(capsys, *(one.format(wrong) for one in command))
    assert code == 2
    assert f": `{wrong}` is " in err.splitlines()[0]
    assert err.splitlines()[0].endswith(", expected e.g. `30` or `2m`")


def test_a_time_to_wait_may_have_a_unit(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ctl", "--timeout", "1m", "--base-url", url, "health")[0] == 0


def test_a_turn_that_does_not_fit_ends_a_piped_chat_with_the_numbers(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = chat(capsys, monkeypatch, "x" * 5000 + "\n", "--base-url", url)
    assert code == 1
    assert "prompt is too long: " in err
