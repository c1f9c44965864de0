"""Do the Triton kernels give what their formulas give on the host, and how fast are they?

On a machine without CUDA they run in Triton's interpreter, and no rate is taken.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch

from gpu.crew import Crew
from gpu.record import TAIL_LINES, Recorder

SEED = 11
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIB = 1 << 20
CHECKSUM_BAR, BOUND_BAR = 0.8, 1.25
COUNTS = {"cuda": (0, 1, 31, 512, 2049, 20_000, 1_000_003, 50_000_001), "cpu": (0, 1, 31, 2049, 9_000)}
BOUND_COUNTS = {"cuda": (0, 1, 31, 4097, 1_000_003), "cpu": (0, 1, 4097)}


def kernels(recorder: Recorder, crew: Crew) -> None:
    """Checksums and gradient bounds."""
    import triton

    recorder.note("triton", triton.__version__)
    device = torch.device(recorder.device)
    if not recorder.on_gpu and (reason := why_not_interpreted(triton.__version__, numpy.__version__)):
        recorder.not_run("kernels in the interpreter", reason)
    else:
        with recorder.attempt("mixed sum"):
            _mixed_sums(recorder, device)
        with recorder.attempt("gradient bounds"):
            _bounds(recorder, device)
    with recorder.attempt("compiled for other GPUs"):
        _compile(recorder)
    if not recorder.on_gpu:
        recorder.not_run("rates", "they are those of a GPU; there is no CUDA device")
        return
    with recorder.attempt("a tensor of more than 2^31 elements"):
        _large(recorder, device)
    with recorder.attempt("rates of checksums"):
        _checksum_rates(recorder, device)
    with recorder.attempt("rates of gradient bounds"):
        _bound_rates(recorder, device)


def why_not_interpreted(triton: str, num_py: str) -> str | None:
    """Why Triton's interpreter does not run here: up to 3.6 it does not know NumPy 2.4; None: it does."""
    if tuple(map(int, triton.split(".")[:2])) > (3, 6) or numpy.lib.NumpyVersion(num_py) < "2.4.0":
        return None
    return f"Triton's interpreter ({triton}) does not work with NumPy {num_py}, but with 2.3"


