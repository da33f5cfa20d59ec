"""What a machine lacks: one line that says which, and the pip command that brings it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_input import GOOD_STACK, Call, label

import replayssm_cupy as ssm
from replayssm_cupy import compiler
from replayssm_cupy.keys import AdvanceRingKey

ROOT = Path(__file__).parents[1]

NEEDS_NO_GPU = pytest.mark.skipif(compiler.gpu_count() > 0, reason="this machine has a GPU")
BLOCKER = """
import sys
sys.modules.update(dict.fromkeys({blocked}))
import numpy as np
import replayssm_cupy as ssm
from replayssm_cupy import compiler, keys
def line(function):
    try:
        function()
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
    else:
        print("no error")
"""


def lines_without(blocked: set[str], program: str) -> list[str]:
    """What `program` prints in a fresh process where some modules do not exist."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = BLOCKER.format(blocked=blocked) + program
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_cupy():
    """The CPU path works; everything else says what is missing and how to get it."""
    program = """
stack = ssm.LayerStack(1, 2, 4, 64, 2, 64)
print(stack.device)
x, B = np.ones((2, 4, 64), np.float32), np.ones((2, 2, 64), np.float32)
state = np.ones((2, 4, 64, 64), np.float32)
print(ssm.selective_state_update(state, x, x[..., 0], -x[0, :, 0], B, B).shape)
line(lambda: ssm.LayerStack(1, 2, 4, 64, 2, 64, device="cuda"))
line(lambda: ssm.warm_up(dstate=64))
line(lambda: compiler.compile_cubin([keys.AdvanceRingKey()], "sm_90"))
"""
    device, shape, *errors = lines_without({"cupy", "cupy_backends", "torch", "jax"}, program)
    assert (device, shape) == ("cpu", "(2, 4, 64)")
    missing = r"ReplaySSMError: CuPy is missing, .*: pip install \"replayssm_cupy\[cuda13\]\" .*"
    assert len(errors) == 3
    assert all(re.fullmatch(missing, error) for error in errors), errors


def test_with_a_cupy_that_cannot_be_imported():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    program = 'line(lambda: ssm.LayerStack(1, 2, 4, 64, 2, 64, device="cuda"))\n'
    (line,) = lines_without({"cupy_backends"}, program)  # CuPy explains itself at length, we do not
    broken = r"ReplaySSMError: CuPy cannot be imported \(.+\): pip install .*\[cuda13\].*"
    assert re.fullmatch(broken, line), line


@pytest.fixture
def nvrtc() -> Any:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy has no NVRTC")


def test_nvrtc_that_cannot_be_loaded(nvrtc, monkeypatch):
    pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13: no such file")

    monkeypatch.setattr(nvrtc, "createProgram", refuse)
    call = Call(compiler.compile_cubin, {"keys": [AdvanceRingKey()], "arch": "sm_90"})
    message = r"^NVRTC is missing \(CuPy failed to load libnvrtc.*\): pip install .*\[cuda13\]"
    call.refused(ssm.ReplaySSMError, message)


def test_without_headers(nvrtc, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    call = Call(compiler.compile_cubin, {"keys": [AdvanceRingKey()], "arch": "sm_90"})
    message = r"^the CUDA headers are missing: pip install .*\[cuda13\]"
    call.refused(ssm.ReplaySSMError, message)


class FakeModule:
    """`cupy.RawModule` on a machine where something is missing."""

    message = ""

    def __init__(self, **arguments: Any) -> None:
        pass

    def get_function(self, name: str) -> None:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("CuPy failed to load libnvrtc.so.13: cannot open",
         r"NVRTC is missing \(.*\): pip install"),
        ('convert.cuh(3): catastrophic error: cannot open source file "cuda_bf16.h"',
         r"the CUDA headers are missing \(.*\): pip install"),
        ("cudaErrorInsufficientDriver: CUDA driver version is insufficient: Insufficient",
         r"no NVIDIA driver or GPU \(.*\): NumPy arrays run on the CPU path"),
    ],
)  # fmt: skip
def test_first_launch_where_something_is_missing(cause, message, monkeypatch):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.setattr(FakeModule, "message", cause)
    monkeypatch.setattr(cupy, "RawModule", FakeModule)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(compiler, "_target_of", lambda device: "sm_90")
    call = Call(compiler.load, {"keys": [AdvanceRingKey()], "device": 0})
    call.refused(ssm.ReplaySSMError, f"^{message}")


