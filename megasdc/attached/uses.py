"""How many operations of a computation have used a parameter: gradients of those with several are sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

PASSING = ("ToCopyBackward0", "TBackward0")
"""Nodes between a parameter and what uses it: to another type, which automatic mixed precision keeps; transposed."""


def count_uses(outputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, int]:
    """Operations by name of the parameter that they use, going back from results whose graph is still there."""
    users: defaultdict[Any, list[Any]] = defaultdict(list)
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            users[before].append(node)
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    leaves = {id(node.variable): node for node in seen if hasattr(node, "variable")}
    return {name: _count_users(leaves.get(id(one)), users) for name, one in named.items()}


def _count_users(node: Any, users: Mapping[Any, Sequence[Any]]) -> int:
    of_node = users.get(node, ())
    return sum(_count_users(one, users) if one.name() in PASSING else 1 for one in of_node)
