"""Do shards come whole, of the round that is wanted, and to those who know the secret?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megasdc.common.wire import BoundedExchange, WireError
from megasdc.localsgd import exchange
from megasdc.localsgd.exchange import AGREED, MASTERS, ShardDoor, fetch, fetch_all

SECRET = b"x" * 32
SHARDS = [torch.arange(1000, dtype=torch.float32), torch.randn(7), torch.zeros(0)]


@pytest.fixture
def door() -> Iterator[ShardDoor]:
    """A door that offers the masters of round 4."""
    found = ShardDoor("127.0.0.1", SECRET, 10.0)
    found.offer(MASTERS, 4, SHARDS)
    yield found
    found.close()


def test_shards_come_bit_by_bit(door: ShardDoor) -> None:
    """All partitions, at once from several replicas; what is offered later takes the place of what was."""
    for number in (4, None):
        round_, found = fetch(door.place, SECRET, MASTERS, number, SHARDS, 10.0)
        assert round_ == 4 and all(torch.equal(one, other) for one, other in zip(found, SHARDS, strict=True))
    both = fetch_all({1: door.place, 2: ("127.0.0.1", 9), 3: door.place}, SECRET, 4, SHARDS, 5.0)
    assert sorted(both) == [1, 3], "nobody listens at the second"
    door.offer(MASTERS, 5, [one + 1 for one in SHARDS])
    assert torch.equal(fetch(door.place, SECRET, MASTERS, 5, SHARDS, 10.0)[1][0], SHARDS[0] + 1)
    assert fetch_all({}, SECRET, 5, SHARDS, 5.0) == {}


def test_what_does_not_fit_is_refused(door: ShardDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another round, nothing offered, other sizes, a secret that is not known, bytes that changed on the way."""
    for what, number, like, told in (
        (MASTERS, 3, SHARDS, "has weights of round 4, not of round 3"),
        (AGREED, 4, SHARDS, "has weights of round 0"),
        (AGREED, None, SHARDS, "has shards of"),
        (MASTERS, 4, SHARDS[:2], "has shards of"),
    ):
        with pytest.raises(WireError, match=told):
            fetch(door.place, SECRET, what, number, like, 10.0)
    with pytest.raises(OSError):
        fetch(door.place, b"y" * 32, MASTERS, 4, SHARDS, 10.0)
    monkeypatch.setattr(exchange, "_digest", lambda view: f"{id(view)}")
    with pytest.raises(WireError, match="other bytes than were sent"):
        fetch(door.place, SECRET, MASTERS, 4, SHARDS, 10.0)
    door.withdraw(MASTERS)
    with pytest.raises(WireError, match="of round 0"):
        fetch(door.place, SECRET, MASTERS, 4, SHARDS, 10.0)


def test_agreed_weights_come_as_they_were_asked_for(door: ShardDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round may change them while they are sent."""
    weights = torch.arange(5, dtype=torch.float32)
    door.offer(AGREED, 3, [weights])
    send = BoundedExchange.send_json

    def change(self: BoundedExchange, message: object, limit: int) -> None:
        if isinstance(message, dict) and "digests" in message:
            weights.zero_()
        send(self, message, limit)

    monkeypatch.setattr(BoundedExchange, "send_json", change)
    number, (found,) = fetch(door.place, SECRET, AGREED, None, [torch.zeros(5)], 10.0)
    assert number == 3 and found.tolist() == [0, 1, 2, 3, 4] and not weights.any()
