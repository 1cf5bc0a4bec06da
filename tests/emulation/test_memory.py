"""A product takes its operands, its output, and little more, whatever its shape."""

from __future__ import annotations

import json
import subprocess
import sys

MEASURE = """
import json, resource, sys
import torch, fp8ref
from fp8ref.emulation.scales import scale_shape

torch.set_num_threads(2)

def compute(m, n, k, unit, *pairs):
    a, b = (torch.full((rows, k), 56, dtype=torch.uint8).view(torch.float8_e4m3fn) for rows in (m, n))
    for pair in pairs:
        scales = [torch.ones(scale_shape(kind, rows, k)) for kind, rows in zip(pair, (m, n))]
        result = fp8ref.emulate_matmul(a, b.t(), scales[0], scales[1].t(), scaling=pair, bias=torch.ones(n), unit=unit)
        assert torch.all(result == k + 1), pair
        del result

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

tensor, row, block = ("tensor", "tensor"), ("row", "row"), ("1x128", "128x128")
compute(130, 520, 129, "sm90", tensor, row, block)
before = peak()
extra = {}
# Each with more operands and output than the one before, whose peak would hide its own.
for case in ((4096, 8192, 1, "sm90", block), (4096, 8193, 1, "sm90", row), (4096, 8194, 1, "sm90", tensor),
             (4096, 8195, 1, "exact", tensor), (1, 16384, 32768, "sm90", tensor)):
    m, n, k = case[:3]
    compute(*case)
    extra[str(case)] = peak() - before - (m * k + n * k + 2 * m * n) / 2**20
print(json.dumps(extra))
"""


def test_the_peak_is_that_of_operands_and_output() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for case, megabytes in json.loads(done.stdout).items():
        assert megabytes < 256, f"{case}: {megabytes} MB beside operands and output"
