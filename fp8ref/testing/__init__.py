"""A kit for testing FP8 matmuls exactly: cases, comparisons, a suite of checks, and mutants that test the suite.

Installed with the package; wants the extra ``testing`` (hypothesis, pytest). ``docs/testing.md`` is its manual.
"""

from importlib.util import find_spec

_MISSING = [name for name in ("hypothesis", "pytest") if find_spec(name) is None]
if _MISSING:
    raise ImportError(f"fp8ref.testing needs {' and '.join(_MISSING)}: pip install 'fp8ref[testing]'")

from fp8ref.testing.cases import MatmulCase  # noqa: E402 - the line above says what is missing
from fp8ref.testing.compare import Differences, assert_bits_equal, differences  # noqa: E402
from fp8ref.testing.fills import Fill  # noqa: E402
from fp8ref.testing.strategies import fp8_tensors, matmul_cases, scales  # noqa: E402
from fp8ref.testing.supports import Supports  # noqa: E402

__all__ = [
    "Differences",
    "Fill",
    "MatmulCase",
    "Supports",
    "assert_bits_equal",
    "differences",
    "fp8_tensors",
    "matmul_cases",
    "scales",
]
