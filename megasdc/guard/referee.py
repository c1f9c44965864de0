"""The referee of a guarded training: it knows PyTorch's own submodules, whatever model they are in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megasdc.addresses import Address
from megasdc.guard.probe import Probe
from megasdc.sdc.audits.referee import Referee, Subject
from megasdc.sdc.exhibits.calls import Call, Exhibit
from megasdc.sdc.exhibits.plain import is_plain, make_plain


def build_referee(model: Any, probe: Probe, rank: int, group: dist.ProcessGroup | None) -> Referee:
    """The referee of a model that a probe computes.

    What has hooks of its own when the guard is attached is not judged: they may change what it computes.

    Args:
        group: of all ranks, on the host.
    """
    plain = {fqn: module for fqn, module in model.named_modules() if is_plain(module) and not _has_hooks(module)}

    def make(address: Address, calls: Sequence[Call], result: Tensor, _: Collection[Call]) -> Exhibit | None:
        return make_plain(address, calls, result, probe.used_once)

    def subject_of(fqn: str) -> Subject | None:
        module = plain.get(fqn)
        return None if module is None else Subject(module, make)

    return Referee(subject_of, rank, group)


def _has_hooks(module: Any) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)
