"""The referee of a run: its submodules are Megatron-core's, and those that are no modules lie between two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.engine.run import Run
from megasdc.model.kinds import LOSS
from megasdc.model.submodules import Submodule, list_submodules
from megasdc.sdc.audits.referee import Referee, Subject
from megasdc.sdc.exhibits.calls import Call, Exhibit
from megasdc.sdc.exhibits.make import BETWEEN, make_exhibit


def build_referee(run: Run) -> Referee:
    """The referee of a run's stage."""
    submodules = {one.fqn: one for one in list_submodules(run.engine.module)}
    loss = run.engine.module.loss_fn

    def subject_of(fqn: str) -> Subject | None:
        submodule = submodules.get(fqn)
        if submodule is None:
            return None
        kind = submodule.kind

        def make(address: Address, kept: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | None:
            calls, after = kept
            return make_exhibit(address, kind, calls, result, after)

        return Subject(_modules_of(submodule, list(submodules.values()), loss), [make])

    return Referee(subject_of, run.dims.rank, run.host_group)


def _modules_of(submodule: Submodule, all_of_them: Sequence[Submodule], loss: Any) -> tuple[Any, Any]:
    """Where the calls of a submodule are seen; of one that is no module, those before and after it."""
    if submodule.kind == LOSS:
        return loss, None
    if submodule.kind not in BETWEEN:
        return submodule.module, None
    block = {one.kind: one.module for one in all_of_them if one.layer == submodule.layer}
    before, after = BETWEEN[submodule.kind]
    return block.get(before), block.get(after)
