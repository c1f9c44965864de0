"""Coordinates of a rank in the (tensor, pipeline, data) layout, and in a launch of several runs: pure arithmetic.

Ranks are numbered with tensor fastest, then data, then pipeline: the order of DeepSpeed's
``PipeModelDataParallelTopology`` and of Megatron-core's ``order="tp-cp-ep-dp-pp"``, so that both libraries' groups are
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the three parallel dimensions, and the coordinates of one rank.

    Args:
        tensor: tensor-parallel size.
        pipeline: number of pipeline stages.
        data: number of replicas.
        rank: global rank, in [0, tensor * pipeline * data).
    """

    tensor: int
    pipeline: int
    data: int
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is outside a world of {self.tensor} x {self.pipeline} x {self.data} "
                f"(tensor x pipeline x data) = {self.world_size} ranks"
            )

    @classmethod
    def from_world(cls, tensor: int, pipeline: int, world_size: int, rank: int) -> ParallelDims:
        """Derive the data dimension from the number of ranks.

        Raises:
            ValueError: ``world_size`` is not a multiple of ``tensor * pipeline``.
        """
        if world_size % (tensor * pipeline):
            raise ValueError(f"{world_size} ranks are not a multiple of tensor {tensor} x pipeline {pipeline}")
        return cls(tensor, pipeline, world_size // (tensor * pipeline), rank)

    def at(self, rank: int) -> ParallelDims:
        """The coordinates of another rank of this layout."""
        return replace(self, rank=rank)

    @property
    def first_replica_rank(self) -> int:
        """The rank of the first replica at the same stage and tensor rank."""
        return self.rank - self.dp_rank * self.tensor

    @property
    def positions(self) -> list[list[int]]:
        """Ranks of all replicas at each stage and tensor rank, which hold the same parameters."""
        return [
            [tensor + self.tensor * (replica + self.data * stage) for replica in range(self.data)]
            for stage in range(self.pipeline)
            for tensor in range(self.tensor)
        ]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def tp_rank(self) -> int:
        """Coordinate along the tensor dimension."""
        return self.rank % self.tensor

    @property
    def dp_rank(self) -> int:
        """Coordinate along the data dimension: the replica."""
        return self.rank // self.tensor % self.data

    @property
    def pp_rank(self) -> int:
        """Coordinate along the pipeline dimension: the stage."""
        return self.rank // (self.tensor * self.data)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pipeline - 1

    @property
    def layout(self) -> dict[str, int]:
        """The sizes, as written to manifests."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


@dataclass(frozen=True)
class ReplicaWorld:
    """A launch cut into runs of equally many consecutive ranks, and the position of one rank.

    Args:
        replicas: number of runs.
        launch_size: number of ranks of the launch, a multiple of ``replicas``.
    """

    replicas: int
    launch_rank: int
    launch_size: int

    def __post_init__(self) -> None:
        if self.launch_size % self.replicas or not 0 <= self.launch_rank < self.launch_size:
            raise ValueError(
                f"rank {self.launch_rank} of {self.launch_size} has no place in {self.replicas} equal parts"
            )

    @classmethod
    def from_environment(cls, replicas: int, environ: Mapping[str, str]) -> ReplicaWorld:
        """The position given by the launcher's variables.

        Args:
            replicas: number of runs.
            environ: environment with RANK and WORLD_SIZE of the launch.
        """
        return cls(replicas, int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))

    @property
    def world_size(self) -> int:
        """Number of ranks of one run."""
        return self.launch_size // self.replicas

    @property
    def replica(self) -> int:
        """Index of the run."""
        return self.launch_rank // self.world_size

    @property
    def rank(self) -> int:
        """Rank in that run; equal ranks of all runs have equal coordinates in the layout."""
        return self.launch_rank % self.world_size

    @property
    def environment(self) -> dict[str, str]:
        """Variables for torch and DeepSpeed; the device still follows LOCAL_RANK of the launch."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}
