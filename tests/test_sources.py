"""The sources themselves: who imports whom, what stands where, records, instances, the wheel."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from graphlib import TopologicalSorter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from replayssm_cupy import ReplaySSMError, compiler, decode, plan, schedule, small
from replayssm_cupy.keys import (
    AdvanceRingKey,
    CheckpointingSsuKey,
    Layout,
    LayoutKey,
    LoadStateKey,
    every_key,
)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "replayssm_cupy"
CUDA = ROOT / "cuda"

# --- Python: who may import whom -----------------------------------------------------------------

# Data goes one way: array -> view -> key -> kernel -> plan -> launch -> out.
MAY_IMPORT = {
    "__init__": {"errors", "layer_stack", "ops", "prefix", "prefix_plan", "scratch", "slots",
                 "vllm_cache"},
    "__main__": {"demo", "doctor", "errors", "resources"},
    # The library, from the outside in.
    "layer_stack": {"arrays", "bound_layer", "calls", "checked", "checks", "decode",
                    "decode_checks", "errors", "folds", "prefix_plan", "scratch", "slot_files",
                    "slots", "snapshots", "stack_arrays"},
    "stack_arrays": {"arrays", "calls", "checks", "compiler", "decode_checks", "folds", "formats",
                     "keys", "plan", "snapshots", "tickets"},
    "tickets": {"arrays"},
    "vllm_cache": {"arrays", "calls", "checks", "compiler", "decode", "decode_checks", "errors",
                   "formats", "keys", "numerics", "plan", "reference", "slots"},
    "slot_files": {"arrays", "checks", "decode_checks", "errors", "snapshots"},
    "snapshots": {"arrays", "calls", "checked", "checks", "compiler", "decode", "decode_checks",
                  "errors", "formats", "keys", "plan", "prefix", "prefix_plan", "prefix_tables"},
    "prefix": {"arrays", "checked", "checks", "decode", "formats", "keys", "plan", "prefix_checks",
               "prefix_plan", "prefix_tables", "reference", "schedule"},
    "prefix_tables": {"arrays", "checks", "formats", "keys"},
    "prefix_plan": {"arrays", "checks", "decode", "decode_checks", "keys", "plan", "reference"},
    "prefix_checks": {"arrays", "errors", "keys", "plan"},
    "slots": {"arrays", "calls", "checks", "compiler", "decode", "decode_checks", "formats", "keys",
              "numerics", "plan", "reference", "scratch"},
    "ops": {"arrays", "calls", "checked", "checks", "decode", "decode_checks", "scratch"},
    "decode": {"arrays", "calls", "checked", "checks", "compiler", "decode_checks", "folds",
               "formats", "keys", "plan", "reference", "schedule", "scratch", "small"},
    "small": {"arrays", "plan", "schedule"},
    "schedule": {"arrays", "compiler", "keys"},
    "bound_layer": {"calls", "checked", "stack_arrays"},
    "calls": {"arrays", "checked", "checks", "plan"},
    "checked": {"arrays", "decode_checks", "errors", "folds", "keys", "plan"},
    "folds": {"arrays", "compiler", "decode_checks", "errors", "keys", "plan", "reference"},
    "decode_checks": {"arrays", "checks", "errors", "formats", "keys", "plan", "scratch"},
    "scratch": {"arrays", "checks", "keys"},
    "plan": {"arrays", "compiler", "driver", "errors", "keys"},
    "driver": {"errors"},
    "compiler": {"errors", "keys"},
    "formats": {"arrays", "checks", "keys"},
    "checks": {"arrays", "compiler", "keys"},
    "arrays": {"errors"},
    "reference": {"numerics", "read_copy"},
    "read_copy": {"numerics"},
    "numerics": set(),
    "keys": set(),
    "errors": set(),
    # The commands. The doctor must start where nothing else can be imported.
    "demo": {"compiler", "demo_prefix", "demo_report", "errors", "layer_stack", "mamba2",
             "mamba2_weights", "speculative"},
    "demo_prefix": {"mamba2", "mamba2_weights", "speculative"},
    "demo_report": {"arrays", "demo_prefix", "keys", "mamba2_weights", "speculative"},
    "speculative": {"mamba2", "reference"},
    "mamba2": {"arrays", "layer_stack", "mamba2_weights", "ops"},
    "mamba2_weights": {"errors", "keys"},
    "resources": {"compiler", "keys", "schedule"},
    # The frameworks, each in files of its own that nothing else imports.
    "jax_ops": {"arrays", "checks", "formats", "jax_calls", "keys", "prefix_plan"},
    "jax_calls": {"arrays", "checked", "checks", "compiler", "decode", "decode_checks", "scratch",
                  "slots", "snapshots", "stack_arrays"},
    "torch": {"checks", "keys", "layer_stack", "torch_ops"},
    "torch_ops": {"arrays", "bound_layer", "formats", "keys", "layer_stack", "ops", "slots"},
    "doctor": {"__init__", "compiler", "errors", "keys"},
}  # fmt: skip
# Beyond the standard library; all but the first two are optional and imported inside a function, or
# in a framework's own file.
LIBRARIES = {
    "arrays": {"numpy", "ml_dtypes", "cupy", "jax"},
    "compiler": {"cupy", "cupy_backends", "cuda"},
    "demo": {"numpy", "tokenizers"},
    "demo_prefix": {"numpy"},
    "demo_report": {"tqdm"},
    "doctor": {"numpy", "cupy", "cuda"},
    "folds": {"numpy"},
    "jax_calls": {"jax"},
    "jax_ops": {"jax", "numpy"},
    "layer_stack": {"numpy"},
    "mamba2": {"numpy"},
    "mamba2_weights": {"numpy", "ml_dtypes", "safetensors"},
    "numerics": {"numpy", "ml_dtypes"},
    "decode_checks": {"numpy"},
    "prefix": {"numpy"},
    "prefix_checks": {"numpy"},
    "prefix_plan": {"numpy"},
    "prefix_tables": {"numpy"},
    "read_copy": {"numpy", "ml_dtypes"},
    "reference": {"numpy"},
    "slot_files": {"numpy"},
    "slots": {"numpy"},
    "snapshots": {"numpy"},
    "speculative": {"numpy"},
    "stack_arrays": {"numpy"},
    "tickets": {"numpy"},
    "torch": {"torch", "transformers"},
    "torch_ops": {"torch"},
    "vllm_cache": {"numpy"},
}
ALWAYS_THERE = {"numpy", "ml_dtypes"}
# Imported at their head.
ADAPTERS = {
    "jax_calls": {"jax"},
    "jax_ops": {"jax"},
    "torch": {"torch", "transformers"},
    "torch_ops": {"torch"},
}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a tree imports, also through `importlib.import_module("...")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (f"replayssm_cupy.{name}" for name in names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "import_module"
        ):
            assert isinstance(node.args[0], ast.Constant), "a module's name is written out"
            yield node.args[0].value


def own_modules(module: str) -> set[str]:
    names = imported(ast.parse((PACKAGE / f"{module}.py").read_text()))
    parts = [name.split(".") for name in names if name.split(".")[0] == "replayssm_cupy"]
    return {part[1] if len(part) > 1 else "__init__" for part in parts}


def libraries(tree: ast.AST) -> set[str]:
    roots = {name.split(".")[0] for name in imported(tree)}
    return roots - set(sys.stdlib_module_names) - {"replayssm_cupy"}


def test_tables_name_every_module():
    assert set(MODULES) == MAY_IMPORT.keys()
    assert LIBRARIES.keys() <= MAY_IMPORT.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_the_package(module):
    assert own_modules(module) <= MAY_IMPORT[module]


def test_imports_have_no_cycle():
    tuple(TopologicalSorter({module: own_modules(module) for module in MODULES}).static_order())
    tuple(TopologicalSorter(MAY_IMPORT).static_order())


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_libraries(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    assert libraries(tree) <= LIBRARIES.get(module, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    allowed = ALWAYS_THERE | ADAPTERS.get(module, set())
    assert libraries(tree) <= allowed, "an optional library is imported inside a function"


def run_python(code: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_needs_nothing_optional():
    code = "import sys, replayssm_cupy; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(run_python(code, PYTHONPATH=str(ROOT)).split())
    optional = set().union(*LIBRARIES.values(), {"torch"}) - ALWAYS_THERE
    assert {"replayssm_cupy", "numpy"} <= loaded
    assert not loaded & optional


@pytest.mark.parametrize(
    ("word", "home"),
    [("CUDA_DIR", "compiler"), ("RawModule", "compiler"), ("cuLaunchKernelEx", "driver")],
)
def test_one_home(word, home):
    """Only the compiler opens `cuda/`, and only the driver's file launches."""
    code = {path.stem: path.read_text() for path in PACKAGE.glob("*.py")}
    # The doctor reports the folder and the demo's docstrings may mention words.
    users = {module for module, text in code.items() if re.search(rf"\b{word}\b", text)}
    assert home in users
    assert users <= {home, "doctor"}


