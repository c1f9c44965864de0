"""Does the injector fire where, when and how often it should, and does it tell exactly what it did?"""

import numpy as np
import pytest
import torch

from megasdc.common.addresses import Address
from megasdc.common.errors import ConfigError
from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import Injector, unsigned_bits
from megasdc.parallel.dims import ParallelDims

DIMS = ParallelDims(2, 2, 2, rank=3)  # tensor rank 1, replica 1, stage 0
FQN = "2.layer.mlp.linear_fc1"


def injector(*specs, dims=DIMS, **options):
    return Injector([FaultSpec.model_validate(spec) for spec in specs], dims, 64, **options)


def at(step=1, micro_batch=0, phase="forward", fqn=FQN, slot="output"):
    return Address(step, micro_batch, phase, fqn, slot)


def fired(one, steps=range(1, 11), micro_batches=(0, 1), **address):
    """(step, micro_batch) at which an injector changes a result."""
    result = torch.ones(4, 8)
    return [(s, m) for s in steps for m in micro_batches if one(at(s, m, **address), result) is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_firing_tells_exactly_what_changed(dtype):
    """The result is left alone; the copy has its strides and differs at the stated elements in the stated bits."""
    result = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype).T
    before = result.clone()
    one = injector({"elements": 7, "bits": "mantissa", "num_bits": 2})
    harmed = one(at(), result)
    assert torch.equal(result, before) and harmed.stride() == result.stride()
    (firing,) = one.firings
    kind = np.uint16 if dtype.itemsize == 2 else np.uint32
    old, new = (np.frombuffer(bytes(x.flatten().view(torch.uint8).numpy()), kind) for x in (before, harmed))
    assert tuple(np.flatnonzero(old != new)) == firing.indices
    assert firing.elements == firing.changed == 7
    assert tuple(old[list(firing.indices)]) == firing.bits_before
    assert tuple(new[list(firing.indices)]) == firing.bits_after
    assert firing.after == tuple(harmed.flatten()[list(firing.indices)].tolist())
    assert (firing.address, firing.rank, firing.dtype, firing.shape) == (at(), 3, str(dtype)[6:], (5, 6))


@pytest.mark.parametrize("result", [torch.tensor(1.0), torch.ones(1, 1).expand(3, 4)], ids=["0-d", "expanded"])
def test_odd_shapes(result):
    """One element of a scalar or of a tensor whose elements share memory is harmed alone."""
    harmed = injector({"kind": "value", "value": 2.0})(at(), result)
    assert harmed.shape == result.shape and (harmed == 2.0).sum() == 1 and (result == 1.0).all()


def test_where():
    """Only the stated phase, submodule, slot, place, steps and micro-batches are harmed."""
    everywhere = [(step, m) for step in range(1, 11) for m in (0, 1)]
    assert fired(injector({})) == everywhere
    assert fired(injector({"steps": [3, 4], "micro_batches": [1]})) == [(3, 1), (4, 1)]
    assert fired(injector({"steps": [9, None]})) == [(9, 0), (9, 1), (10, 0), (10, 1)]
    for fits in (
        {"submodule": "*.linear_fc1"},
        {"slot": "out*"},
        {"rank": 3, "replica": 1, "stage": 0, "tensor_rank": 1},
        {"host": "node?"},
        {"min_hidden_size": 64},
    ):
        assert fired(injector(fits, host="node7")) == everywhere, fits
    for misses in (
        {"submodule": "*.linear_fc2"},
        {"phase": "recompute"},
        {"slot": "input"},
        {"rank": 2},
        {"replica": 0},
        {"stage": 1},
        {"tensor_rank": 0},
        {"host": "node8"},
        {"min_hidden_size": 65},
    ):
        assert fired(injector(misses, host="node7")) == [], misses


