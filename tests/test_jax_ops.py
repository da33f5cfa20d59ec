"""Functional ReplaySSM in JAX: the stack's bits, in place where donated, whole under transforms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import bits
from runs import COPIED

import replayssm_cupy as ssm
from replayssm_cupy import plan

jax = pytest.importorskip("jax", reason="jax is not installed")
from replayssm_cupy import jax_calls, jax_ops  # noqa: E402  # import jax

CASE = Case(Shape("jax-ops", 4, 2, 64, 128), npredicted=2, max_window=6, num_slots=5)
LAYERS, SIZES = 2, (5, 4, 64, 2, 128)
WINDOW = {"npredicted": 2, "max_window": 6}


GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu", "gpu:1")]


@pytest.fixture(params=["cpu", "cpu-kernels", *GPUS])
def device(request, monkeypatch) -> Any:
    """Where the arrays are, the first GPU being JAX's default and the current one; with "kernels"
    those of tests/host run on them."""
    if request.param == "cpu-kernels":
        from host.launcher import HostLauncher

        monkeypatch.setitem(plan.launchers, "cpu", HostLauncher())
    platform, _, index = request.param.removesuffix("-kernels").partition(":")
    try:
        found = jax.devices(platform)
    except RuntimeError as error:
        pytest.skip(f"JAX has no such device: {error}")
    if len(found) <= int(index or 0):
        pytest.skip(f"needs 2 GPUs that JAX can use, found {len(found)}")
    return found[int(index or 0)]


def make(
    device: Any, state_dtype: str = "float32", seed: int | bool = False
) -> tuple[Any, ssm.LayerStack]:
    """The same new states for JAX and for a stack of NumPy, or of CuPy on a GPU."""
    rng = np.random.default_rng(0)
    where = f"cuda:{device.local_hardware_id}" if device.platform == "gpu" else "cpu"
    options = WINDOW | {"state_dtype": state_dtype, "stochastic_rounding": seed}
    stack = ssm.LayerStack(LAYERS, *SIZES, **options, device=where)
    arrays = jax_ops.stack_arrays(LAYERS, *SIZES, **options, device=device)
    state = rng.standard_normal((5, 4, 64, 128)).astype(np.float32)
    if state_dtype == "float32":
        for layer in range(LAYERS):
            stack.load_state(layer, None, jax.device_put(state, device))
        states = [jax.device_put(state, device) for _ in range(LAYERS)]
        arrays = replace(arrays, states=states)
    return arrays, stack


def tokens(seed: int, device: Any) -> dict[str, Any]:
    step = make_step(CASE, 3, np.random.default_rng(seed), slots=np.array([4, 1, -1], np.int32))
    given = step.arrays()
    given["slots"] = given.pop("state_batch_indices")
    return {name: jax.device_put(array, device) for name, array in given.items()}


def get(array: Any) -> np.ndarray:
    if hasattr(array, "get"):  # CuPy copies no 8-bit floats
        array = (array.view(np.uint8) if array.dtype.itemsize == 1 else array).get()
    return bits(np.asarray(array))


def assert_same(arrays: Any, stack: ssm.LayerStack) -> None:
    """All that means something: ring rows that were never written hold anything."""
    for mine, theirs in (
        *zip(arrays.states, stack.states, strict=True),
        *zip(arrays.state_scales, stack.state_scales, strict=True),
        *zip(arrays.state_copies, stack.state_copies, strict=True),
        (arrays.ring_start, stack.ring_start),
        (arrays.prev_num_accepted_tokens, stack.prev_num_accepted_tokens),
    ):
        assert np.array_equal(get(mine), get(theirs))
    assert (arrays.rand_seed is None) == (stack.rand_seed is None)
    if stack.rand_seed is not None:
        assert get(arrays.rand_seed).view(np.int64) == get(stack.rand_seed).view(np.int64)


def loop(arrays: Any, given: dict[str, Any], accepted: Any) -> Any:
    """A step of every layer and the advance."""
    given = dict(given)
    slots = given.pop("slots")
    outs = []
    for layer in range(LAYERS):
        y, arrays = jax_ops.step(arrays, layer, **given, slots=slots)
        outs.append(y)
    return outs, jax_ops.advance(arrays, slots, accepted, 2)


@pytest.mark.parametrize(
    ("state_dtype", "seed"),
    [*((dtype, False) for dtype in ("float32", "float16", "int8", "float8_e4m3fn")),
     ("bfloat16", True), ("float16", -(2**40) - 1), ("int8", 2**32 - 3), ("float8_e4m3fn", 7),
     *((dtype, seed) for dtype in COPIED for seed in (False, 5))],
)  # fmt: skip
def test_jitted_loop(device, state_dtype, seed):
    """The stack's bits, of stochastic rounding too, whose seed moves on across its two words;
    donated arrays stay where they are, and nothing is compiled again."""
    arrays, stack = make(device, state_dtype, seed)
    step = jax.jit(lambda *given: loop(*given), donate_argnums=0)  # with a cache of its own
    arrays = jax.tree.map(jax.numpy.copy, arrays)  # memory that is JAX's own, not NumPy's
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)]
    accepted = jax.device_put(np.array([2, 1, 0], np.int32), device)
    for seed in range(8):
        given = tokens(seed, device)
        before = arrays
        outs, arrays = step(arrays, given, accepted)
        assert before.states[0].is_deleted()
        for layer, y in enumerate(outs):
            assert np.array_equal(get(y), get(stack.step(layer, **given)))
        stack.advance(given["slots"], accepted)
    assert_same(arrays, stack)
    assert all(get(copy).any() for copy in arrays.state_copies)
    # The layers have the same tokens, and differ only by what they round with.
    assert np.array_equal(*map(get, arrays.states)) == (arrays.rand_seed is None)
    assert places == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)]
    assert step._cache_size() == 1


def test_without_donation(device):
    """The caller's arrays stay as they were, inside jit and outside."""
    arrays, stack = make(device)
    given, accepted = tokens(0, device), jax.device_put(np.array([2, 1, 0], np.int32), device)
    old = [get(leaf).copy() for leaf in jax.tree.leaves(arrays)]
    for call in (loop, jax.jit(loop)):
        outs, after = call(arrays, given, accepted)
        outs, after = call(after, given, accepted)
        assert all(np.array_equal(get(leaf), was) for leaf, was in
                   zip(jax.tree.leaves(arrays), old, strict=True))  # fmt: skip
    for _ in range(2):
        expected = [stack.step(layer, **given) for layer in range(LAYERS)]
        stack.advance(given["slots"], accepted)
    assert all(np.array_equal(get(y), get(e)) for y, e in zip(outs, expected, strict=True))
    assert_same(after, stack)