# --- CUDA: what stands where ---------------------------------------------------------------------

MAY_INCLUDE = {
    "params.cuh": set(),
    "ptx.cuh": set(),
    "convert.cuh": {"params.cuh", "ptx.cuh"},
    "replay.cuh": {"convert.cuh"},
    "fold.cuh": {"replay.cuh"},
    "read_copy.cuh": {"replay.cuh"},
    "rows.cuh": {"replay.cuh"},
    "requests.cuh": {"rows.cuh"},
    "step.cuh": {"rows.cuh"},
    "flush.cuh": {"fold.cuh", "step.cuh"},
    "small.cuh": {"step.cuh"},
    "weigh.cuh": {"fold.cuh", "small.cuh"},
    "read_out.cuh": {"small.cuh"},
    "prepare.cuh": {"fold.cuh", "step.cuh"},
    "copied.cuh": {"flush.cuh", "read_copy.cuh"},
}
# CCCL's headers and cooperative_groups.h cost seconds in every compilation.
SYSTEM_HEADERS = {"cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h"}
# What only the compilation for the CPU includes.
HOST_HEADERS = {"cstdint", "ptx_host.hpp"}
CONVERSION = re.compile(r"\b__(?:floats?|half2?|bfloat16|bfloat162|double|u?int|u?ll)2[a-z]\w*")


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


