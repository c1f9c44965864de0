"""Are members of enumerations read in each form that Pythons write them in, and is it no way to anything else?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megasdc.checkpoint.formats.allowlist import check_pickle, load_checked, refuse_classes
from megasdc.errors import CheckpointError


class _Attribute:
    """Pickled as the call that Python 3.11.0 to 3.11.3 write for a member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def _saved(path: Path, owner: Any, name: str) -> Path:
    torch.save({"zero_stage": _Attribute(owner, name), "x": torch.ones(3)}, path)
    return path


def test_a_member_is_read(tmp_path: Path) -> None:
    """Where nothing but the restricted unpickler opens the file; else it is refused, since others would run it."""
    file = _saved(tmp_path / "state.pt", ZeroStageEnum, "optimizer_states")
    assert load_checked(file, members=True)["zero_stage"] is ZeroStageEnum.optimizer_states
    for refuse in (check_pickle, load_checked):
        with pytest.raises(CheckpointError, match=r"builtins\.getattr"):
            refuse(file)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ZeroStageEnum, "__class__"), (ZeroStageEnum, "mro"), (fragment_address, "__init__"), (fragment_address, "numel")],
)
def test_nothing_else_is(tmp_path: Path, owner: Any, name: str) -> None:
    """Other attributes of enumerations, and those of other classes, are not reached."""
    with pytest.raises(CheckpointError, match="is no member of an enumeration"):
        load_checked(_saved(tmp_path / "state.pt", owner, name), members=True)


def test_one_name_that_would_run_code_is_enough_to_say_so() -> None:
    """Among harmless strangers too; of those alone it is not said."""
    for names, grave in (
        (["posix.system", "some.Thing"], True),
        (["some.Thing", "os.x"], True),
        (["some.Thing"], False),
    ):
        assert ("would run code" in str(refuse_classes("a.pt", names))) == grave
