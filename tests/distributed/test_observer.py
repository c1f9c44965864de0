"""Are results seen before collectives mix them, at the right addresses, without changing a bit?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from megatron.core import parallel_state
from tiny import GPT, LLAMA, make_engine, train_steps

from megasdc.common.addresses import Address
from megasdc.engine.observer import Observer
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects

pytestmark = pytest.mark.distributed


def _hooks(engine: Any) -> dict[str, Any]:
    """Everything that an observer may have hung anywhere."""
    loss = engine.module.loss_fn
    found: dict[str, Any] = {
        "engine": list(engine.hooks),
        "loss": (loss.tap, loss.observe),
        "optimizer": len(engine.optimizer.optimizer._optimizer_step_post_hooks),
    }
    for name, module in engine.module.named_modules():
        found[name] = (
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            "_forward_impl" in vars(module),
            [getattr(module, key, None) for key in ("allreduce_dgrad", "sequence_parallel", "disable_grad_reduce")],
        )
    for name, parameter in engine.module.named_parameters():
        found[name] = len(parameter._backward_hooks or {})
    return found


def _new_engine(*args: Any, **options: Any) -> Any:
    """An engine in a process that may have had another one."""
    parallel_state.destroy_model_parallel()
    return make_engine(*args, **options)


def _train(observed: bool, model: dict[str, Any], tensor: int, pipeline: int, recompute: bool, options: Any) -> Any:
    """Three steps, the first two under observation: losses, all states, what was seen."""
    deepspeed = {"pipeline": {"activation_checkpoint_interval": int(recompute)}}
    engine = _new_engine(model, tensor, pipeline, deepspeed=deepspeed, **options)
    seen: list[Address] = []
    if observed:
        before = _hooks(engine)
        submodules = list_submodules(engine.module)
        observer = Observer(engine, submodules, [lambda address, _result: seen.append(address)])
    losses = [step["loss"] for step in train_steps(engine, 1, 2)]
    if observed:
        observer.close()
        assert _hooks(engine) == before
    count = len(seen)
    losses += [step["loss"] for step in train_steps(engine, 3, 1)]
    assert len(seen) == count
    tensors = [value.detach().clone() for value in engine.module.parameters()]
    for values in engine.optimizer.optimizer.state.values():
        tensors += [value.clone() for value in values.values() if torch.is_tensor(value)]
    return losses, tensors, seen


def _off_and_on(*args: Any) -> list[Address]:
    losses, tensors, _ = _train(False, *args)
    losses_on, tensors_on, seen = _train(True, *args)
    assert losses == losses_on
    assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_on, strict=True))
    return seen


LAYOUTS = [
    ("1x1x1_gpt", GPT, 1, 1, 1, False, {}),
    ("2x1x1_gpt_recompute", GPT, 2, 1, 1, True, {}),
    ("2x1x1_llama_sp", LLAMA, 2, 1, 1, False, {"sequence_parallel": True}),
    ("2x2x1_llama_bf16", LLAMA, 2, 2, 1, True, {"precision": "bf16"}),
    ("1x2x2_gpt_bf16", GPT, 1, 2, 2, False, {"precision": "bf16", "grad_accum": "bf16"}),
]


@pytest.mark.parametrize(("name", "model", "tensor", "pipeline", "data", "recompute", "options"), LAYOUTS, ids=str)
def test_observation_changes_no_bit_and_leaves_nothing(
    name: str, model: Any, tensor: int, pipeline: int, data: int, recompute: bool, options: Any
) -> None:
    """Losses, parameters and optimizer states are those of a run without; after close no hook is left."""
    all_seen = run_distributed(_off_and_on, tensor * pipeline * data, model, tensor, pipeline, recompute, options)
    micro_batches = 8 // data
    blocks = 4 // pipeline
    for rank, seen in enumerate(all_seen):
        assert len(set(seen)) == len(seen)
        counts = Counter((address.phase, address.fqn.split(".", 1)[-1], address.slot) for address in seen)
        for part in ("self_attention.linear_qkv", "self_attention.core_attention", "mlp.activation", "mlp_bda"):
            assert counts["forward", f"layer.{part}", "output"] == 2 * micro_batches * blocks
            assert counts["recompute", f"layer.{part}", "output"] == 2 * micro_batches * blocks * recompute
        for part in ("self_attention.linear_proj", "mlp.linear_fc1", "input_layernorm"):
            assert counts["backward", f"layer.{part}", "input"] == 2 * micro_batches * blocks
            assert counts["weight_grad", f"layer.{part}", "weight"] == 2 * micro_batches * blocks
            assert counts["parameter", f"layer.{part}", "weight"] == 2 * blocks
        last = rank >= len(all_seen) - tensor * data
        assert counts["forward", "loss", "output"] == counts["backward", "loss", "input"] == 2 * micro_batches * last
        phases = [address.phase for address in seen if address.micro_batch is None]
        assert (
            phases.index("accumulated_grad")
            < phases.index("reduced_grad")
            < phases.index("update")
            < phases.index("parameter")
        )


def _keep(sequence_parallel: bool) -> Any:
    """Every result of the first micro-batch of one step, and the shards of all weights."""
    engine = make_engine(GPT, 2, 1, sequence_parallel=sequence_parallel)
    kept: dict[tuple[str, str, str], torch.Tensor] = {}

    def listen(address: Address, result: torch.Tensor) -> None:
        if not address.micro_batch:
            kept.setdefault((address.phase, address.fqn, address.slot), result.detach().clone())

    submodules = list_submodules(engine.module)
    weights = {f"{one.fqn}.{slot}": v.detach().clone() for one in submodules for slot, v in one.parameters.items()}
    observer = Observer(engine, submodules, [listen])
    train_steps(engine, 1, 1)
    observer.close()
    return gather_objects((kept, weights))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_results_are_local(sequence_parallel: bool) -> None:
    """At TP=2 each rank's result is what its own shard gives, before any sum; recomputed from inputs and weights."""
    ranks = run_distributed(_keep, 2, sequence_parallel)[0]
    layer = "2.layer"
    for kept, weights in ranks:
        fc2 = kept["forward", f"{layer}.mlp.activation", "output"] @ weights[f"{layer}.mlp.linear_fc2.weight"].T
        assert torch.equal(kept["forward", f"{layer}.mlp.linear_fc2", "output"], fc2)
        attention = kept["forward", f"{layer}.self_attention.core_attention", "output"]
        local = attention @ weights[f"{layer}.self_attention.linear_proj.weight"].T
        assert torch.equal(kept["forward", f"{layer}.self_attention.linear_proj", "output"], local)
        gradient = kept["backward", f"{layer}.mlp.activation", "input"] @ weights[f"{layer}.mlp.linear_fc1.weight"]
        assert torch.equal(kept["backward", f"{layer}.mlp.linear_fc1", "input"], gradient)
        head = kept["backward", "loss", "input"] @ weights["0.word_embeddings.weight"]
        assert torch.equal(kept["backward", "7.output", "input"], head)
    for key in (("forward", f"{layer}.mlp.linear_fc2", "output"), ("backward", "7.output", "input")):
        assert not torch.equal(ranks[0][0][key], ranks[1][0][key])
    words = [kept["forward", "0.word_embeddings", "output"] for kept, _ in ranks]
    assert torch.all((words[0] == 0) | (words[1] == 0))
    terms = [
        {name: kept["forward", "loss", name] for name in ("maximum", "predicted", "sum", "output")} for kept, _ in ranks
    ]
    assert not torch.equal(terms[0]["maximum"], terms[1]["maximum"])
    loss = (terms[0]["sum"] + terms[1]["sum"]).log() - (terms[0]["predicted"] + terms[1]["predicted"])
    assert torch.equal(loss.T, terms[0]["output"])


