"""PyTorch, JAX, CuPy and NumPy arrays: the same bits from all, in the caller's own memory.

Most tests run the reference on NumPy, torch and JAX arrays of the CPU, the kernels of tests/host
on torch and JAX arrays, and the kernels on CuPy, torch and JAX arrays of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, Step, make_pools, make_step
from oracles import Recurrence, advance, assert_close, bits, float64, relative_l2

import replayssm_cupy as ssm
import replayssm_cupy.decode as decode_module
from replayssm_cupy import ReplaySSMError, compiler, ops, plan
from replayssm_cupy.arrays import view
from replayssm_cupy.calls import SeenCalls

CASE = Case(Shape("interop", 4, 2, 64, 128), npredicted=2, max_window=6, num_slots=5)
# Of state, activations and weights.
FORMATS = (
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "float16", "bfloat16"),
    ("float16", "bfloat16", "float16"),
)


# --- The libraries -------------------------------------------------------------------------------


@dataclass
class Library:
    """How a library's arrays are made and read; `emulated` if tests/host runs the kernels."""

    name: str
    emulated: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.name in ("cupy", "torch-cuda", "jax-cuda")

    @property
    def base(self) -> Library:
        """The library whose results count as right on this device."""
        return Library("cupy" if self.on_gpu else "numpy", self.emulated)

    @property
    def targets(self) -> Library:
        """The library of what is changed in place: JAX arrays cannot be."""
        return self.base if self.name.startswith("jax") else self

    def put(self, array: np.ndarray | None) -> Any:
        if array is None:
            return None
        if self.name == "numpy":
            return array.copy()
        if self.name == "cupy":
            return modules("cupy").asarray(array)
        if self.name.startswith("jax"):
            jax = modules("jax")
            return jax.device_put(array.copy(), jax.devices("gpu" if self.on_gpu else "cpu")[0])
        torch = modules("torch")
        device = "cuda" if self.on_gpu else "cpu"
        if array.dtype.name == "bfloat16":  # which NumPy and torch do not know of each other
            tensor = torch.from_numpy(array.copy().view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array.copy())
        return tensor.to(device)

    def get(self, array: Any) -> np.ndarray:
        assert self.owns(array), f"expected an array of {self.name}, got {type(array)}"
        if self.name == "cupy":
            return np.asarray(modules("cupy").asnumpy(array))
        if not self.name.startswith("torch"):
            return np.array(array)
        tensor = array.detach().cpu()
        if str(tensor.dtype) != "torch.bfloat16":
            return np.array(tensor.numpy())
        return np.array(tensor.contiguous().view(modules("torch").int16).numpy()).view(
            DTYPES["bfloat16"]
        )

    def owns(self, array: Any) -> bool:
        kinds = {"numpy": np.ndarray}
        if self.name == "cupy":
            kinds["cupy"] = modules("cupy").ndarray
        elif self.name.startswith("torch"):
            kinds[self.name] = modules("torch").Tensor
        elif self.name.startswith("jax"):
            kinds[self.name] = modules("jax").Array
        device = "cuda" if self.on_gpu else "cpu"
        return isinstance(array, kinds[self.name]) and view(array, "array").device.kind == device

    def tie(self, array: Any, *sizes: int) -> Any:
        """`array` with axes of stride 0 behind."""
        if array is None:
            return None
        shape = (*array.shape, *sizes)
        spread = array[(..., *(None for _ in sizes))]
        if self.name.startswith("torch"):
            return spread.expand(shape)
        return (modules("cupy") if self.name == "cupy" else np).broadcast_to(spread, shape)