def test_probability():
    """The share of firings is the stated one, and which they are depends on seed, spec and rank."""
    steps = range(1, 2001)
    hits = fired(injector({"probability": 0.1}), steps)
    assert abs(len(hits) - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5
    assert fired(injector({"probability": 0.1}), steps) == hits
    assert fired(injector({"probability": 0.1, "seed": 1}), steps) != hits
    assert fired(injector({"probability": 0.1}, dims=ParallelDims(2, 2, 2, rank=2)), steps) != hits
    assert fired(injector({"probability": 0.1, "submodule": "2*"}, {"probability": 0.0}), steps) == hits
    assert fired(injector({"probability": 0.0})) == []


def test_bursts():
    """Steps that fire come in runs of the burst's length; the share is 1 - (1 - p)^length."""
    steps = sorted({step for step, _ in fired(injector({"burst": {"length": 5, "probability": 0.02}}), range(1, 5001))})
    runs = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    assert all(len(run) >= 5 for run in runs)
    assert abs(len(steps) / 5000 - (1 - 0.98**5)) < 0.03
    part = fired(injector({"burst": {"length": 5, "probability": 0.02}, "probability": 0.5}), range(1, 5001))
    assert {step for step, _ in part} <= set(steps) and 0.45 < len(part) / (2 * len(steps)) < 0.55


def test_once_also_after_a_resume():
    """Once fires at the first change only; its state keeps it from firing again; another spec starts anew."""
    spec = {"once": True, "steps": [3, None], "probability": 0.5}
    first = injector(spec)
    (hit,) = fired(first)
    again = injector(spec)
    again.load_state_dict(first.state_dict())
    assert fired(again) == []
    other = injector({**spec, "seed": 5})
    other.load_state_dict(first.state_dict())
    assert len(fired(other)) == 1
    assert fired(injector(spec), range(hit[0] + 1, 30)) != []


def test_once_waits_for_a_change():
    """A bit that is stuck where it was anyway does not use up the one firing, and is told as no change."""
    one = injector({"once": True, "kind": "stuck_at_0", "bits": [31]})  # 1.0 has no sign
    assert fired(one) == [] and [firing.changed for firing in one.firings] == [0] * 20
    assert one(at(11), -torch.ones(4)) is not None
    assert one(at(12), -torch.ones(4)) is None


def test_the_same_again():
    """Every draw repeats in a new injector that begins anywhere; work that is repeated in a step draws anew."""
    spec = {"elements": 3, "bits": "any"}
    result = torch.ones(1000)
    long, short = injector(spec), injector(spec)
    for step in range(1, 6):
        long(at(step), result)
    short(at(5), result)
    assert short.firings == long.firings[-1:]
    assert len({firing.indices for firing in long.firings}) == 5
    short(at(5), result)
    assert short.firings[0].indices != short.firings[1].indices


def test_same_elements():
    """A persistent fault harms the same elements and bits in all steps, and in recompute what it harms in forward."""
    spec = {"elements": 3, "same_elements": True, "seed": 8}
    one = injector(spec, {**spec, "phase": "recompute"})
    result = torch.ones(1000)
    for step in (1, 2):
        one(at(step), result)
        one(at(step, phase="recompute"), result)
    assert len({(firing.indices, firing.bits_after) for firing in one.firings}) == 1 and len(one.firings) == 4
    one(at(3, fqn="3.layer.mlp.linear_fc1"), result)
    assert one.firings[-1].indices != one.firings[0].indices


def test_two_specs_on_one_result():
    """Both fire, the second on what the first left."""
    flip = {"bits": [22], "pattern": "indices", "indices": [2]}
    one = injector(flip, flip)
    assert torch.equal(one(at(), torch.ones(4)), torch.ones(4))
    assert one.firings[1].bits_before == one.firings[0].bits_after


def test_bits_are_told_unsigned():
    """The sign bit is the highest bit of what a firing tells."""
    assert unsigned_bits(torch.tensor([-0.0, 1.0])) == (0x80000000, 0x3F800000)
    assert unsigned_bits(torch.tensor([-1.0], dtype=torch.bfloat16)) == (0xBF80,)


def test_bits_that_the_type_lacks_do_not_fire():
    """Bit 31 in a 16-bit tensor changes nothing, and the reason is kept."""
    one = injector({"bits": [31]})
    assert one(at(), torch.ones(3, dtype=torch.bfloat16)) is None
    assert "bits 0 to 15" in next(iter(one.tallies[0].reasons))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rank": 8}, "faults.0.rank: got 8, but there are 8"),
        ({"kind": "scale", "factor": 2, "bits": [3]}, "faults.0.bits: is read with kind bit_flip"),
        ({"profile": "node_1"}, "expand profiles first"),
    ],
)
def test_bad_specs(spec, message):
    """What contradicts itself or the layout is refused before anything runs."""
    with pytest.raises(ConfigError, match=message):
        injector(spec)