CODE = {path.name: without_comments(path.read_text()) for path in CUDA.glob("*.cu*")}


@pytest.mark.parametrize("name", sorted(CODE))
def test_includes(name):
    found = re.findall(r'#include [<"]([^>"]+)[>"]', CODE[name])
    headers = {header for header in CODE if header.endswith(".cuh")}
    allowed = MAY_INCLUDE.get(name, headers) | SYSTEM_HEADERS | HOST_HEADERS
    assert set(found) <= allowed
    if name.endswith(".cuh"):
        assert name in MAY_INCLUDE, "a new header says in this table whom it includes"
        assert re.match(r"\s*#pragma once", CODE[name])


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (re.compile(r"\b(?:__)?asm(?:__)?\b"), "ptx.cuh"),
        (re.compile(r"\b__CUDA_ARCH\w*"), "ptx.cuh"),
        (CONVERSION, "convert.cuh"),
        (re.compile(r"\bprintf\b"), None),
    ],
    ids=["asm", "architecture tests", "conversions", "printf"],
)
def test_words_with_one_home(pattern, home):
    found = {name: pattern.findall(code) for name, code in CODE.items() if name != home}
    assert not {name: words for name, words in found.items() if words}


def test_the_conversions_are_recognised():
    found = CONVERSION.findall("__float2bfloat16_rn(v) __half22float2(v) __bfloat1622float2(v)")
    assert len(found) == 3
    assert not CONVERSION.findall("__nv_bfloat162 __half2 __half2_raw __float_as_uint(v)")
    assert CONVERSION.findall(CODE["convert.cuh"])


