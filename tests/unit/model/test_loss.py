"""Is the loss over a divided vocabulary that of the whole one, and is each rank's own share of it seen before it is
reduced?
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megasdc.model.loss import VocabParallelCrossEntropy


def test_own_results_are_seen_before_they_are_reduced(tmp_path: Path) -> None:
    """Maximum, predicted logit and sum of a rank that has some of the columns, one label elsewhere."""
    logits = torch.tensor([[[1.0, 3.0, 2.0], [0.0, -1.0, 0.5]]])
    labels, seen = torch.tensor([[5, 9]]), {}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        loss = VocabParallelCrossEntropy.apply(
            logits.clone(), labels, 4, dist.group.WORLD, lambda name, value: seen.update({name: value.clone()})
        )
    finally:
        dist.destroy_process_group()
    assert list(seen) == ["maximum", "predicted", "sum"]
    assert seen["maximum"].tolist() == [[3.0, 0.5]]
    assert seen["predicted"].tolist() == [[0.0, 0.0]], "3 - 3; the label of the second is another rank's"
    torch.testing.assert_close(seen["sum"], (logits - seen["maximum"].unsqueeze(-1)).exp().sum(-1))
    torch.testing.assert_close(loss[0, 0], F.cross_entropy(logits[0, :1], torch.tensor([1])))
