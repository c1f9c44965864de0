"""Configuration of a run, one JSON file: typed sections, loading, overrides, checks; imports no torch."""

from megasdc.config.checks import Layout, check_layout, find_warnings, resolve_batch
from megasdc.config.deepspeed_part import precision_of
from megasdc.config.fault_profiles import expand_faults, load_profile, profile_names
from megasdc.config.fewer import settings_for, with_replicas
from megasdc.config.load import RunConfig, load_config, parse_config
from megasdc.config.presets import PRESETS
from megasdc.config.replica import replica_config, replica_folder
from megasdc.config.sections.data import DataSection, SourceSection, TokenizerSection
from megasdc.config.sections.delay import DelaySpec
from megasdc.config.sections.detection import AlwaysOnSection, AuditSection, PolicySection, SdcSection
from megasdc.config.sections.drop_compute import DropComputeSection
from megasdc.config.sections.faults import FaultSpec, ProcessFaultSpec
from megasdc.config.sections.health import HealthSection
from megasdc.config.sections.megasdc import (
    CheckpointSection,
    DeterminismSection,
    GoldenSection,
    LoggingSection,
    MegasdcSection,
    MemorySection,
    ParallelSection,
    TraceSection,
    TrainingSection,
)
from megasdc.config.sections.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.config.sections.optimizer_hooks import HookSpec
from megasdc.config.sections.study import StudySection

__all__ = [
    "PRESETS",
    "AlwaysOnSection",
    "AuditSection",
    "CheckpointSection",
    "DataSection",
    "DelaySpec",
    "DeterminismSection",
    "DropComputeSection",
    "FaultSpec",
    "GoldenSection",
    "HealthSection",
    "HookSpec",
    "Layout",
    "LoggingSection",
    "MegasdcSection",
    "MemorySection",
    "ModelSection",
    "ParallelSection",
    "PolicySection",
    "ProcessFaultSpec",
    "RunConfig",
    "SdcSection",
    "SourceSection",
    "StudySection",
    "TokenizerSection",
    "TraceSection",
    "TrainingSection",
    "check_layout",
    "expand_faults",
    "ffn_width",
    "find_warnings",
    "head_width",
    "load_config",
    "load_profile",
    "parse_config",
    "precision_of",
    "profile_names",
    "query_groups",
    "replica_config",
    "replica_folder",
    "resolve_batch",
    "settings_for",
    "with_replicas",
]
