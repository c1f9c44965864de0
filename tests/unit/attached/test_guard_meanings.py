"""Are results of a whole model that are NaN or Inf called what they are, and is each told to people, and told once?"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasdc.attached import nonfinite
from megasdc.attached.batch_replayer import BatchReplayer
from megasdc.attached.nonfinite import (
    CHOSEN,
    EMPTY,
    GIVEN,
    HIDDEN,
    LOSS,
    NO_LABEL,
    SEEN,
    GuardNonFinite,
    Meanings,
    MicroBatches,
    Warnings,
)
from megasdc.attached.record import ROOT, ResultRecorder
from megasdc.common.addresses import BACKWARD, FORWARD, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.nonfinite import Explanation, FiniteRecorder, NonFinite, NonFiniteOrigin
from megasdc.tensors.checksum import default_algorithm

ONE = ParallelDims(1, 1, 1)
CPU = torch.device("cpu")


class _Model(nn.Module):
    def __init__(self, results: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self._results = nn.Linear(2, 2), results

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return self._results(self.linear(x).sum())


def _meanings(results: Callable[[Tensor], Any], **options: Any) -> tuple[Any, Any]:
    """What the first result that is not finite is called, seen in training and when computed again."""
    model = _Model(results)
    batches = MicroBatches(model, CPU, lambda: 1, 1 << 20)
    model(torch.ones(1, 2), **options)
    meanings = Meanings(batches, chosen=False, hides=False)
    recorder = ResultRecorder(model, (), default_algorithm(CPU))
    recorder.listener = again = FiniteRecorder()
    kept = batches.kept[0]
    assert kept.batch is not None
    BatchReplayer(model, CPU, recorder, 0, lambda: None).compute(kept.batch, 1, kept.state)
    found = batches.finite.pop_first(ONE), again.pop_first(ONE)
    seen, computed = (None if one is None or one.address.phase != FORWARD else one.address for one in found)
    return (
        seen and meanings.of(seen, recomputed=False),
        computed and meanings.of(computed, recomputed=True),
    )


def test_only_a_loss_is_called_the_loss() -> None:
    """A number without gradients is none; the loss is it wherever it is, though results are numbered in two ways."""
    nan = float("nan")
    assert _meanings(lambda total: total * nan) == (SEEN, LOSS)
    assert _meanings(lambda total: (torch.tensor(nan), total)) == (None, None)
    last = _meanings(lambda total: {"logits": torch.zeros(4), "aux": torch.ones(()), "total_loss": total * nan})
    assert last == (SEEN, LOSS)
    assert _meanings(lambda total: (total, torch.tensor(nan), total * 2)) == (None, None)


def test_why_a_mean_over_nothing_is_nan_is_said_as_it_is() -> None:
    """All labels are ignored, or there are none."""
    nan = float("nan")
    labels = torch.full((1, 3), -100)
    assert _meanings(lambda total: total * nan, labels=labels) == (NO_LABEL, NO_LABEL)
    assert _meanings(lambda total: total * nan, labels=labels[:, :0]) == (EMPTY, EMPTY)
    assert _meanings(lambda total: total * nan, labels=labels + 101) == (SEEN, LOSS)


def test_what_is_not_watched_and_what_a_log_hides_is_said() -> None:
    """Also of a loss that is computed outside of the model."""
    model = _Model(lambda total: total)
    batches = MicroBatches(model, CPU, lambda: 1, 1 << 20)
    model(torch.ones(1, 2))
    meanings = Meanings(batches, chosen=True, hides=True)
    result = Address(1, 0, FORWARD, ROOT, "output")
    assert meanings.of(result, recomputed=True) == LOSS + CHOSEN + HIDDEN
    assert "of the submodules that are watched" in LOSS and "audit.submodules" in CHOSEN
    assert meanings.of(result, recomputed=False) == SEEN + HIDDEN
    assert meanings.of(Address(1, 0, BACKWARD, ROOT, "output"), recomputed=False) == GIVEN + HIDDEN


def _of_rank(rank: int, step: int, reproduced: bool | None) -> Explanation:
    found = NonFinite(Address(step, 0, FORWARD, ROOT, "output"), 0, "NaN")
    return Explanation(rank, NonFiniteOrigin(found, f"host{rank}", True, False, True, SEEN), reproduced)


def test_a_nan_that_was_not_reproduced_is_told_of_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    """It may be the rank's fault; one that comes again whenever computed is the data's, and told once."""
    told = Warnings()
    for step, rank, reproduced in ((3, 0, False), (100, 5, False), (101, 5, False), (102, 5, True), (103, 6, True)):
        told.warn(step, _of_rank(rank, step, reproduced), [])
    assert [one.partition(":")[0] for one in caplog.messages] == ["step 3", "step 100", "step 102"]
    assert "rank 5 (host5)" in caplog.messages[1]
    caplog.clear()
    told.log_repeats()
    once, other = caplog.messages
    assert once.startswith("NaN or Inf again in 1 more steps, the last is step 101: ") and "rank 5 (host5)" in once
    assert other == f"NaN or Inf again in 1 more steps, the last is step 103: {SEEN}"


def test_what_came_again_is_told_in_words_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Also of what has no place, and where nobody closes the guard; what is told is not told again."""
    told = Warnings()
    lacks = ["micro-batch 0 of rank 0: more bytes than nonfinite.keep_mib"]
    for step in (1, 2, 3):
        told.warn(step, Explanation(None, None, None), lacks)
    caplog.clear()
    told.log_repeats()
    (again,) = caplog.messages
    assert again.startswith("NaN or Inf again in 2 more steps, the last is step 3: ") and again.endswith(lacks[0])
    assert "no micro-batch could be computed again" in again and "None" not in again
    caplog.clear()
    told.warn(7, Explanation(None, None, None), lacks)
    with caplog.at_level(logging.WARNING):
        del told
        gc.collect()
    assert [one.partition(":")[0] for one in caplog.messages] == [
        "NaN or Inf again in 1 more steps, the last is step 7"
    ]


def test_tensor_ranks_do_not_count_what_one_of_them_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch that no tensor rank computes again has a reason on each, and is not taken for finite."""
    monkeypatch.setattr(nonfinite, "gather_objects", lambda own, _: [own, "it has more bytes"])
    kept = [SimpleNamespace(lacks=None)]
    training = SimpleNamespace(host_group=None)
    guard: Any = SimpleNamespace(
        _batches=SimpleNamespace(kept=kept), _training=training, _dims=ParallelDims(2, 1, 1), _recompute_here=None
    )
    assert GuardNonFinite._recompute(guard, 1, 0) == (None, "it has more bytes")
