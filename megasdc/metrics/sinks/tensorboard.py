"""TensorBoard: an event file a start; steps that are done again after a resume replace those of the start before."""

from __future__ import annotations

from pathlib import Path

from megasdc.metrics.sinks.sink import Sink, Values, number_of_value


class TensorBoardSink(Sink):
    """Writes scalars, in single precision, to event files.

    Args:
        folder: of the event files; created if absent.
        step: from which the run goes on; readers drop what earlier files hold of later steps.
    """

    name = "tensorboard"

    def __init__(self, folder: Path | str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, at: float, values: Values) -> None:
        """Add a scalar for each value, with the line's time."""
        for name, value in values.items():
            self._writer.add_scalar(name, number_of_value(value), step, walltime=at)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the file."""
        self._writer.close()  # type: ignore[no-untyped-call]
