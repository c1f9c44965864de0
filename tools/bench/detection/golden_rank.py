"""One rank of the campaign against a golden trace.

All ranks draw the same faults; the first collects what each found. The first argument is the request as JSON, the
second, on rank 0 alone, the file descriptor that messages go to.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.addresses import ACCUMULATED_GRAD, BACKWARD, FORWARD, PARAMETER, UPDATE, WEIGHT_GRAD, Address
from megasdc.config import FaultSpec, parse_config
from megasdc.config.environment import set_deterministic_environment
from megasdc.config.sections.faults import COLLECTIVE, OPTIMIZER_STATE
from megasdc.determinism import set_deterministic
from megasdc.faults.injector import Injector
from megasdc.faults.stored import StateFaults
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.run_ranks import Messages
from megasdc.sdc.golden import Golden, load_golden, save_golden
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import DIVERGENT, INCONCLUSIVE, Finding, RankVerdict, find, judge
from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.build import prepare_cpu
from megasdc.train.detection.golden_key import golden_key
from megasdc.train.main import set_up_logging
from megasdc.train.workload import Workload, workload_cases, workload_config
from tools.bench.detection.golden import Trial

PHASES = (FORWARD, BACKWARD, WEIGHT_GRAD, COLLECTIVE, OPTIMIZER_STATE, UPDATE, PARAMETER)
"""Without reduced_grad, which comes after a sum over replicas and names no single rank. BF16_Optimizer then computes
the norm on each replica by itself: one whose shard is not finite skips the step, the others wait for it in the
all-gather, and the run hangs (DeepSpeed 0.19.8): found as a hang.
"""
SHOWN_AS = {COLLECTIVE: ACCUMULATED_GRAD, OPTIMIZER_STATE: UPDATE}
"""Phase in which harm that is no observation of its own shows first."""
KINDS: dict[str, dict[str, Any]] = {
    "one bit": {"kind": "bit_flip"},
    "sign": {"kind": "bit_flip", "bits": "sign"},
    "exponent": {"kind": "bit_flip", "bits": "exponent"},
    "mantissa": {"kind": "bit_flip", "bits": "mantissa"},
    "three bits": {"kind": "bit_flip", "num_bits": 3},
    "adjacent": {"kind": "bit_flip", "elements": 4, "pattern": "adjacent"},
    "periodic": {"kind": "bit_flip", "elements": 4, "pattern": "periodic", "period": 8},
    "stuck at 0": {"kind": "stuck_at_0", "bits": "mantissa"},
    "stuck at 1": {"kind": "stuck_at_1", "bits": "exponent"},
    "NaN": {"kind": "value", "value": "nan"},
    "Inf": {"kind": "value", "value": "inf"},
    "scale": {"kind": "scale", "factor": 1.5},
    "noise": {"kind": "noise", "deviation": 0.1, "elements": 16},
    "column": {"kind": "scale", "factor": -1.0, "pattern": "column"},
}
"""Kinds of faults by name, each a part of a spec."""
MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 32}
LLAMA: dict[str, Any] = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
    "tie_embeddings": False,
    "num_query_groups": 2,
}


def campaign_config(request: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one layout and type."""
    tensor, pipeline, _ = request["layout"]
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "megasdc": {
            "model": {**MODEL, **({} if request["style"] == "gpt" else LLAMA), "fuse": request["fuse"]},
            "data": {"path": "unused", "sequence_length": 32},
            "parallel": {"tensor": tensor, "pipeline": pipeline},
            "training": {"steps": 2},
            "golden": {"vocab_size": 250},
            "logging": {"run_dir": request["folder"]},
        },
    }
    if request["precision"] == "bf16":
        raw["bf16"] = {"enabled": True}
    return raw


