"""``python -m replayssm_cupy doctor``: what this machine has, what it lacks, what mends it.

Every check is guarded: a broken CuPy, driver or cache folder becomes a line, never an exception.
Nothing but the standard library is imported until a check needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

Status = Literal["ok", "missing", "wrong"]

_OLDEST_CUPY = (14, 2)
_OLDEST_CUDA = (12, 1)  # records over 4 KiB, in drivers from 530 on
_OLDEST_GPU = (8, 0)
_HARD = 'pip install "numpy>=2.1.2" ml_dtypes'
_CPU_PATH = "CPU path"
_KERNEL = "kernel on GPU"
_MAJOR_ATTRIBUTE, _MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class Check:
    """One line of the report: `mend` is the command (or deed) that mends it, or empty."""

    name: str
    status: Status
    found: str
    mend: str = ""


def report() -> list[Check]:
    """Run every check, in the order in which they are printed. Never raises."""
    return list(_every_check())


def run(as_json: bool) -> int:
    """Print the report as text or as JSON; 1 if not even the CPU path works, else 0."""
    checks = report()
    cpu = any(check.name == _CPU_PATH and check.status == "ok" for check in checks)
    kernels = [check for check in checks if check.name.startswith(_KERNEL)]
    cuda = any(check.status == "ok" for check in kernels)
    if as_json:
        print(
            json.dumps({"cpu": cpu, "cuda": cuda, "checks": [asdict(c) for c in checks]}, indent=1)
        )
        return 0 if cpu else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:8}{check.name:{width}}  {check.found.partition(chr(10))[0]}")
        if check.mend:
            print(f"{'':{10 + width}}-> {check.mend}")
    print(f"\nNumPy arrays on the CPU: {'work' if cpu else 'do not work'}.", end=" ")
    print(f"Arrays on a GPU: {'work' if cuda else 'do not work here'}.")
    return 0 if cpu else 1


def _every_check() -> Iterator[Check]:
    yield _guarded("replayssm_cupy", _library)
    yield Check("Python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in ("numpy", "ml_dtypes"):
        yield _guarded(name, partial(_package, name))
    yield _guarded(_CPU_PATH, _cpu_path)
    yield _guarded("driver", _driver)
    gpus: list[tuple[str, tuple[int, int]]] = []
    with contextlib.suppress(Exception):
        gpus = _gpus()
    if not gpus:
        yield Check("GPU", "missing", "no CUDA device; NumPy arrays run on the CPU")
    for index, (name, capability) in enumerate(gpus):
        yield _gpu(index, name, capability)
    yield _guarded("cache folder", _cache_folder)
    yield _guarded("CuPy", _cupy)
    yield _guarded("NVRTC", _nvrtc)
    yield _guarded("CUDA headers", _headers)
    target = "sm_{}{}".format(*gpus[0][1]) if gpus else "sm_90"
    yield _guarded("test compile", partial(_test_compile, target))
    for index in range(len(gpus)):
        yield _guarded(f"{_KERNEL} {index}", partial(_kernel, index))
    yield _guarded("torch", _torch)
    yield _guarded("jax", _jax)


def _guarded(name: str, check: Callable[[], tuple[Status, str, str]]) -> Check:
    try:
        return Check(name, *check())
    except Exception as error:  # whatever is broken here is what to report
        return Check(name, "wrong", f"{type(error).__name__}: {error}")


# The library itself


def _library() -> tuple[Status, str, str]:
    version = _version("replayssm_cupy") or "not installed, a checkout"
    compiler: Any = importlib.import_module("replayssm_cupy.compiler")
    if not any(compiler.CUDA_DIR.glob("*.cu")):
        mend = "pip install --force-reinstall --no-deps replayssm_cupy"
        return "wrong", f"{version}; no kernel sources in {compiler.CUDA_DIR}", mend
    return "ok", f"{version}; kernels {compiler.source_digest()} in {compiler.CUDA_DIR}", ""


def _package(name: str) -> tuple[Status, str, str]:
    version = _version(name)
    return ("ok", version, "") if version else ("missing", "not installed", _HARD)


def _cpu_path() -> tuple[Status, str, str]:
    return _judge(_update(importlib.import_module("numpy")))


def _kernel(index: int) -> tuple[Status, str, str]:
    cupy: Any = importlib.import_module("replayssm_cupy.compiler").import_cupy()
    with cupy.cuda.Device(index):
        return _judge(_update(cupy))


def _judge(error: float) -> tuple[Status, str, str]:
    status: Status = "ok" if error < 1e-5 else "wrong"  # NaN is wrong
    return status, f"selective_state_update differs from float64 by {error:.1e}", ""


def _update(xp: Any) -> float:
    """Run one plain update on arrays of `xp`; the relative L2 error of its output and state."""
    np: Any = importlib.import_module("numpy")
    random = np.random.default_rng(0)
    batch, nheads, head_dim, dstate = 3, 4, 64, 128
    state = random.standard_normal((batch, nheads, head_dim, dstate))
    x = random.standard_normal((batch, nheads, head_dim))
    dt = random.standard_normal((batch, nheads))
    A = -random.uniform(0.5, 4, nheads)
    B, C = random.standard_normal((2, batch, 1, dstate))
    D = random.standard_normal(nheads)
    inputs = [array.astype(np.float32) for array in (state, x, dt, A, B, C, D)]
    given = [xp.array(array) for array in inputs]  # a copy: the update changes the state

    update = importlib.import_module("replayssm_cupy").selective_state_update
    out = update(*given, dt_softplus=True)
    to_host = getattr(xp, "asnumpy", np.asarray)
    got = [to_host(out), to_host(given[0])]

    state, x, dt, A, B, C, D = (array.astype(np.float64) for array in inputs)
    dt = np.log1p(np.exp(dt))
    decay = np.exp(dt * A)[..., None, None]
    state = decay * state + (dt[..., None] * x)[..., None] * B[:, :, None, :]
    exact = [np.einsum("bhpn,bn->bhp", state, C[:, 0]) + D[:, None] * x, state]
    errors = [np.linalg.norm(g - e) / np.linalg.norm(e) for g, e in zip(got, exact, strict=True)]
    return float(np.max(errors))  # NaN if any is


# Driver and GPUs, through libcuda alone


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver runs, or None without a driver."""
    version = ctypes.c_int()
    try:
        _libcuda().cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def _driver() -> tuple[Status, str, str]:
    mend = "install an NVIDIA driver: 530 or newer for [cuda12], 580 or newer for [cuda13]"
    cuda = _driver_cuda()
    if cuda is None:
        return "missing", "no NVIDIA driver (libcuda); NumPy arrays run on the CPU", mend
    number = pathlib.Path("/sys/module/nvidia/version")
    name = number.read_text().strip() if number.is_file() else "NVIDIA driver"
    status: Status = "ok" if cuda >= _OLDEST_CUDA else "wrong"
    return (status, f"{name}, for CUDA up to {cuda[0]}.{cuda[1]}", "" if status == "ok" else mend)


