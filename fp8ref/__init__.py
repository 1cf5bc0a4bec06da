"""fp8ref: FP8 matrix products, bit for bit what an NVIDIA Hopper GPU returns.

The oracle: :func:`quantize`, :func:`emulate_matmul`, :func:`accumulate`, :func:`fused_dot_add`, :func:`round_to_fp8`.
The tensor-core units it knows are in :data:`UNITS`, with their evidence.
"""

from importlib.metadata import version as _version

from fp8ref.emulation.accumulate import accumulate
from fp8ref.emulation.dot import fused_dot_add
from fp8ref.emulation.formats import E4M3, E5M2, FORMATS, Fp8Format, format_of
from fp8ref.emulation.layouts import from_torch_layout, to_torch_layout
from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import ScaledTensor, dequantize, quantize
from fp8ref.emulation.rounding import round_to_fp8
from fp8ref.emulation.scales import Scaling
from fp8ref.emulation.units import UNITS, TensorCoreUnit, unit_of

__version__ = _version("fp8ref")

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "UNITS",
    "Fp8Format",
    "ScaledTensor",
    "Scaling",
    "TensorCoreUnit",
    "accumulate",
    "dequantize",
    "emulate_matmul",
    "format_of",
    "from_torch_layout",
    "fused_dot_add",
    "quantize",
    "round_to_fp8",
    "to_torch_layout",
    "unit_of",
]