@cache
def modules(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


@cache
def emulator() -> Any:
    from host.launcher import HostLauncher

    return HostLauncher()


def gpu(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.gpu)


CPU_LIBRARIES = ("numpy", "torch", "jax", "torch-kernels", "jax-kernels")


@pytest.fixture(params=[*CPU_LIBRARIES, gpu("cupy"), gpu("torch-cuda"), gpu("jax-cuda")])
def lib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    name, _, where = request.param.partition("-")
    if name == "jax" and where == "cuda":
        try:
            modules("jax").devices("gpu")
        except RuntimeError as error:
            pytest.skip(f"JAX has no CUDA device: {error}")
    elif name in ("torch", "jax"):
        module = modules(name)
        if where == "cuda" and not module.cuda.is_available():
            pytest.skip("PyTorch has no CUDA device")
    if where == "kernels":
        monkeypatch.setitem(plan.launchers, "cpu", emulator())
    return Library(f"{name}-cuda" if where == "cuda" else name, emulated=where == "kernels")


# --- Runs that are compared ----------------------------------------------------------------------


def put_step(lib: Library, step: Step) -> dict[str, Any]:
    return {name: lib.put(array) for name, array in step.arrays().items()}


def formats(case: Case, state: str, activation: str, weight: str) -> Case:
    return replace(case, state_dtype=state, activation_dtype=activation, weight_dtype=weight)


def decode(
    lib: Library, case: Case, *, steps: int = 8, strided: bool = False
) -> dict[str, np.ndarray]:
    """Steps with random acceptance that flush and wrap; everything that comes out of them."""
    rng = np.random.default_rng(7)
    pools = make_pools(case, rng)
    mine = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
    results = {}
    for number in range(steps):
        slots = np.append(rng.permutation(case.num_slots)[:3], -1).astype(np.int32)
        step = make_step(case, 4, rng, slots=slots, strided=strided)
        arrays = put_step(lib, step)
        out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
        results[f"out of step {number}"] = lib.get(out)
        ssm.advance_ring(
            mine["ring_start"],
            mine["prev_num_accepted_tokens"],
            lib.put(rng.integers(0, case.npredicted + 1, 4).astype(np.int32)),
            case.npredicted,
            arrays["state_batch_indices"],
            max_window=case.max_window,
            ring_buffer_len=case.ring_buffer_len,
        )
    return results | {name: lib.targets.get(array) for name, array in mine.items()}


def update(lib: Library, case: Case, *, steps: int = 3) -> dict[str, np.ndarray]:
    """The same with the plain update."""
    rng = np.random.default_rng(8)
    state = lib.targets.put(make_pools(case, rng).state)
    results = {}
    for number in range(steps):
        slots = np.append(rng.permutation(case.num_slots)[:3], -1).astype(np.int32)
        arrays = put_step(lib, make_step(case, 4, rng, slots=slots))
        out = ssm.selective_state_update(state, **arrays, dt_softplus=True)
        results[f"out of step {number}"] = lib.get(out)
    return results | {"state": lib.targets.get(state)}


def assert_same(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert results.keys() == expected.keys()
    for name, array in results.items():
        assert array.dtype == expected[name].dtype, name
        assert array.shape == expected[name].shape, name
        assert np.array_equal(bits(array), bits(expected[name])), name


@pytest.mark.parametrize("types", FORMATS, ids="-".join)
def test_every_library_gives_the_same_bits(lib, types):
    case = formats(CASE, *types)
    results = decode(lib, case)
    assert_same(results, decode(lib.base, case))
    assert results["prev_num_accepted_tokens"].any()
    outs = [array.astype(np.float64) for name, array in results.items() if name.startswith("out")]
    assert all(np.isfinite(out).all() and out[:3].any() and not out[3].any() for out in outs)


@pytest.mark.parametrize("types", [*FORMATS, ("float16", "float32", "float32")], ids="-".join)
def test_plain_update_gives_the_same_bits(lib, types):
    case = formats(CASE, *types)
    assert_same(update(lib, case), update(lib.base, case))


def test_float32_rings_on_the_host(lib):
    if lib.on_gpu or lib.emulated:
        pytest.skip("float32 activations have no replay kernel")
    case = formats(CASE, "float32", "float32", "float32")
    assert_same(decode(lib, case), decode(lib.base, case))


def test_kernels_agree_with_the_reference(lib):
    """The same tokens through NumPy: the two may differ in the last bit of a 16-bit output."""
    if not (lib.on_gpu or lib.emulated):
        pytest.skip("no kernel runs here")
    results = decode(lib, CASE)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(plan.launchers, "cpu", raising=False)
        expected = decode(Library("numpy"), CASE)
    for name, array in results.items():
        live = expected[name]
        if "cache" in name:  # the rows that were never written hold NaN
            assert np.array_equal(np.isnan(array.astype(float)), np.isnan(live.astype(float)))
            array, live = (np.nan_to_num(a.astype(float)) for a in (array, live))
        assert relative_l2(array, live) <= 1e-3, name


def test_one_step_against_the_recurrence(lib):
    rng = np.random.default_rng(9)
    pools = make_pools(CASE, rng)
    step = make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32))
    exact = Recurrence(pools.state).propose(step)
    mine = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
    out = ssm.checkpointing_ssu(**mine, **put_step(lib, step), dt_softplus=True)
    assert_close(lib.get(out), exact, "float32")


# --- The caller's memory -------------------------------------------------------------------------


