"""Phases of the instructions of DeepSpeed's pipeline engine, and of megasdc's own."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed.runtime.pipe import schedule

from megasdc.engine.schedules import ReplayBackward, ReplayForward
from megasdc.ops.health.phases import Phase

PHASES: Mapping[type, Phase] = {
    schedule.LoadMicroBatch: Phase.DATA,
    schedule.ForwardPass: Phase.FORWARD,
    schedule.BackwardPass: Phase.BACKWARD,
    ReplayForward: Phase.FORWARD,
    ReplayBackward: Phase.BACKWARD,
    schedule.SendActivation: Phase.SEND_ACTIVATION,
    schedule.RecvActivation: Phase.RECEIVE_ACTIVATION,
    schedule.SendGrad: Phase.SEND_GRADIENT,
    schedule.RecvGrad: Phase.RECEIVE_GRADIENT,
    schedule.ReduceTiedGrads: Phase.REDUCTION,
    schedule.ReduceGrads: Phase.REDUCTION,
    schedule.OptimizerStep: Phase.OPTIMIZER,
}
"""Phase of each instruction of the pipeline engine."""