def _compile(recorder: Recorder) -> None:
    """Triton's compiler and assembler take every variant for GPUs that need not be here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-m", "gpu.compile_kernels", "80", "90", "100"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [*ended.stdout.splitlines()[-1:], *ended.stderr.splitlines()[-TAIL_LINES:]]
    recorder.check("every variant compiles for sm_80, sm_90, sm_100", ended.returncode == 0, "\n".join(lines))


def _mixed_sums(recorder: Recorder, device: torch.device) -> None:
    from megasdc.tensors.mixed_sum import mixed_sum_formula
    from megasdc.tensors.mixed_sum_kernel import fused_mixed_sum

    generator, wrong, compared = torch.Generator().manual_seed(SEED), [], 0
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        ends = torch.iinfo(dtype)
        for count in COUNTS[device.type]:
            bits = torch.randint(ends.min, ends.max, (count + 1,), dtype=dtype, generator=generator)[1:]
            expected = int(mixed_sum_formula(bits))
            got = [int(fused_mixed_sum(bits.to(device))) for _ in range(2)]
            there = torch.cat([bits[:1], bits]).to(device)[1:]  # not aligned
            got += [int(fused_mixed_sum(there))]
            compared += len(got)
            wrong += [(str(dtype), count, value, expected) for value in got if value != expected]
    recorder.check(
        "mixed sum: the formula's bits in every width", not wrong, f"{len(wrong)} of {compared}: {wrong[:4]}"
    )
    if recorder.on_gpu:
        _checksums(recorder, device)


def _checksums(recorder: Recorder, device: torch.device) -> None:
    """Of whole tensors of every type, with strides, by both algorithms."""
    from megasdc.tensors.checksum import ALGORITHMS, checksum

    wrong = []
    for dtype in (*FLOATS, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool):
        tensor = torch.randn(65, 129).to(dtype)
        for name in ALGORITHMS:
            for shown, view in (("whole", tensor), ("turned", tensor.t()), ("every other", tensor[::2, 1::2])):
                there = tensor.to(device)
                moved = {"whole": there, "turned": there.t(), "every other": there[::2, 1::2]}[shown]
                if checksum(moved, name) != checksum(view, name):
                    wrong.append((str(dtype), name, shown))
    recorder.check("checksums on the device are those on the host", not wrong, f"{wrong[:6]}")


def _bounds(recorder: Recorder, device: torch.device) -> None:
    from megasdc.tensors.bound import bound_formula_
    from megasdc.tensors.bound_kernel import bound_on_gpu_
    from megasdc.tensors.bound_limits import NON_FINITE, SUMS, ElementLimits

    cases = [
        ElementLimits(0.03),
        ElementLimits(0.03, 4.0),
        ElementLimits(spike=2.0),
        *(ElementLimits(0.03, 4.0, non_finite=n) for n in NON_FINITE),
    ]
    wrong: list[Any] = []
    compared = 0
    for dtype in FLOATS:
        for count in BOUND_COUNTS[device.type]:
            for place, limits in enumerate(cases):
                given_moments = (True, False) if limits.spike == math.inf else (True,)
                for with_moment, calm in itertools.product(given_moments, (False, True)):
                    gradient, moment = _calm(count, dtype, place) if calm else _gradient(count, dtype, place)
                    given = moment if with_moment else None
                    expected, sums = gradient.clone(), torch.zeros(2, len(SUMS), dtype=torch.float64)
                    bound_formula_(expected, given, limits, sums[0])
                    after, found = gradient.to(device), torch.zeros(len(SUMS), dtype=torch.float64, device=device)
                    bound_on_gpu_(after, None if given is None else given.to(device), limits, found)
                    compared += 1
                    if problem := _difference(after.cpu(), expected, found.tolist(), sums[0].tolist(), SUMS):
                        wrong.append((str(dtype), count, limits, with_moment, calm, problem))
    recorder.check(
        "gradient bounds: the formula's bits and sums", not wrong, f"{len(wrong)} of {compared}: {wrong[:3]}"
    )


def _difference(after: Any, expected: Any, got: list[float], wanted: list[float], names: Any) -> str | None:
    """What differs from the formula on the host: bits of a gradient, counts, or sums by more than 1e-6."""
    width = {4: torch.int32, 2: torch.int16}[after.element_size()]
    bits = after.view(width), expected.view(width)
    if not torch.equal(*bits):
        return f"{int((bits[0] != bits[1]).sum())} gradients"
    for name, a, b in zip(names, got, wanted, strict=True):
        least = 1e-30 if name == "largest_ratio" else 0.0
        if not math.isclose(a, b, rel_tol=1e-6, abs_tol=least):
            return f"{name} {a}, expected {b}"
    return None


def _gradient(count: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heavy-tailed gradients with NaN, infinities and zeros among them, and second moments with zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(count + 1, generator=generator).mul(4).exp() * 1e-3
    gradient = (torch.randn(count + 1, generator=generator) * sizes).to(dtype)
    for place, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
        if count:
            gradient[1 + place :: 97] = value
    moment = torch.randn(count + 1, generator=generator).square() * 1e-6
    moment[::13] = 0.0
    return gradient[1:], moment[1:]


def _calm(count: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients as they are in most steps, far below the limits but for a few near them; no two blocks alike."""
    generator = torch.Generator().manual_seed(seed)
    gradient = (torch.randn(count + 1, generator=generator) * 1e-3).to(dtype)
    gradient[5::7001] = 0.03
    return gradient[1:], torch.rand(count + 1, generator=generator)[1:] * 1e-5 + 1e-6


