"""Exact checks of the optimizer: a slice of each shard is kept from step to step, and updated again elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.optim.zero1 import master_partitions
from megasdc.sdc.fp64.adam import AdamSlice, adam_bounds, adam_step
from megasdc.sdc.fp64.bounds import Exact
from megasdc.tensors.bits import as_bits
from megasdc.tensors.permuted import roll
from megasdc.train.detection.slices.exchange import Exchange
from megasdc.train.detection.slices.layout import Slice, Slices
from megasdc.train.detection.update_check import settings_of

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What an update changes, in the order of the rows below; slots are the parameter's name, a dot and these."""


LANES = 64
"""A multiple of the elements of a vector, or of a cache line, on all processors."""


@dataclass(frozen=True)
class Update:
    """The update of a slice.

    Args:
        before: [4, n], fp32: gradient after clipping, and master, first and second moment before the step.
        after: [3, n]: the last three after it.
        step: of the optimizer, the first is 1.
        start: of the slice in its partition.
        whole: elements of the partition.
        settings: of the optimizer's group in this step.
        kind: class of the optimizer.
    """

    before: Tensor
    after: Tensor
    step: float
    start: int
    whole: int
    settings: dict[str, Any]
    kind: type[torch.optim.Adam]

    def again(self, *, moved: bool = False) -> Tensor:
        """Update the slice again on this rank: [3, n]; ``moved``: with its elements in other places.

        Kernels treat the last elements of a tensor, where they fill no vector, in another way: the slice gets so many
        neighbours that each of its elements is where it was, and those last ones are not moved.
        """
        count, ahead = self.before.shape[1], self.start % LANES
        has_last = self.start + count > self.whole // LANES * LANES
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
class Kept:
    """A slice of the state as the last step left it.

    Args:
        state: [3, n], a copy.
        checksum: of the copy, since that may be what changes.
    """

    due: Slice
    state: Tensor
    checksum: int


@dataclass(frozen=True)
class Checked:
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
    """Keeps slices of this rank's optimizer, and exchanges them with the next replica; ``close`` removes its hook."""

    def __init__(self, engine: TrainingEngine, slices: Slices) -> None:
        self._engine, self._slices = engine, slices
        self._group = engine.mpu.get_data_parallel_group() if engine.dims.data > 1 else None
        self._inner = engine.optimizer.optimizer
        self._flats = master_partitions(engine.optimizer)
        self._settings: dict[int, dict[str, Any]] = {}
        self._kept: Kept | None = None
        self._turn: int | None = None
        self.changed: tuple[Slice, int, int] | None = None
        self._taken: tuple[Slice, Tensor, float] | None = None
        self._hook = self._inner.register_step_pre_hook(lambda *_: self._take())

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _due(self, turn: int) -> Slice | None:
        """This rank's slice of a turn."""
        return self._slices.at(turn)[self._engine.dims.dp_rank]

    def _state_of(self, due: Slice) -> tuple[Tensor, ...]:
        """Master, first and second moment of a slice, views; moments are zeros before the first step."""
        flat = self._flats[due.group]
        known = self._inner.state.get(flat) or dict.fromkeys(STATES, torch.zeros_like(flat))
        return tuple((flat if name == "master" else known[name]).detach()[due.place] for name in STATES)

    def compare_state(self, turn: int) -> None:
        """Compare the slice with the copy of it that the last step left, and put that back where they differ.

        The step's update is checked from now on.

        Sync: waits for the device.
        """
        kept, self._turn, self.changed, self._taken = self._kept, turn, None, None
        if kept is None or checksum(kept.state) != kept.checksum:  # the copy itself has changed
            return
        for row, (now, before) in enumerate(zip(self._state_of(kept.due), kept.state, strict=True)):
            different = as_bits(now.contiguous()) != as_bits(before)
            if bool(different.any()):
                self.changed = self.changed or (kept.due, row, int(different.nonzero()[0]))
                now.copy_(before)

    def _take(self) -> None:
        """Take what the step is about to read: hooks may have changed gradient, state and settings until now.

        DeepSpeed's optimizer for fp32 steps one group after the other.
        """
        if self._turn is None:
            return
        due = self._due(self._turn)
        for group in self._inner.param_groups:
            for flat in group["params"]:
                number = next(place for place, one in enumerate(self._flats) if one is flat)
                self._settings[number] = {name: one for name, one in group.items() if name != "params"}
                if due is not None and due.group == number and flat.grad is not None:
                    before = torch.stack([flat.grad[due.place].float(), *self._state_of(due)])
                    self._taken = due, before, float(self._inner.state.get(flat, {}).get("step", 0.0)) + 1

    def finish(self) -> Checked:
        """Exchange updates, and compute the one that this rank checks.

        Collective: the data group.
        """
        mine, own = None, None
        assert self._turn is not None, "the step looks at a slice"
        if self._taken is not None:
            mine, before, step = self._taken
            own = self._update(mine, before, torch.stack(self._state_of(mine)), step)
        dims, due = self._engine.dims, self._slices.at(self._turn)
        before_me, after_me = (dims.dp_rank - 1) % dims.data, (dims.dp_rank + 1) % dims.data
        empty = torch.empty(0, device=self._engine.device)
        message = empty
        if own is not None:
            message = torch.cat([own.before.flatten(), own.after.flatten(), empty.new_tensor([own.step])])
        theirs = due[before_me]
        sizes = [0] * dims.data
        sizes[before_me] = 0 if theirs is None else 7 * theirs.numel + 1
        sent = [message if place == after_me else empty for place in range(dims.data)]
        received = Exchange(sent, sizes, self._group).finish()[before_me]
        if theirs is None:
            return Checked(mine, own)
        rows = received[:-1].view(7, theirs.numel)
        other = self._update(theirs, rows[:4], rows[4:], received[-1].item())
        return Checked(mine, own, other, other.again(moved=dims.data == 1))

    def _update(self, due: Slice, before: Tensor, after: Tensor, step: float) -> Update:
        whole = self._flats[due.group].numel()
        return Update(before, after, step, due.start, whole, self._settings[due.group], type(self._inner))

    def keep(self, turn: int | None) -> None:
        """Copy the slice that is due at the next step; None: none is."""
        self._turn = self._kept = None
        due = None if turn is None else self._due(turn)
        if due is not None and self._inner.state.get(self._flats[due.group]):
            state = torch.stack(self._state_of(due))
            self._kept = Kept(due, state, checksum(state))

    def put(self, checked: Checked) -> None:
        """Compute this rank's slice again, and use that."""
        if checked.due is not None and checked.own is not None:
            for now, right in zip(self._state_of(checked.due), checked.own.again(), strict=True):
                now.copy_(right)


def checksum(state: Tensor) -> int:
    """XXH3-64 of a tensor's bytes; waits for the device."""
    return xxhash.xxh3_64_intdigest(state.detach().cpu().contiguous().view(torch.uint8).numpy().data)
