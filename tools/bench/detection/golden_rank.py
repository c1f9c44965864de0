"""A rank of the campaign against a golden trace; all ranks draw the same faults, the first reports what each found."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.common.addresses import ACCUMULATED_GRAD, BACKWARD, FORWARD, PARAMETER, UPDATE, WEIGHT_GRAD, Address
from megasdc.config.environment import set_deterministic_environment
from megasdc.config.faults import COLLECTIVE, OPTIMIZER_STATE, FaultSpec
from megasdc.config.load import RunConfig, parse_config
from megasdc.determinism import set_deterministic
from megasdc.faults.injector import Injector
from megasdc.faults.stored import StateFaults
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import (
    DIVERGENT,
    Golden,
    GoldenComparison,
    GoldenVerdict,
    compare_run,
    judge_cell,
    load_golden,
    save_golden,
)
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import INCONCLUSIVE
from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.golden import Workload, workload_cases, workload_config
from megasdc.train.detection.golden_key import golden_key
from tools.bench.rank import Messages, join_ranks
from tools.bench.small.gpt import raw_config
from tools.trainings.styles import LLAMA

PHASES = (FORWARD, BACKWARD, WEIGHT_GRAD, COLLECTIVE, OPTIMIZER_STATE, UPDATE, PARAMETER)
"""Without reduced_grad, which comes after a sum over replicas and names no single rank. BF16_Optimizer then computes
the norm on each replica by itself: one whose shard is not finite skips the step, the others wait for it in the
all-gather, and the run hangs (DeepSpeed 0.19.8): found as a hang.
"""
SHOWN_AS = {COLLECTIVE: ACCUMULATED_GRAD, OPTIMIZER_STATE: UPDATE}
"""Phase in which a fault shows first that is no observation of its own."""
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
VOCABULARY = 250
MODEL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_positions": 32}


@dataclass(frozen=True)
class Trial:
    """One run with one fault, or with none: then ``phase`` is None.

    ``effect`` is false where the next update overwrote a fault in a stored state, so that all parameters, masters and
    moments end with equal bits. ``rank_right``: exactly the rank with the fault is in ``named``; ``suspects``: one of
    them is wrong. The last two: the first difference is in its submodule, and also in the phase that shows the fault
    first.
    """

    layout: str
    precision: str
    phase: str | None
    kind: str
    rank: int
    address: str
    changed: int
    effect: bool
    named: tuple[int, ...]
    suspects: tuple[int, ...]
    first: str
    rank_right: bool
    submodule_right: bool
    direction_right: bool

    @property
    def clean(self) -> bool:
        """Whether no fault was injected."""
        return self.phase is None

    @property
    def harmful(self) -> bool:
        """Whether the fault changed a bit of something that was used or kept."""
        return bool(self.changed) and self.effect

    @property
    def detected(self) -> bool:
        """Whether anything was found to be wrong."""
        return bool(self.named or self.suspects)


def campaign_config(
    request: dict[str, Any], layers: int = 4, micro_batches: int = 1, **sections: Any
) -> dict[str, Any]:
    """The configuration of one layout and type; ``sections``: more of megasdc, those of the model beside its own."""
    tensor, pipeline, _ = request["layout"]
    style = {} if request["style"] == "gpt" else {**LLAMA, "num_query_groups": 2}
    model = {**MODEL, "num_layers": layers, **style, "fuse": request["fuse"], **sections.pop("model", {})}
    own = {
        "parallel": {"tensor": tensor, "pipeline": pipeline, "threads": 1},
        "golden": {"vocab_size": VOCABULARY},
        **sections,
    }
    deepspeed = {"gradient_accumulation_steps": micro_batches}
    raw = raw_config(request["folder"], Path("unused"), model, MODEL["max_positions"], 2, own, deepspeed)
    if request["precision"] == "bf16":
        raw["bf16"] = {"enabled": True}
    return raw


def record_golden(workload: Workload, config: RunConfig, dims: ParallelDims, file: Path) -> list[list[Address]]:
    """Record the first case of a workload as a golden trace, which rank 0 writes; returns addresses by rank, in order.

    Collective: all ranks of the world.
    """
    case, algorithm = workload_cases(config)[0], default_algorithm(workload.engine.device).name
    traces = gather_objects(workload.trace(case, algorithm))
    layout = ParallelDims(dims.tensor, dims.pipeline, dims.data)
    if dims.rank == 0:
        key = golden_key(config, layout, algorithm)
        kept = {(0, rank): trace for rank, trace in enumerate(traces)}
        save_golden(file, Golden(key, config.resolved(), layout, algorithm, (case,), 1, {}, kept))
    dist.barrier()
    return [trace.addresses for trace in traces]


class Campaign:
    """The golden trace of these ranks, and trials against it; ``tools.bench.detection.golden`` makes the request.

    Collective: all ranks of the world.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        config = workload_config(parse_config(campaign_config(request)))
        set_deterministic_environment(config.megasdc.determinism, os.environ)  # before a device or NCCL is used
        set_deterministic(config.megasdc.determinism)
        tensor, pipeline, _ = request["layout"]
        self.dims = join_ranks(tensor, pipeline, timeout_s=300.0)
        self.hidden_size = config.megasdc.model.hidden_size
        self.precision = request["precision"]
        self.workload = Workload(config, self.dims)
        self._case = workload_cases(config)[0]
        self._algorithm = default_algorithm(self.workload.engine.device).name
        self._draw = random.Random(request["seed"])
        file = Path(request["folder"]) / "campaign.golden"
        self._addresses = record_golden(self.workload, config, self.dims, file)
        self._end = [bits.clone() for bits in self._state_bits()]
        self._golden = load_golden(file, self.dims.rank).traces[0, self.dims.rank]

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

    def _judge(self, trace: Trace) -> dict[int, GoldenVerdict]:
        finding = compare_run(self._golden, trace, self.dims).finding
        everyone: list[GoldenComparison] = gather_objects(finding)
        return judge_cell({rank: [one] for rank, one in enumerate(everyone)}, self.dims)

    def _score(
        self,
        phase: str | None,
        kind: str,
        target: Address,
        rank: int,
        changed: int,
        effect: bool,
        verdicts: dict[int, GoldenVerdict],
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


def run_campaign(messages: Messages, request: dict[str, Any]) -> None:
    """Run as a rank, and report the trials; ``tools.bench.detection.golden`` makes the request."""
    campaign = Campaign(request)
    total = request["faults"] + request["clean"]
    every = max(1, total // max(1, request["clean"]))
    left = request["clean"]
    for number in range(total):
        clean = left > 0 and (number % every == 0 or total - number <= left)
        left -= clean
        messages.send(trials=[campaign.clean() if clean else campaign.harm()])
        messages.progress(request["name"], number + 1, total)
