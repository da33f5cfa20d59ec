"""From a key to a kernel. The only file that compiles or opens ``cuda/``.

On a GPU the sources go through :class:`cupy.RawModule`, whose disk cache sees the source text and
the options but not the headers; a digest of all of ``cuda/`` among the options makes up for that.
Without a GPU, :func:`compile_cubin` runs NVRTC alone, for the tests and the ``kernels`` command.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import ReplaySSMError
from .keys import CheckpointingSsuKey, Key, Layout, LayoutKey

_PACKAGE = pathlib.Path(__file__).resolve().parent
CUDA_DIR = next((d for d in (_PACKAGE / "cuda", _PACKAGE.parent / "cuda") if d.is_dir()), _PACKAGE)
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
# Devices whose stochastic rounding in hardware exists in the "a" variant of their target only.
STOCHASTIC_CVT = ("100", "103")
_INSTALL = 'pip install "replayssm_cupy[cuda13]" (or [cuda12] for a CUDA 12 driver)'

_functions: dict[tuple[Key, int], int] = {}


@functools.cache
def source_digest() -> str:
    """A digest of every file in ``cuda/``: the version of the kernels."""
    digest = hashlib.sha256()
    for path in sorted(CUDA_DIR.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def target(capability: str) -> str:
    """The target for a device of this compute capability, as CuPy spells it: "90", "103"."""
    return f"sm_{capability}{'a' if capability in STOCHASTIC_CVT else ''}"


@functools.cache
def capability(device: int) -> int:
    """The compute capability of a device as its targets spell it: 90, 103."""
    return int(import_cupy().cuda.Device(device).compute_capability)


def _target_of(device: int) -> str:
    return target(import_cupy().cuda.Device(device).compute_capability)


def _options(known: str = "") -> tuple[str, ...]:
    options = "-std=c++17", f"-I{CUDA_DIR}", f"-DREPLAYSSM_SOURCES=0x{source_digest()}"
    return (*options, f"-DREPLAYSSM_KNOWN={known}") if known else options


def _known(key: Key) -> str:
    return key.definition if isinstance(key, LayoutKey) else ""


def _source(key: Key) -> str:
    return (CUDA_DIR / key.source).read_text()


def import_cupy() -> Any:
    """CuPy, or one line that says what is missing and the command that brings it."""
    if importlib.util.find_spec("cupy") is None:
        raise ReplaySSMError(f"CuPy is missing, and CUDA arrays need it: {_INSTALL}")
    try:
        import cupy
    except Exception as error:
        reason = ([line for line in str(error).splitlines() if line.strip("= ")] or ["?"])[-1]
        raise ReplaySSMError(f"CuPy cannot be imported ({reason.strip()}): {_INSTALL}") from error
    return cupy


def gpu_count() -> int:
    """How many GPUs CuPy can use; 0 without CuPy or a driver."""
    try:
        return int(import_cupy().cuda.runtime.getDeviceCount())
    except Exception:
        return 0


def require_gpu(index: int) -> None:
    """Raises :class:`ReplaySSMError` in one line unless there is a GPU of this ordinal."""
    cupy = import_cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        raise ReplaySSMError(
            f"no NVIDIA driver or GPU ({error}): NumPy arrays run on the CPU path"
        ) from error
    if index >= count:
        raise ReplaySSMError(f"device: expected a GPU ordinal below {count}, got {index}")


def function(key: Key, device: int, stream: int) -> int:
    """The ``CUfunction`` of ``key`` on ``device``, which is the current one.

    Compiled or loaded at the first call. That cannot happen while ``stream`` is being captured
    into a CUDA graph: it is a :class:`ReplaySSMError` then, which names :func:`warm_up`.
    """
    found = _functions.get((key, device))
    if found is None:
        if stream and import_cupy().cuda.runtime.streamIsCapturing(stream):
            raise ReplaySSMError(
                f"{key.name_expression} is not compiled yet, and its stream is being captured into "
                "a CUDA graph: call warm_up(...) or the function once before the capture"
            )
        load([key], device)
        found = _functions[key, device]
    return found


def function_for(key: Key, layout: Layout | None, device: int, stream: int) -> int:
    """The ``CUfunction`` for arrays of this layout, if :func:`load` has one, or that of ``key``."""
    if layout is not None and isinstance(key, CheckpointingSsuKey):
        found = _functions.get((LayoutKey(key, layout), device))
        if found is not None:
            return found
    return function(key, device, stream)


def load(keys: Iterable[Key], device: int) -> None:
    """Compiles and loads ``keys`` on ``device``, the current one.

    A program has what one source file gives for one layout.
    """
    missing: dict[tuple[str, str], list[Key]] = defaultdict(list)
    for key in keys:
        if (key, device) not in _functions:
            missing[key.source, _known(key)].append(key)
    if not missing:
        return
    cupy = import_cupy()
    for (_, known), group in missing.items():
        names = [key.name_expression for key in group]
        try:
            arch = _target_of(device)
            options = _options(known)
            if arch[-1] == "a":  # CuPy chooses the plain target itself and keeps a suffix
                options = *options, f"-arch={arch}"
            module = cupy.RawModule(code=_source(group[0]), options=options, name_expressions=names)
            kernels = [module.get_function(name) for name in names]
            for key, kernel in zip(group, kernels, strict=True):
                _functions[key, device] = int(kernel.kernel.ptr)
        except Exception as error:
            raise ReplaySSMError(_explain(error, names)) from error
        _modules.append(module)


def allow_shared_bytes(handle: int, size: int) -> None:
    """Lets the kernel behind `handle` take up to `size` bytes of dynamic shared memory a block."""
    if _shared_bytes.get(handle, 0) < size:
        import_cupy().cuda.driver.funcSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE, size)
        _shared_bytes[handle] = size


_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_shared_bytes: dict[int, int] = {}
_modules: list[Any] = []  # a CUfunction lives as long as its module


def _explain(error: Exception, names: list[str]) -> str:
    text = str(error)
    if "nvrtc" in text.lower() and ("not found" in text.lower() or "load" in text.lower()):
        return f"NVRTC is missing ({text}): {_INSTALL}"
    if "cuda_bf16.h" in text or "CUDA include" in text or "[ctk]" in text:
        return f"the CUDA headers are missing ({text.splitlines()[0]}): {_INSTALL}"
    if "Insufficient" in text or "no CUDA-capable device" in text:
        return f"no NVIDIA driver or GPU ({text.splitlines()[0]}): NumPy arrays run on the CPU path"
    log = error.get_message() if hasattr(error, "get_message") else text
    return f"compiling {', '.join(names)} with {' '.join(_options())} failed:\n{log}"


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of one instance: registers a thread, and bytes."""

    kernel: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int


