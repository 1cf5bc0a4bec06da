"""The compiled code for Hopper and Ada, without either: the instructions that the arithmetic and the speed rest on."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8ref.kernels import jit_matmul, jit_quantize
from fp8ref.kernels.activations import Activations

FP8 = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
SIZES = ["M", "N", "K", "stride_xm", "stride_wn", "stride_sxm", "stride_sxk", "stride_swn", "stride_swk", "part_tiles"]
ALIGNED = ["x_ptr", "w_ptr", "out_ptr", "part_ptr", "K", "stride_xm", "stride_wn"]


def ptx(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str], sm: int, **options: Any
) -> str:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    indexed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=indexed, attrs=attributes)
    text: str = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["ptx"]
    return text


@lru_cache(maxsize=32)
def product(
    sm: int = 90,
    *,
    m: int = 16,
    kind: str = "row",
    accurate: bool = True,
    split: int = 1,
    even: bool = True,
    wide: bool = False,
    out: str = "*bf16",
) -> str:
    pointers = {
        "x_ptr": FP8["e4m3"],
        "w_ptr": FP8["e4m3"],
        "bias_ptr": "*bf16",
        "out_ptr": out,
        "count_ptr": "*i32",
    }
    types = pointers | {"sx_ptr": "*fp32", "sw_ptr": "*fp32", "part_ptr": "*fp32"} | dict.fromkeys(SIZES, "i32")
    constants = {
        "stride_xk": 1, "stride_wk": 1, "BLOCK_M": m, "BLOCK_N": 64, "BLOCK_K": 128, "SPLIT": split, "GROUP": 1,
        "KIND": kind, "ACCURATE": accurate, "HAS_BIAS": True, "EVEN_K": even, "WIDE": wide, "WGMMA": sm == 90,
        "PDL": sm == 90,
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": sm == 90, "enable_fp_fusion": False}
    return ptx(jit_matmul.scaled_matmul_kernel, types, constants, ALIGNED, sm, **options)


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@pytest.mark.parametrize("kind", ["tensor", "row", "1x128", "128x128"])
def test_hopper_uses_wgmma_and_nothing_else(kind: str) -> None:
    text = product(kind=kind, split=2)
    assert count(r"wgmma\.mma_async\.sync\.aligned\.m64n16k32\.f32\.e4m3\.e4m3", text) > 0
    assert count(r"\bmma\.sync", text) == 0, "mma.sync has another arithmetic on Hopper"


@pytest.mark.parametrize("m", [16, 32, 64, 128])
def test_every_batch_tile_has_the_weight_on_the_64_row_side(m: int) -> None:
    assert count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{m}k32\.f32\.e4m3\.e4m3", product(m=m)) > 0


@pytest.mark.parametrize("even", [True, False])
def test_weights_are_loaded_16_bytes_at_a_time(even: bool) -> None:
    text = product(even=even)
    assert count(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], 0x10", text) > 0
    assert count(r"ld\.global\.b8", text) == 0
    assert count(r"cp\.async\.ca", text) == 0


def test_offsets_of_64_bits_cost_no_width() -> None:
    text = product(wide=True)
    assert count(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], 0x10", text) > 0
    assert count(r"wgmma\.mma_async", text) > 0


def test_nothing_is_fused_that_rounds_on_its_own() -> None:
    assert count(r"fma\.rn\.f32", product(kind="row")) == 0
    assert count(r"fma\.rn\.f32", product(kind="tensor", split=2)) == 0
    # A tensor-wise scale without a split is an FMA with +0, for the sign of a zero.
    text = product(kind="tensor")
    assert count(r"fma\.rn\.f32 \t%\w+, %\w+, %\w+, 0f00000000;", text) == count(r"fma\.rn\.f32", text) > 0
    for kind in ("1x128", "128x128"):
        assert count(r"fma\.rn\.f32", product(kind=kind)) > 0, "block scales join the total by an FMA"


def test_accurate_mode_adds_each_chain_in_fp32() -> None:
    for sm in (89, 90):
        accurate, fast = product(sm), product(sm, accurate=False)
        assert count(r"add(\.rn)?\.f32", accurate) > count(r"add(\.rn)?\.f32", fast), f"sm_{sm}: nothing is promoted"


def test_ada_uses_its_fp8_units() -> None:
    for kind in ("row", "128x128"):
        text = product(89, kind=kind)
        assert count(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", text) > 0
        assert count(r"mma\.sync[\w.]*f16", text) == 0
        assert count(r"wgmma|griddepcontrol", text) == 0


def test_the_product_waits_for_the_quantiser_before_it_reads_codes() -> None:
    text = product()
    wait = text.index("griddepcontrol.wait")
    assert text.index("cp.async") > wait
    assert count(r"griddepcontrol\.launch_dependents", text) == 1


def quantiser(static: bool = False, parts: int = 0, activations: Activations | None = None, sm: int = 90) -> str:
    activations = activations or Activations()
    types = {
        "x_ptr": "*bf16",
        "codes_ptr": FP8["e4m3" if activations.dtype == torch.float8_e4m3fn else "e5m2"],
        "scale_ptr": "*fp32",
        "given_ptr": "*fp32",
        "count_ptr": "*i32",
    }
    types |= dict.fromkeys(["K", "padded_k", "stride_xm", "n_count"], "i32")
    constants = {
        "stride_xk": 1, "BLOCK": 4096, "CHUNK": 1024, "LOOP": False, "STATIC": static, "PARTS": parts, "WIDE": False,
        "PDL": sm == 90, "ADA": sm == 89, **activations.constants,
    }  # fmt: skip
    aligned = ["x_ptr", "codes_ptr", "K", "padded_k", "stride_xm"]
    options = {"num_warps": 8, "launch_pdl": sm == 90, "enable_fp_fusion": False}
    return ptx(jit_quantize.quantize_rows_kernel, types, constants, aligned, sm, **options)


@pytest.mark.parametrize("static", [True, False])
def test_the_quantiser_divides_once_a_row_and_saturates(static: bool) -> None:
    text = quantiser(static)
    assert count(r"div\.rn\.f32", text) == (1 if static else 2)
    assert count(r"cvt\.rn\.satfinite\.e4m3x2\.f32", text) > 0
    # Whatever ran before has ended when the product begins: the order matters.
    assert text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch_dependents")
    assert count(r"ld\.global\.v[24]\.b32", text) > 0


@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_codes_are_rounded_once(name: str, sm: int) -> None:
    """On Ada, Triton's own conversion goes through fp16, toward zero: near ties would come out wrong."""
    dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    for text in (quantiser(activations=Activations(dtype=dtype), sm=sm), product(sm, out=FP8[name])):
        assert count(rf"cvt\.rn\.satfinite\.{name}x2\.f32", text) > 0
        assert count(r"cvt\.\w+\.f16\.f32", text) == 0


