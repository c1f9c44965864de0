"""Time and memory of comparing two nodes' manifests of a checkpoint of 1 TB.

The manifests are made up, without data: 4,096 ranks with a shard each, layers of tensor ranks, states of ranks. One
block of one shard differs. The command that a user calls is run on them in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import layer_file, shard_file
from megasdc.checkpoint.manifest import BLOCK_BYTES, DIGEST_DIGITS, Content, TensorContent
from megasdc.checkpoint.records import record_text
from megasdc.lab.checkpoints.digest import DIGEST_VERSION, CheckpointContent, Digest, FileContent
from tools.bench.checkpoints.options import TENSOR_RANKS, CompareManifestsOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result, verdict
from tools.bench.statistics import Estimate, estimate_median

BAR_S = 30.0
BAR_BYTES = 1 << 30
_COMMAND = "from megasdc.cli.compare import compare_checkpoints_main; compare_checkpoints_main()"
_MOMENTS = "optimizer_state_dict/base_optimizer_state/state/0"
_MASTER = "optimizer_state_dict/single_partition_of_fp32_groups/0"
_LAYERS = 80
_LAYER_TENSORS = (
    "layer.input_layernorm.weight",
    "layer.self_attention.linear_qkv.weight",
    "layer.self_attention.linear_proj.weight",
    "layer.pre_mlp_layernorm.weight",
    "layer.mlp.linear_fc1.weight",
    "layer.mlp.linear_fc2.weight",
)


@dataclass(frozen=True)
class CompareManifestsResult(Result):
    """Size of the manifests, time and memory of the command, and whether each run named the differing block alone.

    ``wall_s`` is the median from the command's start to its end; ``peak_bytes`` is the most over the runs.
    """

    also = ("passed", "bar_s", "bar_bytes")
    bar_s = BAR_S
    bar_bytes = BAR_BYTES

    num_files: int
    num_blocks: int
    manifest_bytes: int
    wall_s: Estimate
    peak_bytes: int
    found: bool

    @property
    def passed(self) -> bool:
        """Whether time and memory are within their bars and the answer was right."""
        return self.found and self.wall_s.median <= BAR_S and self.peak_bytes <= BAR_BYTES

    def report(self) -> Report:
        """Time, memory and answer, each with its verdict."""
        options, wall = self.options, self.wall_s
        yield (
            f"two made-up manifests of {options.size_gb:,} GB by {options.ranks:,} ranks: {self.num_files:,} files, "
            f"{self.num_blocks:,} blocks; {self.manifest_bytes / 1e6:.1f} MB each, "
            f"{self.manifest_bytes / options.size_gb:,.0f} bytes a GB"
        )
        yield (
            f"time of the command {wall.median:.2f} s ({wall.low:.2f} to {wall.high:.2f}, {wall.count} runs); the bar "
            f"is {BAR_S:g} s: {verdict(wall.median <= BAR_S)}"
        )
        yield (
            f"peak memory {self.peak_bytes / 2**20:.0f} MiB; the bar is {BAR_BYTES / 2**20:.0f} MiB: "
            f"{verdict(self.peak_bytes <= BAR_BYTES)}"
        )
        yield f"the one block that differs was named, and nothing else: {verdict(self.found)}"


def bench_compare_manifests(
    options: CompareManifestsOptions, on_progress: Progress = ignore_progress
) -> CompareManifestsResult:
    """Measure on this machine."""
    machine = describe_machine()
    harmed = options.ranks // 2
    with scratch_folder() as folder:
        paths = []
        for host, rank in (("node1", None), ("node2", harmed)):
            digest = made_up_digest(host, options, rank)
            paths.append(folder / f"{host}.manifest")
            paths[-1].write_text(record_text(digest, indent=None), encoding="utf-8")
        num_files = len(digest.files)
        num_blocks = sum(len(one.blocks) for file in digest.files if file.content for one in file.content.tensors)
        walls, peaks, found = [], [], True
        for run in range(options.runs):
            on_progress("comparing", run, options.runs)
            wall_s, peak, answer = _run(paths)
            walls.append(wall_s)
            peaks.append(peak)
            found = found and _is_right(answer, harmed)
        size = paths[0].stat().st_size
    return CompareManifestsResult(
        machine, options, num_files, num_blocks // DIGEST_DIGITS, size, estimate_median(walls), max(peaks), found
    )


def _run(paths: list[Path]) -> tuple[float, int, dict[str, Any]]:
    """Seconds, peak bytes, and what the command printed."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-c", _COMMAND, *map(str, paths), "--json"], stdout=out)
        _, _, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - started
        out.seek(0)
        answer = json.load(out)
    return wall_s, usage.ru_maxrss * 1024, answer


