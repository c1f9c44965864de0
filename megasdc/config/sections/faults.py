"""Specs of injected faults, for drills and campaigns.

One spec defines where (phase, submodule, place, steps), what (kind, elements) and how often (probability, burst, once).
Every draw is a function of the seed, the spec's index in the list, the rank and the address, so that the same
configuration injects the same faults again, also after a resume.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.common.addresses import ACCUMULATED_GRAD, PHASES
from megasdc.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section, setting

OPTIMIZER_STATE, COLLECTIVE, CHECKPOINT, TOKENS = "optimizer_state", "collective", "checkpoint", "tokens"
NORM, CLIPPED_GRAD, HYPERPARAMETER = "norm", "clipped_grad", "hyperparameter"
STATE_AT_REST, COPY, PLACE = "state_at_rest", "copy", "place"
_OBSERVED = tuple(phase for phase in PHASES if phase != ACCUMULATED_GRAD)  # faults in it: collective
FAULT_PHASES = (
    *(*_OBSERVED, OPTIMIZER_STATE, COLLECTIVE, CHECKPOINT, TOKENS),
    *(NORM, CLIPPED_GRAD, HYPERPARAMETER, STATE_AT_REST, COPY, PLACE),  # last: draws depend on the order
)
"""The phases of addresses, and phases of faults that have no address of their own.

