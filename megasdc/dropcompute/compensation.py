"""Compensation for dropped micro-batches (Giladi et al., arXiv 2306.10598, section 4)."""

from __future__ import annotations

from megasdc.dropcompute.formulas import extra_steps_share


def extra_steps(dropped: int, per_step: int) -> int:
    """Additional steps after which as many micro-batches are completed as were planned, rounded up.

    Args:
        dropped: micro-batches dropped so far, over all replicas.
        per_step: planned in one step, over all replicas.
    """
    return -(-dropped // per_step)


def expected_steps(steps: int, drop_rate: float) -> int:
    """Length of a run with this constant drop rate: I_base (1 + R), R = rate / (1 - rate), rounded up.

    Args:
        drop_rate: share of micro-batches dropped, below 1.
    """
    return -(-round(steps * (1 + extra_steps_share(drop_rate)) * 1_000_000) // 1_000_000)


def larger_batch(micro_batches: int, drop_rate: float) -> int:
    """Micro-batches to plan so that about the wanted number is completed: M (1 + R), rounded up.

    Args:
        drop_rate: share dropped, below 1.
    """
    return expected_steps(micro_batches, drop_rate)
