"""Says where runs that should be equal part first; exit code 0 same, 1 different, 2 could not compare.

python tools/compare_traces.py runs/a runs/b
"""

from megasdc.common.program import start

if __name__ == "__main__":
    start("megasdc.lab.traces.trace_command")
