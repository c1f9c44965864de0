"""Environment of the ranks, secrets in it, and rules for command lines that remote shells read.

Over pdsh DeepSpeed 0.19.8 exports only ``PYTHON*``, ``MLFLOW*``, ``MV2*``, ``UCX*`` and the lines of
``.deepspeed_env``, and quotes neither those nor most arguments. Other variables are passed in the encoded argument of
``megasdc.ops.launch.rank``, which no shell can misread. Variables that hold secrets are in no argument, which everybody
on a host can read: processes of one host and of SLURM inherit them, and over pdsh they lie in a file of the host's
memory that its user alone can read (``megasdc.ops.launch.on_host.private``) until its launcher has read it.
"""

from __future__ import annotations

import codecs
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from megasdc.common.credentials import holds_secret, is_secret_name, without_credentials
from megasdc.common.errors import LaunchError
from megasdc.common.host import NAME_VARIABLE
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE, default_extensions_dir
from megasdc.parallel.rendezvous import ROUNDS_VARIABLE

SAFE_FOR_SHELL = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
EXPANDED_IN_DOUBLE_QUOTES = re.compile(r"[\"$`\\\n]")
EXPORTED_BY_DEEPSPEED = ("PYTHON", "MLFLOW", "MV2", "UCX")
FORWARDED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "OMP_",
    "KMP_",
    "MKL_",
    "DS_",
    "DEEPSPEED_",
    "CUBLAS_",
    "NVTE_",
    "ONEDNN_",
    "DNNL_",
    "MEGASDC_",
    "WANDB_",
)
PRIVATE_PREFIXES = ("COMET_", "MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "HF_", "HUGGING_FACE_", "HUGGINGFACE_")
"""Of variables of which ranks also get those that hold secrets."""
# The process id is valid on one host only, and belongs to the outer launch if this front runs as a rank.
NEVER_FORWARDED = (NODE_PID_VARIABLE, NAME_VARIABLE)
FORWARDED_NAMES = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GOMP_CPU_AFFINITY",
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    ROUNDS_VARIABLE,
    "TOKENIZERS_PARALLELISM",
)
FRONT_PID_VARIABLE = "MEGASDC_FRONT_PID"
STOP_GRACE_VARIABLE = "MEGASDC_STOP_GRACE_S"
DEFAULT_STOP_GRACE_S = 600.0
DEEPSPEED_GRACE_S = 30.0
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENV_LINE = re.compile(rf"{NAME.pattern}=.*")


def env_files(environ: Mapping[str, str], cwd: Path) -> list[Path]:
    """Return the existing environment files that DeepSpeed will read: home folder, then working folder."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    # As DeepSpeed: a user without HOME and without an entry in passwd has no home folder, and needs none.
    home = Path(os.path.expanduser(environ.get("HOME", "~")))
    candidates = dict.fromkeys([home / name, cwd / name])
    return [path for path in candidates if path.is_file()]


def text_problem(content: bytes, path: Path) -> str | None:
    """Why DeepSpeed would misread a file whatever its lines are: its encoding; None: it is UTF-8 and nothing else."""
    if content.startswith(codecs.BOM_UTF8):
        return (
            "starts with a byte order mark, which DeepSpeed takes for a part of the first line; remove it: "
            f"sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}"
        )
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason} at byte {error.start}); save it in UTF-8, without a byte order mark"
    return None


def env_file_problems(path: Path) -> list[str]:
    """Problems of lines of a ``.deepspeed_env`` file on which DeepSpeed fails or that a shell would misread.

    One sentence per problem, with the line number.
    """
    content = path.read_bytes()
    if problem := text_problem(content, path):
        return [f"{path}: {problem}"]
    problems = []
    for number, line in enumerate(content.decode().splitlines(), 1):
        name, _, value = line.strip().partition("=")
        if not line.strip():
            problem = "empty line; DeepSpeed stops there, remove it"
        elif is_private(name, value):
            problem = (
                f"{name} holds a secret, which DeepSpeed would put on the command lines of all hosts; remove it, and "
                "set it in the environment of megasdc launch, which gives it to the ranks"
            )
        elif line.lstrip().startswith("#"):
            problem = f"got comment `{line}`; DeepSpeed would export it, remove it"
        elif not ENV_LINE.fullmatch(line.strip()):
            problem = f"got `{line}`, need NAME=VALUE"
        elif EXPANDED_IN_DOUBLE_QUOTES.search(line):
            problem = f"got `{line}`; the remote shell would interpret quotes, `$`, backticks and backslashes"
        else:
            continue
        problems.append(f"{path}:{number}: {problem}")
    return problems


def env_file_names(paths: list[Path]) -> set[str]:
    """Return the names that the environment files set; these override the environment of the front."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return {line.split("=", 1)[0].strip() for line in lines if "=" in line}


def is_private(name: str, value: str) -> bool:
    """Whether a variable holds a secret, by its name or in its value."""
    return bool(value) and (is_secret_name(name) or holds_secret(value))


def private_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the variables with secrets that every rank gets, or that DeepSpeed would put on command lines."""
    prefixes = (*FORWARDED_PREFIXES, *PRIVATE_PREFIXES, *EXPORTED_BY_DEEPSPEED)
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(prefixes) and name not in NEVER_FORWARDED and is_private(name, value)
    }


def forwarded_environment(environ: Mapping[str, str], fixed: set[str]) -> dict[str, str]:
    """Select the variables of this process that every rank gets, without those that hold secrets.

    Args:
        environ: environment of the front.
        fixed: names that environment files set; they are not forwarded.

    Returns:
        The variables by name; TORCH_EXTENSIONS_DIR is always among them unless a file sets it.
    """
    chosen = {EXTENSIONS_VARIABLE: default_extensions_dir(), **environ}
    return {
        name: value
        for name, value in sorted(chosen.items())
        if (name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES)
        and name not in fixed
        and name not in NEVER_FORWARDED
        and not is_private(name, value)
    }


def stop_grace_s(environ: Mapping[str, str]) -> float:
    """Return the time in seconds that ranks have to save after SIGTERM or SIGUSR1.

    Raises:
        LaunchError: the value is no positive number.
    """
    text = environ.get(STOP_GRACE_VARIABLE, str(DEFAULT_STOP_GRACE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"environment variable {STOP_GRACE_VARIABLE}={text}: need seconds, more than 0")
    return seconds


def exported_variable_problems(environ: Mapping[str, str]) -> list[str]:
    """Problems: variables exported by DeepSpeed whose name or value the remote shell would expand."""
    exported = [(name, value) for name, value in sorted(environ.items()) if name.startswith(EXPORTED_BY_DEEPSPEED)]
    names = [
        f"environment variable {name!r} is exported by DeepSpeed, and its name, which remote shells read, is no "
        "identifier (letters, digits and _); unset it"
        for name, _ in exported
        if not NAME.fullmatch(name.removesuffix(" (working folder)"))
    ]
    return names + [
        without_credentials(f"environment variable {name}={value}")
        + " is exported by DeepSpeed inside double quotes; unset it or remove quotes, `$`, backticks and backslashes"
        for name, value in exported
        if EXPANDED_IN_DOUBLE_QUOTES.search(value) and not is_private(name, value)
    ]