def test_calls_outside_jit_compile_once(device):
    arrays, _ = make(device)
    given, accepted = tokens(0, device), jax.device_put(np.array([2, 1, 0], np.int32), device)
    _, arrays = loop(arrays, given, accepted)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        import logging

        seen: list[str] = []
        patch.setattr(logging.Logger, "handle", lambda self, record: seen.append(record.msg))
        loop(arrays, given, accepted)
    assert not [line for line in seen if "ompil" in str(line)], seen


@pytest.mark.parametrize(
    ("state_dtype", "seed"), [("float32", False), ("bfloat16", 3), ("float16+nvfp4", False)]
)
def test_scan_of_64_steps(device, state_dtype, seed):
    arrays, stack = make(device, state_dtype, seed)
    accepted = np.random.default_rng(3).integers(0, 3, (64, 3)).astype(np.int32)
    inputs = [tokens(seed, device) for seed in range(64)]
    stacked = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *inputs)

    def body(arrays: Any, now: Any) -> Any:
        outs, arrays = loop(arrays, *now)
        return arrays, outs

    scan = jax.jit(partial(jax.lax.scan, body), donate_argnums=0)
    arrays, outs = scan(arrays, (stacked, jax.device_put(accepted, device)))
    for number, given in enumerate(inputs):
        for layer in range(LAYERS):
            y = stack.step(layer, **given)
            assert np.array_equal(get(outs[layer][number]), get(y)), number
        stack.advance(given["slots"], jax.device_put(accepted[number], device))
    assert_same(arrays, stack)


