"""Report page of an incident, in the run folder beside JSON for programs.

The page shows first what happened where and what was done, then the instructions, then the evidence. It needs no
network.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megasdc.common.addresses import which_micro_batch
from megasdc.common.errors import CorruptionError, StorageError
from megasdc.common.room import write_when_room
from megasdc.sdc.incidents.heat_map import build_heat_maps
from megasdc.sdc.incidents.incident import INJECTED, FlaggedRank, Incident, how_often, incident_to_json

_TIERS = {
    "audit": "an audit: replicas computed the same micro-batch and did not agree",
    "recompute": "the activation recompute: a rank computed a forward result twice and got two values",
    "permuted": "a permuted replay: a rank computed a micro-batch with elements in other places and got other values",
    "rows": "the sums of a product's rows: one is off, and an element of it outside of what rounding allows",
    "tokens": "the comparison of a micro-batch with the file: the model was given something else",
    "place": "the comparison of the place in the data with what follows from the steps and their decisions",
    "parameters": "the comparison of parameters: replicas hold different values",
    "copies": "the comparison of parameters that every tensor rank holds whole: they hold different values",
    "reduction": "the sum of gradients over replicas, of which a slice was added up again",
    "state": "a part of the optimizer's state, which changed between two steps",
    "update": "a slice of the optimizer's update, which another rank, or this one elsewhere, computed again",
    "settings": "what an optimizer step used, hyperparameters and step counts: replicas have not the same",
    "norm": "the norm of the gradient: ranks used other norms, or not the one that their parts add up to",
    "clipping": "the clipping of the gradient: a rank used another factor",
    "copy": "the parameters that were gathered: they are not their owner's masters in the model's type",
    "golden": "the golden workload, which ranks computed beside the run: a result is not that of trusted hardware",
}
_VERDICTS = {
    "persistent": "Persistent: repeated, the same wrong value came each time.",
    "intermittent": "Intermittent: wrong again, repeated or since an earlier finding, but not always or not equally.",
    "not_reproduced": "Not reproduced: repeated, every result was right.",
    "inconclusive": "Inconclusive: results differ, but what was computed does not tell which rank is wrong.",
}
_BASES = {
    "relative to the majority": "Right is what the majority of replicas computed; no golden trace confirms it.",
    "golden trace": "Right is what the golden trace says, which trusted hardware computed.",
    "replay": "Right is what ranks computed when they repeated the micro-batch.",
    "referee": "Right is what fp64 says of the product, within the bound of the rounding of its type.",
    "own code in fp64": "Right is what the submodule's own code computes in fp64, but for an estimate of rounding.",
    "own recomputation": "The rank contradicts itself: its two results of the same work differ.",
    "own copy": "Right is what the rank itself had left there after the last step; it was put back.",
    "file of the data": "Right is what the file of the prepared data holds, whose blocks have their checksums.",
    "mean of the replicas' gradients": "Right is the mean of what replicas gave; owner, adder or link made another.",
    "step and decisions": "Right is where the run's steps, and which micro-batches they took, lead from its start.",
    "own settings of the step before": "The rank contradicts itself: what no other rank changed since the step before.",
    "own results elsewhere": "The rank contradicts itself: its result changes when its elements are in other places.",
    "parts of the norm": "Right is what the squares of all gradients' blocks add up to.",
    "own norm": "Right is what follows from the norm that the rank itself used.",
    "own digest": "Right is what the rank itself had left there after the last step; it is lost.",
    "master shard": "Right is what the owners of the parameters keep in their fp32 master shards.",
    "copies on tensor ranks": "Right is what most tensor ranks hold of parameters that all of them hold whole.",
}
_DONE = {
    "halted": "training was halted",
    "isolated": "training continues without its replica",
    "repaired": "the work was redone and training continues",
    "committed": "training continues with it",
}
_OUTCOMES = {
    "halted": f"Training was halted: nothing more was committed or saved, all ranks end with exit code "
    f"{CorruptionError.exit_code}.",
    "isolated": "Nothing of the step was committed. The other replicas go on in the same processes, with the same "
    "samples a step, from the newest step in memory or on the disk that may be used; its ranks have ended.",
    "repaired": "The work was redone, all ranks agreed, and that result was used; training continues.",
    "committed": "The step was committed as it was, with what is wrong in it; training continues, and no checkpoint "
    "saved from then on will be verified.",
}


def write_incident(incident: Incident) -> tuple[Path, Path]:
    """Write both reports of an incident to its run folder, each atomically; earlier reports are kept.

    Returns:
        ``reports/incident_step_NNNNNNNN.json`` and ``.html`` in the run folder, with a number where that name is taken.

    Raises:
        StorageError: one cannot be written.
    """
    data, page = report_paths(incident.run_dir, incident.step)
    try:
        write_when_room(data, incident_to_json(incident))
        write_when_room(page, render_page(incident, data.name))
    except OSError as error:
        raise StorageError(
            f"the report of the corruption in step {incident.step} cannot be written into {data.parent}: {error}; it "
            "was: " + headline(incident)
        ) from error
    return data, page


def report_paths(run_dir: Path | str, step: int) -> tuple[Path, Path]:
    """Unused names for the JSON and HTML reports of an incident of this step."""
    folder, stem, number = Path(run_dir) / "reports", f"incident_step_{step:08d}", 1
    while True:
        name = stem if number == 1 else f"{stem}_{number}"
        paths = folder / f"{name}.json", folder / f"{name}.html"
        if not any(path.exists() for path in paths):
            return paths
        number += 1


def headline(incident: Incident) -> str:
    """One sentence with what happened, where and when."""
    when = f"Step {incident.step}{which_micro_batch(incident.micro_batch)}"
    if incident.flagged:
        what = "; ".join(
            f"rank {one.rank} on host {one.host} computed a wrong {one.first.phase.replace('_', ' ')} of "
            f"{one.first.fqn} ({one.verdict.replace('_', ' ')})"
            for one in incident.flagged
        )
    else:
        ranks = " and ".join(f"{one.rank} on host {one.host}" for one in incident.disputed)
        what = f"ranks {ranks} computed different results, and it is not known which is wrong"
    return f"{when}: {what}. Found {incident.time}; {_DONE[incident.done]}."


def render_page(incident: Incident, json_name: str) -> str:
    """The page, as self-contained HTML; it links the JSON file beside it by name."""
    environment = Environment(
        loader=PackageLoader("megasdc.sdc", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sizes = incident.environment.layout
    return environment.get_template("incident.html").render(
        incident=incident,
        title=f"Corruption in step {incident.step}: " + " and ".join(incident.hosts),
        headline=headline(incident),
        injected=INJECTED,
        outcome=_OUTCOMES[incident.done],
        tier=_TIERS[incident.tier],
        verdict=_VERDICTS[incident.verdict],
        basis=_BASES[incident.basis] if incident.flagged else "",
        repeats=_repeats,
        maps=build_heat_maps(incident),
        num_differing=sum(
            count
            for submodules in incident.evidence.differing.values()
            for counts in submodules.values()
            for count in counts.values()
        ),
        layout=", ".join(f"{name} {size}" for name, size in sizes.items()),
        roles={
            **{one.rank: "disputed" for one in incident.disputed},
            **{one.rank: "flagged" for one in incident.flagged},
        },
        clock=lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        details=_details,
        json_name=json_name,
    )


def _repeats(one: FlaggedRank) -> str:
    if one.repeats == 0:
        return "not repeated"
    text = how_often(one.verdict, one.wrong_repeats, one.repeats)
    if one.rate_bound is not None:
        text += f"; at most {one.rate_bound:.1%} of its micro-batches are wrong (95 % confidence)"
    return text


def _details(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value, default=str)}" for name, value in fields.items())
