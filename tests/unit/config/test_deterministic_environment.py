"""Does deterministic mode set the environment that it needs, and nothing against the user's will?"""

import pytest

from megasdc.common.errors import ConfigError
from megasdc.config.environment import VARIABLES, set_deterministic_environment
from megasdc.config.sections import DeterminismSection

ON, OFF = DeterminismSection(enabled=True), DeterminismSection(enabled=False)


def test_off_sets_nothing():
    """Without the mode not one variable is touched, whatever their values."""
    environ = {"NCCL_ALGO": "Tree"}
    set_deterministic_environment(OFF, environ)
    assert environ == {"NCCL_ALGO": "Tree"}


def test_on_sets_what_is_missing_and_keeps_what_fits():
    """Unset and empty variables get their value; an accepted value stays, in any letter case."""
    environ = {"NCCL_ALGO": "ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_PROTO": "", "HOME": "/"}
    set_deterministic_environment(ON, environ)
    assert environ == {
        "NCCL_ALGO": "ring",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "NCCL_PROTO": "Simple",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "HOME": "/",
    }


def test_every_conflict_is_refused_at_once():
    """Values with which runs differ are named together with what is allowed, and nothing is changed."""
    before = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    environ = dict(before)
    with pytest.raises(ConfigError) as caught:
        set_deterministic_environment(ON, environ)
    texts = caught.value.problems
    assert [text.split()[2] for text in texts] == [f"{name}:" for name in before]
    assert "got 'Tree'" in texts[0] and "allowed: Ring" in texts[0] and "unset it" in texts[0]
    assert environ == before


def test_what_is_set_is_accepted():
    """What the mode sets is one of the values that it accepts, or a second process of a run would be refused."""
    assert all(variable.is_fixed({variable.name: variable.value}) for variable in VARIABLES)