def test_out_is_the_callers(lib):
    """`out` is written where it lies and returned as it is."""
    rng = np.random.default_rng(1)
    pools = make_pools(CASE, rng)
    step = make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32))
    targets = lib.targets
    mine = {name: targets.put(array) for name, array in pools.arrays().items()}
    wide = targets.put(np.full((3, 2, 4, 128), 5, DTYPES["bfloat16"]))
    out = wide[..., :64]
    arrays = put_step(lib, step)
    returned = ssm.checkpointing_ssu(**mine, **arrays, out=out, dt_softplus=True, max_window=6)
    assert returned is out
    again = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True, max_window=6)
    written = targets.get(wide)
    assert np.array_equal(bits(written[..., :64]), bits(lib.get(again)))
    assert (written[..., 64:] == 5).all()


@pytest.mark.parametrize("cut", ["every other slot", "some heads", "middle of a page"])
def test_strided_pools_are_changed_where_they_lie(lib, cut):
    """Never in a copy: the caller's big arrays change in the pools' part and nowhere else."""
    rng = np.random.default_rng(2)
    pools = make_pools(CASE, rng, fill=True)
    pools.prev_num_accepted_tokens[:3] = 6  # these flush
    step = make_step(CASE, 4, rng, slots=np.array([0, 3, -1, 2], np.int32))
    compact = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
    expected = lib.get(ssm.checkpointing_ssu(**compact, **put_step(lib, step), dt_softplus=True))

    big, mine, index = {}, {}, {}
    for name, array in pools.arrays().items():
        if cut == "every other slot":
            shape, where = (2 * len(array), *array.shape[1:]), np.s_[::2]
        elif cut == "some heads" and array.ndim > 1:
            heads = array.shape[1]
            shape, where = (len(array), heads + 3, *array.shape[2:]), np.s_[:, :heads]
        else:
            shape, where = (len(array) + 2, *array.shape[1:]), np.s_[1:-1]
        content = np.full(shape, 3).astype(array.dtype)
        content[where] = array
        big[name], index[name] = lib.targets.put(content), where
        mine[name] = big[name][where]
        assert view(mine[name], name).owner is mine[name]
    out = ssm.checkpointing_ssu(**mine, **put_step(lib, step), dt_softplus=True)

    assert np.array_equal(bits(lib.get(out)), bits(expected))
    for name, where in index.items():
        whole = lib.targets.get(big[name])
        assert np.array_equal(bits(whole[where]), bits(lib.targets.get(compact[name]))), name
        whole[where] = 3
        assert (whole == 3).all(), f"{name}: written beside the pool"
    assert not np.array_equal(bits(lib.targets.get(mine["state"])), bits(pools.state))


def test_tokens_that_are_slices_of_one_buffer(lib):
    """x, B and C as a convolution leaves them, z and dt as a projection does."""
    rng = np.random.default_rng(3)
    pools = make_pools(CASE, rng)
    step = make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32))
    rows = step.x.shape[:2]
    xBC = np.concatenate([a.reshape(*rows, -1) for a in (step.x, step.B, step.C)], axis=2)
    wide = lib.put(xBC)
    ends = np.cumsum([a.size // 6 for a in (step.x, step.B, step.C)])
    parts = [wide[..., 0 : ends[0]], wide[..., ends[0] : ends[1]], wide[..., ends[1] : ends[2]]]
    x, B, C = (p.reshape(a.shape) for p, a in zip(parts, (step.x, step.B, step.C), strict=True))
    if not lib.name.startswith("jax"):
        assert view(B, "B").ptr == view(wide, "wide").ptr + 2 * ends[0]
    arrays = put_step(lib, step)
    mine = [
        {name: lib.targets.put(array) for name, array in pools.arrays().items()} for _ in range(2)
    ]
    expected = ssm.checkpointing_ssu(**mine[0], **arrays, dt_softplus=True)
    out = ssm.checkpointing_ssu(**mine[1], **(arrays | {"x": x, "B": B, "C": C}), dt_softplus=True)
    assert np.array_equal(bits(lib.get(out)), bits(lib.get(expected)))


def test_outputs_of_two_calls_do_not_share_memory(lib):
    rng = np.random.default_rng(4)
    pools = make_pools(CASE, rng)
    mine = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
    steps = [make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32)) for _ in range(2)]
    first = ssm.checkpointing_ssu(**mine, **put_step(lib, steps[0]), dt_softplus=True)
    kept = lib.get(first)
    second = ssm.checkpointing_ssu(**mine, **put_step(lib, steps[1]), dt_softplus=True)
    distance = abs(view(first, "first").ptr - view(second, "second").ptr)
    assert distance >= kept.nbytes
    assert np.array_equal(bits(lib.get(first)), bits(kept))
    assert not np.array_equal(bits(lib.get(second)), bits(kept))


