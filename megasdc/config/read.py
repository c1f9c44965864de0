"""Reading of a JSON file into a dict, and `--set` overrides.

JSON only: DeepSpeed's own reader (hjson) accepts files that other tools refuse. Duplicate keys are refused, because
every JSON reader silently keeps one of the two values. Problems are collected; only a file that cannot be read or
parsed raises here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megasdc.common.credentials import without_credentials
from megasdc.common.errors import ConfigError

ListDefault = Callable[[tuple[str | int, ...]], list[Any] | None]
"""Returns the default of a list field, so that an override can change one item of a list that the file does not set."""


DEEPEST = 100
"""Maximum nesting of lists and objects; fields need a few levels only."""
MOST_DIGITS = 400
"""Maximum of digits of an integer; the largest floating-point number has 309."""


def dotted(path: Iterable[str | int]) -> str:
    """Format a path as in messages and `--set`: ``megasdc.data.split.0``."""
    return ".".join(item if isinstance(item, str) and item.isprintable() else json.dumps(item) for item in path)


def read_json(path: Path | str) -> tuple[dict[str, Any], list[str]]:
    """Read a JSON file in UTF-8 whose root is an object.

    Returns:
        The object, and one problem for every duplicate key.

    Raises:
        ConfigError: the file cannot be read or is not JSON; a syntax error is given with line and column.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); give the path of a JSON file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    try:
        found = loads(text)
        plain = _plain(found)
    except json.JSONDecodeError as error:
        lines = text.splitlines()[: error.lineno]  # the end of a file that lacks something is one line more
        line = lines[-1].strip() if lines else ""
        raise ConfigError(
            f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}; the line is: "
            f"{without_credentials(line)!r}.",
            source,
        ) from error
    except RecursionError as error:
        raise ConfigError(f"the file nests lists or objects more than {DEEPEST} deep.", source) from error
    if not isinstance(found, dict):
        raise ConfigError(f"the file holds {shown(found)}; needed: one object {{...}}.", source)
    problems = [
        f"{dotted(at)}: the key occurs more than once in its object; keep one of them." for at in _duplicates(found, ())
    ]
    return plain, problems


def loads(text: str) -> Any:
    """Parse JSON; refuses numbers that are not finite, and stores duplicate keys in `_Object.duplicates`."""
    try:
        return json.loads(
            text, object_pairs_hook=_Object, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_finite
        )
    except _RefusedNumber as error:
        place = next((token.start() for token in _TOKEN.finditer(text) if token[0] == error.written), 0)
        raise json.JSONDecodeError(str(error), text, place) from error


def unusable_values(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Find values and keys that are impossible in file names or in JSON.

    Yields:
        Path and reason of every text with a NUL character or half a surrogate pair, and of every NaN and infinity.
    """
    if isinstance(value, str) and (reason := is_unusable(value)):
        yield at, reason
    elif isinstance(value, float) and not math.isfinite(value):
        yield at, "is not a finite number"
    elif isinstance(value, dict):
        for key, inner in value.items():
            if reason := is_unusable(key):
                yield (*at, key), f"the key {reason}"
            yield from unusable_values(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from unusable_values(inner, (*at, index))


def is_unusable(text: str) -> str | None:
    """Reason why a text cannot be a file name; None if it can."""
    if "\0" in text:
        return "holds a NUL character"
    return "holds half a surrogate pair" if any("\ud800" <= letter <= "\udfff" for letter in text) else None


def shown(value: Any) -> str:
    """Format a value as JSON for a message, shortened to 60 characters, without passwords in addresses."""
    text = without_credentials(json.dumps(value, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str], list_default: ListDefault) -> list[str]:
    """Set values by dotted path, in place; returns one problem for every override that cannot be applied.

    Overrides are texts ``a.b.c=value``; a value that is not JSON is a string, and a number in the path an index into a
    list. ``list_default`` gives the default of a list field by path.
    """
    return [problem for text in overrides if (problem := _apply(raw, text, list_default)) is not None]


def _apply(raw: dict[str, Any], text: str, list_default: ListDefault) -> str | None:
    name, equals, written = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        return f"--set {without_credentials(text)}: needs the form path=value, such as megasdc.training.steps=100."
    try:
        value = _plain(loads(written))
    except RecursionError:
        return f"{name}: nests lists or objects more than {DEEPEST} deep."
    except ValueError:
        value = written
    at: Any = raw
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        step: str | int = key
        if isinstance(at, list):
            if not key.isdecimal() or int(key) >= len(at):
                where = ".".join(keys[:depth])
                return f"{name}: {key!r} is no index of {where}; allowed: 0 to {len(at) - 1}, or set the whole list."
            step = int(key)
        elif not isinstance(at, dict):
            return f"{name}: {'.'.join(keys[:depth])} is {shown(at)}, which has nothing inside; set it as a whole."
        if last:
            at[step] = value
            continue
        if isinstance(at, dict) and at.get(key) is None:
            at[key] = (list_default(tuple(keys[: depth + 1])) if keys[depth + 1].isdecimal() else None) or {}
        at = at[step]
    return None


class _Object(dict[str, Any]):
    """A parsed object that stores its duplicate keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.duplicates = sorted({key for key, _ in pairs if key in seen or seen.add(key)})  # type: ignore[func-returns-value]


class _RefusedNumber(ValueError):
    """A number that JSON or floating point cannot represent; ``written`` as in the text."""

    def __init__(self, written: str, reason: str) -> None:
        super().__init__(f"{shown(written).strip(chr(34))} {reason}")
        self.written = written


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,:{}"\[\]]+')
"""A string or another scalar of a JSON file."""


def _refuse_constant(name: str) -> Any:
    raise _RefusedNumber(name, "is not a JSON value")


def _integer(written: str) -> int:
    if len(written) > MOST_DIGITS:
        raise _RefusedNumber(written, f"has {len(written)} digits; allowed are {MOST_DIGITS}")
    return int(written)


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise _RefusedNumber(written, "is larger than every floating-point number")
    return value


def _duplicates(value: Any, at: tuple[str | int, ...]) -> Iterable[tuple[str | int, ...]]:
    if isinstance(value, _Object):
        yield from ((*at, key) for key in value.duplicates)
        for key, inner in value.items():
            yield from _duplicates(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _duplicates(inner, (*at, index))


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        return {key: _plain(inner, depth + 1) for key, inner in value.items()}
    return [_plain(inner, depth + 1) for inner in value] if isinstance(value, list) else value
