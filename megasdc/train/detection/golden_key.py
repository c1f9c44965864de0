"""The key of a golden trace: every property, by name, that may change a bit of the workload's results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megasdc.common.errors import ConfigError, TraceError
from megasdc.config.load import RunConfig, parse_config
from megasdc.model.fused import FUSED_VERSION, code_generator
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import key_differences, machine_key


def golden_key(config: RunConfig, layout: ParallelDims, algorithm: str) -> dict[str, Any]:
    """The key of a workload in this process, with its current number of threads.

    Args:
        config: the configuration of the workload.
        algorithm: name of the algorithm of checksums.

    Returns:
        Plain values by name: those of ``machine_key``; with fused modules the version of their functions and their
        code generator; precision, layout, algorithm and a digest of the workload.
    """
    fused = {"fused": f"functions {FUSED_VERSION}, {code_generator()}"} if config.megasdc.model.fuse else {}
    return {
        **machine_key(),
        **fused,
        "precision": config.precision,
        "layout": str(layout),
        "algorithm": algorithm,
        "workload": workload_digest(config),
    }


def compare_key(header: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """This process's key for a golden trace, and the differences.

    Where this version cannot read the trace's configuration, only ``machine_key`` is compared.

    Returns:
        The key, and by name the parts that differ, as (golden, here).
    """
    try:
        config = workload_of(header)
    except TraceError as error:
        key = machine_key()
        differences = key_differences({name: header["key"].get(name) for name in key}, key)
        return key, {**differences, "configuration": ("read", str(error))}
    key = golden_key(config, ParallelDims(**header["layout"]), header["algorithm"])
    return key, key_differences(header["key"], key)


def workload_of(header: Mapping[str, Any]) -> RunConfig:
    """The configuration of a golden trace's workload.

    Raises:
        TraceError: this version cannot read it.
    """
    try:
        return parse_config(header["config"], stored=True)
    except ConfigError as error:
        text = "; ".join(error.problems)
        raise TraceError(f"this version of megasdc does not read the golden trace's configuration: {text}") from error


def workload_digest(config: RunConfig) -> str:
    """A digest of every setting that affects the workload's results."""
    sections = config.megasdc
    parts = {name: getattr(sections, name).model_dump(mode="json") for name in ("model", "parallel", "golden", "trace")}
    del parts["model"]["fuse"]  # a separate part of the key
    relevant: dict[str, Any] = {
        "deepspeed": config.deepspeed,
        **parts,
        "seed": sections.training.seed,
        "sequence_length": sections.data.sequence_length,
    }
    if not relevant["parallel"]["share_devices"]:
        del relevant["parallel"]["share_devices"]  # traces from before there was this field stay valid
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
