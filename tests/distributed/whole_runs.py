"""How do tests train whole runs? Small prepared text, a config file, ranks from the fork server."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import shutil
import socket
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from harness import run_distributed
from tiny import LLAMA_STYLE

_GPT: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64}
MODELS: dict[str, dict[str, Any]] = {"gpt": _GPT, "llama": {**_GPT, **LLAMA_STYLE}}


def prepare_text(folder: Path) -> Path:
    """Put a few modules of the standard library, tokenized, into ``folder/data`` and return that folder.

    Their texts are in ``folder/texts``. All is made once a process, and copied.
    """
    shutil.copytree(_prepared_text().name, folder, dirs_exist_ok=True)
    return folder / "data"


@functools.cache
def _prepared_text() -> tempfile.TemporaryDirectory[str]:
    """What ``prepare_text`` copies; removed at the end of the process."""
    made = tempfile.TemporaryDirectory(prefix="megasdc_text_")
    tokenize_text(Path(made.name))
    return made


def tokenize_text(folder: Path) -> Path:
    """Make what ``prepare_text`` gives, by itself."""
    from megasdc.config.data import DataSection
    from megasdc.data.prepare import prepare

    texts = folder / "texts"
    texts.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse", "ast", "inspect", "tarfile", "typing", "pathlib", "zipfile", "shutil", "random", "heapq"):
        source = library / f"{name}.py"
        if source.exists():
            (texts / f"{name}.txt").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    section = DataSection.model_validate(
        {
            "path": str(folder / "data"),
            "split": [8, 1, 1],
            "sources": [{"kind": "files", "path": str(texts)}],
            "tokenizer": {"vocab_size": 500, "train_characters": 200_000},
        }
    )
    prepare(section, folder / "data", workers=1, progress=False)
    return folder / "data"


def write_config(path: Path, data: Path, run_dir: Path, **changes: Any) -> Path:
    """Write a config file; ``changes`` are dotted paths with ``__`` for the dots, ``megasdc.`` left out.

    A run saves at its end and where it is stopped; saves are half of the work of so small a run.
    """
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "megasdc": {
            "model": dict(MODELS["gpt"]),
            "data": {"path": str(data), "sequence_length": 32},
            "parallel": {"timeout_s": 60.0},
            "protect": "off",
            "training": {"steps": 6, "eval_interval": 3, "eval_samples": 4},
            "checkpoint": {"interval": 0, "keep_last": 0},
            "logging": {"run_dir": str(run_dir), "interval": 1},
        },
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = config if parents and parents[0] == "deepspeed" else config["megasdc"]
        for parent in parents[1:] if place is config else parents:
            place = place.setdefault(parent, {})
        place[last] = value
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def write_run(folder: Path, data: Path, name: str, **changes: Any) -> Path:
    """Write ``folder/name.json``, the config of a run in ``folder/name``; ``changes`` as in ``write_config``."""
    return write_config(folder / f"{name}.json", data, folder / name, **changes)


def checked(**always_on: Any) -> dict[str, Any]:
    """Changes for a deterministic run with checks of every step, of which these settings are no defaults."""
    return {"determinism": {"enabled": True}, "sdc": {"always_on": {"enabled": True, **always_on}}}


def sizes_of(layout: tuple[int, int, int]) -> dict[str, int]:
    """Changes for so many tensor ranks, stages and replicas, each of which takes two micro-batches of a step."""
    tensor, pipeline, replicas = layout
    return {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "deepspeed__train_batch_size": 2 * replicas}


def pretrain_rank(config: str, overrides: list[str], allow: tuple[str, ...] = ()) -> tuple[int, str | None]:
    """Body of a rank: train as the entry script does; returns exit code and message."""
    from megasdc.pretrain import pretrain

    code, error = pretrain(config, overrides, allow)
    sys.stderr.flush()
    return code, None if error is None else str(error)


def pretrain_within(config: str, overrides: list[str], memory_bytes: int) -> tuple[int, str | None]:
    """Body of a rank that can have so much memory of its own and no more, as under ``ulimit -d``.

    Returns the exit code, and the message or, where the code is not a documented one, the traceback.
    """
    from megasdc.pretrain import pretrain

    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    code, error = pretrain(config, overrides)
    if code == 1 and error is not None:
        return code, "".join(traceback.format_exception(error))
    return code, None if error is None else str(error)


def leave_with_the_code(config: str, *overrides: str) -> None:
    """Body of a rank whose process ends with the exit code of its training, also while a peer hangs."""
    code, _ = pretrain_rank(config, list(overrides))
    os._exit(code)


def train_run(config: Path, world_size: int, *overrides: str, **options: Any) -> list[Any]:
    """Train on gloo ranks and return (exit code, message) of each."""
    return run_distributed(pretrain_rank, world_size, str(config), list(overrides), init=False, **options)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on time: loss, rate, norms, counters, evaluation."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k == "step" or k.startswith(("train/", "eval/"))} for row in rows]
    return [row for row in kept if len(row) > 1]


def state_of(checkpoint: Path) -> dict[str, str]:
    """A digest of everything in a checkpoint that decides how a run goes on, by file and key."""
    digests: dict[str, str] = {}
    for path in sorted(checkpoint.glob("*.pt")):
        _walk(path.name, torch.load(path, map_location="cpu", weights_only=False), digests)
    return {name: value for name, value in digests.items() if "ds_config" not in name and "ds_version" not in name}


def saved_at_end(run_dir: Path) -> dict[str, str]:
    """What a run of six steps has saved at its end."""
    return state_of(run_dir / "checkpoints" / "step_00000006")


def end_of(run_dir: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """How a run of six steps has ended: what it has saved then, and its metrics."""
    return saved_at_end(run_dir), metrics_of(run_dir)


def verdicts_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """Step, tier, rank, verdict, basis and action of each verdict on a rank."""
    names = ("step", "tier", "rank", "verdict", "basis", "action")
    return [tuple(one[name] for name in names) for one in events_of(run_dir, "sdc", "verdict")]


def failure_of(run_dir: Path) -> Any:
    """What ``megasdc summary`` says of how the last start failed; the host is this one."""
    from megasdc.ops.run_folder.summary import render, summarize_run

    summary = summarize_run(run_dir)
    found = summary.failure
    assert found is not None and found.host == socket.gethostname()
    text = render(summary)
    assert f"ended with        exit code {found.exit_code}: " in text and f"because           {found.text}" in text
    return found


def _walk(name: str, value: Any, digests: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(f"{name}/{key}", item, digests)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _walk(f"{name}/{index}", item, digests)
    elif isinstance(value, int | float | str | bool | None):
        digests[name] = repr(value)


def events_of(run_dir: Path, kind: str, name: str) -> list[dict[str, Any]]:
    """Events of all ranks of one kind and name."""
    from megasdc.events import read_events

    return [{"rank": e.rank, "step": e.step, **e.fields} for e in read_events(run_dir, kind=kind, name=name)]
