"""One replica's part in a study: exchange with the trusted replica in a step, and the study's log.

Distance of a replica's gradients or weights from the trusted one's: norms of the whole model and of submodules.

||u - h|| / ||h|| over all elements of the model, each counted once: every rank sums over its ZeRO-1 shards, without
tensor ranks' copies and a tied weight's second copy; the sums are reduced over the replica.

Top-1 predictions of an evaluation, over a vocabulary that is sharded over tensor ranks.

Parameter synchronization: a replica takes over the trusted one's parameters, optimizer state and schedule.

Computation synchronization: each submodule's result is compared with the trusted replica's and replaced by it.

Since a submodule's inputs were replaced before, every mismatch is its own. A submodule that no pattern names is not
compared: its errors propagate to the next one that is.

Mismatches of a result say which elements differ from the trusted one, how far and in which bits. Mismatch frequency and
severity are those of Ma et al. 2025, Understanding Silent Data Corruption in LLM Training,
https://arxiv.org/abs/2502.12340: the share of elements that differ, and the mean of |u - h| / |h| over those where it
is not zero. Beyond the paper: elements differ if their bits do; the relative difference is computed in fp64, for
elements whose two values are finite and whose trusted value h is not zero; the others are counted separately.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD, Address
from megasdc.config.sections import (
    COMPUTATION_SYNC,
    FREE_RUN,
    PAPER_BACKWARD,
    PAPER_FORWARD,
    PARAMETER_SYNC,
    ParallelSection,
    StudySection,
)
from megasdc.data.loader import EvalLoader
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.observer import Watch
from megasdc.lab.studies.replica_link import ReplicaLink
from megasdc.lab.studies.tables import describe_study, summarize_study
from megasdc.model.loss import TokenLoss
from megasdc.model.submodules import Submodule, list_submodules
from megasdc.ops.run_folder.study_log import STUDY_FOLDER, WHOLE, StudyLog
from megasdc.optim.zero1 import Fragment, counts_here, master_partitions, owned_fragments
from megasdc.parallel import groups, rendezvous
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ReplicaWorld
from megasdc.parallel.rendezvous import Identity, prefix_store
from megasdc.tensors.bits import as_bits, count_flips


@dataclass(frozen=True)
class Mismatch:
    """How one result differs from the trusted one.

    Args:
        elements: of the result.
        mismatches: elements whose bits differ; at least 1.
        severity_count: mismatches that have a relative difference.
        severity_sum: sum of their relative differences.
        severity_max: the largest.
        from_zero: mismatches whose trusted value is zero and whose other value is finite and not zero.
        non_finite: mismatches in which one of the values is NaN or infinite.
        flips: number of mismatches by bit that differs, 0 is the lowest.
        decades: number of relative differences by the floor of their log10.
        samples: (row-major index, trusted value, other value) of some mismatches, evenly chosen.
    """

    elements: int
    mismatches: int
    severity_count: int
    severity_sum: float
    severity_max: float
    from_zero: int
    non_finite: int
    flips: dict[int, int]
    decades: dict[int, int]
    samples: tuple[tuple[int, float, float], ...]

    def fields(self) -> dict[str, Any]:
        """As plain values for a line of JSON; sampled values as text, because JSON has no NaN."""
        return {
            **vars(self),
            "flips": {str(bit): count for bit, count in self.flips.items()},
            "decades": {str(decade): count for decade, count in self.decades.items()},
            "samples": [[place, f"{healthy:.9g}", f"{other:.9g}"] for place, healthy, other in self.samples],
        }


def compare_results(healthy: Tensor, other: Tensor, num_samples: int) -> Mismatch | None:
    """Compares a result with the trusted one; None if all bits are equal.

    Any shape and floating-point dtype, equal for both, on one device. ``num_samples``: maximum of mismatches listed one
    by one.

    Sync: waits for the device.
    """
    places = (as_bits(healthy) != as_bits(other)).flatten().nonzero().flatten()
    if not places.numel():
        return None
    before, after = (tensor.detach().flatten()[places].cpu() for tensor in (healthy, other))
    places = places.cpu()
    reference, value = before.double(), after.double()
    finite = reference.isfinite() & value.isfinite()
    relative = ((value - reference).abs() / reference.abs())[finite & (reference != 0)]
    relative = relative[relative > 0]
    chosen = torch.arange(min(num_samples, places.numel())) * places.numel() // max(1, min(num_samples, places.numel()))
    flips = {bit: count for bit, count in enumerate(count_flips(before, after)) if count}
    return Mismatch(
        elements=healthy.numel(),
        mismatches=places.numel(),
        severity_count=relative.numel(),
        severity_sum=float(relative.sum()),
        severity_max=float(relative.max()) if relative.numel() else 0.0,
        from_zero=int((finite & (reference == 0) & (value != 0)).sum()),
        non_finite=int((~finite).sum()),
        flips=flips,
        decades=dict(sorted(Counter(relative.log10().floor().int().tolist()).items())),
        samples=tuple(zip(places[chosen].tolist(), reference[chosen].tolist(), value[chosen].tolist(), strict=True)),
    )


WriteLine = Callable[..., None]
"""Writes a line: (kind, step, **fields)."""
_ALWAYS = (WEIGHT_GRAD, REDUCED_GRAD, UPDATE, PARAMETER)
"""Phases compared for every submodule, so that no error enters the weights of the next step."""


class ResultSync:
    """A listener of ``engine.observer.Observer``, to be called after fault injection.

    Args:
        section: patterns, samples.
        bridge: to the other replicas.
        write: receives every mismatch and, by ``flush``, the numbers compared; not called on the trusted replica.
    """

    def __init__(self, section: StudySection, bridge: ReplicaLink, write: WriteLine) -> None:
        self._bridge = bridge
        self._write = write
        self._num_samples = section.sampled_elements
        own = section.submodules
        forward = tuple(own) if own else PAPER_FORWARD
        self._patterns = {
            FORWARD: forward,
            RECOMPUTE: forward,
            BACKWARD: tuple(own) if own else PAPER_BACKWARD,
            **dict.fromkeys(_ALWAYS, ("*",)),
        }
        self._wanted: dict[tuple[str, str], bool] = {}
        self._compared: dict[tuple[str, str, str], list[int]] = {}
        self._first_step: int | None = None

    def __call__(self, address: Address, result: Tensor) -> Tensor | None:
        """Compares one result, of any shape and not modified, if a pattern names its submodule.

        Returns:
            The trusted replica's result with the strides of ``result``; None: not compared, equal in every bit, or
            this is the trusted replica.

        Collective: the ranks of equal rank in all replicas.
        Sync: waits for the device.
        """
        if not self._wants(address.phase, address.fqn):
            return None
        healthy = self._bridge.share(result, str(address))
        if self._bridge.is_trusted:
            return None
        self._count(address, result)
        found = compare_results(healthy, result, self._num_samples)
        if found is None:
            return None
        self._write(
            "mismatch",
            address.step,
            micro_batch=address.micro_batch,
            fqn=address.fqn,
            phase=address.phase,
            slot=address.slot,
            dtype=str(result.dtype).removeprefix("torch."),
            shape=list(result.shape),
            **found.fields(),
        )
        answer = result.detach().clone()
        answer.copy_(healthy)
        return answer

    def flush(self, step: int) -> None:
        """Logs the numbers of results compared since the last flush, at the last step."""
        for (fqn, phase, slot), (results, elements) in self._compared.items():
            steps = step + 1 - (self._first_step or step)
            self._write(
                "compared", step, steps=steps, fqn=fqn, phase=phase, slot=slot, results=results, elements=elements
            )
        self._compared.clear()
        self._first_step = None

    def _count(self, address: Address, result: Tensor) -> None:
        self._first_step = self._first_step or address.step
        counts = self._compared.setdefault((address.fqn, address.phase, address.slot), [0, 0])
        counts[0] += 1
        counts[1] += result.numel()

    def _wants(self, phase: str, fqn: str) -> bool:
        key = (phase, fqn)
        if key not in self._wanted:
            patterns = self._patterns.get(phase, ())
            self._wanted[key] = any(fnmatchcase(fqn, pattern) for pattern in patterns)
        return self._wanted[key]


@dataclass(frozen=True)
class NormDifference:
    """One comparison.

    Args:
        fqn: of the submodule, or ``WHOLE``.
        difference_norm: ||u - h||.
        trusted_norm: ||h||.
    """

    fqn: str
    difference_norm: float
    trusted_norm: float

    @property
    def ratio(self) -> float:
        """||u - h|| / ||h||; NaN where h is zero and u is not."""
        if self.difference_norm == 0:
            return 0.0
        return self.difference_norm / self.trusted_norm if self.trusted_norm else float("nan")


class ShardNorms:
    """Compares the shards of this rank, and reduces the norms over its replica.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        submodules: of this rank's stage.
        bridge: to the other replicas.
        host_group: a group of all ranks of the replica for tensors in host memory.

    Collective: all ranks of the replica.
    """

    def __init__(
        self, optimizer: Any, submodules: Sequence[Submodule], tp_rank: int, bridge: ReplicaLink, host_group: Any
    ) -> None:
        self._optimizer = optimizer
        self._tp_rank = tp_rank
        self._bridge = bridge
        self._group = host_group
        self._owner = {
            id(parameter): (one.fqn, slot) for one in submodules for slot, parameter in one.parameters.items()
        }
        counted = [
            one.fqn for one in submodules if any(counts_here(value, tp_rank) for value in one.parameters.values())
        ]
        names = {name for on_rank in gather_objects(counted, host_group) for name in on_rank}
        self._rows = {name: row for row, name in enumerate(sorted(names, key=_in_order))}

    @torch.no_grad()
    def measure(self, pick: Callable[[Fragment], Tensor | None]) -> list[NormDifference]:
        """Compares one value of every owned fragment.

        Args:
            pick: returns the value, [numel]; None: there is none.

        Returns:
            The whole model first, then submodules in the order of the model; empty on the trusted replica.

        Collective: all ranks of all replicas.
        Sync: waits for the device.
        """
        sums = torch.zeros(len(self._rows), 2, dtype=torch.float64)
        for fragment in owned_fragments(self._optimizer):
            value = pick(fragment)
            if value is None:
                continue
            fqn, slot = self._owner[id(fragment.parameter)]
            healthy = self._bridge.share(value, f"{fqn} {slot}")
            if self._bridge.is_trusted or not counts_here(fragment.parameter, self._tp_rank):
                continue
            reference = healthy.double()
            row = sums[self._rows[fqn]]
            row[0] += (value.double() - reference).square().sum().cpu()
            row[1] += reference.square().sum().cpu()
        if self._bridge.is_trusted:
            return []
        dist.all_reduce(sums, group=self._group)
        rows = [(WHOLE, sums.sum(0)), *((name, sums[row]) for name, row in self._rows.items())]
        return [NormDifference(name, *row.sqrt().tolist()) for name, row in rows]


def _in_order(fqn: str) -> tuple[int, str]:
    return int(fqn.split(".", 1)[0]), fqn


@contextmanager
def top_predictions(loss: TokenLoss | None) -> Iterator[list[Tensor]]:
    """Collects the predictions of every micro-batch that is evaluated inside.

    Args:
        loss: of the last stage; None on other stages, where none are collected.

    Yields:
        A list that receives a tensor per micro-batch, [b, s], int64, on the host; equal on all ranks of a tensor group.

    Collective: the tensor group, at each micro-batch.
    """
    found: list[Tensor] = []
    if loss is None:
        yield found
        return

    def tap(logits: Tensor) -> Tensor:
        found.append(top_tokens(logits, loss).transpose(0, 1).cpu())
        return logits

    before, loss.tap = loss.tap, tap
    try:
        yield found
    finally:
        loss.tap = before


def top_tokens(logits: Tensor, loss: TokenLoss) -> Tensor:
    """The most likely tokens, [s, b], int64, of logits [s, b, v/tp]; of equal ones that of the lowest tensor rank.

    ``loss`` knows this rank's columns. The result is the same on all ranks of the tensor group.

    Collective: the tensor group.
    """
    real = torch.arange(loss.columns, device=logits.device) < loss.real_columns
    value, column = logits.detach().float().masked_fill(~real, -torch.inf).max(-1)
    token = column + loss.first_column
    if loss.tensor == 1:
        return token
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    values = [torch.empty_like(value) for _ in range(loss.tensor)]
    tokens = [torch.empty_like(token) for _ in range(loss.tensor)]
    dist.all_gather(values, value, group=group)
    dist.all_gather(tokens, token, group=group)
    best = torch.stack(values).argmax(0, keepdim=True)
    return torch.stack(tokens).gather(0, best).squeeze(0)


@torch.no_grad()
def overwrite_training_state(engine: TrainingEngine, bridge: ReplicaLink) -> None:
    """Replaces this replica's state after an optimizer step by the trusted replica's.

    That is: parameters, fp32 masters, optimizer states and parameter groups, learning rate schedule, loss scale, and
    the number of skipped steps.

    Collective: the ranks of equal rank in all replicas.
    """
    for index, parameter in enumerate(engine.module.parameters()):
        bridge.overwrite(parameter.data, f"parameter {index}")
    inner = engine.optimizer.optimizer
    for index, flat in enumerate(master_partitions(engine.optimizer)):
        bridge.overwrite(flat.data, f"master {index}")
        _overwrite_state(inner.state, flat, f"state {index}", bridge)
    _load_plain(engine, bridge.share_object(_plain(engine)))


def _overwrite_state(states: Any, flat: Tensor, name: str, bridge: ReplicaLink) -> None:
    """Overwrites the inner optimizer's state of one partition; missing entries are created, additional ones removed."""
    own = states.get(flat, {})
    trusted = bridge.share_object(
        {
            key: (value.shape, value.dtype, value.device.type) if isinstance(value, Tensor) else value
            for key, value in own.items()
        }
    )
    if not bridge.is_trusted:
        for key in set(own) - set(trusted):
            del own[key]
        if trusted:
            own = states[flat]  # a defaultdict: creates a missing entry
    for key, value in trusted.items():
        if not isinstance(value, tuple):
            own[key] = value
            continue
        if key not in own:
            shape, dtype, device = value
            own[key] = torch.zeros(shape, dtype=dtype, device=flat.device if device != "cpu" else "cpu")
        bridge.overwrite(own[key], f"{name} {key}")