def _change() -> Any:
    """Norms of one step's gradients when a listener of rank 1 doubles one local result in each phase."""
    found = {}
    rank = dist.get_rank()
    for phase, fqn in (
        (None, None),
        ("forward", "3.layer.mlp.linear_fc2"),
        ("backward", "3.layer.mlp.linear_fc1"),
        ("weight_grad", "3.layer.mlp.linear_fc1"),
        ("reduced_grad", "3.layer.mlp.linear_fc1"),
    ):
        engine = _new_engine(GPT, 2, 1)

        def double(address: Address, result: torch.Tensor, phase: Any = phase, fqn: Any = fqn) -> Any:
            hit = address.phase == phase and address.fqn == fqn and not address.micro_batch
            return result * 2 if hit and rank == 1 else None

        seen: dict[Address, torch.Tensor] = {}
        listeners = [
            double,
            lambda address, result, seen=seen: seen.setdefault(address, result.clone()) is None or None,
        ]
        observer = Observer(engine, list_submodules(engine.module), listeners)
        norm = train_steps(engine, 1, 1)[0]["grad_norm"]
        observer.close()
        found[phase] = (norm, {str(address): value for address, value in seen.items()})
    clean_norm, clean = found.pop(None)
    firsts = {}
    for phase, (norm, seen) in found.items():
        assert norm != clean_norm
        firsts[phase] = next(name for name, value in seen.items() if not torch.equal(value, clean[name]))
    return firsts


def test_an_answer_takes_the_place_of_the_result() -> None:
    """What a listener answers is what the run goes on with; on the other tensor rank the first difference is later."""
    own, other = run_distributed(_change, 2)[::-1]
    for phase, first in own.items():
        assert f"{phase} of 3.layer.mlp.linear_fc" in first
    assert "forward of 3.layer.mlp_bda" in other["forward"]
    assert "3.layer.pre_mlp_layernorm" in other["backward"]
