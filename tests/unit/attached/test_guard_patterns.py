"""Is a pattern of a guard's settings that matches nothing in the model told, with the names that are closest?"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from megasdc.attached.record import computing_names, pattern_problems, trained_names
from megasdc.attached.settings import load_settings

THETA = {"hook": "absolute", "theta": 1.0}


def _model() -> nn.Module:
    """Two blocks, of which the last part is frozen."""
    block = [nn.ModuleDict({"up_proj": nn.Linear(4, 8), "down_proj": nn.Linear(8, 4)}) for _ in range(2)]
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "layers": nn.ModuleList(block), "head": nn.Linear(4, 9)})
    model["head"].requires_grad_(False)
    return model


def _problems(**settings: Any) -> list[str]:
    model = _model()
    found = load_settings({"logging": {"run_dir": "run"}, **settings})
    return pattern_problems(found, computing_names(model), trained_names(model))


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*.up_prj", "nearest: layers.0.up_proj."),
        ("*.up_prj.*", "nearest: layers.0.up_proj."),
        ("layers.7.down_proj", "nearest: layers.1.down_proj, layers.0.down_proj"),
        ("Layers.1.up_proj", "nearest: layers.1.up_proj"),
        ("layers", "nearest: layers.0.down_proj"),  # a ModuleList, which computes nothing
        ("?", "there are embed, head, layers.0.down_proj"),
    ],
)
def test_a_pattern_that_matches_no_submodule_is_told(pattern: str, nearest: str) -> None:
    """Beside one that does; with the setting, the pattern and the closest names."""
    [said] = _problems(audit={"submodules": ["*proj", pattern]})
    assert said.startswith(f"audit.submodules.1: got {pattern!r}, which matches no submodule that computes something; ")
    assert nearest in said


def test_names_end_in_dots_only_where_there_are_more() -> None:
    """Five are shown."""
    for names, end in (("abcde", "there are a, b, c, d, e."), ("abcdef", "there are a, b, c, d, e ....")):
        [said] = pattern_problems(
            load_settings({"logging": {"run_dir": "run"}, "audit": {"submodules": ["zz"]}}), names, ()
        )
        assert said.endswith(end)


def test_bounds_of_nothing_are_told() -> None:
    """A frozen parameter, a name that is none, and what earlier entries bound already; each with its entry."""
    said = _problems(
        optimizer_hooks=[
            {**THETA, "parameters": ["head.*"]},
            {**THETA, "parameters": ["*.up_proj.*", "*.weigth"]},
            {**THETA, "parameters": ["layers.0.up_proj.bias"]},
        ]
    )
    wanted = [
        ("optimizer_hooks.0.parameters.0: got 'head.*', which matches no parameter that is trained",),
        ("optimizer_hooks.1.parameters.1: got '*.weigth'", "nearest: embed.weight"),
        ("optimizer_hooks.2.parameters", "earlier entries of hook absolute"),
    ]
    assert len(said) == len(wanted)
    for text, parts in zip(said, wanted, strict=True):
        assert all(part in text for part in parts), text


def test_what_matches_is_no_problem() -> None:
    """Names, patterns, and none at all."""
    assert _problems() == []
    assert _problems(audit={"submodules": ["embed", "*.1.*"]}, optimizer_hooks=[THETA]) == []