def test_every_source_belongs_to_a_key():
    assert {key.source for key in every_key()} == {n for n in CODE if n.endswith(".cu")}


def test_the_folder_does_not_hide_nvidias_cuda():
    """A checkout's root is on `sys.path` when Python runs there."""
    assert not (CUDA / "__init__.py").exists()
    pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    code = "from cuda import pathfinder; print(pathfinder.__name__)"
    assert run_python(code) == "cuda.pathfinder"


def test_layout_of_the_sources():
    tool = shutil.which("clang-format", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("clang-format is not installed")
    sources = [str(path) for path in sorted(CUDA.glob("*.cu*"))]
    command = [tool, "--dry-run", "--Werror", *sources]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[:2000]


# --- params.cuh and its Python records -----------------------------------------------------------

PARAMS = (CUDA / "params.cuh").read_text()
C_TYPES = {"int64_t": ctypes.c_int64, "int": ctypes.c_int32}
RECORDS = {
    name: record
    for name, record in vars(plan).items()
    if isinstance(record, type) and issubclass(record, ctypes.Structure)
}


@dataclass
class Field:
    name: str
    ctype: Any
    count: int  # 0: no array

    @property
    def python_type(self) -> Any:
        return self.ctype * self.count if self.count else self.ctype


def constants() -> dict[str, int]:
    found = re.findall(r"constexpr int (\w+) = (\d+);", without_comments(PARAMS))
    return {name: int(value) for name, value in found}


def fields_of(body: str) -> list[Field]:
    """The fields of a struct, in order: pointers, int64_t and int, also several in one line."""
    found = []
    for declaration in filter(None, map(str.strip, without_comments(body).split(";"))):
        words = declaration.removeprefix("const ")
        kind, names = re.split(
            r"(?<=\*)\s*|\s+", words.replace("unsigned char", "byte"), maxsplit=1
        )
        ctype = ctypes.c_void_p if kind.endswith("*") else C_TYPES[kind]
        for name in names.split(","):
            match = re.fullmatch(r"\s*(\w+)(?:\[(\w+)\])?\s*", name)
            assert match is not None, declaration
            found.append(Field(match[1], ctype, constants()[match[2]] if match[2] else 0))
    return found


STRUCTS = {
    name.replace("Record", "Params"): fields_of(body)  # the record of which an instance knows parts
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", PARAMS, flags=re.DOTALL)
}


def test_every_struct_has_a_record():
    assert STRUCTS.keys() == RECORDS.keys()


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_record_equals_struct(name):
    expected = [(field.name, field.python_type) for field in STRUCTS[name]]
    record = [(field[0], field[1]) for field in RECORDS[name]._fields_]
    assert [field for field, _ in record] == [field for field, _ in expected]
    for (field, kind), (_, wanted) in zip(record, expected, strict=True):
        assert kind is wanted, field


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_layout_of_a_record(name):
    """Natural alignment without holes, as C++ lays the struct out."""
    offset = 0
    for field in STRUCTS[name]:
        size, alignment = ctypes.sizeof(field.python_type), ctypes.alignment(field.python_type)
        assert offset % alignment == 0, f"a hole before {field.name}"
        assert getattr(RECORDS[name], field.name).offset == offset
        offset += size
    assert ctypes.sizeof(RECORDS[name]) == -(-offset // 8) * 8
    assert ctypes.sizeof(RECORDS[name]) <= 32764, "the parameters of a kernel"


def test_every_pointer_tells_its_shape():
    body = "".join(re.findall(r"struct \w+ \{.*?\n\};", PARAMS, flags=re.DOTALL))
    pointers = [line for line in body.splitlines() if "*" in line.split("//")[0]]
    assert len(pointers) > 30
    assert all(re.search(r"// (each )?\(\w+( \+ 1)?,", line) for line in pointers)


def test_constants_of_the_header():
    assert constants()["kMaxResetLayers"] == plan.MAX_RESET_LAYERS
    names = {"FloatType": plan.FLOAT_TYPES, "IndexType": plan.INDEX_TYPES}
    for enum, expected in names.items():
        body = re.search(rf"enum {enum} : int \{{(.*?)\}}", PARAMS)
        assert body is not None
        found = re.findall(r"k(\w+) = (\d+)", body[1])
        assert {name.lower(): int(value) for name, value in found} == expected


def test_every_stride_of_a_step_is_filled_in():
    """ctypes takes a misspelt field without a word."""
    names = {
        f"{array}_{axis}_stride" if axis else f"{array}_stride"
        for array, axes in decode._STRIDES.items()
        for axis in axes
    }
    fields = {field.name for field in STRUCTS["CheckpointingSsuParams"]}
    assert names == {field for field in fields if field.endswith("_stride")}
    fewer = {field.name for field in STRUCTS["SelectiveStateUpdateParams"]}
    assert {field for field in fewer if field.endswith("_stride")} <= names


def test_fields_that_lanes_of_the_small_form_choose_from():
    """They take one of several that lie side by side."""
    record = RECORDS["CheckpointingSsuParams"]
    for names in (
        "dt dt_bias A D", "dt_head_bytes dt_bias_bytes A_bytes D_bytes",
        "dt_type dt_bias_type A_type D_type", "B B_cache", "B_sequence_bytes B_cache_slot_bytes",
        "B_group_bytes B_cache_group_bytes", "B_token_bytes B_cache_row_bytes",
    ):  # fmt: skip
        fields = [getattr(record, name) for name in names.split()]
        for one, next_one in itertools.pairwise(fields):
            assert next_one.offset == one.offset + one.size


def test_flags_of_plain_steps_are_those_of_the_kernel():
    text = (ROOT / "cuda/small.cuh").read_text()
    flags = {flag.name.title().replace("_", ""): int(flag) for flag in schedule.SmallFlag}
    for name in ("PlainFlags", "SettledFlags"):
        found = re.search(rf"constexpr int k{name} = (.*?);", text, flags=re.DOTALL)
        assert found is not None
        flags[name] = sum(flags[one] for one in re.findall(r"k(\w+)", found[1]))
    assert flags["PlainFlags"] == schedule.PLAIN_FLAGS
    assert flags["SettledFlags"] == schedule.SETTLED_FLAGS


def test_what_the_small_form_takes_is_filled_in():
    fields = {field.name for field in STRUCTS["CheckpointingSsuParams"]}
    taken = {field for field in fields if field.endswith("_bytes")} - {"out_item_bytes"}
    for packed in (False, True):
        filled = [
            small.fields_of_axis(array, axis, packed=packed)
            for array, axes in small.AXES.items()
            for axis in axes
        ]
        assert set().union(*filled) == taken
    body = re.search(r"enum SmallFlag : int \{(.*?)\}", PARAMS, flags=re.DOTALL)
    assert body is not None
    found = dict(re.findall(r"k(\w+) = (\d+)", body[1]))
    flags = {flag.name.title().replace("_", ""): str(flag.value) for flag in schedule.SmallFlag}
    assert found == flags


# --- Every instance compiles ---------------------------------------------------------------------

INSTANCES_AT_ONCE = 12
# NVRTC keeps one core busy, so sources with many instances are cut into parts for several.
PARTS = {
    f"{source}-{first}": keys[first : first + INSTANCES_AT_ONCE]
    for source, keys in compiler.by_source(every_key()).items()
    for first in range(0, len(keys), INSTANCES_AT_ONCE)
}
NO_SPILLS = "sm_90"  # compiled as for use
# Elsewhere the compiler hardly optimises, in a fifth of the time (NVRTC 12.8 knows how);
# `python -m replayssm_cupy kernels --arch sm_80` compiles as for use.
LESS_OPTIMISED = "--Ofast-compile=max"
OFFSETS_FROM = 13, 4  # NVRTC has `__builtin_offsetof`


@pytest.fixture(scope="session")
def nvrtc() -> tuple[int, int]:
    """NVRTC's version. Skips where one small kernel cannot be compiled for want of a tool."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        compiler.compile_cubin([AdvanceRingKey()], "sm_90")
    except ReplaySSMError as error:
        if "missing" not in str(error):
            raise
        pytest.skip(str(error))
    from cupy_backends.cuda.libs import nvrtc as library

    return library.getVersion()


@pytest.fixture(scope="session")
def compile_apart():
    """`compile_cubin` in a process of its own: the option outlives its program in NVRTC 13.5."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda *arguments: pool.submit(compiler.compile_cubin, *arguments).result()


@pytest.mark.parametrize("source", compiler.by_source(every_key()))
def test_an_instance_of_each_source_compiles(nvrtc, source):
    """What CI tries the oldest compilers with that the extras take."""
    key = compiler.by_source(every_key())[source][0]
    cubin, _ = compiler.compile_cubin([key], "sm_90")
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("arch", compiler.TARGETS)
def test_every_instance_compiles(nvrtc, compile_apart, arch, part):
    fewer = arch != NO_SPILLS and nvrtc >= (12, 8)
    try:
        if fewer:
            cubin, resources = compile_apart(PARTS[part], arch, LESS_OPTIMISED)
        else:
            cubin, resources = compiler.compile_cubin(PARTS[part], arch)
    except ReplaySSMError as error:
        if "gpu-architecture" in str(error):
            pytest.skip(f"this NVRTC does not know {arch}")
        raise
    assert cubin.startswith(b"\x7fELF")
    # A source's kernels without template arguments are in each of its parts.
    names = {key.name_expression for key in PARTS[part]}
    assert names <= {resource.kernel for resource in resources}
    spilled = {r.kernel: r.spill_bytes for r in resources if r.spill_bytes}
    if arch == NO_SPILLS:
        assert not spilled, f"bytes of local memory: {spilled}"


LAYOUT = Layout(nheads=64, heads_per_group=8, head_dim=64, max_window=16, ring_buffer_len=17)
LAYOUT_KEYS = [
    LayoutKey(key, LAYOUT)
    for key in every_key()
    if isinstance(key, CheckpointingSsuKey)
    and (key.activation_dtype, key.dstate) == ("bfloat16", 128)
]


@pytest.mark.parametrize("source", compiler.by_source(LAYOUT_KEYS))
def test_instances_for_a_layout_compile(nvrtc, source):
    """As many of them as layouts exist: those of one model without spills."""
    keys = compiler.by_source(LAYOUT_KEYS)[source]
    _, resources = compiler.compile_cubin(keys, NO_SPILLS)
    assert {key.name_expression for key in keys} <= {resource.kernel for resource in resources}
    assert not {r.kernel: r.spill_bytes for r in resources if r.spill_bytes}


@pytest.mark.parametrize("arch", [arch for arch in compiler.TARGETS if arch != NO_SPILLS])
def test_an_instance_for_a_layout_compiles_everywhere(nvrtc, compile_apart, arch):
    fewer = [LESS_OPTIMISED] if nvrtc >= (12, 8) else []
    for keys in compiler.by_source(LAYOUT_KEYS).values():
        try:
            cubin, _ = compile_apart(keys[:1], arch, *fewer)
        except ReplaySSMError as error:
            if "gpu-architecture" in str(error):
                pytest.skip(f"this NVRTC does not know {arch}")
            raise
        assert cubin.startswith(b"\x7fELF")


def test_what_an_instance_knows_is_in_the_record():
    """A name that is no field would hide none."""
    fields = {field.name: field.ctype for field in STRUCTS["CheckpointingSsuParams"]}
    for key in LAYOUT_KEYS:
        assert key.known.keys() <= fields.keys()
        for kind, name in re.findall(r"static constexpr (\w+) (\w+) = \d+;", key.definition):
            assert C_TYPES[kind] == fields[name]


def test_the_compilers_layout_of_the_records(nvrtc, monkeypatch):
    """NVRTC's own sizes and, where it can tell them, offsets, as assertions of the structs."""
    lines = ['#include "params.cuh"', '#include "ptx.cuh"']
    for name, record in RECORDS.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(record)});")
        if nvrtc < OFFSETS_FROM:
            continue
        lines += [
            f"static_assert(__builtin_offsetof({name}, {field}) == {offset});"
            for field, offset in ((f[0], getattr(record, f[0]).offset) for f in record._fields_)
        ]
    lines.append("__global__ void advance_ring() {}")
    monkeypatch.setattr(compiler, "_source", lambda key: "\n".join(lines))
    compiler.compile_cubin([AdvanceRingKey()], "sm_90")


