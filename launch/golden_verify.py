#!/usr/bin/env python3
"""Entry script for the ``deepspeed`` launcher in the repository; see ``megasdc.entry.golden_verify``.

deepspeed --hostfile hosts launch/golden_verify.py smoke.golden --repeats 10 --out result.json
"""

from megasdc.entry.golden_verify import main

if __name__ == "__main__":
    main()
