"""Does computing a batch for an audit leave everything that submodules keep as it was, bit by bit?"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megasdc.attached.attributes import preserve_attributes
from megasdc.attached.batch_replayer import Batch, BatchReplayer, SentTensor
from megasdc.attached.record import ResultRecorder, choose_watched
from megasdc.common.errors import ConfigError
from megasdc.tensors.checksum import default_algorithm

CPU = torch.device("cpu")


class _Slots:
    """A state without a ``__dict__``."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class _Keeps(nn.Module):
    """Keeps whatever a submodule may keep, and computes with it."""

    of_all: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("ages", torch.zeros(8), persistent=False)
        self.running, self.grown = torch.zeros(8), torch.zeros(2)
        self.calls, self.losses, self.recent = 0, list[Tensor](), deque[float](maxlen=3)
        self.by_name: dict[str, Any] = defaultdict(int)
        self.ordered = OrderedDict(a=1, b=2)
        self.seen, self.pair = {0}, (torch.zeros(2), [0])
        self.cache, self.slots = SimpleNamespace(layers=[SimpleNamespace(keys=None)]), _Slots()
        self.array, self.turns = np.zeros(3), itertools.count()
        self.own, self.python, self.numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.aside = [nn.BatchNorm1d(8)]  # which is no submodule

    def forward(self, given: Tensor) -> Tensor:
        """Changes all of it."""
        self.calls += 1
        type(self).of_all += 1
        self.turn = next(self.turns)
        found = self.aside[0](self.norm(self.layer(given)))
        self.largest = self.largest.maximum(found.detach().abs().max())
        self.ages.add_(1)
        self.running.data.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        self.grown = torch.cat((self.grown, self.running[:1]))
        self.losses.append(found.mean())
        self.recent.append(float(self.largest))
        self.by_name["calls"] += 1
        self.ordered.move_to_end("a")
        self.seen.add(self.calls)
        self.pair[0].add_(1)
        self.pair[1][0] += 1
        keys = self.cache.layers[0].keys
        self.cache.layers[0].keys = found.detach() if keys is None else torch.cat((keys, found.detach()))
        self.slots.calls += 1
        self.array += 1
        drawn = torch.rand(8, generator=self.own) + self.python.random() + float(self.numpy.random())
        return found + self.calls * drawn + random.random() + float(np.random.rand()) + torch.rand(8) + self.turn


def _values(value: Any, seen: set[int] | None = None) -> Any:
    """What a module and all in it hold, as plain values; written without the code under test."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().clone().contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return _values(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, dict):
        return [(key, _values(one, seen)) for key, one in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [_values(one, seen) for one in value]
    if isinstance(value, _Slots):
        return value.calls
    if isinstance(value, (nn.Module, SimpleNamespace)):
        return [] if id(value) in seen else (seen.add(id(value)), _values(vars(value), seen))
    return repr(value)


def _probe(model: nn.Module) -> tuple[BatchReplayer, Batch]:
    recorder = ResultRecorder(model, choose_watched(model, None), default_algorithm(CPU))
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return BatchReplayer(model, CPU, recorder, 7, lambda: None), Batch((SentTensor(given, False, True),), {}, None, {})


def _train(model: nn.Module, between: Callable[[], object]) -> list[bytes]:
    """Some steps, and what was computed in each; ``between``: what happens before the optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    results = []
    for step in range(4):
        result = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        result.square().mean().backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        results.append(result.detach().numpy().tobytes())
    return results


def _model() -> _Keeps:
    torch.manual_seed(2)
    _Keeps.of_all = 0
    return _Keeps()


def test_a_training_ends_as_one_without_audits() -> None:
    """Results of each step, and all that is kept at the end."""
    bare = _model()
    wanted, left, of_all = _train(bare, lambda: None), _values(bare), _Keeps.of_all
    guarded = _model()
    probe, batch = _probe(guarded)
    traces = []
    found = _train(guarded, lambda: traces.append(probe.compute(batch, 1)))
    probe.close()
    assert found == wanted and _values(guarded) == left and of_all == _Keeps.of_all
    assert len(traces[0]) > 4


def test_repeats_of_an_audit_are_alike() -> None:
    """A batch that is computed again finds what the first one found."""
    probe, batch = _probe(_model())
    first, again = (probe.compute(batch, 1).checksums for _ in range(2))
    assert first == again


def test_what_raises_leaves_it_as_it_was() -> None:
    """So that an audit that cannot be made has changed nothing."""
    model = _model()
    model(torch.randn(4, 8))
    probe, _ = _probe(model)
    wide = Batch((SentTensor(torch.randn(4, 8, 8), False, True),), {}, None, {})
    model.layer.forward = lambda given: given  # type: ignore[method-assign]
    before = _values(model)
    with pytest.raises(Exception, match="broadcast"):
        probe.compute(wide, 1)
    assert _values(model) == before


def test_a_generator_is_not_moved_on() -> None:
    """Nobody can put it back: the audit says which submodule has it, unless it is not used."""

    class _Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.uses = nn.Linear(8, 8), True
            self.draws: Iterator[float] = (float(number) for number in range(99))

        def forward(self, given: Tensor) -> Tensor:
            return self.layer(given) * (next(self.draws) if self.uses else 1.0)

    model = nn.Sequential(_Draws())
    probe, batch = _probe(model)
    with pytest.raises(ConfigError, match=r"audit.enabled: got true, and submodule 0 uses .* draws, a generator"):
        probe.compute(batch, 1)
    assert next(model[0].draws) == 0.0
    model[0].uses = False
    assert len(probe.compute(batch, 1)) and next(model[0].draws) == 1.0


def test_what_is_kept_stays_the_same_object() -> None:
    """Others may have it, too; and what nothing has changed is not written to."""
    model = _model()
    running, cache, version = model.running, model.cache.layers, model.layer.weight._version
    model.others = model.forward_only = iter([1, 2])  # which the training moves on, too
    others = model.others
    untouched = model.aside[0].weight.data
    with preserve_attributes(model):
        model(torch.randn(4, 8))
        model.running, model.cache = torch.ones(3), None
        running.resize_(99).fill_(2)
    assert model.running is running and model.cache.layers is cache and model.cache.layers[0].keys is None
    assert running.tolist() == [0.0] * 8 and model.others is model.forward_only is others
    assert (model.layer.weight._version, untouched._version) == (version, untouched._version)
