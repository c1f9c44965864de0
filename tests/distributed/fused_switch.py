"""Fused modules in every model that a test builds and that says nothing of ``model.fuse``: MEGASDC_TESTS_FUSE=1.

For tests that were written without fused modules, so that their promises are tested with them too.
"""

from __future__ import annotations

import os

VARIABLE = "MEGASDC_TESTS_FUSE"


def fused() -> bool:
    """Whether the variable asks for fused modules; for tests that start other processes, which get it as a setting."""
    return os.environ.get(VARIABLE) == "1"


def apply_fused_switch() -> None:
    """Change the default of ``model.fuse`` in this process, where the variable asks for it."""
    if not fused():
        return
    from megasdc.config.model import ModelSection
    from megasdc.config.sections import MegasdcSection

    ModelSection.model_fields["fuse"].default = True
    for section in (ModelSection, MegasdcSection):
        section.model_rebuild(force=True)