@NEEDS_NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu(device):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    call = Call(ssm.LayerStack, GOOD_STACK | {"device": device})
    message = r"^no NVIDIA driver or GPU \(.*\): NumPy arrays run on the CPU path$"
    call.refused(ssm.ReplaySSMError, message)
    Call(ssm.warm_up, {"dstate": 128}).refused(ssm.ReplaySSMError, message)


@NEEDS_NO_GPU
def test_auto_is_the_cpu_without_a_gpu():
    stack = ssm.LayerStack(**(GOOD_STACK | {"device": "auto"}))
    assert stack.device.kind == "cpu"


SIZES = {"nheads": 4, "ngroups": 2, "head_dim": 64, "max_window": 16}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dstate": 100}, ValueError, r"dstate: expected one of .*, got 100 \(nearest .*\)"),
        ({"dstate": "128"}, TypeError, "dstate: expected an int, got str"),
        ({"state_dtype": "int32"}, TypeError, "state_dtype: expected one of .*, got int32"),
        ({"activation_dtype": "float32"}, TypeError,
         "activation_dtype: expected one of bfloat16, float16, got float32"),
        ({"npredicted": 0}, ValueError, "npredicted: expected 1 to 16, got 0"),
        ({"npredicted": 17}, ValueError, "npredicted: expected 1 to 16, got 17"),
        ({"npredicted": 1.0}, TypeError, "npredicted: expected an int, got float"),
        ({"device": "cuda"}, TypeError, "device: expected an int, got str"),
        ({"algorithm": "three"}, ValueError, "algorithm: expected .*, got 'three'"),
        ({"nheads": 4}, TypeError, "ngroups: expected an int, got NoneType"),
        ({"ring_buffer_len": 20}, TypeError, "nheads: expected an int, got NoneType"),
        (SIZES | {"nheads": "4"}, TypeError, "nheads: expected an int, got str"),
        (SIZES | {"ngroups": 3}, ValueError,
         "ngroups: expected a divisor of nheads = 4, got 3"),
        (SIZES | {"ngroups": 0}, ValueError,
         "ngroups: expected a divisor of nheads = 4, got 0"),
        (SIZES | {"head_dim": 65}, ValueError, "head_dim: expected one of .*, got 65 .*"),
        (SIZES | {"max_window": 17}, ValueError, "max_window: expected 1 to 16, got 17"),
        (SIZES | {"max_window": 3, "npredicted": 4}, ValueError,
         "max_window: expected 4 to 16, got 3"),
        (SIZES | {"ring_buffer_len": 16}, ValueError,
         "ring_buffer_len: expected at least 17, got 16"),
    ],
    ids=label,
)  # fmt: skip
def test_warm_up_values(changes, error, message):
    Call(ssm.warm_up, {"dstate": 128, **changes}).refused(error, f"^{message}$")


@pytest.mark.gpu
def test_ordinal_of_a_gpu_that_is_not_there():
    count = compiler.gpu_count()
    message = f"^device: expected a GPU ordinal below {count}, got {count}$"
    call = Call(ssm.LayerStack, GOOD_STACK | {"device": f"cuda:{count}"})
    call.refused(ssm.ReplaySSMError, message)
    Call(ssm.warm_up, {"dstate": 128, "device": count}).refused(ssm.ReplaySSMError, message)


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu_without_cupy():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that PyTorch can use")
    program = """
import torch
state = torch.ones(2, 4, 64, 64, device="cuda")
x, B = torch.ones(2, 4, 64, device="cuda"), torch.ones(2, 2, 64, device="cuda")
line(lambda: ssm.selective_state_update(state, x, x[..., 0], -x[0, :, 0], B, B))
print(bool((state == 1).all()))
"""
    error, untouched = lines_without({"cupy", "cupy_backends"}, program)
    assert re.match(r"ReplaySSMError: .*CuPy.*: pip install \"replayssm_cupy\[cuda13\]\"", error)
    assert untouched == "True"
