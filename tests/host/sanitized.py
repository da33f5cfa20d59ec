"""Runs Python with every emulated kernel built for a sanitizer.

python tests/host/sanitized.py asan|ubsan -m pytest tests/test_kernels.py
"""

from __future__ import annotations

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from host.builder import environment_of

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("asan", "ubsan"):
        sys.exit(__doc__)
    environment = environment_of(sys.argv[1])
    os.execve(sys.executable, [sys.executable, *sys.argv[2:]], environment)
