"""Consistent patterns for findings of a comparison that have one cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from megasdc.checkpoint.compare.damage import Pattern
from megasdc.checkpoint.compare.report import Finding
from megasdc.checkpoint.views.view import Slot

_OF_ELEMENTS: tuple[Pattern, ...] = ("bit", "element", "run", "period", "scattered", "tail")


def settle(findings: list[Finding], num_tensors: Mapping[Slot, int]) -> list[Finding]:
    """Give findings with one cause the same pattern.

    In a file of which most tensors hold another state, few differing elements are not damage: one step changes few bf16
    weights. If most tensors of a slot hold another state, the pattern is drift, not a shard's.

    Args:
        findings: of all tensors and values.
        num_tensors: number of tensors compared in each slot.

    Returns:
        The findings in the same order, some with another pattern.
    """
    shards = Counter(file for one in findings if one.pattern == "shard" for file in one.files)
    all_of = Counter(file for one in findings if one.slot != "scalar" for file in one.files)
    other_state = {file for file, count in shards.items() if 2 * count > all_of[file] > 1}
    findings = [
        replace(one, pattern="shard") if one.pattern in _OF_ELEMENTS and one.files <= other_state else one
        for one in findings
    ]
    drifted: dict[tuple[str, Slot], set[str]] = {}
    for one in findings:
        if one.covers_all and one.pattern == "shard":
            drifted.setdefault((one.checkpoint, one.slot), set()).add(one.fqn)
    return [
        replace(one, pattern="drift")
        if one.pattern == "shard"
        and 2 * len(drifted.get((one.checkpoint, one.slot), ())) > num_tensors.get(one.slot, 0)
        else one
        for one in findings
    ]
