"""Which parameters a computation has used once: only their gradients are of one operation, and no sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

PASSING = ("ToCopyBackward0", "TBackward0")
"""Nodes between a parameter and what uses it: to another type, which automatic mixed precision keeps; transposed."""


def used_once(outputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters that one operation has used, going back from results whose graph is still there."""
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
    return frozenset(name for name, one in named.items() if _has_one_user(leaves.get(id(one)), users))


def _has_one_user(node: Any, users: Mapping[Any, Sequence[Any]]) -> bool:
    while node is not None and len(of_node := users.get(node, ())) == 1:
        node = of_node[0]
        if node.name() not in PASSING:
            return True
    return False
