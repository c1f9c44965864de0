"""Entry scripts of the ``deepspeed`` launcher: by path, or as modules with its option ``--module``."""
