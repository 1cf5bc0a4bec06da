"""Build the sdist, then the wheel from the sdist, and use the wheel where nothing but its core dependencies exists.

The environment is a new, empty venv. Into it goes the wheel, installed by pip, and a link to each package that the
wheel's metadata requires without extras, transitively; nothing else of the development environment can be reached.
So a module that the wheel lacks, a dependency that it does not declare, and an extra that the core needs all show.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
ENVIRONMENT = BUILD / "empty"

# Runs inside the environment, isolated (-I) and outside the repository.
SMOKE = """
import importlib, importlib.util, pkgutil, sys
import torch
import fp8ref
import fp8ref.emulation

assert fp8ref.__file__.startswith(sys.prefix), fp8ref.__file__
reachable = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
assert not reachable, f"not an empty environment: {reachable}"
names = [module.name for module in pkgutil.walk_packages(fp8ref.emulation.__path__, "fp8ref.emulation.")]
names = [name for name in names if not name.split(".")[-1].startswith("jit_")]  # what Triton compiles needs its extra
for name in names:
    importlib.import_module(name)
a = torch.ones(3, 130).to(torch.float8_e4m3fn)
b = torch.ones(130, 5).to(torch.float8_e4m3fn)
y = fp8ref.emulate_matmul(a, b, torch.tensor(0.5), torch.tensor(2.0), out_dtype=torch.float32)
assert torch.equal(y, torch.full((3, 5), 130.0)), y
try:
    import fp8ref.testing
except ImportError as error:
    assert "fp8ref[testing]" in str(error), error
else:
    raise AssertionError("fp8ref.testing was imported without its extra")
print(f"wheel: {len(names)} modules of fp8ref.emulation imported and a product computed, without any extra")
"""


def run(*command: str | Path, cwd: str | Path = ROOT, fails: bool = False) -> str:
    """Run a command and return what it printed; stop with that where it fails (or, with `fails`, where it does not)."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd)
    output = done.stdout + done.stderr
    if (done.returncode != 0) != fails:
        sys.exit(f"check_wheel: exit status {done.returncode} of {command[0]} {command[1]}\n{output}")
    return output


def build_wheel() -> Path:
    """Build the sdist from the repository and the wheel from the sdist; return the wheel."""
    shutil.rmtree(BUILD, ignore_errors=True)
    # Without isolation, so that the pinned build backend is used and nothing is fetched.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", BUILD / "dist", ROOT)
    (wheel,) = (BUILD / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Require the wheel to hold the files of the package byte for byte, and its licence."""
    expected = {
        str((Path(folder) / name).relative_to(ROOT)): (Path(folder) / name).read_bytes()
        for package in ("fp8ref", "pytest_fp8ref")
        for folder, _, names in os.walk(ROOT / package, followlinks=True)
        for name in names
        if Path(folder).name != "__pycache__"  # what Python and numba compiled does not belong into a wheel
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    metadata = {name for name in held if name.split("/")[0].endswith(".dist-info")}
    differing = {name for name in expected.keys() | held.keys() - metadata if expected.get(name) != held.get(name)}
    if differing:
        sys.exit(f"check_wheel: the wheel and the repository differ in {sorted(differing)}")
    if not any(name.endswith("/LICENSE") for name in metadata):
        sys.exit("check_wheel: the wheel has no LICENSE")


def requirements(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    """Return what a distribution requires here when none of its extras is asked for."""
    parsed = [Requirement(text) for text in distribution.requires or []]
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


def core_distributions(wheel: importlib.metadata.Distribution) -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions that the wheel needs without extras, transitively, by name."""
    core: dict[str, importlib.metadata.Distribution] = {}
    waiting = requirements(wheel)
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in core:
            core[name] = importlib.metadata.distribution(name)
            waiting += requirements(core[name])
    return core


def link(distribution: importlib.metadata.Distribution, site_packages: Path) -> None:
    """Make what a distribution installed reachable from another environment, under the same names."""
    # File by file: several distributions may share a folder, as those of CUDA do.
    for file in distribution.files or []:
        if ".." not in file.parts:
            place = site_packages / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(str(distribution.locate_file(file))))


def main() -> None:
    """Build, install, link, import, compute."""
    wheel = build_wheel()
    check_contents(wheel)
    run(sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT)
    python = ENVIRONMENT / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site_packages,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
    (installed,) = importlib.metadata.distributions(name="fp8ref", path=[str(site_packages)])
    core = core_distributions(installed)
    for distribution in core.values():
        link(distribution, site_packages)
    wanted = {Requirement(text).name for text in installed.requires or []}
    extras = sorted(name for name in wanted if canonicalize_name(name) not in core)
    with tempfile.TemporaryDirectory() as elsewhere:
        print(run(python, "-I", "-c", SMOKE, *extras, cwd=elsewhere), end="")
        message = run(ENVIRONMENT / "bin" / "fp8ref", "report", cwd=elsewhere, fails=True)
    if "fp8ref[report]" not in message:
        sys.exit(f"check_wheel: `fp8ref report` without its extra must name fp8ref[report], but said:\n{message}")
    print("wheel: built from the sdist, equal to the repository; `fp8ref report` names the extra that it needs")


if __name__ == "__main__":
    main()
