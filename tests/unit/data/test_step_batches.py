"""A step's micro-batches come again as often as asked, and a shared one displaces no sample for good."""

from __future__ import annotations

import itertools

import pytest
import torch

from megasdc.data.loader import MicroBatchLoader, Shared, StepBatches


class Numbers:
    """A stream whose sample p is filled with p."""

    path = "numbers.bin"
    identity = "numbers"
    vocab_size = 1000

    def __len__(self):
        return 600

    def __getitem__(self, position):
        tokens = torch.full((5,), position)
        return tokens, tokens.clone(), torch.ones(5)


def positions(batch):
    return batch[0][:, 0].tolist()


def replicas(number):
    loaders = [MicroBatchLoader(Numbers(), 2, rank, number) for rank in range(number)]
    return loaders, [StepBatches(loader, loader) for loader in loaders]


def test_all_replicas_share_the_source_s_micro_batch_and_no_sample_is_lost():
    """The first micro-batch is equal; over all steps every sample comes once as a replica's own, without a hole."""
    loaders, streams = replicas(3)
    used = []
    for step in range(1, 13):
        source = step // 2 % 3
        shared = Shared(source, tuple(loaders[source].next_positions)) if step % 2 == 0 else None
        taken = []
        for stream in streams:
            stream.begin(shared)
            taken.append([positions(next(stream)) for _ in range(4)])
        if shared is not None:
            assert taken[0][0] == taken[1][0] == taken[2][0]
            used += taken[source][0]
            taken = [of_replica[1:] for of_replica in taken]
        used += itertools.chain.from_iterable(itertools.chain.from_iterable(taken))
    assert len(used) == len(set(used))
    assert {loader.position.consumed for loader in loaders} == {12 * 8 - 4 * 2}, (
        "each was the source twice of six times"
    )
    assert set(used) == set(range(3 * (12 * 8 - 4 * 2)))


def test_a_step_is_read_again_without_moving_the_position():
    """After a rewind the same micro-batches come, from any of them on, and then the next ones."""
    (loader,), (stream,) = replicas(1)
    stream.begin(None)
    first = [positions(next(stream)) for _ in range(3)]
    stream.rewind()
    assert [positions(next(stream)) for _ in range(3)] == first
    stream.rewind(1)
    assert positions(next(stream)) == first[1]
    assert loader.position.consumed == 6
    stream.begin(None)
    assert positions(next(stream)) == [6, 7]


def test_what_was_not_read_cannot_come_again():
    """A rewind beyond what the step has read is an error that says so."""
    _, (stream,) = replicas(1)
    stream.begin(None)
    next(stream)
    with pytest.raises(ValueError, match="micro-batch 2 of the step was not read yet; 1 were"):
        stream.rewind(2)


def test_an_extra_micro_batch_moves_no_position():
    """It comes where it is asked for, as often as asked, between micro-batches that are those of a step without it."""
    loaders, (first, second) = replicas(2)
    extra = Shared(1, tuple(loaders[1].next_positions))
    for stream in (first, second):
        stream.begin(None, extra)
    assert [positions(next(first)) for _ in range(2)] == [[0, 2], [4, 6]]
    for stream in (first, second, first):
        stream.rewind_to_extra()
        assert positions(next(stream)) == [1, 3]
    assert positions(next(second)) == [1, 3] and positions(next(first)) == [8, 10]
    assert [loader.position.consumed for loader in loaders] == [6, 2]


def test_what_was_read_anew_stays_or_goes():
    """Where it does not stay, a step goes on with what it was computed with, however often it was read anew."""
    (loader,), (stream,) = replicas(1)
    for stays in (True, False):
        stream.begin(None)
        first = next(stream)
        first[0][0, 0] = 999
        for _ in range(2):
            stream.renew()
            stream.rewind()
            assert positions(next(stream))[0] != 999
        stream.settle_renewed(stays=stays)
        stream.rewind()
        assert (positions(next(stream))[0] == 999) == (not stays)
    loader.read = lambda _: (_ for _ in ()).throw(OSError("away"))
    with pytest.raises(OSError, match="away"):
        stream.renew()
    stream.rewind()
    assert positions(next(stream))[0] == 999