optimizer_state: masters and moments in place, just before the optimizer reads them. collective: this rank's
accumulated gradient of a whole step, after the sums over tied stages and tensor ranks and before the sum over replicas.
checkpoint: a file that this rank wrote, after the checkpoint is complete. tokens: a micro-batch after the loader has
checked it, as this rank reads it. norm: the numbers by which this rank clips. clipped_grad: its shard after clipping,
as the inner optimizer reads it. hyperparameter: numbers of the optimizer's groups for one step, and Adam's count of
steps, which stays wrong. state_at_rest: masters and moments in place, after a step. copy: what this rank gives to the
all-gather, so that all replicas get it alike. place: how many samples this rank has consumed, before a step.
"""
NORM_SLOTS = ("part", "total", "factor", "blocks")
"""This rank's part of the squared norm before the sum over ranks, the norm, the factor applied to its shard, and the
sums of blocks with which checks compare the norm."""
HYPERPARAMETERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
"""Those of Adam; the slot has the number of the group before the name, such as ``0.lr``."""
PLACE_SLOT = "consumed"
BIT_KINDS = ("bit_flip", "stuck_at_0", "stuck_at_1")
Share = Annotated[float, Field(ge=0, le=1)]


class BurstSection(Section):
    """Faults that come in bursts."""

    at_resume = "applied"

    length: PositiveInt = setting(..., "Steps of one burst.")
    probability: Share = setting(..., "Probability that a burst starts at a step, in [0, 1].")


class FaultPlace(Section):
    """On which ranks, in which steps and micro-batches; what is null does not restrict."""

    at_resume = "applied"

    rank: NonNegativeInt | None = setting(None, "Global rank; in a study: rank of its replica; null: any.")
    replica: NonNegativeInt | None = setting(
        None, "Place along the data dimension; in a study: which of its replicas; null: any."
    )
    stage: NonNegativeInt | None = setting(None, "Pipeline stage; null: any.")
    tensor_rank: NonNegativeInt | None = setting(None, "Place along the tensor dimension; null: any.")
    host: str | None = setting(None, "Pattern of host names, such as `node7*`; null: any.")
    steps: list[PositiveInt | None] = setting(
        [1, None], "First and last step; null as last: to the end.", min_length=2, max_length=2
    )
    micro_batches: list[NonNegativeInt] | None = setting(None, "Micro-batches of a step, the first is 0; null: all.")


class FaultSpec(FaultPlace):
    """One fault in what a run computes or stores, or with `profile` the bundle of a whole node."""

    profile: str | None = setting(
        None,
        "Name of a node profile, or a JSON file like them, whose faults replace this entry; ranks, host, steps, "
        "micro-batches, `min_hidden_size` and `seed` of this entry apply to all of them.",
    )
    submodule: str = setting("*", "Pattern of full names of submodules, such as `*.mlp.linear_fc1`.", min_length=1)
    phase: Literal[FAULT_PHASES] = setting(  # type: ignore[valid-type]
        "forward",
        "Where the fault is injected: forward, recompute: the output; backward: the input's gradient; "
        "weight_grad: one micro-batch's; reduced_grad: this rank's shard; update: right after the inner optimizer; "
        "parameter: after the all-gather; optimizer_state: masters and moments before the step; collective: the "
        "accumulated gradient before the sum over replicas; checkpoint: bytes of a file this rank saved; tokens: a "
        "micro-batch before the model; norm: the numbers by which this rank clips; clipped_grad: this rank's shard "
        "after clipping; hyperparameter: numbers of the optimizer's groups, and its count of steps; state_at_rest: "
        "masters and moments after a step; copy: what this rank gives to the all-gather; place: samples consumed.",
    )
    slot: str | None = setting(
        None,
        "Pattern of the tensor of the submodule, such as `output`, `query`, `weight`, `weight.exp_avg`; with phase "
        "tokens `tokens` or `labels`, norm `part`, `total`, `factor` or `blocks`, hyperparameter `0.lr` (group 0), "
        "`*.step`; null: any.",
    )
    file: str | None = setting(None, "Phase checkpoint: pattern of file names; null: any file of the rank.")
    kind: Literal["bit_flip", "stuck_at_0", "stuck_at_1", "value", "scale", "noise"] = setting(
        "bit_flip", "What happens to an element."
    )
    bits: Literal["sign", "exponent", "mantissa", "any"] | list[Annotated[int, Field(ge=0, le=63)]] = setting(
        "any", "bit_flip, stuck_at: all bits of a list of numbers (0 is the lowest), or random ones of a part."
    )
    num_bits: PositiveInt = setting(1, "How many different bits of the named part in each element.")
    value: Literal["nan", "inf", "-inf"] | float | None = setting(None, "Kind value: what is put there.")
    factor: float | None = setting(None, "Kind scale: what elements are multiplied by.")
    deviation: PositiveFloat | None = setting(
        None, "Kind noise: standard deviation d; x becomes x (1 + d z), z standard normal."
    )
    elements: PositiveInt = setting(
        1, "How many elements of the tensor, at most all; with pattern column, how many columns."
    )
    element_probability: Share | None = setting(
        None, "Instead of `elements`: each element is changed with this probability, in [0, 1]."
    )
    pattern: Literal["random", "adjacent", "periodic", "column", "indices"] = setting(
        "random",
        "Which elements, in row-major order: random; adjacent: one run; periodic: a run in every `period`; column: "
        "whole columns of the last dimension; indices: those given.",
    )
    period: PositiveInt | None = setting(None, "Pattern periodic: elements from one run to the next.")
    run: PositiveInt = setting(1, "Pattern periodic: adjacent elements of each run; at most `period`.")
    indices: list[NonNegativeInt] | None = setting(
        None, "Pattern indices: row-major places; those outside a tensor are ignored."
    )
    only_above: Annotated[float, Field(ge=0)] | None = setting(
        None, "Only elements of at least this magnitude; pattern random picks among them."
    )
    only_below: Annotated[float, Field(ge=0)] | None = setting(None, "Only elements of at most this magnitude.")
    same_elements: bool = setting(
        False,
        "Change the same elements and bits of a tensor each time, and the same as other specs with this setting, seed "
        "and pattern: a persistent fault.",
    )
    bound_to: Literal["values", "unit"] = setting(
        "values",
        "What a fault stays with where an operation is computed with its elements in other places (`audit.permuted`): "
        "the values, wherever they are, or the unit that computes a place, with what is there now.",
    )
    min_hidden_size: PositiveInt | None = setting(None, "Only in models at least so wide; null: in all.")
    probability: Share = setting(1.0, "Probability of firing at each result that fits, in [0, 1].")
    burst: BurstSection | None = setting(None, "Fire only within bursts; null: in all steps.")
    once: bool = setting(
        False, "Fire until bits were changed once on a rank; a run that resumes from before that repeats it."
    )
    seed: NonNegativeInt = setting(0, "Seed of every draw.")


class ProcessFaultSpec(FaultPlace):
    """One fault of a whole process: it ends, stops, or is slow."""

    kind: Literal["exit", "sigkill", "sigstop", "hang", "slow"] = setting(
        ...,
        "exit: end at once with `exit_code`; sigkill, sigstop: the signal to itself; hang: never join the collectives "
        "that follow; slow: after each pass sleep `factor` - 1 times what the pass took.",
    )
    phase: Literal["forward", "backward", "collective", "update"] = setting(
        "forward",
        "When: before a micro-batch's forward or backward pass, before the gradients are summed over replicas, before "
        "the optimizer steps; with slow, after the pass.",
    )
    exit_code: Annotated[int, Field(ge=0, le=255)] = setting(1, "Kind exit: the code.")
    factor: Annotated[float, Field(ge=1)] | None = setting(
        None, "Kind slow: time of a pass with the fault over time without, at least 1."
    )
    after_restart: bool = setting(
        False, "Fire again in a run that was restarted after it had fired, as a bad machine would."
    )
