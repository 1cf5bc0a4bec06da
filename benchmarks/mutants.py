"""Which tolerances of other projects' tests let a wrong kernel pass: each mutant of the kit against each of them.

``python benchmarks/mutants.py [--json FILE] [--markdown FILE] [--examples N]``. Every mutant runs on the same products:
normal activations and weights, the kind of data that those tests draw, once with weights scaled so that outputs are
of order 1, as in a layer, once without. The reference of a tolerance is the fp32 product of the dequantised operands,
as in those tests. A tolerance lets a mutant pass when it accepts every product in which the mutant returns other bits
than the right kernel; products of which it refuses the right result are left out for it. The last column is the
property of ``check_matmul`` that finds the mutant first.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import fp8ref
from fp8ref.emulation.scales import Scaling
from fp8ref.testing import CheckError, Mutant, check_matmul, mutants

E4M3, BF16, FP32, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float16
RESULTS = Path(__file__).parent / "results"


def _close(rtol: float, atol: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda y, reference: torch.allclose(y, reference, rtol=rtol, atol=atol)


def _sqnr(least: float) -> Callable[[Tensor, Tensor], bool]:
    """Signal to quantisation noise, in decibels."""

    def enough(y: Tensor, reference: Tensor) -> bool:
        noise = (y - reference).norm()
        return bool(20 * torch.log10(reference.norm() / noise) >= least)

    return enough


def _cosine(least: float) -> Callable[[Tensor, Tensor], bool]:
    """Cosine of the angle between the two results, each taken as one vector."""
    return lambda y, reference: bool(
        torch.nn.functional.cosine_similarity(y.flatten(), reference.flatten(), dim=0) > least
    )


def _difference(most: float) -> Callable[[Tensor, Tensor], bool]:
    """1 - 2 <x, y> / (<x, x> + <y, y>), which also sees a factor."""

    def small(y: Tensor, reference: Tensor) -> bool:
        return bool(1 - 2 * (y * reference).sum() / (y * y + reference * reference).sum() < most)

    return small


# Numbers from the projects' public tests; how each is applied is written out above.
TOLERANCES: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "vLLM: rtol 0.5, atol 0.15": _close(0.5, 0.15),
    "FBGEMM: 9e-2": _close(9e-2, 9e-2),
    "FBGEMM gemv: 0.3": _close(0.3, 0.3),
    "PyTorch: 7e-2": _close(7e-2, 7e-2),
    "torchao: SQNR 18 dB": _sqnr(18.0),
    "torchao: SQNR 25 dB": _sqnr(25.0),
    "DeepGEMM: 1 - sim < 1e-3": _difference(1e-3),
    "flashinfer: cos > 0.99": _cosine(0.99),
    "ROCm: atol 16": _close(0.0, 16.0),
}


@dataclass(frozen=True, eq=False)
class Product:
    """One product: scaled operands, options, and what a dequantised matmul makes of it."""

    x: fp8ref.ScaledTensor
    w: fp8ref.ScaledTensor
    bias: Tensor | None
    out_dtype: torch.dtype
    use_fast_accum: bool
    layer: bool

    def run(self, kernel: Callable[..., Tensor]) -> Tensor:
        """Call a kernel on copies, which it may spoil."""
        options = {"out_dtype": self.out_dtype, "scaling": (self.x.scaling, self.w.scaling)}
        if self.bias is not None:
            options["bias"] = self.bias
        if self.use_fast_accum:
            options["use_fast_accum"] = True
        a, b = self.x.data.clone(), self.w.data.clone().t()
        weight = self.w.t()
        return kernel(a, b, self.x.scale, weight.scale, **options)

    def reference(self) -> Tensor:
        """The fp32 product of the dequantised operands, converted as the output is."""
        y = fp8ref.dequantize(self.x) @ fp8ref.dequantize(self.w).t()
        y = y if self.bias is None else y + self.bias.float()
        return (
            fp8ref.round_to_fp8(y, self.out_dtype) if self.out_dtype.itemsize == 1 else y.to(self.out_dtype)
        ).float()


KINDS: tuple[tuple[Scaling, Scaling], ...] = (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"))
SHAPES = ((1, 256, 2048), (16, 128, 512), (7, 259, 1000), (64, 256, 300))


def products() -> Iterator[Product]:
    """The products that every mutant runs on."""
    generator = torch.Generator().manual_seed(0)
    for layer in (True, False):
        for m, n, k in SHAPES:
            for kind_x, kind_w in KINDS:
                x = torch.randn(m, k, generator=generator)
                w = torch.randn(n, k, generator=generator) * (k**-0.5 if layer else 1.0)
                operands = fp8ref.quantize(x, E4M3, scaling=kind_x), fp8ref.quantize(w, E4M3, scaling=kind_w)
                bias = torch.randn(n, generator=generator)
                for out_dtype, with_bias in ((BF16, False), (BF16, True), (FP32, False), (FP16, True), (E4M3, False)):
                    for fast in (False, True) if kind_x != "1x128" else (False,):
                        yield Product(*operands, bias.to(BF16) if with_bias else None, out_dtype, fast, layer)


def judge(
    mutant: Mutant, right: list[Tensor], every: list[Product], usable: dict[str, list[bool]]
) -> dict[str, object]:
    """Run one mutant on every product; say of each tolerance what it does where bits differ.

    A tolerance counts only on products of which it accepts the right result: "passes", "passes with outputs of order 1"
    (and not otherwise), "catches", or "unseen" where no such product differs.
    """
    verdicts: dict[str, dict[bool, list[bool]]] = {name: {True: [], False: []} for name in TOLERANCES}
    differing = 0
    for index, (product, good) in enumerate(zip(every, right, strict=True)):
        y = product.run(mutant)
        if torch.equal(y.view(torch.uint8), good.view(torch.uint8)):
            continue
        differing += 1
        reference = product.reference()
        for name, accept in TOLERANCES.items():
            if usable[name][index]:
                verdicts[name][product.layer].append(accept(y.float(), reference))
    words = {}
    for name, found in verdicts.items():
        if not found[True] + found[False]:
            words[name] = "unseen"
        elif all(found[True] + found[False]):
            words[name] = "passes"
        else:
            words[name] = "passes with outputs of order 1" if found[True] and all(found[True]) else "catches"
    return {"products in which bits differ": differing, "tolerances": words}


def found_by(mutant: Mutant, examples: int) -> tuple[str, int]:
    """The first property of check_matmul that fails, and the cases that it took."""
    try:
        check_matmul(mutant, examples=examples, quiet=True, fail_fast=True, shrink=False)
    except CheckError as error:
        return error.findings[-1].name, sum(finding.tried for finding in error.findings)
    return "", 0


CELLS = {"passes": "pass", "passes with outputs of order 1": "(pass)", "catches": "", "unseen": "unseen"}


def markdown(rows: dict[str, dict[str, object]]) -> str:
    """The table; "(pass)" is a fault that a tolerance misses with outputs of order 1 only."""
    lines = [
        "| wrong kernel | " + " | ".join(TOLERANCES) + " | `check_matmul` |",
        "|---|" + "---|" * (len(TOLERANCES) + 1),
    ]
    for name, row in rows.items():
        words = row["tolerances"]
        assert isinstance(words, dict)
        cells = [CELLS[words[tolerance]] for tolerance in TOLERANCES]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row['found by'] or 'MISSED'} |")
    return "\n".join(lines) + "\n"


def summary(rows: dict[str, dict[str, object]]) -> dict[str, dict[str, int]]:
    """How many mutants each tolerance lets pass, catches, and never sees."""
    words = [row["tolerances"] for row in rows.values()]
    return {
        tolerance: {word: sum(isinstance(one, dict) and one[tolerance] == word for one in words) for word in CELLS}
        for tolerance in TOLERANCES
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS / "mutants.json")
    parser.add_argument("--markdown", type=Path, default=RESULTS / "mutants.md")
    parser.add_argument("--examples", type=int, default=100)
    arguments = parser.parse_args()
    every = list(products())
    right = [product.run(fp8ref.emulate_matmul) for product in every]
    usable = {
        name: [accept(y.float(), p.reference()) for p, y in zip(every, right, strict=True)]
        for name, accept in TOLERANCES.items()
    }
    check_matmul(fp8ref.emulate_matmul, examples=arguments.examples, quiet=True)
    rows = {}
    for mutant, again in zip(mutants(fp8ref.emulate_matmul), mutants(fp8ref.emulate_matmul), strict=True):
        rows[mutant.name] = judge(mutant, right, every, usable)
        rows[mutant.name]["found by"], rows[mutant.name]["after cases"] = found_by(again, arguments.examples)
        print(f"{mutant.name}: found by {rows[mutant.name]['found by'] or 'NOTHING'}", flush=True)
    table = markdown(rows)
    arguments.markdown.write_text(table)
    environment = {"python": platform.python_version(), "torch": torch.__version__, "products": len(every)}
    accepted = {name: sum(ok) for name, ok in usable.items()}
    found = {"environment": environment, "right results accepted": accepted, "summary": summary(rows), "mutants": rows}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table, json.dumps(found["summary"], indent=1), accepted)


if __name__ == "__main__":
    main()
