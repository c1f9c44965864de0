"""A pipeline small enough to save and load many times in a test, and exact digests of its whole state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megasdc.checkpoint.load import LoadedState, load_checkpoint
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.resume import find_checkpoint
from megasdc.checkpoint.save import Retention, SaveResult, save_checkpoint
from megasdc.checkpoint.snapshot import SavedState
from megasdc.determinism import capture_rng, restore_rng
from megasdc.parallel.dims import ParallelDims

MICRO_BATCHES = 2


class Block(nn.Module):
    """A linear layer with dropout from the global generator, so that a resumed run needs its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for parameter in self.linear.parameters():  # as if cut: each tensor rank counts its own in the norm
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(hidden), 0.1, self.training)


class Run:
    """An engine with its data stream, as a training loop would hold them."""

    def __init__(
        self,
        tensor: int = 1,
        pipeline: int = 1,
        dtype: str = "fp32",
        width: int = 8,
        layers: int = 4,
        seed: int = 1,
        zero: dict[str, Any] | None = None,
    ) -> None:
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.pipe.engine import PipelineEngine
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        ranks = torch.distributed.get_world_size()
        self.dims = ParallelDims.from_world(tensor, pipeline, ranks, torch.distributed.get_rank())
        torch.manual_seed(seed)
        module = PipelineModule(
            [LayerSpec(Block, width) for _ in range(layers)],
            topology=PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=self.dims.data),
            loss_fn=nn.MSELoss(),
            partition_method="uniform",
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 100, "warmup_num_steps": 2},
            },
            "zero_optimization": {"stage": 1, **(zero or {})},
            "gradient_clipping": 1.0,
        }
        if dtype == "bf16":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        self.engine = PipelineEngine(
            args=None,
            model=module,
            optimizer=None,
            model_parameters=list(module.parameters()),
            mpu=module.mpu(),
            config=config,
            config_class=DeepSpeedConfig(config, module.mpu()),
            dont_change_device=True,
        )
        self.width, self.dtype = width, torch.bfloat16 if dtype == "bf16" else torch.float32
        self.consumed = 0

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield micro-batches that depend on the replica and the position alone."""
        while True:
            generator = torch.Generator().manual_seed(1000 * self.dims.dp_rank + self.consumed)
            self.consumed += 1
            pair = torch.randn(2, 2, self.width, generator=generator).to(self.dtype)
            yield pair[0], pair[1]

    def train(self, steps: int) -> list[float]:
        """Train and return the losses."""
        losses = []
        for _ in range(steps):
            position = self.consumed
            losses.append(float(self.engine.train_batch(self.batches())))
            self.consumed = position + MICRO_BATCHES
        return losses

    def save(self, folder: Path | str, keep_last: int = 0, keep_every: int = 0, **ranks: Any) -> SaveResult:
        """Save after the last step."""
        return save_checkpoint(
            self.engine,
            folder,
            self.engine.global_steps,
            SavedState({"positions": [self.consumed]}, {"rng": capture_rng(), "consumed": self.consumed}),
            self.dims,
            CheckpointGroup(**ranks),
            Retention(keep_last, keep_every),
        )

    def resume(self, folder: Path | str, resume: Any = "auto", **ranks: Any) -> LoadedState | None:
        """Go on from the newest usable checkpoint."""
        chosen = find_checkpoint(folder, self.dims, CheckpointGroup(**ranks), resume=resume)
        if chosen is None:
            return None
        loaded = load_checkpoint(self.engine, chosen, self.dims, CheckpointGroup(**ranks))
        restore_rng(loaded.rank_state["rng"])
        self.consumed = loaded.rank_state["consumed"]
        return loaded

    def digest(self) -> str:
        """Hash of every bit that training depends on: weights, master weights, moments, LR, counters, RNG."""
        state = hashlib.sha256()
        inner = self.engine.optimizer.optimizer
        for value in [*self.engine.module.parameters(), *_tensors(inner.state_dict()["state"])]:
            state.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for group in inner.param_groups:
            for parameter in group["params"]:
                state.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
            state.update(repr((group["lr"], group["weight_decay"])).encode())
        state.update(repr((self.engine.global_steps, self.engine.skipped_steps, self.consumed)).encode())
        state.update(torch.get_rng_state().numpy().tobytes())
        state.update(np.random.get_state(legacy=False)["state"]["key"].tobytes())
        return state.hexdigest()


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested dicts, in order of their keys, scalars made one element long."""
    if isinstance(value, torch.Tensor):
        return [value.reshape(-1)]
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in _tensors(value[key])]
    return []
