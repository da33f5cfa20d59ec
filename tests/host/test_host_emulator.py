"""The emulator: right numbers for right kernels, and every planted fault is seen."""

from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from host.builder import BuildError, compile_kernels, environment_of
from host.launcher import ORDERS, EmulationError, HostLauncher

TOY = pathlib.Path(__file__).resolve().parent / "toy"
STAGES, TILE, BLOCKS = 4, 256, 3
SHARED_BYTES = 2 * TILE * 4
SCHEDULES = (("forward", 0), ("reverse", 0), ("shuffled", 1), ("shuffled", 2))


class ReverseParams(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("stages", ctypes.c_int)]


class CollectiveParams(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "d", "matrix", "shuffled")]


def launcher(order="forward", seed=0, build="plain"):
    return HostLauncher(order, seed, sources=TOY, build=build)


def reverse(fault, runner, *, x=None, shared_bytes=SHARED_BYTES):
    """Whether the kernel with the planted fault gives the right numbers."""
    if x is None:
        x = np.arange(BLOCKS * STAGES * TILE, dtype=np.float32).reshape(BLOCKS, STAGES, TILE)
    out = np.full_like(x, np.nan)
    record = ReverseParams(x.ctypes.data, out.ctypes.data, x.shape[1])
    name = f"reverse<Fault::{fault}>"
    runner.run("toy.cu", name, (len(x), 1, 1), (64, 1, 1), shared_bytes, record)
    return np.array_equal(out, x[:, :, ::-1])


def mirror(fault, runner):
    x, out = np.arange(32, dtype=np.float32), np.full(32, np.nan, np.float32)
    record = ReverseParams(x.ctypes.data, out.ctypes.data, 1)
    runner.run("toy.cu", f"mirror<Fault::{fault}>", (1, 1, 1), (32, 1, 1), 128, record)
    return np.array_equal(out, x[::-1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", [reverse, mirror])
def test_right_kernel(kernel, schedule):
    assert kernel("kNone", launcher(*schedule))


@pytest.mark.parametrize(
    ("kernel", "fault", "first_seen"),
    [
        (reverse, "kNoBarrier", "forward"),
        (reverse, "kNoWait", "forward"),
        (reverse, "kRefilledTooSoon", "reverse"),
        (mirror, "kNoSyncwarp", "forward"),
    ],
)
def test_race_gives_wrong_numbers(kernel, fault, first_seen):
    assert not kernel(fault, launcher(first_seen))
    assert not all(kernel(fault, launcher("shuffled", seed)) for seed in range(3))


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        (reverse, "kMisaligned", r"cp.async: an address is not 16-byte aligned \[block 0,0,0 thr"),
        (reverse, "kUnwaitedCopy", "async copy that nothing waited for"),
        (reverse, "kDeadlock", "deadlock: threads 0-39,41-63 waiting at __syncthreads; thread 40"),
        (reverse, "kSharedOverrun", "write past the end of dynamic shared memory"),
        (mirror, "kDiverged", "diverged warp: thread 3 is at __syncwarp, threads 0-2 at __shfl_sy"),
        (mirror, "kEndedLanes", "deadlock: threads 0-29 waiting at __syncwarp; threads 30-31 end"),
        (mirror, "kOutsideMask", "__syncwarp: the calling lane is not in its mask .* thread 16"),
    ],
)
def test_broken_rule_is_an_error(kernel, fault, message):
    runner = launcher()
    with pytest.raises(EmulationError, match=message):
        kernel(fault, runner)
    assert kernel("kNone", runner)


def fragment_a(matrix):
    """A (16, 16) as the four registers of each lane."""
    pairs = matrix.view(np.uint16).reshape(2, 8, 2, 4, 2)  # row half, g, column half, t, low/high
    words = pairs.transpose(1, 3, 2, 0, 4)  # g, t, column half, row half
    return np.ascontiguousarray(words).view(np.uint32).reshape(32, 4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("columns", [16, 8])
def test_collectives(order, dtype, columns):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    d = rng.standard_normal((16, 8)).astype(np.float32)
    b_words = np.ascontiguousarray(b.T).view(np.uint16).reshape(8, 2, 4, 2).transpose(0, 2, 1, 3)
    lanes = d.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3)
    registers = fragment_a(a), np.ascontiguousarray(b_words), np.ascontiguousarray(lanes)
    square = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    matrix, shuffled = square.copy(), np.zeros((6, 32), np.int32)
    record = CollectiveParams(*(v.ctypes.data for v in (*registers, matrix, shuffled)))
    is_bf16 = "true" if dtype is ml_dtypes.bfloat16 else "false"
    kernel = f"collectives<{is_bf16}, {columns}>"
    launcher(order).run("toy.cu", kernel, (1, 1, 1), (32, 1, 1), 0, record)
    got = registers[2].reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
    a, b = a[:, :columns], b[:columns]
    want = d.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    np.testing.assert_array_equal(matrix, square.T)
    lane = np.arange(32)
    half, first = lane % 16, lane - lane % 16
    np.testing.assert_array_equal(shuffled[0], 3)
    np.testing.assert_array_equal(shuffled[1], first + 1)
    np.testing.assert_array_equal(shuffled[2], lane ^ 3)
    np.testing.assert_array_equal(shuffled[3], np.where(half >= 2, lane - 2, lane))
    np.testing.assert_array_equal(shuffled[4], np.where(half < 14, lane + 2, lane))
    np.testing.assert_array_equal(shuffled[5], sum(1 << i for i in range(0, 32, 3)))


