"""The emulated kernels and the GPU on one set of cases: what the CPU shows holds there."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from cases import DTYPES, GPU_DTYPES, SHAPES, Case, make_pools, make_step
from conftest import CudaBackend, HostBackend
from oracles import bits, poison_dead_rows, relative_l2

import replayssm_cupy as ssm
from replayssm_cupy import plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the host kernels"),
]
# Between two fp32 sums of the same terms in another order, and exp2 to 2^-22.
SUMS = 5e-6


def on_both(monkeypatch, call):
    """The results of `call(backend)` with the emulated kernels and on the GPU."""
    host = HostBackend()
    monkeypatch.setitem(plan.launchers, "cpu", host.launcher)
    return call(host), call(CudaBackend())


@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids="-".join)
@pytest.mark.parametrize(
    "shape", ["tiny", "three-heads-per-group", "five-heads-per-group", "widest"]
)
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_replay_step_and_plain_update(monkeypatch, shape, dtypes, tokens):
    case = Case(SHAPES[shape], tokens, 16, *dtypes, num_slots=4)
    rng = np.random.default_rng(tokens)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 16, 0, 7, 12
    poison_dead_rows(pools)
    step = make_step(case, 4, rng)

    def replay(backend):
        arrays = {name: backend.put(array) for name, array in pools.arrays().items()}
        given = {name: backend.put(array) for name, array in step.arrays().items()}
        out = backend.put(np.zeros(step.x.shape, np.float32))
        ssm.checkpointing_ssu(**arrays, **given, out=out, dt_softplus=True)
        return {"out": backend.get(out), **{n: backend.get(a) for n, a in arrays.items()}}

    def plain(backend):
        state = backend.put(pools.state)
        given = {name: backend.put(array) for name, array in step.arrays().items()}
        out = backend.put(np.zeros(step.x.shape, np.float32))
        ssm.selective_state_update(state, **given, out=out, dt_softplus=True)
        return {"out": backend.get(out), "state": backend.get(state)}

    # A state of 16 bits may round the other way where the sums differ in the last place.
    rounding = SUMS if case.state_dtype == "float32" else 1e-4
    for call in (replay, plain):
        host, gpu = on_both(monkeypatch, call)
        assert relative_l2(host["out"], gpu["out"]) <= SUMS
        assert relative_l2(host["state"], gpu["state"]) <= rounding
        for name in ("x_cache", "B_cache", "ring_start", "prev_num_accepted_tokens"):
            if name in host:
                assert np.array_equal(bits(host[name]), bits(gpu[name])), name
        if "dt_cache" in host:
            np.testing.assert_allclose(host["dt_cache"], gpu["dt_cache"], rtol=1e-6)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_conversions_bit_for_bit(monkeypatch, target, source):
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 4 * 64 * 64, np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        given = patterns.astype(DTYPES[source]).reshape(2, 2, 64, 64)

    def load(backend):
        state = backend.put(np.zeros((2, 2, 64, 64), DTYPES[target]))
        ssm.load_state(state, None, backend.put(given))
        return backend.get(state)

    host, gpu = on_both(monkeypatch, load)
    assert np.array_equal(np.isnan(host.astype(np.float32)), np.isnan(gpu.astype(np.float32)))
    finite = ~np.isnan(host.astype(np.float32))
    assert np.array_equal(bits(host[finite]), bits(gpu[finite]))


@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids="-".join)
@pytest.mark.parametrize("shape", ["tiny", "three-heads-per-group", "widest"])
def test_snapshots(monkeypatch, shape, dtypes):
    case = Case(SHAPES[shape], 4, 16, *dtypes, num_slots=6)
    rng = np.random.default_rng(1)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:3] = 16, 0, 7
    poison_dead_rows(pools)
    A = make_step(case, 1, rng).A

    def snapshot(backend):
        arrays = {name: backend.put(array) for name, array in pools.arrays().items()}
        lists = [[arrays.pop(n)] for n in ("state", "x_cache", "B_cache", "dt_cache")]
        stack = ssm.LayerStack.from_arrays(*lists, **arrays, npredicted=4)
        stack.refresh([backend.put(A)])
        src, dst, prefix = (backend.put(np.array(values, np.int32))
                            for values in ([0, 1, 2], [3, 4, 5], [16, 0, 5]))  # fmt: skip
        stack.materialize(src, dst, prefix)
        image = stack.export_slots([0, 3])
        return backend.get(stack.states[0]), image

    (host, host_image), (gpu, gpu_image) = on_both(monkeypatch, snapshot)
    assert np.array_equal(bits(host[[0, 1, 2, 4]]), bits(gpu[[0, 1, 2, 4]]))
    assert relative_l2(host, gpu) <= (SUMS if case.state_dtype == "float32" else 1e-4)
    assert np.array_equal(host_image["slots"][0], gpu_image["slots"][0])
