"""Section `study`: comparison of whole runs while they train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megasdc.config.fields import FLAG, NonNegativeInt, PositiveInt, Section, asks, setting

COMPUTATION_SYNC, PARAMETER_SYNC, FREE_RUN = "computation_sync", "parameter_sync", "free_run"
PAPER_FORWARD = ("*.word_embeddings", "*.self_attention.linear_proj", "*.mlp.linear_fc2", "*.output")
PAPER_BACKWARD = ("*.self_attention.linear_qkv", "*.mlp.linear_fc1", "*.output")
"""Submodules whose results are those of attention and FFN before the sum over tensor ranks; embedding and head."""


class StudySection(Section):
    """Several whole runs in one launch, one of them trusted (Ma et al. 2025, arXiv 2502.12340)."""

    at_resume = "applied"
    needs = asks("study.mode")

    mode: Literal["computation_sync", "parameter_sync", "free_run"] | None = setting(
        None,
        "computation_sync: every result is compared with the trusted replica's and overwritten by it; parameter_sync: "
        "gradients are compared, and after each step parameters and optimizer state are overwritten; free_run: "
        "nothing is overwritten, parameters are compared; null: no study.",
        FLAG,
    )
    replicas: Annotated[int, Field(ge=2)] | None = setting(
        None,
        "Replicas of the study, each a whole run of (ranks of the launch / replicas) ranks with a folder `replica_K` "
        "in `logging.run_dir`; needed with a mode.",
        FLAG,
    )
    trusted: NonNegativeInt = setting(0, "The replica that counts as healthy.", FLAG)
    submodules: Annotated[list[str], Field(min_length=1)] | None = setting(
        None,
        "computation_sync: patterns of full names whose forward and backward results are compared; null: attention "
        "and FFN before the sum over tensor ranks, embedding and head. Weight gradients, optimizer and parameters are "
        "always compared.",
        needs=asks('study.mode="computation_sync"'),
    )
    interval: PositiveInt = setting(
        10,
        "computation_sync: steps between lines that count what was compared; free_run: steps between comparisons of "
        "parameters.",
        needs=asks('study.mode="computation_sync" or study.mode="free_run"'),
    )
    sampled_elements: NonNegativeInt = setting(
        8,
        "computation_sync: wrong elements of a result that are written one by one, evenly chosen.",
        needs=asks('study.mode="computation_sync"'),
    )
