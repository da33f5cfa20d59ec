"""``examples/quickstart.ipynb`` runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_stored_without_outputs():
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)
    assert "%pip install" in "".join(CODE[0]["source"])


def test_runs(tmp_path):
    for name in ("nbconvert", "ipykernel", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = "-m nbconvert --to notebook --execute --ExecutePreprocessor.kernel_name=python3"
    paths = {"PYTHONPATH": str(EXAMPLES.parent), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command.split(), "--output-dir", tmp_path, EXAMPLES / "quickstart.ipynb"],
        capture_output=True, text=True, check=False, env=os.environ | paths, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ran = json.loads((tmp_path / "quickstart.ipynb").read_text())
    outputs = [output for cell in ran["cells"] for output in cell.get("outputs", ())]
    said = "".join("".join(output.get("text", ())) for output in outputs)
    assert "LayerStack(2 layers, 8 slots" in said
    assert "from the snapshot: [" in said
    assert any(len(output.get("data", {}).get("image/png", "")) > 20_000 for output in outputs)