def _gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of every GPU. Raises OSError without a driver."""
    cuda = _libcuda()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        device, value, name = (ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128))
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in (_MAJOR_ATTRIBUTE, _MINOR_ATTRIBUTE):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.append((name.value.decode(), (capability[0], capability[1])))
    return found


def _gpu(index: int, name: str, capability: tuple[int, int]) -> Check:
    major, minor = capability
    found = f"{name}, compute capability {major}.{minor}, target sm_{major}{minor}"
    if capability >= _OLDEST_GPU:
        return Check(f"GPU {index}", "ok", found)
    return Check(f"GPU {index}", "wrong", found, "use a GPU of compute capability 8.0 or newer")


# CuPy, NVRTC and the headers


def _major() -> int:
    """The CUDA major version to install for: what the driver runs, else what is there already."""
    driver = _driver_cuda()
    wheels = [int(found[1]) for name in _wheels() if (found := re.search(r"cuda(\d+)", name))]
    major = driver[0] if driver else max(wheels, default=13)
    return 12 if major <= 12 else 13


def _install() -> str:
    return f'pip install "replayssm_cupy[cuda{_major()}]"'


def _toolkit() -> str:
    versions = {12: ">=12.1,<13", 13: "==13.*"}[_major()]  # as the extras have them
    return f'pip install "cuda-toolkit[nvrtc,cudart]{versions}"'


def _wheels() -> dict[str, str]:
    """Every installed distribution of CuPy and its version."""
    names = ((d.metadata["Name"] or "", d.version) for d in importlib.metadata.distributions())
    return {
        name.lower(): version
        for name, version in names
        if re.fullmatch(r"cupy(-(cuda|rocm).*)?", name.lower())
    }


def _cupy() -> tuple[Status, str, str]:
    wheels = _wheels()
    if not wheels and importlib.util.find_spec("cupy") is None:
        return "missing", "not installed; arrays on a GPU need it", _install()
    found = ", ".join(f"{name} {version}" for name, version in wheels.items()) or "cupy, no wheel"
    again = f"pip uninstall -y {' '.join(wheels)} && {_install()}"
    if len(wheels) > 1:
        return "wrong", f"{found}: two wheels overwrite each other", again
    for name, version in wheels.items():
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_CUPY:
            return "wrong", f"{found}, expected 14.2 or newer", f'pip install -U "{name}>=14.2"'
        driver = _driver_cuda()
        if driver and (major := re.search(r"cuda(\d+)", name)) and int(major[1]) > driver[0]:
            return "wrong", f"{found}, but the driver runs CUDA {driver[0]}", again
    try:
        importlib.import_module("cupy")
    except OSError as error:  # CuPy makes its cache folder when it is imported
        mend = "export CUPY_CACHE_DIR=/tmp/cupy"
        return "wrong", f"{found}, whose import fails: {type(error).__name__}: {error}", mend
    except Exception as error:  # an import may fail in any way
        mend = again if wheels else _install()
        return "wrong", f"{found}, whose import fails: {type(error).__name__}: {error}", mend
    return "ok", found, ""


def _cache_folder() -> tuple[Status, str, str]:
    """CuPy's cache of compiled kernels, which its import makes if need be."""
    default = os.path.expanduser("~/.cupy/kernel_cache")
    chosen = os.environ.get("CUPY_CACHE_DIR", default)
    if not chosen:
        return "wrong", "CUPY_CACHE_DIR is empty, and CuPy fails then", "unset CUPY_CACHE_DIR"
    folder = pathlib.Path(chosen)
    if not _wheels() and not folder.is_dir():
        return "ok", f"{folder}, not made yet", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        return "wrong", f"{folder} cannot be written: {error}", "export CUPY_CACHE_DIR=/tmp/cupy"
    return "ok", f"{folder}, {len(sizes)} entries, {sum(sizes) / 2**20:.1f} MiB", ""