class Campaign:
    """The golden trace of these ranks, and trials against it.

    Args:
        request: see ``tools.bench.detection.golden``.

    Collective: all ranks of the world.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        config = workload_config(parse_config(campaign_config(request)))
        set_deterministic_environment(config.megasdc.determinism, os.environ)  # before a device or NCCL is used
        set_deterministic(config.megasdc.determinism)
        prepare_cpu(1)
        groups.init_process_group(300.0)
        tensor, pipeline, _ = request["layout"]
        self.dims = groups.init_model_parallel(tensor, pipeline, 300.0)
        self.hidden_size = config.megasdc.model.hidden_size
        self.precision = request["precision"]
        self.workload = Workload(config, self.dims)
        self._case = workload_cases(config)[0]
        self._algorithm = default_algorithm(self.workload.engine.device).name
        self._draw = random.Random(request["seed"])
        traces = gather_objects(self.workload.trace(self._case, self._algorithm))
        self._end = [bits.clone() for bits in self._state_bits()]
        file = Path(request["folder"]) / "campaign.golden"
        layout = ParallelDims(self.dims.tensor, self.dims.pipeline, self.dims.data)
        if self.dims.rank == 0:
            key = golden_key(config, layout, self._algorithm)
            kept = {(0, rank): trace for rank, trace in enumerate(traces)}
            save_golden(file, Golden(key, config.resolved(), layout, self._algorithm, (self._case,), 1, {}, kept))
        dist.barrier()
        self._golden = load_golden(file, self.dims.rank).traces[0, self.dims.rank]
        self._addresses = [trace.addresses for trace in traces]

    def clean(self) -> Trial:
        """A run without a fault."""
        verdicts = self._judge(self.workload.trace(self._case, self._algorithm))
        return self._score(None, "", Address(1, None, UPDATE, "", ""), -1, 0, False, verdicts)

    def harm(self) -> Trial:
        """A run with one fault, the same draw on all ranks."""
        rank = self._draw.randrange(self.dims.world_size)
        phase = self._draw.choice(PHASES)
        shown_as = SHOWN_AS.get(phase, phase)
        first_step = 2 if phase == OPTIMIZER_STATE else 1  # moments are made by the first step
        fitting = [one for one in self._addresses[rank] if one.phase == shown_as and one.step >= first_step]
        target = self._draw.choice(fitting)
        name = self._draw.choice(list(KINDS))
        spec = FaultSpec(
            rank=rank,
            submodule=target.fqn,
            phase=phase,
            slot=target.slot,
            steps=[target.step, target.step],
            micro_batches=None if target.micro_batch is None else [target.micro_batch],
            seed=self._draw.randrange(1 << 30),
            **KINDS[name],
        )
        injector = Injector([spec], self.dims, self.hidden_size)
        hooks = [StateFaults(self.workload.engine, injector)] if phase in SHOWN_AS else []
        trace = self.workload.trace(self._case, self._algorithm, [injector], hooks)
        fired = gather_objects([(firing.rank, firing.changed) for firing in injector.firings])
        firings = [firing for of_rank in fired for firing in of_rank]
        if [where for where, _ in firings] != [rank]:
            raise RuntimeError(f"{spec} fired on ranks {firings}, once on rank {rank} was asked for")
        # What was harmed on its way was used as it was; a stored state is overwritten by the update that reads it.
        effect = phase != OPTIMIZER_STATE or self._ends_otherwise()
        return self._score(phase, name, target, rank, firings[0][1], effect, self._judge(trace))

    def _state_bits(self) -> Iterator[torch.Tensor]:
        """The bits of every parameter, master and moment of this rank, without the observer."""
        engine = self.workload.engine
        inner = engine.optimizer.optimizer
        kept = [*engine.module.parameters(), *(flat for group in inner.param_groups for flat in group["params"])]
        kept += [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return (as_bits(value.detach()) for value in kept)

    def _ends_otherwise(self) -> bool:
        """Whether any rank's state after the run has other bits than after a clean one."""
        pairs = zip(self._end, self._state_bits(), strict=True)
        return any(gather_objects(not all(torch.equal(clean, now) for clean, now in pairs)))

    def _judge(self, trace: Trace) -> dict[int, RankVerdict]:
        finding = find(self._golden, trace, self.dims)
        everyone: list[Finding] = gather_objects(finding)
        return judge({rank: [one] for rank, one in enumerate(everyone)}, self.dims)

    def _score(
        self,
        phase: str | None,
        kind: str,
        target: Address,
        rank: int,
        changed: int,
        effect: bool,
        verdicts: dict[int, RankVerdict],
    ) -> Trial:
        named = tuple(one for one, verdict in verdicts.items() if verdict.status == DIVERGENT)
        suspects = tuple(one for one, verdict in verdicts.items() if verdict.status == INCONCLUSIVE)
        first = verdicts[named[0]].first if named else None
        shown_as = SHOWN_AS.get(phase, phase) if phase else None
        same = first is not None and (first.step, first.micro_batch) == (target.step, target.micro_batch)
        exact = phase == OPTIMIZER_STATE or (first is not None and first.slot == target.slot)
        return Trial(
            layout="x".join(map(str, (self.dims.tensor, self.dims.pipeline, self.dims.data))),
            precision=self.precision,
            phase=phase,
            kind=kind,
            rank=rank,
            address=str(target) if phase else "",
            changed=changed,
            effect=effect,
            named=named,
            suspects=suspects,
            first="" if first is None else str(first),
            rank_right=named == (rank,),
            submodule_right=first is not None and same and exact and first.fqn == target.fqn,
            direction_right=first is not None and first.phase == shown_as,
        )


def main() -> None:
    """Run as a rank."""
    request = json.loads(sys.argv[1])
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    campaign = Campaign(request)
    total = request["faults"] + request["clean"]
    every = max(1, total // max(1, request["clean"]))
    trials: list[Trial] = []
    for number in range(total):
        left = request["clean"] - sum(trial.phase is None for trial in trials)
        clean = left > 0 and (number % every == 0 or total - number <= left)
        trials.append(campaign.clean() if clean else campaign.harm())
        messages.send(done=number + 1)
    if campaign.dims.rank == 0:
        text = "".join(json.dumps(asdict(trial)) + "\n" for trial in trials)
        (Path(request["folder"]) / "trials.jsonl").write_text(text, encoding="utf-8")
    dist.barrier()
    groups.shutdown()


if __name__ == "__main__":
    main()
