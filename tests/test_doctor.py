"""The doctor reports and never raises, whatever is broken around it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replayssm_cupy import doctor

ROOT = Path(__file__).parents[1]


def run_json(**environment: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """The doctor in a process of its own: exit status, report, checks by name."""
    path = os.pathsep.join([environment.pop("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
    code = "import sys; from replayssm_cupy import doctor; sys.exit(doctor.run(as_json=True))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    return done.returncode, report, {check["name"]: check for check in report["checks"]}


def test_json_report() -> None:
    status, report, checks = run_json()
    assert status == 0 and report["cpu"]
    for check in report["checks"]:
        assert set(check) == {"name", "status", "found", "mend"}
        assert check["status"] in ("ok", "missing", "wrong") and check["found"]
    for name in ("replayssm_cupy", "Python", "numpy", "ml_dtypes", "CPU path"):
        assert checks[name]["status"] == "ok", checks[name]
    assert importlib.metadata.version("numpy") == checks["numpy"]["found"]
    for name in ("driver", "cache folder", "CuPy", "NVRTC", "CUDA headers", "torch", "jax"):
        assert name in checks
    tools = [checks[name]["status"] for name in ("CuPy", "NVRTC", "CUDA headers")]
    if tools == ["ok"] * 3:
        assert checks["test compile"]["status"] == "ok", checks["test compile"]
        assert "selective_state_update<bf16, bf16, 128> for sm_" in checks["test compile"]["found"]


def test_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_cupy", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok      replayssm_cupy")
    assert lines[-1].startswith("NumPy arrays on the CPU: work.")


def test_cupy_that_cannot_be_imported(tmp_path: Path) -> None:
    broken = tmp_path / "cupy"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudart is gone')\n")
    status, report, checks = run_json(PYTHONPATH=str(tmp_path))
    assert status == 0 and report["cpu"] and not report["cuda"]
    assert checks["CuPy"]["status"] == "wrong" and "libcudart is gone" in checks["CuPy"]["found"]
    assert "pip install" in checks["CuPy"]["mend"]
    assert checks["test compile"]["status"] == "wrong"


def test_home_that_cannot_be_written() -> None:
    # A folder below a device file cannot be made, not even by root.
    status, report, checks = run_json(HOME="/dev/null/home", CUPY_CACHE_DIR="/dev/null/cache")
    assert status == 0 and report["cpu"]
    if "not made yet" not in checks["cache folder"]["found"]:
        assert checks["cache folder"]["status"] == "wrong"
        assert checks["cache folder"]["mend"] == "export CUPY_CACHE_DIR=/tmp/cupy"
        assert checks["CuPy"]["status"] == "wrong"


def test_nothing_but_numpy_and_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, package: str | None = None) -> None:
        return None

    real_import = doctor.importlib.import_module

    def import_module(name: str) -> Any:
        if name.split(".")[0] in ("cupy", "cuda", "torch", "jax"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name)

    real_version = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "jax"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(doctor.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "_driver_cuda", lambda: (12, 8))
    checks = {check.name: check for check in doctor.report()}
    assert checks["CuPy"].status == "missing"
    assert checks["CuPy"].mend == 'pip install "replayssm_cupy[cuda12]"'
    for name in ("NVRTC", "CUDA headers"):
        assert checks[name].status == "missing"
        assert checks[name].mend == 'pip install "cuda-toolkit[nvrtc,cudart]>=12.1,<13"'
    assert checks["test compile"].status == "missing"
    assert (checks["torch"].status, checks["jax"].status) == ("missing", "missing")
    assert checks["CPU path"].status == "ok", checks["CPU path"]


@pytest.mark.parametrize(
    ("wheels", "driver", "status", "words"),
    [
        ({"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}, None, "wrong", "two wheels"),
        ({"cupy-cuda12x": "13.6.0"}, None, "wrong", "expected 14.2 or newer"),
        ({"cupy-cuda13x": "14.2.0"}, (12, 9), "wrong", "the driver runs CUDA 12"),
    ],
)
def test_unfit_wheels(
    monkeypatch: pytest.MonkeyPatch,
    wheels: dict[str, str],
    driver: tuple[int, int] | None,
    status: str,
    words: str,
) -> None:
    monkeypatch.setattr(doctor, "_wheels", lambda: wheels)
    monkeypatch.setattr(doctor, "_driver_cuda", lambda: driver)
    got, found, mend = doctor._cupy()
    assert got == status and words in found and mend.startswith("pip ")


@pytest.mark.parametrize(("cuda", "status"), [((12, 0), "wrong"), ((12, 1), "ok")])
def test_the_oldest_driver(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int], status: str
) -> None:
    """CUDA 12.0 has no records over 4 KiB."""
    monkeypatch.setattr(doctor, "_driver_cuda", lambda: cuda)
    got, _, mend = doctor._driver()
    assert got == status and ("530 or newer" in mend) == (status == "wrong")


@pytest.mark.parametrize(("minor", "status"), [(0, "wrong"), (1, "ok")])
def test_the_oldest_nvrtc(monkeypatch: pytest.MonkeyPatch, minor: int, status: str) -> None:
    class Library:
        abs_path = "libnvrtc.so.12"

        def nvrtcVersion(self, major_at: Any, minor_at: Any) -> None:  # noqa: N802
            major_at._obj.value, minor_at._obj.value = 12, minor

    class Pathfinder:
        def load_nvidia_dynamic_lib(self, name: str) -> Library:
            return Library()

    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: Pathfinder())
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda path: Library())
    monkeypatch.setattr(doctor, "_driver_cuda", lambda: (12, 8))
    got, found, mend = doctor._nvrtc()
    assert got == status and f"12.{minor} in libnvrtc.so.12" in found
    assert mend == ("" if minor else 'pip install "cuda-toolkit[nvrtc,cudart]>=12.1,<13"')


def test_every_gpu_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: [("GPU A", (9, 0)), ("GPU B", (7, 5))])
    checks = {check.name: check for check in doctor.report()}
    assert checks["GPU 0"] == doctor.Check(
        "GPU 0", "ok", "GPU A, compute capability 9.0, target sm_90"
    )
    assert checks["GPU 1"].status == "wrong" and "8.0 or newer" in checks["GPU 1"].mend
    assert {"kernel on GPU 0", "kernel on GPU 1"} <= set(checks)


def test_a_failing_check_is_a_line() -> None:
    def fails() -> Any:
        raise OSError("the disk is on fire")

    assert doctor._guarded("disk", fails) == doctor.Check(
        "disk", "wrong", "OSError: the disk is on fire"
    )


@pytest.mark.parametrize("error", [float("nan"), 1e-3])
def test_wrong_numbers_are_wrong(error: float) -> None:
    assert doctor._judge(error)[0] == "wrong"


def test_exit_status_follows_the_cpu_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise RuntimeError("no reference")

    monkeypatch.setattr(doctor, "_cpu_path", broken)
    assert doctor.run(as_json=False) == 1
    assert "wrong   CPU path" in capsys.readouterr().out