def _nvrtc() -> tuple[Status, str, str]:
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError) as error:
        return "missing", f"not found: {error}", _toolkit()
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    found = f"{major.value}.{minor.value} in {path}"
    driver = _driver_cuda()
    if driver and major.value > driver[0]:
        return "wrong", f"{found}, but the driver runs CUDA {driver[0]}", _toolkit()
    if (major.value, minor.value) < _OLDEST_CUDA:
        return "wrong", f"{found}, expected 12.1 or newer", _toolkit()
    return "ok", found, ""


def _headers() -> tuple[Status, str, str]:
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        folder = pathfinder.find_nvidia_header_directory("cudart")
    except (ImportError, RuntimeError) as error:
        return "missing", f"not found: {error}", _toolkit()
    if folder is None or not (pathlib.Path(folder) / "cuda_bf16.h").is_file():
        return "missing", f"no cuda_bf16.h in {folder or 'any place known'}", _toolkit()
    return "ok", str(folder), ""


def _test_compile(arch: str) -> tuple[Status, str, str]:
    compiler: Any = importlib.import_module("replayssm_cupy.compiler")
    keys: Any = importlib.import_module("replayssm_cupy.keys")
    errors: Any = importlib.import_module("replayssm_cupy.errors")
    key = keys.SelectiveStateUpdateKey("bfloat16", "bfloat16", 128)
    start = time.perf_counter()
    try:
        cubin, _ = compiler.compile_cubin([key], arch)
    except errors.ReplaySSMError as error:  # its first line names the command that mends it
        return (
            "missing" if "missing" in str(error).partition("\n")[0] else "wrong",
            str(error),
            "",
        )
    milliseconds = 1e3 * (time.perf_counter() - start)
    return (
        "ok",
        f"{key.name_expression} for {arch}: {milliseconds:.0f} ms, {len(cubin)} bytes",
        "",
    )


# Frameworks, read from their files: importing them takes seconds


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[Status, str, str]:
    version = _version("torch")
    if version is None:
        return "missing", "not installed, optional", "pip install torch"
    spec = importlib.util.find_spec("torch")
    origin = pathlib.Path(spec.origin) if spec and spec.origin else pathlib.Path()
    path = origin.with_name("version.py") if origin.name else origin
    text = path.read_text() if path.is_file() else ""
    cuda = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return "ok", f"{version}, {f'for CUDA {cuda[1]}' if cuda else 'without CUDA'}", ""


def _jax() -> tuple[Status, str, str]:
    version = _version("jax")
    if version is None:
        return "missing", "not installed, optional", "pip install jax"
    majors = [major for major in (12, 13) if _version(f"jax-cuda{major}-plugin")]
    cuda = " and ".join(f"for CUDA {major}" for major in majors) or "without CUDA"
    return "ok", f"{version}, {cuda}", ""