# --- Forms of the same call ----------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "plain"])
def test_types_are_not_remembered_from_call_to_call(lib, replay):
    """float16, bfloat16 and float16 again with equal shapes; then other types of A and slots."""
    run = decode if replay else update
    cases = [formats(CASE, "float32", a, w) for a, w in (
        ("float16", "float32"), ("bfloat16", "float32"), ("float16", "float32"),
        ("float16", "bfloat16"), ("float16", "float32"))]  # fmt: skip
    results = [run(lib, case, steps=2) for case in cases]
    for result, case in zip(results, cases, strict=True):
        assert_same(result, run(lib.base, case, steps=2))
    assert_same(results[0], results[2])
    assert_same(results[0], results[4])


def test_both_types_of_slots(lib):
    if lib.name.startswith("jax"):
        pytest.skip("JAX has no int64 by default")
    rng = np.random.default_rng(5)
    pools = make_pools(CASE, rng)
    results = []
    for kind in (np.int32, np.int64, np.int32):
        slots = np.array([4, -1, 1, 2**31 - 1], kind)
        step = make_step(CASE, 4, np.random.default_rng(6), slots=slots)
        mine = {name: lib.put(array) for name, array in pools.arrays().items()}
        out = ssm.checkpointing_ssu(**mine, **put_step(lib, step), dt_softplus=True)
        ssm.reset_slots(
            mine["ring_start"], mine["prev_num_accepted_tokens"], lib.put(slots), [mine["state"]]
        )
        results.append({name: lib.get(array) for name, array in {**mine, "out": out}.items()})
    assert not results[0]["state"][4].any()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def both(lib: Library, replay: bool, forms: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """What each form of the same arguments gives, on fresh pools."""
    results = []
    for form in forms:
        pools = make_pools(CASE, np.random.default_rng(11))
        mine = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
        if replay:
            out = ssm.checkpointing_ssu(**mine, **form, dt_softplus=True, max_window=6)
        else:
            out = ssm.selective_state_update(mine["state"], **form, dt_softplus=True)
        written = {name: lib.targets.get(array) for name, array in mine.items()}
        results.append({"out": lib.get(out), **written})
    return results


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "plain"])
def test_tied_views_equal_plain_arrays(lib, replay):
    if lib.name.startswith("jax"):
        pytest.skip("JAX arrays have no stride 0")
    step = make_step(CASE, 3, np.random.default_rng(12), slots=np.array([4, 1, 0], np.int32))
    plain = put_step(lib, step)
    tied = {name: lib.tie(plain[name], 64) for name in ("dt", "D", "dt_bias")}
    tied["A"] = lib.tie(plain["A"], 64, 128)
    results = both(lib, replay, [plain, plain | tied])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "plain"])
def test_rank_3_is_one_token(lib, replay):
    step = make_step(CASE, 3, np.random.default_rng(13), q=1, slots=np.array([4, 1, 0], np.int32))
    four = put_step(lib, step)
    three = four | {name: four[name][:, 0] for name in ("x", "dt", "B", "C", "z")}
    results = both(lib, replay, [four, three])
    assert results[1]["out"].shape == (3, 4, 64)
    results[1]["out"] = results[1]["out"][:, None]
    assert_same(results[1], results[0])


def test_empty_batch(lib):
    """An empty output of the right kind, and nothing is touched."""
    step = make_step(CASE, 0, np.random.default_rng(14), slots=np.zeros(0, np.int32))
    pools = make_pools(CASE, np.random.default_rng(11))
    for replay in (True, False):
        (result,) = both(lib, replay, [put_step(lib, step)])
        assert result.pop("out").shape == (0, 2, 4, 64)
        assert_same(result, pools.arrays())
    start, prev = lib.targets.put(pools.ring_start), lib.targets.put(pools.ring_start)
    none = lib.put(np.zeros(0, np.int32))
    ssm.advance_ring(start, prev, none, 2, none, max_window=6, ring_buffer_len=8)
    ssm.reset_slots(start, prev, none)
    assert np.array_equal(lib.targets.get(start), pools.ring_start)


