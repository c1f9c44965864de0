"""Communication between ranks of equal rank in several runs of one launch, over a gloo group of their own.

Device tensors go through host memory: two runs may share a device or be on different hosts, and no NCCL group spans
them.
"""

from __future__ import annotations

import datetime
import hashlib
import pickle
from array import array
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.parallel.dims import ReplicaWorld
from megasdc.parallel.rendezvous import check_size, launch_secret, sign, verified_value

T = TypeVar("T")
_HEADER_BYTES = 8


class ReplicaLink:
    """A group of the ranks of equal rank in all replicas; broadcasts one replica's values to the others.

    Args:
        trusted: the replica whose values are broadcast.
        store: shared by all ranks of the launch.
        timeout_s: of each exchange.

    Collective: the ranks of equal rank in all replicas.
    """

    def __init__(self, cut: ReplicaWorld, trusted: int, store: dist.Store, timeout_s: float) -> None:
        self.cut = cut
        self.trusted = trusted
        self.store = store
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(f"bridge/{cut.rank}", store),
            cut.replica,
            cut.replicas,
            datetime.timedelta(seconds=timeout_s),
        )

    @property
    def is_trusted(self) -> bool:
        """Whether this rank belongs to the trusted replica."""
        return self.cut.replica == self.trusted

    def share(self, value: Tensor, name: str) -> Tensor:
        """The trusted replica's value of a tensor.

        Args:
            value: this replica's, of any real dtype and strides; same shape and dtype in all replicas.
            name: of the value, the same in all replicas.

        Returns:
            On the device of ``value``, contiguous; on the trusted replica ``value`` itself.

        Raises:
            RuntimeError: the trusted replica shares another name, shape or dtype.

        Collective: the ranks of equal rank in all replicas.
        Sync: waits for the device.
        """
        header = _header(f"{name} {tuple(value.shape)} {value.dtype}")
        message = torch.empty(_HEADER_BYTES + value.numel() * value.element_size(), dtype=torch.uint8)
        if self.is_trusted:
            message[:_HEADER_BYTES] = header
            content = value.detach().contiguous().view(-1)
            message[_HEADER_BYTES:].copy_(content.view(torch.uint8))
        self._broadcast(message)
        # Replicas that share different values of equal size would go on with wrong numbers.
        if not torch.equal(message[:_HEADER_BYTES], header):
            raise RuntimeError(
                f"replica {self.cut.replica} shares {name}, but the trusted replica shares another name, shape or dtype"
            )
        if self.is_trusted:
            return value
        return message[_HEADER_BYTES:].view(value.dtype).view(value.shape).to(value.device)

    def overwrite(self, value: Tensor, name: str) -> None:
        """Replace this replica's value by the trusted replica's.

        Args:
            value: changed in place except on the trusted replica.
            name: as for ``share``.

        Collective: the ranks of equal rank in all replicas.
        """
        healthy = self.share(value, name)
        if not self.is_trusted:
            value.copy_(healthy)

    def share_object(self, value: T) -> T:
        """The trusted replica's value of a picklable object; signed, where the launch has a secret.

        Raises:
            LaunchError: what came is not.

        Collective: the ranks of equal rank in all replicas.
        """
        secret, name = launch_secret(), f"an object that came for replica {self.trusted}"
        content = bytearray(pickle.dumps(value)) if self.is_trusted else bytearray()
        if secret is not None and self.is_trusted:
            content = bytearray(sign(secret, name, bytes(content)))
        size = torch.tensor([len(content)])
        self._broadcast(size)
        if secret is not None:
            check_size(name, int(size))
        message = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(message)
        found = message.numpy().tobytes()
        shared: T = pickle.loads(found if secret is None else verified_value(secret, name, found))
        return shared

    def gather(self, values: list[float]) -> list[list[float]]:
        """Every replica's numbers, equally many in all, in the order of replicas; signed as by ``share_object``.

        Raises:
            LaunchError: what came is not.

        Collective: the ranks of equal rank in all replicas.
        """
        secret, content = launch_secret(), array("d", values).tobytes()
        if secret is not None:
            content = sign(secret, _numbers_of(self.cut.replica), content)
        own = torch.tensor(list(content), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.cut.replicas)]
        self._group.allgather([found], [own]).wait()
        gathered = []
        for replica, one in enumerate(found):
            came = one.numpy().tobytes()
            numbers = came if secret is None else verified_value(secret, _numbers_of(replica), came)
            gathered.append(array("d", numbers).tolist())
        return gathered

    def gather_text(self, value: str) -> list[str]:
        """Every replica's text, in the order of replicas.

        Raises:
            LaunchError: see ``gather``.

        Collective: the ranks of equal rank in all replicas.
        """
        own = value.encode()
        longest = int(max(size for (size,) in self.gather([float(len(own))])))
        found = self.gather([*map(float, own.ljust(longest, b"\0"))])
        return [bytes(map(int, one)).rstrip(b"\0").decode() for one in found]

    def _broadcast(self, message: Tensor) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.trusted, 0
        self._group.broadcast([message], options).wait()


def _numbers_of(replica: int) -> str:
    return f"numbers that came for replica {replica}"


def _header(text: str) -> Tensor:
    """An 8-byte hash of the name, shape and dtype of a shared tensor."""
    return torch.frombuffer(
        bytearray(hashlib.blake2b(text.encode(), digest_size=_HEADER_BYTES).digest()), dtype=torch.uint8
    )