def _is_right(answer: dict[str, Any], rank: int) -> bool:
    found = [(one["what"], one["num_blocks"], one["rank"], one["name"]) for one in answer["differences"]]
    return found == [("blocks", 1, rank, f"{_MOMENTS}/exp_avg")]


def made_up_digest(host: str, options: CompareManifestsOptions, harmed: int | None) -> Digest:
    """A node's manifest of random digests, the same for the same sizes.

    12 of 14 bytes are the optimizer's, as with bf16 weights. One block differs in the shard of rank ``harmed``; None:
    none does.
    """
    draw = random.Random(1)
    total = options.size_gb * 10**9
    files = [*_layers(draw, total // 7), *_shards(draw, total * 6 // 7, options.ranks, harmed)]
    files += [_file(draw, f"rank_{rank:05d}_state.pt", rank, [], {}, []) for rank in range(options.ranks)]
    files.sort(key=lambda file: file.name)
    one = CheckpointContent(name="", step=1000, save_id="made-up", per_node=False, files=files)
    return Digest(
        format_version=DIGEST_VERSION,
        host=host,
        path="/made/up/step_00001000",
        time=0.0,
        as_saved=False,
        checkpoints=[one],
    )


def _layers(draw: random.Random, total: int) -> Iterator[FileContent]:
    size = total // (_LAYERS * TENSOR_RANKS * len(_LAYER_TENSORS)) // 2
    for layer in range(_LAYERS):
        for tp_rank in range(TENSOR_RANKS):
            tensors = [(name, f"bfloat16[{size}]", 2 * size) for name in _LAYER_TENSORS]
            name = layer_file(layer + 2, tp_rank)
            yield _file(draw, name, tp_rank, tensors, {}, [])


def _shards(draw: random.Random, total: int, ranks: int, harmed: int | None) -> Iterator[FileContent]:
    numel = total // ranks // 12
    for rank in range(ranks):
        dp_rank, stage = divmod(rank, TENSOR_RANKS)
        fragments = [
            {
                f"{2 + dp_rank % _LAYERS}.{name}": f"{numel * at // 6}+{numel // 6}"
                for at, name in enumerate(_LAYER_TENSORS)
            }
        ]
        names = (_MASTER, f"{_MOMENTS}/exp_avg", f"{_MOMENTS}/exp_avg_sq")
        tensors = [(name, f"float32[{numel}]", 4 * numel) for name in names]
        name = shard_file(dp_rank, stage, "bf16_")
        file = _file(draw, name, rank, tensors, {f"{_MOMENTS}/step": "1000.0"}, fragments)
        yield _with_one_block_changed(file) if rank == harmed else file


def _with_one_block_changed(file: FileContent) -> FileContent:
    assert file.content is not None, "made up with content"
    master, moment, rest = file.content.tensors
    last = "0" if moment.blocks[-1] != "0" else "1"
    changed = moment.model_copy(update={"blocks": moment.blocks[:-1] + last})
    content = file.content.model_copy(update={"tensors": [master, changed, rest]})
    return file.model_copy(update={"content": content, "xxh3_128": file.xxh3_128[::-1]})


def _file(
    draw: random.Random,
    name: str,
    rank: int,
    tensors: list[tuple[str, str, int]],
    values: dict[str, str],
    fragments: list[dict[str, str]],
) -> FileContent:
    found, place = [], 1024
    for tensor, kind, size in tensors:
        blocks = draw.randbytes(DIGEST_DIGITS // 2 * -(-size // BLOCK_BYTES)).hex()
        found.append(TensorContent(name=tensor, type=kind, offset=place, size_bytes=size, blocks=blocks))
        place += size
    digests = [draw.randbytes(DIGEST_DIGITS // 2).hex() for _ in range(2)]
    content = Content(block_bytes=BLOCK_BYTES, tensors=found, values=values, rest=digests[0], fragments=fragments)
    return FileContent(
        name=name,
        size_bytes=place,
        xxh3_128=digests[1],
        saved=digests[1],
        rank=rank,
        node=f"node{rank // 8}",
        content=content,
        problem=None,
    )
