"""Commands that plan: `megasdc plan-audit`, `coverage`, `plan-checkpoints`, `plan-run`."""
