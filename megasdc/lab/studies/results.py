"""Computation synchronization: each submodule's result is compared with the trusted replica's and replaced by it.

Since a submodule's inputs were replaced before, every mismatch is its own. A submodule that no pattern names is not
compared: its errors propagate to the next one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD, Address
from megasdc.config.sections.study import PAPER_BACKWARD, PAPER_FORWARD, StudySection
from megasdc.lab.studies.bridge import Bridge
from megasdc.lab.studies.compare import compare_results

Tell = Callable[..., None]
"""Writes a line: (kind, step, **fields)."""
_ALWAYS = (WEIGHT_GRAD, REDUCED_GRAD, UPDATE, PARAMETER)
"""Phases compared for every submodule, so that no error enters the weights of the next step."""


class ResultSync:
    """A listener of ``engine.observer.Observer``, to be called after fault injection.

    Args:
        section: patterns, samples.
        bridge: to the other replicas.
        tell: receives every mismatch and, by ``flush``, the numbers compared; not called on the trusted replica.
    """

    def __init__(self, section: StudySection, bridge: Bridge, tell: Tell) -> None:
        self._bridge = bridge
        self._tell = tell
        self._num_samples = section.sampled_elements
        own = section.submodules
        forward = tuple(own) if own else PAPER_FORWARD
        self._patterns = {
            FORWARD: forward,
            RECOMPUTE: forward,
            BACKWARD: tuple(own) if own else PAPER_BACKWARD,
            **dict.fromkeys(_ALWAYS, ("*",)),
        }
        self._wanted: dict[tuple[str, str], bool] = {}
        self._compared: dict[tuple[str, str, str], list[int]] = {}
        self._first_step: int | None = None

    def __call__(self, address: Address, result: Tensor) -> Tensor | None:
        """Compares one result, of any shape and not modified, if a pattern names its submodule.

        Returns:
            The trusted replica's result with the strides of ``result``; None: not compared, equal in every bit, or
            this is the trusted replica.

        Collective: the ranks of equal rank in all replicas.
        Sync: waits for the device.
        """
        if not self._wants(address.phase, address.fqn):
            return None
        healthy = self._bridge.share(result, str(address))
        if self._bridge.is_trusted:
            return None
        self._count(address, result)
        found = compare_results(healthy, result, self._num_samples)
        if found is None:
            return None
        self._tell(
            "mismatch",
            address.step,
            micro_batch=address.micro_batch,
            fqn=address.fqn,
            phase=address.phase,
            slot=address.slot,
            dtype=str(result.dtype).removeprefix("torch."),
            shape=list(result.shape),
            **found.fields(),
        )
        answer = result.detach().clone()
        answer.copy_(healthy)
        return answer

    def flush(self, step: int) -> None:
        """Logs the numbers of results compared since the last flush, at the last step."""
        for (fqn, phase, slot), (results, elements) in self._compared.items():
            steps = step + 1 - (self._first_step or step)
            self._tell(
                "compared", step, steps=steps, fqn=fqn, phase=phase, slot=slot, results=results, elements=elements
            )
        self._compared.clear()
        self._first_step = None

    def _count(self, address: Address, result: Tensor) -> None:
        self._first_step = self._first_step or address.step
        counts = self._compared.setdefault((address.fqn, address.phase, address.slot), [0, 0])
        counts[0] += 1
        counts[1] += result.numel()

    def _wants(self, phase: str, fqn: str) -> bool:
        key = (phase, fqn)
        if key not in self._wanted:
            patterns = self._patterns.get(phase, ())
            self._wanted[key] = any(fnmatchcase(fqn, pattern) for pattern in patterns)
        return self._wanted[key]
