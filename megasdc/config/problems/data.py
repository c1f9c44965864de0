"""Contradictions in the settings of the data."""

from __future__ import annotations

import math
import os.path
from collections.abc import Iterator

from megasdc.config.problems.problem import Problem
from megasdc.config.sections.data import DataSection

_PATHS = {
    "files": "a file, folder or glob",
    "hub": "the name of a hub dataset",
    "megatron": "the prefix of a .bin and .idx, one of them, or a folder of them",
}
"""What `path` is of each kind that needs one."""


def data_problems(data: DataSection) -> Iterator[Problem]:
    """Yield every contradiction between the section's fields."""
    yield from _own_problems(data)
    yield from _blend_problems(data)


def _own_problems(data: DataSection) -> Iterator[Problem]:
    if not data.path.strip():
        yield Problem(("megasdc.data.path",), 'got ""; needed: the folder of prepared data.')
    if data.split[0] == 0:
        yield Problem(("megasdc.data.split",), f"got {data.split}; the share of training must be above 0.")
    ends = [0, *(end for _, end in data.skip)]
    if any(not before <= first < end for before, (first, end) in zip(ends, data.skip, strict=False)):
        needed = "ranges [first, end) that hold a sample each, do not overlap, and ascend"
        yield Problem(("megasdc.data.skip",), f"got {data.skip}; needed: {needed}.")
    for index, source in enumerate(data.sources):
        path = f"megasdc.data.sources.{index}"
        if source.kind == "stdlib" and source.path is not None:
            yield Problem((f"{path}.path",), 'kind "stdlib" takes no path; set kind "files", "hub" or "megatron".')
        if source.kind != "stdlib" and not source.path:
            yield Problem((f"{path}.path",), f'missing; kind "{source.kind}" needs {_PATHS[source.kind]}.')
        if source.pattern is not None and source.kind != "stdlib":
            yield Problem((f"{path}.pattern",), f'is for kind "stdlib", not "{source.kind}".')
        elif source.pattern is not None and not _inside(source.pattern):
            yield Problem(
                (f"{path}.pattern",),
                f'got "{source.pattern}"; needed: a glob of files inside the library, such as "*.py", where ".." is '
                'not used and "**" stands for whole folders.',
            )
        for name in ("name", "streaming"):
            if source.kind != "hub" and getattr(source, name):
                yield Problem((f"{path}.{name}",), f'is for kind "hub", not "{source.kind}".')
    yield from _id_problems(data)
    if data.tokenizer.kind == "huggingface" and not data.tokenizer.path:
        path = "megasdc.data.tokenizer.path"
        yield Problem((path,), 'missing; kind "huggingface" needs a folder or the name of a hub tokenizer.')


def _id_problems(data: DataSection) -> Iterator[Problem]:
    """Settings of text, and a tokenizer that is not given, where sources hold token ids."""
    of_ids = [index for index, source in enumerate(data.sources) if source.kind == "megatron"]
    for index in of_ids:
        source = data.sources[index]
        for name in ("split", "revision", "text_field", "text_unit"):
            if (value := getattr(source, name)) != type(source).model_fields[name].default:
                path = f"megasdc.data.sources.{index}.{name}"
                yield Problem((path,), f'got "{value}"; kind "megatron" has token ids, no text: leave it out.')
    if of_ids and data.tokenizer.path is None and data.tokenizer.kind == "sentencepiece":
        needed = f'the tokenizer that made the ids of megasdc.data.sources.{of_ids[0]}, of kind "megatron"'
        yield Problem(("megasdc.data.tokenizer.path",), f"missing; needed: {needed}.")
    if len(of_ids) == len(data.sources):
        for name, value in (
            ("max_unreadable", data.max_unreadable),
            ("tokenizer.accept_unknown", data.tokenizer.accept_unknown),
        ):
            if value:
                why = 'has no effect: it is about text, and all sources are of kind "megatron"; leave it out.'
                yield Problem((f"megasdc.data.{name}",), why)


def _inside(pattern: str) -> bool:
    """Whether a glob can match only below the folder in which it is used."""
    parts = pattern.split("/")
    odd = any(part == ".." or ("**" in part and part != "**") for part in parts)
    return bool(pattern.strip()) and not os.path.isabs(pattern) and not odd


def _blend_problems(data: DataSection) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, part in enumerate(data.blend):
        path = f"megasdc.data.blend.{index}.path"
        if not part.path.strip():
            yield Problem((path,), 'got ""; needed: a folder of prepared data.')
            continue
        before = first.setdefault(os.path.normpath(part.path), index)
        if before != index:
            yield Problem(
                (path, f"megasdc.data.blend.{before}.path"),
                f'got "{part.path}", which megasdc.data.blend.{before}.path names already; give each folder once, '
                "with the sum of the weights.",
            )
    if data.blend and data.path.strip() and os.path.normpath(data.path) not in first:
        yield Problem(
            ("megasdc.data.path", "megasdc.data.blend"),
            f'got "{data.path}", which is not in megasdc.data.blend '
            f"({', '.join(part.path for part in data.blend)}); name one of its folders or add it to the blend.",
        )
    if not math.isfinite(sum(part.weight for part in data.blend)):
        yield Problem(("megasdc.data.blend",), "the sum of the weights is infinite; scale them.")
