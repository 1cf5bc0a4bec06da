"""Run the property-based tests on new random examples for as long as it is told; failures are kept and fail later runs.

``python scripts/fuzz.py MINUTES [pytest arguments]``. One process a core (8 at most) runs all of them in random order,
over and over; 0 minutes are one round each. The smallest failing example of a test goes to ``tests/fuzz_failures``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(os.environ.get("FP8REF_KEPT_FAILURES", ROOT / "tests" / "fuzz_failures"))
_GRACE = 60.0  # seconds that an interrupted pytest has to print its report


@dataclass
class Lane:
    """One process at a time, started anew when it ends."""

    arguments: list[str]
    rounds: int = 0
    failed: list[str] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _output: IO[str] | None = None

    def start(self) -> None:
        """Begin a round."""
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `finish`
        environment = {**os.environ, "HYPOTHESIS_PROFILE": "fuzz", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *self.arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._output, stderr=subprocess.STDOUT, text=True
        )

    def step(self, *, last: bool, interrupt: bool) -> bool:
        """Look after the process; return whether it is done for good."""
        assert self._process is not None
        interrupted = interrupt and self._process.poll() is None
        if interrupted:
            self._interrupt(self._process)
        if self._process.poll() is None:
            return False
        text = self._finish()
        strange = self._process.returncode not in (0, 1) and not interrupted
        if strange or self._process.returncode == 1 or "\nFAILED " in text:
            self.failed.append(text)
        if last or strange:  # whatever is strange would come again at once
            return True
        self.start()
        return False

    def _interrupt(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _finish(self) -> str:
        """End a round; return what it printed."""
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        self.rounds += 1
        return text


def kept() -> set[Path]:
    """The files of kept failures."""
    return {path for path in KEPT.rglob("*") if path.is_file() and path.suffix != ".md"}


def main(minutes: str, *arguments: str) -> str | None:
    """Fuzz; return what went wrong, if anything did."""
    try:
        seconds = 60 * float(minutes)
    except ValueError:
        return f"fuzz: got {minutes!r}; give a number of minutes"
    before, end = kept(), time.monotonic() + seconds
    lanes = [Lane(list(arguments)) for _ in range(min(8, os.cpu_count() or 1))]
    for lane in lanes:
        lane.start()
    waiting = list(lanes)
    while waiting:
        time.sleep(0.5)
        last = time.monotonic() >= end
        waiting = [lane for lane in waiting if not lane.step(last=last, interrupt=last and seconds > 0)]
    new = sorted(str(path.relative_to(KEPT)) for path in kept() - before)
    print(f"fuzz: {minutes} minutes, {sum(lane.rounds for lane in lanes)} rounds begun in {len(lanes)} processes")
    texts = [text for lane in lanes for text in lane.failed]
    if not texts:
        return None
    print("\n".join(texts))
    return f"fuzz: failures, see above; kept in {KEPT}: {len(new)} new files. Commit them with the correction."


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["5"])))
