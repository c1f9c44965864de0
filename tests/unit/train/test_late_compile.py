"""Functions that libraries decorate with ``torch.compile`` cost no start a compiler, and are compiled when called."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megasdc.train.main import compiled_when_called


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What was given to ``torch.compile``, with its options; nothing is compiled."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def compile_now(function: Any, **options: Any) -> Any:
        calls.append((getattr(function, "__name__", "module"), options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    return calls


def test_compiled_once_at_the_first_call_with_its_options(compiled: list[tuple[str, dict[str, Any]]]) -> None:
    """Each form of the decorator, of functions and of methods; a module, and what comes later, is compiled at once."""
    as_before = torch.compile
    with compiled_when_called():

        @torch.compile
        def plain(x: int) -> int:
            """Keeps its name and text."""
            return x + 1

        class Owner:
            @torch.compile(dynamic=True, fullgraph=True)
            def method(self, x: int, *, by: int) -> tuple[Any, int]:
                return self, x * by

        direct = torch.compile(lambda: 5, mode="max-autotune")
        assert compiled == []
        torch.compile(torch.nn.Identity())
        assert compiled == [("module", {})]
    assert torch.compile is as_before
    owner = Owner()
    assert [plain(1), plain(2), direct(), owner.method(3, by=2), owner.method(4, by=1)] == [
        *(2, 3, 5),
        *((owner, 6), (owner, 4)),
    ]
    options = {"dynamic": True, "fullgraph": True}
    assert compiled[1:] == [("plain", {}), ("<lambda>", {"mode": "max-autotune"}), ("method", options)]
    assert plain.__doc__ == "Keeps its name and text."


def test_given_back_after_an_error() -> None:
    """An import that fails leaves ``torch.compile`` as it was."""
    as_before = torch.compile
    with pytest.raises(ImportError, match="no such library"), compiled_when_called():
        raise ImportError("no such library")
    assert torch.compile is as_before


@pytest.mark.slow
def test_a_rank_imports_no_inductor_and_no_tracker() -> None:
    """All that training imports, and what DeepSpeed imports while it builds an optimizer, leaves what is unused out."""
    code = (
        "import sys\nfrom megasdc.train.main import IMPORTED_LATER, compiled_when_called\n"
        "from megasdc.common.imports import UNUSED, frozen_imports\n"
        "with frozen_imports(), compiled_when_called():\n    import megasdc.train.build, megasdc.train.main\n"
        "import torch, deepspeed.runtime.zero.utils\nassert {*IMPORTED_LATER} <= {*sys.modules}\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "assert swiglu.__wrapped__.__name__ == 'swiglu'\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "assert not {*UNUSED} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
