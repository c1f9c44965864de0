"""Exact checks of the optimizer: a slice of each shard is kept from step to step, and updated again elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.optim.zero1 import master_partitions
from megasdc.sdc.fp64.adam import AdamSlice, adam_bounds, adam_step
from megasdc.sdc.fp64.rounding_bounds import Exact
from megasdc.tensors.bits import as_bits
from megasdc.tensors.permuted import roll
from megasdc.train.detection.settings import UsedSettings
from megasdc.train.detection.slices.exchange import Exchange
from megasdc.train.detection.slices.layout import Part, Slice, Slices
from megasdc.train.detection.update_check import settings_of

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What an update changes, in the order of the rows below; slots are the parameter's name, a dot and these."""


LANES = 64
"""A multiple of the elements of a vector, or of a cache line, on all processors."""


@dataclass(frozen=True)
class PartUpdate:
    """The update of the part of a slice that is in one group.

    Args:
        before: [4, n], fp32: gradient after clipping, and master, first and second moment before the step.
        step: of the optimizer, the first is 1.
        start: of the part in its partition.
        whole: elements of the partition.
        settings: of the optimizer's group in this step.
        kind: class of the optimizer.
    """

    before: Tensor
    step: float
    start: int
    whole: int
    settings: dict[str, Any]
    kind: type[torch.optim.Adam]

    def again(self, *, moved: bool = False) -> Tensor:
        """Update the part again on this rank: [3, n]; ``moved``: with its elements in other places.

        Kernels treat the last elements of a tensor, where they fill no vector, in another way: the part gets so many
        neighbours that each of its elements is where it was, and those last ones are not moved.
        """
        count, ahead = self.before.shape[1], self.start % LANES
        has_last = self.start + count > self.whole // LANES * LANES
        if moved and (cut := self.whole // LANES * LANES - self.start) > 0 and has_last:
            whole = replace(self, before=self.before[:, :cut])
            rest = replace(self, before=self.before[:, cut:], start=self.start + cut)
            return torch.cat([whole.again(moved=True), rest.again()], 1)
        length = self.whole - self.start + ahead if has_last else -(-(ahead + count) // LANES) * LANES
        before = self.before[:, :1].repeat(1, length)
        before[:, ahead : ahead + count] = self.before
        moved = moved and not has_last
        before = roll(before, (1,)) if moved else before
        flat = torch.nn.Parameter(before[1].clone())
        flat.grad = before[0].clone()
        optimizer = self.kind([{**self.settings, "params": [flat]}])
        first, second = before[2].clone(), before[3].clone()
        counted = torch.tensor(self.step - 1, dtype=torch.float32)
        on_device = self.settings.get("capturable") or self.settings.get("fused")
        counted = counted.to(flat.device) if on_device else counted
        optimizer.state[flat] = {"step": counted, "exp_avg": first, "exp_avg_sq": second}
        optimizer.step()
        after = torch.stack([flat.detach(), first, second])
        after = roll(after, (1,), back=True) if moved else after
        return after[:, ahead : ahead + count]

    def exact(self, row: int, elements: Tensor) -> Exact:
        """Elements of one of ``STATES`` in fp64, with what rounding explains."""
        gradient, *state = self.before[:, elements].cpu()
        before, settings = AdamSlice(*state), settings_of(self.kind, self.settings)
        values, _ = adam_step(before, gradient, self.step, settings)
        bounds = adam_bounds(before, gradient, self.step, settings)
        return Exact(values.tensors[row], bounds.tensors[row])


@dataclass(frozen=True)
class Update:
    """The update of a slice, by the settings and counts of the rank that computes it again.

    Args:
        parts: of the slice.
        after: [3, n]: master, first and second moment after it.
        inputs: checksum of what its owner computed it from: gradient before clipping, master and moments.
        seen: the same of what this rank has of them.
    """

    parts: tuple[PartUpdate, ...]
    after: Tensor
    inputs: int
    seen: int

    def again(self, *, moved: bool = False) -> Tensor:
        """Update the slice again on this rank: [3, n]; ``moved``: with its elements in other places."""
        return torch.cat([part.again(moved=moved) for part in self.parts], 1)

    def exact(self, row: int, elements: Tensor) -> Exact:
        """Elements of one of ``STATES`` in fp64, with what rounding explains; ``elements``: ascending, on the host."""
        found, first = [], 0
        for part in self.parts:
            count = part.before.shape[1]
            found.append(part.exact(row, elements[(elements >= first) & (elements < first + count)] - first))
            first += count
        return Exact(torch.cat([one.values for one in found]), torch.cat([one.bounds for one in found]))


@dataclass(frozen=True)
class SliceSnapshot:
    """A slice of the state as the last step left it.

    Args:
        state: [3, n], a copy.
        checksum: of the copy, since that may be what changes.
    """

    due: Slice
    state: Tensor
    checksum: int


@dataclass(frozen=True)
class ChangedState:
    """A slice that is not as the last step left it.

    Args:
        row: of ``STATES``, the first that differs.
        element: of the slice, the first in it.
        elements: that differ, over all rows.
        restored: whether the copy was intact, and the state is that of the copy again.
    """

    due: Slice
    row: int
    element: int
    elements: int
    restored: bool


@dataclass(frozen=True)
class CheckedUpdates:
    """Updates of a step that this rank has to do with; None where a shard has no slice that is due.

    Args:
        due: of this rank's shard.
        own: its update.
        other: that of the replica before, or of this one where there is no other.
        again: this rank's computation of ``other``, [3, n].
    """

    due: Slice | None = None
    own: Update | None = None
    other: Update | None = None
    again: Tensor | None = None


class UpdateSlices:
    """Keeps slices of this rank's optimizer, and exchanges them with the next replica; ``close`` removes its hook.

    Args:
        used: settings and counts of each step.
        clips: whether nothing changes gradients after they are clipped, so that clipping is checked too.
    """

    def __init__(self, engine: TrainingEngine, slices: Slices, used: UsedSettings, *, clips: bool) -> None:
        self._engine, self._slices, self._used, self._clips = engine, slices, used, clips
        self._group = engine.mpu.get_data_parallel_group() if engine.dims.data > 1 else None
        self._inner = engine.optimizer.optimizer
        self._flats = master_partitions(engine.optimizer)
        self._kept: SliceSnapshot | None = None
        self._turn: int | None = None
        self._before: dict[int, Tensor] = {}
        self._unclipped: Tensor | None = None
        self.changed: ChangedState | None = None
        self.copy_changed = False
        self._hook = self._inner.register_step_pre_hook(lambda *_: self._take())

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _due(self, turn: int) -> Slice | None:
        """This rank's slice of a turn."""
        return self._slices.at(turn)[self._engine.dims.dp_rank]

    def _views(self, part: Part) -> tuple[Tensor, ...]:
        """Master, first and second moment of a part of a slice; moments are zeros before the first step."""
        flat = self._flats[part.group]
        known = self._inner.state.get(flat) or dict.fromkeys(STATES, torch.zeros_like(flat))
        return tuple((flat if name == "master" else known[name]).detach()[part.place] for name in STATES)

    def _state_of(self, due: Slice) -> Tensor:
        """The same of a slice: [3, n], a copy."""
        return torch.cat([torch.stack(self._views(part)) for part in due.parts], 1)

    def _set(self, due: Slice, state: Tensor) -> bool:
        """Write a slice's state; whether it holds afterwards."""
        first = 0
        for part in due.parts:
            for now, right in zip(self._views(part), state[:, first : first + part.numel], strict=True):
                now.copy_(right)
            first += part.numel
        return torch.equal(as_bits(self._state_of(due)), as_bits(state))

    def compare_state(self, turn: int) -> bool:
        """Compare the slice with the copy of it that the last step left, and put that back where they differ.

        The step's update is checked from now on.

        Returns:
            Whether it could be compared: there is a right copy, unless this rank has no such slice.

        Sync: waits for the device.
        """
        kept, self._turn, self.changed = self._kept, turn, None
        self._before, self._unclipped, self.copy_changed = {}, None, False
        if kept is None:
            return self._due(turn) is None
        now = self._state_of(kept.due)
        different = (as_bits(now) != as_bits(kept.state)).nonzero()
        if len(different):
            intact, self.copy_changed = (checksum(one) == kept.checksum for one in (kept.state, now))
            if self.copy_changed:
                return False
            row, element = different[0].tolist()
            restored = intact and self._set(kept.due, kept.state)
            self.changed = ChangedState(kept.due, row, element, len(different), restored)
        return True

    def take_unclipped(self) -> None:
        """Copy the slice of the reduced gradient, which no hook changes any more before it is clipped."""
        due = None if self._turn is None else self._due(self._turn)
        if due is not None and self._clips:
            self._unclipped = self._slices.reduced(due).float()

    def _take(self) -> None:
        """Take what the step is about to read: hooks may have changed gradient and state until now.

        DeepSpeed's optimizer for fp32 steps one group after the other.
        """
        due = None if self._turn is None else self._due(self._turn)
        if due is None:
            return
        stepped = {id(flat) for group in self._inner.param_groups for flat in group["params"]}
        for part in due.parts:
            flat = self._flats[part.group]
            if id(flat) in stepped and flat.grad is not None:
                self._before[part.group] = torch.stack([flat.grad[part.place].float(), *self._views(part)])

    def finish(self) -> CheckedUpdates:
        """Exchange updates, and compute the one that this rank checks, by its own settings and counts.

        The norm is its owner's: whether all ranks have the same is no matter of a slice.

        Collective: the data group.
        """
        assert self._turn is not None, "the step looks at a slice"
        dims, due = self._engine.dims, self._slices.at(self._turn)
        mine, own = due[dims.dp_rank], None
        message = empty = torch.empty(0, dtype=torch.int32, device=self._engine.device)
        if mine is not None and all(part.group in self._before for part in mine.parts):
            inputs, after = self._inputs(mine), self._state_of(mine)
            norm = self._engine.step_control.used_norm
            norm = torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float32, device=empty.device)
            own = self._update(mine, inputs, after, norm, taken := checksum(inputs))
            words = [torch.tensor([taken - (1 << 63)]).view(torch.int32).to(empty.device), norm.view(torch.int32)[None]]
            message = torch.cat([torch.cat([inputs, after]).flatten().view(torch.int32), *words])
        elif mine is not None:  # this rank alone has not stepped, which its settings say
            message = empty.new_zeros(7 * mine.numel + 3)
        before_me, after_me = (dims.dp_rank - 1) % dims.data, (dims.dp_rank + 1) % dims.data
        theirs = due[before_me]
        sizes = [0] * dims.data
        sizes[before_me] = 0 if theirs is None else 7 * theirs.numel + 3
        sent = [message if place == after_me else empty for place in range(dims.data)]
        received = Exchange(sent, sizes, self._group).finish()[before_me]
        if theirs is None or not self._used.is_known:
            return CheckedUpdates(mine, own)
        rows = received[:-3].view(torch.float32).view(7, theirs.numel)
        taken = int(received[-3:-1].cpu().clone().view(torch.int64)) + (1 << 63)
        other = self._update(theirs, rows[:4], rows[4:], received[-1:].clone().view(torch.float32)[0], taken)
        return CheckedUpdates(mine, own, other, other.again(moved=dims.data == 1))

    def _inputs(self, mine: Slice) -> Tensor:
        """Gradient before clipping, master and moments before the step, as this rank read them: [4, n]."""
        inputs = torch.cat([self._before[part.group] for part in mine.parts], 1)
        if self._clips:
            assert self._unclipped is not None, "the hook that reads gradients before they are clipped has run"
            inputs[0] = self._unclipped
        return inputs

    def _update(self, due: Slice, inputs: Tensor, after: Tensor, norm: Tensor, taken: int) -> Update:
        parts, first = [], 0
        for part in due.parts:
            before = inputs[:, first : first + part.numel].clone()
            if self._clips:
                before[0] = self._engine.step_control.clip_again(before[0], norm)
            settings, count = self._used.of_group(part.group)
            whole = self._flats[part.group].numel()
            parts.append(PartUpdate(before, count, part.start, whole, settings, type(self._inner)))
            first += part.numel
        return Update(tuple(parts), after, taken, checksum(inputs))

    def keep(self, turn: int | None) -> None:
        """Copy the slice that is due at the next step; None: none is. Before the first update moments are zeros."""
        self._turn = self._kept = None
        due = None if turn is None else self._due(turn)
        if due is not None:
            state = self._state_of(due)
            self._kept = SliceSnapshot(due, state, checksum(state))

    def put(self, checked: CheckedUpdates) -> bool:
        """Compute this rank's slice again, and use that; whether it holds afterwards."""
        return checked.due is not None and checked.own is not None and self._set(checked.due, checked.own.again())


def checksum(state: Tensor) -> int:
    """XXH3-64 of a tensor's bytes; waits for the device."""
    return xxhash.xxh3_64_intdigest(state.detach().cpu().contiguous().view(torch.uint8).numpy().data)