def test_arrays_of_two_libraries(lib):
    """NumPy or CuPy pools, tokens of another library: the output is like x."""
    step = make_step(CASE, 3, np.random.default_rng(15), slots=np.array([4, 1, 0], np.int32))
    results = []
    for inputs in (lib, lib.base):
        pools = make_pools(CASE, np.random.default_rng(11))
        mine = {name: lib.base.put(array) for name, array in pools.arrays().items()}
        arrays = put_step(inputs, step)
        arrays["state_batch_indices"] = lib.base.put(step.state_batch_indices)
        out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
        written = {name: lib.base.get(array) for name, array in mine.items()}
        results.append({"out": inputs.get(out), **written})
    assert_same(results[0], results[1])


# --- LayerStack ----------------------------------------------------------------------------------


def serve(lib: Library, case: Case) -> dict[str, np.ndarray]:
    """Two layers over borrowed arrays: prefill, steps, a request that ends and another."""
    rng = np.random.default_rng(20)
    targets = lib.targets
    layers = [make_pools(case, rng) for _ in range(2)]
    lists = [
        [targets.put(getattr(pools, name)) for pools in layers]
        for name in ("state", "x_cache", "B_cache", "dt_cache")
    ]
    cursors = [targets.put(np.zeros(case.num_slots, np.int32)) for _ in range(2)]
    stack = ssm.LayerStack.from_arrays(*lists, *cursors, npredicted=2)
    weights = [make_step(case, 1, rng) for _ in layers]
    shape = (2, *layers[0].state.shape[1:])
    slots = lib.put(np.array([3, 0], np.int32))
    stack.reset(slots)
    for layer in range(2):
        prefilled = rng.standard_normal(shape).astype(DTYPES[case.activation_dtype])
        stack.load_state(layer, slots, lib.put(prefilled))
    results = {}
    for number in range(7):
        q = int(rng.integers(1, 3))
        for layer, w in enumerate(weights):
            step = make_step(case, 2, rng, q=q, weights=(w.A, w.D, w.dt_bias))
            out = stack.step(layer, **put_step(lib, step), slots=slots)
            results[f"out {number} of layer {layer}"] = lib.get(out)
        reset = np.array([False, number == 4])
        stack.advance(
            slots,
            lib.put(rng.integers(0, q + 1, 2).astype(np.int32)),
            lib.put(np.full(2, q, np.int32)),
            reset=lib.put(reset),
        )
        if number == 4:
            stack.reset(slots[1:])
    for name, arrays in zip(("state", "x_cache", "B_cache", "dt_cache"), lists, strict=True):
        for layer, array in enumerate(arrays):
            results[f"{name} {layer}"] = targets.get(array)
    assert stack.states[0] is lists[0][0]
    return results | {f"cursor {i}": targets.get(array) for i, array in enumerate(cursors)}


@pytest.mark.parametrize("types", FORMATS, ids="-".join)
def test_a_stack_of_borrowed_arrays(lib, types):
    case = formats(CASE, *types)
    assert_same(serve(lib, case), serve(lib.base, case))


def snapshots(lib: Library, case: Case) -> dict[str, np.ndarray]:
    """Snapshots, copies, beams and images in a stack over borrowed arrays."""
    rng, targets = np.random.default_rng(23), lib.targets
    pools = [make_pools(case, rng, fill=True) for _ in range(2)]
    lists = [
        [targets.put(getattr(one, name)) for one in pools]
        for name in ("state", "x_cache", "B_cache", "dt_cache")
    ]
    start, prev = np.array([3, 0, 7, 1, 0], np.int32), np.array([6, 2, 0, 5, 1], np.int32)
    cursors = [targets.put(start), targets.put(prev)]
    stack = ssm.LayerStack.from_arrays(*lists, *cursors, npredicted=2)
    weights = [lib.put(make_step(case, 1, rng).A) for _ in pools]
    stack.refresh([lib.tie(A, 64, 128) if lib.base is not lib and not lib.name.startswith("jax")
                   else A for A in weights])  # fmt: skip
    put = {kind: lambda values, kind=kind: lib.put(np.array(values, kind))
           for kind in ("int32", "int64")}  # fmt: skip
    stack.materialize(put["int32"]([0, 3]), put["int64"]([2, -1]), put["int32"]([6, 5]), check=True)
    stack.materialize_blocks(
        put["int64"]([3]), put["int32"]([4]), put["int64"]([10]), put["int32"]([3]), block_size=4
    )
    stack.fork(put["int32"]([0]), put["int32"]([[1, -1]]))
    image = stack.export_slots(put["int64"]([0, 4]))
    stack.import_slots(image, [3, 2])
    stack.copy_slots(put["int64"]([3]), put["int64"]([4]))
    results = dict(image)
    for name, arrays in zip(("state", "x_cache", "B_cache", "dt_cache"), lists, strict=True):
        for layer, array in enumerate(arrays):
            results[f"{name} {layer}"] = targets.get(array)
    assert stack.states[0] is lists[0][0]
    return results | {f"cursor {i}": targets.get(array) for i, array in enumerate(cursors)}


