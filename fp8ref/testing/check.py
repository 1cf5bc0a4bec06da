"""``check_matmul``: a suite of exact checks for any matmul kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, get_args

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky

from fp8ref.emulation.units import TensorCoreUnit, check_int
from fp8ref.testing.bound import FP32_ANY_ORDER
from fp8ref.testing.cases import Kernel, MatmulCase
from fp8ref.testing.properties import PROPERTIES, Property
from fp8ref.testing.subject import Expect, Subject
from fp8ref.testing.supports import Supports
from fp8ref.testing.within import model_of

REPEATS = 3
"""Runs that must give the same bits, where nothing else is said."""


@dataclass(frozen=True)
class Finding:
    """What became of one property.

    Attributes:
        name: the property.
        tried: cases run, the attempts to make a failing one smaller not counted.
        skipped: why it was not checked, or "".
        failure: how it failed, or "".
        case: the smallest failing case.
    """

    name: str
    tried: int = 0
    skipped: str = ""
    failure: str = ""
    case: MatmulCase | None = None

    def line(self) -> str:
        """One line of the report.

        >>> Finding("tails", 100).line()
        'ok    tails                 100 cases'
        """
        word, rest = "ok", f"{self.tried} case{'' if self.tried == 1 else 's'}"
        if self.skipped:
            word, rest = "-", f"not checked: {self.skipped}"
        elif self.failure:
            word, rest = "FAIL", f"case {self.tried}: {self.failure.splitlines()[0]}"
        return f"{word:5} {self.name:21} {rest}"


class CheckError(AssertionError):
    """A kernel fails properties; ``findings`` has them all.

    >>> CheckError("1 of 16 properties fails", ()).findings
    ()
    """

    def __init__(self, text: str, findings: tuple[Finding, ...]) -> None:
        """Keep the findings beside the text."""
        super().__init__(text)
        self.findings = findings


def check_matmul(
    kernel: Kernel,
    supports: Supports | None = None,
    *,
    expect: Expect = "bits",
    unit: str | TensorCoreUnit = "sm90",
    device: torch.device | str = "cpu",
    takes_out: bool = False,
    repeats: int = REPEATS,
    properties: Sequence[str] | None = None,
    cases: Sequence[MatmulCase] | None = None,
    examples: int | None = None,
    shrink: bool = True,
    fail_fast: bool = False,
    quiet: bool = False,
) -> tuple[Finding, ...]:
    """Run a kernel over a suite of cases and require of it, by default, the bits of the oracle.

    The properties: random cases; exact data; tails; strides and offsets; guard bands (operands and the memory around
    them stay as they are, and the NaN around them stays out of the result); poisoned output; repeated runs; batch
    invariance (a row alone, in a batch, among NaN); accumulation; scale order; output rounding; bias; overflow;
    subnormals; NaN and Inf; zero signs. One line is printed for each.

    Args:
        kernel: called as :func:`fp8ref.emulate_matmul` is: ``kernel(a, b, scale_a, scale_b, out_dtype=...)``, and
            ``bias``, ``use_fast_accum``, ``split_k`` and ``scaling`` only where they differ from the oracle's defaults.
        supports: what it takes; None for everything.
        expect: "bits": equal to the oracle with ``unit``. "bound": the derived bound of ``unit`` (exact data still give
            equality), for an order of addition that is not known. "exact": exact data only.
        unit: what the kernel adds with: a name of :data:`fp8ref.UNITS`, a :class:`fp8ref.TensorCoreUnit`, or with
            "bound" also "fp32".
        device: where the operands are made.
        takes_out: whether the kernel takes ``out=``, which it then gets, poisoned and between guard bands.
        repeats: runs that must give the same bits.
        properties: names of those to check; None for all.
        cases: cases to check instead of drawing any, as a failure's snippet does.
        examples: cases for each property; None for the ``max_examples`` of the Hypothesis profile, which
            ``pytest --fp8ref-examples`` sets.
        shrink: whether to look for a smaller failing case.
        fail_fast: whether the first property that fails is the last one checked.
        quiet: whether to print nothing.

    Returns:
        A :class:`Finding` for each property.

    Raises:
        CheckError: properties fail; the message has every line, and each failure with Python that repeats it.
        TypeError, ValueError: an argument that does not fit.

    >>> import fp8ref
    >>> found = check_matmul(fp8ref.emulate_matmul, examples=3, properties=["tails", "guard bands"])
    ok    tails                 3 cases
    ok    guard bands           3 cases
    """
    subject = _subject(kernel, supports, expect, unit, device, takes_out, repeats)
    chosen = _chosen(properties)
    count = settings().max_examples if examples is None else examples
    check_int(count, "examples", 1, 1 << 30)
    say: Callable[[str], object] = (lambda _line: None) if quiet else print
    findings: list[Finding] = []
    for one in chosen:
        findings.append(_find(one, subject, cases, count, shrink=shrink))
        say(findings[-1].line())
        if fail_fast and findings[-1].failure:
            break
    failed = [finding for finding in findings if finding.failure]
    if failed:
        given = _given(subject)
        first = f"{len(failed)} of {len(findings)} properties {'fails' if len(failed) == 1 else 'fail'}"
        lines = [first, *(finding.line() for finding in findings), *(_report(finding, given) for finding in failed)]
        raise CheckError("\n".join(lines), tuple(findings))
    return tuple(findings)


def _subject(
    kernel: object, supports: object, expect: object, unit: object, device: Any, takes_out: bool, repeats: int
) -> Subject:
    if not callable(kernel):
        raise TypeError(f"kernel: got {type(kernel).__name__}; give a function")
    if supports is None:
        supports = Supports()
    if not isinstance(supports, Supports):
        raise TypeError(f"supports: got {type(supports).__name__}; give a fp8ref.testing.Supports")
    if expect not in get_args(Expect):
        raise ValueError(f"expect: got {expect!r}; give one of {list(get_args(Expect))}")
    model_of(unit)
    if unit == FP32_ANY_ORDER and expect != "bound":
        raise ValueError("unit: got 'fp32', which has no order; give expect='bound', or the unit to be equal to")
    check_int(repeats, "repeats", 2, 1 << 20)
    return Subject(kernel, supports, expect, unit, torch.device(device), takes_out, repeats)  # type: ignore[arg-type]


def _chosen(properties: Sequence[str] | None) -> list[Property]:
    known = {one.name: one for one in PROPERTIES}
    if properties is None:
        return list(PROPERTIES)
    unknown = [name for name in properties if name not in known]
    if unknown or isinstance(properties, str) or not properties:
        raise ValueError(f"properties: got {properties!r}; give a list of some of {list(known)}")
    return [known[name] for name in properties]


def _find(one: Property, subject: Subject, cases: Sequence[MatmulCase] | None, count: int, *, shrink: bool) -> Finding:
    """Try a property on given cases, or on drawn ones."""
    if reason := one.needs(subject):
        return Finding(one.name, skipped=reason)
    search = _Search(one, subject)
    try:
        if cases is not None:
            for case in cases:
                search.attempt(case)
        else:
            search.draw(count, shrink=shrink)
    except _Found:
        pass
    except Flaky:
        search.failure += "\n(not on every run: the same case also passed)"
    return Finding(one.name, search.tried, failure=search.failure, case=search.case)


class _Found(Exception):  # noqa: N818 - a signal, no error
    """A case fails."""


class _Search:
    """Looks for a failing case, and keeps the last one seen, which Hypothesis makes the smallest."""

    def __init__(self, one: Property, subject: Subject) -> None:
        self.one, self.subject = one, subject
        self.tried = 0
        self.failure = ""
        self.case: MatmulCase | None = None

    def attempt(self, case: MatmulCase) -> None:
        """Check one case."""
        self.tried += not self.failure
        try:
            self.one.check(self.subject, case)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its failure
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            self.failure, self.case = text or type(error).__name__, case
            raise _Found from None

    def draw(self, count: int, *, shrink: bool) -> None:
        """Check drawn cases."""
        run = given(self.one.cases(self.subject))(self.attempt)
        settings(
            max_examples=count,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )(run)()


def _given(subject: Subject) -> str:
    """The arguments of a call that repeats a failure."""
    parts = []
    if subject.supports != Supports():
        parts.append(f"supports={subject.supports!r}")
    if subject.expect != "bits":
        parts.append(f"expect={subject.expect!r}")
    if subject.unit != "sm90":
        parts.append(f"unit={subject.unit!r}")
    if subject.device.type != "cpu":
        parts.append(f"device={str(subject.device)!r}")
    if subject.takes_out:
        parts.append("takes_out=True")
    if subject.repeats != REPEATS:
        parts.append(f"repeats={subject.repeats}")
    return "".join(f", {part}" for part in parts)


def _report(finding: Finding, given: str) -> str:
    """One failure at length."""
    assert finding.case is not None
    call = f"check_matmul(kernel, cases=[case], properties=[{finding.name!r}]{given})"
    return f"\n{finding.name}: {finding.failure}\nto repeat it:\n{indent(finding.case.snippet(call), '    ')}"
