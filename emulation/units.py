"""Tensor-core units as frozen data: what one step of a matrix instruction computes.

One step is a fused dot-product-add of ``products_per_step`` (L) products and an accumulator c:

1. a product's exponent is the sum of its operands' exponents, not renormalised; zero takes no part;
2. every product (and c, where it enters the alignment) is truncated toward zero to a multiple of
   ``2 ** (emax - fraction_bits)`` (F), where emax is the largest exponent among them;
3. the sum is exact, then truncated toward zero to ``significant_bits`` (B) bits from its leading one on, and to fp32.

:data:`UNITS` is the table of the known units with their evidence; build a :class:`TensorCoreUnit` for your own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def check_int(value: object, argument: str, low: int, high: int) -> None:
    """Raise unless ``value`` is an int (not a bool) from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument}: got {value!r}; give an int from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{argument}: got {value!r}; give an int from {low} to {high}")


@dataclass(frozen=True)
class TensorCoreUnit:
    """How a tensor-core unit adds products.

    Attributes:
        name: the name that ``unit=`` takes.
        products_per_step: L, products added in one step; None means one infinitely precise sum over all of K,
            rounded once to fp32 (nearest even); then the other fields have no meaning.
        fraction_bits: F, bits kept below the largest exponent of a step.
        significant_bits: B, significant bits of a step's fp32 result (at most 24).
        k_order: the order in which the k of one instruction are taken, ``len(k_order)`` being the K of the
            instruction; consecutive runs of L make its steps.
        c_enters: ``"alignment"``: c is one more term of every step. ``"after"``: each instruction starts from +0
            and c is added to its result last, by one fp32 addition rounded to nearest even.
        evidence: how the row is known.

    >>> UNITS["sm90"].products_per_step, UNITS["sm90"].fraction_bits, UNITS["sm90"].significant_bits
    (32, 13, 14)
    """

    name: str
    products_per_step: int | None
    fraction_bits: int
    significant_bits: int
    k_order: tuple[int, ...]
    c_enters: Literal["alignment", "after"]
    evidence: str

    def __post_init__(self) -> None:
        """Refuse a unit that the oracle could not compute exactly."""
        steps = self.products_per_step
        if steps is None:
            return
        check_int(steps, "products_per_step", 1, 64)
        check_int(self.fraction_bits, "fraction_bits", 1, 40)
        check_int(self.significant_bits, "significant_bits", 1, 24)
        order = self.k_order
        whole = isinstance(order, tuple) and all(type(k) is int for k in order)
        if not whole or not order or sorted(order) != list(range(len(order))) or len(order) % steps:
            raise ValueError(
                f"k_order: got {order!r}; give a tuple that permutes range(n), n a positive multiple of "
                f"products_per_step={steps}"
            )
        if self.c_enters not in ("alignment", "after"):
            raise ValueError(f'c_enters: got {self.c_enters!r}; give "alignment" or "after"')

    @property
    def instruction_k(self) -> int:
        """K of one instruction; a chain pads K with zeros to a multiple of it."""
        return len(self.k_order)


# Two fp16 instructions take the place of one on fp8, and the registers of four fp8 hold two fp16 for each of them.
_HMMA_PAIRS = tuple(k for k in range(32) if k % 4 < 2) + tuple(k for k in range(32) if k % 4 >= 2)

_TABLE = (
    TensorCoreUnit("sm90", 32, 13, 14, tuple(range(32)), "alignment", "measured on an H200 (wgmma m64nNk32)"),
    TensorCoreUnit("sm90_mma_sync", 16, 25, 24, _HMMA_PAIRS, "after", "measured on an H200 (mma.sync m16n8k32)"),
    TensorCoreUnit(
        "sm90_hmma", 16, 25, 24, _HMMA_PAIRS, "alignment", "measured on an H200 (tl.dot, fp8 upcast to fp16)"
    ),
    TensorCoreUnit("sm89", 16, 13, 14, tuple(range(32)), "alignment", "public Ada hardware vectors"),
    TensorCoreUnit("sm100", 32, 25, 24, tuple(range(32)), "alignment", "published (tcgen05), not checked on hardware"),
    TensorCoreUnit("exact", None, 0, 24, (), "alignment", "by definition: exact sum, rounded once"),
)

UNITS: dict[str, TensorCoreUnit] = {unit.name: unit for unit in _TABLE}


def unit_of(unit: str | TensorCoreUnit) -> TensorCoreUnit:
    """Return the unit that ``unit=`` names, or the unit itself.

    Raises:
        ValueError: a name that is not in :data:`UNITS`.
        TypeError: neither a name nor a :class:`TensorCoreUnit`.

    >>> unit_of("sm89").fraction_bits
    13
    """
    if isinstance(unit, TensorCoreUnit):
        return unit
    if not isinstance(unit, str):
        raise TypeError(f"unit: got {type(unit).__name__}; give one of {list(UNITS)} or a TensorCoreUnit")
    if unit not in UNITS:
        raise ValueError(f"unit: got {unit!r}; give one of {list(UNITS)} or a TensorCoreUnit of your own")
    return UNITS[unit]
