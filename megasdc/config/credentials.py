"""Addresses of stores: credentials have no place in them."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"://[^/@:?#]*:(?!\d+(/|$))[^@]*@|://[^/@?#]*:[^/@]*@")
_IN_TEXT = re.compile(r"(://)[^\s\"'/@]*:[^\s\"'@]*@|(\?)[^\s\"']*=[^\s\"']*")
REMEDY = (
    "give them where fsspec looks: environment variables (such as AWS_ACCESS_KEY_ID), files of the store's own client "
    "(such as ~/.aws/credentials), or ~/.config/fsspec/*.json"
)


def find_credentials(address: str) -> str | None:
    """What in an address is, or may be, a secret, as a sentence that does not repeat it; None: nothing."""
    if "://" not in address:
        return None
    if _PASSWORD.search(address):
        return f"it holds a user and a password or key before an @; {REMEDY}"
    if "?" in address:
        return f"it holds options after a question mark, which may be a key; {REMEDY}"
    return None


def without_credentials(text: str) -> str:
    """A text in which what looks like a secret in an address is replaced by dots."""
    return _IN_TEXT.sub(lambda match: f"{match[1]}...@" if match[1] else "?...", text) if "://" in text else text
