"""The kernels of other libraries on the same workload, where they can be imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from workload import COPIED, SCALED, Shape

DEVICE = "cuda"
PEERS = ("flashinfer", "mamba_ssm")


@dataclass
class Case:
    """What a peer needs to build its own copy of a case."""

    shape: Shape
    dtype: str
    tokens: int
    batch: int
    layers: int
    prev: np.ndarray
    start: np.ndarray
    slots: np.ndarray


@dataclass
class Launches:
    """A peer's launches, one a layer, and what sets the cursors that they read."""

    calls: list[Callable[[], Any]]
    set_cursors: Callable[[np.ndarray, np.ndarray], Any] = lambda prev, start: None


Maker = Callable[[Case], "Launches | None"]


def find_peer(name: str) -> Maker:
    """What makes a peer's launches for a case, or None where it has no such kernel.

    Raises ImportError with one line that says what is missing.
    """
    if name not in PEERS:
        raise ValueError(f"peer: expected one of {', '.join(PEERS)}, got {name}")
    module, function = {
        "flashinfer": ("flashinfer.mamba", "checkpointing_ssu"),
        "mamba_ssm": ("mamba_ssm.ops.triton.selective_state_update", "selective_state_update"),
    }[name]
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a missing package, or one that finds no compiler or GPU
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImportError(
            f"peer {name}: {module}.{function} cannot be imported ({reason})"
        ) from error
    if name == "flashinfer" and "ring_start" not in inspect.signature(found).parameters:
        raise ImportError("peer flashinfer: checkpointing_ssu with rings needs FlashInfer 0.7.4")
    makers = {"flashinfer": _flashinfer, "mamba_ssm": _mamba_ssm}
    return lambda case: makers[name](found, case)


def _inputs(case: Case) -> dict[str, Any]:
    """Tokens and weights as both peers take them: tied views, torch tensors on the GPU."""
    import torch

    shape, tokens = case.shape, (case.batch, case.tokens)
    on = {"device": DEVICE}
    bf16 = {"dtype": torch.bfloat16, **on}
    heads = (shape.nheads, shape.head_dim)
    dt = torch.randn(*tokens, shape.nheads, **on)[..., None]
    A = -torch.rand(shape.nheads, **on).exp()
    D, bias = torch.randn(shape.nheads, **on), torch.randn(shape.nheads, **on) - 3
    return {
        "x": torch.randn(*tokens, *heads, **bf16),
        "dt": dt.expand(*tokens, *heads),
        "A": A[:, None, None].expand(*heads, shape.dstate),
        "B": torch.randn(*tokens, shape.ngroups, shape.dstate, **bf16),
        "C": torch.randn(*tokens, shape.ngroups, shape.dstate, **bf16),
        "D": D[:, None].expand(*heads),
        "dt_bias": bias[:, None].expand(*heads),
        "dt_softplus": True,
        "state_batch_indices": torch.from_numpy(case.slots).to(DEVICE),
    }


def _states(case: Case) -> list[Any]:
    import torch

    shape = case.shape
    size = (case.batch, shape.nheads, shape.head_dim, shape.dstate)
    dtype = getattr(torch, case.dtype)
    if case.dtype == "int8":
        return [
            torch.randint(-99, 99, size, dtype=dtype, device=DEVICE) for _ in range(case.layers)
        ]
    return [torch.randn(size, device=DEVICE).to(dtype) for _ in range(case.layers)]


def _flashinfer(function: Any, case: Case) -> Launches | None:
    """With scratch, so that FlashInfer chooses between its one kernel and its two."""
    if case.dtype in COPIED:
        return None
    import torch

    from replayssm_cupy.scratch import peer_shapes

    shape, rows = case.shape, case.shape.window + case.tokens
    on = {"device": DEVICE}
    inputs = _inputs(case)
    out = torch.empty_like(inputs["x"])
    if case.dtype not in SCALED:
        for name, size in peer_shapes(shape.window).items():
            dtype = torch.float32 if name == "cumAdt_vec" else torch.bfloat16
            inputs[name] = torch.empty(case.batch, shape.nheads, *size, dtype=dtype, **on)
    start, prev = (torch.from_numpy(array).to(DEVICE) for array in (case.start, case.prev))
    launches = []
    for state in _states(case):
        rings = (
            torch.randn(case.batch, shape.nheads, rows, shape.head_dim, **on).bfloat16(),
            torch.randn(case.batch, shape.ngroups, rows, shape.dstate, **on).bfloat16(),
            torch.full((case.batch, shape.nheads, rows), 0.05, **on),
        )
        more = dict(inputs)
        if case.dtype in SCALED:
            more["state_scale"] = torch.full(state.shape[:3], 0.01, **on)
        launches.append(
            lambda state=state, rings=rings, more=more: function(
                state, *rings, start, prev, out=out, **more
            )
        )

    def set_cursors(new_prev: np.ndarray, new_start: np.ndarray) -> None:
        prev.copy_(torch.from_numpy(new_prev))
        start.copy_(torch.from_numpy(new_start))

    return Launches(launches, set_cursors)


def _mamba_ssm(function: Any, case: Case) -> Launches | None:
    if case.tokens != 1 or case.dtype in SCALED:
        return None
    inputs = _inputs(case)
    for name in ("x", "dt", "B", "C"):
        inputs[name] = inputs[name][:, 0]
    return Launches([lambda state=state: function(state, **inputs) for state in _states(case)])
