"""Is an environment refused in which a GPU does not repeat, and only there?"""

from __future__ import annotations

import pytest

from megasdc.attached.engine import check_environment
from megasdc.common.errors import ConfigError


def test_a_gpu_needs_a_fixed_workspace() -> None:
    """For audits cuBLAS's alone; for all of training what collectives need, too."""
    check_environment("cpu", True, {})
    check_environment("cuda", False, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    with pytest.raises(ConfigError) as caught:
        check_environment("cuda", False, {})
    assert "CUBLAS_WORKSPACE_CONFIG: got None; allowed: :4096:8, :16:8" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_environment("cuda", True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"})
    assert "NCCL_ALGO: got 'Tree'" in str(caught.value) and "CUBLAS" not in str(caught.value)
