"""A planted secret does not survive, in whatever form and place; ordinary text and code do."""

import base64
import json
import random
import string

import pytest

from freetoken.bench.recording import Recorder, format_turn
from freetoken.bench.scrub import scrub, scrub_text


def draw(seed, length, alphabet=string.ascii_letters + string.digits):
    rng = random.Random(seed)
    return "".join(rng.choices(alphabet, k=length))


def jwt(seed):
    parts = (b'{"alg":"HS256","typ":"JWT"}', json.dumps({"sub": draw(seed, 9)}).encode(), draw(seed, 32).encode())
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


#: What is planted -> the text around it, with `{}` where it stands.
FORMS = {
    "openai": ("sk-" + draw(1, 48), "my key is {}"),
    "openai project": ("sk-proj-" + draw(2, 40) + "_" + draw(3, 20), "OPENAI={}"),
    "anthropic": ("sk-ant-api03-" + draw(4, 60), "curl -H 'x-api-key: {}'"),
    "openrouter": ("sk-or-v1-" + draw(5, 64, "0123456789abcdef"), "{}"),
    "hugging face": ("hf_" + draw(6, 34), "login --token {}"),
    "github": ("ghp_" + draw(7, 36), "git clone https://x:{}@github.com/a/b"),
    "github app": ("ghs_" + draw(8, 36), "{}"),
    "github fine": ("github_pat_" + draw(9, 22) + "_" + draw(10, 59), "token {}"),
    "gitlab": ("glpat-" + draw(11, 20), "PRIVATE-TOKEN: {}"),
    "aws id": ("AKIA" + draw(12, 16, string.ascii_uppercase + string.digits), "aws_access_key_id = {}"),
    "aws secret": (draw(13, 40, string.ascii_letters + string.digits + "/+"), "aws_secret_access_key = {}"),
    "google": ("AIza" + draw(14, 35), "?key={}"),
    "google oauth": ("ya29." + draw(15, 60), "Authorization: Bearer {}"),
    "slack": ("xoxb-" + draw(16, 12, string.digits) + "-" + draw(17, 24), "{}"),
    "slack hook": (
        "T0" + draw(18, 8) + "/B0" + draw(19, 8) + "/" + draw(20, 24),
        "https://hooks.slack.com/services/{}",
    ),
    "stripe": ("sk_live_" + draw(21, 24), "stripe.api_key = '{}'"),
    "npm": ("npm_" + draw(22, 36), "//registry/:_authToken={}"),
    "pypi": ("pypi-AgEIcHlwaS5vcmc" + draw(23, 60), "{}"),
    "nvidia": ("nvapi-" + draw(24, 64), "NGC {}"),
    "groq": ("gsk_" + draw(25, 52), "{}"),
    "sendgrid": ("SG." + draw(26, 22) + "." + draw(27, 43), "{}"),
    "telegram": (draw(28, 9, "123456789") + ":AA" + draw(29, 33), "bot {}"),
    "jwt": (jwt(30), "cookie: session={}"),
    "bearer": (draw(31, 40), "authorization: bearer {}"),
    "basic": (base64.b64encode(b"joe:correcthorse9").decode(), "Authorization: Basic {}"),
    "pem": ("-----BEGIN RSA PRIVATE KEY-----\n" + draw(32, 300) + "\n-----END RSA PRIVATE KEY-----", "key:\n{}\nend"),
    "pem cut off": ("-----BEGIN OPENSSH PRIVATE KEY-----\n" + draw(33, 200), "key:\n{}"),
    "ssh": ("ssh-ed25519 AAAAC3" + draw(34, 62), "{} joe@box"),
    "password in python": ("hunter2!", 'password = "{}"'),
    "password in json": ("tr0ub4dor", '{{"db": {{"password": "{}"}}}}'),
    "password in escaped json": ("tr0ub4dor", '{{\\"password\\": \\"{}\\"}}'),
    "password in yaml": ("s3cr3tvalue", "db_password: {}"),
    "password in env": ("p4ssw0rdX", "export DB_PASSWORD={}"),
    "password in a url": ("s3same-open", "postgres://app:{}@db.internal:5432/x"),
    "flag": ("qwerty123456", "tool --api-key {} --verbose"),
    "query": ("abcdef123456", "https://x.org/a?access_token={}&b=1"),
    "hash": (draw(35, 64, "0123456789abcdef"), "the digest {} is it"),
    "base64": (draw(36, 44) + "=", "value {}"),
    "e-mail": ("joe.doe+tag@mail.example.co.uk", "write to {} today"),
    "home": ("joedoe", "open /home/{}/src/main.c"),
    "home on mac": ("joedoe", "open /Users/{}/x"),
    "home on windows": ("joedoe", r"C:\Users\{}\x"),
    "home in wsl": ("joedoe", "/mnt/c/Users/{}/x"),
    "address": ("10.20.30.40", "ssh to {} now"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_planted_secret_does_not_survive(name):
    secret, around = FORMS[name]
    scrubbed = scrub_text(around.format(secret))
    for line in secret.splitlines():
        assert line not in scrubbed


@pytest.mark.parametrize("name", FORMS)
def test_nor_does_it_in_any_place_of_a_request(name):
    secret, around = FORMS[name]
    planted = around.format(secret)
    call = {"id": "1", "function": {"name": "run", "arguments": json.dumps({"command": planted})}}
    body = {
        "model": planted, "user": planted, "metadata": {"note": planted}, "stop": [planted],
        "messages": [
            {"role": "system", "content": planted, "name": "x"},
            {"role": planted[:30], "content": [{"type": "text", "text": planted}, {"type": "x", "url": planted}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": planted},
            {"role": "tool", "tool_call_id": "1", "content": planted},
        ],
        "tools": [{"type": "function", "function": {"description": planted, "parameters": {"default": planted}}}],
    }  # fmt: skip
    recorder = Recorder()
    lines = format_turn(recorder.add("chat", body, {"role": "assistant", "content": planted}))
    lines += format_turn(Recorder().add("completion", {"prompt": planted}, {"content": planted}))
    for line in secret.splitlines():
        assert json.dumps(line)[1:-1] not in lines


def test_values_under_a_secrets_name_go_whole():
    value = {
        "api_key": "short",
        "nested": [{"Authorization": "x y"}],
        "token_count": 5,
        "max_tokens": "12",
        "tokens": "all",
    }
    assert scrub(value) == {
        "api_key": "<secret>", "nested": [{"Authorization": "<secret>"}], "token_count": 5, "max_tokens": "12",
        "tokens": "all",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "def read(path):\n    return path.read_text(encoding='utf-8')\n",
        "token = tokenizer.next_token()\nif token.kind == 'name':\n    pass",
        "The basic understanding of bearer shares is a token of trust.",
        "self._authorization_header = make_header(user)",
        "key = lambda one: one.name\nsecret: str | None = None",
        "from freetoken.bench.recording import Recorder, format_turn_as_a_very_long_function_name_indeed",
        "https://docs.python.org/3/library/asyncio-task.html#asyncio.timeout",
        "127.0.0.1:8080 and 0.0.0.0",
        "x = 3.14159265358979323846264338327950288419716939937510",
        "ERROR_INVALID_PARAMETER_COMBINATION_OF_SEVERAL_FLAGS",
        "password: str",
    ],
)
def test_ordinary_text_and_code_stay_as_they_are(text):
    assert scrub_text(text) == text


def test_scrubbing_twice_changes_nothing_more():
    once = scrub_text("\n".join(around.format(secret) for secret, around in FORMS.values()))
    assert scrub_text(once) == once


def test_the_standard_library_mostly_survives():
    """What is taken out of real source is little: the recorder must not spoil what it records."""
    from freetoken.bench.text import TextSource

    text = TextSource("code", 7).take(300_000)
    kept = sum(a == b for a, b in zip(text.splitlines(), scrub_text(text).splitlines(), strict=True))
    assert kept / len(text.splitlines()) > 0.995


def test_scrubbing_is_quick_on_hostile_text():
    """No form may take quadratic time: a request of a megabyte is ordinary."""
    import time

    started = time.perf_counter()
    pieces = ("a", "/", "eyJ", "password", "@", "a.", "api_", "-----BEGIN PRIVATE KEY-----", "http://a:", '"token": "')
    for piece in pieces:
        scrub_text(piece * (40_000 // len(piece)))
    assert time.perf_counter() - started < 10
