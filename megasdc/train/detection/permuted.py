"""Audits inside one device: the audited micro-batch once more, each operation with its elements in other places.

Each stage replays it alone, where it would wait for others (``megasdc.engine.stage_replay``). The first audit of a
start computes it after all micro-batches, and also tries every operation both ways on the real numbers. Where all ranks
that computed one get other bits, its kernel does not treat all places alike: it is computed as it is from then on, and
named. Where one rank alone computed it, that is said of differences as small as rounding, or in many elements. What
only some ranks see, or one rank in few elements, is no property of a kernel, and is left to the audit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch import Tensor

from megasdc.addresses import Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.run import Run
from megasdc.engine.stage_replay import StageReplay
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.permuted import Permuted, Signature, Trial, Tried, Unequal
from megasdc.train.detection.evidence import Rehearse

logger = logging.getLogger(__name__)

MANY = 0.1
"""Share of a result's elements that no single unit computes."""
ROUNDING = {"float32": 2.0**-16, "bfloat16": 2.0**-5, "float16": 2.0**-8}
"""Differences, as a share of the largest element, that another order of summation explains."""


class PermutedReplay:
    """Repeats micro-batches with the elements of all operations in other places.

    Args:
        run: whose ranks take part, and whose events tell what was tried.
        tracer: records what replays of a stage compute.
        clock: measures what those take.
    """

    def __init__(self, run: Run, tracer: Tracer, clock: AbstractContextManager[None]) -> None:
        self._events, self._dims = run.events, run.dims
        self._group: dist.ProcessGroup | None = run.host_group
        self._tracer, self._clock = tracer, clock
        self._without: Collection[Signature] | None = None

    def begin(self, engine: TrainingEngine) -> None:
        """A step that is audited begins: have its stages replay the micro-batch, where it is known what can be moved.

        What they compute comes to ``listen``.
        """
        if self._without is not None:
            engine.replay = StageReplay(0, self._moving)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        with self._clock, Permuted(self._without or ()):
            yield

    def listen(self, address: Address, result: Tensor) -> None:
        """A listener of replays."""
        with self._clock:
            self._tracer(address, result)

    def take(self, engine: TrainingEngine, rehearse: Rehearse) -> Trace:
        """The trace of the audited micro-batch with elements in other places; without a fault that of the audit.

        It was computed in the step, or is now.

        Collective: all ranks of the world.
        """
        if engine.replay is None:
            return self.replay(engine, rehearse)
        engine.replay = None
        return self._tracer.take()

    def replay(self, engine: TrainingEngine, rehearse: Rehearse) -> Trace:
        """Compute the micro-batch so once more, after all others.

        Collective: all ranks of the world.
        """
        if self._without is None:
            with Trial() as trial:
                rehearse(engine, 0)
            self._without = self._settle(engine.step_number, trial.tried)
        with Permuted(self._without):
            return rehearse(engine, 0)[0]

    def _settle(self, step: int, tried: Tried) -> Collection[Signature]:
        """Operations that no rank permutes from now on."""
        found: Sequence[Tried] = gather_objects(tried, self._group)
        without = places_matter(found)
        moved, left = Counter[str](), Counter[str]()
        for of_rank in found:
            left.update(of_rank.left)
            for (name, *_), count in of_rank.moved.items():
                moved[name] += count
        not_kept = {" ".join(signature): vars(one) for signature, one in without.items()}
        if self._dims.rank == 0:
            self._events.emit("audit", "permuted", step=step, moved=moved, left=left, not_kept=not_kept)
            logger.info("permuted replay: %d of %d operations move", moved.total(), moved.total() + left.total())
            for signature, one in without.items():
                logger.warning(
                    "permuted replay: %s is computed as it is: moved, %d of %d elements differ, by up to %.2g of the "
                    "largest",
                    " ".join(signature),
                    one.elements,
                    one.of,
                    one.largest,
                )
        return without


def places_matter(found: Sequence[Tried]) -> Mapping[Signature, Unequal]:
    """Operations whose kernels do not treat all places alike, from what each rank has tried."""
    unequal: dict[Signature, Unequal] = {}
    for of_rank in found:
        for signature, one in of_rank.unequal.items():
            total = unequal.setdefault(signature, Unequal())
            total.elements, total.of = total.elements + one.elements, total.of + one.of
            total.largest = max(total.largest, one.largest)
    return {
        signature: one
        for signature, one in unequal.items()
        if _is_of_kernel(signature, one, [of_rank for of_rank in found if signature in of_rank.moved])
    }


def _is_of_kernel(signature: Signature, total: Unequal, ran: Sequence[Tried]) -> bool:
    """Whether a difference is of the kernel, or of how it is moved here, and not of a device."""
    rounding = max(ROUNDING.get(text.partition("(")[0], 0.0) for text in signature)
    explained = len(ran) > 1 or total.largest <= rounding or total.elements > MANY * total.of
    return explained and all(signature in of_rank.unequal for of_rank in ran)
