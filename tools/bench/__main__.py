"""``python -m tools.bench``, from the repository's folder."""

from megasdc.common.program import start

if __name__ == "__main__":
    start("tools.bench.commands")