def test_many_layers_in_one_callback(device):
    arrays, stack = make(device)
    inputs = [tokens(seed, device) for seed in range(LAYERS)]
    slots = inputs[0]["slots"]
    per_layer = [{name: a for name, a in given.items() if name != "slots"} for given in inputs]
    step = jax.jit(jax_ops.step_layers, donate_argnums=0)
    for _ in range(3):
        outs, arrays = step(arrays, per_layer, slots=slots)
        for layer, y in enumerate(outs):
            right = stack.step(layer, **per_layer[layer], slots=slots)
            assert np.array_equal(get(y), get(right))
    assert_same(arrays, stack)
    text = str(jax.make_jaxpr(jax_ops.step_layers)(arrays, per_layer, slots=slots))
    assert text.count("buffer_callback[") == 1


def test_lengths_resets_and_forced_flushes(device):
    arrays, stack = make(device)
    given = tokens(0, device)
    slots = given["slots"]
    put = partial(jax.device_put, device=device)
    flush, fresh = put(np.array([True, False, True])), put(np.array([False, True, False]))
    lengths, accepted = put(np.array([2, 1, 0], np.int32)), put(np.array([1, 1, 0], np.int32))
    _, arrays = jax_ops.step(arrays, 0, **given)
    arrays = jax_ops.advance(arrays, slots, accepted, lengths)
    stack.step(0, **given)
    stack.advance(slots, accepted, lengths)
    _, arrays = jax_ops.step(arrays, 0, **given, force_flush=flush)
    arrays = jax_ops.advance(arrays, slots, accepted, 2, reset=fresh, force_flush=flush)
    stack.step(0, **given, force_flush=flush)
    stack.advance(slots, accepted, 2, reset=fresh, force_flush=flush)
    assert_same(arrays, stack)
    arrays = jax_ops.reset(arrays, slots[:1])
    stack.reset(slots[:1])
    assert_same(arrays, stack)
    assert not arrays.states[1][4].any() and arrays.states[1][1].any()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8", *COPIED])
def test_a_prefill_and_a_reset(device, state_dtype):
    """Jitted and not: in the memory of donated arrays, the caller's untouched otherwise."""
    arrays, stack = make(device, state_dtype)
    rng, put = np.random.default_rng(2), partial(jax.device_put, device=device)
    load = jax.jit(jax_ops.load_state, static_argnums=1, donate_argnums=0)
    empty = jax.jit(jax_ops.reset, donate_argnums=0)
    arrays = jax.tree.map(jax.numpy.copy, arrays)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)]
    for number, dtype in enumerate(("float32", "bfloat16")):
        slots = put(np.array([[3, -1, 0], [2, 1, 9]][number], np.int32))
        state = put(rng.standard_normal((3, 4, 64, 128)).astype(dtype))
        kept = [get(leaf).copy() for leaf in jax.tree.leaves(arrays)]
        after = jax.tree.map(jax.numpy.copy, jax_ops.load_state(arrays, number, slots, state))
        assert all(map(np.array_equal, map(get, jax.tree.leaves(arrays)), kept))
        arrays = load(arrays, number, slots, state)
        stack.load_state(number, slots, state)
        assert_same(arrays, stack)
        assert_same(after, stack)
        assert get(arrays.states[number][int(slots[0])]).any()
        assert places == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arrays)]
    given = tokens(0, device)
    for layer in range(LAYERS):
        y, arrays = jax_ops.step(arrays, layer, **given)
        assert np.array_equal(get(y), get(stack.step(layer, **given)))
    for slots in (given["slots"][1:], None):
        arrays = empty(jax.tree.map(jax.numpy.copy, arrays), slots)
        stack.reset(slots)
        assert_same(arrays, stack)
    everything = put(rng.standard_normal((5, 4, 64, 128)).astype(np.float32))
    arrays = jax_ops.load_state(arrays, 1, None, everything)
    stack.load_state(1, None, everything)
    assert_same(arrays, stack)


