"""Says whether checkpoints hold the same bits, and what differs where; exit code 0 same, 1 different, 2 not compared.

python tools/compare_checkpoints.py runs/a/checkpoints/step_00000100 runs/b/checkpoints/step_00000100
"""

from megasdc.common.program import start

if __name__ == "__main__":
    start("megasdc.lab.checkpoints.pages.checkpoint_command")
