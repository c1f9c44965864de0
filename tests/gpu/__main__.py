"""Runs every part of ``tests/gpu.sh`` under its time limit and prints what was found.

See ``bash tests/gpu.sh --help``. No part of this file imports torch, so that it ends well whatever a part does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.parts import BASE, PARTS, Part
from gpu.runner import PartRun
from gpu.table import render

TEXT = """\
Shows what of megasdc runs on this machine's GPU, in order of importance, each part in processes of its own under its
time limit, and prints a table. Without CUDA the parts run on the processor where that means something.

It needs PyTorch, and as wheels what of these is not installed: deepspeed, megatron-core, pydantic, pydantic_core,
annotated-types, typing-inspection, typing_extensions, xxhash, zstandard, fsspec, numpy, einops, hjson, msgpack, tqdm,
py-cpuinfo, packaging, psutil, jinja2, MarkupSafe, rich, Pygments, markdown-it-py, mdurl; for the parts golden, stress,
referee and cost typer, click, shellingham and annotated-doc, for the first two pyarrow; to compile DeepSpeed's
operators ninja.
`bash tests/gpu.sh --make-wheels DIR` downloads them where there is a network. Neither a network, a compiler nor ssh is
needed then; without a C compiler Triton's kernels fail, and without nvcc DeepSpeed's FusedAdam is left out, and both
say so.
"""
SETUP_S = 100.0
RESERVE_S = 6.0
PRESTART_CORES = 8


def main() -> int:
    """Parse, prepare, run, tell; 0: nothing failed, 1: something did, 2: nothing can run here, 130: a signal came."""
    arguments = _parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:13}{part.title}" + (f" (needs {', '.join(part.needs)})" if part.needs else ""))
        return 0
    began = time.monotonic()
    end = began + 60.0 * arguments.minutes
    folder = Path(arguments.out or tempfile.mkdtemp(prefix="megasdc_gpu_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.wheels:
        _install(arguments.wheels.resolve(), folder / "site")
    facts = _facts(arguments.device)
    print(_head(facts), flush=True)
    report: dict[str, Any] = {**facts, "minutes": arguments.minutes, "folder": str(folder), "parts": []}

    def keep() -> None:
        report["seconds"] = round(time.monotonic() - began, 1)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    keep()  # a file that cannot be written is no surprise of the end
    if missing := [name for name in BASE if not facts["packages"].get(name)]:
        report["missing"] = missing
        keep()
        print(
            f"cannot start: not installed here: {', '.join(missing)}; carry them as wheels: "
            "`bash tests/gpu.sh --make-wheels DIR` where there is a network, then --wheels DIR",
            file=sys.stderr,
        )
        return 2
    device = facts["device"]
    if problem := _prepare(folder, device, min(SETUP_S, end - time.monotonic() - RESERVE_S)):
        report["setup"] = problem
        print(f"made-up data could not be written, without which no part trains:\n{problem}", file=sys.stderr)
    chosen = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    try:
        _run_parts(chosen, folder, facts, end, report, keep)
    except KeyboardInterrupt:
        report["stopped"] = "ended by a signal; parts that had not ended are not in the table"
    keep()
    print(render(report, arguments.verbose), flush=True)
    if "stopped" in report:
        print(report["stopped"], file=sys.stderr)
        return 130
    return 1 if problem or any(one["state"] in ("failed", "killed") for one in report["parts"]) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash tests/gpu.sh", description=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="it ends within so many, whatever happens (15)")
    parser.add_argument("--wheels", metavar="DIR", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was found")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--out", metavar="DIR", help="folder for run folders, logs and pictures; default: a new one")
    parser.add_argument("--verbose", action="store_true", help="every check, also those that hold")
    return parser.parse_args()


def _install(wheels: Path, site: Path) -> None:
    """Put what is not installed here into a folder of its own; what is here stays as it is."""
    from importlib import metadata

    here = {_plain(one.metadata["Name"]) for one in metadata.distributions()}
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {wheels}: holds no wheel")
    lacking = [str(one) for one in files if _plain(one.name.split("-")[0]) not in here]
    shutil.rmtree(site, ignore_errors=True)
    if lacking:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        if subprocess.run([*pip, "--target", str(site), *lacking], check=False).returncode != 0:
            raise SystemExit(f"--wheels {wheels}: pip could not install them, see above; is each for this Python?")
        os.environ["PATH"] = os.pathsep.join([str(site / "bin"), os.environ["PATH"]])  # ninja
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(site)])
    sys.path.append(str(site))
    importlib.invalidate_caches()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


FACTS = """
import importlib.util, json, os, sys
from importlib import metadata
found = {"torch": None, "cuda": None, "nccl": None, "gpus": []}
try:
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
    if found["available"]:
        found["gpus"] = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["memory_GiB"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = torch.backends.cudnn.version()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
for name in ("triton", "deepspeed", "megatron-core", "numpy", "pyarrow", "transformer-engine"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print("FACTS" + json.dumps(found))
"""


def _facts(wanted: str | None) -> dict[str, Any]:
    """Versions and devices, asked in a process of its own, which may crash or hang."""
    found: dict[str, Any] = {}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", FACTS], capture_output=True, text=True, check=False, timeout=SETUP_S
        )
        line = next((one for one in ended.stdout.splitlines() if one.startswith("FACTS")), None)
        found = json.loads(line[5:]) if line else {"error": f"exit code {ended.returncode}: {ended.stderr[-1500:]}"}
    except subprocess.TimeoutExpired:
        found = {"error": f"`import torch` and asking for the device took more than {SETUP_S:.0f} s"}
    packages = {name: _is_there(name) for name in {*BASE, *(need for part in PARTS for need in part.needs)}}
    device = wanted or ("cuda" if found.get("available") else "cpu")
    if device == "cuda" and not found.get("available"):
        raise SystemExit(f"--device cuda: torch sees no CUDA device ({found.get('error', 'none is there')})")
    return {
        "device": device,
        "driver": _driver() if device == "cuda" else None,
        "python": sys.version.split()[0],
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        **found,
        "packages": packages,
    }


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        call = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(call, capture_output=True, text=True, check=False, timeout=20).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _head(facts: dict[str, Any]) -> str:
    gpus = f"{len(facts['gpus'])} x {facts['gpus'][0]} (driver: {facts['driver']})" if facts.get("gpus") else "no GPU"
    names = ("torch", "cuda", "nccl", "triton", "deepspeed", "megatron-core", "python", "commit", "cores")
    said = ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))
    return f"device {facts['device']}: {gpus}; {said}" + (f"\n{facts['error']}" if facts.get("error") else "")


def _prepare(folder: Path, device: str, limit_s: float) -> str | None:
    """Write the data that all parts share; what went wrong."""
    if (folder / "data" / "manifest.json").exists():
        return None
    from gpu.crew import rank_base

    code = "import sys; from pathlib import Path; from gpu.setting import write_data; write_data(Path(sys.argv[1]))"
    arguments = [sys.executable, "-W", "ignore", "-c", code, str(folder / "data")]
    try:
        ended = subprocess.run(
            arguments, env=rank_base(device), capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        return f"it took more than {limit_s:.0f} s: {(error.stderr or b'')[-1500:]!r}"
    return None if ended.returncode == 0 else ended.stderr[-3000:]


def _run_parts(
    chosen: list[Part],
    folder: Path,
    facts: dict[str, Any],
    end: float,
    report: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Run the parts one after the other; where there are cores, the next one imports meanwhile.

    Args:
        chosen: the parts.
        folder: for their files.
        facts: of this machine.
        end: monotonic time at which all must have ended.
        report: what they found is added to it.
        keep: called after each part.
    """
    device, cores = facts["device"], facts["cores"]
    waiting = [(part, _why_not(part, facts)) for part in chosen]
    ready: PartRun | None = None
    for place, (part, reason) in enumerate(waiting):
        if reason is not None:
            report["parts"].append(_left_out(part, reason))
            print(f"{part.name}: not run: {reason}", flush=True)
            continue
        left = end - time.monotonic() - RESERVE_S
        if left < 5.0:
            if ready is not None:
                ready.end()
                ready = None
            report["parts"].append(_left_out(part, "the time was up"))
            print(f"{part.name}: not run: the time was up", flush=True)
            continue
        shares = [one.share for one, why in waiting[place:] if why is None]
        # Most parts need less than their share, so each may use three times that of what is left.
        limit_s = min(left, max(30.0, left * min(1.0, 3.0 * part.share / sum(shares))))
        running = ready or PartRun(part, folder, device, cores)
        ready = None
        running.go()
        following = next((one for one, why in waiting[place + 1 :] if why is None), None)
        if following is not None and cores >= PRESTART_CORES:
            ready = PartRun(following, folder, device, cores)
        try:
            found = running.finish(limit_s)
        except KeyboardInterrupt:
            for one in filter(None, (running, ready)):
                one.end()
            raise
        report["parts"].append(found)
        keep()
        failed = [one["name"] for one in found["checks"] if not one["ok"]]
        told = f"; {len(failed)} failed: {', '.join(failed[:4])}" if failed else ""
        passed = len(found["checks"]) - len(failed)
        print(f"{part.name}: {found['state']} after {found['seconds']} s, {passed} checks hold{told}", flush=True)


def _why_not(part: Part, facts: dict[str, Any]) -> str | None:
    missing = [name for name in part.needs if not facts["packages"].get(name)]
    return f"not installed: {', '.join(missing)}" if missing else None


def _left_out(part: Part, reason: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"seconds": 0.0, "checks": [], "notes": {}, "not_run": [], "output": ""}
    return {"name": part.name, "title": part.title, "state": "not run", "reason": reason, **empty}


if __name__ == "__main__":
    sys.exit(main())
