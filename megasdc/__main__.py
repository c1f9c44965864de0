"""``python -m megasdc`` is the same as ``megasdc``."""

from megasdc.cli import main

main()
