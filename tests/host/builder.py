"""Compiles a .cu file for the CPU: one shared object per (source, name expressions, flags)."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence

import numpy as np

EMU = pathlib.Path(__file__).resolve().parent / "emu"
BUILDS = {
    "plain": (),
    "debug": ("-O0", "-g"),
    "asan": ("-fno-omit-frame-pointer", "-fsanitize=address"),
    "ubsan": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
}
# No contraction: results do not depend on what the optimizer fuses. Locals start as a pattern.
# Each module keeps the emulator's globals to itself: no unique symbols, hidden visibility.
FLAGS = (
    *("-std=c++17", "-fPIC", "-O1", "-g1", "-march=x86-64-v3", "-ffp-contract=off"),
    *("-ftrivial-auto-var-init=pattern", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"),
    *("-fno-gnu-unique", "-fvisibility=hidden", "-DREPLAYSSM_HOST=1"),
)
ENTRY = """
#include "ptx_host.hpp"
static std::string g_message;
extern "C" __attribute__((visibility("default"))) const char* emu_launch(
    int kernel, const unsigned* grid, const unsigned* block, size_t shared_bytes,
    const void* record, size_t record_bytes, const emu::Options* options) {{
  const dim3 g(grid[0], grid[1], grid[2]), b(block[0], block[1], block[2]);
  emu::g_options = *options;
  try {{
    switch (kernel) {{
{cases}
    }}
  }} catch (const std::exception& error) {{
    g_message = error.what();
    return g_message.c_str();
  }}
  return nullptr;
}}
"""


class BuildError(RuntimeError):
    """g++ refused a source; the message is its output."""


def cache_dir() -> pathlib.Path:
    default = pathlib.Path(tempfile.gettempdir()) / f"replayssm-host-{os.getuid()}"
    return pathlib.Path(os.environ.get("REPLAYSSM_HOST_CACHE", default))


@functools.cache
def cuda_headers() -> tuple[str, ...]:
    """Include folders of CUDA's own headers: the pip wheels' or a toolkit's."""
    from cuda.pathfinder import find_nvidia_header_directory

    nvcc = shutil.which("nvcc")
    toolkit = os.environ.get("CUDA_HOME") or (nvcc and pathlib.Path(nvcc).resolve().parents[1])
    folders = [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    for include in (folders, [str(pathlib.Path(toolkit) / "include")] if toolkit else []):
        # The wheel of the runtime alone lacks crt/.
        if include and None not in include and (pathlib.Path(include[0]) / "crt").is_dir():
            return tuple(dict.fromkeys(str(folder) for folder in include))
    raise BuildError("CUDA headers not found: pip install 'cuda-toolkit[cudart,crt,cccl]'")


def include_closure(source: pathlib.Path, folders: tuple[pathlib.Path, ...]) -> list[pathlib.Path]:
    """`source` and all that it includes in quotes, found beside it or in `folders`."""
    found = [source]
    for path in found:
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M):
            for folder in (path.parent, *folders):
                if (folder / name).is_file():
                    found.extend({folder / name} - set(found))
                    break
    return found


def _digest(parts: list[str], files: list[pathlib.Path]) -> str:
    content = [*parts, *(path.read_text() for path in sorted(set(files), key=lambda p: p.name))]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:20]


