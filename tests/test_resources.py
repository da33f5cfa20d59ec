"""The `kernels` command: its table, and the occupancy against NVIDIA's own calculator."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess

import numpy as np
import pytest

from replayssm_cupy import decode, formats, keys, plan, resources, schedule
from replayssm_cupy.__main__ import main
from replayssm_cupy.compiler import TARGETS, Resources
from replayssm_cupy.keys import (
    AdvanceRingKey,
    CheckpointingSsuKey,
    SelectiveStateUpdateKey,
    SmallCheckpointingSsuKey,
)
from replayssm_cupy.resources import MULTIPROCESSORS, resident_blocks
from replayssm_cupy.schedule import Processor

# cuda_occupancy.h has the numbers of its own for blocks, units and partitions; the others are ours.
CALCULATOR = r"""
#include <cstddef>
#include <cuda_occupancy.h>
extern "C" int blocks(int major, int minor, int warps, int shared, int registers, int threads,
                      int static_bytes, int dynamic_bytes) {
  cudaOccDeviceProp device;
  device.computeMajor = major;
  device.computeMinor = minor;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = 32 * warps;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 48 << 10;
  device.sharedMemPerMultiprocessor = shared;
  device.numSms = 1;
  device.sharedMemPerBlockOptin = shared - 1024;
  device.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = 1024;
  kernel.numRegs = registers;
  kernel.sharedSizeBytes = static_bytes;
  kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.maxDynamicSharedSizeBytes = shared;
  kernel.numBlockBarriers = 1;
  cudaOccDeviceState state;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult result;
  const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(
      &result, &device, &kernel, &state, threads, dynamic_bytes);
  return error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1 - error;
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory) -> ctypes.CDLL:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    headers = pathfinder.find_nvidia_header_directory("cudart")
    if headers is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and CUDA's headers")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "calculator.cpp").write_text(CALCULATOR)
    command = ["g++", "-shared", "-fPIC", f"-I{headers}", "-o", folder / "calculator.so"]
    subprocess.run([*command, folder / "calculator.cpp"], check=True)
    return ctypes.CDLL(str(folder / "calculator.so"))


