"""Exact checks of slices of the optimizer's step, and the rulings on what they find; the same on every rank.

Reduction: a slice of each shard's gradient is summed again from the replicas' own gradients. Optimizer: a slice of each
shard is kept from step to step, and updated again elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.common.addresses import REDUCED_GRAD, UPDATE, Address
from megasdc.engine.hooks import Hook
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import clip_again, is_bf16_optimizer, master_partitions
from megasdc.parallel.collectives import ANY, Compared, TensorExchange, compare_replicas, gather_objects
from megasdc.sdc.budget import CheckBudget
from megasdc.sdc.finding import Finding
from megasdc.sdc.host import Host, StepEngine
from megasdc.sdc.incident import Opinion, Outside
from megasdc.sdc.referee.adam import AdamSettings, AdamSlice, adam_bounds, adam_step
from megasdc.sdc.referee.referee import agreed, is_within, judge_rounding
from megasdc.sdc.referee.rounding import Exact, mean_of
from megasdc.sdc.slices import MISSES, GroupShard, ParameterPiece, Slice, Slices, Turn
from megasdc.sdc.used_settings import SETTINGS, UsedSettings
from megasdc.sdc.verdict import (
    ELSEWHERE,
    INCONCLUSIVE,
    INTERMITTENT,
    NOT_REPRODUCED,
    REFEREE,
    RankVerdict,
    Unrepeated,
    judge_recomputed,
    settle,
)
from megasdc.sdc.vote import Ballot, Dispute
from megasdc.tensors.bits import as_bits
from megasdc.tensors.permuted import roll

STATES = ("master", "exp_avg", "exp_avg_sq")
"""States that an update changes, in the order of rows below; slots are the parameter's name, a dot and a state."""


LANES = 64
"""Multiple of the number of elements of a vector, or of a cache line, on all processors."""


@dataclass(frozen=True)
class PartUpdate:
    """The update of the part of a slice that is in one group.

    Args:
        before: [4, n], fp32: gradient after clipping, and master, first and second moment before the step.
        step: step by the optimizer's count, the first is 1.
        start: first element of the part in its partition.
        whole: number of elements of the partition.
        settings: settings of the optimizer's group in this step.
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
        parts: parts of the slice, one for each group.
        after: master, first and second moment after the update, [3, n].
        inputs: checksum of the owner's inputs: gradient before clipping, master and moments.
        seen: checksum of these inputs as this rank has them.
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
        state: copy of the state, [3, n].
        checksum: checksum of the copy, since an error may change the copy itself.
    """

    due: Slice
    state: Tensor
    checksum: int


