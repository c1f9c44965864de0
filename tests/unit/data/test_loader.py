"""Micro-batches: the samples of a step belong to the step, and a restart goes on exactly where a replica was."""

from __future__ import annotations

import itertools
import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from megasdc.checkpoint.manifest import find_wrong_place
from megasdc.common.errors import CheckpointError, DataError
from megasdc.data.dataset import build_datasets
from megasdc.data.loader import EvalLoader, MicroBatchLoader
from megasdc.data.position import Position, merge_positions, num_passed, position_for, stream_end

LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1)]


class Numbers:
    """A stream whose sample p is filled with p."""

    path = "numbers.bin"
    identity = "numbers"

    def __init__(self, length=96, vocab_size=1000):
        self.length = length
        self.vocab_size = vocab_size

    def __len__(self):
        return self.length

    def extend(self, num_samples):
        self.length = max(self.length, num_samples)

    def __getitem__(self, position):
        tokens = torch.full((5,), position)
        return tokens, tokens.clone(), torch.ones(5)


def positions(batch):
    return batch[0][:, 0].tolist()


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), LAYOUTS)
def test_samples_of_a_step_do_not_depend_on_the_layout(dp_size, micro_batch_size):
    """After equal consumption all replicas together have seen a beginning of the stream, each sample once."""
    loaders = [MicroBatchLoader(Numbers(), micro_batch_size, rank, dp_size) for rank in range(dp_size)]
    per_step = 24 // dp_size // micro_batch_size
    for step in range(3):
        seen = [positions(next(loader)) for loader in loaders for _ in range(per_step)]
        assert sorted(itertools.chain(*seen)) == list(range(24 * step, 24 * step + 24))


def test_batch_shapes_and_types():
    """A micro-batch is (tokens, (labels, loss_mask)) in the documented shapes and types."""
    tokens, (labels, loss_mask) = next(MicroBatchLoader(Numbers(), 3, 0, 1))
    assert tokens.shape == labels.shape == loss_mask.shape == (3, 5)
    assert (tokens.dtype, labels.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)


def test_resume_goes_on_exactly_also_after_unequal_consumption():
    """Through JSON and back, every replica goes on with its next sample, though they took different numbers."""
    loaders = [MicroBatchLoader(Numbers(), 2, rank, 3) for rank in range(3)]
    for rank, loader in enumerate(loaders):
        for _ in range(2 + rank):
            next(loader)
    merged = json.loads(json.dumps(merge_positions([loader.state_dict() for loader in reversed(loaders)])))
    assert merged["consumed"] == {"0": 4, "1": 6, "2": 8}
    for rank, loader in enumerate(loaders):
        resumed = MicroBatchLoader(Numbers(), 2, rank, 3, position=position_for(merged, rank, 3, Numbers()))
        direct = MicroBatchLoader(Numbers(), 2, rank, 3)
        direct.load_state_dict(loader.state_dict())
        expected = [positions(batch) for batch in _until_end(loader)]
        assert [positions(batch) for batch in _until_end(resumed)] == expected
        assert [positions(batch) for batch in _until_end(direct)] == expected


def _until_end(loader):
    """Three more micro-batches."""
    return [next(loader) for _ in range(3)]


def merged_of(loaders):
    return json.loads(json.dumps(merge_positions([loader.state_dict() for loader in loaders])))


def go_on(merged, dp_size, stream=None):
    """Loaders of another number of replicas."""
    stream = stream or Numbers()
    return [
        MicroBatchLoader(stream, 1, rank, dp_size, position_for(merged, rank, dp_size), 24) for rank in range(dp_size)
    ]


def test_other_number_of_replicas():
    """After equal consumption another number of replicas goes on at the same place, whether it divides it or not."""
    loaders = [MicroBatchLoader(Numbers(), 3, rank, 2) for rank in range(2)]
    for loader in loaders:
        next(loader), next(loader)
    merged = merged_of(loaders)
    assert [position_for(merged, rank, 4) for rank in range(4)] == [Position(3)] * 4
    assert position_for(merged, 0, 1) == Position(12)
    for dp_size in (1, 3, 4, 5, 7):
        taken = [positions(next(loader))[0] for loader in go_on(merged, dp_size)]
        assert taken == list(range(12, 12 + dp_size))


