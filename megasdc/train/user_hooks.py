"""Hooks of the user's own: made from the configuration, given their places, and named where they fail."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megasdc.common.errors import ConfigError, as_known_error
from megasdc.common.user_code import create, load_class
from megasdc.config.hooks import UserHookSpec
from megasdc.engine.hooks import PURPOSES, Hook, Run, Slot
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

_CALLED = [name for name in vars(Hook) if not name.startswith("_") and callable(getattr(Hook, name))]


def build_user_hooks(specs: Sequence[UserHookSpec], run: Run) -> list[Hook]:
    """Make the hooks of the user's own, in the order of the configuration.

    Raises:
        ConfigError: one cannot be made on some rank, or has no place; on all ranks.

    Collective: all ranks of the world, if there are any.
    """
    hooks: list[Hook] = []
    problem = None
    for place, spec in enumerate(specs):
        try:
            hooks.append(_build(spec, f"megasdc.hooks.{place}"))
        except ConfigError as error:
            problem = f"rank {run.dims.rank}: {error.problems[0]}"
            break
    if specs and (problems := [one for one in gather_objects(problem, run.host_group) if one is not None]):
        raise ConfigError(problems[0])
    return hooks


def refuse_shared_names(hooks: Sequence[Hook], own: Sequence[Hook]) -> None:
    """ConfigError if a hook of the user's own has the name of another hook's state, which one of them would lose."""
    for hook in own:
        other = next(
            (one for one in hooks if one is not hook and hook.saved_as and one.saved_as == hook.saved_as), None
        )
        if other is not None:
            raise ConfigError(
                f'megasdc.hooks: the state of {type(hook).__name__} has the name "{hook.saved_as}", which is that of '
                f"{type(other).__name__}; give it another saved_as"
            )


def _build(spec: UserHookSpec, place: str) -> Hook:
    hook: Hook = create(load_class(spec.hook, Hook, place), spec.options, place)
    if hook.slot not in PURPOSES:
        slots = ", ".join(PURPOSES)
        raise ConfigError(f"{place}: {spec.hook} has the slot {str(hook.slot)!r}; the slots are {slots}")
    hook.slot = Slot(hook.slot)
    for name in _CALLED:
        if getattr(type(hook), name) is not getattr(Hook, name):
            setattr(hook, name, _named(getattr(hook, name), f"{place}: {spec.hook} failed in {name}"))
    return hook


def _named(call: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrapper of a method of a user's class, which names the class in errors."""

    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # whatever the user's code does
            if (known := as_known_error(error)) is not None:  # such as another rank that has gone
                raise known from error
            logger.error("%s\n%s", what, traceback.format_exc())
            raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error

    return named
