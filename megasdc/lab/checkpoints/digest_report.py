"""Report of a comparison of manifests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megasdc.lab.checkpoints.digest import Digest
from megasdc.lab.checkpoints.outcome import ComparisonOutcome

What = Literal["blocks", "bytes", "outside", "missing", "type", "value", "values"]
WHATS: dict[What, str] = {
    "blocks": "blocks of a tensor differ",
    "bytes": "the file differs, and its tensors or blocks are not known",
    "outside": "bytes differ of headers, configuration or global random generators, not of the training's state",
    "missing": "a file, or a tensor in it, is not there",
    "type": "another data type or shape",
    "value": "another counter or rate",
    "values": "other values that are no tensors, such as the loader's position",
}
"""Kinds of differences."""


@dataclass(frozen=True)
class BlockRange:
    """Adjacent blocks of a tensor that differ: first and last byte in the file, first and last element of the tensor.

    ``elements`` is None if the tensor is not contiguous or not known; ``parameters`` are in these blocks, as
    ``fqn/slot``.
    """

    bytes: tuple[int, int]
    elements: tuple[int, int] | None
    parameters: list[str]


@dataclass(frozen=True)
class FileDifference:
    """A difference in one file of one checkpoint.

    Attributes:
        checkpoint: name of the checkpoint, if a folder of several was read; else empty.
        name: tensor or value in the file; empty: the file.
        digest: label of the one that differs.
        against: label of the one that it was compared with.
        basis: why ``against`` is expected to be right; empty: either may be wrong.
        rank: global rank that wrote the file; None: not known.
        unchanged: whether the file is as it was saved; None: not known.
        ranges: the blocks that differ, adjacent ones merged.
    """

    checkpoint: str
    file: str
    name: str
    what: What
    digest: str
    against: str
    basis: str
    detail: str
    rank: int | None
    node: str | None
    unchanged: bool | None
    num_blocks: int = 0
    ranges: list[BlockRange] = field(default_factory=list)


@dataclass
class DigestReport(ComparisonOutcome):
    """Result of a comparison of manifests.

    Attributes:
        labels: name of each: host and path.
        num_files: files that are in at least two of them.
        differences: in order of checkpoints and files.
        checkpoints: for each checkpoint in at least two of them, whether it is the same, in order of step.
    """

    digests: list[Digest]
    labels: list[str]
    num_files: int = 0
    differences: list[FileDifference] = field(default_factory=list)
    checkpoints: dict[str, bool] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not self.differences

    @property
    def first_different(self) -> str | None:
        """Name of the first checkpoint of several that differs."""
        return next((name for name, same in self.checkpoints.items() if name and not same), None)

    @property
    def odd(self) -> list[str]:
        """Labels of manifests that differ from the expected content; empty if it is not known which is expected."""
        named = {one.digest for one in self.differences if one.basis}
        return [label for label in self.labels if label in named]

    def details(self) -> dict[str, Any]:
        """Manifests, checkpoints and differences."""
        return {
            "manifests": [
                {"label": label, "host": one.host, "path": one.path, "time": one.time, "as_saved": one.as_saved}
                for label, one in zip(self.labels, self.digests, strict=True)
            ],
            "num_files": self.num_files,
            "checkpoints": self.checkpoints,
            "first_different": self.first_different,
            "odd": self.odd,
            "differences": [asdict(one) for one in self.differences],
        }
