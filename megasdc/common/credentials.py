"""Secrets in names, addresses and texts: how they are recognised, and texts without them.

`without_credentials` is the one redaction of whatever is saved, sent or shown and may hold what a user, an environment
or a library has written: events, logs, messages, records. It recognises secrets by the names beside them, by their
place in an address, and by the shapes of well-known tokens; what has none of these, such as an argument without a name,
it cannot tell from other text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_LAST_WORDS = (
    r"API[_\-]?KEY|(?:ACCESS|SECRET|PRIVATE|ACCOUNT|ENCRYPTION|SIGNING|SHARED|LICENSE)[_\-]?KEY(?:[_\-]?ID)?"
    r"|PASS[_\-]?WORD|PASSWD|PASS[_\-]?PHRASE|SECRET|TOKEN|CREDENTIALS?|CONNECTION[_\-]?STRING|AUTHORIZATION"
    r"|WEBHOOK(?:[_\-]?URL)?|COOKIE"
)
_SECRET_NAME = re.compile(rf"(?:.*[_.\-])?(?:{_LAST_WORDS})", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PASSWORD = re.compile(r"://[^/@:?#\s]*:(?!\d+(/|$))[^@\s]*@|://[^/@?#\s]*:[^/@\s]*@|://[^/@:?#\s]{16,}@")
_TOKENS = (
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}"
    r"|\bxox[a-z]-[\w-]{10,}|\bsk-[\w-]{20,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^\"']*"
)
_KEY = rf"(?<![\w.\-])(?:-{{1,2}})?(?:[\w.\-]*[_.\-])?(?:{_LAST_WORDS})"
_NAMED = rf"{_KEY}=|{_KEY}(?<=AUTHORIZATION)\s*:\s*"
_QUOTED = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\\"(?:[^\"\\]|\\\\.)*\\\")"
"""As in JSON, in Python, and in JSON that is a text within JSON."""
_OF_JSON = rf"{_KEY}\\?[\"']\s*:\s*(?={_QUOTED})"
_OPTION = rf"(?<![\w\-])--(?:[\w.]+[_.\-])*(?:{_LAST_WORDS})\s+(?!-)"
_VALUE = rf"(?:(?:Bearer|Basic)\s+)?(?:{_QUOTED}|[^\s\"',;&\\]+)"
_IN_TEXT = re.compile(
    r"(?P<user>://)[^\s\"'/@]*:[^\s\"'@]*@|(?P<long>://)[^/@:?#\s\"']{16,}@"
    r"|(?P<options>://[^\s\"'?]*\?)[^\s\"']*=[^\s\"']*"
    r"|(?P<hook>://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.\-]*webhook\.office\.com)/)[^\s\"']+"
    rf"|(?P<bearer>\b(?:Bearer|Basic)\s+)[\w.~+/=\-]{{8,}}|(?P<token>{_TOKENS})"
    rf"|(?P<name>{_NAMED}|{_OF_JSON}|{_OPTION}){_VALUE}",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(
    rf"[?&](?:[\w.\-]*[_.\-])?(?:{_LAST_WORDS}|KEY|SIG|SIGNATURE|CODE|AUTH|PASS|PWD)=", re.IGNORECASE
)
_SIGNS = (
    *("://", "key", "pass", "secret", "token", "credential", "connection", "authorization", "webhook", "cookie"),
    *("bearer", "basic", "akia", "asia", "gh", "glpat", "hf_", "xox", "sk-", "eyj"),
)
"""One of them is in every text that holds a secret, in small letters: most texts need no more than this look."""
REMEDY = (
    "give them where fsspec looks: environment variables (such as AWS_ACCESS_KEY_ID), files of the store's own client "
    "(such as ~/.aws/credentials), or ~/.config/fsspec/*.json"
)
SECRET_REMEDY = (
    "it would stand in resolved.json, checkpoints and archives; give it in the environment of the launch, which "
    "reaches all ranks and is saved nowhere, or in a file of mode 0600 that the program reads which needs it"
)


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret."""
    return _SECRET_NAME.fullmatch(_CAMEL.sub("_", name.strip("-"))) is not None


def find_credentials(address: str) -> str | None:
    """Sentence on what is, or may be, a secret in an address, which it does not repeat; None: nothing."""
    if "://" not in address:
        return None
    if _PASSWORD.search(address):
        return f"it holds a user and a password or key before an @; {REMEDY}"
    if "?" in address:
        return f"it holds options after a question mark, which may be a key; {REMEDY}"
    return None


def holds_secret(text: str) -> bool:
    """Whether a text holds a secret; options of an address are one only where their names say so."""
    return any(not match["options"] or _SECRET_OPTION.search(match[0]) for match in _matches(text))


def without_credentials(text: str) -> str:
    """A text in which what looks like a secret is replaced by dots."""
    return _IN_TEXT.sub(_dots, text) if _may_hold_one(text) else text


def words_without_credentials(words: Sequence[str]) -> list[str]:
    """The words of a command line likewise; what follows an option with a secret name is its value."""
    after = [False, *(_is_secret_option(word) for word in words)]
    return ["..." if hidden else without_credentials(word) for hidden, word in zip(after, words, strict=False)]


def find_secrets(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of secrets in an object of JSON: values beside secret names, and texts that hold secrets.

    A list of texts, such as a command, is one text: an option is told from its value.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            is_value = isinstance(inner, str | int | float) and not isinstance(inner, bool) and inner != ""
            if is_value and is_secret_name(key):
                yield (*at, key)
            else:
                yield from find_secrets(inner, (*at, key))
    elif isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            if holds_secret(" ".join(value)) or any(map(_is_secret_option, value[:-1])):
                yield at
            return
        for place, inner in enumerate(value):
            yield from find_secrets(inner, (*at, place))
    elif isinstance(value, str) and holds_secret(value):
        yield at


def _is_secret_option(word: str) -> bool:
    """Whether the next word of a command line is a secret."""
    return word.startswith("-") and "=" not in word and is_secret_name(word)


def _may_hold_one(text: str) -> bool:
    small = text.lower()
    return any(sign in small for sign in _SIGNS)


def _matches(text: str) -> Iterator[re.Match[str]]:
    return _IN_TEXT.finditer(text) if _may_hold_one(text) else iter(())


def _dots(match: re.Match[str]) -> str:
    if match["user"] or match["long"]:
        return f"{match['user'] or match['long']}...@"
    kept = match["options"] or match["hook"] or match["bearer"] or match["name"]
    if not kept:
        return "..."
    value = match[0].removeprefix(kept)
    quote = next((mark for mark in ('"', "'", '\\"') if match["name"] and value.startswith(mark)), "")
    return f"{kept}{quote}...{quote}"
