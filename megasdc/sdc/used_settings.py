"""Settings that an optimizer step used, hyperparameters and step counts, which replicas must have bit by bit alike.

They are read in the step itself, when all other hooks of the optimizer have run, and compared over the replicas at each
position of the layout. No arithmetic rounds them: a rank that differs is wrong, however little it changes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.common.addresses import UPDATE, Address
from megasdc.optim.bounds import MomentumReset
from megasdc.optim.zero1 import master_partitions
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.finding import Finding
from megasdc.sdc.host import Host
from megasdc.sdc.verdict import INCONCLUSIVE, MAJORITY, RankVerdict

NONE = 0
"""Digest where there is nothing: settings of a step that the optimizer did not take, places that are not followed."""
SETTINGS = "settings"
"""Tier of findings on settings."""
HISTORY = "own settings of the step before"
"""Basis of a ruling on settings where there is no majority, besides those of ``megasdc.sdc.verdict``."""
SCHEDULED = "schedule.step"
"""Name of the setting that is the position in the schedule of learning rates."""


class UsedSettings:
    """Reads the settings that each step of this rank's optimizer uses, from ``start`` on; ``close`` removes its hook.

    Attributes:
        reset: schedule of resets of moments, which change learning rates and may restart counts; None: no resets.
    """

    def __init__(self, host: Host) -> None:
        self.reset: MomentumReset | None = None
        self._engine, self._group, self._events = host.engine, host.host_group, host.events
        self._numbers: Mapping[int, int] = {}
        self._used: dict[int, tuple[dict[str, Any], float]] = {}
        self._of_clipping: dict[str, Any] = {}
        self._before: Mapping[str, Any] = {}
        self._scheduled: int | None = None
        """Position in the schedule of learning rates; None: there is no such schedule."""
        self._step = self._step_before = 0
        """The last step that the optimizer took, and the one before."""
        self._compared = True
        self._hook: Any = None

    def start(self) -> None:
        """Add the hook to the optimizer, if it is not there yet; call it when the optimizer's other hooks are there."""
        if self._hook is None:
            optimizer = self._engine.optimizer
            self._numbers = {id(flat): number for number, flat in enumerate(master_partitions(optimizer))}
            self._hook = optimizer.optimizer.register_step_pre_hook(lambda inner, *_: self._read(inner))

    def close(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _read(self, inner: Any) -> None:
        """DeepSpeed's optimizer for fp32 steps one group after the other."""
        if self._step != self._engine.step_number:
            self._before = self._named() if self._used else {}
            self._step_before = self._step
            self._used, self._step, self._compared = {}, self._engine.step_number, False
            self._of_clipping = {"clip_grad": self._engine.optimizer.clip_grad}
            self._scheduled = _position_of(self._engine.lr_scheduler)
            if self._scheduled is not None:
                self._of_clipping[SCHEDULED] = self._scheduled
            if self._engine.fp16_enabled():
                self._of_clipping["loss_scale"] = self._engine.optimizer.loss_scale
        for group in inner.param_groups:
            kept = {name: one for name, one in group.items() if name != "params"}
            settings = {name: one.clone() if isinstance(one, Tensor) else one for name, one in kept.items()}
            for flat in group["params"]:
                count = inner.state.get(flat, {}).get("step", group.get("step", 0.0))
                self._used[self._numbers[id(flat)]] = settings, float(count) + 1

    @property
    def is_recorded(self) -> bool:
        """Whether the optimizer has taken the running step."""
        return self._step == self._engine.step_number

    def of_group(self, number: int) -> tuple[dict[str, Any], float]:
        """Hyperparameters of a group in the running step, and the step's number by the optimizer's count, from 1."""
        return self._used[number]

    def pop_digest(self) -> int:
        """Digest of the settings of the last step, unsigned, 64 bits; ``NONE`` where it was taken before.

        Sync: waits for the device.
        """
        taken, self._compared = self._compared, True
        if taken:
            return NONE
        return xxhash.xxh3_64_intdigest(
            b"".join(_bits_of_settings(name) + _bits_of_settings(one) for name, one in self._named().items())
        )

    def _named(self) -> dict[str, Any]:
        """All settings by name, each with its group."""
        found: dict[str, Any] = dict(self._of_clipping)
        for number, (settings, count) in sorted(self._used.items()):
            label = self._label(number)
            found |= {f"{label}.{name}": settings[name] for name in sorted(settings)} | {f"{label}.step": count}
        return found

    def rule(self, step: int) -> Finding:
        """Rule on ranks whose settings in a step differ from those of other replicas, see ``judge_settings``.

        Collective: all ranks of the world.
        Sync: waits for the device.
        """
        own, dims = self.settings_of(step), self._engine.dims
        sent = gather_objects(own, self._group)
        rulings: list[RankVerdict] = []
        for ranks in dims.positions:
            by_rank = {rank: sent[rank] for rank in ranks}
            found = judge_settings(step, by_rank)
            rulings += found
            if found and dims.rank == 0:
                name = found[0].address.slot if found[0].address is not None else ""
                self._events.emit(
                    *("sdc", "finding"),
                    step=step,
                    tier=SETTINGS,
                    ranks=[rank for one in found for rank in (one.suspects if one.rank is None else (one.rank,))],
                    address=str(found[0].address),
                    values={rank: one.values.get(name, "not used") for rank, one in by_rank.items()},
                )
        return Finding(SETTINGS, None, tuple(rulings), dims.world_size * len(own.bits))

    def settings_of(self, step: int) -> Own:
        """Settings that this rank used in a step; empty where that is not the last step that the optimizer took.

        Sync: waits for the device.
        """
        named = self._named() if self._step == step else {}
        return Own(
            {name: _bits_of_settings(one).hex() for name, one in named.items()},
            {name: _shown(one) for name, one in named.items()},
            frozenset(name for name, one in named.items() if self._turned(name, one)),
        )

    def _turned(self, name: str, now: Any) -> bool:
        """Whether a setting differs from the step before, plus one for a count, or from its schedule."""
        if name in (rates := self._rates()):
            return _bits_of_settings(float(now)) != _bits_of_settings(float(rates[name]))
        if name not in self._before:
            return False
        expected = self._before[name]
        if name.endswith(".step"):
            reset = None if name == SCHEDULED else self.reset
            restarted = reset is not None and reset.restarts_count(self._step_before, self._step)
            expected = 1.0 if restarted else expected + 1
        return _bits_of_settings(now) != _bits_of_settings(expected)

    def _rates(self) -> dict[str, float]:
        """Learning rates of the schedule at the step's position, with the warm-up after a reset, by name."""
        if self._scheduled is None or self._scheduled < 0:
            return {}
        schedule = copy(self._engine.lr_scheduler)  # the one of the run may be a step further
        schedule.last_batch_iteration = self._scheduled
        factor = 1.0 if self.reset is None else self.reset.rate_factor(self._step)
        rates = zip(sorted(self._used), schedule.get_lr(), strict=True)
        return {f"{self._label(number)}.lr": rate if factor == 1.0 else rate * factor for number, rate in rates}

    def _label(self, number: int) -> str:
        return self._used[number][0].get("name") or f"group {number}"


def _position_of(schedule: Any) -> int | None:
    """Position of one of DeepSpeed's schedules, -1 before its first step; None: a schedule of another kind."""
    return getattr(schedule, "last_batch_iteration", None)


@dataclass(frozen=True)
class Own:
    """Settings of one rank by name.

    Args:
        bits: exact bits of each setting.
        values: each setting as people read it.
        turned: names of the settings that differ from the step before, or from their schedule.
    """

    bits: Mapping[str, str]
    values: Mapping[str, str]
    turned: Collection[str] = ()

    @property
    def digest(self) -> int:
        """Digest of all settings, equal where all of them are."""
        return xxhash.xxh3_64_intdigest(repr(sorted(self.bits.items())).encode())


def judge_settings(step: int, by_rank: Mapping[int, Own]) -> list[RankVerdict]:
    """Rulings on replicas at a position that used wrong settings; without repeats, since settings are not computed.

    Args:
        step: step that used the settings.
        by_rank: settings of each replica, by global rank.

    Returns:
        A ruling on each rank that differs from a strict majority; without one on each whose differing settings changed
        since the step before while another's did not; else one that names no rank. Empty where all are equal.
    """
    digests = {rank: own.digest for rank, own in by_rank.items()}
    usual, most = Counter(digests.values()).most_common(1)[0]
    if most == len(digests):
        return []
    names = sorted({name for own in by_rank.values() for name in own.bits})
    names = [name for name in names if len({own.bits.get(name) for own in by_rank.values()}) > 1]
    address = Address(step, None, UPDATE, "optimizer", names[0])
    basis, wrong = MAJORITY, [rank for rank, one in digests.items() if one != usual]
    if 2 * most <= len(digests):
        basis, wrong = HISTORY, [rank for rank, own in by_rank.items() if not set(names).isdisjoint(own.turned)]
    rest = {digests[rank] for rank in by_rank if rank not in wrong}
    if len(rest) != 1:
        return [RankVerdict(None, INCONCLUSIVE, MAJORITY, address, suspects=tuple(digests), got=digests)]
    (right,) = rest
    return [
        RankVerdict(rank, INCONCLUSIVE, basis, address, expected=right, got={rank: digests[rank]}) for rank in wrong
    ]


def _bits_of_settings(value: Any) -> bytes:
    """A value's type and bits, so that no two different values have the same."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous().reshape(-1)
        return f"{tensor.dtype}{tuple(value.shape)}".encode() + tensor.view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return b"(" + b",".join(map(_bits_of_settings, value)) + b")"
    return repr(value).encode() + b";"


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
