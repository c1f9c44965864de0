"""Fault injection into tensors, with a record of every change: the ground truth that detectors are scored against.

Steps in which a fault fires, its random numbers and the elements that it hits are stateless functions of seeds and
addresses; indices are row-major, the same on every device. Bits are changed on integer views, values by arithmetic in
fp64. ``why_unfired`` has the reasons why armed faults never fired.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasdc.common.addresses import PHASES, Address
from megasdc.common.errors import ConfigError
from megasdc.config.faults import (
    BIT_KINDS,
    FAULT_PHASES,
    TOKENS,
    FaultPlace,
    FaultSpec,
    fault_spec_problems,
    place_problems,
)
from megasdc.model.randomness import mix
from megasdc.model.submodules import Submodule
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bits import as_bits, bit_layout, element_bits
from megasdc.tensors.permuted import as_matrix, is_permuted

_FIRE, _BURST, _ELEMENTS, _SAME = range(4)
"""Purposes of a draw, part of its key, so that draws for different purposes are independent."""


def is_here(spec: FaultPlace, dims: ParallelDims, host: str, first_replica: int = 0) -> bool:
    """Whether a spec applies to this rank; ``first_replica``: number of this launch's first."""
    wanted = (spec.rank, spec.replica, spec.stage, spec.tensor_rank)
    place = (dims.rank, first_replica + dims.dp_rank, dims.pp_rank, dims.tp_rank)
    return all(want is None or want == here for want, here in zip(wanted, place, strict=True)) and (
        spec.host is None or fnmatchcase(host, spec.host)
    )


def in_steps(spec: FaultPlace, step: int, micro_batch: int | None) -> bool:
    """Whether a spec applies to this step and micro-batch."""
    first, last = spec.steps
    assert first is not None, "checked when the configuration was read"
    if step < first or (last is not None and step > last):
        return False
    return spec.micro_batches is None or micro_batch is None or micro_batch in spec.micro_batches


class Draws:
    """Random draws of one spec on one rank.

    Args:
        index: index of the spec in its list.
        rank: global rank.
    """

    def __init__(self, spec: FaultSpec, index: int, rank: int) -> None:
        self._spec = spec
        self._own = (spec.seed, index, rank)
        self._shared = (spec.seed, rank)

    def fires(self, step: int, micro_batch: int | None, name: str, call: int) -> bool:
        """Whether the spec fires at one matching result.

        Args:
            step: optimizer step, first is 1.
            micro_batch: micro-batch in the step, or None.
            name: name of the tensor.
            call: number of earlier occurrences of this address in this step.
        """
        spec = self._spec
        if spec.burst is not None and not self._in_burst(step):
            return False
        if spec.probability >= 1.0:
            return True
        return _uniform(*self._own, _FIRE, *self._address(step, micro_batch, name), call) < spec.probability

    def _in_burst(self, step: int) -> bool:
        burst, first = self._spec.burst, self._spec.steps[0]
        assert burst is not None and first is not None
        starts = range(max(first, step - burst.length + 1), step + 1)
        return any(_uniform(*self._own, _BURST, start) < burst.probability for start in starts)

    def generator(self, step: int, micro_batch: int | None, name: str, call: int) -> np.random.Generator:
        """Generator of elements, bits and noise of one firing; the same at every firing with ``same_elements``.

        The arguments are those of ``fires``.
        """
        if self._spec.same_elements:
            seed = mix(*self._shared, _SAME, _hash(name))
        else:
            seed = mix(*self._own, _ELEMENTS, *self._address(step, micro_batch, name), call)
        return np.random.Generator(np.random.PCG64(seed))

    def _address(self, step: int, micro_batch: int | None, name: str) -> tuple[int, ...]:
        phase = FAULT_PHASES.index(self._spec.phase)
        return step, -1 if micro_batch is None else micro_batch, phase, _hash(name)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _uniform(*key: int) -> float:
    """A number in [0, 1) that depends on the key only."""
    return mix(*key) / 2**63


_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


class UnfitError(ValueError):
    """A spec names bits that the tensor's type does not have; it does not fire there."""


