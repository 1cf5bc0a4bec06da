"""The form of a recording: one safetensors file of bits, its cases and its environment as JSON in the metadata.

A case says where its operands lie in ``operands.safetensors``, how the product was called, and under which name
its output's bits are stored. A tensor that several cases share is stored once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Case:
    """One recorded product: ``a`` [m, k] times ``b`` [n, k] transposed, from the operand pools' first rows and k."""

    group: str
    via: str
    """``_scaled_mm``, ``scaled_mm``, ``tl.dot`` or ``mma.sync``."""
    a: str
    """The pool of a, ``<kind>/<format>``; its first ``m`` rows and ``k`` columns are the operand."""
    b: str
    m: int
    n: int
    k: int
    out_dtype: str
    out: str
    """Name of the stored output bits, [m, n]."""
    fast: bool = False
    shape: tuple[int, int] | None = None
    """M and N of the product that ran, where only the m rows and n columns of it were kept."""
    scaling: tuple[str, str] | None = None
    scale_a: str | None = None
    scale_b: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    c: str | None = None
    split_k: int = 1
    part_tiles: int | None = None
    """Tiles of 128 in a part of K, where K was cut."""
    workspace: str = "default"
    unit: str = "sm90"
    promote: int | None = None
    """``tl.dot`` only: k between two promotions to an fp32 total; None carries one accumulator over all of K."""
    note: str = ""
    instructions: tuple[str, ...] = ()
    """The matrix instructions found in the compiled kernel."""

    @property
    def label(self) -> str:
        """A short description for test output."""
        mode = "fast" if self.fast else "accurate"
        return (
            f"{self.group} {self.via} {self.a}x{self.b} {self.m}x{self.n}x{self.k} {self.out_dtype} {mode} {self.note}"
        )


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same width, on the CPU."""
    return x.detach().cpu().contiguous().view(_BITS[x.element_size()])


@dataclass
class Recording:
    """Cases with their tensors; ``findings`` lists calls that were turned down, or accepted in a way worth stating."""

    cases: list[Case] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def put(self, x: torch.Tensor) -> str:
        """Keep the bits of ``x`` and return their name; equal contents are kept once."""
        bits = bits_of(x)
        key = f"{NAMES[x.dtype]}{list(x.shape)}".encode()
        name = hashlib.sha256(key + bits.numpy().tobytes()).hexdigest()[:12]
        self.tensors[name] = bits
        return name

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The stored tensor ``name``, as ``dtype``."""
        return self.tensors[name].view(dtype)

    def save(self, path: Path) -> None:
        """Write the recording as one safetensors file."""
        defaults = {k: f.default for k, f in Case.__dataclass_fields__.items()}
        cases = [{k: v for k, v in asdict(case).items() if v != defaults[k]} for case in self.cases]
        metadata = {"cases": json.dumps(cases), "findings": json.dumps(self.findings)}
        save_file(self.tensors, str(path), metadata | {"environment": json.dumps(self.environment)})


def load(path: Path) -> Recording:
    """Read a recording written by :meth:`Recording.save`."""
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    cases = []
    for fields in json.loads(metadata["cases"]):
        for name in ("shape", "scaling", "instructions"):
            if name in fields:
                fields[name] = tuple(fields[name])
        cases.append(Case(**fields))
    return Recording(cases, json.loads(metadata["findings"]), tensors, json.loads(metadata["environment"]))
