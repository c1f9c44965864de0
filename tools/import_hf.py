"""Makes initial weights from a Hugging Face model; the same as `megasdc import-hf`.

python tools/import_hf.py exported/smoke imported/smoke
"""

import sys

from megasdc.common.program import start

if __name__ == "__main__":
    sys.argv.insert(1, "import-hf")
    start("megasdc.cli")
