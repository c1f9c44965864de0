"""Do digests of copies tell every bit, and do they add up over ranks without rounding?"""

from __future__ import annotations

import itertools

import pytest
import torch

from megasdc.optim.zero1 import differ, shard_checksum
from megasdc.tensors import checksum

HOST = torch.device("cpu")


@pytest.fixture(params=["xxh3_64.v1", "mixed_sum_64.v1"])
def _algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = checksum.algorithm(request.param)
    monkeypatch.setattr("megasdc.optim.zero1.default_algorithm", lambda device: chosen)


@pytest.mark.usefixtures("_algorithm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_norm_does_not_see_is_seen(dtype: torch.dtype) -> None:
    """Swaps within and between shards, signs, a last bit; the same shards give the same digest."""
    shards = [torch.arange(1.0, 34.0).to(dtype), torch.arange(34.0, 67.0).to(dtype)]  # no two are equal: swaps show
    swapped, negative, flipped = ([one.clone() for one in shards] for _ in range(3))
    swapped[0][[3, 4]] = shards[0][[4, 3]]
    negative[1][7] *= -1
    flipped[1].view(torch.uint8)[0] ^= 1
    others = [swapped, negative, flipped, shards[::-1], [shards[0]], []]
    found = [shard_checksum(one, HOST).tolist() for one in (shards, *others)]
    assert all(differ([one, other]) for one, other in itertools.combinations(found, 2))
    assert not differ([found[0], shard_checksum([one.clone() for one in shards], HOST).tolist(), found[0]])


@pytest.mark.usefixtures("_algorithm")
def test_sums_over_ranks_are_exact() -> None:
    """Digests are whole numbers below 2^32, the two halves of the checksum."""
    shard = torch.arange(100.0)
    high, low = shard_checksum([shard], HOST).tolist()
    known = {checksum.checksum(shard, name) for name in checksum.ALGORITHMS}
    assert 0 <= high < 2**32 and 0 <= low < 2**32 and (int(high) << 32) + int(low) in known
