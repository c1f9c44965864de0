"""Does a checksum depend on every bit and its place, and on nothing else?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import xxhash

from megasdc.common.errors import ConfigError
from megasdc.tensors.checksum import ALGORITHMS, algorithm, checksum, default_algorithm, read_back, row_major_bits
from megasdc.tensors.mixed_sum import CHUNK, mixed_sum_formula

MASK = (1 << 64) - 1
TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random_tensor(dtype, *shape, seed=0):
    """Every bit random, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)).view(shape)


def raw_bytes(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def oracle_xxh3(tensor):
    return xxhash.xxh3_64_intdigest(raw_bytes(tensor))


def oracle_mixed_sum(tensor):
    """The stated formula in Python's integers, element by element from the raw bytes."""
    data, size, total = raw_bytes(tensor), tensor.element_size(), 0
    for i in range(len(data) // size):
        z = int.from_bytes(data[i * size : (i + 1) * size], sys.byteorder) + (i + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 32) * 0xDABA0B6EB09322E3 & MASK
        z = (z ^ z >> 32) * 0xDABA0B6EB09322E3 & MASK
        total += z ^ z >> 32
    return total & MASK


ORACLES = {"xxh3_64.v1": oracle_xxh3, "mixed_sum_64.v1": oracle_mixed_sum}


@pytest.fixture(params=sorted(ORACLES))
def name(request):
    return request.param


def test_every_algorithm_has_an_oracle_here():
    """A new algorithm is tested too."""
    assert set(ALGORITHMS) == set(ORACLES) and all(key == one.name for key, one in ALGORITHMS.items())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 31)], ids=str)
def test_values_are_those_of_the_oracle(name, dtype, shape):
    """Every width, also 0-d and empty tensors, gives the value computed from the bytes in another way."""
    tensor = random_tensor(dtype, *shape)
    assert checksum(tensor, name) == ORACLES[name](tensor)


def test_the_mixed_sum_goes_on_over_chunks():
    """Indexes go on from chunk to chunk, and the last chunk may be shorter."""
    tensor = random_tensor(torch.int16, 2 * CHUNK + 5)
    assert checksum(tensor, "mixed_sum_64.v1") == oracle_mixed_sum(tensor)


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [
        ("xxh3_64.v1", torch.float32, 0x85A39A4C9CF57695),
        ("xxh3_64.v1", torch.bfloat16, 0xB8A69BE55EBC6EDC),
        ("mixed_sum_64.v1", torch.float32, 0x25EB9DD5AEC865E5),
        ("mixed_sum_64.v1", torch.bfloat16, 0xE23CDA39A4FEBCF8),
    ],
    ids=str,
)
def test_values_of_a_version_never_change(name, dtype, value):
    """Stored traces stay comparable: a new value needs a new version in the name."""
    assert checksum(torch.arange(-500, 500).to(dtype) / 8, name) == value


def test_strides_do_not_count(name):
    """A transposed, sliced, expanded or channels-last view has the checksum of its row-major copy."""
    base = random_tensor(torch.bfloat16, 4, 6, 5, 3)
    views = [
        base.transpose(0, 1),
        base[1:, ::2],
        base[1, 2],
        base[:, :1].expand(4, 6, 5, 3),
        base.contiguous(memory_format=torch.channels_last),
        base.flatten()[1:],
    ]
    for view in views:
        assert checksum(view, name) == ORACLES[name](view.clone(memory_format=torch.contiguous_format))


def test_a_contiguous_tensor_is_not_copied():
    """What is read is the tensor's own memory, also in the middle of a storage."""
    tensor = torch.randn(10, 4)[3:7]
    assert row_major_bits(tensor).data_ptr() == tensor.data_ptr()


def test_signs_of_zero_and_payloads_of_nan_count(name):
    """Bits that no arithmetic comparison shows are told apart."""
    patterns = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert len({checksum(patterns[i : i + 1], name) for i in range(5)}) == 5


def test_the_number_of_zeros_counts(name):
    """Tensors of zeros of different length differ, so that the bits alone do not hide a lost element."""
    assert len({checksum(torch.zeros(n), name) for n in range(50)}) == 50


def test_each_single_flip_counts(name):
    """Every bit of every element changes the value."""
    tensor = random_tensor(torch.int32, 40)
    values = {checksum(tensor, name)}
    for element in range(40):
        for bit in range(32):
            flipped = tensor.clone()
            flipped[element] ^= -(2**31) if bit == 31 else 1 << bit
            values.add(checksum(flipped, name))
    assert len(values) == 1 + 40 * 32


