"""Without the extra: the package works, and the kit says what to install."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hypothesis", "pytest"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("hypothesis", "pytest") else real(name, *more)
import fp8ref
assert not {"hypothesis", "pytest", "fp8ref.testing"} & set(sys.modules)
try:
    import fp8ref.testing
except ImportError as error:
    print(error)
"""


def test_the_kit_names_its_extra() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == "fp8ref.testing needs hypothesis and pytest: pip install 'fp8ref[testing]'\n", done.stderr
