"""One rank of a repeatability check: some training steps under a tracer.

Started by ``megasdc.parallel.run_ranks``. The first argument is the request as JSON, the second, on rank 0 alone, the
file descriptor that messages go to. torch is imported after deterministic mode's environment is set.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.common.addresses import PARAMETER, REDUCED_GRAD, UPDATE, Address
from megasdc.common.errors import as_known_error
from megasdc.common.imports import frozen_imports
from megasdc.config.checks import check_layout
from megasdc.config.environment import set_deterministic_environment
from megasdc.config.load import RunConfig, parse_config
from megasdc.config.sections import TraceSection
from megasdc.parallel.run_ranks import ReportChannel
from megasdc.sdc.trace import Trace
from megasdc.train.logs import set_up_logging

logger = logging.getLogger("megasdc")

DISTINCT_STEPS = 8
"""Steps after which random samples repeat."""


def run_steps(config: RunConfig, steps: int, prepared: bool, folder: Path, messages: ReportChannel) -> None:
    """Train some steps and write this rank's trace to ``folder``; ``messages`` gets each step.

    ``prepared``: read the prepared data; otherwise random tokens from a fixed seed.

    Collective: all ranks of the world.
    """
    with frozen_imports():
        from megasdc.data.dataset import build_datasets, verify_section_data
        from megasdc.data.loader import MemoryStream, MicroBatchLoader, SampleStream
        from megasdc.data.position import Order, Position
        from megasdc.determinism import set_deterministic
        from megasdc.parallel import groups
        from megasdc.sdc.trace import TraceWriter, trace_path
        from megasdc.train.build_engine import build_training_engine
        from megasdc.train.process import StartClock, prepare_cpu

    sections = config.megasdc
    layout = check_layout(config, int(os.environ["WORLD_SIZE"]))
    prepare_cpu(sections.parallel.threads)
    set_deterministic(sections.determinism)
    samples = steps * layout.train_batch_size
    stream: SampleStream
    if prepared:
        vocab = verify_section_data(sections.data)[0].tokenizer.vocab_size
        stream = build_datasets(sections.data, vocab, samples, 0, cache_dir=folder)[0]
    else:
        vocab = sections.data.tokenizer.vocab_size
        distinct = min(steps, DISTINCT_STEPS) * layout.train_batch_size
        stream = MemoryStream(vocab, sections.data.sequence_length, distinct, samples)
    groups.init_process_group(sections.parallel.timeout_s)
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, sections.parallel.timeout_s)
    engine = build_training_engine(config, layout, dims, vocab, StartClock(time.monotonic()))
    groups.set_all_timeouts(sections.parallel.timeout_s)
    begin = Position(order=Order(together=layout.dealt_together))
    loader = MicroBatchLoader(stream, layout.micro_batch_size, dims.dp_rank, dims.data, begin)
    messages.send(done=0)
    take = _observe(engine)
    writer = TraceWriter(trace_path(folder, dims.rank, 1), {})
    for step in range(1, steps + 1):
        result = engine.train_step(loader)
        trace = take(step)
        trace.extend(_numbers(step, {"loss": result.loss, "grad_norm": result.grad_norm}))
        writer.append(trace)
        messages.send(done=step)
    writer.close()
    groups.shutdown()


def _observe(engine: Any) -> Callable[[int], Trace]:
    """Start observing; returns a function that returns a step's checksums, to be called after each step.

    Where results of submodules cannot be observed, they are of optimizer states and parameters alone.
    """
    from megasdc.common.errors import ConfigError
    from megasdc.engine.observer import Observer
    from megasdc.model.submodules import list_submodules
    from megasdc.sdc.tracer import Tracer
    from megasdc.tensors.checksum import default_algorithm

    checksums = default_algorithm(engine.device)
    try:
        submodules = list_submodules(engine.module)
    except ConfigError as error:
        logger.warning("only losses, norms, optimizer states and parameters are compared: %s", error)
        return lambda step: _states(engine, step, checksums)
    tracer = Tracer(checksums, TraceSection.model_validate({}))
    Observer(engine, submodules, [tracer])  # lives as long as the process
    return lambda _step: tracer.pop_trace()


def _states(engine: Any, step: int, checksums: Any) -> Trace:
    """Checksums of masters, moments and parameters as they are after a step."""
    from megasdc.optim.zero1 import owned_fragments
    from megasdc.tensors.checksum import read_back

    addresses, values = [], []
    named = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for fragment in owned_fragments(engine.optimizer):
        name = named[id(fragment.parameter)]
        for slot, value in {"master": fragment.master, **fragment.states(engine.optimizer)}.items():
            addresses.append(Address(step, None, UPDATE, name, slot))
            values.append(checksums.start(value))
    for name, parameter in engine.module.named_parameters():
        addresses.append(Address(step, None, PARAMETER, name, "value"))
        values.append(checksums.start(parameter.detach()))
    return Trace(addresses, read_back(values))


def _numbers(step: int, numbers: dict[str, float]) -> Trace:
    """The step's numbers, the 64 bits of each in the place of a checksum."""
    addresses = [Address(step, None, REDUCED_GRAD, "step", name) for name in numbers]
    return Trace(addresses, [struct.unpack("<Q", struct.pack("<d", value))[0] for value in numbers.values()])


def main() -> None:
    """Run as a rank."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    messages = ReportChannel(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    try:
        config = parse_config(request["config"], source=request["source"], stored=True)
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
