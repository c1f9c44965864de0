"""Do global random generators count only where they must be equal?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hand_made import seal, write_checkpoint

from megasdc.checkpoint.files import rank_state_file
from megasdc.lab.checkpoints.checkpoints import compare_checkpoints
from megasdc.lab.checkpoints.views.open import open_view


@pytest.mark.parametrize("other", ["0123", "4567"], ids=["one save", "two saves"])
def test_generators_differ(tmp_path: Path, other: str) -> None:
    """Between copies of one save it is a difference, between two runs a note; everything else is compared in both."""
    one = write_checkpoint(tmp_path / "a", layout=(1, 1, 2))
    two = write_checkpoint(tmp_path / "b", layout=(1, 1, 2), save_id=other)
    torch.save({"rng": {"torch": torch.arange(1, 101)}, "rank": 1}, two / rank_state_file(1))
    seal(two)
    report = compare_checkpoints([open_view(one), open_view(two)])
    noted = [note for note in report.notes if "global random generators of 1 ranks" in note]
    assert report.problems == []
    if other == "0123":
        assert [(one.fqn, one.slot) for one in report.findings] == [("rank 00001/random generators", "scalar")]
        assert noted == []
    else:
        assert report.same
        assert len(noted) == 1
