"""What ``check_matmul`` checks: each property is a strategy of cases and a function that raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fp8ref.testing import hardcases
from fp8ref.testing.cases import MatmulCase
from fp8ref.testing.compare import assert_bits_equal
from fp8ref.testing.subject import Subject, among_nan, only_row, poisoned_allocations


def _always(_subject: Subject) -> str:
    return ""


@dataclass(frozen=True)
class Property:
    """One line of the report.

    Attributes:
        name: what a user calls it.
        cases: the cases to try on a subject.
        check: raises where a case shows that the property does not hold.
        needs: why it cannot be checked on a subject, or "".
    """

    name: str
    cases: Callable[[Subject], st.SearchStrategy[MatmulCase]]
    check: Callable[[Subject, MatmulCase], None]
    needs: Callable[[Subject], str] = _always


def _judge(subject: Subject, case: MatmulCase) -> None:
    subject.judge(case, subject.run(case))


def _exactly(subject: Subject, case: MatmulCase) -> None:
    assert_bits_equal(subject.run(case), case.expected())


def _layouts(subject: Subject, case: MatmulCase) -> None:
    """Any layout gives the bits of the plainest one."""
    actual = subject.run(case)
    # An expanded operand repeats its first row: other values than the same numbers laid out otherwise.
    if subject.expect == "bits" and "expanded" not in (case.a.layout, case.b.layout):
        plainest = subject.supports.layouts[0]
        a, b = (replace(fill, layout=plainest, offset=0) for fill in (case.a, case.b))
        plain = subject.run(replace(case, a=a, b=b))
        assert_bits_equal(actual, plain, "other strides or offsets give other bits")
    subject.judge(case, actual)


def _memory(subject: Subject, case: MatmulCase) -> None:
    """Operands, and what lies around them, are as before; the NaN around them does not get into the result."""
    made = case.operands(subject.device)
    before = {name: memory.clone() for name, memory in made.memory.items()}
    actual = subject.call(case, made)
    for name, memory in made.memory.items():
        changed = int((memory != before[name]).sum())
        if changed:
            raise AssertionError(f"{name}: {changed} bytes of it, or beside it, were overwritten")
    subject.judge(case, actual)


def _written(subject: Subject, case: MatmulCase) -> None:
    """Nothing of what the output's memory held before is left."""
    if subject.takes_out:
        first = subject.run(case)
        for byte in (0x00, 0x3C):
            assert_bits_equal(subject.run(case, poison=byte), first, f"out= full of bytes {byte:#04x} gives other bits")
    else:
        with poisoned_allocations():
            first = subject.run(case)
    subject.judge(case, first)


def _repeats(subject: Subject, case: MatmulCase) -> None:
    first = subject.run(case)
    for again in range(1, subject.repeats):
        assert_bits_equal(subject.run(case), first, f"run {again + 1} of the same call gives other bits than run 1")


def _batch(subject: Subject, case: MatmulCase) -> None:
    """A row has the same bits alone, in a batch, and among rows of NaN."""
    whole = subject.run(case)
    alone = subject.supports.smallest[0] <= 1
    for row in sorted({0, case.m // 2, case.m - 1}):
        if alone:
            made = only_row(case, case.operands(subject.device), row, offsets=subject.supports.offsets)
            result = subject.call(case, made)
            assert_bits_equal(result, whole[row : row + 1], f"row {row} alone has other bits than among {case.m}")
        if subject.supports.specials:
            result = subject.call(case, among_nan(case.operands(subject.device), row))[row : row + 1]
            assert_bits_equal(result, whole[row : row + 1], f"row {row} changes when the other rows are NaN")


def _not_exact(subject: Subject) -> str:
    return "expect='exact'" if subject.expect == "exact" else ""


def _bits_only(subject: Subject) -> str:
    return "" if subject.expect == "bits" else f"expect={subject.expect!r}"


def _needs_layouts(subject: Subject) -> str:
    several = subject.supports.offsets or len(subject.supports.layouts) > 1
    return "" if several else "one layout, no offsets"


def _needs_specials(subject: Subject) -> str:
    return _not_exact(subject) or ("" if subject.supports.specials else "specials=False")


def _needs_bias(subject: Subject) -> str:
    return _not_exact(subject) or ("no bias" if subject.supports.bias_dtypes == (None,) else "")


def _needs_narrow(subject: Subject) -> str:
    return _not_exact(subject) or ("" if hardcases.narrow_outputs(subject.supports) else "fp32 outputs only")


def _needs_rows(subject: Subject) -> str:
    of = subject.supports
    if not hardcases.row_scalings(of):
        return "128x128 scales of a are shared among rows"
    if of.largest[0] < 2:
        return "one row only"
    return "" if of.specials or of.smallest[0] <= 1 else "specials=False and no single rows"


PROPERTIES: tuple[Property, ...] = (
    Property("random cases", hardcases.drawn, _judge, _not_exact),
    Property("exact data", hardcases.exact_data, _exactly),
    Property("tails", hardcases.tails, _judge),
    Property("strides and offsets", lambda s: hardcases.drawn(s, tame=True), _layouts, _needs_layouts),
    Property("guard bands", lambda s: hardcases.drawn(s, tame=True), _memory),
    Property("poisoned output", lambda s: hardcases.drawn(s, tame=True), _written),
    Property("repeated runs", hardcases.drawn, _repeats),
    Property("batch invariance", hardcases.independent_rows, _batch, _needs_rows),
    Property("accumulation", hardcases.accumulation, _judge, _not_exact),
    Property("scale order", hardcases.scale_order, _judge, _not_exact),
    Property("output rounding", hardcases.output_rounding, _judge, _needs_narrow),
    Property("bias", hardcases.biased, _judge, _needs_bias),
    Property("overflow", hardcases.overflow, _judge, _not_exact),
    Property("subnormals", hardcases.subnormals, _judge, _not_exact),
    Property("NaN and Inf", hardcases.specials, _judge, _needs_specials),
    Property("zero signs", hardcases.zeros, _judge, _bits_only),
)
"""All of them, in the order of the report."""
