"""Names of commands: the groups in which help lists them, and what people type instead of them."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "Start a run": (
        *("init", "check-config", "preflight", "launch", "run", "supervise", "test-hosts"),
        *("schema", "config-table"),
    ),
    "Watch a run, and see what came of it": ("top", "summary", "report", "export-metrics", "triage"),
    "Data": ("prepare-data", "verify-data", "inspect-data"),
    "Checkpoints and models": (
        "verify-checkpoint",
        "inspect-checkpoint",
        "compare",
        "convert-checkpoint",
        "manifest",
        "archive",
        "export-hf",
        "import-hf",
        "eval",
        "generate",
    ),
    "Trust the hardware, or not": (
        "drill",
        "check-determinism",
        "compare-traces",
        "golden",
        "devices",
        "stress",
        "coverage",
    ),
    "Plan": ("plan-audit", "plan-checkpoints", "plan-run", "dropcompute"),
    "Research": ("study", "sweep"),
}
"""Commands by heading, both in the order of help; also names that another version has."""

_OF_TRAINING = (
    "megasdc launch --num-ranks 2 --config FILE; a script of your own: megasdc run -- deepspeed --num_gpus 8 train.py"
)
_OF_STATE = "megasdc top RUN while it trains, megasdc summary RUN afterwards"
_OF_HOST = (
    "megasdc devices (this host's devices), megasdc check-determinism --config FILE (does it repeat bit for bit?), "
    "megasdc preflight --hostfile HOSTS --config FILE (everything before a long run)"
)
_OF_BEGIN = "megasdc init my.json, which asks what it needs; all at once in a fresh clone: bash launch/quickstart.sh"
_OF_DATA = "megasdc prepare-data --config FILE"
HINTS = {
    **dict.fromkeys(("train", "pretrain", "start", "resume", "restart"), _OF_TRAINING),
    **dict.fromkeys(("status", "ps", "watch", "monitor", "progress", "logs", "log", "show", "info"), _OF_STATE),
    **dict.fromkeys(("doctor", "check", "diagnose", "test", "selftest"), _OF_HOST),
    **dict.fromkeys(("new", "create", "setup", "configure", "quickstart"), _OF_BEGIN),
    **dict.fromkeys(("prepare", "preprocess", "tokenize", "data"), _OF_DATA),
    **dict.fromkeys(("validate", "lint", "config"), "megasdc check-config FILE --world-size N"),
    **dict.fromkeys(
        ("verify", "fsck"), "megasdc verify-checkpoint DIR, megasdc verify-data DIR, megasdc golden verify"
    ),
    **dict.fromkeys(("convert", "reshard"), "megasdc convert-checkpoint DIR --to universal"),
    "diff": "megasdc compare A B, megasdc compare-traces RUN_A RUN_B",
    **dict.fromkeys(("export", "import", "hf"), "megasdc export-hf DIR OUT, megasdc import-hf MODEL OUT"),
    **dict.fromkeys(
        ("evaluate", "benchmark", "bench"), "megasdc eval DIR; what a feature costs: python -m tools.bench"
    ),
    **dict.fromkeys(("plan",), "megasdc plan-run, megasdc plan-audit, megasdc plan-checkpoints"),
    **dict.fromkeys(
        ("protect", "guard", "attach"),
        "megasdc launch --protect WORD, megasdc run --protect WORD; in a script megasdc.attach(engine, protect=WORD)",
    ),
    "help": "megasdc --help, megasdc COMMAND --help",
    "version": "megasdc --version",
}
"""What does what people look for under a name that no command has."""


def help_group_of(command: str) -> str | None:
    """Heading of a command in help; None: it is in no group."""
    return next((heading for heading, names in GROUPS.items() if command in names), None)


def in_help_order(commands: list[str]) -> list[str]:
    """Commands in the order of help; those of no group are last."""
    order = [name for names in GROUPS.values() for name in names]
    return sorted(commands, key=lambda name: order.index(name) if name in order else len(order))
