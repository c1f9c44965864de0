"""What does a comparison of manifests say?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megasdc.checkpoint.digest import Digest

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
"""What kinds of differences there are."""


@dataclass(frozen=True)
class BlockRange:
    """Adjacent blocks of a tensor that differ.

    Attributes:
        bytes: first and last byte in the file.
        elements: first and last element of the tensor; None where its elements are not in order.
        parameters: what lies there, as ``fqn/slot``.
    """

    bytes: tuple[int, int]
    elements: tuple[int, int] | None
    parameters: list[str]


@dataclass(frozen=True)
class Difference:
    """Something in one file of one checkpoint that is not what it should be.

    Attributes:
        checkpoint: name of the checkpoint, where a folder of several was read; else empty.
        file: its name.
        name: tensor or value in the file; empty: the file.
        what: see ``WHATS``.
        digest: label of the one that differs.
        against: label of the one that it was compared with.
        basis: why ``against`` is expected to be right; empty: either may be wrong.
        detail: what is special about it.
        rank: global rank that wrote the file; None: not known.
        node: node that this rank was on.
        unchanged: whether the file is as it was saved; None: not known.
        num_blocks: blocks that differ.
        ranges: the same, adjacent ones together.
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
class DigestReport:
    """What a comparison found.

    Attributes:
        digests: what was compared.
        labels: what each is called: host and path.
        num_files: files that at least two have.
        differences: in order of checkpoints and files.
        checkpoints: whether each that at least two have is the same, in order of step.
        notes: what was not compared.
    """

    digests: list[Digest]
    labels: list[str]
    num_files: int = 0
    differences: list[Difference] = field(default_factory=list)
    checkpoints: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether everything that was compared is equal."""
        return not self.differences

    @property
    def first_different(self) -> str | None:
        """Name of the first checkpoint of several that differs."""
        return next((name for name, same in self.checkpoints.items() if name and not same), None)

    @property
    def odd(self) -> list[str]:
        """Labels of those that differ from what is expected; empty where nothing tells what is."""
        named = {one.digest for one in self.differences if one.basis}
        return [label for label in self.labels if label in named]

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON has."""
        return {
            "manifests": [
                {"label": label, "host": one.host, "path": one.path, "time": one.time, "as_saved": one.as_saved}
                for label, one in zip(self.labels, self.digests, strict=True)
            ],
            "same": self.same,
            "num_files": self.num_files,
            "checkpoints": self.checkpoints,
            "first_different": self.first_different,
            "odd": self.odd,
            "differences": [asdict(one) for one in self.differences],
            "notes": self.notes,
        }
