"""What does one rank of a repeatability check do? Some training steps, and a checksum of everything after each.

Started by ``megasdc.bench.ranks``, one process a rank. The first argument is the request as JSON, the second, on rank 0
alone, the file descriptor that messages go to. torch is imported after deterministic mode's environment is set.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasdc.bench.ranks import Messages
from megasdc.config import RunConfig, check_layout, parse_config
from megasdc.config.environment import set_deterministic_environment
from megasdc.train.main import as_known_error, set_up_logging

if TYPE_CHECKING:
    import torch

    from megasdc.engine.engine import StepResult, TrainingEngine

logger = logging.getLogger("megasdc")

DISTINCT_STEPS = 8
"""Steps after which random samples repeat."""


def checksum(tensor: torch.Tensor) -> str:
    """128 bits of the bytes of a tensor, in hexadecimal.

    Sync: copies the tensor to the host.
    """
    import torch
    import xxhash

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def observe(engine: TrainingEngine, result: StepResult) -> Iterator[tuple[int, str, str, str]]:
    """Checksums of this rank after a step, in the order in which a step makes what they are of.

    Args:
        engine: after the step.
        result: of the step.

    Yields:
        (step, phase, name, checksum).
    """
    import torch

    from megasdc.optim.zero1 import parameter_states

    loss, norm = (torch.tensor(value, dtype=torch.float64) for value in (result.loss, result.grad_norm))
    yield result.step, "forward", "loss", checksum(loss)
    yield result.step, "reduced_grad", "gradient norm", checksum(norm)
    for name, state, values in parameter_states(engine.optimizer, engine.module):
        yield result.step, "update", f"{name} {state}", checksum(values)
    for name, parameter in engine.module.named_parameters():
        yield result.step, "parameter", name, checksum(parameter)


def run_steps(config: RunConfig, steps: int, prepared: bool, folder: Path, messages: Messages) -> None:
    """Train some steps and write this rank's checksums to ``records_NNNNN.json``.

    Args:
        config: the configuration.
        steps: how many.
        prepared: whether to read the prepared data; otherwise random tokens from a fixed seed.
        folder: where the records go.
        messages: told about each step.

    Raises:
        MegasdcError: with the class that says what is wrong.

    Collective: all ranks of the world.
    """
    from megasdc.bench.loops import MemoryStream
    from megasdc.data.dataset import build_datasets, verify_data
    from megasdc.data.loader import MicroBatchLoader, SampleStream
    from megasdc.determinism import set_deterministic
    from megasdc.parallel import groups
    from megasdc.train.build import build_training_engine, set_threads
    from megasdc.train.startup import StartClock

    sections = config.megasdc
    layout = check_layout(config, int(os.environ["WORLD_SIZE"]))
    set_threads(sections.parallel.threads)
    set_deterministic(sections.determinism)
    samples = steps * layout.train_batch_size
    stream: SampleStream
    if prepared:
        vocab = verify_data(sections.data)[0].tokenizer.vocab_size
        stream = build_datasets(sections.data, vocab, samples, 0, cache_dir=folder)[0]
    else:
        vocab = sections.data.tokenizer.vocab_size
        distinct = min(steps, DISTINCT_STEPS) * layout.train_batch_size
        stream = MemoryStream(vocab, sections.data.sequence_length, distinct, samples)
    groups.init_process_group(sections.parallel.timeout_s)
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, sections.parallel.timeout_s)
    engine = build_training_engine(config, layout, dims, vocab, StartClock(time.monotonic()))
    groups.set_all_timeouts(sections.parallel.timeout_s)
    loader = MicroBatchLoader(stream, layout.micro_batch_size, dims.dp_rank, dims.data)
    messages.send(done=0)
    records: list[tuple[int, str, str, str]] = []
    for step in range(1, steps + 1):
        records += observe(engine, engine.train_step(loader))
        messages.send(done=step)
    place = f"rank {dims.rank} (dp {dims.dp_rank}, pp {dims.pp_rank}, tp {dims.tp_rank})"
    text = json.dumps({"place": place, "records": records})
    (folder / f"records_{dims.rank:05d}.json").write_text(text, encoding="utf-8")
    groups.shutdown()


def main() -> None:
    """Run as a rank."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    try:
        config = parse_config(request["config"], source=request["source"])
        set_deterministic_environment(config.megasdc.determinism, os.environ)
        run_steps(config, request["steps"], request["prepared"], Path(request["folder"]), messages)
    except Exception as error:
        known = as_known_error(error)
        if known is None:
            raise
        logger.error("%s", known)
        sys.stderr.flush()
        os._exit(known.exit_code)  # destructors of process groups may wait for ranks that have gone


if __name__ == "__main__":
    main()
