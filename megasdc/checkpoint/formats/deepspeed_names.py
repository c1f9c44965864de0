"""Names of DeepSpeed's checkpoint files, built and parsed here alone.

Source: DeepSpeed 0.19.8, ``PipelineModule.ckpt_layer_path``, ``DeepSpeedEngine._get_ckpt_name`` and
``_get_zero_ckpt_name``, ``deepspeed/checkpoint/ds_to_universal.py``.

- ``layer_03-model_01-model_states.pt``: weights of pipeline layer 3 on tensor rank 1.
- ``mp_rank_02_model_states.pt``: counters and shapes of stage file 2; a plain engine keeps its weights there too. The
  number counts pipeline stages and tensor ranks together.
- ``bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt``: the optimizer's shard of a dp rank (called pp there), with a
  prefix where weights are not fp32.
- ``zero/0.word_embeddings.weight/fp32.pt``: a state of a parameter, in a universal checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from megasdc.parallel.dims import ParallelDims

SHARD_FILES = "*zero_pp_rank_*_optim_states.pt"
"""Pattern of the files of optimizers."""
PARAMETERS_FOLDER = "zero"
"""Folder of a universal checkpoint with a subfolder for each parameter."""
UNIVERSAL_OPTIMIZER = f"{PARAMETERS_FOLDER}/optimizer_state.pt"
"""Parameter groups of a universal checkpoint."""
STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Tensors of a parameter there, each unsharded and in fp32: master weight, first and second moment."""
FileKind = Literal["layers", "optimizer", "stages", "parameters"]
_PREFIXES = ("", "bf16_", "fp16_")
_LAYER = re.compile(r"layer_(\d+)-model_\d+-model_states\.pt")
_STAGE = re.compile(r"mp_rank_\d+_model_states\.pt")
_SHARD = re.compile(r"(.*)zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_PARAMETER = re.compile(rf"{PARAMETERS_FOLDER}/(.+)/({'|'.join(STATES)})\.pt")


def layer_file(index: int, tp_rank: int) -> str:
    """Name of the file with the weights of a pipeline layer on a tensor rank."""
    return f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"


def layer_of(name: str) -> int | None:
    """The pipeline layer that a file belongs to; None: it is no layer's file."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def stage_number(dims: ParallelDims) -> int:
    """Number of a rank's stage file."""
    return dims.pp_rank * dims.tensor + dims.tp_rank


def stage_file(stage: int = 0) -> str:
    """Name of a stage file; number 0 is in every checkpoint of DeepSpeed but those of ZeRO-3."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def shard_file(dp_rank: int, stage: int, prefix: str = "") -> str:
    """Name of the file with a dp rank's shard of a stage's optimizer; see ``stage_number`` and ``find_prefix``."""
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{stage:02d}_optim_states.pt"


def shard_files(dims: ParallelDims) -> list[str]:
    """The names that the file of a rank's optimizer can have; the first is that of an fp32 run."""
    return [shard_file(dims.dp_rank, stage_number(dims), prefix) for prefix in _PREFIXES]


def find_prefix(names: Iterable[str]) -> str:
    """Prefix of the files of optimizers, such as ``bf16_``; empty if there are none."""
    return next((match[1] for name in names if (match := _SHARD.fullmatch(name))), "")


def parameter_file(parameter: str, state: str) -> str:
    """Path of a state of a parameter in a universal checkpoint."""
    return f"{PARAMETERS_FOLDER}/{parameter}/{state}.pt"


def parameter_of(name: str) -> tuple[str, str] | None:
    """Parameter and state that a path in a universal checkpoint holds; None: it is no state's file."""
    match = _PARAMETER.fullmatch(name)
    return (match[1], match[2]) if match else None


def kind_of_file(name: str | Path) -> FileKind | None:
    """Kind of content of a file of DeepSpeed, by its name in the checkpoint; None: of another file."""
    text = str(name)
    if text.startswith(f"{PARAMETERS_FOLDER}/"):
        return "parameters"
    kinds: dict[FileKind, re.Pattern[str]] = {"layers": _LAYER, "optimizer": _SHARD, "stages": _STAGE}
    return next((kind for kind, pattern in kinds.items() if pattern.fullmatch(text)), None)
