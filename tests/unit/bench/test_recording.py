"""Recordings: turns found in whole requests, files of strangers refused, workloads made of them."""

import json

import pytest

from freetoken.bench.keep import RecordingWriter, describe_recording, import_requests, write_workload
from freetoken.bench.proxy import Exchange
from freetoken.bench.recording import Recorder, format_lines, read_recording
from freetoken.bench.script import RecordedConversation, Script
from freetoken.bench.sizing import Sizer
from freetoken.bench.stream import Answer
from freetoken.errors import BadFileError, UsageError
from freetoken.recipe.load import load_workload

SYSTEM = {"role": "system", "content": "be brief"}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text} | more


def answer(text):
    return Answer(text, "", (1.0,), 1.0, 3, 10, None, "length", False)


def test_requests_become_the_turns_of_the_conversations_that_they_continue():
    recorder = Recorder()
    first = recorder.add("chat", {"messages": [SYSTEM, user("a")], "max_tokens": 9}, said("A"))
    other = recorder.add("chat", {"messages": [SYSTEM, user("x")]}, said("X"))
    second = recorder.add("chat", {"messages": [SYSTEM, user("a"), said("A"), user("b")]}, said("B"))
    found = [(one.conversation, one.turn, one.messages) for one in (first, other, second)]
    assert found == [(0, 0, (SYSTEM, user("a"))), (1, 0, (SYSTEM, user("x"))), (0, 1, (user("b"),))]


def test_completions_are_matched_by_their_text():
    recorder = Recorder()
    turns = [
        recorder.add("completion", {"prompt": text}, said(end))
        for text, end in (("ab", "c"), ("abcd", "e"), ("x", "y"))
    ]
    assert [(one.conversation, one.turn, one.prompt) for one in turns] == [(0, 0, "ab"), (0, 1, "d"), (1, 0, "x")]


def test_a_replay_sends_the_models_own_new_answers():
    recorder = Recorder()
    turns = [
        recorder.add("chat", {"messages": [SYSTEM, user("a")]}, said("old")),
        recorder.add("chat", {"messages": [SYSTEM, user("a"), said("old"), user("b")]}, said("older")),
    ]
    held = RecordedConversation(turns, "n0", 0, "m", 64)
    held.make_request(0)
    held.note_answer(0, answer("new"))
    fresh = {"role": "system", "content": "[n0]\nbe brief"}
    assert held.make_request(1).body["messages"] == [fresh, user("a"), said("new"), user("b")]


def test_a_replay_keeps_recorded_tool_calls_because_their_results_follow():
    call = {"id": "k", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "k", "content": "a.py"}
    recorder = Recorder()
    turns = [
        recorder.add("chat", {"messages": [user("a")], "tools": [{"type": "function"}]}, said("", tool_calls=[call])),
        recorder.add("chat", {"messages": [user("a"), said("", tool_calls=[call]), result]}, said("done")),
    ]
    held = RecordedConversation(turns, "n0", 0, "m", 64)
    held.note_answer(0, answer("no calls today"))
    body = held.make_request(1).body
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "tool"]
    assert body["messages"][1]["tool_calls"][0]["id"] == body["messages"][2]["tool_call_id"]
    assert body["tools"] == [{"type": "function"}]


def test_a_recording_reads_back_as_it_was_written(tmp_path):
    recorder, path = Recorder(), tmp_path / "r.jsonl"
    turns = [recorder.add("completion", {"prompt": "ab", "max_tokens": 5}, said("c"), {"prompt_tokens": 2}, sent_s=1.5)]
    path.write_text("".join(format_lines("import", turns)))
    assert read_recording(path) == ((turns[0],),)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "{} holds no requests"),
        (['{"ft_recording": 2}'], "{}:1: no recording of version 1: Input should be 1"),
        (['{"messages": []}'], "{}:1: no recording of version 1: Field required"),
        (['{"ft_recording": 1}', '{"conversation": 0, "turn": 1, "kind": "chat"}'],
         "{}:2: turn 1 of a conversation that has 0 so far"),
        (['{"ft_recording": 1}', '{"conversation": 0, "turn": 0, "kind": "chat", "shell": "rm"}'],
         "{}:2: `shell`: Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_refused_by_line(tmp_path, lines, words):
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(BadFileError) as caught:
        read_recording(path)
    assert caught.value.message == words.format(path)


def test_import_takes_bodies_batches_logs_and_whole_conversations(tmp_path):
    source, target = tmp_path / "log.jsonl", tmp_path / "mine.jsonl"
    reply = {"choices": [{"message": said("hi")}], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    lines = [
        {"messages": [user("plain")]},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [user("batch")]}},
        {"request": {"messages": [user("logged")]}, "response": reply},
        {"messages": [user("one"), said("1"), user("two"), said("2")]},
        {"prompt": "text sk-proj-abcdefghijklmnop1234"},
        {"nothing": "here"},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n")
    count, left_out = import_requests(source, target)
    assert count == 6
    assert left_out == (
        "log.jsonl:6: a completion without a text as its `prompt`", "log.jsonl:7: no JSON object",
    )  # fmt: skip
    assert [len(one) for one in read_recording(target)] == [1, 1, 1, 2, 1]
    assert "sk-proj" not in target.read_text()
    assert target.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="is never written over"):
        import_requests(source, target)


def test_the_workload_of_a_recording_is_one_that_a_recipe_can_name(tmp_path):
    path = tmp_path / "My Mine.jsonl"
    writer = RecordingWriter(path)
    history = []
    for turn in range(3):
        history.append(user(f"question {turn}"))
        usage = {"prompt_tokens": 100 * (turn + 1), "completion_tokens": 20}
        body = {"messages": list(history), "max_tokens": 30}
        writer.keep(Exchange("chat", body, said(f"a{turn}"), usage, float(turn), turn + 0.5))
        history.append(said(f"a{turn}"))
    writer.keep(Exchange("chat", {"messages": [user("other")]}, said("o"), None, 0.2, 0.8))
    writer.close()
    file, workload = write_workload(path)
    assert load_workload(str(file)) == workload
    assert (workload.name, workload.turns, workload.concurrency, workload.text) == ("My-Mine", 3, 2, "recorded")
    assert workload.context_tokens >= 320 + 20
    script = Script(workload, Sizer(), seed=0, is_unseen=False, model="m", base_dir=tmp_path)
    assert [one.turns for one in script.make_conversations(0)] == [3, 1]


def test_a_recorder_that_saw_nothing_leaves_no_file(tmp_path):
    writer = RecordingWriter(tmp_path / "r.jsonl")
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_large_recording_keeps_a_quarter_of_its_conversations_for_confirmation(tmp_path):
    recorder, path = Recorder(), tmp_path / "r.jsonl"
    path.write_text(
        "".join(format_lines("import", [recorder.add("completion", {"prompt": f"p{n}"}) for n in range(8)]))
    )
    workload = describe_recording("r", "r.jsonl", read_recording(path))

    def prompts(is_unseen):
        script = Script(workload, Sizer(), seed=0, is_unseen=is_unseen, model="m", base_dir=tmp_path)
        return [one.make_request(0).text.splitlines()[1] for one in script.make_conversations(0)]

    assert prompts(False) == ["p0", "p1", "p2", "p4", "p5", "p6"]
    assert prompts(True) == ["p3", "p7"]