@pytest.mark.parametrize("sizes", [(3, 2, 4), (2, 5, 1), (4, 3, 3), (1, 2, 1)])
def test_no_sample_is_lost_or_doubled_when_the_number_of_replicas_changes_again_and_again(sizes):
    """Replicas that fell behind: what they had not taken comes first after each change, and everything comes once."""
    taken, loaders = [], [MicroBatchLoader(Numbers(), 1, rank, sizes[0]) for rank in range(sizes[0])]
    for dp_size in sizes[1:]:
        for rank, loader in enumerate(loaders):
            taken += [positions(next(loader))[0] for _ in range(2 + 3 * rank)]
        merged = merged_of(loaders)
        loaders = go_on(merged, dp_size)
        missed = sorted(set(range(max(taken))) - set(taken))
        if dp_size != merged["dp_size"]:
            assert [positions(loader.read(loader.next_positions))[0] for loader in loaders[: len(missed)]] == missed[
                :dp_size
            ]
    for _ in range(40 // sizes[-1]):
        taken += [positions(next(loader))[0] for loader in loaders]
    assert len(taken) == len(set(taken))
    if sizes[-1] == 1:
        assert sorted(taken) == list(range(len(taken)))


def test_samples_passed_over_are_gone_or_come_again_before_their_epoch_ends():
    """Given up for good they never come; else they come between the last sample of their epoch and the next epoch."""
    for again in (False, True):
        loaders = [MicroBatchLoader(Numbers(), 2, rank, 2, samples_per_epoch=24) for rank in range(2)]
        taken = [[], []]
        for loader in loaders:
            for step in range(8):
                taken[loader.dp_rank] += positions(next(loader))
                if step in (1, 2) and loader.dp_rank == 1:
                    loader.skip_next(1, again=again)
                    if step == 1:  # from here on as a run that was resumed
                        loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert taken[0] == list(range(0, 32, 2))
        given_up = [9, 11, 17, 19]
        epoch = [position for position in range(1, 24, 2) if position not in given_up]
        following = range(25, 48, 2)
        assert taken[1] == [*epoch, *(given_up if again else []), *following][:16]


def test_what_is_to_be_taken_again_is_dealt_anew_to_other_replicas():
    """Samples passed over come once, whoever passed them over, with another number of replicas too."""
    loaders = [MicroBatchLoader(Numbers(), 1, rank, 3, samples_per_epoch=24) for rank in range(3)]
    taken = []
    for loader in loaders:
        taken += positions(next(loader))
        loader.skip_next(1, again=True)
    loaders = go_on(merged_of(loaders), 2)
    assert [loader.position.again for loader in loaders] == [(3, 5), (4,)]
    for _ in range(15):
        taken += [positions(next(loader))[0] for loader in loaders]
    assert set(range(24)) <= set(taken)
    assert len(taken) == len(set(taken))


def test_states_that_do_not_fit():
    """Missing or contradicting replicas, another replica's state, and other data are refused."""
    states = [MicroBatchLoader(Numbers(), 1, rank, 2, Position(4)).state_dict() for rank in range(2)]
    with pytest.raises(CheckpointError, match=r"no loader state of replica\(s\) \[1\]"):
        merge_positions(states[:1])
    with pytest.raises(CheckpointError, match="no loader state"):
        merge_positions([])
    with pytest.raises(CheckpointError, match="replica 1 has consumed 4 and 5 samples"):
        merge_positions([*states, {**states[1], "consumed": 5}])
    with pytest.raises(CheckpointError, match="of different runs"):
        merge_positions([states[0], {**states[1], "stream": "other"}])
    with pytest.raises(CheckpointError, match="state is of replica 1 of 2, this is 0 of 2"):
        MicroBatchLoader(Numbers(), 1, 0, 2).load_state_dict(states[1])
    with pytest.raises(CheckpointError, match=r"position is in stream other, the data at numbers\.bin"):
        MicroBatchLoader(Numbers(), 1, 0, 2).load_state_dict({**states[0], "stream": "other"})


def test_end_of_the_stream_is_an_error_and_takes_nothing():
    """A stream that cannot fill a micro-batch raises a DataError; the position stays."""
    loader = MicroBatchLoader(Numbers(10), 4, 1, 2, Position(1))
    next(loader)
    with pytest.raises(DataError, match=r"numbers\.bin has 10 samples and replica 1 of 2 asks for position 17"):
        next(loader)
    assert loader.position == Position(5)


@pytest.mark.parametrize("value", [1000, -1])
def test_id_beyond_the_vocabulary(value):
    """An id that the model does not know is refused on the host with file, sample, place, value and limit."""

    class Bad(Numbers):
        def __getitem__(self, position):
            tokens, labels, loss_mask = super().__getitem__(position)
            if position == 5:
                labels[2] = value
            return tokens, labels, loss_mask

    loader = MicroBatchLoader(Bad(), 2, 1, 2)
    next(loader)
    with pytest.raises(DataError, match=rf"numbers\.bin, sample position 5, label 2: id {value} is not in \[0, 1000\)"):
        next(loader)
    assert loader.position == Position(2)


def test_damaged_file_is_caught_before_the_model(tmp_path, prepared, to_version_1):
    """Without checksums of blocks, an overwritten token is refused by the loader if beyond the vocabulary."""
    folder = tmp_path / "copy"
    shutil.copytree(prepared.path, folder)
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    tokens[:] = 64_000
    tokens.tofile(folder / "train.bin")
    to_version_1(folder)
    train, _ = build_datasets(prepared.model_copy(update={"path": str(folder)}), 640, 10, 0, tmp_path / "cache")
    with pytest.raises(DataError, match=r"train\.bin, sample position 0, token 0: id 64000 is not in \[0, 640\)"):
        next(MicroBatchLoader(train, 1, 0, 1))
    with pytest.raises(DataError, match=r"train\.bin has checksum"):
        build_datasets(
            prepared.model_copy(update={"path": str(folder)}), 640, 10, 0, tmp_path / "cache", verify_checksums=True
        )


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), LAYOUTS)
def test_evaluation_counts_each_sample_once(dp_size, micro_batch_size):
    """The masked sum over all replicas is that of samples 0..n-1 for every layout, and the same each time."""
    loaders = [EvalLoader(Numbers(), micro_batch_size, rank, dp_size, 17) for rank in range(dp_size)]
    assert len({len(loader) for loader in loaders}) == 1
    for _ in range(2):
        batches = [batch for loader in loaders for batch in loader]
        assert len(batches) == dp_size * len(loaders[0])
        weight = sum(mask.sum().item() for _, (_, mask) in batches)
        total = sum((tokens * mask).sum().item() for tokens, (_, mask) in batches)
        assert (weight, total) == (17 * 5, 5 * sum(range(17)))