def test_parameters_and_gradients_are_like_tensors(name):
    """A Parameter, a tensor inside a graph and a negated view have the checksum of their values."""
    plain = torch.randn(8, 3)
    graph = plain.clone().requires_grad_() * 1
    assert checksum(torch.nn.Parameter(plain), name) == checksum(graph, name) == checksum(plain, name)
    imaginary = torch.randn(5, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg() and checksum(imaginary, name) == checksum(imaginary.clone(), name)


def test_complex_tensors_are_refused(name):
    """The message names the type and the way out."""
    with pytest.raises(ValueError, match=r"complex64.*view_as_real"):
        checksum(torch.zeros(2, dtype=torch.complex64), name)


def test_unknown_algorithms_are_refused():
    """The message names those there are."""
    with pytest.raises(ConfigError, match=r"'crc32'.*mixed_sum_64\.v1, xxh3_64\.v1"):
        algorithm("crc32")
    with pytest.raises(ConfigError, match="crc32"):
        checksum(torch.zeros(1), "crc32")


def test_defaults_follow_the_device():
    """The host uses XXH3, a GPU the mixed sum, and a checksum without a name that of its device."""
    assert default_algorithm(torch.device("cpu")).name == "xxh3_64.v1"
    assert default_algorithm(torch.device("cuda", 3)).name == "mixed_sum_64.v1"
    tensor = torch.randn(9)
    assert checksum(tensor) == checksum(tensor, "xxh3_64.v1")


def test_values_are_read_together_and_in_order():
    """Finished and pending values come back in the order they were given, unsigned."""
    tensors = [random_tensor(torch.int16, 50, seed=seed) for seed in range(20)]
    names = [sorted(ALGORITHMS)[seed % 2] for seed in range(20)]
    values = [algorithm(one).start(tensor) for one, tensor in zip(names, tensors, strict=True)]
    found = read_back(values)
    assert found == [ORACLES[one](tensor) for one, tensor in zip(names, tensors, strict=True)]
    assert any(value >> 63 for value in found[::2]) and read_back([]) == []


KERNEL = """
import torch
from megasdc.tensors.mixed_sum import mixed_sum_formula
from megasdc.tensors.mixed_sum_kernel import fused_mixed_sum
for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
    for count in (0, 1, 2, 512, 2048, 2049, 20000):
        ends = torch.iinfo(dtype)
        bits = torch.randint(ends.min, ends.max, (count + 1,), dtype=dtype)[1:].to("DEVICE")
        assert torch.equal(fused_mixed_sum(bits), mixed_sum_formula(bits)), (dtype, count)
print("equal")
"""


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    return done.returncode, done.stdout + done.stderr


def test_the_kernel_follows_the_formula_in_the_interpreter():
    """The Triton kernel, run by Triton's interpreter on the host, gives the formula's value for every width."""
    pytest.importorskip("triton", reason="Triton is not installed; CUDA builds of torch bring it")
    code, output = run_python(KERNEL.replace("DEVICE", "cpu"), TRITON_INTERPRET="1")
    assert (code, output) == (0, "equal\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_kernel_follows_the_formula_on_a_gpu():
    """The compiled kernel gives the formula's value for every width."""
    code, output = run_python(KERNEL.replace("DEVICE", "cuda"))
    assert (code, output) == (0, "equal\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_and_the_host_agree(name):
    """A checksum does not depend on the device that computed it."""
    tensor = random_tensor(torch.bfloat16, 3, 1000, 700)
    assert checksum(tensor.cuda(), name) == checksum(tensor, name)


@pytest.mark.slow
def test_a_gpu_without_triton_is_refused():
    """There is no silent slow way: the message names the package and the other algorithm."""
    code, output = run_python("import sys; sys.modules['triton'] = None\nimport megasdc.tensors.mixed_sum_kernel")
    assert code == 1 and "LaunchError" in output and "xxh3_64.v1" in output


def test_the_formula_needs_little_memory():
    """Chunks bound what the formula allocates beside a tensor of any size."""
    tensor = torch.zeros(1 << 22, dtype=torch.int8)  # 32 MiB as int64
    with torch.profiler.profile(profile_memory=True) as profile:
        mixed_sum_formula(tensor)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak < 4 << 20
