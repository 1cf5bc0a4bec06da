"""What a matmul under test takes, so that it is only asked for that."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from fp8ref.emulation.checks import BIAS_DTYPES, OUT_DTYPES, check_bool, check_split_k
from fp8ref.emulation.formats import E4M3, E5M2, format_of
from fp8ref.emulation.scales import PAIRS, Scaling, check_pair
from fp8ref.emulation.units import check_int

Layout = Literal["rows", "padded", "columns", "sliced", "expanded"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_FP8 = (E4M3.dtype, E5M2.dtype)
_Sizes = tuple[int, int, int]


@dataclass(frozen=True, repr=False)
class Supports:
    """The arguments that a matmul takes. The defaults are everything that ``emulate_matmul`` takes, at modest sizes.

    Attributes:
        scalings: pairs of kinds of scales, of a and of b.
        dtypes: pairs of FP8 dtypes, of a and of b.
        out_dtypes: dtypes of the result.
        bias_dtypes: dtypes of the bias; None stands for no bias.
        use_fast_accum: the accumulation modes; True is only asked for with tensor-wise and row-wise scales.
        split_k: the values of ``split_k``.
        layouts: of the operands, in memory; for b, of its transpose [N, K]. "rows": contiguous along K. "padded": so,
            with a gap after each row. "columns": contiguous along M or N. "sliced": every second row and third column
            of something larger. "expanded": one row, repeated with stride 0. All but "expanded" at any offset in
            their storage.
        offsets: whether operands may begin anywhere in their storage, not only at multiples of 16 bytes.
        says_scaling: whether ``scaling`` is an argument; False: never given, the kernel has one kind or goes by shapes.
        specials: whether operands, scales and biases hold NaN and Inf.
        multiple_of: M, N and K are multiples of these.
        smallest: the smallest M, N and K.
        largest: the largest M, N and K, of random cases.

    Raises:
        TypeError, ValueError: a value that does not fit; the message names it.

    >>> Supports(scalings=(("row", "row"),), out_dtypes=(torch.bfloat16,), multiple_of=(1, 16, 16)).smallest
    (1, 16, 16)
    """

    scalings: tuple[tuple[Scaling, Scaling], ...] = PAIRS
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = tuple((x, y) for x in _FP8 for y in _FP8)
    out_dtypes: tuple[torch.dtype, ...] = OUT_DTYPES
    bias_dtypes: tuple[torch.dtype | None, ...] = (None, *BIAS_DTYPES)
    use_fast_accum: tuple[bool, ...] = (False, True)
    split_k: tuple[int, ...] = (1,)
    layouts: tuple[Layout, ...] = LAYOUTS
    offsets: bool = True
    says_scaling: bool = True
    specials: bool = True
    multiple_of: _Sizes = (1, 1, 1)
    smallest: _Sizes = (1, 1, 1)
    largest: _Sizes = (130, 131, 640)

    def __post_init__(self) -> None:
        """Check every field; round the sizes to the multiples."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "bool" and (not isinstance(value, tuple) or not value):
                raise TypeError(f"{field.name}: got {value!r}; give a tuple of at least one")
        self._check_choices()
        for name in ("multiple_of", "smallest", "largest"):
            sizes = getattr(self, name)
            if len(sizes) != 3:
                raise ValueError(f"{name}: got {sizes!r}; give three sizes, of M, N and K")
            for size in sizes:
                check_int(size, name, 1 if name == "multiple_of" else 0, 1 << 20)
        low, high = (
            [(size + rounded) // of * of for size, of, rounded in zip(sizes, self.multiple_of, extra, strict=True)]
            for sizes, extra in ((self.smallest, [of - 1 for of in self.multiple_of]), (self.largest, (0, 0, 0)))
        )
        if any(x > y for x, y in zip(low, high, strict=True)):
            raise ValueError(
                f"largest: got {self.largest!r}; with smallest={self.smallest!r} and multiple_of={self.multiple_of!r} "
                "no size is left"
            )
        object.__setattr__(self, "smallest", tuple(low))
        object.__setattr__(self, "largest", tuple(high))

    def __repr__(self) -> str:
        """Python that makes it again, defaults left out."""
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return f"Supports({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"

    def _check_choices(self) -> None:
        for pair in self.scalings:
            check_pair(pair)
        for both in self.dtypes:
            if not isinstance(both, tuple) or len(both) != 2:
                raise TypeError(f"dtypes: got {both!r}; give pairs, of a and of b")
            for dtype in both:
                format_of(dtype, "dtypes")
        for name, known in (("out_dtypes", OUT_DTYPES), ("bias_dtypes", (None, *BIAS_DTYPES)), ("layouts", LAYOUTS)):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name}: got {value!r}; give some of {list(known)}")
        for name in ("offsets", "says_scaling", "specials"):
            check_bool(getattr(self, name), name)
        for mode in self.use_fast_accum:
            check_bool(mode, "use_fast_accum")
        for parts in self.split_k:
            check_split_k(parts)
        if self.use_fast_accum == (True,) and any("1x128" in pair for pair in self.scalings):
            raise ValueError("use_fast_accum: got only True beside block scales, which are always promoted; add False")

    def modes_of(self, pair: tuple[Scaling, Scaling]) -> tuple[bool, ...]:
        """The accumulation modes that go with a pair of kinds."""
        return (False,) if "1x128" in pair else self.use_fast_accum
