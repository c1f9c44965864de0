"""Entries of `hooks`: classes of the user's own that are called in a run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from megasdc.config.fields import Section, setting


class UserHookSpec(Section):
    """One entry: a class, and how it is made; a text alone is its `hook`."""

    at_resume = "applied"

    hook: str = setting(
        ...,
        "`module:Class`, of a module in the folder of the launch or where Python looks for packages, or "
        "`file.py:Class`; a subclass of `megasdc.Hook`. It runs with all rights of the training process.",
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z_0-9]*$",
    )
    options: dict[str, Any] = setting({}, "Keyword arguments of the class.")


def _in_full(entry: Any) -> Any:
    return {"hook": entry} if isinstance(entry, str) else entry


UserHook = Annotated[UserHookSpec, BeforeValidator(_in_full)]
