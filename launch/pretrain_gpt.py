#!/usr/bin/env python3
"""Entry script for the ``deepspeed`` launcher in the repository; see ``megasdc.entry.pretrain_gpt``.

deepspeed --num_gpus 2 launch/pretrain_gpt.py --config configs/smoke.json --set megasdc.training.steps=20
"""

from megasdc.entry.pretrain_gpt import main

if __name__ == "__main__":
    main()