def _make(
    target: pathlib.Path,
    command: list[str],
    text: str = "",
    check: Callable[[], bool] | None = None,
) -> pathlib.Path:
    """Run `command -o target`, fed with `text`, unless `target` is there.

    Safe with several processes; `check` tells afterwards whether the inputs are still the same.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            done = subprocess.run(
                [*command, "-o", f"{target}.part"],
                input=text,
                env=environment,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise BuildError(f"{' '.join(command)}\n{done.stderr}")
            if check is not None and not check():
                raise BuildError("a source was edited while it was compiled: run again")
            os.replace(f"{target}.part", target)
    return target


def _compiler_version() -> str:
    try:
        done = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True)
    except FileNotFoundError:
        done = None
    if done is None or int(done.stdout.split(".")[0]) < 12:
        raise BuildError(f"g++ 12 or later not found, got {done and done.stdout.strip()}")
    return done.stdout


@functools.cache
def _emulator(build: str) -> tuple[list[str], pathlib.Path]:
    """g++ with its flags and the emulator's precompiled header, and the scheduler's object file."""
    system = [option for folder in cuda_headers() for option in ("-isystem", folder)]
    plain = ["g++", *FLAGS, f"-I{EMU}", *system]
    command = [*plain, *BUILDS[build]]
    version = _compiler_version()
    header = EMU / "ptx_host.hpp"
    files = [EMU / "cuda_emu.cpp", *include_closure(header, (EMU,))]
    folder = cache_dir() / _digest([version, *command], files)
    _make(folder / "ptx_host.hpp.gch", [*command, "-x", "c++-header", str(header)])
    # The scheduler itself is not instrumented: it tells AddressSanitizer about its stacks instead.
    define = ["-DEMU_ASAN"] if build == "asan" else []
    scheduler = _make(folder / "cuda_emu.o", [*plain, "-O2", *define, "-c", str(files[0])])
    return [*command, "-include", str(folder / header.name)], scheduler


def compile_kernels(
    source: pathlib.Path, names: tuple[str, ...], build: str = "plain", known: str = ""
) -> HostModule:
    """The kernels `names` of `source`, compiled or taken from the cache.

    `known` is what they know of the record, as a key's `definition` has it.
    """
    if build == "asan" and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        raise BuildError("AddressSanitizer needs a process of its own: see sanitized.py")
    command, scheduler = _emulator(build)
    cases = "".join(
        f"      case {i}: emu::launch(&{name}, g, b, shared_bytes, record, record_bytes); break;\n"
        for i, name in enumerate(names)
    )
    define = f"#define REPLAYSSM_KNOWN {known}\n" if known else ""
    text = f'{define}#include "{source.name}"\n{ENTRY.format(cases=cases)}'

    def digest() -> str:
        return _digest([text, *command], include_closure(source, (EMU,)))

    # A copy of a folder shares what was compiled for the original: paths begin at its name.
    first = digest()
    paths = f"-I{source.parent}", f"-ffile-prefix-map={source.parent}={source.parent.name}"
    full = [*command, "-shared", *paths, "-x", "c++", "-", "-x", "none", str(scheduler)]
    target = _make(cache_dir() / f"{first}.so", full, text, lambda: digest() == first)
    return HostModule(target, names)


def environment_of(build: str) -> dict[str, str]:
    """What a child process needs so that `build` is the default of its launchers."""
    environment = dict(os.environ, REPLAYSSM_HOST_BUILD=build)
    if build == "asan":  # its runtime must be the first library of the process
        libraries = ("libasan.so", "libstdc++.so.6")
        found = [
            subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
            for name in libraries
        ]
        environment["LD_PRELOAD"] = ":".join(done.stdout.strip() for done in found)
        environment["ASAN_OPTIONS"] = "detect_leaks=0"
    return environment


class Options(ctypes.Structure):
    """`emu::Options`."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint),
        ("stacks", ctypes.c_void_p),
        ("late", ctypes.c_void_p),
        ("late_count", ctypes.c_size_t),
    ]


class Late(ctypes.Structure):
    """`emu::Late`."""

    _fields_ = [("data", ctypes.c_void_p), ("kept", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


# The stacks of the emulated threads, one launch at a time: with a set for each module, or for each
# thread that calls, a process would soon use up the mappings that it may have.
_stacks = (ctypes.c_void_p * 1024)()
_one_at_a_time = threading.Lock()


class HostModule:
    """The kernels of one shared object."""

    def __init__(self, path: pathlib.Path, names: tuple[str, ...]) -> None:
        self.path, self.names = path, names
        self._launch = ctypes.CDLL(str(path)).emu_launch
        self._launch.restype = ctypes.c_char_p

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        record: ctypes.Structure,
        options: Options,
        late: Sequence[np.ndarray] = (),
    ) -> str | None:
        """Run one grid to its end; the emulator's message if it fails.

        `late` are arrays that the kernel ahead writes when the kernel waits for it.
        """
        triple = ctypes.c_uint * 3
        kept = [np.empty(array.nbytes, np.uint8) for array in late]
        of_late = (Late * len(late))(
            *(Late(a.ctypes.data, k.ctypes.data, a.nbytes) for a, k in zip(late, kept, strict=True))
        )
        stacks, first = ctypes.addressof(_stacks), ctypes.addressof(of_late)
        given = Options(options.order, options.seed, stacks, first, len(late))
        with _one_at_a_time:
            message = self._launch(
                self.names.index(name),
                triple(*grid),
                triple(*block),
                ctypes.c_size_t(shared_bytes),
                ctypes.byref(record),
                ctypes.c_size_t(ctypes.sizeof(record)),
                ctypes.byref(given),
            )
        return None if message is None else message.decode()
