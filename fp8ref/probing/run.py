"""The probe: asks, builds the model, compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.scales import PAIRS, Scaling
from fp8ref.probing.arithmetic import Arithmetics, find_arithmetic
from fp8ref.probing.environment import oracle_call, where
from fp8ref.probing.model import Model, build, same_arithmetic
from fp8ref.probing.product import check_product, leave_out_tail, never_added
from fp8ref.probing.report import Finding, ProbeReport
from fp8ref.probing.rounding import NEAREST, OUTPUTS
from fp8ref.probing.scales import BLOCK_FORMULAS, FORMULAS, Scales, find_scales, ones
from fp8ref.probing.specials import Special, find_output, find_specials
from fp8ref.probing.structure import Structure, find_structure
from fp8ref.probing.subject import Subject, check_subject
from fp8ref.probing.tree import Masks, NotATreeError, choose_masks
from fp8ref.probing.verify import Verdict, compare

LIFT = 16
"""Scales of 2**16 make the small sums visible in fp8 outputs."""


@torch.no_grad()
def probe(
    matmul: Callable[..., Tensor],
    *,
    m: int = 64,
    n: int = 64,
    k: int = 512,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e4m3fn),
    device: str = "cpu",
    scaling: tuple[Scaling, Scaling] | None = None,
    bias: bool = False,
    elements: int = 1_000_000,
    name: str = "",
    progress: Callable[[str], None] | None = None,
) -> ProbeReport:
    """Find out how a matrix product adds, by crafted inputs, and check the answer on random ones.

    Args:
        matmul: ``matmul(a, b)`` with a [M, K] row-major and b [K, N] column-major, returning [M, N] of a floating-point
            type on any device. With ``scaling`` it is called ``matmul(a, b, scale_a, scale_b)``, the scales laid out as
            :func:`fp8ref.emulate_matmul` takes them; with ``bias`` also with the keyword ``bias``, [N] of bf16 (fp16
            where the output is fp16).
        m: rows of a in every call; min(m, n) sums are asked for in one call.
        n: columns of b in every call.
        k: K in every call, at least 64. Kernels may cut K into parts at one size and not at another.
        dtypes: the formats of a and b: FP8, fp16 or bf16.
        device: where the operands lie.
        scaling: kinds of scales to call with, one of the pairs of :data:`fp8ref.emulation.scales.PAIRS`.
        bias: also find out how a bias is added; needs ``scaling``.
        elements: outputs to compare on random operands, a third each random normal, of a wide range, uniform bits.
        name: what to call the subject in the report.
        progress: called with a line at every stage.

    Returns:
        A :class:`fp8ref.ProbeReport`: findings with their evidence, the unit if one was found, and the verdict.

    Raises:
        ProbeError: the callable fails, or does not return the product of a and b.
        TypeError, ValueError: an argument that does not fit.

    Source: the additions are found as FPRev (Xie et al., 2024) finds them, by masks that cancel; docs/probe.md.

    >>> import fp8ref
    >>> report = probe(lambda a, b: fp8ref.accumulate(a, b, use_fast_accum=True), elements=4096)
    >>> report.known_as, report["products per step"], report["promotion"], str(report.verdict)
    ('sm90', 32, [], 'equal on 4,096 elements')
    """
    if scaling is not None and scaling not in PAIRS:
        raise ValueError(f"scaling: got {scaling!r}; give one of {list(PAIRS)}, or None")
    if bias and (scaling is None or "1x128" in scaling):
        raise ValueError(f"bias: got True with scaling={scaling!r}; give tensor-wise or row-wise scales with it")
    for argument, value, least in (("m", m, 1), ("n", n, 1), ("k", k, 64), ("elements", elements, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{argument}: got {value!r}; give an int of at least {least}")
    check_subject(matmul, dtypes, device)
    scales = None if scaling is None else lambda: ones(scaling, m, n, k, device)
    subject = Subject(matmul, m, n, k, dtypes[0], dtypes[1], device, scales)
    names = " by ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    about = {"subject": name or getattr(matmul, "__qualname__", repr(matmul)), "M, N, K": f"{m}, {n}, {k}"}
    run = _Run(subject, progress or (lambda _: None), about | {"operands": names, "device": device})
    return run.report(scaling, bias, elements)


@dataclass
class _Run:
    """One probe on its way."""

    subject: Subject
    say: Callable[[str], None]
    about: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, value: Any, text: str = "", evidence: Any = ()) -> None:
        """Keep a finding; None is "not determined", with the reason in ``text``."""
        words = text or (str(value) if value is not None else "not determined")
        self.findings.append(Finding(name, value, words, list(evidence)))

    def report(self, scaling: tuple[Scaling, Scaling] | None, bias: bool, elements: int) -> ProbeReport:
        """Do everything."""
        self.say("is it a matrix product?")
        subject = self.subject
        leave_out_tail(subject, never_added(subject), blocks=scaling is not None and "1x128" in scaling)
        out = check_product(subject)
        self.add("deterministic", True, "two calls gave the same bits")
        if subject.tail:
            last = subject.k + subject.tail - 1
            self.add("never added", subject.tail, f"the products at k = {subject.k} to {last}, the end of K")
        self.about["output"] = str(out).removeprefix("torch.")
        masks = choose_masks(self.subject, out)
        self.say("specials")
        for special in find_specials(self.subject, masks, out):
            self.add(special.name, special.seen, evidence=special.evidence)
        output = find_output(self.subject, masks, out)
        self.add("output rounding", output.seen, evidence=output.evidence)
        self.say("the tree of additions")
        if scaling is not None and out.itemsize == 1:
            self.subject.lift = LIFT
            masks = choose_masks(self.subject, out)
        model = self._model(masks, out)
        self.subject.lift = 0
        epilogue = self._scales(scaling, bias, out, output)
        self.say(f"comparing {elements:,} outputs on random operands")
        verdict = self._verdict(model, epilogue, output, out, scaling, elements)
        unit = model.unit if model is not None else None
        equal = verdict is not None and verdict.first is None
        known = same_arithmetic(unit) if unit is not None and equal else None
        call = oracle_call(model, known, self.subject) if equal else None
        return ProbeReport(
            self.about,
            self.findings,
            unit,
            known,
            call,
            verdict,
            self.subject.calls,
            self.subject.trials_asked,
            where(self.subject.device),
        )

    def _model(self, masks: Masks, out: torch.dtype) -> Model | None:
        """Structure and arithmetic, as findings and as a model."""
        structure, found = self._structure(masks, out)
        if structure is None:
            return None
        self.add(
            "additions", structure.tree, structure.tree if len(structure.tree) < 160 else structure.tree[:150] + "..."
        )
        if structure.exact:
            text = f"nothing is lost beside a product 2**{masks.ratio} times as large: an exact sum, or one that wide"
            self.add("products per step", None, text)
            return build(structure, None, self.subject.k)
        self.add("products per step", structure.products_per_step, evidence=())
        self._order(structure)
        assert found is not None
        self._arithmetic(found, structure, masks)
        if found.model is None:
            self.add(
                "model", None, "none of the arithmetics tried gives what the sums of large and small products gave"
            )
        return found.model

    def _structure(self, masks: Masks, out: torch.dtype) -> tuple[Structure | None, Arithmetics | None]:
        """The order of additions and a step's arithmetic, asked again where the small products proved too large.

        A unit that keeps many bits keeps the sum of several s beside M, which looks like another order.
        """
        while True:
            try:
                structure = find_structure(self.subject, masks)
            except NotATreeError as error:
                if masks.capacity > 1:
                    masks = replace(masks, capacity=1)
                    continue
                self.add("additions", None, f"not determined: {error}")
                return None, None
            if structure.exact:
                return structure, None
            self.say("the arithmetic of a step")
            found = find_arithmetic(self.subject, masks, structure, out)
            kept = found.fraction_bits if found.fraction_bits is not None else found.c_bits
            bearable = 2 ** max(0, masks.ratio - 1 - (kept or 0))
            if masks.capacity <= bearable or masks.capacity == 1:
                return structure, found
            masks = replace(masks, capacity=max(1, bearable))

    def _order(self, structure: Structure) -> None:
        """Findings on promotion and on parts of K."""
        inner = [c for c in structure.chains if len(structure.parts) == 1 or c < structure.parts[0][1]]
        words = "; ".join(f"sums of {c} of K start from +0 and are added to a total" for c in inner)
        self.add("promotion", inner, words or "none: one accumulator is carried over all of K")
        parts = [list(part) for part in structure.parts]
        text = (
            "K is not cut"
            if len(parts) == 1
            else f"{len(parts)} parts, added one after the other from the first: {parts}"
        )
        self.add("parts of K", parts, text)

    def _arithmetic(self, found: Arithmetics, structure: Structure, masks: Masks) -> None:
        """Findings on a step."""
        evidence = found.evidence
        kept = found.fraction_bits
        text = "" if kept is not None else f"not determined: more than {masks.ratio - 1}"
        if kept is None and structure.products_per_step < 3:
            text = "not determined: no three products share a step"
        self.add("fraction bits", kept, text, evidence.get("fraction_bits", ()))
        self.add("cut of a term", found.alignment, evidence=evidence.get("alignment", ()))
        joins = None if found.c_bits is None else found.c_bits == kept or kept is None
        words = {True: "yes, with the same bits", False: f"yes, with {found.c_bits} bits", None: ""}[joins]
        self.add("c joins the alignment", joins, words, evidence.get("c_bits", ()))
        bits = found.significant_bits
        value = None if bits is None or bits[0] != bits[1] else bits[0]
        text = (
            ""
            if value is not None or bits is None
            else f"not determined: {bits[0]} to {bits[1]} give the same results here"
        )
        self.add("significant bits", value, text, evidence.get("significant_bits", ()))
        self.add("rounding of a step", found.result_rounding)
        if found.model is not None and found.accumulator != "float32":
            several = "not determined: float32 or float16"
            self.add("accumulator", found.accumulator, "float16" if found.accumulator else several)
        if structure.chains:
            self.add("rounding of the total", found.total_rounding, evidence=evidence.get("total", ()))

    def _scales(
        self, scaling: tuple[Scaling, Scaling] | None, bias: bool, out: torch.dtype, output: Special
    ) -> Scales | None:
        """Findings on scales and bias."""
        if scaling is None:
            return None
        if output.seen not in OUTPUTS and out != torch.float32:
            self.add("scales", None, "not determined: neither is the rounding of the output")
            return None
        self.say("scales")
        rounding = output.seen if output.seen in OUTPUTS else NEAREST
        found = find_scales(self.subject, scaling, out, with_bias=bias, rounding=rounding)
        several = " or ".join(found.formulas)
        self.add("scales", found.formulas or None, several or "none of the formulas tried")
        if found.bias is not None:
            self.add("bias", found.bias or None, " or ".join(found.bias) or "none of the formulas tried")
        return found

    def _verdict(
        self,
        model: Model | None,
        scales: Scales | None,
        output: Special,
        out: torch.dtype,
        scaling: tuple[Scaling, Scaling] | None,
        elements: int,
    ) -> Verdict | None:
        """The model against the subject, scales of one where it takes scales."""
        # What an fp16 accumulator holds is an fp16 output already.
        held = model is not None and model.how is not None and model.how.accumulator == str(out).removeprefix("torch.")
        rounding = output.seen if output.seen in OUTPUTS else NEAREST if out.itemsize >= 4 or held else None
        if model is None or rounding is None or (scaling is not None and (scales is None or not scales.formulas)):
            return None

        def expected(a: Tensor, b: Tensor) -> Tensor:
            sums = model.sums(a, b)
            if scaling is not None and scales is not None:
                one = torch.ones((), device=a.device)
                name = scales.formulas[0]
                sums = FORMULAS[name](sums, one, one) if name in FORMULAS else sums
                assert name in FORMULAS or name in BLOCK_FORMULAS
            return OUTPUTS[rounding](sums, out) if out.itemsize < 4 else sums.to(out)

        try:
            return compare(self.subject, expected, elements)
        except ValueError as error:
            self.add("model", None, str(error))
            return None