def alter_elements(values: Tensor, spec: FaultSpec, draws: np.random.Generator) -> Tensor:
    """New values of the elements [n] that a fault hits, of the same type and device; no sync.

    ``values``: fp32, bf16, fp16, fp64 or an integer type; ``draws``: source of random bits and noise.

    Raises:
        UnfitError: the type has no such bits.
    """
    if spec.kind in BIT_KINDS:
        return _alter_bits(values, spec, draws)
    if spec.kind == "value":
        assert spec.value is not None, "checked when the spec was taken"
        if not values.dtype.is_floating_point and not math.isfinite(float(spec.value)):
            raise UnfitError(f"{values.dtype} has no {spec.value}")
        value = torch.tensor(float(spec.value), dtype=torch.float64).to(values.dtype)
        return value.to(values.device).expand_as(values).clone()
    if spec.kind == "scale":
        assert spec.factor is not None, "checked when the spec was taken"
        return (values.double() * spec.factor).to(values.dtype)
    assert spec.deviation is not None, "checked when the spec was taken"
    noise = torch.from_numpy(draws.standard_normal(values.numel())).to(values.device)
    return (values.double() * (1.0 + spec.deviation * noise)).to(values.dtype)


def _alter_bits(values: Tensor, spec: FaultSpec, draws: np.random.Generator) -> Tensor:
    masks = torch.from_numpy(bit_masks(values.dtype, values.numel(), spec, draws)).to(values.device)
    bits = as_bits(values) if values.dtype.is_floating_point else values.view(masks.dtype)
    if spec.kind == "bit_flip":
        changed = bits ^ masks
    elif spec.kind == "stuck_at_1":
        changed = bits | masks
    else:
        changed = bits & ~masks
    return changed.view(values.dtype)


def bit_masks(dtype: torch.dtype, count: int, spec: FaultSpec, draws: np.random.Generator) -> np.ndarray:
    """Mask of the bits to change in each element, [count], signed integers as wide as the type.

    Raises:
        UnfitError: the type has no such bits.
    """
    width = element_bits(dtype)
    if isinstance(spec.bits, list):
        if max(spec.bits) >= width:
            raise UnfitError(f"{dtype} has bits 0 to {width - 1}, not {max(spec.bits)}")
        mask = sum(1 << bit for bit in set(spec.bits))
        return np.full(count, mask, _UNSIGNED[width]).view(_SIGNED[width])
    if spec.bits != "any" and not dtype.is_floating_point:
        raise UnfitError(f"{dtype} has no {spec.bits}")
    part = range(width) if spec.bits == "any" else bit_layout(dtype)[spec.bits]
    if spec.num_bits > len(part):
        raise UnfitError(f"{dtype} has {len(part)} bits in {spec.bits}, not {spec.num_bits}")
    if spec.num_bits == 1:
        chosen = draws.integers(part.start, part.stop, (count, 1))
    else:
        chosen = draws.permuted(np.tile(np.array(part), (count, 1)), axis=1)[:, : spec.num_bits]
    one = np.uint64(1)
    return (one << chosen.astype(np.uint64)).sum(axis=1, dtype=np.uint64).astype(_UNSIGNED[width]).view(_SIGNED[width])


def pick_elements(result: Tensor, spec: FaultSpec, draws: np.random.Generator) -> Tensor:
    """Choose the elements that a fault hits: [n] distinct row-major indices, int64, on the result's device, maybe none.

    With a range of values, random indices are drawn among the elements in range; other patterns drop those out of
    range.

    Sync: waits for the device if a range is given.
    """
    within = _in_range(result, spec)
    if spec.pattern == "random":
        among = None if within is None else within.flatten().nonzero().flatten()
        places = torch.from_numpy(_random(result.numel() if among is None else among.numel(), spec, draws))
        places = places.to(result.device)
        return places if among is None else among[places]
    places = torch.from_numpy(_placed(result, spec, draws)).to(result.device)
    return places if within is None else places[within.flatten()[places]]


def _in_range(result: Tensor, spec: FaultSpec) -> Tensor | None:
    if spec.only_above is None and spec.only_below is None:
        return None
    size = result.abs()
    low = size >= (spec.only_above or 0.0)
    return low if spec.only_below is None else low & (size <= spec.only_below)


def _random(numel: int, spec: FaultSpec, draws: np.random.Generator) -> np.ndarray:
    if spec.element_probability is None:
        count = min(spec.elements, numel)
    else:
        count = int(draws.binomial(numel, spec.element_probability))
    return np.sort(draws.choice(numel, count, replace=False, shuffle=False)).astype(np.int64)


