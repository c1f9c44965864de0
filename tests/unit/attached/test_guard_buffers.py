"""Are buffers that should be alike compared, and is no rank's taken for the right one?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

from megasdc.attached.audit import StillBuffers
from megasdc.attached.copies import judge_copies
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.referee.referee import judge_exhibits
from megasdc.sdc.verdict import RankVerdict
from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import default_algorithm
from tools.trainings.pair import Side, build_model, draw_batch

STEP = 4


class _Model(nn.Module):
    """Statistics, and a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rotary = nn.BatchNorm1d(4), nn.Module()
        self.rotary.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)
        self.rotary.register_buffer("scale", torch.ones(()), persistent=False)


class _Replicas:
    """Ranks of one group, a thread each."""

    def __init__(self, count: int) -> None:
        self.models, self._meet, self._sent = [_Model() for _ in range(count)], Barrier(count), [None] * count
        self.buffers: list[StillBuffers] = self.each(
            lambda rank: StillBuffers(self.models[rank], default_algorithm(torch.device("cpu")), self._gather_of(rank))
        )

    def _gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._sent[rank] = value
            self._meet.wait(60)
            found = list(self._sent)
            self._meet.wait(60)
            return found

        return gather

    def each(self, body: Callable[[int], Any]) -> list[Any]:
        """What each rank returns."""
        with ThreadPoolExecutor(len(self._sent)) as pool:
            return list(pool.map(body, range(len(self._sent))))

    def compare(self) -> tuple[list[str], tuple[RankVerdict, ...], bool]:
        """Names of those that differ, the rulings, and whether anything had to be looked at."""
        seen = [one.read() for one in self.buffers]
        asked = len({checksum for checksum, _ in seen}) > 1 or any(moved for _, moved in seen)
        if not asked:
            return [], (), False
        [names, *others] = self.each(lambda rank: self.buffers[rank].differing())
        assert all(one == names for one in others), "all ranks agree"
        first, again = (
            {rank: one.trace(STEP, names, again=repeated) for rank, one in enumerate(self.buffers)}
            for repeated in (False, True)
        )
        return names, judge_copies(first, again, ParallelDims(1, 1, len(self.buffers))), True

    def train(self) -> None:
        """Each on samples of its own."""
        for rank, model in enumerate(self.models):
            model.norm(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))


def _flip(tensor: torch.Tensor) -> None:
    """A bit, as memory does it: no operation of PyTorch's has written to it."""
    as_bits(tensor).numpy()[1] ^= 1 << 20


def test_of_three_the_rank_whose_buffer_was_hit_is_named() -> None:
    """Once, with the name; statistics that each has of its own samples are none of these."""
    ranks = _Replicas(3)
    ranks.train()
    assert ranks.compare()[:2] == ([], ())
    _flip(ranks.models[1].rotary.inv_freq)
    names, [ruling], _ = ranks.compare()
    assert names == ["rotary.inv_freq"]
    assert (ruling.rank, ruling.verdict) == (1, "persistent")
    assert str(ruling.address) == f"step {STEP}, parameter of rotary (buffer inv_freq)"
    ranks.train()
    assert ranks.compare()[:2] == ([], ()), "told once"


def test_of_two_nobody_is_named() -> None:
    """It is said that they differ, and where."""
    ranks = _Replicas(2)
    _flip(ranks.models[0].rotary.inv_freq)
    names, [ruling], _ = ranks.compare()
    assert names == ["rotary.inv_freq"]
    assert (ruling.rank, ruling.suspects, ruling.verdict) == (None, (0, 1), "inconclusive")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("change", ["written", "replaced", "most", "sibling"])
def test_what_a_training_changes_accuses_nobody(count: int, change: str) -> None:
    """Written to, or made anew, on one rank; changed on all but one; beside a buffer that is written to."""
    ranks = _Replicas(count)
    for rank, model in enumerate(ranks.models):
        rotary = model.rotary
        if change == "written" and rank == 0:
            rotary.inv_freq.mul_(2)
        elif change == "replaced" and rank == 0:
            rotary.register_buffer("inv_freq", rotary.inv_freq / 2, persistent=False)
        elif change == "most" and rank > (count == 3) - 1:
            rotary.inv_freq.data.copy_(torch.full((4,), 2.0 + rank))
        elif change == "sibling" and rank == 0:
            _flip(rotary.inv_freq)
            rotary.scale.add_(1)
    assert ranks.compare()[:2] == ([], ())


def test_a_loaded_checkpoint_is_compared_from_then_on() -> None:
    """It writes to all buffers, once."""
    ranks = _Replicas(3)
    for model in ranks.models:
        model.rotary.inv_freq.mul_(3)
    assert ranks.compare() == ([], (), True)
    _flip(ranks.models[2].rotary.inv_freq)
    assert ranks.compare()[0] == ["rotary.inv_freq"]
    assert ranks.compare() == ([], (), False), "nothing is gathered where nothing has changed"


def test_a_dispute_says_whose_buffers_differ_and_judges_with_none() -> None:
    """Of two, one of which is stuck: both are right for the buffer that they have."""
    models, batch = [build_model("llama", "fp32", 3) for _ in range(2)], draw_batch("fp32", 5)
    models[1].model.rotary_emb.inv_freq[1] *= 1.5
    sides = [Side(rank, one, batch) for rank, one in enumerate(models)]
    traces = [one.compute() for one in sides]
    place = next(
        at for at, pair in enumerate(zip(*(one.checksums for one in traces), strict=True)) if len(set(pair)) > 1
    )
    address, values = traces[0].addresses[place], {rank: one.checksums[place] for rank, one in enumerate(traces)}
    hearings = [judge_exhibits(address, values, one.show(address, values, place)) for one in sides]
    sent = [next(one) for one in hearings]
    opinion = None
    while opinion is None:
        try:
            sent = [one.send(sent) for one in hearings]
        except StopIteration as end:
            opinion = end.value
    assert not opinion.within and opinion.alone == ()
    assert "what it was made of differs already: of the submodule buffer inv_freq" in opinion.reason
