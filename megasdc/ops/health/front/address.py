"""Where agents of hosts reach the front of their launch, and how they introduce themselves
(``megasdc.common.wire``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json
from megasdc.common.wire import WireError

ANSWER_S = 5.0


@dataclass(frozen=True)
class FrontAddress:
    """How agents reach the front of their launch.

    Args:
        launch_id: of the launch.
        secret: of the launch, hexadecimal; shown nowhere.
    """

    launch_id: str
    address: str
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"FrontAddress({self.address}:{self.port})"


def front_path(health: Path, launch_id: str) -> Path:
    """File in which the front of a launch tells rank 0 where it is; readable by its user alone."""
    return health / f"front_{launch_id}.json"


_fronts: dict[str, FrontAddress] = {}
"""Fronts that this process knows, by launch: there is no file any more when its ranks begin again."""


def register_front(front: FrontAddress) -> None:
    """Remember a front for when the ranks of its launch begin again in these processes."""
    _fronts[front.launch_id] = front


def claim_front(health: Path, launch_id: str | None) -> FrontAddress | None:
    """The front of this launch, by its file in the run folder, which is then removed, or as kept; None: there is none.

    Args:
        health: folder of the run.
        launch_id: of this launch; None: without ``megasdc launch``.
    """
    if launch_id is None:
        return None
    if launch_id in _fronts:
        return _fronts[launch_id]
    path = front_path(health, launch_id)
    try:
        front = FrontAddress(**parse_json(path.read_text(encoding="utf-8")))
        path.unlink()
    except (OSError, ValueError, TypeError):
        return None
    return front


@dataclass(frozen=True)
class Hello:
    """Who an agent is: run, index and name of its host, number of hosts of the run."""

    run: str
    node: int
    host: str
    num_nodes: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Hello:
        """From what was received.

        Raises:
            WireError: it is no greeting.
        """
        kinds = {"run": str, "node": int, "host": str, "num_nodes": int}
        if raw.keys() != kinds.keys() or not all(type(raw[name]) is kind for name, kind in kinds.items()):
            raise WireError(f"no greeting: {raw}")
        return cls(**raw)