def test_wrong_arguments():
    """Arguments outside their range are a ValueError."""
    for arguments in ((0, 0, 1), (1, 1, 1), (1, -1, 2)):
        with pytest.raises(ValueError, match="must be"):
            MicroBatchLoader(Numbers(), *arguments)
    with pytest.raises(ValueError, match="must not be negative"):
        Position(-1)
    with pytest.raises(ValueError, match="num_samples is 97"):
        EvalLoader(Numbers(), 1, 0, 1, 97)


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), LAYOUTS)
@pytest.mark.parametrize("ranges", [[range(24, 48)], [range(3, 4), range(17, 30)], [range(0, 13)]])
def test_ranges_that_are_never_taken(dp_size, micro_batch_size, ranges):
    """Whatever they cut, all replicas together take the others once, also through a restart in the middle."""
    left = [one for one in range(400) if not any(one in skipped for skipped in ranges)]
    taken = []
    for rank in range(dp_size):
        loader = MicroBatchLoader(Numbers(400), micro_batch_size, rank, dp_size, skip=ranges)
        own = [positions(next(loader)) for _ in range(36 // micro_batch_size)]
        loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        own += [positions(next(loader)) for _ in range(12 // micro_batch_size)]
        taken.append([one for batch in own for one in batch])
        assert taken[-1] == [one for one in left if one % dp_size == rank][:48]
    assert len({one for own in taken for one in own}) == 48 * dp_size


def test_what_is_taken_again_is_not_taken_where_it_is_skipped():
    """A sample that was passed over, to come again, is in a range that is given up afterwards."""
    loader = MicroBatchLoader(Numbers(), 2, 0, 1, samples_per_epoch=8)
    loader.skip_next(1, again=True)
    again = MicroBatchLoader(Numbers(), 2, 0, 1, loader.position, samples_per_epoch=8, skip=[range(1, 2)])
    assert [one for _ in range(4) for one in positions(next(again))] == [2, 3, 4, 5, 6, 7, 0, 8]


def test_the_end_of_what_was_consumed():
    """Of equal consumption, of unequal, and where another number of replicas has begun anew within the stream."""
    loaders = [MicroBatchLoader(Numbers(), 2, rank, 3) for rank in range(3)]
    assert stream_end(merged_of(loaders)) == loaders[0].stream_end == 0
    for loader in loaders:
        next(loader)
    assert stream_end(merged_of(loaders)) == loaders[0].stream_end == 6
    next(loaders[1])
    assert stream_end(merged_of(loaders)) == 11
    resumed = go_on(merged_of(loaders), 2)
    assert stream_end(merged_of(resumed)) == resumed[0].stream_end == 11


def test_what_replicas_took_is_counted_from_their_positions() -> None:
    """Without samples that are never taken, or taken again later, also after the number of replicas has changed."""
    skip, taken = [range(5, 9), range(20, 21)], 0
    merged: Any = None
    for dp_size, steps in ((3, 4), (2, 5), (4, 3)):
        loaders = [
            MicroBatchLoader(Numbers(), 2, rank, dp_size, samples_per_epoch=24, skip=skip) for rank in range(dp_size)
        ]
        for rank, loader in enumerate(loaders):
            if merged is not None:
                loader.move_to(merged)
            for step in range(steps + rank % 2):
                if step == 1 and rank == 0:
                    loader.skip_next(1, again=True)
                else:
                    taken += len(next(loader)[0])
        merged = json.loads(json.dumps(merge_positions([loader.state_dict() for loader in loaders])))
        assert num_passed(merged, skip) == taken


def test_a_place_that_does_not_follow_is_told() -> None:
    """From what a checkpoint holds; nothing is known of one without the samples that were given up."""
    loader = {
        "dp_size": 2,
        "order": Position().order.to_json(),
        "consumed": {"0": 8, "1": 6},
        "again": {"0": [], "1": []},
    }
    state: dict[str, Any] = {
        "samples": 12,
        "uncounted_samples": 2,
        "loader": loader,
        "config": {"megasdc": {"data": {}}},
    }
    assert find_wrong_place(state) is None
    assert "consumed 14 samples of the stream, 12 follow" in str(find_wrong_place({**state, "uncounted_samples": 0}))
    assert find_wrong_place({**state, "uncounted_samples": None}) is None
    assert "does not hold the places" in str(find_wrong_place({**state, "loader": {}}))
