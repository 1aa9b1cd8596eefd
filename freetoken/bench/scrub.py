"""Secrets and persons taken out of texts before they are kept: keys, tokens, key blocks, e-mails, home folders.

What looks like a secret goes, also where it is none: a recording is there for its shape and its words, and a value
that was replaced costs nothing. The same value is always replaced by the same word, so turns still continue each
other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

SECRET, EMAIL, USER, ADDRESS = "<secret>", "<email>", "<user>", "<address>"

#: Names of values that are secrets whatever they look like.
_SECRET_NAMES = (
    r"(?:api|access|secret|private|auth|client|session|account|encryption|signing|deploy|service|master|refresh|bearer)"
    r"[ _.-]?(?:key|token|secret|id[ _-]?token|credentials?)s?|"
    r"passw(?:or)?d|passwd|passphrase|pwd|secret|token|authorization|credentials?|cookie|set-cookie|x-api-key|"
    r"apikey|auth|connection[ _-]?string|[A-Za-z0-9_]{1,40}_(?:key|token|secret|password|passwd|pwd|credentials?)"
)
_NAME = re.compile(rf"(?i)^(?:[\w-]*[_-])?(?:{_SECRET_NAMES})$")

#: Values that are secrets by their form, most telling first.
_FORMS = (
    r"-----BEGIN [A-Z0-9 ]*(?:PRIVATE KEY|CERTIFICATE|KEY BLOCK|MESSAGE)[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)",
    r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)*",
    r"\b(?:sk|pk|rk|ak)[-_](?:live|test|proj|ant|or|svcacct|admin|[a-z0-9]{2,8})?[-_A-Za-z0-9]{12,}",
    r"\b(?:hf|api_org|ghp|gho|ghu|ghs|ghr|glpat|gldt|npm|pypi|dop_v1|doo_v1|shpat|shpss|r8|gsk|xai|nvapi|pplx|tvly|lsv2|"
    r"lin_api|rpa|key|csk|fw|tgp_v1|ms|dapi|sbp|vercel|figd|ntn|secret|whsec|sntrys|dckr_pat|atlasv1|phc|phx)"
    r"[-_][A-Za-z0-9_-]{12,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\b(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA)[A-Z0-9]{12,}",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\bya29\.[A-Za-z0-9_-]{10,}",
    r"\bxox[a-z]-[A-Za-z0-9-]{8,}",
    r"\bxapp-[A-Za-z0-9-]{8,}",
    r"\bSG\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    r"\b[0-9]{8,10}:[A-Za-z0-9_-]{34,36}\b",
    r"https?://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/[^\s\"'<>]+",
    r"\bssh-(?:rsa|ed25519|dss) [A-Za-z0-9+/=]{40,}",
)
_FORM = re.compile("|".join(_FORMS), re.DOTALL)
_SCHEME = re.compile(r"(?i)\b(bearer|basic|digest|token)(\s+)([A-Za-z0-9._~+/=-]{8,})")
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+-]{0,20}://)[^\s/@:\"']{0,200}:[^\s/@\"']{1,500}@")
_QUERY = re.compile(rf"(?i)([?&](?:{_SECRET_NAMES}|sig|signature|key)=)[^&\s\"'<>#]+")
#: `name = value`, `name: value`, `"name": "value"`, `--name value`; values that are code (calls, names of types) stay.
_ASSIGNED = re.compile(
    rf"""(?ix) (?P<head> (?<![\w.]) ["']? (?:[\w-]{{0,40}}[_-])? (?:{_SECRET_NAMES}) (?:\\?["'])?
    \s{{0,8}} (?: => | := | [:=] ) \s{{0,8}} )
    (?: (?P<quote> \\?["'`]) (?P<quoted> [^"'`\n]{{4,}}?) (?P=quote)
      | (?P<bare> (?=[^\s"'`,;(){{}}\[\]]*[0-9]) [^\s"'`,;(){{}}\[\]]{{6,}} ) )"""
)
_FLAG = re.compile(rf"(?i)(?<!\S)(--?(?:[\w-]{{0,40}}-)?(?:{_SECRET_NAMES})[ =])([^\s\"']{{6,}})")
_LABEL = "[A-Za-z0-9-]{1,63}"
_EMAIL = re.compile(rf"(?<![A-Za-z0-9])[A-Za-z0-9._%+-]{{1,64}}@{_LABEL}(?:\.{_LABEL}){{0,6}}\.[A-Za-z]{{2,24}}\b")
_HOME = re.compile(r"(?i)(/(?:home|users|var/home)/|[a-z]:\\{1,2}users\\{1,2}|/mnt/[a-z]/users/)([^/\\\s\"'<>:]+)")
_PLAIN_HOME = ("<user>", "shared", "public")
_IP = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
#: Long runs of mixed letters and digits are keys rather than words; hashes of 32 hexadecimals and more among them.
_RANDOM = re.compile(r"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_-]{32,}={0,2}(?![A-Za-z0-9+/_=-])")


def scrub_text(text: str) -> str:
    """`text` without what looks like a secret or a person."""
    text = _FORM.sub(SECRET, text)
    text = _IN_URL.sub(rf"\1{SECRET}@", text)
    text = _QUERY.sub(rf"\1{SECRET}", text)
    text = _SCHEME.sub(_replace_scheme, text)
    text = _ASSIGNED.sub(_replace_value, text)
    text = _FLAG.sub(rf"\1{SECRET}", text)
    text = _EMAIL.sub(EMAIL, text)
    text = _HOME.sub(lambda match: match[0] if match[2].lower() in _PLAIN_HOME else match[1] + USER, text)
    text = _IP.sub(lambda match: match[0] if match[0].startswith(("127.", "0.")) else ADDRESS, text)
    return _RANDOM.sub(lambda match: SECRET if _looks_random(match[0]) else match[0], text)


def scrub(value: Any) -> Any:
    """The same for every text inside lists and mappings; values under a secret's name go whole."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, list):
        return [scrub(one) for one in value]
    if isinstance(value, dict):
        return {
            scrub_text(str(key)): SECRET if isinstance(one, str) and one and _NAME.match(str(key)) else scrub(one)
            for key, one in value.items()
        }
    return value


def _replace_scheme(match: re.Match[str]) -> str:
    # "token based", "basic understanding": words that follow a scheme's name in a sentence have no digits.
    is_word = match[3].isalpha() and (match[3].islower() or match[3].istitle()) and match[1].lower() != "bearer"
    return match[0] if is_word else f"{match[1]}{match[2]}{SECRET}"


def _replace_value(match: re.Match[str]) -> str:
    quote = match["quote"] or ""
    value = match["quoted"] or match["bare"]
    return match[0] if value.startswith("<") and value.endswith(">") else f"{match['head']}{quote}{SECRET}{quote}"


def _looks_random(text: str) -> bool:
    """Letters and digits that change places too often for words: at least three digits, and mixed with letters."""
    digits = sum(map(str.isdigit, text))
    letters = sum(map(str.isalpha, text))
    if digits < 3 or letters < 3:
        # Base64 of key material may have few digits, but its capitals are everywhere.
        return _changes(text, str.isupper) > len(text) // 5 and not ("_" in text or "/" in text)
    words = re.split(r"[/_+-]", text)
    longest = max(words, key=len)
    return len(longest) >= 20 and _changes(longest, str.isdigit) >= 4


def _changes(text: str, is_kind: Callable[[str], bool]) -> int:
    kinds = [is_kind(character) for character in text]
    return sum(a != b for a, b in pairwise(kinds))
