"""Small wrong edits of `cuda/`; the tests of the kernels must fail for each of them.

python tests/host/faults.py [NAME ...]      prints a table: fault, first test that fails
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from host.edits import EDITS  # noqa: E402

# The quickest first: a run stops at the first test that fails.
SUITE = (
    "tests/host/test_edges.py",
    "tests/host/test_early.py",
    "tests/host/test_forms.py",
    "tests/test_tickets.py",
    "tests/test_two_kernels.py",
    "tests/test_kernels.py",
    "tests/test_conversions.py",
    "tests/test_stochastic.py",
    "tests/test_varlen.py",
    "tests/test_eight_bit.py",
    "tests/test_copied.py",
    "tests/test_checked.py",
    "tests/host/test_histories.py",
)

# The first of two kernels is seen here at once.
TWO_KERNEL_SUITE = ("tests/host/test_early.py", "tests/test_two_kernels.py")
TWO_KERNEL_FILES = ("precompute.cu", "prepare.cuh")

# The kernels of whole slots and the checks have tests of their own.
SNAPSHOT_SUITE = (
    "tests/test_checked.py", "tests/test_snapshots.py", "tests/test_snapshot_errors.py",
    "tests/test_slot_images.py", "tests/test_slot_use.py", "tests/test_prefix.py",
)  # fmt: skip
POSITION_SUITE = ("tests/test_vllm_cache.py",)
SNAPSHOT_FILES = ("materialize.cu", "plan_materialize.cu", "copy_slots.cu", "check.cu")
# States with a read copy have tests of their own, too.
COPY_SUITE = ("tests/test_copied.py", "tests/test_conversions.py")
COPY_FILES = ("copied.cuh", "read_copy.cuh")


@dataclass(frozen=True)
class Fault:
    """`old`, which occurs once in `file`, becomes `new`."""

    file: str
    name: str
    old: str
    new: str

    def apply(self, folder: pathlib.Path) -> None:
        path = folder / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new))


FAULTS = tuple(Fault(file, *edit) for file, edits in EDITS.items() for edit in edits)


def suite_of(fault: Fault) -> tuple[str, ...]:
    """The tests that may see a fault, the likeliest first."""
    if fault.file == "positions.cu":
        return POSITION_SUITE
    if fault.file in COPY_FILES or fault.name.startswith("copied:"):
        return COPY_SUITE + POSITION_SUITE
    if fault.file == "fold.cuh":  # steps and snapshots share it
        return SUITE[:3] + SNAPSHOT_SUITE
    if fault.file in TWO_KERNEL_FILES:
        return TWO_KERNEL_SUITE + SUITE
    return SNAPSHOT_SUITE if fault.file in SNAPSHOT_FILES else SUITE + SNAPSHOT_SUITE


def first_failure(fault: Fault) -> str | None:
    """The first test that fails with the fault, or None if it survives."""
    with tempfile.TemporaryDirectory() as folder:
        sources = pathlib.Path(folder) / "cuda"
        shutil.copytree(ROOT / "cuda", sources)
        fault.apply(sources)
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-xvk",
                "not cuda",
                "-p",
                "no:cacheprovider",
                *suite_of(fault),
            ],
            cwd=ROOT,
            env=dict(os.environ, REPLAYSSM_HOST_SOURCES=str(sources)),
            capture_output=True,
            text=True,
        )
    if run.returncode == 0:
        return None
    if "host.builder.BuildError" in run.stdout:
        raise ValueError(f"{fault.name} does not compile: {run.stdout[-3000:]}")
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", run.stdout, re.M)
    if failed:
        return failed[1]
    started = re.findall(r"^(\S+::.+?)(?: [A-Z]+ .*)?$", run.stdout, re.M)
    if not started:
        raise ValueError(f"the tests do not run: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return f"{started[-1]} (the process died)"


def main(names: list[str]) -> int:
    """Print the table; 1 if a fault survives."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    survivors = 0
    print("| fault | first test that fails |\n| --- | --- |")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process of its own
        for fault, test in zip(chosen, pool.map(first_failure, chosen), strict=True):
            survivors += test is None
            print(f"| {fault.name} | {test or '**none**'} |", flush=True)
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