@dataclass(frozen=True)
class ChangedState:
    """A slice that is not as the last step left it.

    Args:
        row: number in ``STATES`` of the first row that differs.
        element: place in the slice of the first element that differs in that row.
        elements: number of elements that differ, over all rows.
        restored: whether the copy was intact and is written back into the state.
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
        due: due slice of this rank's shard.
        own: update of that slice.
        other: update of the replica before, or of this one where there is no other.
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

    def __init__(self, engine: StepEngine, slices: Slices, used: UsedSettings, *, clips: bool) -> None:
        self._engine, self._slices, self._used, self._clips = engine, slices, used, clips
        self._group = engine.data_parallel_group if engine.dims.data > 1 else None
        self._inner = engine.optimizer.optimizer
        self._flats = master_partitions(engine.optimizer)
        self._kept: SliceSnapshot | None = None
        self._turn: int | None = None
        self._before: dict[int, Tensor] = {}
        self._unclipped: Tensor | None = None
        self.changed: ChangedState | None = None
        self.copy_changed = False
        self._hook = self._inner.register_step_pre_hook(lambda *_: self._copy_inputs())

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _due(self, turn: int) -> Slice | None:
        """This rank's slice of a turn."""
        return self._slices.at(turn)[self._engine.dims.dp_rank]

    def _views(self, part: GroupShard) -> tuple[Tensor, ...]:
        """Master, first and second moment of a part of a slice; moments are zeros before the first step."""
        flat = self._flats[part.group]
        known = self._inner.state.get(flat) or dict.fromkeys(STATES, torch.zeros_like(flat))
        return tuple((flat if name == "master" else known[name]).detach()[part.place] for name in STATES)

    def _state_of(self, due: Slice) -> Tensor:
        """Copy of a slice's master, first and second moment, [3, n]."""
        return torch.cat([torch.stack(self._views(part)) for part in due.parts], 1)

    def _write(self, due: Slice, state: Tensor) -> bool:
        """Write a slice's state; returns whether it reads back equal."""
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
            intact, self.copy_changed = (update_checksum(one) == kept.checksum for one in (kept.state, now))
            if self.copy_changed:
                return False
            row, element = different[0].tolist()
            restored = intact and self._write(kept.due, kept.state)
            self.changed = ChangedState(kept.due, row, element, len(different), restored)
        return True

    def copy_unclipped(self) -> None:
        """Copy the slice of the reduced gradient, which no hook changes any more before it is clipped."""
        due = None if self._turn is None else self._due(self._turn)
        if due is not None and self._clips:
            self._unclipped = self._slices.reduced(due).float()

    def _copy_inputs(self) -> None:
        """Copy the values that the step is about to read: hooks may have changed gradient and state until now.

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
            norm = self._engine.used_norm
            norm = torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float32, device=empty.device)
            own = self._update(mine, inputs, after, norm, taken := update_checksum(inputs))
            words = [torch.tensor([taken - (1 << 63)]).view(torch.int32).to(empty.device), norm.view(torch.int32)[None]]
            message = torch.cat([torch.cat([inputs, after]).flatten().view(torch.int32), *words])
        elif mine is not None:  # this rank alone has not stepped, which its settings say
            message = empty.new_zeros(7 * mine.numel + 3)
        before_me, after_me = (dims.dp_rank - 1) % dims.data, (dims.dp_rank + 1) % dims.data
        theirs = due[before_me]
        sizes = [0] * dims.data
        sizes[before_me] = 0 if theirs is None else 7 * theirs.numel + 3
        sent = [message if place == after_me else empty for place in range(dims.data)]
        received = TensorExchange(sent, sizes, self._group).finish()[before_me]
        if theirs is None or not self._used.is_recorded:
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
                before[0] = clip_again(self._engine.optimizer, before[0], norm)
            settings, count = self._used.of_group(part.group)
            whole = self._flats[part.group].numel()
            parts.append(PartUpdate(before, count, part.start, whole, settings, type(self._inner)))
            first += part.numel
        return Update(tuple(parts), after, taken, update_checksum(inputs))

    def snapshot(self, turn: int | None) -> None:
        """Copy the slice that is due at the next step; None: none is. Moments are zeros before the first update."""
        self._turn = self._kept = None
        due = None if turn is None else self._due(turn)
        if due is not None:
            state = self._state_of(due)
            self._kept = SliceSnapshot(due, state, update_checksum(state))

    def write_recomputed(self, checked: CheckedUpdates) -> bool:
        """Write this rank's slice as recomputed; returns whether it reads back equal."""
        return checked.due is not None and checked.own is not None and self._write(checked.due, checked.own.again())


def update_checksum(state: Tensor) -> int:
    """XXH3-64 of a tensor's bytes; waits for the device."""
    return xxhash.xxh3_64_intdigest(state.detach().cpu().contiguous().view(torch.uint8).numpy().data)


WITNESSES = 2
"""Number of other ranks that keep their copy of a slice, where they have one."""


@dataclass(frozen=True)
class WrongSum:
    """The element of a reduced gradient that is farthest outside of what rounding allows.

    Args:
        due: slice that the element is in.
        element: place of the element in the slice.
        exact: the mean of the replicas' gradients, in fp64.
        bound: largest difference that rounding explains.
        got: value of the owner.
        elements: number of the slice's elements that are outside.
    """

    due: Slice
    element: int
    exact: float
    bound: float
    got: float
    elements: int


