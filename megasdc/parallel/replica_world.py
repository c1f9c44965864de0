"""Ranks of a launch that several whole runs share: the run and rank of each. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaWorld:
    """A launch cut into runs of equally many consecutive ranks, and the position of one rank.

    Args:
        replicas: number of runs.
        launch_size: ranks of the launch, a multiple of ``replicas``.
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
            environ: with RANK and WORLD_SIZE of the launch.
        """
        return cls(replicas, int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))

    @property
    def world_size(self) -> int:
        """Ranks of one run."""
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
