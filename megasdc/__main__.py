"""``python -m megasdc`` is the same as ``megasdc``."""

from megasdc.common.program import start


def main() -> None:
    """Run the command line."""
    start("megasdc.cli")


if __name__ == "__main__":
    main()
