"""Contradictions in the sizes of the model and in how ranks divide it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from megasdc.config.megatron_fields import megatron_problems
from megasdc.config.problems.problem import Problem
from megasdc.config.sections.megasdc import MegasdcSection
from megasdc.config.sections.model import ModelSection, ffn_width, head_width, query_groups

_M = "megasdc.model"
_P = "megasdc.parallel"


def model_problems(file: MegasdcSection) -> Iterator[Problem]:
    """Yield every contradiction that does not depend on the number of ranks."""
    yield from _own_problems(file.model)
    yield from _tensor_problems(file)
    yield from _length_problems(file)
    yield from _pipeline_problems(file)


def _divisible(name: str, value: int, by_name: str, by: int, remedy: str) -> Iterator[Problem]:
    if value % by:
        yield Problem((name, by_name), f"got {value}, which {by_name} {by} does not divide; {remedy}.")


def _own_problems(model: ModelSection) -> Iterator[Problem]:
    heads = model.num_attention_heads
    if model.kv_channels is None:
        yield from _divisible(
            f"{_M}.hidden_size",
            model.hidden_size,
            f"{_M}.num_attention_heads",
            heads,
            "change one of them, or give kv_channels",
        )
    yield from _divisible(
        f"{_M}.num_attention_heads",
        heads,
        f"{_M}.num_query_groups",
        query_groups(model),
        "every group needs equally many query heads",
    )
    if model.position_embedding == "rope" and head_width(model) % 2:
        yield Problem(
            (f"{_M}.kv_channels", f"{_M}.hidden_size", f"{_M}.num_attention_heads", f"{_M}.position_embedding"),
            f"the width of a head is {head_width(model)}; rope needs an even width.",
        )
    if model.backend == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        yield Problem(
            (f"{_M}.backend",),
            'got "transformer_engine", which is not installed; install it on a machine with a GPU (pip install '
            '--no-build-isolation "transformer_engine[pytorch]") or set "torch".',
        )
    if model.backend == "transformer_engine" and model.attention_dropout > 0:
        yield Problem(
            (f"{_M}.attention_dropout", f"{_M}.backend"),
            f'got {model.attention_dropout} with {_M}.backend "transformer_engine", whose dropout masks depend on the '
            'layout; set attention_dropout 0 or backend "torch".',
        )
    if model.backend == "transformer_engine" and model.fuse:
        yield Problem(
            (f"{_M}.fuse", f"{_M}.backend"),
            f'got true with {_M}.backend "transformer_engine", whose modules are fused already; set fuse false or '
            'backend "torch".',
        )
    for name, wrong in megatron_problems(model).items():
        path = f"{_M}.megatron.{name}"
        yield Problem((path,), f"got {model.megatron[name]!r}; {wrong}.".replace("?.", "?"))


def _tensor_problems(file: MegasdcSection) -> Iterator[Problem]:
    tensor, model = file.parallel.tensor, file.model
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": query_groups(model),
        "ffn_hidden_size": ffn_width(model),
        "vocab_multiple": model.vocab_multiple,
    }
    for name, value in sizes.items():
        yield from _divisible(f"{_M}.{name}", value, f"{_P}.tensor", tensor, "tensor ranks need equal shares")
    if model.backend == "transformer_engine" and tensor > 1 and model.megatron.get("qk_layernorm"):
        yield Problem(
            (f"{_M}.megatron.qk_layernorm", f"{_M}.backend", f"{_P}.tensor"),
            f'got true with {_M}.backend "transformer_engine" and {_P}.tensor {tensor}, where the gradients of these '
            'norms are not summed over tensor ranks; set tensor 1, backend "torch", or qk_layernorm false.',
        )
    if file.parallel.sequence_parallel and tensor == 1:
        yield Problem(
            (f"{_P}.sequence_parallel", f"{_P}.tensor"),
            f"got true with {_P}.tensor 1; set tensor > 1 or sequence_parallel false.",
        )


def _length_problems(file: MegasdcSection) -> Iterator[Problem]:
    lengths = {"megasdc.data.sequence_length": file.data.sequence_length}
    for index, length in enumerate(file.golden.sequence_lengths or ()):
        lengths[f"megasdc.golden.sequence_lengths.{index}"] = length
    for path, length in lengths.items():
        if file.parallel.sequence_parallel:
            yield from _divisible(
                path, length, f"{_P}.tensor", file.parallel.tensor, "sequence_parallel needs equal shares"
            )
        if length > file.model.max_positions:
            yield Problem(
                (path, f"{_M}.max_positions"),
                f"got {length}, more than {_M}.max_positions {file.model.max_positions}; shorten the samples or raise "
                "max_positions.",
            )


def _pipeline_problems(file: MegasdcSection) -> Iterator[Problem]:
    layers, stages, partition = file.model.num_layers, file.parallel.pipeline, file.parallel.partition
    names = (f"{_P}.pipeline", f"{_M}.num_layers", f"{_P}.partition")
    if layers < stages:
        yield Problem(
            names[:2],
            f"got {stages} stages for {layers} layers; every stage needs a layer: at most {layers}.",
        )
    elif partition == "uniform" and layers % stages:
        yield Problem(
            (names[2], *names[:2]),
            f'"uniform" needs equal stages, but {names[1]} {layers} is not divisible by {names[0]} {stages}; set '
            '"parameters" or the counts of the stages.',
        )
    if isinstance(partition, list) and (len(partition) != stages or sum(partition) != layers):
        yield Problem(
            (names[2], *names[:2]),
            f"got {partition}, which is {len(partition)} stages with {sum(partition)} layers; needed: {stages} stages "
            f"({names[0]}) with {layers} layers ({names[1]}).",
        )
