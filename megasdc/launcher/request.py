"""The user's request for a launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"
FAILURE_GRACE_S = 60.0


@dataclass(frozen=True)
class LaunchRequest:
    """The user's request; the names are those of ``megasdc launch``.

    Attributes:
        config_path: the run's JSON file.
        hostfile: DeepSpeed's hostfile; None runs on this host only.
        num_gpus: ranks on each host; None means all slots of the hostfile.
        include: ``NAME[:SLOT[,SLOT...]][@NAME...]``, use only these.
        exclude: the same form, use all but these.
        launcher_args: further options for DeepSpeed's launcher.
        overrides: texts ``a.b.c=value``.
        allow_changed: paths ``a.b.c`` of fields that may differ on resume.
        failure_grace_s: seconds that other ranks get after one has failed.
        launch_id: by which its processes and records can be found; empty: a new one.
        ended: ids of launches of the same run whose end its supervisor has seen; their locks are taken over at once.
    """

    config_path: Path
    hostfile: Path | None = None
    num_gpus: int | None = None
    include: str = ""
    exclude: str = ""
    backend: str = "pdsh"
    launcher_args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    allow_changed: tuple[str, ...] = ()
    script: Path = DEFAULT_SCRIPT
    failure_grace_s: float = FAILURE_GRACE_S
    launch_id: str = ""
    ended: tuple[str, ...] = ()
