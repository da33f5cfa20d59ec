"""The launcher of `plan.py` that runs a kernel on the CPU, on NumPy's memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from host.builder import HostModule, Options, compile_kernels
from replayssm_cupy.keys import CheckpointingSsuKey, LayoutKey

if TYPE_CHECKING:
    from replayssm_cupy.plan import Plan

CUDA = pathlib.Path(__file__).resolve().parents[2] / "cuda"
ORDERS = ("forward", "reverse", "shuffled")


class EmulationError(RuntimeError):
    """A kernel broke a rule of CUDA's execution model; the message names block and threads."""


class HostLauncher:
    """
    Runs every launch at once, on the caller's thread, before `launch` returns.

    Parameters
    ----------
    order : "forward", "reverse" or "shuffled": of lanes, warps and blocks. Async copies land at
        their wait, at their issue, or at either.
    seed : of the shuffled order.
    sources : the folder of the .cu files; default $REPLAYSSM_HOST_SOURCES, else cuda/.
    build : "plain", "debug", "asan" or "ubsan"; default $REPLAYSSM_HOST_BUILD, else "plain". A
        sanitizer needs a process made by `sanitized.py`.
    layouts : take the instances that know the layout of their arrays, where there are any.
    """

    def __init__(
        self,
        order: str = "forward",
        seed: int = 0,
        *,
        sources: str | os.PathLike[str] | None = None,
        build: str | None = None,
        layouts: bool = False,
    ) -> None:
        self.options = Options(ORDERS.index(order), seed)
        self.sources = pathlib.Path(sources or os.environ.get("REPLAYSSM_HOST_SOURCES", CUDA))
        self.build = build or os.environ.get("REPLAYSSM_HOST_BUILD", "plain")
        self.layouts = layouts
        self.late: Callable[[Plan], Sequence[np.ndarray]] = lambda plan: ()
        self._modules: dict[tuple[str, str, str], HostModule] = {}

    def prepare(self, source: str, names: list[str], known: str = "") -> None:
        """Compile several kernels of one file together; `launch` compiles them one by one."""
        module = compile_kernels(self.sources / source, tuple(names), self.build, known)
        self._modules.update({(source, name, known): module for name in names})

    @contextlib.contextmanager
    def installed(self) -> Iterator[HostLauncher]:
        """In the `with` block calls with NumPy arrays run the kernels, not the reference."""
        from replayssm_cupy import decode, plan

        plan.launchers["cpu"] = self
        try:
            yield self
        finally:
            del plan.launchers["cpu"]
            decode._plans.clear()

    def launch(self, plan: Plan, stream: int) -> None:
        """Run a plan; its record is the parameter that cuLaunchKernel would copy.

        A dependent launch finds all bits set in the packed arrays `late(plan)` until it waits.
        """
        del stream
        key, known = plan.key, ""
        if self.layouts and plan.layout and isinstance(key, CheckpointingSsuKey):
            known = LayoutKey(key, plan.layout).definition
        self.run(
            key.source, key.name_expression, plan.grid, plan.block, plan.shared_bytes, plan.record,
            self.late(plan) if plan.pdl else (), known,
        )  # fmt: skip

    def run(
        self,
        source: str,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        record: ctypes.Structure,
        late: Sequence[np.ndarray] = (),
        known: str = "",
    ) -> None:
        """Run `name` of `source`, which may be a kernel that no plan knows."""
        if (source, name, known) not in self._modules:
            self.prepare(source, [name], known)
        module = self._modules[source, name, known]
        message = module.launch(name, grid, block, shared_bytes, record, self.options, late)
        if message is not None:
            raise EmulationError(f"{name}: {message}")


def scratch_of(plan: Plan) -> list[np.ndarray]:
    """The bytes that the second of two kernels reads, as the plan's record has them."""
    record = plan.record
    return [
        np.frombuffer((ctypes.c_ubyte * (4 * record.batch * record.nheads * words)).from_address(p))
        for p, words in (
            (record.cb_scaled, record.cb_scaled_words),
            (record.cumAdt_vec, record.cumAdt_vec_words),
            (record.cb_old, record.cb_old_words),
        )
    ]