def blocks(activations: Activations, sm: int = 90) -> str:
    name = "e4m3" if activations.dtype == torch.float8_e4m3fn else "e5m2"
    types = {"x_ptr": "*fp32", "codes_ptr": FP8[name], "scale_ptr": "*fp32", "count_ptr": "*i32"}
    types |= dict.fromkeys(["K", "padded_k", "stride_xm", "n_count"], "i32")
    constants = {
        "stride_xk": 1, "BLOCKS": 8, "WIDE": False, "PDL": sm == 90, "ADA": sm == 89, **activations.constants,
    }  # fmt: skip
    aligned = ["x_ptr", "codes_ptr", "K", "padded_k", "stride_xm"]
    options = {"num_warps": 4, "launch_pdl": sm == 90, "enable_fp_fusion": False}
    return ptx(jit_quantize.quantize_blocks_kernel, types, constants, aligned, sm, **options)


@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_quantiser_of_blocks_takes_every_option(dtype: torch.dtype, sm: int) -> None:
    name = "e4m3" if dtype == torch.float8_e4m3fn else "e5m2"
    for activations in (Activations("1x128", dtype), Activations("1x128", dtype, "ue8m0", 3.0)):
        text = blocks(activations, sm)
        assert count(rf"cvt\.rn\.satfinite\.{name}x2\.f32", text) > 0
        assert count(r"div\.rn\.f32", text) >= 2


def test_options_that_are_off_cost_no_instruction() -> None:
    plain = quantiser()
    for other in (Activations(scale_format="ue8m0"), Activations(bound=3.0)):
        assert len(quantiser(activations=other).splitlines()) > len(plain.splitlines())


def test_one_scale_is_read_after_the_kernel_that_finds_it() -> None:
    text = quantiser(parts=256)
    assert text.index("griddepcontrol.wait") < text.index("ld.global")
    types = {"x_ptr": "*bf16", "part_ptr": "*fp32"} | dict.fromkeys(["M", "K", "stride_xm"], "i32")
    constants = {"stride_xk": 1, "BLOCK": 2048, "WIDE": False, "PDL": True}
    find = ptx(
        jit_quantize.absmax_kernel, types, constants, ["x_ptr", "K", "stride_xm"], 90, num_warps=4, launch_pdl=True
    )
    assert find.index("griddepcontrol.wait") < find.index("griddepcontrol.launch_dependents")
    assert find.index("griddepcontrol.wait") < find.index("ld.global")
    assert count(r"ld\.global\.v[24]\.b32", find) > 0
