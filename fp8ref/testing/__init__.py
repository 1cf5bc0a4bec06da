"""A kit for testing FP8 matmuls exactly: cases, comparisons, a suite of checks, and mutants that test the suite.

Installed with the package; wants the extra ``testing`` (hypothesis, pytest). ``docs/testing.md`` is its manual.
"""

from importlib.util import find_spec

_MISSING = [name for name in ("hypothesis", "pytest") if find_spec(name) is None]
if _MISSING:
    raise ImportError(f"fp8ref.testing needs {' and '.join(_MISSING)}: pip install 'fp8ref[testing]'")

from fp8ref.testing.bound import Bound  # noqa: E402 - the lines above say what is missing
from fp8ref.testing.cases import MatmulCase  # noqa: E402
from fp8ref.testing.check import CheckError, Finding, check_matmul  # noqa: E402
from fp8ref.testing.compare import Differences, assert_bits_equal, differences  # noqa: E402
from fp8ref.testing.fills import Fill  # noqa: E402
from fp8ref.testing.mutants import Mutant, mutants  # noqa: E402
from fp8ref.testing.strategies import fp8_tensors, matmul_cases, scales  # noqa: E402
from fp8ref.testing.supports import Supports  # noqa: E402
from fp8ref.testing.within import assert_within_bound, matmul_bound  # noqa: E402

__all__ = [
    "Bound",
    "CheckError",
    "Differences",
    "Fill",
    "Finding",
    "MatmulCase",
    "Mutant",
    "Supports",
    "assert_bits_equal",
    "assert_within_bound",
    "check_matmul",
    "differences",
    "fp8_tensors",
    "matmul_bound",
    "matmul_cases",
    "mutants",
    "scales",
]
