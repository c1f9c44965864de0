"""Hooks that a user could write, outside the package and without a change of it."""

from __future__ import annotations

import json

import torch

from megasdc import Field, Hook


class LossLog(Hook):
    """Writes the losses of a run to a file of its own, each once, also over a resume."""

    saved_as = "LossLog"

    def __init__(self, name: str) -> None:
        self.name, self.losses = name, {}

    def after_step(self, run, result):
        """Keep the loss of a step."""
        self.losses[str(result.step)] = result.loss

    def on_end(self, run):
        """Write all of them, on one rank."""
        if run.dims.rank == 0:
            (run.folder / self.name).write_text(json.dumps(self.losses))

    def state_dict(self):
        """Losses so far."""
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state):
        """Go on with those of the checkpoint."""
        self.losses = dict(state["losses"])


class StopAtWish(Hook):
    """Stops the run when one rank wishes it; the others learn of it by a field."""

    slot = "stop"

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank
        self.own = 0.0
        self.wish = Field(lambda: self.own)
        self.fields = (self.wish,)

    def before_step(self, run):
        """Wish it on one rank alone."""
        self.own = float(run.dims.rank == self.rank and run.step + 1 == self.step)

    def after_step(self, run, result):
        """All ranks read the same."""
        if self.wish.value:
            run.end.reason = "a rank wished it"


class ReplicaNorms(Hook):
    """Compares the norms of the replicas' own gradients, before they are averaged."""

    slot = "checks"

    def on_start(self, run):
        """One place of the field for each replica."""
        self.norm = None
        self.norms = Field(lambda: self.norm, places=run.dims.data, place=run.dims.dp_rank)
        self.fields = (self.norms,)
        self.rows = []

    def before_reduction(self, engine):
        """The norm of what this replica has accumulated."""
        norms = [one.grad.double().norm() for one in engine.module.parameters() if one.grad is not None]
        self.norm = float(torch.stack(norms).norm())

    def after_step(self, run, result):
        """All ranks know the norms of all replicas."""
        self.rows.append(list(self.norms.values))

    def on_end(self, run):
        """Write them."""
        if run.dims.rank == 0:
            (run.folder / "norms.json").write_text(json.dumps(self.rows))


class Order(Hook):
    """Writes the names of the hooks of a run."""

    slot = "presence"

    def on_start(self, run):
        """They are all there by now."""
        if run.dims.rank == 0:
            (run.folder / "order.json").write_text(json.dumps([type(one).__name__ for one in run.hooks]))


class Fails(Hook):
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        if method == "__init__":
            raise RuntimeError("as asked")
        self.method = method

    def after_step(self, run, result):
        """Fail in the second step of one rank."""
        if self.method == "after_step" and result.step == 2 and run.dims.rank == 1:
            raise ZeroDivisionError("as asked")


class NoSlot(Hook):
    """Has a place that there is not."""

    slot = "somewhere"


class Taken(Hook):
    """Has a state with the name of another hook's."""

    saved_as = "SkipWatch"

    def state_dict(self):
        """Something."""
        return {"a": 1}