class SumCheck:
    """Copies a slice of each replica's gradients before they are summed, and compares their mean with the sum's.

    With two replicas in fp32 only the two numbers beside the exact mean pass, unless gradients cancel. With the
    optimizer that keeps the whole reduced gradient on every rank, ``WITNESSES`` other ranks keep their copies of each
    slice: where one of them is within the bound, the sum was right, and the owner's copy of it is wrong.

    Args:
        times: how often gradients are summed over replicas in a step.
    """

    def __init__(self, engine: StepEngine, slices: Slices, times: int = 1) -> None:
        self._engine, self._slices, self._times = engine, slices, times
        self._group = engine.data_parallel_group if engine.dims.data > 1 else None
        self._exchange: TensorExchange | None = None
        self._due: Slice | None = None
        self._every_due: Sequence[Slice | None] = ()
        self._copies: dict[int, Tensor] = {}

    def copy(self, turn: int, own: Sequence[Tensor | None] | None = None) -> None:
        """Send this rank's part of each owner's slice that is due to its owner.

        Args:
            own: for each owner the part, [times, numel], None where no slice is due; None: what has accumulated.

        Collective: the data group.
        """
        due = self._every_due = self._slices.at(turn)
        self._due = due[self._engine.dims.dp_rank]
        own = [None if one is None else self._slices.accumulated(one) for one in due] if own is None else own
        empty = next((one for one in own if one is not None), torch.empty(0, device=self._engine.device)).new_empty(0)
        sent = [empty if one is None else one.flatten() for one in own]
        sizes = [0 if self._due is None else self._times * self._due.numel] * len(due)
        self._exchange = TensorExchange(sent, sizes, self._group)

    def compare(self) -> WrongSum | None:
        """The worst element of this rank's slice, while gradients are reduced and not changed yet; None: none is wrong.

        Sync: waits for the device.
        """
        assert self._exchange is not None, "copied before the reduction"
        parts, self._exchange = self._exchange.finish(), None
        self._copies = dict(self._copied())
        if self._due is None:
            return None
        reduced = self._slices.reduced(self._due)
        optimizer = self._engine.optimizer
        sent_as = (self._engine if is_bf16_optimizer(optimizer) else optimizer).communication_data_type
        kinds = [reduced.dtype, parts[0].dtype, sent_as]
        coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps)
        factor, converted = self._factor(self._due) * self._times, sent_as != parts[0].dtype
        every = [one for part in parts for one in part.view(self._times, -1)]
        exact = mean_of(every, factor, coarsest, converted=converted)
        return _worst(self._due, reduced.double(), exact.values, exact.bounds)

    def _factor(self, due: Slice) -> float | Tensor:
        """Factor of the mean of the replicas' gradients: one, or [numel] where parameters have different ones."""
        pieces = [(part.group, piece) for part in due.parts for piece in part.pieces]
        factors = [self._engine.gradient_factor_of(self._slices.parameter_of(*one)).item() for one in pieces]
        if len(set(factors)) == 1:
            return factors[0]
        counts = torch.tensor([piece.numel for _, piece in pieces])
        return torch.tensor(factors, dtype=torch.float64).repeat_interleave(counts).to(self._engine.device)

    def _copied(self) -> Iterator[tuple[int, Tensor]]:
        """Global ranks of the owners after this one, each with this rank's copy of its slice, where it has any."""
        dims = self._engine.dims
        if not is_bf16_optimizer(self._engine.optimizer):
            return
        for after in range(1, min(WITNESSES + 1, dims.data)):
            replica = (dims.dp_rank + after) % dims.data
            if (due := self._every_due[replica]) is not None:
                yield self._slices.ranks[replica], self._slices.copy_of(due, replica)

    def copy_at(self, owner: int, element: int) -> float | None:
        """This rank's value of a wrong element in another's slice; None: it keeps no copy."""
        copy = self._copies.get(owner)
        return None if copy is None else copy[element].item()


def _worst(due: Slice, got: Tensor, exact: Tensor, bounds: Tensor) -> WrongSum | None:
    outside = ~((got - exact).abs() <= bounds) & bounds.isfinite() & exact.isfinite()
    if not bool(outside.any()):
        return None
    distance = torch.where(outside, ((got - exact).abs() / bounds).nan_to_num(nan=torch.inf), -1.0)
    place = int(distance.argmax())
    values = exact[place].item(), bounds[place].item(), got[place].item()
    return WrongSum(due, place, *values, int(outside.sum()))


logger = logging.getLogger(__name__)

SUMS, KEPT_STATE, UPDATES = "reduction", "state", "update"
"""Tiers of findings in slices."""
MISSED = "missed"
"""Name of the flag of a rank that has not checked a slice in full."""
OWN_COPY, MEAN = "own copy", "mean of the replicas' gradients"
"""Bases of rulings on slices, besides those of ``megasdc.sdc.verdict``."""
REPEATS = 5
SHOWN = 16
"""Largest number of an update's elements that an event names one by one."""
Act = Callable[[int, Callable[[Collection[int]], Finding]], bool]
"""Settles a finding, from its step and a function that rules, given the ranks wrong before; whether it is repaired."""
ReportWeaker = Callable[[dict[str, str]], None]
"""Reports exact checks that are within a tolerance from now on: a text on each, by phase."""


