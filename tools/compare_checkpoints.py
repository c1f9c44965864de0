"""``megasdc compare`` as a script, with its options and exit codes."""

from megasdc.common.program import start

if __name__ == "__main__":
    start("megasdc.cli.compare", "compare_checkpoints_main")