def test_every_target_has_its_limits():
    assert {*MULTIPROCESSORS} == {*TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_occupancy_is_nvidias(calculator, target):
    on, number = MULTIPROCESSORS[target], int(target.removeprefix("sm_"))
    rng = np.random.default_rng(number)
    most = on.shared_bytes - 1024
    seen = set()
    for _ in range(4000):
        registers, threads = int(rng.integers(1, 256)), 32 * int(rng.integers(1, 33))
        static = int(rng.choice([0, rng.integers(0, 48 << 10)]))
        dynamic = int(rng.choice([0, rng.integers(0, most - static), most - static]))
        arguments = (registers, threads, static, dynamic)
        of_target = (number // 10, number % 10, on.warps, on.shared_bytes)
        expected = calculator.blocks(*of_target, *arguments)
        assert expected >= 0, arguments
        assert resident_blocks(on, registers, threads, static + dynamic) == expected, arguments
        seen.add(expected)
    assert seen >= {0, 1, 2, 3, 4, on.blocks // 2}


@pytest.mark.parametrize("target", TARGETS)
def test_more_than_a_block_may_have(target):
    on = MULTIPROCESSORS[target]
    assert resident_blocks(on, 32, 128, on.shared_bytes - 1024) == 1
    assert resident_blocks(on, 32, 128, on.shared_bytes - 1023) == 0
    assert resident_blocks(on, 256, 32, 0) == 0
    assert resident_blocks(on, 255, 1024, 0) == 0


def second_kernel(key: keys.PrecomputeKey) -> keys.PreparedCheckpointingSsuKey:
    """One whose weights the key's kernel makes."""
    return next(
        second
        for second in keys.every_key()
        if isinstance(second, keys.PreparedCheckpointingSsuKey)
        and keys.precompute_key(second) == key
    )


@pytest.mark.parametrize("key", [*keys.every_key()], ids=lambda key: key.name_expression)
def test_launch_shape_is_that_of_the_plan(key, monkeypatch):
    """The block of a real call of the kernel, on an H100."""
    import ml_dtypes

    import replayssm_cupy as ssm

    on = MULTIPROCESSORS["sm_90"]
    if not isinstance(key, CheckpointingSsuKey | SelectiveStateUpdateKey | keys.PrecomputeKey):
        assert resources.launch_shape(key, on) is None
        return
    launches = [key]
    if isinstance(key, keys.PrecomputeKey):
        key = second_kernel(key)
    if isinstance(key, keys.PreparedCheckpointingSsuKey):
        launches = [keys.precompute_key(key), key]
    launched: list[plan.Plan] = []

    class Recorder:
        def launch(self, plan: plan.Plan, stream: int) -> None:
            launched.append(plan)

    monkeypatch.setitem(plan.launchers, "cpu", Recorder())
    monkeypatch.setattr(decode, "processor", lambda device: Processor(132, 227 << 10))
    types = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in keys.STATE_DTYPES}
    activation = types[key.activation_dtype]
    replay = isinstance(key, CheckpointingSsuKey)
    tokens = key.least_tokens if replay else 1
    few = SmallCheckpointingSsuKey, keys.SlabCheckpointingSsuKey
    batch = 1 if isinstance(key, few) else 256
    x = np.zeros((batch, tokens, 64, 64), activation)
    B = np.zeros((batch, tokens, 8, key.dstate), activation)
    dt, A = np.zeros((batch, tokens, 64), np.float32), -np.ones(64, np.float32)
    state_dtype = key.state_dtype.partition("+")[0]
    state = np.zeros((1, 64, 64, key.dstate), types[state_dtype])
    scale = np.ones((1, 64, 64), np.float32) if key.state_dtype in keys.SCALED_FORMATS else None
    rare = type(key) is SmallCheckpointingSsuKey  # slots of 64 bits
    slots = np.full(batch, -1, np.int64 if rare else np.int32)
    options = {"state_scale": scale, "state_batch_indices": slots}
    if key.state_dtype in keys.COPY_DTYPES:
        shape = formats.copy_shape(key.state_dtype, 64, key.dstate)
        dtype = keys.COPY_DTYPES[key.state_dtype]
        copy = np.zeros((1, 64, *shape), np.dtype(getattr(ml_dtypes, dtype, dtype)))
        options["state_copy"] = copy
    if replay:
        rows = 16 + tokens
        rings = (
            np.zeros((1, 64, rows, 64), activation), np.zeros((1, 8, rows, key.dstate), activation),
            np.zeros((1, 64, rows), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32),
        )  # fmt: skip
        if len(launches) > 1:
            scratch = ssm.allocate_scratch(batch, 64, device="cpu")
            options |= {"algorithm": "two-kernel", **scratch}
        ssm.checkpointing_ssu(state, *rings, x, dt, A, B, B, max_window=16, **options)
    else:
        ssm.selective_state_update(state, x, dt, A, B, B, **options)
    assert [one.key for one in launched] == launches
    for one in launched:
        assert resources.launch_shape(one.key, on) == (one.block[0], one.shared_bytes)
        assert one.block[1:] == (1, 1)
    decode._plans.clear()


@pytest.fixture
def compiled(monkeypatch) -> None:
    """An NVRTC whose every kernel has 168 registers."""

    def compile_cubin(group, arch):
        assert arch in ("sm_90", "sm_103a")
        found = [Resources(key.name_expression, 168, 512, 8, 16) for key in group]
        return b"", found

    monkeypatch.setattr(resources, "compile_cubin", compile_cubin)


def test_json(compiled, capsys):
    assert main(["kernels", "--arch", "sm_103a", "--json"]) == 0
    rows = {row["kernel"]: row for row in json.loads(capsys.readouterr().out)}
    assert {*rows} == {key.name_expression for key in keys.every_key()}
    plain = SelectiveStateUpdateKey("float32", "bfloat16", 128).name_expression
    # 168 registers make 5,376 a warp: three warps in each of four partitions.
    assert rows[plain] == {
        "kernel": plain, "registers": 168, "shared_bytes": 512, "spill_bytes": 8, "stack_bytes": 16,
        "dynamic_shared_bytes": 0, "threads": 128, "resident_blocks": 3, "resident_warps": 12,
    }  # fmt: skip
    assert rows[AdvanceRingKey().name_expression]["resident_blocks"] is None


def test_table(compiled, capsys):
    assert main(["kernels"]) == 0
    _, head, *lines = capsys.readouterr().out.splitlines()
    names = ["registers", "static", "dynamic", "spilled", "stack", "threads", "blocks", "warps"]
    assert head.split() == ["kernel", "(sm_90)", *names]
    assert len({len(line) for line in (head, *lines)}) == 1
    plain = SelectiveStateUpdateKey("float32", "bfloat16", 128).name_expression
    cells = {line[:56].strip(): line[56:].split() for line in lines}
    assert cells[plain] == ["168", "512", "0", "8", "16", "128", "3", "12"]
    assert cells["advance_ring"] == ["168", "512", "-", "8", "16", "-", "-", "-"]


def test_kernels_of_a_layout(compiled, capsys):
    """Only those that decode, with the launches of the generic ones."""
    assert main(["kernels", "--layout", "64,8,64,16,17", "--json"]) == 0
    rows = {row["kernel"]: row for row in json.loads(capsys.readouterr().out)}
    decoding = [key for key in keys.every_key() if isinstance(key, keys.CheckpointingSsuKey)]
    assert {*rows} == {key.name_expression for key in decoding}
    assert all(row["threads"] and row["dynamic_shared_bytes"] for row in rows.values())


@pytest.mark.parametrize("layout", ["64,8,64,16", "64,8,64,16,x", "64,8,64,16,-17"])
def test_a_layout_that_is_none(layout, capsys):
    assert main(["kernels", "--layout", layout]) == 2
    names = "nheads,heads_per_group,head_dim,max_window,ring_buffer_len"
    assert capsys.readouterr().err == f"error: layout: expected {names}, got {layout}\n"


def test_unknown_target(capsys):
    assert main(["kernels", "--arch", "sm_70"]) == 2
    assert capsys.readouterr().err.startswith("error: arch: expected one of sm_80, ")


def test_division_by_an_inverse():
    """What `divide` of cuda/checkpointing_ssu.cu does for tickets of up to 2^20 sequences."""
    rng = np.random.default_rng(0)
    divisors = [1, 2, 3, 7, 8, 65535, 65536, *rng.integers(1, 1 << 16, 200)]
    for divisor in map(int, divisors):
        inverse, most = schedule.inverse(divisor), min(divisor << 20, 2**44 // divisor) - 1
        near = {k * divisor + e for k in (1, 2, 511, 512, most // divisor) for e in (-1, 0, 1)}
        numbers = {0, most, *near, *map(int, rng.integers(0, most + 1, 50))}
        for number in (n for n in numbers if 0 <= n <= most):
            assert number * inverse < 2**64
            assert number * inverse >> 44 == number // divisor, (number, divisor)
