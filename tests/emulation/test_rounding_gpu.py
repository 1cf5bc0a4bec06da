"""``round_to_fp8`` on a GPU: the same codes as on a CPU, and a generator of the GPU's own."""

import math

import pytest
import torch
from torch import Tensor

from fp8ref.emulation.rounding import RANDOM_BITS, Rounding, round_to_fp8
from reference.fp8_tables import TABLES
from reference.rounding_inputs import SOURCES, all_16_bit_inputs, boundary_inputs, boundary_places

pytestmark = pytest.mark.gpu

each_name = pytest.mark.parametrize("name", TABLES)
each_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def codes_of(x: Tensor) -> Tensor:
    """The codes of an FP8 tensor, on the CPU."""
    return x.cpu().view(torch.uint8)


@each_name
@each_source
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
@pytest.mark.parametrize("saturate", [True, False])
def test_the_codes_are_those_of_the_cpu(name: str, source: torch.dtype, rounding: Rounding, saturate: bool) -> None:
    inputs = [boundary_inputs(TABLES[name], source)]
    if source.itemsize == 2:
        inputs.append(all_16_bit_inputs(source))
    for x in inputs:
        for layout in (x, x[::2], x[: x.numel() // 6 * 6].reshape(-1, 6).t()):
            on_cpu = round_to_fp8(layout, TABLES[name].dtype, rounding=rounding, saturate=saturate)
            # Cut on the GPU: a cut tensor would arrive there without its gaps.
            moved = x.cuda().as_strided(layout.shape, layout.stride())
            result = round_to_fp8(moved, TABLES[name].dtype, rounding=rounding, saturate=saturate)
            assert result.device.type == "cuda"
            assert torch.equal(codes_of(result), codes_of(on_cpu))


@each_name
@each_source
def test_a_generator_of_the_gpu_decides_by_the_same_rule(name: str, source: torch.dtype) -> None:
    table = TABLES[name]
    x = boundary_inputs(table, source).cuda()
    generator = torch.Generator(device="cuda").manual_seed(11)
    start = generator.get_state()
    result = round_to_fp8(x, table.dtype, rounding="stochastic", generator=generator)
    generator.set_state(start)
    randoms = torch.empty(x.numel(), dtype=torch.int64, device="cuda").random_(0, 1 << RANDOM_BITS, generator=generator)
    threshold = torch.tensor([math.floor(at.position * (1 << RANDOM_BITS)) for at in boundary_places(name, source)])
    lower = torch.tensor([at.lower for at in boundary_places(name, source)])
    sign = torch.tensor([at.negative for at in boundary_places(name, source)])
    expected = (lower + (randoms.cpu() < threshold)).clamp(max=table.max_code) + 128 * sign
    expected[x.isnan().cpu()] = 0x7F
    assert torch.equal(codes_of(result).long(), expected)


def test_a_generator_of_the_cpu_is_refused() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match="generator: is on cpu but x is on cuda:0"):
        round_to_fp8(x, torch.float8_e4m3fn, rounding="stochastic", generator=torch.Generator())