@pytest.mark.parametrize("types", FORMATS, ids="-".join)
def test_snapshots_of_borrowed_arrays(lib, types):
    case = formats(CASE, *types)
    assert_same(snapshots(lib, case), snapshots(lib.base, case))


# --- torch alone ---------------------------------------------------------------------------------

TORCH = ["torch", "torch-kernels", gpu("torch-cuda")]


@pytest.mark.parametrize("lib", TORCH, indirect=True)
def test_weights_that_require_grad(lib):
    """Parameters are read as they are; the output has no history and the weights no gradient."""
    torch = modules("torch")
    step = make_step(CASE, 3, np.random.default_rng(21), slots=np.array([4, 1, 0], np.int32))
    plain = put_step(lib, step)
    weights = {name: torch.nn.Parameter(plain[name]) for name in ("A", "D", "dt_bias")}
    results = both(lib, True, [plain, plain | weights])
    assert_same(results[1], results[0])
    state = lib.put(make_pools(CASE, np.random.default_rng(11)).state)
    out = ssm.selective_state_update(state, **(plain | weights), dt_softplus=True)
    assert not out.requires_grad
    assert all(weight.grad is None for weight in weights.values())


@pytest.mark.parametrize("lib", TORCH, indirect=True)
def test_sizes_of_1_with_any_stride(lib):
    """torch leaves odd strides on axes of size 1; they have no meaning."""
    step = make_step(CASE, 1, np.random.default_rng(22), q=1, slots=np.array([4], np.int32))
    plain = put_step(lib, step)
    odd = dict(plain)
    for name in ("x", "B", "C", "z"):
        strides = (7, 13, *plain[name].stride()[2:])
        odd[name] = plain[name].as_strided(plain[name].shape, strides)
        assert odd[name].stride() == strides
    results = both(lib, True, [plain, odd])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("lib", TORCH, indirect=True)
def test_materialize_as_flashinfers_callers_do(lib):
    """Tables of data_ptr() and stride(0), torch's dtypes, positional arrays."""
    torch = modules("torch")
    rng = np.random.default_rng(24)
    pools = [make_pools(CASE, rng, fill=True) for _ in range(2)]
    names = ("state", "x_cache", "B_cache", "dt_cache")
    layers = [{name: lib.put(getattr(one, name)) for name in names} for one in pools]
    A = [lib.put(make_step(CASE, 1, rng).A) for _ in pools]
    device = A[0].device

    def table(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int64, device=device)

    tables = []
    for name in names:
        tables.append(table([layer[name].data_ptr() for layer in layers]))
        tables.append(table([layer[name].stride(0) for layer in layers]))
    tables += [table([a.data_ptr() for a in A]), table([0, 0]), table([0, 0])]
    integers = [[[0, 1], [1, 0]], [[3, 4], [4, 3]], [5, 0], [4, 6], [1, -1]]
    metadata = [torch.tensor(v, dtype=torch.int32, device=device) for v in integers]
    ssm.replayssm_materialize(
        *tables, *metadata, state_dtype=torch.float32, input_dtype=torch.bfloat16,
        matrixA_dtype=torch.float32, dim=64, dstate=128, num_heads=4, heads_per_group=2,
        max_window=6, ring_buffer_len=8,
    )  # fmt: skip
    for layer, (src, dst) in enumerate(((1, 4), (0, 3))):
        state = lib.get(layers[layer]["state"])
        exact = float64(pools[layer].state[src])
        for row in (0, 1, 2, 3, 4, 5):
            x, B, dt = (getattr(pools[layer], n)[src][:, row] for n in names[1:])
            exact = advance(exact, lib.get(A[layer]), x, float64(dt), B)
        assert_close(state[dst], exact, "float32", f"layer {layer}")
        others = [slot for slot in range(CASE.num_slots) if slot != dst]
        assert np.array_equal(bits(state[others]), bits(pools[layer].state[others]))


# --- Streams and graphs --------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    torch = modules("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device")
    return torch


def late_inputs(lib: Library) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """Pools, the arguments of a step, and the output that the step must have."""
    rng = np.random.default_rng(30)
    pools = make_pools(CASE, rng, fill=True)
    step = make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32))
    arrays = put_step(lib, step)
    compact = {name: lib.put(array) for name, array in pools.arrays().items()}
    expected = lib.get(ssm.checkpointing_ssu(**compact, **arrays, dt_softplus=True))
    mine = {name: lib.put(array) for name, array in pools.arrays().items()}
    return mine, arrays, expected


