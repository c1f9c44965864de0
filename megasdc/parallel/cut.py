"""Which world does a rank of a launch belong to where several whole runs share the launch? Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A launch cut into runs of equally many neighbouring ranks, and the place of one rank.

    Args:
        replicas: how many runs.
        launch_rank: rank in the launch.
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
    def from_environment(cls, replicas: int, environ: Mapping[str, str]) -> Cut:
        """Take the place that the launcher's variables name.

        Args:
            replicas: how many runs.
            environ: with RANK and WORLD_SIZE of the launch.
        """
        return cls(replicas, int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))

    @property
    def world_size(self) -> int:
        """Ranks of one run."""
        return self.launch_size // self.replicas

    @property
    def replica(self) -> int:
        """Which run."""
        return self.launch_rank // self.world_size

    @property
    def rank(self) -> int:
        """Rank in that run; equal ranks of all runs have equal places."""
        return self.launch_rank % self.world_size

    @property
    def environment(self) -> dict[str, str]:
        """What torch and DeepSpeed shall read; the device still follows LOCAL_RANK of the launch."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}