def compile_cubin(keys: list[Key], arch: str, *more_options: str) -> tuple[bytes, list[Resources]]:
    """Compiles instances of one source file and layout for ``arch`` (``"sm_90"``), without a GPU.

    ``more_options`` go to NVRTC behind the library's own. Raises :class:`ReplaySSMError` with the
    name expressions, options and NVRTC's log.
    """
    import_cupy()
    try:
        from cuda.pathfinder import find_nvidia_header_directory
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise ReplaySSMError(f"NVRTC is missing ({error}): {_INSTALL}") from error
    headers = find_nvidia_header_directory("cudart")
    if headers is None:
        raise ReplaySSMError(f"the CUDA headers are missing: {_INSTALL}")
    names = [key.name_expression for key in keys]
    of_target = (f"-arch={arch}", f"-I{headers}", "-Xptxas=-v", *more_options)
    options = (*_options(_known(keys[0])), "-ftz=true", *of_target)
    try:
        program = nvrtc.createProgram(_source(keys[0]), keys[0].source, (), ())
    except Exception as error:
        raise ReplaySSMError(f"NVRTC is missing ({error}): {_INSTALL}") from error
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, options)
        except Exception as error:
            log = nvrtc.getProgramLog(program)
            raise ReplaySSMError(
                f"compiling {', '.join(names)} with {' '.join(options)} failed:\n{log}"
            ) from error
        lowered = {nvrtc.getLoweredName(program, name): name for name in names}
        log = nvrtc.getProgramLog(program)
        # CuPy takes the image for a string and cuts its last byte, which is a zero.
        return nvrtc.getCUBIN(program) + b"\0", _parse_log(log, lowered)
    finally:
        nvrtc.destroyProgram(program)


def _parse_log(log: str, lowered: dict[str, str]) -> list[Resources]:
    found = []
    for part in log.split("Compiling entry function")[1:]:
        symbol = re.search(r"'(\w+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        if symbol is None or registers is None:
            continue
        shared = re.search(r"(\d+) bytes smem", part)
        stack = re.search(r"(\d+) bytes stack frame", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        found.append(
            Resources(
                kernel=lowered.get(symbol[1], symbol[1]),
                registers=int(registers[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
                stack_bytes=int(stack[1]) if stack else 0,
            )
        )
    return found


def by_source(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Keys grouped by their source file: what one NVRTC program takes."""
    groups: dict[str, list[Key]] = defaultdict(list)
    for key in keys:
        groups[key.source].append(key)
    return dict(groups)
