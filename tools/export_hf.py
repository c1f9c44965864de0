"""Writes a checkpoint for Hugging Face transformers; the same as `megasdc export-hf`.

python tools/export_hf.py runs/smoke/checkpoints exported/smoke
"""

import sys

from megasdc.common.program import start

if __name__ == "__main__":
    sys.argv.insert(1, "export-hf")
    start("megasdc.cli")