@pytest.mark.parametrize("state_dtype", COPIED)
def test_arrays_with_read_copies(state_dtype):
    """Shapes, types, a pytree with every array in it, and heads that are split."""
    cpu = jax.devices("cpu")[0]
    arrays, stack = make(cpu, state_dtype)
    for mine, theirs in zip(arrays.state_copies, stack.state_copies, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    assert {array.dtype.name for array in arrays.states} == {"float16"}
    leaves, tree = jax.tree.flatten(arrays)
    assert len(leaves) == 6 * LAYERS + 2
    again = jax.tree.unflatten(tree, leaves)
    assert all(a is b for a, b in zip(again.state_copies, arrays.state_copies, strict=True))
    spec = jax.sharding.PartitionSpec
    assert arrays.specs("heads").state_copies == [spec(None, "heads")] * LAYERS
    assert make(cpu, "float16")[0].state_copies == []


# --- Snapshots -----------------------------------------------------------------------------------


def decays(device: Any) -> list[Any]:
    """The layers' A."""
    return [tokens(seed, device)["A"] for seed in range(LAYERS)]


@pytest.mark.parametrize(
    ("state_dtype", "seed"),
    [("float32", False), ("float16", 5), ("int8", False), ("int8", 5),
     ("float16+fp8", False), ("float16+nvfp4", 5)],
)  # fmt: skip
def test_materialize(device, state_dtype, seed):
    """The stack's bits, donated arrays in place, the caller's untouched where they are not."""
    arrays, stack = make(device, state_dtype, seed)
    A, put = decays(device), partial(jax.device_put, device=device)
    stack.refresh(A)
    given, accepted = tokens(0, device), put(np.array([2, 1, 0], np.int32))
    for _ in range(3):
        _, arrays = loop(arrays, given, accepted)
        for layer in range(LAYERS):
            stack.step(layer, **given)
        stack.advance(given["slots"], accepted)
    snapshot = jax.jit(jax_ops.materialize, donate_argnums=0)
    for src, dst, prefix in (
        ([4, 1, -1], [0, 3, 2], [6, 2, 1]), ([0, 3, 1], [2, 4, 1], [0, 0, 2]),
        ([1, 2, 3], [1, -1, 9], [1, 0, 0]),
    ):  # fmt: skip
        slots = [put(np.array(values, np.int32)) for values in (src, dst, prefix)]
        kept = [get(leaf).copy() for leaf in jax.tree.leaves(arrays)]
        after = jax_ops.materialize(arrays, A, *slots)
        assert all(
            np.array_equal(get(leaf), was)
            for leaf, was in zip(jax.tree.leaves(arrays), kept, strict=True)
        )
        mine = jax.tree.map(jax.numpy.copy, arrays)
        places = [leaf.unsafe_buffer_pointer() for leaf in (*mine.states, *mine.state_copies)]
        arrays = snapshot(mine, A, *slots)
        now = (*arrays.states, *arrays.state_copies)
        assert places == [leaf.unsafe_buffer_pointer() for leaf in now]
        stack.materialize(*slots)
        assert_same(arrays, stack)
        assert_same(after, stack)
    assert arrays.states[0][2].any()


def test_materialize_by_layer(device):
    arrays, stack = make(device)
    A, put = decays(device), partial(jax.device_put, device=device)
    stack.refresh(A)
    given = tokens(0, device)
    _, arrays = loop(arrays, given, put(np.array([2, 1, 0], np.int32)))
    for layer in range(LAYERS):
        stack.step(layer, **given)
    stack.advance(given["slots"], put(np.array([2, 1, 0], np.int32)))
    src, prefix = put(np.array([[4, 1], [1, 4]])), put(np.array([1, 1]))
    dst = put(np.array([[0, 2], [2, 0]]))
    arrays = jax_ops.materialize(arrays, A, src, dst, prefix, pad_slot_id=3)
    stack.materialize(src, dst, prefix, pad_slot_id=3)
    assert_same(arrays, stack)


def test_blocks_inside_a_scan(device):
    """A snapshot at every fourth token, and another request that goes on from it."""
    arrays, stack = make(device)
    A, put = decays(device), partial(jax.device_put, device=device)
    stack.refresh(A)
    slots, cached = put(np.array([4, 1, -1], np.int32)), put(np.array([0, 2, 3], np.int32))
    given = tokens(0, device) | {"slots": slots}
    counts = np.random.default_rng(4).integers(0, 3, (20, 3)).astype(np.int32)

    def body(carry: Any, accepted: Any) -> Any:
        arrays, committed = carry
        outs, arrays = loop(arrays, given, accepted)
        arrays = jax_ops.materialize_blocks(
            arrays, A, slots, cached, committed, accepted, block_size=4
        )
        return (arrays, committed + accepted), outs[1]

    start = arrays, put(np.zeros(3, np.int32))
    (arrays, committed), outs = jax.jit(partial(jax.lax.scan, body))(start, put(counts))
    total = np.zeros(3, np.int32)
    for number, accepted in enumerate(counts):
        y = [stack.step(layer, **given) for layer in range(LAYERS)][1]
        assert np.array_equal(get(outs[number]), get(y))
        stack.advance(slots, put(accepted))
        stack.materialize_blocks(slots, cached, put(total), put(accepted), block_size=4)
        total += accepted
    assert_same(arrays, stack)
    assert arrays.states[0][0].any() and arrays.states[0][2].any()
    boundaries = put(np.array([int(total[0]), -1, -1], np.int32))
    last = put(counts[-1])
    before = committed - last
    arrays = jax_ops.materialize_blocks(
        arrays, A, slots, cached, before, last, boundaries=boundaries
    )
    stack.materialize_blocks(slots, cached, before, last, boundaries=boundaries)
    assert_same(arrays, stack)
    copied = jax_ops.materialize(arrays, A, cached[:1], cached[2:], committed[:1] * 0)
    assert np.array_equal(get(copied.states[1][3]), get(arrays.states[1][0]))


# --- Transforms and callbacks --------------------------------------------------------------------


def test_vmap_runs_one_after_the_other(device):
    arrays, _ = make(device)
    given, accepted = tokens(0, device), jax.device_put(np.array([2, 1, 0], np.int32), device)
    twice = jax.tree.map(lambda leaf: jax.numpy.stack([leaf, leaf]), arrays)
    inputs = jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), given, tokens(1, device))
    outs, _ = jax.vmap(loop, in_axes=(0, 0, None))(twice, inputs, accepted)
    for row in range(2):
        right, _ = loop(arrays, tokens(row, device), accepted)
        assert np.array_equal(get(outs[0][row]), get(right[0]))