def _plain(engine: TrainingEngine) -> dict[str, Any]:
    """The state that is not tensors."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "groups": [
            {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}
            for group in engine.optimizer.optimizer.param_groups
        ],
        "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else dict(vars(scaler)),
        "skipped_steps": engine.skipped_steps,
    }


def _load_plain(engine: TrainingEngine, plain: dict[str, Any]) -> None:
    for group, values in zip(engine.optimizer.optimizer.param_groups, plain["groups"], strict=True):
        group.update(values)
    if plain["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(plain["schedule"])
    if plain["scaler"] is not None:
        vars(engine.optimizer.loss_scaler).update(plain["scaler"])
    engine.skipped_steps = plain["skipped_steps"]


logger = logging.getLogger(__name__)


class StudyLaunch:
    """Part of a rank in a study: a launch that several whole runs share, the replicas.

    Args:
        world: place of this rank in the launch.
        folder: of the launch.

    Attributes:
        link: to the ranks at the same place of the other replicas, once they have met.
    """

    def __init__(self, section: StudySection, world: ReplicaWorld, folder: Path) -> None:
        self.section, self.world, self.folder = section, world, folder
        self._link: ReplicaLink | None = None

    @property
    def link(self) -> ReplicaLink:
        """See the class."""
        assert self._link is not None, "the ranks of the launch have met"
        return self._link

    @property
    def store(self) -> Any:
        """Of all ranks of the launch, once they have met."""
        return self.link.store

    def meet(self, section: ParallelSection, on_met: Callable[[], None]) -> None:
        """Join the replica's own process group, and connect to the ranks at the same place in the other replicas.

        ``on_met`` is called when all ranks of the replica have met.

        Collective: all ranks of the launch.
        """
        world = self.world
        own = Identity.own(world.launch_rank, world.launch_size, str(self.folder))
        store = rendezvous.meet(own, section.timeout_s)
        of_run = prefix_store(f"replica/{world.replica}", store)
        groups.init_process_group(section.timeout_s, of_run, on_met=on_met, share_devices=section.share_devices)
        self._link = ReplicaLink(world, self.section.trusted, store, section.timeout_s)

    def agree_on_checkpoint(self, step: int) -> int | None:
        """None if all replicas have found a checkpoint of the same step (0: none); else the earliest, to search again.

        Collective: the ranks of equal place in all replicas.
        """
        steps = [round(found) for (found,) in self.link.gather([float(step)])]
        return None if len(set(steps)) == 1 else min(steps)


class Study(Hook):
    """Compares this replica with the trusted one.

    It comes after the hooks that decide to stop and before those that evaluate and save, so that all replicas end at
    the same step, and a rank's log is complete for a saved step.

    Args:
        launch: whose ranks have met.
        eval_loader: this replica's validation samples; None: none.
        save_interval: steps between checkpoints; 0: only at the end.

    Attributes:
        in_step: the hook of mode parameter_sync, which comes after fault injection and before bounds; else None.
    """

    def __init__(self, launch: StudyLaunch, run: Run, eval_loader: EvalLoader | None, save_interval: int) -> None:
        self._launch, bridge = launch, launch.link
        self.section = launch.section
        self._bridge = bridge
        self._eval_loader = eval_loader
        self._save_interval = save_interval
        self._log = StudyLog(launch.folder, launch.world.launch_rank, launch.world.replica, run.step)
        self._write_start(run)
        self._results: ResultSync | None = None
        self._distances: ShardNorms | None = None
        self.in_step: ParameterSync | None = None
        mode, submodules = self.section.mode, list_submodules(run.engine.module)
        if mode == COMPUTATION_SYNC:
            self._results = ResultSync(self.section, bridge, self._log.write)
            self._fqns = frozenset(one.fqn for one in submodules)
        else:
            self._distances = ShardNorms(run.engine.optimizer, submodules, run.dims.tp_rank, bridge, run.host_group)
        if mode == PARAMETER_SYNC:
            assert self._distances is not None, "made for every mode but computation_sync"
            self.in_step = ParameterSync(bridge, self._distances, self._write_distances)

    def watches(self) -> list[Watch]:
        """Watches of the run's results, after fault injection; none in modes that compare states only."""
        if self._results is None:
            return []
        return [Watch(self._results, lambda step: self._fqns, injects_faults=True)]

    def _write_start(self, run: Run) -> None:
        launch, dims = self._launch, run.dims
        self._log.write(
            "start",
            run.step,
            mode=launch.section.mode,
            replicas=launch.world.replicas,
            trusted=launch.section.trusted,
            replica_rank=dims.rank,
            dp_rank=dims.dp_rank,
            pp_rank=dims.pp_rank,
            tp_rank=dims.tp_rank,
            host=socket.gethostname(),
        )
        self._log.flush()

    def on_start(self, run: Run) -> None:
        """Stop all replicas if one stops before its first step."""
        self._agree_to_stop(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log the step's comparison, and agree on stopping."""
        losses = [loss for (loss,) in self._bridge.gather([result.loss])]
        trusted = losses[self.section.trusted]
        if run.dims.rank == 0:
            self._log.write("loss", run.step, loss=result.loss, trusted_loss=trusted)
        self._agree_to_stop(run)
        due = run.step % self.section.interval == 0 or run.is_last_step
        saves = bool(self._save_interval) and run.step % self._save_interval == 0
        if self._results is not None and (due or saves):
            self._results.flush(run.step)
        if self._launch.section.mode == FREE_RUN and due:
            assert self._distances is not None, "made for every mode but computation_sync"
            self._write_distances("parameters", run.step, self._distances.measure(lambda fragment: fragment.master))
        if self._launch.section.mode == FREE_RUN and run.step >= run.steps:
            self._evaluate(run)
        self._log.flush()

    def _agree_to_stop(self, run: Run) -> None:
        """All replicas stop after the step in which one has a reason."""
        stops = [bool(stop) for (stop,) in self._bridge.gather([float(run.end.reason is not None)])]
        if not any(stops):
            return
        reasons = self._bridge.gather_text(run.end.reason or "")
        if run.end.reason is None:
            first = stops.index(True)
            run.end.reason = f"{reasons[first]}, of replica {first} of the study"
            run.events.emit("stop", "requested", step=run.step, reason=run.end.reason)

    def _write_distances(self, kind: str, step: int, distances: list[NormDifference]) -> None:
        if self._launch.world.rank != 0:
            return
        for one in distances:
            self._log.write(kind, step, **vars(one), ratio=one.ratio)

    def _evaluate(self, run: Run) -> None:
        """Evaluate this replica's model, and count the tokens that it predicts differently from the trusted one."""
        assert self._eval_loader is not None, "checked when the configuration was read"
        engine: TrainingEngine = run.engine
        last = run.dims.is_last_stage
        start = time.perf_counter()
        with top_predictions(engine.module.loss_fn if last else None) as found:
            loss = engine.evaluate(iter(self._eval_loader), len(self._eval_loader))
        run.progress.paused_s += time.perf_counter() - start
        counts = torch.zeros(4, dtype=torch.float64)
        if last:
            own = torch.stack(found)
            trusted = self._bridge.share(own, "predictions")
            labels, mask = (torch.stack(each) for each in zip(*(pair for _, pair in self._eval_loader), strict=True))
            if run.dims.tp_rank == 0:
                matches = (torch.ones_like(own), own != trusted, own == labels, trusted == labels)
                counts = torch.stack([(one.double() * mask.double()).sum() for one in matches])
        dist.all_reduce(counts, group=run.host_group)
        losses = self._bridge.gather([loss])
        if run.dims.rank != 0:
            return
        tokens, disagreeing, correct, trusted_correct = (round(count) for count in counts.tolist())
        self._log.write(
            "evaluation",
            run.step,
            loss=loss,
            trusted_loss=losses[self.section.trusted][0],
            tokens=tokens,
            disagreeing=disagreeing,
            correct=correct,
            trusted_correct=trusted_correct,
        )

    def on_end(self, run: Run) -> None:
        """End together, since one of the ranks holds the rendezvous store; summarize this host's files."""
        self._log.flush()
        self._bridge.gather([0.0])
        if self._launch.world.launch_rank != 0:
            return
        summary = summarize_study(self._launch.folder)
        text = json.dumps(summary.as_dict(), indent=2) + "\n"
        (self._launch.folder / STUDY_FOLDER / "summary.json").write_text(text, encoding="utf-8")
        for line in describe_study(summary):
            logger.info("%s", line)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class ParameterSync(Hook):
    """Compares gradients before the optimizer step, and takes over the trusted replica's state after it.

    ``write`` is called with (kind, step, distances).
    """

    def __init__(self, bridge: ReplicaLink, distances: ShardNorms, write: Any) -> None:
        self._bridge = bridge
        self._distances = distances
        self._write = write

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Compare the reduced gradients, before they are bounded or clipped."""
        found = self._distances.measure(lambda fragment: fragment.gradient)
        self._write("gradient", engine.step_number, found)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Overwrite this replica's state with the trusted one's."""
        overwrite_training_state(engine, self._bridge)
