"""Figures in pages: generated from the results of benchmarks, so that page and measurement cannot differ.

``docs/results/data/NAME.json`` holds what a benchmark wrote with ``--out``, less its single trials. A page has its
tables between the lines ``<!-- figures NAME:begin -->`` and ``<!-- figures NAME:end -->``, and figures within sentences
between ``<!--=NAME:PATH-->`` and ``<!--=-->``, with PATH into that file. Between ``<!-- figures conditions:begin -->``
and its end stand conditions of sweeps, from their files. What is measured by hand, or was before these files existed,
is in ``transcribed.json``, paragraph by paragraph; a number anywhere else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megasdc.common.errors import DataError
from megasdc.config.table import with_tables
from tools.bench import conditions
from tools.bench.machine import ROOT

DATA = ROOT / "docs" / "results" / "data"
TRANSCRIBED, CONDITIONS = "transcribed", "conditions"
PAGES = ("README.md", *(str(page.relative_to(ROOT)) for page in sorted(DATA.parent.glob("*.md"))))
LONGEST = 60
"""Longest list of a result that is kept in a data file; longer ones are single trials."""
_TABLE = re.compile(r"<!-- figures ([\w/.-]+):begin -->")
_INLINE = re.compile(r"(<!--=([\w-]+):([^>]+?)-->)(.*?)(<!--=-->)", re.DOTALL)
_BLOCK = re.compile(r"<!-- ([\w/. -]+):begin -->.*?<!-- \1:end -->", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)|<!--.*?-->")
_FIGURE = re.compile(
    r"\d (?:of \d|%|(?:ms|us|s|times|seconds|minutes|hours|[KMGT]i?B|alarms)\b"
    r"|(?:clean |healthy )?(?:steps|trials|samples|drills|faults|runs|cases)\b)|\d\.\d|\| *\d"
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def fresh(page: Path) -> tuple[str, str]:
    """Text of a page, and the same with its generated figures as data has them now.

    Raises:
        DataError: it names data that are not there.
    """
    text = page.read_text(encoding="utf-8")
    names = dict.fromkeys(_TABLE.findall(text))
    renewed = with_tables(page, {f"figures {name}": partial(_render, name) for name in names})[1] if names else text
    return text, _INLINE.sub(lambda one: f"{one[1]}{_look_up(one[2], one[3])}{one[5]}", renewed)


def unsourced(page: Path, name: str) -> list[str]:
    """Paragraphs and rows of a page whose figures are neither generated nor transcribed.

    Args:
        name: the page's, in the transcribed data.
    """
    known = set(_load(TRANSCRIBED)["pages"].get(name, {}).values())
    return [one for one in paragraphs(page) if numbers(one) not in known]


def paragraphs(page: Path) -> Iterator[str]:
    """Paragraphs, rows of tables and points of lists that have figures, without code, and without what is generated."""
    text = _INLINE.sub("", _BLOCK.sub("", _FENCE.sub("", page.read_text(encoding="utf-8"))))
    for one in re.split(r"\n\s*\n|\n(?=\||- )", text):
        if not one.startswith("#") and _FIGURE.search(_CODE.sub("", one)):
            yield one.strip()


def numbers(paragraph: str) -> str:
    """All numbers of a paragraph, without those in code and links."""
    return " ".join(_NUMBER.findall(_CODE.sub("", paragraph)))


def condensed(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its single trials: longer lists than ``LONGEST`` are left out, and named in ``left_out``."""
    left: list[str] = []

    def without_long_lists(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            kept = {key: without_long_lists(one, f"{path}.{key}") for key, one in value.items()}
            return {key: one for key, one in kept.items() if one is not left}
        if isinstance(value, list) and len(value) > LONGEST and not path.endswith(".report"):
            left.append(path[1:])
            return left
        return [without_long_lists(one, path) for one in value] if isinstance(value, list) else value

    found: dict[str, Any] = without_long_lists(result, "")
    return found | {"left_out": left}


def _load(name: str) -> dict[str, Any]:
    path = DATA / f"{name}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = f"make it with `python -m tools.bench figures --take RESULT.json --name {name}`"
        raise DataError(f"{path}: {error}; {remedy}") from error
    return found


def _look_up(name: str, path: str) -> str:
    value: Any = _load(name)
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise DataError(f"{DATA / name}.json: holds no {path}; it is missing at {part!r}") from None
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _render(name: str) -> str:
    """A result's tables and lines as markdown, and where they are from; of NAME/NUMBER one table alone."""
    if name == CONDITIONS:
        return conditions.render()
    name, _, only = name.partition("/")
    found = _load(name)
    parts = found["report"] if not only else [_table_of(found["report"], name, int(only))]
    return "\n" + "\n\n".join(map(_markdown, [*parts, _source(found)])) + "\n\n"


def _table_of(report: list[Any], name: str, number: int) -> Any:
    tables = [one for one in report if not isinstance(one, str)]
    if not 1 <= number <= len(tables):
        raise DataError(f"{DATA / name}.json: has {len(tables)} tables, no {number}")
    return tables[number - 1]


def _markdown(part: Any) -> str:
    if isinstance(part, str):
        return part
    lines = [part["columns"], ["---"] * len(part["columns"]), *part["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _source(found: dict[str, Any]) -> str:
    machine, verdict = found["machine"], "" if found.get("passed", True) else ", a bar missed"
    return (
        f"`{machine['command']}`: exit code {found['exit_code']}{verdict}; {machine['date'][:10]}, commit "
        f"{machine['commit']}, {machine['cpu']}, {machine['cores']} cores."
    )
