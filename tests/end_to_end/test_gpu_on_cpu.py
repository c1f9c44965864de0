"""Does ``tests/gpu.sh`` run where there is no GPU?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def write_wheel(folder: Path) -> Path:
    """A folder with a wheel of a package that is nowhere installed, and one of a package that is."""
    folder.mkdir()
    for name in ("carried", "xxhash"):
        with zipfile.ZipFile(folder / f"{name}-9.9-py3-none-any.whl", "w") as wheel:
            info = f"{name}-9.9.dist-info"
            wheel.writestr(f"{name}.py", "VERSION = 9.9\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("parts", [("optimizers",), pytest.param(("optimizers", "profile"), marks=pytest.mark.full)])
def test_parts_run_on_a_processor(tmp_path: Path, programs: Path, parts: tuple[str, ...]) -> None:
    """Parts that train and profile pass, what means nothing here is listed with its reason, the picture is there.

    Of the wheels, what is installed here already is left alone. With both parts its processes are fresh, else forks.
    """
    python = sys.executable if "profile" in parts else programs / "python"
    result = tmp_path / "result.json"
    wheels = write_wheel(tmp_path / "wheels")
    script = str(ROOT / "tests" / "gpu.sh")
    call = ["bash", script, "--device", "cpu", "--minutes", "4", "--json", str(result), "--wheels", str(wheels)]
    done = subprocess.run(
        [*call, "--only", *parts, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHON": str(python), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert [(one["name"], one["state"]) for one in found["parts"]] == [(name, "passed") for name in parts]
    assert {"device", "torch", "deepspeed", "megatron-core", "python", "commit", "cuda", "nccl", "triton"} <= set(found)
    assert found["parts"][0]["not_run"][0]["name"] == "DeepSpeed FusedAdam"
    assert "DeepSpeed FusedAdam: it is compiled" in done.stdout and f"{len(parts)} passed" in done.stdout
    assert [one.name for one in (tmp_path / "out" / "site").glob("*.py")] == ["carried.py"]
    if "profile" in parts:
        picture = (tmp_path / "out" / "profile" / "step_fp32.svg").read_text()
        assert picture.startswith("<svg") and "aten::mm" in picture
        assert (
            json.loads((tmp_path / "out" / "profile" / "step_fp32.json").read_text())["by_group_ms"]["matrix product"]
            > 0
        )
