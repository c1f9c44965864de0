"""``pretrain``: a training with the features of all storeys, which every entry point calls. No torch at import.

``python -m megasdc.pretrain FILE`` trains as one rank, and ends with its exit code: the ranks of sweeps are started so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megasdc.train import main
from megasdc.train.signals import Leave

if TYPE_CHECKING:
    from megasdc.train.build import Features


def pretrain(
    config_path: str,
    overrides: Sequence[str],
    allow_changed: Sequence[str] = (),
    leave: Leave | None = None,
    on_end: Callable[[str], object] = lambda end: None,
) -> tuple[int, BaseException | None]:
    """Train as one rank of a run; arguments and result are those of ``megasdc.train.main.pretrain``.

    Collective: all ranks of the world.
    """
    return main.pretrain(config_path, overrides, allow_changed, leave, on_end, features=_features)


def _features() -> Features:
    """The features of all storeys; imported with PyTorch, once the variables that it reads at its import are set."""
    from megasdc.features import FEATURES

    return FEATURES


if __name__ == "__main__":
    sys.exit(pretrain(sys.argv[1], [])[0])