def load_fragments(fault, order):
    tile = np.random.default_rng(1).integers(0, 2**15, (16, 32), dtype=np.uint16)
    rows, columns = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    record = CollectiveParams(tile.ctypes.data, None, None, columns.ctypes.data, rows.ctypes.data)
    kernel = f"fragments<Fault::{fault}>"
    launcher(order).run("toy.cu", kernel, (1, 1, 1), (32, 1, 1), 1032, record)
    square = np.ascontiguousarray(tile[:, :16])
    blocks = square.reshape(2, 8, 2, 8).transpose(2, 0, 1, 3).reshape(4, 8, 8)  # in order of lanes
    want = [np.ascontiguousarray(m).view(np.uint32) for m in (blocks, blocks.swapaxes(1, 2))]
    return all(
        np.array_equal(got, w.reshape(4, 32).T)
        for got, w in zip((rows, columns), want, strict=True)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_bulk_copy_and_ldmatrix(order):
    assert load_fragments("kNone", order)


def test_missing_mbarrier_wait():
    assert not load_fragments("kNoWait", "forward")


def test_schedules_order_blocks_and_threads():
    orders = {}
    for order, seed in SCHEDULES:
        places = np.zeros(193, np.int32)
        record = CollectiveParams(None, None, None, None, places.ctypes.data)
        launcher(order, seed).run("toy.cu", "count", (3, 1, 1), (64, 1, 1), 0, record)
        np.testing.assert_array_equal(np.sort(places), np.arange(193))
        orders[order, seed] = tuple(places[:192])
    assert orders["forward", 0] == tuple(range(192))
    assert orders["reverse", 0] == tuple(range(191, -1, -1))
    assert len(set(orders.values())) == len(SCHEDULES)


def test_record_of_another_size_is_an_error():
    with pytest.raises(EmulationError, match="record has 40 bytes, the kernel's 24"):
        launcher().run(
            "toy.cu", "mirror<Fault::kNone>", (1, 1, 1), (32, 1, 1), 128, CollectiveParams()
        )


@pytest.mark.parametrize(("grid", "block", "shared"), [(0, 32, 0), (1, 1025, 0), (1, 32, 2**18)])
def test_launch_limits(grid, block, shared):
    with pytest.raises(EmulationError, match="invalid launch configuration"):
        launcher().run("toy.cu", "count", (grid, 1, 1), (block, 1, 1), shared, CollectiveParams())


def test_modules_do_not_share_state():
    """Two modules of one source interleave; a shared global would mix their blocks and errors."""
    one, two = launcher(), launcher("shuffled", 3)
    two.prepare("toy.cu", ["reverse<Fault::kNone>", "reverse<Fault::kDeadlock>"])
    assert reverse("kNone", one)
    with pytest.raises(EmulationError):
        reverse("kDeadlock", two)
    assert reverse("kNone", one)
    assert reverse("kNone", two)
    libraries = [
        runner._modules["toy.cu", "reverse<Fault::kNone>", ""].path for runner in (one, two)
    ]
    assert libraries[0] != libraries[1]
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", libraries[0]], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1] for line in symbols.stdout.splitlines()]
    assert [name for name in names if not re.match("_Z+N?K?St", name)] == ["emu_launch"]


def test_compile_error_has_the_log():
    with pytest.raises(BuildError, match="no_such_kernel"):
        compile_kernels(TOY / "toy.cu", ("no_such_kernel",))


@pytest.mark.parametrize(
    ("build", "fault", "report"),
    [
        ("asan", "kReadPastEnd", "heap-buffer-overflow"),
        ("asan", "kReadPastEnd", "use-after-poison"),
        ("asan", "kSharedOverrun", "use-after-poison"),
        ("ubsan", "kIntOverflow", "signed integer overflow"),
    ],
)
def test_sanitizer_names_the_line(build, fault, report):
    guard = report == "use-after-poison" and fault == "kReadPastEnd"
    script = (
        "import numpy as np; from host import asan\n"
        "from host.test_host_emulator import launcher, reverse\n"
        f"x = np.zeros((1, {2 + guard}, 256), np.float32)\n"
        f"runner, x, band = launcher(build='{build}'), x[:, :2], x[:, 2:]\n"
        "reverse('kNone', runner, x=x); asan.forbid(band); print('clean', flush=True)\n"
        f"reverse('{fault}', runner, x=x)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        cwd=TOY.parents[1],
        env=environment_of(build),
        capture_output=True,
        text=True,
    )
    lines = (TOY / "toy.cu").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if re.search(rf"== Fault::{fault}\b", text))
    assert "clean" in child.stdout, child.stderr
    assert child.returncode != 0
    assert report in child.stderr
    assert f"toy.cu:{line}" in child.stderr


def test_modules_share_the_stacks_of_the_threads():
    """A process may have 65,530 mappings; a test session loads more than a hundred modules."""

    def mappings():
        return len(pathlib.Path("/proc/self/maps").read_text().splitlines())

    assert mirror("kNone", launcher())
    before = mappings()
    fresh = launcher()
    for fault in ("kSharedOverrun", "kReadPastEnd"):
        fresh.prepare("toy.cu", [f"mirror<Fault::{fault}>", "mirror<Fault::kNone>"])
        assert mirror("kNone", fresh)
    assert mappings() - before < 32


def test_threads_share_the_stacks_too():
    """A framework may call from a new thread each time, one of JAX's for instance."""

    def mappings():
        return len(pathlib.Path("/proc/self/maps").read_text().splitlines())

    wide = launcher()
    assert mirror("kNone", wide)
    before = mappings()
    for _ in range(4):
        results = []
        thread = threading.Thread(target=lambda r=results: r.append(mirror("kNone", wide)))
        thread.start()
        thread.join()
        assert results == [mirror("kNone", wide)]
    assert mappings() - before < 32