@dataclass(frozen=True)
class UpdateMismatch:
    """Difference between an update and the checker's computation of it.

    Args:
        owner: global rank of the update's owner, the checker itself where there is one replica.
        row: number in ``STATES`` of the first row that differs.
        elements: places in the slice of the elements that differ, ascending, [n].
        got: checksum of the owner's row.
        expected: checksum of the checker's row.
        same_inputs: whether the checker has computed it from the owner's inputs, bit by bit.
    """

    owner: int
    row: int
    elements: Tensor
    got: int
    expected: int
    same_inputs: bool


def comparable(claim: UpdateMismatch | None, checker: int, used: Sequence[int]) -> UpdateMismatch | None:
    """The claim of a rank, unless two updates by different settings were compared.

    Args:
        used: digest of the step's settings, by rank; empty: those of replicas are equal.
    """
    return None if claim is not None and used and used[claim.owner] != used[checker] else claim


class ReducedGradientCheck(Hook):
    """Hook that compares slices of gradient and state, once faults were injected and before bounds change gradients."""

    def __init__(self, checks: SliceChecks) -> None:
        self._checks = checks

    def before_optimizer_step(self, engine: StepEngine) -> None:
        """Compare this rank's slices of gradients and state."""
        self._checks.compare()


class Unclipped(Hook):
    """Hook that copies the gradient that the optimizer is about to clip; the last hook before the optimizer."""

    def __init__(self, checks: SliceChecks) -> None:
        self._checks = checks

    def before_optimizer_step(self, engine: StepEngine) -> None:
        """Copy this rank's slice of the gradient."""
        self._checks.copy_unclipped()


@dataclass(frozen=True)
class Checkable:
    """Parts of a step in which no hook changes gradients between two places that checks compare.

    Args:
        sums: whether this holds from the last micro-batch to the sum over replicas.
        clips: whether this holds from clipping to the optimizer.
        times: how often gradients are summed over replicas in a step.
    """

    sums: bool = True
    clips: bool = True
    times: int = 1


def names_of_submodules(engine: Any) -> dict[int, tuple[str, str]]:
    """Full name and slot of each parameter in an engine's submodules, by its id."""
    every = list_submodules(engine.module)
    return {id(one): (submodule.fqn, slot) for submodule in every for slot, one in submodule.parameters.items()}


