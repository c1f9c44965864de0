"""Guard of Hugging Face's ``Trainer``, which makes its engine when training begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.attached.engine import ZERO3
from megasdc.attached.record import computing_names, pattern_problems, trained_names
from megasdc.common.errors import ConfigError
from megasdc.config.guard import GuardSettings

COMPILES = (
    "TrainingArguments.torch_compile: got True; allowed: False, since the submodules of a compiled model cannot be "
    "observed. torch_compile_backend and torch_compile_mode set it, too: leave them out."
)


class TrainerGuard:
    """Attaches a guard whenever a ``Trainer`` begins to train, and closes it at the end.

    Args:
        trainer: a ``Trainer`` with ``TrainingArguments(deepspeed=...)``.
        attach: called with the trainer's engine; returns a guard.

    Attributes:
        guard: guard of the running or last training; None: none has begun.
    """

    def __init__(self, trainer: Any, attach: Callable[[Any], Any]) -> None:
        from transformers import TrainerCallback

        self.guard: Any = None
        self._trainer, self._train = trainer, trainer.train
        self._checkpoint: Path | None = None
        """Checkpoint from which the next training goes on, None: none; it is loaded before callbacks are called."""
        trainer.train = self._noting
        owner = self

        class Attaching(TrainerCallback):  # type: ignore[misc]
            """Callback that attaches a guard when training begins, and closes it at the end."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                owner.guard = attach(trainer.model_wrapped)
                if owner._checkpoint is not None:
                    owner.guard.loaded(owner._checkpoint)

            def on_train_end(self, *_: Any, **__: Any) -> None:
                owner._end()

        self._callback = Attaching()
        trainer.add_callback(self._callback)

    def close(self) -> None:
        """Undo everything, also for later trainings; closing again does nothing."""
        self._end()
        vars(self._trainer).pop("train", None)
        self._trainer.remove_callback(self._callback)

    def _noting(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        from transformers.trainer_utils import get_last_checkpoint

        of_trainer = resume_from_checkpoint
        if of_trainer is True:
            of_trainer = get_last_checkpoint(self._trainer.args.output_dir)
        latest = Path(of_trainer) / "latest" if of_trainer else None
        found = None if latest is None or not latest.is_file() else latest.with_name(latest.read_text().strip())
        self._checkpoint = found
        return self._train(resume_from_checkpoint, *args, **options)

    def _end(self) -> None:
        if self.guard is not None:
            self.guard.close()


def is_trainer(value: Any) -> bool:
    """Whether a value is a ``Trainer``, told by its class name, without an import of transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == "transformers.trainer.Trainer" for kind in type(value).__mro__)


def check_trainer(trainer: Any, settings: GuardSettings) -> None:
    """Refuse a trainer that does not train with DeepSpeed.

    Raises:
        ConfigError: the trainer does not use DeepSpeed, or its arguments already show that its engine cannot be
            guarded, or patterns of the settings match nothing in its model.
    """
    if not trainer.is_deepspeed_enabled:
        raise ConfigError(
            "trainer: it trains without DeepSpeed, alone or by DistributedDataParallel or FSDP, which cannot be "
            "guarded yet; give TrainingArguments(deepspeed=...) a DeepSpeed configuration, such as one with ZeRO 0, "
            "whose replicas are those of DistributedDataParallel."
        )
    problems = []
    if trainer.args.torch_compile:
        problems.append(COMPILES)
    if trainer.accelerator.state.deepspeed_plugin.hf_ds_config.is_zero3():
        problems.append(ZERO3)
    problems += pattern_problems(settings, computing_names(trainer.model), trained_names(trainer.model))
    if problems:
        raise ConfigError(problems)
