"""Is a loop of the benchmark in the mode that it is measured in?"""

import pytest
import torch

from megasdc.config.sections import DeterminismSection
from tools.bench.training.loops import DeterministicLoop, MegasdcLoop


def test_the_mode_is_on_during_a_block_alone(monkeypatch):
    """The other loop's blocks run without the mode, also after a block that failed."""
    seen = []

    def run(self, steps):
        seen.append((steps, torch.are_deterministic_algorithms_enabled()))
        if steps == 0:
            raise RuntimeError("a step failed")

    monkeypatch.setattr(MegasdcLoop, "run", run)
    loop = object.__new__(DeterministicLoop)
    loop.section = DeterminismSection(enabled=True)
    loop.run(4)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="a step failed"):
        loop.run(0)
    assert not torch.are_deterministic_algorithms_enabled()
    assert seen == [(4, True), (0, True)]
