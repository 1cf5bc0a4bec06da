"""Argument checks shared by the oracle's functions: an error names the argument, what it got and the fix."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8ref.emulation.formats import format_of

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
BIAS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(x: object, argument: str) -> Tensor:
    """Return ``x`` if it is a dense torch tensor with storage.

    Raises:
        TypeError: it is not a tensor, or one without values (meta) or with a sparse layout.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument}: got {type(x).__name__}; give a torch.Tensor")
    if x.layout != torch.strided or x.device.type == "meta":
        raise TypeError(f"{argument}: got a {x.layout} tensor on {x.device}; give a strided tensor with values")
    return x


def check_operands(a: object, b: object) -> None:
    """Check the two FP8 operands of a product: ``a`` [M, K] and ``b`` [K, N] on one device."""
    for argument, x in (("a", a), ("b", b)):
        tensor = check_tensor(x, argument)
        format_of(tensor.dtype, argument)
        if tensor.dim() != 2:
            raise ValueError(
                f"{argument}: got shape {list(tensor.shape)}; give a matrix (flatten leading dimensions yourself)"
            )
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    check_same_device(b, a, "b")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"b: got shape {list(b.shape)} for a of shape {list(a.shape)}; give a [M, K] and b [K, N] "
            "(a weight stored [N, K] goes in as weight.t())"
        )


def check_same_device(x: Tensor, other: Tensor, argument: str, other_argument: str = "a") -> None:
    """Raise ValueError unless ``x`` lies on the device of ``other``."""
    if x.device != other.device:
        raise ValueError(
            f"{argument}: got a tensor on {x.device} while {other_argument} is on {other.device}; move one of them"
        )


def check_split_k(split_k: object) -> None:
    """Raise unless ``split_k`` is an int of at least 1."""
    if isinstance(split_k, bool) or not isinstance(split_k, int):
        raise TypeError(f"split_k: got {split_k!r}; give an int, the number of parts that K is cut into")
    if split_k < 1:
        raise ValueError(f"split_k: got {split_k}; give 1 (no split) or more")


def check_bool(value: object, argument: str) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}: got {value!r}; give True or False")


def check_bias(bias: object, a: Tensor, n: int) -> None:
    """Raise unless ``bias`` is None or a vector of N fp32, bf16 or fp16 values on the device of ``a``."""
    if bias is None:
        return
    tensor = check_tensor(bias, "bias")
    if tensor.dtype not in BIAS_DTYPES:
        raise TypeError(f"bias: got {tensor.dtype}; give one of {list(BIAS_DTYPES)}, which fp32 holds exactly")
    if list(tensor.shape) != [n]:
        raise ValueError(f"bias: got shape {list(tensor.shape)}; give [{n}], one value for each column of b")
    check_same_device(tensor, a, "bias")


def check_out_dtype(out_dtype: object) -> None:
    """Raise TypeError unless ``out_dtype`` is one that the hardware writes."""
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype}; give one of {list(OUT_DTYPES)}")


def first_line(error: BaseException) -> str:
    """Return what an error of another package says in its first line, or its type where it says nothing.

    >>> first_line(KeyboardInterrupt())
    'KeyboardInterrupt'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