def _placed(result: Tensor, spec: FaultSpec, draws: np.random.Generator) -> np.ndarray:
    numel = result.numel()
    if numel == 0:
        return np.empty(0, np.int64)
    if spec.pattern == "indices":
        return np.array(sorted({place for place in spec.indices or () if place < numel}), np.int64)
    if spec.pattern == "column":
        width = result.shape[-1] if result.dim() else 1
        columns = np.sort(draws.choice(width, min(spec.elements, width), replace=False))
        return (np.arange(numel // width)[:, None] * width + columns).ravel()
    if spec.pattern == "adjacent":
        count = min(spec.elements, numel)
        return draws.integers(numel - count + 1) + np.arange(count)
    assert spec.period is not None, "checked when the spec was taken"
    return _periodic(numel, spec.elements, spec.period, spec.run, draws)


def _periodic(numel: int, elements: int, period: int, run: int, draws: np.random.Generator) -> np.ndarray:
    """Runs of ``run`` elements, one every ``period``, from a random start such that all fit, if they can."""
    runs = math.ceil(elements / run)
    extent = (runs - 1) * period + run
    start = int(draws.integers(max(1, numel - extent + 1)))
    runs, run = min(runs, math.ceil(numel / period)), min(run, numel)  # limited to what can fit
    places = (start + np.arange(runs)[:, None] * period + np.arange(run)).ravel()[:elements]
    return places[places < numel]


SHOWN = 16
"""Maximum number of elements of a firing that are recorded one by one."""


@dataclass(frozen=True)
class Firing:
    """One firing of a fault.

    Args:
        spec: index of the spec in the list, profiles expanded.
        kind: the spec's kind.
        address: address of the tensor; its name is the phase in one without submodules, in ``checkpoint`` the file's.
        rank: global rank.
        dtype: type of the elements.
        elements: number of chosen elements.
        changed: number of those whose bits changed; may be 0, as when a stuck bit had its value already.
        indices: row-major indices of the first ``SHOWN`` chosen elements.
        bits_before: their bits before, as unsigned integers; ``bits_after`` likewise.
        before: their values before.
        after: their values after.
    """

    spec: int
    kind: str
    address: Address
    rank: int
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    indices: tuple[int, ...]
    bits_before: tuple[int, ...]
    bits_after: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def fields(self) -> dict[str, Any]:
        """Fields of the event, without step and micro-batch; bits in hexadecimal, values as text."""
        found = {name: value for name, value in vars(self).items() if name not in ("kind", "address", "rank")}
        found |= {name: getattr(self.address, name) for name in ("phase", "fqn", "slot")}
        found["fault"] = self.kind
        for name in ("bits_before", "bits_after"):
            found[name] = [f"{bits:x}" for bits in found[name]]
        for name in ("before", "after"):  # as text, because JSON has no NaN
            found[name] = [f"{value:.9g}" for value in found[name]]
        return found


@dataclass
class Tally:
    """Counts of one spec on one rank.

    Args:
        here: whether the spec applies to this rank.
        wide: whether the model has the spec's ``min_hidden_size``.
        seen: number of matching results in its steps and micro-batches.
        due: number of these for which the random draw chose to fire.
        fired: number of firings.
        changed: number of firings that changed a bit.
        reasons: reasons why it did not fire when it was due.
    """

    here: bool = False
    wide: bool = True
    seen: int = 0
    due: int = 0
    fired: int = 0
    changed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Injector:
    """Injects faults into results as specs say; a listener of ``engine.observer.Observer`` that precedes recorders.

    Args:
        specs: the faults, without profiles (``config.expand_faults``).
        hidden_size: width of the model.
        on_firing: function called with every firing.
        host: name of this rank's host; None: the system's host name.
        vocab_size: number of token ids; needed with phase ``tokens``.

    Attributes:
        limits: exclusive upper limits of whole numbers, by phase; a number that a fault would move beyond is not
            changed.

    Raises:
        ConfigError: a spec contradicts itself or names a rank outside the world.
    """

    def __init__(
        self,
        specs: Sequence[FaultSpec],
        dims: ParallelDims,
        hidden_size: int,
        on_firing: Callable[[Firing], None] | None = None,
        *,
        host: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        check_specs(specs, dims)
        self.specs = tuple(specs)
        self.firings: list[Firing] = []
        self.limits = {} if vocab_size is None else {TOKENS: vocab_size}
        self.rank = dims.rank
        self._on_firing = on_firing
        self._draws = [Draws(spec, index, dims.rank) for index, spec in enumerate(specs)]
        host = socket.gethostname() if host is None else host
        self.tallies = [
            Tally(is_here(spec, dims, host), spec.min_hidden_size is None or hidden_size >= spec.min_hidden_size)
            for spec in specs
        ]
        self._fitting: dict[tuple[str, str, str], tuple[int, ...]] = {}
        self._calls: Counter[Address] = Counter()
        self._calls_step = 0

    def __call__(self, address: Address, result: Tensor) -> Tensor | None:
        """Inject faults into a copy of one result, if a spec fires.

        Args:
            result: any shape; is not changed.

        Returns:
            A changed copy with the same strides, or None if no bit changed.

        Sync: waits for the device if a spec fires, or has a range of values and is due.
        """
        return self._inject(address, result, lambda: result.detach().clone())

    def inject_into(self, address: Address, kept: Tensor) -> bool:
        """Inject faults in place into stored data: states, gradients, bytes of a file.

        Args:
            kept: the data, any shape; is changed.

        Returns:
            Whether some bit changed.

        Sync: as ``__call__``.
        """
        return self._inject(address, kept, lambda: kept) is not None

    def _inject(self, address: Address, result: Tensor, take: Callable[[], Tensor]) -> Tensor | None:
        """Change the tensor that ``take`` returns, if a spec fires; None if no bit changed."""
        fitting = self._fits(address)
        if not fitting:
            return None
        call = self._count_call(address)
        changed: Tensor | None = None
        for index in fitting:
            if not self._is_due(index, address, call):
                continue
            change = self._fire(index, address, result if changed is None else changed, call)
            if change is not None:
                changed = take() if changed is None else changed
                changed[change[0]] = change[1]
        return changed

    def due_on_any_rank(self, phase: str, step: int) -> bool:
        """Whether a spec of this phase may fire at a step on some rank; the same on all ranks."""
        return any(spec.phase == phase and in_steps(spec, step, None) for spec in self.specs)

    def wants(self, *phases: str) -> bool:
        """Whether any spec may fire on this rank in one of these phases."""
        return any(
            tally.here and tally.wide and spec.phase in phases
            for spec, tally in zip(self.specs, self.tallies, strict=True)
        )

    def state_dict(self) -> dict[str, int]:
        """Number of times that each spec has changed bits on this rank, by a key that changes with the spec."""
        return {self._key(index): tally.changed for index, tally in enumerate(self.tallies) if tally.changed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore ``state_dict``, so that a spec with ``once`` does not fire again."""
        for index, tally in enumerate(self.tallies):
            tally.changed = state.get(self._key(index), 0)

    def _key(self, index: int) -> str:
        return f"{index} {self.specs[index].model_dump_json(exclude_defaults=True)}"

    def _fits(self, address: Address) -> tuple[int, ...]:
        """Indices of the specs that match this tensor, whatever the step."""
        key = (address.phase, address.fqn, address.slot)
        if key not in self._fitting:
            self._fitting[key] = tuple(
                index
                for index, (spec, tally) in enumerate(zip(self.specs, self.tallies, strict=True))
                if tally.here and tally.wide and _means(spec, address)
            )
        return self._fitting[key]

    def _count_call(self, address: Address) -> int:
        """Number of earlier calls with this address in the step, so that a recomputation draws anew."""
        if address.step != self._calls_step:
            self._calls.clear()
            self._calls_step = address.step
        self._calls[address] += 1
        return self._calls[address] - 1

    def _is_due(self, index: int, address: Address, call: int) -> bool:
        spec, tally = self.specs[index], self.tallies[index]
        if not in_steps(spec, address.step, address.micro_batch):
            return False
        tally.seen += 1
        if spec.once and tally.changed:
            return False
        due = self._draws[index].fires(address.step, address.micro_batch, f"{address.fqn} {address.slot}", call)
        tally.due += due
        return due

    def _fire(
        self, index: int, address: Address, result: Tensor, call: int
    ) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Indices and new values of the changed elements; None if no bit changes."""
        spec, tally = self.specs[index], self.tallies[index]
        draws = self._draws[index].generator(address.step, address.micro_batch, f"{address.fqn} {address.slot}", call)
        moves = spec.bound_to == "unit" and is_permuted()
        chosen = pick_elements(as_matrix(result) if moves else result, spec, draws)
        if moves:
            chosen = as_matrix(torch.arange(result.numel(), device=result.device).view(result.shape)).flatten()[chosen]
        if chosen.numel() == 0:
            tally.reasons["no element was in range or chosen"] += 1
            return None
        places = torch.unravel_index(chosen, result.shape)
        before = result.detach()[places].reshape(chosen.shape)
        try:
            after = alter_elements(before, spec, draws)
        except UnfitError as error:
            tally.reasons[str(error)] += 1
            return None
        if (limit := self.limits.get(address.phase)) is not None:
            after = torch.where((after >= 0) & (after < limit), after, before)
        differs = int(_differs(before, after).sum())
        firing = self._describe(index, address, result, chosen, before, after, differs)
        tally.fired += 1
        tally.changed += differs > 0
        self.firings.append(firing)
        if self._on_firing is not None:
            self._on_firing(firing)
        return (places, after) if differs else None

    def _describe(
        self, index: int, address: Address, result: Tensor, chosen: Tensor, before: Tensor, after: Tensor, changed: int
    ) -> Firing:
        return Firing(
            spec=index,
            kind=self.specs[index].kind,
            address=address,
            rank=self.rank,
            dtype=str(result.dtype).removeprefix("torch."),
            shape=tuple(result.shape),
            elements=chosen.numel(),
            changed=changed,
            indices=tuple(chosen[:SHOWN].tolist()),
            bits_before=unsigned_bits(before[:SHOWN]),
            bits_after=unsigned_bits(after[:SHOWN]),
            before=tuple(before[:SHOWN].tolist()),
            after=tuple(after[:SHOWN].tolist()),
        )


def _means(spec: FaultSpec, address: Address) -> bool:
    if spec.phase != address.phase or (spec.slot is not None and not fnmatchcase(address.slot, spec.slot)):
        return False
    return fnmatchcase(address.fqn, spec.submodule if spec.file is None else spec.file)


def _integers(values: Tensor) -> Tensor:
    return as_bits(values) if values.dtype.is_floating_point else values


def _differs(before: Tensor, after: Tensor) -> Tensor:
    """Mask of elements whose bits differ; comparing values would make NaN differ from itself, and both zeros equal."""
    return _integers(before) != _integers(after)


def unsigned_bits(values: Tensor) -> tuple[int, ...]:
    """The bits of each element as an unsigned integer, for [n] of any real type."""
    mask = (1 << element_bits(values.dtype)) - 1
    return tuple(bits & mask for bits in _integers(values).tolist())


def check_specs(specs: Sequence[FaultSpec], dims: ParallelDims) -> None:
    """Refuse specs that cannot be injected at this layout, with a ConfigError naming each spec and field."""
    problems = []
    for index, spec in enumerate(specs):
        found = [*fault_spec_problems(spec), *place_problems(spec, dims.tensor, dims.pipeline, dims.data)]
        if spec.profile is not None:
            found.append(("profile", "expand profiles first, with megasdc.config.faults.expand_faults"))
        problems += [f"faults.{index}.{name}: {text}." for name, text in found]
    if problems:
        raise ConfigError(problems)


def faulty_submodules(specs: Sequence[FaultSpec], submodules: Sequence[Submodule]) -> list[Submodule]:
    """Submodules into whose results some spec may inject a fault, on any rank.

    All ranks of a tensor group must observe the same submodules, so the rank is not considered.

    Args:
        specs: the faults of the whole run.
        submodules: all submodules of this stage.
    """
    patterns = {spec.submodule for spec in specs if spec.phase in PHASES}
    return [one for one in submodules if any(fnmatchcase(one.fqn, pattern) for pattern in patterns)]


def why_unfired(spec: FaultSpec, tallies: Sequence[Tally]) -> str | None:
    """The reason why a spec changed nothing in a whole run, as far as it is known, from the tallies of all ranks.

    Returns:
        None if some bit was changed on some rank.
    """
    if any(tally.changed for tally in tallies):
        return None
    here = [tally for tally in tallies if tally.here]
    if not here:
        return "no rank matches its rank, replica, stage, tensor rank and host"
    if not any(tally.wide for tally in here):
        return f"the model is narrower than min_hidden_size {spec.min_hidden_size}"
    seen, due, fired = (sum(getattr(tally, name) for tally in here) for name in ("seen", "due", "fired"))
    if not seen:
        return f"no result of phase {spec.phase} that fits came in its steps and micro-batches on its ranks"
    if not due:
        return f"its probability and bursts never made it fire at {seen} results that fit"
    if fired:
        return f"it fired {fired} times, but the chosen bits already had their values"
    reasons = sum((tally.reasons for tally in here), Counter[str]())
    return f"it was due {due} times: {'; '.join(reasons) or 'no reason was kept'}"
