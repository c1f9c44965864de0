"""Micro-batches: the samples of a step belong to the step, and a restart goes on exactly where a replica was."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from megasdc.data.dataset import build_datasets
from megasdc.data.loader import EvalLoader, MicroBatchLoader, merge_positions, position_for
from megasdc.errors import CheckpointError, DataError

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
        resumed = MicroBatchLoader(Numbers(), 2, rank, 3, consumed=position_for(merged, rank, 3, Numbers()))
        direct = MicroBatchLoader(Numbers(), 2, rank, 3)
        direct.load_state_dict(loader.state_dict())
        expected = [positions(batch) for batch in _until_end(loader)]
        assert [positions(batch) for batch in _until_end(resumed)] == expected
        assert [positions(batch) for batch in _until_end(direct)] == expected


def _until_end(loader):
    """Three more micro-batches."""
    return [next(loader) for _ in range(3)]


def test_other_number_of_replicas():
    """After equal consumption another number of replicas goes on at the same place; else it is refused."""
    equal = {"dp_size": 2, "consumed": {"0": 6, "1": 6}, "stream": "numbers"}
    assert [position_for(equal, rank, 4) for rank in range(4)] == [3] * 4
    assert position_for(equal, 0, 1) == 12
    loaders = [MicroBatchLoader(Numbers(), 1, rank, 4, consumed=position_for(equal, rank, 4)) for rank in range(4)]
    assert [positions(next(loader)) for loader in loaders] == [[12], [13], [14], [15]]
    with pytest.raises(CheckpointError, match="12 samples consumed by 2 replicas cannot be divided among 5"):
        position_for(equal, 0, 5)
    with pytest.raises(CheckpointError, match="from 2 to 4, but replicas have consumed different numbers"):
        position_for({**equal, "consumed": {"0": 6, "1": 8}}, 0, 4)


def test_states_that_do_not_fit():
    """Missing or contradicting replicas, another replica's state, and other data are refused."""
    states = [MicroBatchLoader(Numbers(), 1, rank, 2, consumed=4).state_dict() for rank in range(2)]
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
    loader = MicroBatchLoader(Numbers(10), 4, 1, 2, consumed=1)
    next(loader)
    with pytest.raises(DataError, match=r"numbers\.bin has 10 samples and replica 1 of 2 asks for position 17"):
        next(loader)
    assert loader.consumed == 5


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
    assert loader.consumed == 2


def test_damaged_file_is_caught_before_the_model(tmp_path, prepared):
    """A token overwritten in the .bin file, its size unchanged, is refused by the loader if beyond the vocabulary."""
    folder = tmp_path / "copy"
    shutil.copytree(prepared.path, folder)
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    tokens[:] = 64_000
    tokens.tofile(folder / "train.bin")
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
        MicroBatchLoader(Numbers(), 1, 0, 1, consumed=-1)
    with pytest.raises(ValueError, match="num_samples is 97"):
        EvalLoader(Numbers(), 1, 0, 1, 97)
