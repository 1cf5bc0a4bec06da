"""``assert_bits_equal``: equality of bits, and a report that says how and where they differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_tensor
from fp8ref.testing.floats import FloatFormat, bits_of, float_of
from fp8ref.testing.tally import TALLY
from fp8ref.testing.textmap import where_text


@dataclass(frozen=True, eq=False)
class Differences:
    """In what, and where, two tensors of one format differ; each mask has their shape."""

    actual: Tensor
    expected: Tensor
    format: FloatFormat
    values: Tensor
    """Different numbers, or a number against an Inf."""
    zero_signs: Tensor
    """+0 against -0."""
    nan_against_number: Tensor
    """NaN on one side only."""
    nan_payloads: Tensor
    """Two NaNs with different bits."""

    @property
    def any(self) -> Tensor:
        """All of them."""
        return self.values | self.zero_signs | self.nan_against_number | self.nan_payloads


def differences(actual: Tensor, expected: Tensor) -> Differences:
    """Compare bit patterns.

    Args:
        actual: any shape; fp8 (e4m3fn, e5m2), fp16, bf16, fp32 or fp64.
        expected: the same shape, dtype and device.

    Raises:
        TypeError: not tensors, different dtypes, or a dtype that is no float of the kit.
        ValueError: different shapes or devices.

    >>> found = differences(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    >>> found.zero_signs.tolist(), found.values.any().item()
    ([True, False], False)
    """
    x, y = check_tensor(actual, "actual"), check_tensor(expected, "expected")
    fmt = float_of(x.dtype, "actual")
    if x.dtype != y.dtype:
        raise TypeError(f"actual: got {x.dtype}, expected {y.dtype}; compare like with like")
    if x.shape != y.shape:
        raise ValueError(f"actual: got shape {list(x.shape)}, expected {list(y.shape)}; compare like with like")
    if x.device != y.device:
        raise ValueError(f"actual: got a tensor on {x.device}, expected one on {y.device}; move one of them")
    bits_x, bits_y = bits_of(x), bits_of(y)
    last = fmt.largest if fmt.infinity is None else fmt.infinity
    nan_x, nan_y = ((bits & fmt.magnitude) > last for bits in (bits_x, bits_y))
    zeros = ((bits_x | bits_y) & fmt.magnitude) == 0
    different = bits_x != bits_y
    return Differences(
        x.detach(),
        y.detach(),
        fmt,
        values=different & ~zeros & ~nan_x & ~nan_y,
        zero_signs=different & zeros,
        nan_against_number=nan_x ^ nan_y,
        nan_payloads=different & nan_x & nan_y,
    )


def assert_bits_equal(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Raise unless every bit agrees, signs of zero and NaN payloads included.

    Args:
        actual: what the code under test returned; any shape; fp8 (e4m3fn, e5m2), fp16, bf16, fp32 or fp64.
        expected: the same shape, dtype and device.
        message: a first line for the report.

    Raises:
        AssertionError: bits differ. The report counts different values, zero signs, NaNs against numbers and NaN
            payloads; shows the first coordinate with both bit patterns and values, the largest distance in units in the
            last place (numbers of the type that lie between; the two zeros count as one), and a map of the places.
        TypeError, ValueError: the tensors cannot be compared: see :func:`fp8ref.testing.differences`.

    >>> assert_bits_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    >>> assert_bits_equal(torch.tensor([[1.0, -0.0]]), torch.tensor([[1.0, 0.0]]))
    Traceback (most recent call last):
    ...
    AssertionError: 1 of 2 elements differ: 1 zero sign
    first at (0, 1): actual 0x80000000 = -0.0, expected 0x00000000 = 0.0
    rows: all of 1
    columns: 1 (the last of 2)
    map of 1 x 2, '.' equal, '#' different
         0 |.#
    """
    found = differences(actual, expected)
    TALLY.add(found.actual.numel())
    if bool(found.any.any()):
        raise AssertionError("\n".join(([message] if message else []) + describe(found)))


def describe(found: Differences) -> list[str]:
    """The lines of the report."""
    kinds = (
        (found.values, "value", "values"),
        (found.zero_signs, "zero sign", "zero signs"),
        (found.nan_against_number, "NaN against a number", "NaNs against numbers"),
        (found.nan_payloads, "NaN payload", "NaN payloads"),
    )
    parts = [_counted(count, one, many) for mask, one, many in kinds if (count := int(mask.sum()))]
    wrong = int(found.any.sum())
    lines = [
        f"{wrong:,} of {found.actual.numel():,} elements differ: {', '.join(parts)}",
        f"first at {_at(found, found.any.nonzero()[0])}",
    ]
    if bool(found.values.any()):
        lines.append(_farthest(found))
    return lines + where_text(found.any)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _at(found: Differences, index: Tensor) -> str:
    at = tuple(index.tolist())
    actual, expected = (describe_element(x[at], found.format) for x in (found.actual, found.expected))
    return f"{at}: actual {actual}, expected {expected}"


def describe_element(x: Tensor, fmt: FloatFormat) -> str:
    """Bit pattern and value of one element.

    >>> from fp8ref.testing.floats import FLOATS
    >>> describe_element(torch.tensor(1.5, dtype=torch.float16), FLOATS[torch.float16])
    '0x3e00 = 1.5'
    """
    bits = int(bits_of(x)) & (2 * fmt.sign - 1)
    return f"0x{bits:0{fmt.width // 4}x} = {x.double().item()!r}"


def _farthest(found: Differences) -> str:
    keys = [place_of(bits_of(x), found.format) for x in (found.actual, found.expected)]
    # Distances of fp64 may not fit into int64: fp64 finds the largest, Python's integers say what it is.
    far = (keys[0].double() - keys[1].double()).abs().masked_fill(~found.values, -1.0).flatten().argmax()
    distance = abs(int(keys[0].flatten()[far]) - int(keys[1].flatten()[far]))
    index = torch.stack(torch.unravel_index(far, found.values.shape)) if found.values.dim() else far.new_empty(0)
    return f"largest distance: {_counted(distance, 'unit', 'units')} in the last place at {_at(found, index)}"


def place_of(bits: Tensor, fmt: FloatFormat) -> Tensor:
    """Consecutive integers for consecutive numbers of the format; both zeros are 0."""
    magnitude = bits & fmt.magnitude
    return torch.where(bits == magnitude, magnitude, -magnitude)
