"""NaN and Inf in a guarded training: before the optimizer steps, where did the first one appear?

The norm of the gradients that are about to be used, and the loss, are looked at in each step. Only where they are not
finite the step's micro-batches are recomputed, as training did, and each result is looked at.

Of each micro-batch of the step references to the model's inputs are kept, no copies. An input that the training changed
in place since is known by the tensor's version, and its micro-batch is not recomputed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.attached.batch_replayer import FP16_SCALE, Batch, BatchReplayer, SentTensor
from megasdc.attached.record import ROOT, ResultRecorder, slot_of
from megasdc.attached.training import Protection, Training
from megasdc.common.addresses import BACKWARD, FORWARD, Address
from megasdc.common.errors import ConfigError
from megasdc.determinism import capture_rng
from megasdc.optim.zero1 import is_bf16_optimizer
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.finding import Finding
from megasdc.sdc.nonfinite import (
    EVENT_KIND,
    Explanation,
    FiniteRecorder,
    InputKinds,
    NonFinite,
    NonFiniteOrigin,
    find_first,
    origin_here,
)
from megasdc.tensors.nested import map_in, tensors_in


@dataclass(frozen=True)
class KeptMicroBatch:
    """A micro-batch of the running step, by reference.

    Args:
        batch: inputs of the model, whose tensors are not copied; None: they have too many bytes.
        state: state of random generators when the forward pass began.
        versions: the tensors, each with its version when the forward pass began; None: it has none.
    """

    batch: Batch | None
    state: dict[str, Any]
    versions: tuple[tuple[Tensor, int | None], ...]

    @property
    def lacks(self) -> str | None:
        """Reason why the micro-batch cannot be recomputed; None: it can."""
        if self.batch is None:
            return "more bytes than nonfinite.keep_mib"
        if any(_version(tensor) != version for tensor, version in self.versions):
            return "the training has changed what the model was given in place"
        return None


class MicroBatches:
    """Keeps the micro-batches of a step, until the next one begins or ``clear``.

    Args:
        step: returns the number of the step that runs.
        most_bytes: largest number of bytes of the tensors that are kept.

    Attributes:
        kept: micro-batches of the step, by number.
        finite: recorder of NaN and Inf in numbers that the model returned, such as the loss, and in given gradients.
        losses: slots of the last results of one number from which gradients come, as a ``BatchReplayer`` numbers them.
        seen_losses: the same, numbered as ``finite`` numbers all results.
    """

    def __init__(self, model: nn.Module, device: torch.device, step: Callable[[], int], most_bytes: int) -> None:
        self._model, self._device, self._step, self._most_bytes = model, device, step, most_bytes
        self.kept: list[KeptMicroBatch] = []
        self.finite = FiniteRecorder()
        self.losses: frozenset[str] = frozenset()
        self.seen_losses: frozenset[str] = frozenset()
        self._of_step, self._bytes = 0, 0
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]

    def close(self) -> None:
        """Remove the hooks on forward passes, and forget what was kept."""
        self.clear()
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Forget all micro-batches and what was seen of them."""
        self.kept, self._bytes, self.finite = [], 0, FiniteRecorder()

    def _trains(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._trains():
            return
        if self._of_step != (step := self._step()):
            self._of_step = step
            self.clear()
        tensors: list[Tensor] = []

        def reference(tensor: Tensor) -> SentTensor:
            tensors.append(tensor.detach())
            return SentTensor(tensors[-1], tensor.requires_grad, tensor.device.type == "cpu")

        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        batch = Batch(map_in(Tensor, args, reference), map_in(Tensor, options, reference), autocast, {})
        size = sum(one.numel() * one.element_size() for one in tensors)
        if self._bytes + size > self._most_bytes:
            self.kept.append(KeptMicroBatch(None, {}, ()))
            return
        self._bytes += size
        self.kept.append(KeptMicroBatch(batch, capture_rng(), tuple((one, _version(one)) for one in tensors)))

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._trains():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        found = [loss] if isinstance(loss, Tensor) else list(tensors_in(output))
        self.losses = _losses([one for one in found if one.requires_grad])
        self.seen_losses = _losses(found)
        for number, tensor in enumerate(found):
            place = partial(Address, self._of_step, len(self.kept) - 1, fqn=ROOT, slot=slot_of("output", number))
            if tensor.numel() == 1:
                self.finite(place(phase=FORWARD), tensor)
            elif tensor.requires_grad:
                tensor.register_hook(partial(self._check, self.finite, place(phase=BACKWARD)))

    @staticmethod
    def _check(finite: FiniteRecorder, address: Address, gradient: Tensor) -> None:
        finite(address, gradient)


def _losses(results: Sequence[Tensor]) -> frozenset[str]:
    places = [number for number, one in enumerate(results) if one.numel() == 1 and one.requires_grad]
    return frozenset(slot_of("output", number) for number in places)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


logger = logging.getLogger(__name__)

MIB = 1 << 20
KIND = ("rank", "host", "fqn", "phase", "slot", "value", "reproduced")
"""Fields of a finding that are equal where people are warned only once."""
IGNORED = -100
"""Label that PyTorch's cross entropy does not count."""
GIVEN = "it is the gradient that the model was given, of a loss that the training's loop computes, or a later stage"
LOSS = (
    "it is the loss, computed from finite results of the submodules that are watched: look at the labels of the "
    "micro-batch, and its mean"
)
CHOSEN = "; audit.submodules is set, and can name more of them"
SEEN = "it is the loss, and nobody looked at results of submodules then"
NO_LABEL = f"it is the loss, a mean over nothing: all labels of the micro-batch are {IGNORED}, which do not count"
EMPTY = "it is the loss, a mean over nothing: the labels of the micro-batch are empty"
HIDDEN = "; the log of Trainer shows no loss that is not finite, since logging_nan_inf_filter leaves it out"


class GuardNonFinite(Protection):
    """Part of a guard that looks for NaN and Inf before each optimizer step; it only reports them."""

    name = "NaN and Inf"

    def __init__(self, training: Training) -> None:
        engine, watched, settings = training.engine, training.watched, training.settings.nonfinite
        self._training, self._engine, self._watched, self._dims = training, engine, watched, training.dims
        self._left = settings.searches
        self._warnings = Warnings()
        self._order = [*(one.fqn for one in watched), ROOT]
        self._finite, self._inputs = FiniteRecorder(), InputKinds()
        recorder = ResultRecorder(engine.module, watched, training.algorithm)
        recorder.listener = self._finite
        off = "nonfinite.enabled: got true", "false"
        self._probe = BatchReplayer(engine.module, engine.device, recorder, 0, lambda: None, off)
        self._batches = MicroBatches(engine.module, engine.device, lambda: training.step, settings.keep_mib * MIB)
        chosen = training.settings.audit.submodules is not None
        self._meanings = Meanings(self._batches, chosen=chosen, hides=training.hides_losses)

    def close(self) -> None:
        """Remove all hooks, and report repeats."""
        self._warnings.log_repeats()
        self._batches.close()
        self._probe.close()

    def before_step(self, step: int) -> Iterable[Finding]:
        """Look at loss and gradients, and search if they are not finite.

        Collective: all ranks of the world; one reduction of two numbers.
        Sync: waits for the device, as the optimizer does for the norm.
        """
        seen = self._batches.finite.pop_first(self._dims)
        flags = torch.tensor([0.0, float(seen is not None)], device=self._engine.device)
        flags[0] = own = _norm_is_bad(self._engine)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        bad_norm, bad_result = (bool(one) for one in flags.tolist())
        if bad_result or (bad_norm and not self._scale_explains_it()):
            self._search(step, seen, bool(own))
        self._batches.clear()
        return ()

    def _scale_explains_it(self) -> bool:
        """Whether gradients may be Inf by a loss scale that has not adapted yet."""
        engine = self._engine
        if not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
            return False
        return float(engine.optimizer.loss_scale) > FP16_SCALE

    def _search(self, step: int, seen: NonFinite | None, bad_gradients: bool) -> None:
        if self._left == 0:
            return
        self._left -= 1
        before, count = None if seen is None else self._origin_of(seen), len(self._batches.kept)
        found, lacks = find_first(self._training, before, count, partial(self._recompute, step), self._order)
        if found.origin is not None and not found.reproduced and found.origin.found.address.phase == BACKWARD:
            found = replace(found, reproduced=None)  # a gradient that the model was given: nobody computed it again
        bad = gather_objects(bad_gradients, self._training.host_group)
        found = replace(found, gradients_of=tuple(rank for rank, one in enumerate(bad) if one))
        meaning = None if found.origin is None else found.origin.meaning
        fields = {**found.fields, "meaning": meaning, "not_recomputed": lacks}
        self._training.events.emit_on_rank_0(EVENT_KIND, "first", step=step, **fields)
        if self._dims.rank == 0:
            self._warnings.warn(step, found, lacks)
            if self._left == 0:
                self._warnings.log_repeats()
                logger.warning("NaN and Inf of later steps are not searched for: nonfinite.searches is reached")

    def _origin_of(self, seen: NonFinite) -> NonFiniteOrigin:
        given = seen.address.phase == BACKWARD  # such a result is an input
        origin = origin_here(seen, False if given else None, self._parameters(ROOT), inputs_read=False)
        return replace(origin, meaning=self._meanings.of(seen.address, recomputed=False))

    def _recompute(self, step: int, number: int) -> tuple[NonFiniteOrigin | None, str | None]:
        """First result of a micro-batch that is not finite, and the reason why it could not be computed to the end."""
        kept = self._batches.kept
        lacks = kept[number].lacks if number < len(kept) else "no forward pass was seen"
        of_ranks = gather_objects(lacks, self._training.host_group)
        if self._dims.tensor > 1:  # tensor ranks compute together, or not at all
            lacks = next(filter(None, of_ranks), None)
        return (None, lacks) if lacks is not None else self._recompute_here(step, number)

    def _recompute_here(self, step: int, number: int) -> tuple[NonFiniteOrigin | None, str | None]:
        kept, problem = self._batches.kept[number], None
        assert kept.batch is not None, "it lacks nothing"
        self._inputs.clear()
        with self._inputs.watch_inputs(self._watched):
            try:
                self._probe.compute(kept.batch, step, kept.state)
            except (ConfigError, RuntimeError) as error:  # training goes on
                problem = str(error).splitlines()[-1].strip()
        found = self._finite.pop_first(self._dims)
        if found is None:
            return None, problem
        time = int(found.address.slot.partition("#")[2] or 1) - 1
        origin = origin_here(
            *(found, self._inputs.finite(found.address, time), self._parameters(found.address.fqn)), inputs_read=True
        )
        address = replace(found.address, micro_batch=number)
        meaning = self._meanings.of(address, recomputed=True)
        return replace(origin, found=replace(found, address=address), meaning=meaning), problem

    def _parameters(self, fqn: str) -> list[Tensor]:
        model = self._engine.module
        return [one.detach() for one in (model if fqn == ROOT else model.get_submodule(fqn)).parameters()]


class Meanings:
    """Sentences that say what a result of the whole model is, equal for all results of a kind.

    Args:
        batches: micro-batches of the step.
        chosen: whether the settings name the submodules that are watched.
        hides: whether the log of the training leaves out losses that are not finite.
    """

    def __init__(self, batches: MicroBatches, *, chosen: bool, hides: bool) -> None:
        self._batches = batches
        self._of_loss = LOSS + (CHOSEN if chosen else "")
        self._end = HIDDEN if hides else ""

    def of(self, address: Address, *, recomputed: bool) -> str | None:
        """Sentence on a result; None: it is of a submodule, or no loss.

        Args:
            recomputed: whether the result was seen when the micro-batch was recomputed, not in training.

        Sync: waits for the device where it is the loss.
        """
        if address.fqn != ROOT or address.phase not in (FORWARD, BACKWARD):
            return None
        if address.phase == BACKWARD:
            return GIVEN + self._end
        losses = self._batches.losses if recomputed else self._batches.seen_losses
        if address.slot not in losses or address.micro_batch is None:
            return None
        batch = self._batches.kept[address.micro_batch].batch
        sent = None if batch is None else batch.options.get("labels")
        labels = sent.value if isinstance(sent, SentTensor) else None
        said = self._of_loss if recomputed else SEEN
        if labels is not None and labels.numel() == 0:
            said = EMPTY
        elif labels is not None and not labels.is_floating_point() and bool((labels == IGNORED).all()):
            said = NO_LABEL
        return said + self._end


@dataclass
class _LoggedWarning:
    """A warning: its text, the number of further steps in which it came again, and the last of these."""

    text: str
    times: int
    last: int


class Warnings:
    """Log warnings of findings: each once, then the number of its repeats, at the latest when Python ends."""

    def __init__(self) -> None:
        self._told: dict[tuple[Any, ...], _LoggedWarning] = {}
        weakref.finalize(self, _log_repeats, self._told)

    def warn(self, step: int, found: Explanation, lacks: Sequence[str]) -> None:
        """Warn of a finding unless it was reported already, on any rank for a loss that is so whenever computed."""
        meaning = None if found.origin is None else found.origin.meaning
        of_data = meaning is not None and found.reproduced is True
        kind = (meaning,) if of_data else (meaning, *(found.fields[name] for name in KIND))
        if (told := self._told.get(kind)) is not None:
            told.times, told.last = told.times + 1, step
            return
        text = found.text
        if found.origin is None and found.reproduced is None:
            text = f"{found.gradients} are NaN or Inf, and no micro-batch could be computed again"
        whole = "; ".join(filter(None, (text, meaning, *lacks)))
        self._told[kind] = _LoggedWarning(meaning if meaning is not None and of_data else f"first, {whole}", 0, step)
        logger.warning("step %d: %s", step, whole)

    def log_repeats(self) -> None:
        """Log once how often each warning has come again."""
        _log_repeats(self._told)


def _log_repeats(told: dict[tuple[Any, ...], _LoggedWarning]) -> None:
    for one in told.values():
        if one.times:
            logger.warning("NaN or Inf again in %d more steps, the last is step %d: %s", one.times, one.last, one.text)
            one.times = 0


def _norm_is_bad(engine: Any) -> Tensor:
    """Whether the norm of the gradients that this rank's optimizer is about to use is not finite, [] of 0 and 1."""
    optimizer = engine.optimizer
    if getattr(optimizer, "cpu_offload", False):
        return torch.tensor(float(optimizer.local_overflow), device=engine.device)
    if is_bf16_optimizer(optimizer):
        found = list(optimizer.fp32_groups_gradient_flat_partition)
    elif hasattr(optimizer, "averaged_gradients"):
        found = [one for group in optimizer.averaged_gradients.values() for one in group or ()]
    else:
        found = [one.grad for one in engine.module.parameters() if one.grad is not None]
    plain = [(one.coalesce().values() if one.is_sparse else one).detach() for one in found]
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in plain if one.dtype == torch.float16]
    if others := [one for one in plain if one.dtype != torch.float16]:
        norms.append(torch.nn.utils.get_total_norm(others).float())
    if not norms:
        return torch.zeros((), device=engine.device)
    return (~torch.stack([one.to(engine.device) for one in norms]).isfinite()).any().float()
