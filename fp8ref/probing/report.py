"""What a probe found: every finding with the trials that show it, and the verdict on random operands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.probing.subject import Trial
from fp8ref.probing.verify import Verdict


@dataclass(frozen=True)
class Finding:
    """One property of the subject.

    Attributes:
        name: what was asked.
        value: the answer as a number, a string or a list; None where it could not be determined.
        text: the answer in words, or why there is none.
        evidence: trials and their answers: the products that were put in, ``{k: (x, y)}``, and the sum that came out.
    """

    name: str
    value: Any
    text: str
    evidence: list[tuple[Trial, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ProbeReport:
    """The result of :func:`fp8ref.probe`.

    Attributes:
        subject: what was probed: name, sizes, formats, device.
        findings: in the order they were made.
        unit: the tensor-core unit that was found, where there is one.
        known_as: the name in :data:`fp8ref.UNITS` of a unit with the same arithmetic.
        reproduced_by: a call that computes the same, or None.
        verdict: the model against the subject on random operands; None where there is no model.
        calls: calls of the subject.
        trials: sums of crafted products that were looked at.
        environment: versions and the device.

    >>> import fp8ref
    >>> report = fp8ref.probe(lambda a, b: a.float() @ b.float(), m=16, n=16, k=64, elements=256)
    >>> report.unit, report["products per step"], report["rounding of a step"]
    (None, 1, 'nearest')
    """

    subject: dict[str, Any]
    findings: list[Finding]
    unit: TensorCoreUnit | None
    known_as: str | None
    reproduced_by: str | None
    verdict: Verdict | None
    calls: int
    trials: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether a model was built and never differed."""
        return self.verdict is not None and self.verdict.first is None

    def __getitem__(self, name: str) -> Any:
        """The value of a finding; None where it is undetermined.

        Raises:
            KeyError: no such finding.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding.value
        raise KeyError(f"{name}: no such finding; there are {[finding.name for finding in self.findings]}")

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON's types; evidence as lists of [k, x, y] and the sum."""
        unit = None
        if self.unit is not None:
            names = ("products_per_step", "fraction_bits", "significant_bits", "k_order", "c_enters")
            unit = {name: getattr(self.unit, name) for name in names}
        verdict = None
        if self.verdict is not None:
            first = None if self.verdict.first is None else dict(vars(self.verdict.first))
            verdict = {"elements": self.verdict.elements, "differing": self.verdict.differing, "first": first}
        return {
            "subject": self.subject,
            "environment": self.environment,
            "findings": [
                {
                    "name": finding.name,
                    "value": finding.value,
                    "text": finding.text,
                    "evidence": [
                        {"products": [[k, *map(_number, xy)] for k, xy in trial.items()], "sum": _number(answer)}
                        for trial, answer in finding.evidence
                    ],
                }
                for finding in self.findings
            ],
            "unit": unit,
            "known_as": self.known_as,
            "reproduced_by": self.reproduced_by,
            "verdict": verdict,
            "calls": self.calls,
            "trials": self.trials,
        }

    def __str__(self) -> str:
        """The report as text."""
        width = max(len(finding.name) for finding in self.findings)
        lines = [f"{key}: {value}" for key, value in self.subject.items()]
        lines += ["", *(f"{finding.name:<{width}}  {finding.text}" for finding in self.findings), ""]
        if self.verdict is not None and not self.equal:
            lines.append("the model of these findings does not reproduce the subject: each says what its trials showed")
        if self.known_as:
            lines.append(f"the arithmetic of unit {self.known_as!r}")
        if self.reproduced_by:
            lines.append(f"reproduced by: {self.reproduced_by}")
        lines.append(f"on random operands: {self.verdict if self.verdict else 'not compared, for there is no model'}")
        return "\n".join([*lines, f"{self.trials:,} sums asked for in {self.calls:,} calls"])


def _number(value: float) -> float | str:
    """JSON has no NaN and no Inf."""
    return value if value - value == 0 else str(value)
