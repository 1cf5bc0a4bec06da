"""The two FP8 formats as frozen data.

Source: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), table 1; the codes are those of
``torch.float8_e4m3fn`` and ``torch.float8_e5m2``. ``tests/emulation/test_formats.py`` checks every code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit floating-point format: one sign bit, then exponent bits, then mantissa bits.

    >>> E4M3.max, E4M3.smallest_subnormal, E5M2.max
    (448.0, 0.001953125, 57344.0)
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    """The code (without sign) of the largest finite value."""
    inf_code: int | None
    """The code of +Inf, or None where the format has no infinity."""
    nan_code: int = 0x7F
    """The NaN that NVIDIA hardware and torch write."""

    @property
    def e_min(self) -> int:
        """Exponent of the smallest normal number; subnormals keep it."""
        return 1 - self.bias

    @property
    def e_max(self) -> int:
        """Exponent of the largest finite number."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max(self) -> float:
        """The largest finite value."""
        fraction = self.max_code & ((1 << self.mantissa_bits) - 1)
        return (1.0 + fraction / (1 << self.mantissa_bits)) * 2.0**self.e_max

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above zero."""
        return float(2.0 ** (self.e_min - self.mantissa_bits))


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 4, 3, bias=7, max_code=0x7E, inf_code=None)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 5, 2, bias=15, max_code=0x7B, inf_code=0x7C)

FORMATS: dict[torch.dtype, Fp8Format] = {E4M3.dtype: E4M3, E5M2.dtype: E5M2}


def format_of(dtype: torch.dtype, argument: str = "dtype") -> Fp8Format:
    """Return the :class:`Fp8Format` of a torch dtype.

    Raises:
        TypeError: ``dtype`` is not one of the two FP8 dtypes; the message names ``argument``.

    >>> format_of(torch.float8_e5m2).name
    'e5m2'
    """
    if not isinstance(dtype, torch.dtype) or dtype not in FORMATS:
        raise TypeError(
            f"{argument}: got {dtype}, but FP8 means torch.float8_e4m3fn or torch.float8_e5m2; "
            "convert it with fp8ref.quantize or fp8ref.round_to_fp8 first"
        )
    return FORMATS[dtype]