@pytest.mark.gpu
def test_torch_side_stream(torch):
    """x arrives late on a side stream: work on any other stream would read NaN."""
    lib = Library("torch-cuda")
    mine, arrays, expected = late_inputs(lib)
    cursors = {name: mine[name].clone() for name in ("ring_start", "prev_num_accepted_tokens")}
    fresh = {name: array.clone() for name, array in mine.items()}
    right = arrays["x"].clone()
    side = torch.cuda.Stream()
    for _ in range(50):
        for name, array in mine.items():
            array.copy_(fresh[name])
        arrays["x"].fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            arrays["x"].copy_(right)
            out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
            kept = out.clone()
            assert not side.query(), "the call waited for its stream"
        side.synchronize()
        assert np.array_equal(bits(lib.get(kept)), bits(expected))
    assert all(torch.equal(mine[name], cursor) for name, cursor in cursors.items())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_cupy_side_stream():
    cupy = modules("cupy")
    lib = Library("cupy")
    mine, arrays, expected = late_inputs(lib)
    fresh = {name: array.copy() for name, array in mine.items()}
    right, late = arrays["x"].copy(), cupy.empty_like(arrays["x"])
    spin = cupy.RawKernel(
        """extern "C" __global__ void spin(long long cycles) {
          const long long start = clock64();
          while (clock64() - start < cycles) {}
        }""",
        "spin",
    )
    side = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        for name, array in mine.items():
            array[...] = fresh[name]
        late[...] = float("nan")
        cupy.cuda.Device().synchronize()
        with side:
            spin((1,), (1,), (np.int64(20_000_000),))
            cupy.cuda.runtime.memcpyAsync(late.data.ptr, right.data.ptr, right.nbytes, 3, side.ptr)
            out = ssm.checkpointing_ssu(**mine, **(arrays | {"x": late}), dt_softplus=True)
            assert not side.done, "the call waited for its stream"
        side.synchronize()
        assert np.array_equal(bits(lib.get(out)), bits(expected))


class Loop:
    """A step, an advance and a reset over fixed arrays, as a serving engine captures them."""

    def __init__(self, lib: Library) -> None:
        rng = np.random.default_rng(31)
        self.lib, pools = lib, make_pools(CASE, rng)
        self.pools = {name: lib.put(array) for name, array in pools.arrays().items()}
        self.inputs = put_step(lib, make_step(CASE, 4, rng, slots=np.zeros(4, np.int32)))
        self.out = lib.put(np.zeros((4, 2, 4, 64), DTYPES["bfloat16"]))
        self.accepted = lib.put(np.zeros(4, np.int32))
        self.fresh = lib.put(np.zeros(4, np.bool_))
        self.ended = lib.put(np.full(1, -1, np.int32))

    def call(self) -> None:
        cursors = self.pools["ring_start"], self.pools["prev_num_accepted_tokens"]
        slots = self.inputs["state_batch_indices"]
        ssm.checkpointing_ssu(**self.pools, **self.inputs, out=self.out, dt_softplus=True)
        ssm.advance_ring(
            *cursors, self.accepted, 2, slots, max_window=6, ring_buffer_len=8, reset=self.fresh
        )
        ssm.reset_slots(*cursors, self.ended, [self.pools["state"]])

    def renew(self, number: int) -> None:
        """Other inputs, other slots and other counts in the same memory."""
        rng = np.random.default_rng(100 + number)
        slots = np.append(rng.permutation(CASE.num_slots)[:3], -1).astype(np.int32)
        step = make_step(CASE, 4, rng, slots=rng.permutation(slots))
        accepted = rng.integers(0, 3, 4).astype(np.int32)
        fresh = np.array([number % 5 == 4, False, False, False])
        ended = np.array([slots[0] if number % 4 == 3 else -1], np.int32)
        contents = {**step.arrays(), "accepted": accepted, "fresh": fresh, "ended": ended}
        for name, content in contents.items():
            target = self.inputs[name] if name in self.inputs else getattr(self, name)
            if self.lib.name == "cupy":
                target.set(content)
            else:
                target.copy_(self.lib.put(content))

    def contents(self) -> dict[str, np.ndarray]:
        arrays = {**self.pools, "out": self.out}
        return {name: self.lib.get(array) for name, array in arrays.items()}


