"""Interface of gradient hooks that a user loads from a Python file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megasdc.common.errors import ConfigError
from megasdc.common.user_code import create, load_class


@dataclass(frozen=True)
class GradientPart:
    """This rank's part of the reduced gradient of one parameter.

    Args:
        gradient: [n], to be changed in place; it holds ``scale`` times the gradient.
        second_moment: [n], fp32, the optimizer's from before this step, not to be changed; None in the first step.
        step: optimizer step, first is 1.
        scale: loss scale.
        offset: index of the first element in the whole parameter, row-major.
    """

    name: str
    gradient: Tensor
    second_moment: Tensor | None
    step: int
    scale: float
    offset: int


class GradientHook:
    """Base class of hooks from a file; called before the norm is taken and before the package's bounds.

    Every rank has its own instance and sees its own parts. So a hook must depend only on its arguments and on a state
    that is the same on all ranks.
    """

    def apply(self, part: GradientPart) -> None:
        """Change this rank's part of the gradient of one parameter in place.

        Sync: should be none.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State to restore after a resume, in plain values, the same on all ranks; empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned at the checkpoint."""


def load_hook(path: str, name: str, settings: dict[str, Any], place: str) -> GradientHook:
    """Create a hook from a class in a Python file.

    Args:
        path: the file; it is executed.
        settings: keyword arguments.
        place: place in the configuration, for messages.

    Raises:
        ConfigError: the file cannot be run, or has no such class, or the class rejects the settings.
    """
    if not path.endswith(".py"):
        raise ConfigError(f"{place}.path: got {path!r}, which is not a Python file; give one that ends in .py")
    hook: GradientHook = create(load_class(f"{path}:{name}", GradientHook, place), settings, place)
    return hook
