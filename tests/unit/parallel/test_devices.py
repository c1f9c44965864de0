"""Which GPU does a rank use, and what becomes of one too many?"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from megasdc.common.errors import LaunchError
from megasdc.parallel import groups


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host on which torch counts four GPUs; which became the current ones."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(groups, "place_messages_on_host", lambda: None)
    monkeypatch.setenv("RANK", "13")
    return current


@pytest.mark.parametrize(("local", "share", "index"), [(3, False, 3), (3, True, 3), (4, True, 0), (6, True, 2)])
def test_ranks_are_dealt_to_the_gpus_in_turn(
    four_gpus: list[int], monkeypatch: pytest.MonkeyPatch, local: int, share: bool, index: int
) -> None:
    """The GPU that torch is told, and DeepSpeed by LOCAL_RANK, is the rank's number, or that modulo the GPUs."""
    monkeypatch.setenv("LOCAL_RANK", str(local))
    if share:
        assert groups.choose_backend(share) == "gloo"
        assert (four_gpus, groups.os.environ["LOCAL_RANK"]) == ([index], str(index))
    assert groups.device_index(share) == index


def test_more_ranks_than_gpus_are_refused(four_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the rank, the numbers and both ways on; nothing was set."""
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(LaunchError, match=r"rank 13 is number 4 of .*4 GPUs are visible.*share_devices=true"):
        groups.choose_backend(False)
    assert four_gpus == []


@pytest.mark.parametrize(("size", "share", "ranks"), [(4, True, 1), (5, True, 2), (16, True, 4), (16, False, 1)])
def test_the_memory_of_a_shared_gpu_is_divided(
    four_gpus: list[int], monkeypatch: pytest.MonkeyPatch, size: int, share: bool, ranks: int
) -> None:
    """As many ranks as may come to one GPU."""
    monkeypatch.setenv("LOCAL_SIZE", str(size))
    assert groups.ranks_on_device(share) == ranks


def test_messages_of_the_pipeline_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is a contiguous tensor on the host; what is received lands in the given one, of any strides."""
    from deepspeed.runtime.pipe import p2p

    sent: list[torch.Tensor] = []

    def recv(tensor: torch.Tensor, src: int | None, **_: Any) -> int | None:
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        tensor.copy_(sent.pop())
        return src

    comm = types.SimpleNamespace(send=lambda tensor, dst: sent.append(tensor), recv=recv, new_group="others")
    monkeypatch.setattr(p2p, "dist", comm)
    groups.place_messages_on_host()
    groups.place_messages_on_host()
    view: Any = p2p.dist
    assert view.comm is comm and view.new_group == "others"
    given = torch.arange(6.0).view(2, 3).t()
    view.send(given, 1)
    assert sent[0].is_contiguous()
    target = torch.zeros(2, 3).t()
    assert view.recv(target, 7) == 7
    assert torch.equal(target, given)
