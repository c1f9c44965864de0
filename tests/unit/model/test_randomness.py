"""Are dropout masks a function of seed, step, sample, layer and site alone?"""

from __future__ import annotations

import torch

from megasdc.model.gpt import ResidualAdd, hidden_masks
from megasdc.model.randomness import DropoutStreams, mix, seeded_build


def _masks(step: int, samples: tuple[int, ...], layer: int = 3, site: int = 1, seed: int = 7) -> torch.Tensor:
    streams = DropoutStreams(seed)
    streams.enter(step, samples)
    return streams.keep_masks((64, 32), 0.25, layer, site, torch.empty(0))


def test_masks_do_not_depend_on_the_micro_batch():
    """A sample has the same mask alone, in a batch, and when drawn again."""
    together = _masks(5, (0, 1, 2))
    assert all(torch.equal(together[i], _masks(5, (i,))[0]) for i in range(3))


def test_masks_differ_in_every_coordinate():
    """Another step, sample, layer, site or seed gives another mask."""
    reference = _masks(5, (0,))
    others = [
        _masks(6, (0,)),
        _masks(5, (1,)),
        _masks(5, (0,), layer=4),
        _masks(5, (0,), site=2),
        _masks(5, (0,), seed=8),
    ]
    assert not any(torch.equal(reference, other) for other in others)


def test_masks_keep_the_stated_share_and_mean():
    """About 1 - p is kept, scaled by 1 / (1 - p)."""
    mask = _masks(1, tuple(range(50)))
    kept = (mask > 0).float().mean()
    assert abs(float(kept) - 0.75) < 0.005
    assert torch.equal(mask[mask > 0].unique(), torch.tensor([1 / 0.75]))


def test_sequence_shards_are_parts_of_the_whole():
    """Tensor ranks with sequence parallelism apply the parts of one rank's mask."""
    streams = DropoutStreams(7)
    streams.enter(2, (4, 5))
    whole = hidden_masks(streams, torch.empty(8, 2, 16), 0.5, 3, 1, (0, 1))
    parts = [hidden_masks(streams, torch.empty(4, 2, 16), 0.5, 3, 1, (part, 2)) for part in range(2)]
    assert torch.equal(whole, torch.cat(parts))


def test_building_leaves_the_generator_alone():
    """Weights drawn in a seeded build repeat, and the global generator is as before."""
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded_build(1, 2):
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert torch.equal(before, torch.get_rng_state())


def test_mix_is_stable():
    """The hash is part of every run's meaning: SplitMix64's published first output for seed 0, halved, is pinned."""
    assert mix(0) == 0xE220A8397B1DCDAF >> 1
    assert mix(1, 2) != mix(2, 1)
    assert 0 <= mix(2**64, -1) < 2**63


def test_a_branch_is_added_to_its_residual():
    """With its bias where it has one; what is dropped leaves the residual alone."""
    add, x, residual = ResidualAdd().eval(), torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[10.0, 20.0]]])
    assert add(False, False)((x, None), residual, 0.5).tolist() == [[[11.0, 22.0]]]
    assert add(False, False)((x, torch.tensor([0.5, -0.5])), residual, 0.0).tolist() == [[[11.5, 21.5]]]
    add.train().streams = DropoutStreams(7)
    add.streams.enter(1, (0,))
    added = add(True, False)((torch.ones(400, 1, 8), None), torch.full((400, 1, 8), 10.0), 0.5)
    assert added.unique().tolist() == [10.0, 12.0]