def assert_replays_follow(captured: Loop, eager: Loop, launch: Any) -> None:
    """Replays with renewed inputs equal eager calls with the same inputs, bit for bit."""
    for number in range(12):
        captured.renew(number)
        eager.renew(number)
        launch()
        eager.call()
        assert_same(captured.contents(), eager.contents())
    assert captured.contents()["prev_num_accepted_tokens"].any()


@pytest.mark.gpu
def test_torch_graph(torch):
    lib = Library("torch-cuda")
    captured, eager = Loop(lib), Loop(lib)
    eager.call()  # compiles, and moves its own pools only
    eager = Loop(lib)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before = captured.contents()
    with torch.cuda.graph(graph):
        captured.call()
    torch.cuda.synchronize()
    assert_same(captured.contents(), before)  # a capture runs nothing
    assert_replays_follow(captured, eager, graph.replay)


@pytest.mark.gpu
def test_torch_graph_that_allocates_its_output(torch):
    lib = Library("torch-cuda")
    mine, arrays, expected = late_inputs(lib)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
    graph.replay()
    assert np.array_equal(bits(lib.get(out)), bits(expected))


@pytest.mark.gpu
def test_cupy_graph():
    cupy = modules("cupy")
    lib = Library("cupy")

    class CupyLoop(Loop):
        def renew(self, number: int) -> None:
            super().renew(number)
            cupy.cuda.Device().synchronize()

    eager = CupyLoop(lib)
    eager.call()
    captured, eager = CupyLoop(lib), CupyLoop(lib)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured.call()
        graph = stream.end_capture()

    def launch() -> None:
        graph.launch(stream)
        stream.synchronize()

    assert_replays_follow(captured, eager, launch)


@pytest.mark.gpu
def test_first_call_inside_a_capture(torch, monkeypatch):
    """An error that names the way out, and the graph of the next try works."""
    lib = Library("torch-cuda")
    mine, arrays, expected = late_inputs(lib)
    # As in a new process: no kernel, no plan that has one, and no call that was seen.
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(decode_module, "_plans", {})
    monkeypatch.setattr(ops, "_calls", SeenCalls())
    message = r"^checkpointing_ssu(_small)?<.*> is not compiled yet.* call warm_up"
    with (
        pytest.raises(ReplaySSMError, match=message),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
    ssm.warm_up(dstate=128, npredicted=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
    graph.replay()
    assert np.array_equal(bits(lib.get(out)), bits(expected))


@pytest.mark.gpu
def test_jax_inputs_may_be_dropped_at_once():
    """JAX reuses memory as soon as an array is gone: the call must have read it by then."""
    jax = modules("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no CUDA device: {error}")
    lib = Library("jax-cuda")
    rng = np.random.default_rng(33)
    pools = make_pools(CASE, rng)
    step = make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32))
    results = []
    for _ in range(20):
        mine = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
        arrays = put_step(lib, step)
        out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
        del arrays
        jax.device_put(np.full(step.x.shape, np.nan, np.float32), device).block_until_ready()
        assert out.devices() == {device}
        results.append(lib.get(out * 1))  # JAX can go on with it
    assert all(np.array_equal(bits(result), bits(results[0])) for result in results)
    assert np.isfinite(results[0].astype(np.float32)).all()


# --- Devices -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch-cuda"])
def test_the_current_device_stays(name):
    """Arrays on the last GPU while the first is current: work goes there, and back."""
    cupy = modules("cupy")
    if compiler.gpu_count() < 2:
        pytest.skip("needs two GPUs")
    lib, last = Library(name), compiler.gpu_count() - 1
    expected = decode(lib, CASE, steps=2)
    if name == "cupy":
        with cupy.cuda.Device(last):
            pools = make_pools(CASE, np.random.default_rng(7))
            state = lib.put(pools.state)
            arrays = put_step(lib, make_step(CASE, 4, np.random.default_rng(8)))
        out = ssm.selective_state_update(state, **arrays, dt_softplus=True)
        assert out.device.id == last
    else:
        with modules("torch").cuda.device(last):
            results = decode(lib, CASE, steps=2)
        assert_same(results, expected)
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.gpu
def test_outputs_lie_on_the_device_of_x(torch):
    lib = Library("torch-cuda")
    mine, arrays, expected = late_inputs(lib)
    out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True)
    assert (out.device, out.dtype) == (arrays["x"].device, torch.bfloat16)
    assert np.array_equal(bits(lib.get(out)), bits(expected))
    wrong = arrays | {"x": arrays["x"].cpu()}
    with pytest.raises(ValueError, match=r"^x: expected device cuda:0 as state, got cpu$"):
        ssm.checkpointing_ssu(**mine, **wrong, dt_softplus=True)
