"""Small training run with the code of real ones; its losses and checksums are compared between repetitions."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from megasdc.common.addresses import Address
from megasdc.config.environment import set_deterministic_environment
from megasdc.determinism import set_deterministic
from megasdc.engine.observer import Listener
from megasdc.ops.golden.drill import Drill
from megasdc.ops.stress.drill import ALONE
from megasdc.parallel import groups
from megasdc.sdc.golden import compare_run, key_differences
from megasdc.sdc.trace import Trace
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.checksum import algorithm, default_algorithm
from megasdc.train.detection.golden import Workload, workload_cases, workload_config
from megasdc.train.detection.golden_key import golden_key, workload_of
from megasdc.train.process import prepare_cpu

COMMON: dict[str, Any] = {
    "protect": "off",
    "parallel": {"threads": 1},
    "data": {"path": "none"},
    "training": {"steps": 3},
    "logging": {"run_dir": "none"},
}
ON_HOST: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "megasdc": {
        **COMMON,
        "model": {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_positions": 64},
        "data": {"path": "none", "sequence_length": 64},
        "golden": {"steps": 3, "vocab_size": 512},
    },
}
ON_ACCELERATOR: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "megasdc": {
        **COMMON,
        "model": {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "max_positions": 1024},
        "data": {"path": "none", "sequence_length": 1024},
        "golden": {"steps": 3, "vocab_size": 8192, "micro_batch_size": 4},
    },
}
"""Configuration of the run where no golden trace defines it."""


def small_run(on_accelerator: bool) -> dict[str, Any]:
    """The resolved configuration of the package's own workload."""
    return workload_config(workload_of({"config": ON_ACCELERATOR if on_accelerator else ON_HOST})).resolved()


class SmallRun:
    """The workload of one device, built once and restarted in each round.

    ``config`` is resolved; ``timeout_s`` is of the process group; ``faults``: of a drill, empty: none.

    Raises:
        ConfigError: an environment variable prevents repeatable results.
    """

    def __init__(self, config: dict[str, Any], timeout_s: float, faults: list[dict[str, Any]]) -> None:
        loaded = workload_of({"config": config})
        set_deterministic_environment(loaded.megasdc.determinism, os.environ)
        prepare_cpu(loaded.megasdc.parallel.threads)
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1"})
        groups.init_process_group(timeout_s, dist.HashStore())
        set_deterministic(loaded.megasdc.determinism)
        dims = groups.init_model_parallel(1, 1, timeout_s)
        self._workload = Workload(loaded, dims)
        self._case = workload_cases(loaded)[0]
        self._section = loaded.megasdc.trace
        self._algorithm = loaded.megasdc.trace.algorithm or default_algorithm(self._workload.engine.device).name
        self.key = golden_key(loaded, ALONE, self._algorithm)
        contents = {"faults": faults, "process_faults": []}
        self._drill = Drill(contents, self._workload, dims, loaded.megasdc.model.hidden_size) if faults else None
        self._expected: Trace | None = None
        self._against = "first"

    def expect(self, trace: dict[str, Any], key: dict[str, Any] | None) -> dict[str, Any]:
        """Sets the expected trace, if it is for the same device and versions; ``trace`` is from ``encode``.

        ``key``: device and versions for which it is valid, None: this device computed it earlier. Returns the parts of
        the key that differ, as [expected, here]; if there are any, the trace is not used.
        """
        differences = {} if key is None else key_differences(key, self.key)
        if not differences:
            self._expected, self._against = trace_from_values(trace), "first" if key is None else "golden"
        return {name: list(both) for name, both in differences.items()}

    def run_round(self, number: int, watch: list[Listener]) -> dict[str, Any]:
        """Trains from the start and compares; trains twice if there is no expected trace yet.

        A drill draws other faults in each round, first is 1; ``watch``: listeners that are called first. Returns
        ``compared`` and ``wrong``: numbers of results; ``findings``, ``losses`` as hexadecimal floats, ``trace``, and
        the drill's ``injectors``.
        """
        injectors: list[Listener] = []
        if self._expected is None:
            self._expected, _ = self._train(0, watch, injectors)
        trace, losses = self._train(number, watch, injectors)
        found = compare_run(self._expected, trace, ALONE).finding
        wrong = (
            [{"what": str(found.first), "results": found.divergences, "against": self._against}] if found.first else []
        )
        return {
            "compared": found.compared,
            "wrong": found.divergences,
            "findings": wrong,
            "losses": losses,
            "trace": trace,
            "injectors": injectors,
        }

    def _train(self, repeat: int, watch: list[Listener], injectors: list[Listener]) -> tuple[Trace, list[str]]:
        """Trace and losses of one run from the start; its injectors are appended to ``injectors``."""
        listeners, hooks = ([], []) if self._drill is None else self._drill.start(repeat)
        injectors += listeners
        tracer = Tracer(algorithm(self._algorithm), self._section)
        results = self._workload.run(self._case, [*watch, *listeners, tracer], hooks)
        return tracer.pop_trace(), [float(result.loss).hex() for result in results]


def trace_to_values(trace: Trace) -> dict[str, Any]:
    """A trace as plain values."""
    fields = [[a.step, a.micro_batch, a.phase, a.fqn, a.slot] for a in trace.addresses]
    return {"addresses": fields, "checksums": trace.checksums}


def trace_from_values(said: dict[str, Any]) -> Trace:
    """The trace from ``encode``'s values."""
    return Trace([Address(*fields) for fields in said["addresses"]], list(said["checksums"]))