def test_results_with_memory_of_their_own():
    """XLA may hand a callback results that are not where the operands are, aliases or not."""
    cursors = [np.array([3, 1], np.int32), np.array([2, 4], np.int32)]
    results = [np.full(2, 99, np.int32) for _ in cursors]
    read = {"slots": None, "reset": None, "force_flush": None, "query_lens": None,
            "num_accepted": np.array([1, 2], np.int32)}  # fmt: skip
    jax_calls.Advance(2, 6, 8, -1)(None, results, *cursors, read)
    assert [*results[0]] == [3, 1] and [*results[1]] == [3, 6]
    assert [*cursors[0]] == [3, 1] and [*cursors[1]] == [2, 4]


# --- Several devices -----------------------------------------------------------------------------

SHARDED = """
import json, sys
import jax, numpy as np
from replayssm_cupy import jax_ops
devices = jax.devices(sys.argv[1])[:4]
n = len(devices)
P, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(np.array(devices), ("heads",))
rng = np.random.default_rng(0)
sizes = (5, 4 * n, 64, n, 128)
rounded = sys.argv[2] != "float32"
def fresh():
    arrays = jax_ops.stack_arrays(1, *sizes, npredicted=2, max_window=6, device=devices[0],
                                  state_dtype=sys.argv[2], stochastic_rounding=rounded and 9,
                                  parts=n)
    state = np.random.default_rng(1).standard_normal(arrays.states[0].shape).astype(np.float32)
    return jax_ops.load_state(arrays, 0, None, jax.device_put(state, devices[0]))
def loop(arrays, x, dt, A, B, C, D, slots, accepted):
    y, arrays = jax_ops.step(arrays, 0, x, dt, A, B, C, D, slots=slots)
    return y, jax_ops.advance(arrays, slots, accepted, 2)
# Stochastic rounding has a seed for each device: then each part of the heads runs alone.
count = n if rounded else 1
def cut(array, spec, part):
    array = np.asarray(array)
    split = np.split(array, count, spec.index("heads")) if "heads" in spec else [array] * count
    return jax.device_put(split[part], devices[0])
def joined(arrays, spec):
    arrays = [*map(np.asarray, arrays)]
    return np.concatenate(arrays, spec.index("heads")) if "heads" in spec else arrays[0]
def equal(array, parts, spec):
    return np.asarray(array).tobytes() == joined(parts, spec).tobytes()
many = fresh()
axis, tokens = many.specs("heads"), P(None, None, "heads")
inputs = (tokens, tokens, P("heads"), tokens, tokens, P("heads"), P(), P())
sharded = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=(axis, *inputs),
                                out_specs=(tokens, axis), check_vma=False), donate_argnums=0)
ones = [jax.tree.map(lambda a, s: cut(a, s, part), many, axis) for part in range(count)]
many = jax.device_put(many, jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), axis))
single = jax.jit(loop, donate_argnums=0)
slots, accepted = np.array([4, 1, -1], np.int32), np.array([2, 1, 0], np.int32)
same, places = True, None
for _ in range(7):
    x = rng.standard_normal((3, 2, 4 * n, 64)).astype("bfloat16")
    B, C = (rng.standard_normal((3, 2, n, 128)).astype("bfloat16") for _ in range(2))
    dt = rng.standard_normal((3, 2, 4 * n)).astype(np.float32)
    A, D = -rng.uniform(0.5, 4, 4 * n).astype(np.float32), np.ones(4 * n, np.float32)
    given = (x, dt, A, B, C, D, slots, accepted)
    y, many = sharded(many, *given)
    right = []
    for part in range(count):
        mine = [cut(a, s, part) for a, s in zip(given, inputs, strict=True)]
        out, ones[part] = single(ones[part], *mine)
        right.append(out)
    same &= equal(y, right, tokens)
    now = [s.data.unsafe_buffer_pointer() for s in many.states[0].addressable_shards]
    places = places or now
leaves = zip(jax.tree.leaves(many), *map(jax.tree.leaves, ones), jax.tree.leaves(axis), strict=True)
same &= all(equal(array, parts, spec) for array, *parts, spec in leaves)
moved = np.asarray(many.ring_start).any()
if rounded:
    first, *others = np.asarray(many.rand_seed)
    same &= list(first) == [9 + 7, 0] and all(tuple(seed) != tuple(first) for seed in others)
print(json.dumps([n, bool(same), places == now, bool(moved), sharded._cache_size()]))
"""


