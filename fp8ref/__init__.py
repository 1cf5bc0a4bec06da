"""fp8ref: FP8 matrix products, bit for bit what an NVIDIA Hopper GPU returns.

The oracle: :func:`quantize`, :func:`emulate_matmul`, :func:`accumulate`, :func:`fused_dot_add`, :func:`round_to_fp8`.
The tensor-core units it knows are in :data:`UNITS`, with their evidence.
The hardware path: :func:`pack_weight`, :func:`scaled_linear`, :func:`scaled_matmul`, :func:`explain`.
Layers and models: :class:`Recipe`, :class:`Fp8Linear`, :func:`convert_`, :func:`calibrate`.
"""

from importlib.metadata import version as _version

from fp8ref.calibration import Calibration, calibrate
from fp8ref.checkpoint import (
    CheckpointError,
    CheckpointWarning,
    Inspection,
    convert_checkpoint,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from fp8ref.conversion import ConversionReport, LayerConversion
from fp8ref.convert import convert_
from fp8ref.emulation.accumulate import accumulate
from fp8ref.emulation.dot import fused_dot_add
from fp8ref.emulation.formats import E4M3, E5M2, FORMATS, Fp8Format, format_of
from fp8ref.emulation.layouts import from_torch_layout, to_torch_layout
from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import ScaledTensor, dequantize, quantize
from fp8ref.emulation.rounding import round_to_fp8
from fp8ref.emulation.scales import Scaling
from fp8ref.emulation.split_k import DroppedProductsWarning, NoEvidenceError, split_k
from fp8ref.emulation.units import UNITS, TensorCoreUnit, unit_of
from fp8ref.kernels.explain import Explanation, explain
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.pack import PackedWeight, pack_weight
from fp8ref.linear import Fp8Linear
from fp8ref.probing import ProbeError, ProbeReport, probe
from fp8ref.recipes import RECIPES, Recipe

__version__ = _version("fp8ref")

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "RECIPES",
    "UNITS",
    "Calibration",
    "CheckpointError",
    "CheckpointWarning",
    "ConversionReport",
    "DroppedProductsWarning",
    "Explanation",
    "Fp8Format",
    "Fp8Linear",
    "Inspection",
    "LayerConversion",
    "NoEvidenceError",
    "PackedWeight",
    "ProbeError",
    "ProbeReport",
    "Recipe",
    "ScaledTensor",
    "Scaling",
    "TensorCoreUnit",
    "accumulate",
    "calibrate",
    "convert_",
    "convert_checkpoint",
    "dequantize",
    "emulate_matmul",
    "explain",
    "format_of",
    "from_torch_layout",
    "fused_dot_add",
    "inspect_checkpoint",
    "load_checkpoint",
    "pack_weight",
    "probe",
    "quantize",
    "round_to_fp8",
    "save_checkpoint",
    "scaled_linear",
    "scaled_matmul",
    "split_k",
    "to_torch_layout",
    "unit_of",
]
