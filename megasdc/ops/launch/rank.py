"""Entry point of every rank: restores environment, working folder and arguments, then becomes the training script.

DeepSpeed's backends lose or change what they carry: pdsh joins arguments without quotes and drops most of the
environment, OpenMPI and SLURM set no RANK. So the launcher starts this module with one encoded argument; it restores
what the front set and then becomes the training script (``exec``), with the same process id and exit code. When the
launcher of its host ends, the script gets SIGTERM, as for a requested stop.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from megasdc.common.errors import LaunchError
from megasdc.common.wire import raise_descriptor_limit
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE, follow_parent

SOURCES_OF_RANK_VARIABLES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
}


@dataclass(frozen=True)
class RankCommand:
    """Command that every rank of a launch runs; ``cwd`` is absolute, ``program`` a script's path or -m MODULE.

    ``path``: folders put before PATH; ``environment`` is set before the script starts, ``fallback`` only where the
    launcher did not set a variable. ``private``: names of variables with secrets, which come another way.
    """

    cwd: str
    program: list[str]
    arguments: list[str]
    environment: dict[str, str]
    path: list[str]
    fallback: dict[str, str]
    private: list[str] = field(default_factory=list)

    def encode(self) -> str:
        """Return the command as one word of letters, digits, ``-``, ``_`` and ``=``."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> RankCommand:
        """Return the command of a word made by ``encode``."""
        return cls(**json.loads(base64.urlsafe_b64decode(text)))


def rank_environment(command: RankCommand, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of the training script, from that set by the launcher."""
    result = {**command.fallback, **environ, **command.environment}
    for name, sources in SOURCES_OF_RANK_VARIABLES.items():
        found = [environ[source] for source in sources if source in environ]
        if name not in result and found:
            result[name] = found[0]
    result["PATH"] = os.pathsep.join([*command.path, environ.get("PATH", os.defpath)])
    return result


def main(argv: Sequence[str]) -> None:
    """Become the training script.

    ``argv``: optionally ``--local_rank=N`` (from DeepSpeed), then the launch id, then the encoded command.

    Raises:
        LaunchError: the working folder cannot be entered on this host.
    """
    *extra, _launch_id, encoded = argv
    command = RankCommand.decode(encoded)
    raise_descriptor_limit()
    node = os.environ.get(NODE_PID_VARIABLE)
    follow_parent(expected=int(node) if node else None)
    if missing := [name for name in command.private if name not in os.environ]:
        print(
            f"{socket.gethostname()}: {', '.join(missing)} did not come to this host, since values with secrets are on "
            "no command line and this launcher passes no environment on; set them there, or in a file of mode 0600",
            file=sys.stderr,
        )
    try:
        os.chdir(command.cwd)
    except OSError as error:
        raise LaunchError(f"working folder {command.cwd} cannot be entered on this host: {error}") from error
    arguments = [sys.executable, "-u", *command.program, *extra, *command.arguments]
    os.execve(sys.executable, arguments, rank_environment(command, os.environ))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LaunchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
