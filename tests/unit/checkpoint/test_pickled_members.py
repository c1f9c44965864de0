"""Are members of enumerations read in each form that Pythons write them in, and is it no way to anything else?"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megasdc.checkpoint.formats.allowlist import check_pickle, load_checked, load_part, refuse_classes
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


def test_a_compressed_member_is_not_opened(tmp_path: Path) -> None:
    """``torch.save`` writes none, and torch would decompress it whole: 4 GiB of zeros are 4 MiB in the file."""
    whole, packed = tmp_path / "whole.pt", tmp_path / "packed.pt"
    torch.save({"x": torch.zeros(1 << 20)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    assert packed.stat().st_size < 1 << 17
    for action in (
        lambda: check_pickle(packed),
        lambda: load_checked(packed),
        lambda: load_checked(packed, "meta"),
        lambda: load_part(packed, 0, packed.stat().st_size),
    ):
        with pytest.raises(CheckpointError, match="compressed member"):
            action()
    assert load_checked(whole)["x"].numel() == 1 << 20
