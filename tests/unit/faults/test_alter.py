"""Are exactly the stated bits changed, in every type? NumPy's integer views are the oracle."""

import numpy as np
import pytest
import torch

from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import UnfitError, alter_elements, bit_masks

LAYOUTS = {torch.float32: (8, 23), torch.bfloat16: (8, 7), torch.float16: (5, 10)}
UNSIGNED = {2: np.uint16, 4: np.uint32}


def spec(**fields):
    return FaultSpec.model_validate(fields)


def draws(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def values(dtype, count=4000):
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)


def bits(tensor):
    """The bit patterns by way of the raw bytes."""
    return np.frombuffer(bytes(tensor.contiguous().view(torch.uint8).numpy()), UNSIGNED[tensor.element_size()])


@pytest.mark.parametrize("dtype", list(LAYOUTS), ids=str)
@pytest.mark.parametrize("numbers", [[0], [3, 9], [15]])
def test_numbered_bits(dtype, numbers):
    """bit_flip inverts, stuck_at_0 clears and stuck_at_1 sets exactly the numbered bits of every element."""
    before = values(dtype)
    mask = UNSIGNED[before.element_size()](sum(1 << number for number in numbers))
    expected = {"bit_flip": bits(before) ^ mask, "stuck_at_0": bits(before) & ~mask, "stuck_at_1": bits(before) | mask}
    for kind, pattern in expected.items():
        after = alter_elements(before, spec(kind=kind, bits=numbers), draws())
        assert after.dtype == dtype
        assert np.array_equal(bits(after), pattern)


@pytest.mark.parametrize("dtype", list(LAYOUTS), ids=str)
@pytest.mark.parametrize("part", ["sign", "exponent", "mantissa", "any"])
def test_named_bits(dtype, part):
    """Random bits lie in the named part, num_bits different ones in each element, and all of the part occur."""
    exponent, mantissa = LAYOUTS[dtype]
    width = 1 + exponent + mantissa
    places = {"sign": [width - 1], "exponent": range(mantissa, width - 1), "mantissa": range(mantissa)}
    wanted = set(places.get(part, range(width)))
    for num_bits in (1, 3) if part != "sign" else (1,):
        before = values(dtype)
        changed = bits(before) ^ bits(alter_elements(before, spec(bits=part, num_bits=num_bits), draws()))
        found = [[bit for bit in range(width) if word >> bit & 1] for word in changed.tolist()]
        assert {len(one) for one in found} == {num_bits}
        assert {bit for one in found for bit in one} == wanted


def test_values_scale_and_noise():
    """Value puts it there, scale multiplies, noise has the stated relative standard deviation."""
    before = values(torch.float32, 100_000)
    assert alter_elements(before, spec(kind="value", value="nan"), draws()).isnan().all()
    assert (alter_elements(before, spec(kind="value", value="-inf"), draws()) == -torch.inf).all()
    assert (alter_elements(before.half(), spec(kind="value", value=1e6), draws()) == torch.inf).all()
    assert torch.equal(alter_elements(before, spec(kind="scale", factor=3), draws()), (before.double() * 3).float())
    relative = alter_elements(before, spec(kind="noise", deviation=0.01), draws()).double() / before.double() - 1
    assert abs(relative.std().item() - 0.01) < 4 * 0.01 / (2 * 100_000) ** 0.5
    assert abs(relative.mean().item()) < 4 * 0.01 / 100_000**0.5


def test_bits_that_a_type_lacks():
    """Bit 31 of a 16-bit type and more bits than a part has are refused, not cut to what there is."""
    for dtype, fields in ((torch.bfloat16, {"bits": [31]}), (torch.float16, {"bits": "exponent", "num_bits": 6})):
        with pytest.raises(UnfitError, match="bits"):
            bit_masks(dtype, 1, spec(**fields), draws())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integers(dtype):
    """Tokens and bytes are flipped as the integers they are."""
    before = torch.arange(100).to(dtype)
    after = alter_elements(before, spec(bits=[0, 2]), draws())
    assert torch.equal(after, before ^ 5)
