"""The referee of a guarded training: PyTorch's own submodules by what they compute, others by their own code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megasdc.attached.probe import Probe
from megasdc.attached.record import ROOT
from megasdc.common.addresses import WEIGHT_GRAD, Address
from megasdc.sdc.audits.referee import Make, Referee, Subject
from megasdc.sdc.exhibits.calls import Call, Exhibit
from megasdc.sdc.exhibits.own import HOOKS, own_result, result_between
from megasdc.sdc.exhibits.plain import is_plain, make_plain, tied_words

CONTAINERS = nn.ModuleList, nn.ModuleDict
"""Which compute nothing."""


def build_referee(model: Any, probe: Probe, rank: int, group: dist.ProcessGroup | None) -> Referee:
    """The referee of a model that a probe computes.

    Args:
        group: of all ranks, on the host.
    """
    modules = dict(model.named_modules())
    hooked = {fqn for fqn, module in modules.items() if _has_hooks(module)}

    def uses(name: str) -> int:
        return probe.uses.get(name, 0)

    return Referee(partial(subject_of, modules, hooked, uses), rank, group)


def subject_of(
    modules: Mapping[str, nn.Module], hooked: Collection[str], uses: Callable[[str], int], fqn: str
) -> Subject | None:
    """A submodule, as the referee judges it: by what it is known to compute, by its own code, and, where what it was
    given differs already, by the code of what is around it, from the inside out.

    Args:
        modules: of a model by full name; of itself: the empty one.
        hooked: those that had hooks of their own when a guard was attached, and may compute something else than their
            class: they are judged by their own code alone, which is not trusted where others agree on other results.
        uses: of parameters, by full name: how many operations have used it.
    """
    names = [] if fqn == ROOT else fqn.split(".")
    own = modules.get(".".join(names))
    if own is None:
        return None
    around = {".".join(names[:end]): names[end:] for end in range(len(names) - 1, -1, -1)}
    paths = {name: path for name, path in around.items() if not isinstance(modules[name], CONTAINERS)}
    outer = [modules[name] for name in paths]
    shared = _shares(modules, own)
    kept = [own, *outer, *([] if shared is None else [modules[shared]])]

    def once(address: Address) -> bool:
        return address.phase != WEIGHT_GRAD or uses(f"{address.fqn}.{address.slot}") == 1

    def plain(address: Address, calls: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str | None:
        if fqn in hooked:  # perhaps on this rank alone: all ranks show the same kinds of exhibits one after the other
            return "it has hooks of its own"
        return make_plain(address, calls[0], result, once(address)) if is_plain(own) else None

    def tied(address: Address, calls: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str | None:
        of_both = address.phase == WEIGHT_GRAD and uses(f"{address.fqn}.{address.slot}") == 2
        return tied_words(calls[0], calls[-1], result) if of_both and not {fqn, shared} & {*hooked} else None

    def by_code(address: Address, calls: Sequence[Sequence[Call]], result: Tensor) -> Exhibit | str:
        return own_result(address, calls[0], result, once(address))

    def between(place: int, address: Address, calls: Sequence[Sequence[Call]], _: Tensor) -> Exhibit | str:
        return result_between(address, calls[1 + place], calls[0], list(paths.values())[place])

    makes: list[Make] = [tied] if shared is not None else []
    return Subject(kept, [*makes, plain, by_code, *(partial(between, place) for place in range(len(outer)))])


def _has_hooks(module: Any) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def _shares(modules: Mapping[str, nn.Module], own: nn.Module) -> str | None:
    """The name of the other submodule that has the weight of one; None: there is none, or there are several."""
    weight = own._parameters.get("weight")
    found = [name for name, one in modules.items() if one is not own and one._parameters.get("weight") is weight]
    return found[0] if weight is not None and len(found) == 1 else None
