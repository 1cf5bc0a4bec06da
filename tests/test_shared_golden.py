"""Public hardware vectors (Ada, H100, B200), where they are present: the oracle and the reference return their bits.

Each row of a file is one instruction of K = 32. They come from the MATLAB-tensor-core project (F. A. Khattak and
M. Mikaitis); FP8REF_GOLDEN names their folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fp8ref
from fp8ref.emulation.units import UNITS
from reference import exact
from reference.tensors import bits_of, vector

# h100 is wgmma with c taken as 0, whatever its file says; the two others are mma.sync with c.
UNIT_OF_FILE = {"ada": "sm89", "h100": "sm90", "b200": "sm90_mma_sync"}
ROWS = 5000
SAMPLED = 300
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FILES = [(device, name) for device in UNIT_OF_FILE for name in DTYPES]


def rows_of(folder: Path, device: str, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The a and b (fp8 [5000, 32]), c and recorded results (fp32 [5000]) of a file."""
    stored = load_file(folder / f"{device}_{name}.safetensors")
    a, b = (stored[key].view(DTYPES[name]) for key in ("a", "b"))
    assert a.shape == b.shape == (ROWS, 32)
    c = torch.zeros(ROWS) if device == "h100" else stored["c"]
    return a, b, c, stored["d_f32"]


@pytest.mark.parametrize(("device", "name"), FILES)
def test_fused_dot_add_returns_the_recorded_bits(shared_golden: Path, device: str, name: str) -> None:
    a, b, c, recorded = rows_of(shared_golden, device, name)
    result = fp8ref.fused_dot_add(a, b, c, UNIT_OF_FILE[device])
    different = bits_of(result) != bits_of(recorded)
    assert not different.any(), f"{int(different.sum())} of {ROWS} rows differ, first {int(different.int().argmax())}"


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_accumulate_returns_the_recorded_bits(shared_golden: Path, name: str, use_fast_accum: bool) -> None:
    """The file with c = 0 is a matrix product of K = 32: its rows are on the diagonal of a @ b.T."""
    a, b, _, recorded = rows_of(shared_golden, "h100", name)
    found = []
    for start in range(0, ROWS, 250):
        rows = slice(start, start + 250)
        found.append(fp8ref.accumulate(a[rows], b[rows].t(), use_fast_accum=use_fast_accum, unit="sm90").diagonal())
    assert torch.equal(bits_of(torch.cat(found)), bits_of(recorded))


@pytest.mark.parametrize(("device", "name"), FILES)
def test_the_reference_returns_the_recorded_bits(shared_golden: Path, device: str, name: str) -> None:
    a, b, c, recorded = rows_of(shared_golden, device, name)
    mode = exact.Mode(UNITS[UNIT_OF_FILE[device]], use_fast_accum=True)
    for row in range(0, ROWS, ROWS // SAMPLED):
        result = exact.accumulate(vector(a[row]), vector(b[row]), mode, c=int(bits_of(c[row])))
        assert result == bits_of(recorded[row]), f"row {row}: {result:#x}, recorded {int(bits_of(recorded[row])):#x}"