class SliceChecks(Hook):
    """Checks a slice of each shard in each step: the sum of its gradient, its state since the last step, its update.

    A slice is put right only where it is the whole shard, so that what else changed is known too; else a finding halts.

    Args:
        size: largest number of elements of a slice.
        act: settles findings.
        report: reports where a check is no longer exact.
        budget: decides which steps look at a slice, and measures the time.
        names: returns full name and slot of each parameter of an engine, by its id.

    Attributes:
        found: the hook that compares slices of gradient and state, apart since it comes after fault injection.
        unclipped: the hook that reads gradients when all others have changed them.
    """

    saved_as = "SliceChecks"

    def __init__(
        self,
        size: int,
        act: Act,
        report: ReportWeaker,
        budget: CheckBudget,
        used: UsedSettings,
        checkable: Checkable,
        names: Callable[[Any], dict[int, tuple[str, str]]] = names_of_submodules,
    ) -> None:
        self._size, self._act, self._report, self._budget, self._used = size, act, report, budget, used
        self._checkable, self._names_of = checkable, names
        self.found: Hook = ReducedGradientCheck(self)
        self.unclipped: Hook = Unclipped(self)
        self._sums: SumCheck | None = None
        self._wrong_sum: WrongSum | None = None
        self._tolerant = False
        self._owners: set[int] = set()
        self._engine: Any = None
        self._host_group: dist.ProcessGroup | None = None
        self._names: dict[int, tuple[str, str]] = {}
        self._turn = Turn()
        self._looks = self._is_whole = self._missed = False

    def on_start(self, run: Host) -> None:
        """Divide the shards into slices, and report after how many steps all have been looked at."""
        self._engine, self._host_group, self._events = run.engine, run.host_group, run.events
        self._used.start()
        self._slices = Slices(run.engine, self._size, run.host_group)
        sums, clips = self._checkable.sums, self._checkable.clips
        self._sums = SumCheck(run.engine, self._slices, self._checkable.times) if sums else None
        self._updates = UpdateSlices(run.engine, self._slices, self._used, clips=clips)
        self._names = self._names_of(run.engine)
        self._snapshot(run.engine.step_number)  # what was loaded, or made, is what the first step is to find
        if run.dims.rank == 0:
            told = {"elements": self._size, "period": self._slices.period, "sums": sums, "clipping": clips}
            every = self._budget.cadence.every
            run.events.emit("start", "slices", step=run.engine.step_number - 1, every=every, **told)
            logger.info(
                "slices of %d elements: all of the optimizer is looked at in %d steps that look at one%s%s%s",
                self._size,
                self._slices.period,
                "" if every == 1 else f", now each {every}. step",
                "" if sums else "; sums of gradients are not, since a bound changes each rank's own before",
                "" if clips else "; clipping is not, since a bound changes gradients after it",
            )

    def close(self) -> None:
        """Remove the optimizer's hook."""
        if self._engine is not None:
            self._updates.close()

    @property
    def due(self) -> Sequence[Slice | None]:
        """The slice of each replica's shard at which the running step looks; empty: it looks at none."""
        return self._slices.at(self._turn.number) if self._looks else ()

    @property
    def period(self) -> int:
        """Number of looks after which each slice has been looked at."""
        return self._slices.period

    def parameter_of(self, group: int, piece: ParameterPiece) -> Tensor:
        """This rank's copy of the parameter that a piece of a slice belongs to."""
        return self._slices.parameter_of(group, piece)

    def forget(self) -> None:
        """Forget the copy of the state that the last step left, since other state was loaded."""
        self._updates.snapshot(None)

    def state_dict(self) -> dict[str, Any]:
        """The slice that is due, so that starts do not look at the first ones again and again."""
        return {"turn": self._turn.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._turn = Turn(int(state["turn"]))

    # --- a step -------------------------------------------------------------------------------------------------

    def before_step(self, run: Host) -> None:
        """Find out whether this step looks at a slice."""
        self._looks = self._budget.cadence.slices(run.engine.step_number)

    def before_reduction(self, engine: StepEngine, own: Sequence[Tensor | None] | None = None) -> None:
        """Send slices of this rank's gradients to their owners; ``own`` as in ``SumCheck.copy``."""
        if self._sums is not None and self._looks:
            with self._budget.slices:
                self._sums.copy(self._turn.number, own)

    def compare(self) -> None:
        """Compare this rank's slices of the reduced gradient, and of the state that the last step left."""
        if self._looks:
            with self._budget.slices:
                self._wrong_sum = None if self._sums is None else self._sums.compare()
                self._is_whole = self._updates.compare_state(self._turn.number)
            if self._updates.copy_changed:
                step, due = self._engine.step_number, self._turn.number % self._slices.period
                self._events.emit("sdc", "slice_copy_changed", step=step, slice=due)
                logger.warning("step %d: the copy of a slice of the state has changed, and the state has not", step)

    def copy_unclipped(self) -> None:
        """Copy this rank's slice of the gradient that the optimizer is about to clip."""
        if self._looks:
            with self._budget.slices:
                self._updates.copy_unclipped()

    def after_optimizer_step(self, engine: StepEngine) -> None:
        """Check the update, agree on what was found, and settle it.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        if self._looks:
            self._finish(engine)
        self._snapshot(engine.step_number + 1)

    def _snapshot(self, following: int) -> None:
        """Keep the slice at which the following step looks."""
        with self._budget.slices:
            self._updates.snapshot(self._turn.number if self._budget.cadence.slices(following) else None)

    def _finish(self, engine: StepEngine) -> None:
        step = engine.step_number
        with self._budget.slices:
            checked = CheckedUpdates() if engine.is_skipped else self._updates.finish()
            claim = self._claim(checked)
            found = {SUMS: self._wrong_sum is not None, KEPT_STATE: self._updates.changed is not None}
            not_stepped = checked.due is not None and checked.own is None
            found |= {UPDATES: claim is not None, MISSED: not self._is_whole or engine.is_skipped or not_stepped}
            used = self._used.pop_digest()
            flags = {name: Compared(one, ANY) for name, one in found.items()}
            agreed = compare_replicas({SETTINGS: Compared(used), **flags}, engine.dims, self._host_group)
        self._missed = bool(agreed[MISSED])
        self._end_turn(engine)
        if any(agreed[tier] for tier in (SUMS, KEPT_STATE, UPDATES, SETTINGS)):
            self._budget.ignore_step()
        if agreed[SUMS]:
            self._act(step, lambda earlier: self._of_sums(step))
        if agreed[KEPT_STATE]:
            self._act(step, lambda earlier: self._of_states(step, earlier))
        if agreed[SETTINGS]:
            self._act(step, lambda earlier: self._used.rule(step))
        if agreed[UPDATES]:
            exact, rank = not self._tolerant, engine.dims.rank
            by_rank = gather_objects(used, self._host_group) if agreed[SETTINGS] else ()
            ruled = self._settle_updates(engine, comparable(claim, rank, by_rank), checked)
            if exact and self._tolerant and not ruled:  # a fault may be among the differences that rounding explains
                claim = self._claim(checked)
                self._settle_updates(engine, comparable(claim, rank, by_rank), checked)

    def _end_turn(self, engine: StepEngine) -> None:
        """End a turn; a slice that was not checked in full is due again, a limited number of times."""
        place = self._turn.number % self._slices.period
        if self._turn.end(missed=self._missed, skipped=engine.is_skipped) and engine.dims.rank == 0:
            self._events.emit("sdc", "slice_given_up", step=engine.step_number, slice=place, looks=MISSES)
            logger.warning(
                "step %d: slice %d of the optimizer was not looked at in full in %d looks, since a rank has no copy of "
                "it or has not updated it; the next one is due, and this one in its next turn",
                *(engine.step_number, place, MISSES),
            )

    def _settle_updates(self, engine: StepEngine, claim: UpdateMismatch | None, checked: CheckedUpdates) -> bool:
        """Rule on updates that differ when computed twice, repair if possible; returns whether there was a ruling."""
        rulings: list[RankVerdict] = []
        step = engine.step_number

        def find(earlier: Collection[int]) -> Finding:
            settled = self._of_updates(step, claim, checked, earlier)
            rulings.extend(settled.rulings)
            return settled

        if self._act(step, find):
            named = {ruling.rank for ruling in rulings} & self._owners  # a checker's own slice is another
            failed = engine.dims.rank in named and not self._updates.write_recomputed(checked)
            failing = [rank for rank, one in enumerate(gather_objects(failed, self._host_group)) if one]
            if failing:
                self._act(step, lambda earlier: self._failed_repair(step, failing, rulings))
            engine.optimizer.update_lp_params()
        return bool(rulings)

    def _failed_repair(self, step: int, failing: Collection[int], rulings: Sequence[RankVerdict]) -> Finding:
        """Finding on repaired slices that are wrong again when they are read."""
        again = [replace(one, verdict=INTERMITTENT, basis=OWN_COPY) if one.rank in failing else one for one in rulings]
        return Finding(UPDATES, None, tuple(again), unrepaired=f"what was put right on ranks {list(failing)} is not")

    def _claim(self, checked: CheckedUpdates) -> UpdateMismatch | None:
        """Difference between an update and this rank's computation of it; None: they are equal."""
        if checked.other is None or checked.again is None:
            return None
        other, again = checked.other, checked.again
        same_inputs = other.inputs == other.seen
        for row, (got, expected) in enumerate(zip(other.after, again, strict=True)):
            elements = (as_bits(got.contiguous()) != as_bits(expected.contiguous())).nonzero().flatten().cpu()
            if self._tolerant and same_inputs and len(elements):
                exact = other.exact(row, elements)
                elements = elements[~(_is_proved(got, elements, exact) & _is_proved(expected, elements, exact))]
            if len(elements):
                dims = self._engine.dims
                owner = self._slices.ranks[(dims.dp_rank - 1) % dims.data]
                return UpdateMismatch(
                    owner, row, elements, update_checksum(got), update_checksum(expected), same_inputs
                )
        return None

    # --- rulings ------------------------------------------------------------------------------------------------

    @property
    def _unrepaired(self) -> str:
        """Reason why a repaired slice does not repair the step; empty: it is the whole shard, checked in full."""
        if self._slices.period == 1:
            return (
                "what the step before left was not kept on all ranks, so that whether the state changed before the "
                "update is not known"
                if self._missed
                else ""
            )
        return (
            f"a slice is {self._size} elements of the optimizer's state on a rank, one of {self._slices.period}, and "
            "whether others changed too is not known; megasdc.sdc.always_on.slice_elements as large as a shard lets "
            "such a step be repaired"
        )

    def _address(self, step: int, phase: str, due: Slice, element: int, row: int | None = None) -> Address:
        """Address of the parameter that an element of a slice is in, or of one of its ``STATES``."""
        group, piece = due.at(element)
        own = f"group {group}", f"parameter {piece.parameter}"  # of one that no submodule has
        fqn, slot = self._names.get(id(self._slices.parameter_of(group, piece)), own)
        return Address(step, None, phase, fqn, slot if row is None else f"{slot}.{STATES[row]}")

    def _of_sums(self, step: int) -> Finding:
        """Rule on a sum that rounding does not explain: its owner is named if another rank has a right copy."""
        dims, wrong = self._engine.dims, self._wrong_sum
        mine = None if wrong is None else (self._address(step, REDUCED_GRAD, wrong.due, wrong.element), wrong)
        found = {rank: one for rank, one in enumerate(gather_objects(mine, self._host_group)) if one is not None}
        copies = (
            {} if self._sums is None else {who: self._sums.copy_at(who, at.element) for who, (_, at) in found.items()}
        )
        witnessed = gather_objects({who: one for who, one in copies.items() if one is not None}, self._host_group)
        rulings, opinions = [], []
        for rank, (address, one) in found.items():
            first = rank - dims.at(rank).dp_rank * dims.tensor
            group = tuple(first + replica * dims.tensor for replica in range(dims.data))
            values = {rank: one.got} | {who: seen[rank] for who, seen in enumerate(witnessed) if rank in seen}
            within = {who: abs(value - one.exact) <= one.bound for who, value in values.items()}
            basis = REFEREE if any(within.values()) else MEAN
            named = rank if basis == REFEREE or len(group) == 1 else None
            rulings.append(RankVerdict(named, INCONCLUSIVE, basis, address, suspects=group if named is None else ()))
            told = {who: repr(value) for who, value in values.items()}
            opinions.append(
                Opinion(address, within, "", one.elements, Outside((0, one.element), one.exact, one.bound, told))
            )
        return Finding(SUMS, None, tuple(rulings), dims.world_size, opinions=tuple(opinions))

    def _of_states(self, step: int, earlier: Collection[int]) -> Finding:
        """Rule on state that changed between two steps, in its rank's memory; the copy was put back before any use."""
        one = self._updates.changed
        mine = None if one is None else (self._address(step, UPDATE, one.due, one.element, one.row), one.restored)
        found = dict(enumerate(gather_objects(mine, self._host_group)))
        rulings = [
            RankVerdict(rank, INTERMITTENT if rank in earlier else NOT_REPRODUCED, OWN_COPY, told[0])
            for rank, told in found.items()
            if told is not None
        ]
        lost = [rank for rank, told in found.items() if told is not None and not told[1]]
        why = f"the copy of ranks {lost} has changed too, or does not stay" if lost else self._unrepaired
        return Finding(KEPT_STATE, None, tuple(rulings), self._engine.dims.world_size, unrepaired=why)

    def _of_updates(
        self, step: int, claim: UpdateMismatch | None, checked: CheckedUpdates, earlier: Collection[int]
    ) -> Finding:
        """Rule on two computations of one update that differ, by repeats of both and by the referee."""
        rank = self._engine.dims.rank
        claims: Mapping[int, UpdateMismatch] = {
            checker: one for checker, one in enumerate(gather_objects(claim, self._host_group)) if one is not None
        }
        self._owners = {one.owner for one in claims.values()}
        why = self._unrepaired
        rulings: list[RankVerdict] = []
        opinions: list[Opinion] = []
        for checker, one in claims.items():
            address, evidence = None, None
            if rank == one.owner and checked.due is not None and checked.own is not None:
                address = self._address(step, UPDATE, checked.due, int(one.elements[0]), one.row)
                evidence = _evidence(checked.own, checked.own.after, one, alone=checker == rank)
            elif rank == checker and checked.other is not None and checked.again is not None:
                evidence = _evidence(checked.other, checked.again, one)
            sent = gather_objects((address, evidence), self._host_group)
            place = next(where for where, _ in sent if where is not None)
            shown = {who: part for who in sorted({checker, one.owner}) if (part := sent[who][1]) is not None}
            if self._is_rounding(step, place, one, list(shown.values())):
                continue
            if len({part.whole for part in shown.values()}) > 1:
                why = why or "computed again, the ranks have other values than each other"
            if checker == one.owner:
                pairs = shown[checker].pairs
                difference = Unrepeated(place, one.got, one.expected)
                ruling = judge_recomputed(checker, difference, pairs, checker in earlier)
                rulings.append(replace(ruling, basis=ELSEWHERE))
                continue
            values = {one.owner: one.got, checker: one.expected}
            opinion = _opinion(place, one, shown)
            opinions.append(opinion)
            dispute = Dispute(place, 0, (), (values,), origin=True)
            repeats = {(who, 0): [pair[0] for pair in shown[who].pairs] for who in values}
            refereed = {(who, 0): within for who, within in opinion.within.items()}
            rulings += settle(Ballot((), dispute, 1, (), ()), repeats, None, earlier, refereed)
        counts = self._engine.dims.world_size
        return Finding(UPDATES, None, tuple(rulings), counts, opinions=tuple(opinions), unrepaired=why)

    def _is_rounding(self, step: int, address: Address, claim: UpdateMismatch, shown: Sequence[_Shown]) -> bool:
        """Whether both results repeat and are within rounding; from then on such differences are not findings.

        Only where both were computed from the same inputs, bit by bit; settings were compared before.
        """
        repeats = {pair for one in shown for pair in one.pairs}
        alone = len(shown) == 1  # has both values, one of them elsewhere
        steady = {(claim.got, claim.expected)} if alone else {(claim.got,) * 2, (claim.expected,) * 2}
        same = claim.same_inputs and len({(one.inputs, one.clipped) for one in shown}) == 1
        if not same or repeats != steady or not all(one.proved for one in shown):
            return False
        if not self._tolerant:
            elements = claim.elements[:SHOWN].tolist()
            if self._engine.dims.rank == 0:
                told: dict[str, Any] = {"address": str(address), "elements": elements, "differing": len(claim.elements)}
                self._events.emit("sdc", "slices_within_rounding", step=step, **told)
                logger.warning(
                    "step %d: %s: computed again, %d elements have other bits each time, which rounding explains; the "
                    "update is compared within the bound of rounding from now on",
                    step,
                    address,
                    len(claim.elements),
                )
            self._report({UPDATE: f"within rounding since step {step}"})
        self._tolerant = True
        return True


@dataclass(frozen=True)
class _Shown:
    """A rank's repeats of an update: checksums of the row as it is and elsewhere; and its elements.

    Args:
        pairs: checksums of each repeat; twice the same where nothing was moved.
        values: differing elements, as this rank computed them first.
        proved: whether each of them, and its repeat elsewhere where a rank checks itself, is within a bound.
        inputs: checksum of this rank's inputs.
        clipped: checksum of these inputs once this rank has clipped the gradient.
        whole: recomputed checksum of all rows.
    """

    pairs: tuple[tuple[int, int], ...]
    values: Tensor
    exact: Exact
    proved: bool
    inputs: int
    clipped: int
    whole: int


def _evidence(update: Update, first: Tensor, claim: UpdateMismatch, *, alone: bool = False) -> _Shown:
    """Repeat an update, of which this rank got ``first``, [3, n]; ``alone``: also with elements in other places."""
    pairs = []
    for _ in range(REPEATS):
        here = update_checksum(update.again()[claim.row])
        pairs.append((here, update_checksum(update.again(moved=True)[claim.row]) if alone else here))
    exact, found = update.exact(claim.row, claim.elements), [first]
    found += [update.again(moved=True)] if alone else []
    proved = all(bool(_is_proved(one[claim.row], claim.elements, exact).all()) for one in found)
    values, whole = first[claim.row].cpu()[claim.elements], update_checksum(update.again())
    clipped = update_checksum(torch.cat([part.before for part in update.parts], 1))
    return _Shown(tuple(pairs), values, exact, proved, update.seen, clipped, whole)


def _is_proved(row: Tensor, elements: Tensor, exact: Exact) -> Tensor:
    """Whether rounding explains each element of a row; false where there is no bound."""
    return is_within(row.cpu()[elements].double(), exact) & exact.bounds.isfinite()


def _opinion(address: Address, claim: UpdateMismatch, shown: Mapping[int, _Shown]) -> Opinion:
    """Opinion of the referee on the owner's and the checker's elements."""
    count = len(claim.elements)
    reference = agreed([one.exact for one in shown.values()])
    if reference is None:
        return Opinion(address, {}, "ranks computed the elements differently in fp64 too", count)
    within = judge_rounding({rank: one.values for rank, one in shown.items()}, reference)
    if not within:
        return Opinion(address, within, "rounding explains all results, or none", count)
    wrong = next(rank for rank, right in within.items() if not right)
    distance = ((shown[wrong].values.double() - reference.values).abs() / reference.bounds).nan_to_num(nan=torch.inf)
    place = int(distance.argmax())
    values = {rank: repr(one.values[place].item()) for rank, one in shown.items()}
    exact, bound = reference.values[place].item(), reference.bounds[place].item()
    return Opinion(address, within, "", count, Outside((0, int(claim.elements[place])), exact, bound, values))


def settings_of(kind: type, group: dict[str, Any]) -> AdamSettings:
    """Hyper-parameters of a group of PyTorch's Adam or AdamW, which ``kind`` is."""
    return AdamSettings(
        learning_rate=group["lr"],
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=issubclass(kind, torch.optim.AdamW),
    )