def test_a_compile_error_tells_everything(nvrtc, monkeypatch):
    """Name expression, options and NVRTC's log, with the line of the mistake."""
    source = compiler._source(LoadStateKey("float32", "float16"))
    monkeypatch.setattr(compiler, "_source", lambda key: source + "\nint planted = not_declared;\n")
    with pytest.raises(ReplaySSMError) as caught:
        compiler.compile_cubin([LoadStateKey("float32", "float16")], "sm_90")
    message = str(caught.value)
    first, log = message.split("\n", 1)
    assert first.startswith("compiling load_state<float, fp16> with ")
    for option in (
        "-std=c++17",
        "-arch=sm_90",
        f"-DREPLAYSSM_SOURCES=0x{compiler.source_digest()}",
    ):
        assert option in first
    assert "slots.cu(" in log
    assert '"not_declared" is undefined' in log


def test_a_kernel_that_does_not_exist(nvrtc, monkeypatch):
    monkeypatch.setattr(AdvanceRingKey, "name_expression", "advance_rings")
    with pytest.raises(ReplaySSMError, match=r"^compiling advance_rings with .*\n.*advance_rings"):
        compiler.compile_cubin([AdvanceRingKey()], "sm_90")


def test_a_compile_error_on_a_gpu_tells_everything(monkeypatch):
    """The same from CuPy, whose exception carries the log; nothing is remembered as loaded."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    class Broken:
        def __init__(self, *, code: str, options: tuple[str, ...], name_expressions: list[str]):
            self.arguments = code, "slots.cu", options

        def get_function(self, name: str) -> None:
            raise cupy.cuda.compiler.CompileException(
                'slots.cu(7): error: "planted"', *self.arguments
            )

    monkeypatch.setattr(cupy, "RawModule", Broken)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(compiler, "_target_of", lambda device: "sm_90")
    with pytest.raises(ReplaySSMError) as caught:
        compiler.load([LoadStateKey("float32", "float16")], 0)
    first, log = str(caught.value).split("\n", 1)
    assert first.startswith("compiling load_state<float, fp16> with -std=c++17 ")
    assert log == 'slots.cu(7): error: "planted"'
    assert not compiler._functions


# --- The wheel -----------------------------------------------------------------------------------


def test_wheel_carries_the_kernels(tmp_path):
    """`cuda/` travels inside the package, which finds it there."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {f"replayssm_cupy/cuda/{name}" for name in CODE}
    expected |= {f"replayssm_cupy/{module}.py" for module in MODULES}
    assert expected | {"replayssm_cupy/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"replayssm_cupy"}
    assert "replayssm_cupy/cuda/__init__.py" not in names
    code = "from replayssm_cupy import compiler as c; print(c.CUDA_DIR, c.source_digest())"
    site = tmp_path / "site"
    folder, digest = run_python(code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert Path(folder) == site / "replayssm_cupy" / "cuda"
    assert digest == compiler.source_digest()