def _large(recorder: Recorder, device: torch.device) -> None:
    """Indices of elements beyond 32 bits."""
    from megasdc.tensors.checksum import algorithm, read_back

    free, _ = torch.cuda.mem_get_info(device)
    if free < 12 << 30:
        recorder.not_run("a tensor of more than 2^31 elements", f"{free >> 20} MiB are free, 12 GiB are needed")
        return
    tensor = torch.zeros((1 << 31) + 4099, dtype=torch.int8, device=device)
    start = algorithm("mixed_sum_64.v1").start
    before = read_back([start(tensor)])[0]
    tensor[-1] = 1
    after = read_back([start(tensor)])[0]
    tensor[-1], tensor[-2] = 0, 1
    moved = read_back([start(tensor)])[0]
    from megasdc.tensors.mixed_sum import mixed_sum_formula

    expected = int(mixed_sum_formula(tensor)) & ((1 << 64) - 1)
    recorder.check(
        "more than 2^31 elements: the formula's bits", moved == expected, f"{moved:x}, expected {expected:x}"
    )
    recorder.check("more than 2^31 elements: the last ones count", len({before, after, moved}) == 3)


def seconds(run: Callable[[], Any], repeats: int = 20, blocks: int = 7) -> float:
    """Median seconds of a call on the device, by CUDA events around blocks of calls.

    The device sleeps first, so that the calls of a block have been launched when it begins with them.
    """
    for _ in range(3):
        run()
    taken = []
    for _ in range(blocks):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(30_000_000)  # cycles: about 17 ms
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1000.0 / repeats)
    return sorted(taken)[blocks // 2]


def _launch_us(run: Callable[[], Any]) -> float:
    """Microseconds of the host for a call."""
    began = time.perf_counter()
    for _ in range(500):
        run()
    taken = (time.perf_counter() - began) / 500 * 1e6
    torch.cuda.synchronize()
    return round(taken, 1)


def _checksum_rates(recorder: Recorder, device: torch.device) -> None:
    from megasdc.tensors.checksum import default_algorithm

    start = default_algorithm(device).start
    for dtype in FLOATS:
        for size in (1, 16, 256, 1024):
            tensor = torch.randn(size * MIB // dtype.itemsize, device=device).to(dtype)
            target = torch.empty_like(tensor)
            ours = seconds(lambda t=tensor: start(t))  # type: ignore[misc]
            sums, copies = seconds(tensor.sum), seconds(lambda t=tensor, to=target: to.copy_(t))  # type: ignore[misc]
            rates = {"checksum": ours, "sum": sums, "copy (bytes read)": copies}
            label = f"{str(dtype).removeprefix('torch.')} {size} MiB"
            recorder.note(f"GB/s, {label}", {name: round(tensor.nbytes / s / 1e9, 1) for name, s in rates.items()})
            if size >= 256:
                against, name = (sums, "a sum") if dtype == torch.float32 else (copies, "a device copy")
                ratio = against / ours
                recorder.check(
                    f"checksum {label}: at least {CHECKSUM_BAR} of {name}", ratio >= CHECKSUM_BAR, f"{ratio:.2f}"
                )
    small = torch.randn(1024, device=device)
    recorder.note("us to launch a checksum (host)", _launch_us(lambda: start(small)))


def _bound_rates(recorder: Recorder, device: torch.device) -> None:
    from megasdc.tensors.bound_kernel import bound_on_gpu_
    from megasdc.tensors.bound_limits import SUMS, ElementLimits

    for million in (16, 128):
        gradient = torch.randn(million << 20, device=device)
        moment = torch.rand(million << 20, device=device)
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        ours = seconds(lambda g=gradient, v=moment, s=sums: bound_on_gpu_(g, v, ElementLimits(1e6, 1e6), s))  # type: ignore[misc]
        reads = seconds(lambda g=gradient, v=moment: (g.sum(), v.sum()))  # type: ignore[misc]
        label = f"{million} M elements"
        recorder.note(
            f"bound + norm, {label}", {"ms": round(ours * 1e3, 3), "reads of g and V, ms": round(reads * 1e3, 3)}
        )
        recorder.check(
            f"bound {label}: at most {BOUND_BAR} of reading g and V", ours <= BOUND_BAR * reads, f"{ours / reads:.2f}"
        )
    small = torch.randn(1024, device=device), torch.rand(1024, device=device)
    recorder.note(
        "us to launch a bound (host)", _launch_us(lambda: bound_on_gpu_(*small, ElementLimits(1e6, 1e6), sums))
    )
