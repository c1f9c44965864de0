"""Tensors in what submodules are given and return: tuples, lists, mappings and dataclasses inside one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of tuples, lists, mappings and dataclasses inside one another, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)
    elif is_dataclass(value):
        yield from tensors_in(vars(value))


def map_in(kind: type[T], value: Any, change: Callable[[T], Any]) -> Any:
    """Copy of nested tuples, lists and dicts, with each object of a kind changed; other objects stay."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: map_in(kind, inner, change) for key, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_in(kind, inner, change) for inner in value)
    return value