def run_sharded(platform: str, state_dtype: str, **environment: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, platform, state_dtype],
        capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


shared_states = pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16+nvfp4"])


@shared_states
def test_heads_over_devices_equal_one_device(state_dtype):
    """Four CPU devices, bit for bit, each part in its place, compiled once."""
    environment = {"JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}  # fmt: skip
    assert run_sharded("cpu", state_dtype, **environment) == [4, True, True, True, 1]


@pytest.mark.gpu
@shared_states
def test_heads_over_gpus_equal_one_gpu(state_dtype):
    try:
        count = len(jax.devices("gpu"))
    except RuntimeError as error:
        pytest.skip(f"JAX has no CUDA device: {error}")
    if count < 2:
        pytest.skip(f"needs 2 GPUs that JAX can use, found {count}")
    assert run_sharded("gpu", state_dtype) == [min(count, 4), True, True, True, 1]


# --- Errors --------------------------------------------------------------------------------------


# JAX's own errors, of which a call that was compiled before may raise the other.
FAULTS = (jax.errors.JaxRuntimeError, ValueError)


def test_errors():
    cpu = jax.devices("cpu")[0]
    arrays, _ = make(cpu)
    given = tokens(0, cpu)
    with pytest.raises(ValueError, match=r"^layer: expected 0 to 1, got 2$"):
        jax_ops.step(arrays, 2, **given)
    with pytest.raises(ValueError, match=r"^inputs: expected 2 layers' arguments, got 1$"):
        jax_ops.step_layers(arrays, [given])
    slots = given["slots"]
    tokens_of = {name: array for name, array in given.items() if name != "slots"}
    with pytest.raises(ValueError, match=r"^layers: expected each layer once, got \[1, 1\]$"):
        jax_ops.step_layers(arrays, [tokens_of] * 2, layers=[1, 1], slots=slots)
    with pytest.raises(TypeError, match=r"^inputs\[1\]: expected x, .* got .*, slots$"):
        jax_ops.step_layers(arrays, [tokens_of, given])
    with pytest.raises(ValueError, match=r"^layer: expected 0 to 1, got -1$"):
        jax_ops.load_state(arrays, -1, None, arrays.states[0])
    with pytest.raises(TypeError, match=r"^state_dtype: expected one of .*, got int32$"):
        jax_ops.stack_arrays(1, *SIZES, state_dtype="int32")
    with pytest.raises(ValueError, match=r"^parts: expected at least 1, got 0$"):
        jax_ops.stack_arrays(1, *SIZES, parts=0)
    with pytest.raises(ValueError, match=r"^stochastic_rounding: expected False with a float32"):
        jax_ops.stack_arrays(1, *SIZES, stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"^A: expected a list of 2 arrays, got 1$"):
        jax_ops.materialize(arrays, [given["A"]], slots, slots, slots)
    with pytest.raises(ValueError, match=r"^block_size: expected it or boundaries, got neither$"):
        jax_ops.materialize_blocks(arrays, [given["A"]] * 2, slots, slots, slots, slots)
    with pytest.raises(FAULTS, match=r"dst_slots: expected distinct"):
        zero = slots * 0
        jax.block_until_ready(
            jax_ops.materialize(arrays, [given["A"]] * 2, slots, zero, zero).states
        )
    rounded, _ = make(cpu, "float16", 1)
    rounded = replace(rounded, rand_seed=jax.numpy.zeros((2, 2), np.int32))
    message = (
        r"rand_seed: expected \(parts, 2\) = \(1, 2\) int32 on each device, got \(2, 2\) int32"
    )
    with pytest.raises(FAULTS, match=message):
        jax.block_until_ready(jax_ops.step(rounded, 0, **given))
    with pytest.raises(FAULTS, match=r"state: expected .* got \(5, 4, 64\)"):
        jax.block_until_ready(
            jax_ops.load_state(arrays, 0, None, arrays.states[0][..., 0]).states[0]
        )
    copied, _ = make(cpu, "float16+fp8")
    one = replace(copied, state_copies=copied.state_copies[:1])
    for call in (lambda: jax_ops.step(one, 1, **given), lambda: jax_ops.reset(one)):
        with pytest.raises(ValueError, match=r"^state_copies: expected 2 arrays, .*, got 1$"):
            call()
    for missing, message in (
        ({"state_scales": []}, r"state_scale: expected an array of float32 scales with states of"),
        ({"state_copies": []}, r"state_scale: expected None with states of float16, got an array"),
        ({"state_copies": copied.state_scales}, r"state_copy: expected one of float8_e4m3fn, uint"),
    ):
        with pytest.raises(FAULTS, match=message):
            jax.block_until_ready(jax_ops.step(replace(copied, **missing), 0, **given))
    wrong = given | {"dt": given["dt"][:, :1]}
    with pytest.raises(FAULTS, match=r"dt: expected .*, got \(3, 1, 4\)"):
        jax.block_until_ready(jax_ops.step(arrays, 0, **wrong))


def test_functions_that_work_in_place_name_this_module():
    arrays, _ = make(jax.devices("cpu")[0])
    message = r"^states\[0\]: .* got a JAX array, .*; use replayssm_cupy.jax_ops"
    with pytest.raises(TypeError, match=message):
        ssm.LayerStack.from_arrays(
            arrays.states, arrays.x_caches, arrays.B_caches, arrays.dt_caches, arrays.ring_start,
            arrays.prev_num_accepted_tokens, npredicted=2,
        )  # fmt: skip
