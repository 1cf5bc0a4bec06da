"""``import fp8ref`` and the oracle's answer need no Triton; a kernel without it says what to do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch, fp8ref
from fp8ref.kernels import device
from fp8ref.kernels.pack import pack_weight
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.explain import explain
w = pack_weight(torch.ones(3, 5))
print(scaled_linear(torch.ones(2, 5), w, backend="emulate").sum().item(), explain(w, 2).path)
device.importlib.util.find_spec = lambda name: None
device.capability_of = lambda device: (9, 0)
try:
    device.unit_of_device(torch.device("cuda", 0))
except ImportError as error:
    print(error)
"""


def test_import_pack_and_emulate_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "30.0 triton"
    assert "pip install triton" in second
    assert 'backend="emulate"' in second
