"""Prefix snapshots: the state after every prefix of a ring, in every format, for many layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, GPU_DTYPES, SHAPES, TOLERANCES, Case, Shape, make_step, make_weights
from oracles import advance, bits, float64, poison_dead_rows, relative_l2
from runs import (
    EIGHT_BIT,
    STATES,
    Run,
    Stored,
    half_cells,
    make_stored,
)

import replayssm_cupy as ssm
from replayssm_cupy.arrays import view
from replayssm_cupy.schedule import Processor

CASE = Case(Shape("prefix", 4, 2, 64, 128), npredicted=2, max_window=6, num_slots=9)
KINDS = ("state", "x_cache", "B_cache", "dt_cache", "A", "state_scale")


@dataclass
class Layers:
    """Pools of several layers on a backend, and the tables of their addresses."""

    backend: Any
    case: Case
    pools: list[Stored]
    A: list[np.ndarray]

    def __post_init__(self) -> None:
        put = self.backend.put
        self.arrays = [
            {name: put(a) for name, a in p.arrays().items() if name in KINDS} | {"A": put(A)}
            for p, A in zip(self.pools, self.A, strict=True)
        ]

    def tables(self) -> dict[str, Any]:
        found = {}
        for kind in KINDS:
            views = [view(a[kind], kind) if kind in a else None for a in self.arrays]
            addresses = np.array([v.ptr if v else 0 for v in views], np.int64)
            found[f"{kind}_ptrs"] = self.backend.put(addresses)
            if kind != "A":
                strides = np.array([v.strides[0] if v else 0 for v in views], np.int64)
                found[f"{kind}_slot_strides"] = self.backend.put(strides)
        return found

    def sizes(self) -> dict[str, Any]:
        c, s = self.case, self.case.shape
        return {
            "state_dtype": c.state_dtype,
            "input_dtype": c.activation_dtype,
            "matrixA_dtype": c.weight_dtype,
            "dim": s.head_dim,
            "dstate": s.dstate,
            "num_heads": s.nheads,
            "heads_per_group": s.heads_per_group,
            "max_window": c.max_window,
            "ring_buffer_len": c.ring_buffer_len,
        }

    def materialize(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        start: np.ndarray,
        prefix: np.ndarray,
        active: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        """Slots (layers, batch) or (batch,) for all layers."""
        layers = len(self.pools)
        src, dst = (
            np.broadcast_to(np.asarray(slots), (layers, np.shape(slots)[-1])).copy()
            for slots in (src, dst)
        )
        put = self.backend.put
        given = {n: put(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
        ssm.replayssm_materialize(
            **self.tables(), src_slots=put(src.astype(np.int32)),
            dst_slots=put(dst.astype(np.int32)), ring_start=put(np.asarray(start, np.int32)),
            replay_prefix_len=put(np.asarray(prefix, np.int32)),
            active_request_indices=None if active is None else put(np.asarray(active, np.int32)),
            **(self.sizes() | given),
        )  # fmt: skip

    def snapshot(self, layer: int) -> Stored:
        got = {name: self.backend.get(a) for name, a in self.arrays[layer].items() if name != "A"}
        cursors = {n: getattr(self.pools[layer], n) for n in ("ring_start",
                   "prev_num_accepted_tokens")}  # fmt: skip
        return Stored(**got, **cursors)


def make_layers(backend, case: Case, layers: int, rng, *, decay: str = "mild") -> Layers:
    """Rings full of tokens of which the first ones of every slot are live."""
    pools = [make_stored(case, rng, fill=True) for _ in range(layers)]
    for one in pools[1:]:
        one.ring_start[:] = pools[0].ring_start
        one.prev_num_accepted_tokens[:] = pools[0].prev_num_accepted_tokens
    weights = [make_weights(case, rng, decay=decay)[0] for _ in range(layers)]
    return Layers(backend, case, pools, weights)


def exact_prefix(pools: Stored, A: np.ndarray, slot: int, start: int, prefix: int) -> np.ndarray:
    """The float64 state of a slot after the first `prefix` rows from `start` on."""
    state = pools.values()[slot]
    for j in range(prefix):
        row = (start + j) % pools.x_cache.shape[2]
        dt = float64(pools.dt_cache[slot][:, row])
        state = advance(state, A, pools.x_cache[slot][:, row], dt, pools.B_cache[slot][:, row])
    return state


def assert_state(got: Stored, slot: int, exact: np.ndarray, dtype: str, what: str) -> None:
    """A stored state against the exact one, with the rounding of its format allowed."""
    values = got.values()[slot]
    if dtype in EIGHT_BIT:
        assert got.state_scale is not None
        cell = half_cells(exact, got.state_scale[slot], dtype)
        slack = 1e-3 * np.abs(exact).max(axis=-1, keepdims=True)
        assert (np.abs(values - exact) <= cell * 1.01 + slack).all(), what
        return
    rounding = relative_l2(exact.astype(DTYPES[dtype]), exact) if dtype != "float32" else 0.0
    assert relative_l2(values, exact) <= 1.05 * rounding + TOLERANCES["float32"], what


def same_bits(got: Stored, before: Stored, slots, what: str = "") -> None:
    for name in ("state", "state_scale"):
        if (array := getattr(got, name)) is not None:
            expected = getattr(before, name)
            assert np.array_equal(bits(array[slots]), bits(expected[slots])), f"{what} {name}"


def check_rings(layers: Layers, poisoned: list[Stored]) -> None:
    for layer, before in enumerate(poisoned):
        got = layers.snapshot(layer)
        for name in ("x_cache", "B_cache", "dt_cache"):
            assert np.array_equal(bits(getattr(got, name)), bits(getattr(before, name))), name


@pytest.mark.parametrize("state_dtype", STATES)
def test_every_prefix_from_every_start(place, state_dtype):
    """Prefix 0 to W from every ring_start; all rows behind the prefix are NaN."""
    case = replace(CASE, state_dtype=state_dtype, num_slots=2 * CASE.ring_buffer_len)
    rows = case.ring_buffer_len
    starts = np.arange(rows)
    src, dst = np.arange(rows), rows + np.arange(rows)
    for prefix in range(case.max_window + 1):
        rng = np.random.default_rng(prefix)
        layers = make_layers(place, case, 1, rng)
        pools = layers.pools[0]
        pools.ring_start[:rows], pools.prev_num_accepted_tokens[:rows] = starts, prefix
        pools.prev_num_accepted_tokens[rows:] = 0
        poison_dead_rows(pools)
        layers = Layers(place, case, [pools], layers.A)
        layers.materialize(src, dst, starts, np.full(rows, prefix))
        got = layers.snapshot(0)
        same_bits(got, pools, slice(0, rows), "sources")
        check_rings(layers, [pools])
        for slot in range(rows):
            if prefix == 0:
                for name in ("state", "state_scale"):
                    if (array := getattr(got, name)) is not None:
                        assert np.array_equal(bits(array[rows + slot]), bits(array[slot]))
                continue
            exact = exact_prefix(pools, layers.A[0], slot, slot, prefix)
            what = f"prefix {prefix} from {slot}"
            assert_state(got, rows + slot, exact, state_dtype, what)


FORMATS = [(state, activation) for state in STATES for activation in ("bfloat16", "float16")]


@pytest.mark.parametrize(("state_dtype", "activation_dtype"), FORMATS)
@pytest.mark.parametrize("rounds", [0, 7])
def test_same_bits_as_a_flush(place, state_dtype, activation_dtype, rounds):
    """A step that flushes stores what `materialize` writes: for the same seed also stochastically,
    when the destination is the slot itself."""
    if rounds and state_dtype == "float32":
        pytest.skip("float32 states are not rounded")
    case = replace(CASE, state_dtype=state_dtype, activation_dtype=activation_dtype)
    rng = np.random.default_rng(3)
    layers = make_layers(place, case, 1, rng, decay="trained")
    pools = layers.pools[0]
    live = np.arange(case.num_slots) % case.max_window + 1
    pools.prev_num_accepted_tokens[:] = live
    if state_dtype in EIGHT_BIT:  # rows that store zeros; the others of their lanes do not
        assert pools.state_scale is not None
        pools.state_scale[1, 0, [3, 12]] = np.nan
        pools.state[2, 0, 5], pools.x_cache[2, 0, :, 5] = 0, 0
    poison_dead_rows(pools)
    layers = Layers(place, case, [pools], layers.A)
    seed = {"rand_seed": np.array([99], np.int64), "philox_rounds": rounds} if rounds else {}
    slots = np.arange(case.num_slots)
    layers.materialize(slots, slots, pools.ring_start, live, **seed)
    got = layers.snapshot(0)

    run = Run(place, pools, case.max_window)
    step = make_step(case, case.num_slots, rng, slots=slots.astype(np.int32))
    step = replace(step, A=layers.A[0])
    if rounds:  # a LayerStack's layer 0 mixes its seed as the tables' first layer
        from replayssm_cupy.numerics import mix_seed

        mixed = np.array([mix_seed(np.int64(99), 0)]).astype(np.uint64).view(np.int64)
        seed["rand_seed"] = mixed.reshape(1)
    run.step(step, force_flush=np.ones(case.num_slots, np.uint8), **seed)
    same_bits(got, run.snapshot(), slice(None), f"{state_dtype}, {rounds} rounds")


@pytest.mark.parametrize("shape", ["tiny", "three-heads-per-group", "five-heads-per-group",
                                   "seven-heads-per-group", "widest"])  # fmt: skip
@pytest.mark.parametrize("state_dtype", ["float32", "float16", "int8"])
def test_every_head_dim_and_dstate(place, shape, state_dtype):
    case = Case(SHAPES[shape], 1, 16, state_dtype, num_slots=7)
    rng = np.random.default_rng(4)
    layers = make_layers(place, case, 2, rng)
    start = layers.pools[0].ring_start
    layers.materialize([0, 1, 2], [3, 4, 5], start[:3], [16, 5, 0])
    for layer, pools in enumerate(layers.pools):
        got = layers.snapshot(layer)
        same_bits(got, pools, [0, 1, 2, 6])
        for src, dst, prefix in ((0, 3, 16), (1, 4, 5), (2, 5, 0)):
            exact = exact_prefix(pools, layers.A[layer], src, int(start[src]), prefix)
            assert_state(got, dst, exact, state_dtype, f"layer {layer}, {src} to {dst}")


@pytest.mark.parametrize(("state_dtype", "activation_dtype"), GPU_DTYPES)
def test_24_layers_with_slots_of_their_own(place, state_dtype, activation_dtype):
    """Every layer reads and writes other slots; some requests are not listed, some are padding."""
    case = Case(Shape("many", 2, 1, 64, 64), 2, 6, state_dtype, activation_dtype, num_slots=8)
    rng = np.random.default_rng(5)
    layers = make_layers(place, case, 24, rng)
    orders = np.stack([rng.permutation(case.num_slots) for _ in range(24)])
    src, dst = orders[:, :4].copy(), orders[:, 4:].copy()
    src[7, 0], dst[9, 1], dst[11, 2] = -1, -1, -9
    prefix, start = np.array([3, 6, 1, 2]), np.array([7, 0, 4, 6])
    layers.materialize(src, dst, start, prefix, active=[2, 0, 1, -1])
    for layer, pools in enumerate(layers.pools):
        got, written = layers.snapshot(layer), []
        for request in (0, 1, 2):
            if min(src[layer, request], dst[layer, request]) < 0:
                continue
            exact = exact_prefix(pools, layers.A[layer], src[layer, request], int(start[request]),
                                 int(prefix[request]))  # fmt: skip
            assert_state(got, dst[layer, request], exact, state_dtype, f"layer {layer}")
            written.append(dst[layer, request])
        same_bits(got, pools, np.setdiff1d(np.arange(case.num_slots), written), f"layer {layer}")


@pytest.mark.parametrize("nheads", [5, 14])
def test_fewer_warps_than_work(place, monkeypatch, nheads):
    """Twelve warps go from head to head, to the next layer and to the next request."""
    monkeypatch.setattr("replayssm_cupy.prefix.processor", lambda device: Processor(1, 227 << 10))
    case = Case(Shape("odd", nheads, 1, 64, 64), 2, 6, num_slots=8)
    layers = make_layers(place, case, 3, np.random.default_rng(12))
    src, dst, length = np.arange(4), 4 + np.arange(4), np.array([3, 0, 6, 1])
    start = layers.pools[0].ring_start
    layers.materialize(src, dst, start[:4], length)
    for layer, pools in enumerate(layers.pools):
        got = layers.snapshot(layer)
        same_bits(got, pools, src)
        for slot in src:
            exact = exact_prefix(pools, layers.A[layer], slot, int(start[slot]), int(length[slot]))
            assert_state(got, dst[slot], exact, "float32", f"layer {layer}, slot {slot}")


def test_the_list_ends_at_its_first_negative_entry(place):
    rng = np.random.default_rng(6)
    layers = make_layers(place, CASE, 2, rng)
    start = layers.pools[0].ring_start[:4]
    layers.materialize([0, 1, 2, 3], [4, 5, 6, 7], start, [2, 2, 2, 2], active=[-1, -1, -1, -1])
    for layer, pools in enumerate(layers.pools):
        same_bits(layers.snapshot(layer), pools, slice(None))
    layers.materialize([0, 1, 2, 3], [4, 5, 6, 7], start, [2, 2, -1, 2], active=[3, 2, -1, -1])
    for layer, pools in enumerate(layers.pools):
        got = layers.snapshot(layer)
        same_bits(got, pools, [0, 1, 2, 3, 4, 5, 6, 8])
        exact = exact_prefix(pools, layers.A[layer], 3, int(start[3]), 2)
        assert_state(got, 7, exact, "float32", "request 3")


@pytest.mark.parametrize("pad", [0, 5, -1])
def test_padding(place, pad):
    """A slot that is pad_slot_id, whichever number that is, or negative."""
    rng = np.random.default_rng(11)
    layers = make_layers(place, CASE, 2, rng)
    src, dst = np.array([0, 1, 2, -3]), np.array([4, 5, 6, 7])
    layers.materialize(src, dst, [1, 1, 1, 1], [3, 0, 3, 0], pad_slot_id=pad)
    written = [int(d) for s, d in zip(src, dst, strict=True) if pad not in (s, d) and s >= 0]
    for layer, pools in enumerate(layers.pools):
        got = layers.snapshot(layer)
        same_bits(got, pools, np.setdiff1d(np.arange(CASE.num_slots), written))
        assert not any(np.array_equal(got.state[slot], pools.state[slot]) for slot in written)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_an_exact_copy_keeps_every_byte(place, state_dtype):
    """NaN payloads, infinities, negative zero, and the NaN of a scale."""
    case = replace(CASE, state_dtype=state_dtype)
    rng = np.random.default_rng(7)
    layers = make_layers(place, case, 2, rng)
    for pools in layers.pools:
        noise = rng.integers(0, 256, bits(pools.state[3]).size, np.uint8)
        pools.state[3] = noise.view(pools.state.dtype).reshape(pools.state[3].shape)
        if pools.state_scale is not None:
            pools.state_scale[3, :, ::3] = np.nan
    layers = Layers(place, case, layers.pools, layers.A)
    layers.materialize([3, 5], [6, 5], [0, 0], [0, 0], active=[0, 1])
    for layer, pools in enumerate(layers.pools):
        got = layers.snapshot(layer)
        for name in ("state", "state_scale"):
            if (array := getattr(got, name)) is not None:
                assert np.array_equal(bits(array[6]), bits(getattr(pools, name)[3])), name
        same_bits(got, pools, [0, 1, 2, 3, 4, 5, 7, 8])


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16", *EIGHT_BIT])
def test_stochastic_rounding(place, state_dtype):
    """Repeatable; other bits for another seed, layer and slot; values in one cell."""
    case = replace(CASE, state_dtype=state_dtype)
    rng = np.random.default_rng(8)
    one = make_layers(place, case, 1, rng)
    same = [one.pools[0], one.pools[0].copy()]

    def written(seed: int) -> list[Stored]:
        layers = Layers(place, case, [p.copy() for p in same], [one.A[0], one.A[0]])
        layers.materialize([0, 0], [3, 4], [1, 1], [5, 5], philox_rounds=10,
                           rand_seed=np.array([seed], np.int64))  # fmt: skip
        return [layers.snapshot(0), layers.snapshot(1)]

    first, again, other = written(11), written(11), written(12)
    same_bits(first[0], again[0], slice(None))
    same_bits(first[1], again[1], slice(None))
    for a, b in ((first[0].state[3], other[0].state[3]), (first[0].state[3], first[1].state[3]),
                 (first[0].state[3], first[0].state[4])):  # fmt: skip
        differing = np.mean(bits(a) != bits(b))
        assert differing > 0.05, differing
    exact = exact_prefix(same[0], one.A[0], 0, 1, 5)
    scale = first[0].state_scale
    if scale is not None:
        cell = 2 * half_cells(exact, scale[3], state_dtype)
    else:
        cell = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
        cell = cell * 2.0 ** (16 if state_dtype == "bfloat16" else 13)
        cell = np.maximum(cell, 2.0**-24)
    assert (np.abs(first[0].values()[3] - exact) <= cell * 1.02 + 1e-5).all()


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("table", ["int64", "uint64"])
def test_formats_of_weights_and_tables(place, weights, table):
    case = replace(CASE, weight_dtype=weights)
    rng = np.random.default_rng(9)
    layers = make_layers(place, case, 2, rng)
    tables = layers.tables
    layers.tables = lambda: {  # type: ignore[method-assign]
        name: place.put(place.get(array).view(table)) for name, array in tables().items()
    }
    anchors = [place.put(np.zeros(1, np.float32))]
    layers.materialize([0], [5], [2], [4], dependency_inputs=anchors, dependency_outputs=anchors)
    for layer, pools in enumerate(layers.pools):
        exact = exact_prefix(pools, float64(layers.A[layer]), 0, 2, 4)
        assert_state(layers.snapshot(layer), 5, exact, "float32", weights)


def test_far_slots_and_strided_pages(place):
    """Slots that lie in pages, each of its own size, as in a paged cache."""
    rng = np.random.default_rng(10)
    layers = make_layers(place, CASE, 2, rng)
    for pools in layers.pools:
        for name, pad in (("state", 24), ("x_cache", 40), ("B_cache", 72), ("dt_cache", 8)):
            array = getattr(pools, name)
            flat = array.reshape(len(array), -1)
            pages = np.full((len(array), flat.shape[1] + pad), np.nan).astype(array.dtype)
            pages[:, : flat.shape[1]] = flat
            setattr(pools, name, pages[:, : flat.shape[1]].reshape(array.shape))
            assert getattr(pools, name).strides[0] != array.strides[0]
    layers = Layers(place, CASE, layers.pools, layers.A)
    layers.materialize([8, 1], [0, 5], [3, 6], [6, 0])
    for layer, pools in enumerate(layers.pools):
        got = layers.snapshot(layer)
        exact = exact_prefix(pools, layers.A[layer], 8, 3, 6)
        assert_state(got, 0, exact, "float32", f"layer {layer}")
        assert np.array_equal(bits(got.state[5]), bits(pools.state[1]))


# --- Checked mode and wrong input ----------------------------------------------------------------


GOOD = {"src": [0, 1, 2], "dst": [4, 5, 6], "start": [0, 7, 3], "prefix": [6, 0, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"active": [0, 3, -1]}, "active_request_indices: expected requests from 0 to 2, got 3 at "
         "place 1"),
        ({"active": [0, -1, 2]}, "active_request_indices: expected only -1 behind the first "
         "negative entry, at place 1, got 2 at place 2"),
        ({"active": [2, 0, 2]}, "active_request_indices: expected each request once, got 2 at "
         "places 0 and 2"),
        ({"start": [0, 8, 3]}, "ring_start: expected values from 0 to 7, got 8 at request 1"),
        ({"start": [0, -1, 3]}, "ring_start: expected values from 0 to 7, got -1 at request 1"),
        ({"prefix": [6, 0, 7]}, "replay_prefix_len: expected at most max_window = 6, got 7 at "
         "request 2"),
        ({"dst": [4, 5, 4]}, "dst_slots: expected distinct slots, got slot 4 at requests 0 and 2"),
        ({"dst": [4, 2, 6]}, "dst_slots: expected no other request's source, got slot 2 at request "
         "1, the source of request 2"),
    ],
)  # fmt: skip
def test_checks(place, change, message):
    layers = make_layers(place, CASE, 2, np.random.default_rng(20))
    given = GOOD | {"active": [0, 1, 2]} | change
    with pytest.raises((ssm.ReplaySSMError, ValueError), match=f"^{message}$") as caught:
        layers.materialize(**given, check=True)
    if place.name != "reference":
        assert type(caught.value) is ssm.ReplaySSMError
    for layer, pools in enumerate(layers.pools):
        same_bits(layers.snapshot(layer), pools, slice(None))


def test_a_check_of_good_metadata(place, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    layers = make_layers(place, CASE, 2, np.random.default_rng(21))
    slots = {"src": [0, 0, -1], "dst": [4, 0, 4], "prefix": [6, -1, 2]}
    layers.materialize(**(GOOD | slots), active=[2, 0, 1])
    for layer, pools in enumerate(layers.pools):
        exact = exact_prefix(pools, layers.A[layer], 0, 0, 6)
        assert_state(layers.snapshot(layer), 4, exact, "float32", f"layer {layer}")


@pytest.mark.parametrize(
    ("table", "address", "state_dtype"),
    [("state_ptrs", 0, "float32"), ("x_cache_ptrs", 2, "float32"), ("B_cache_ptrs", 0, "float32"),
     ("dt_cache_ptrs", 1, "float32"), ("A_ptrs", 0, "float32"), ("state_scale_ptrs", 0, "int8")],
)  # fmt: skip
def test_checks_of_the_tables(backend, table, address, state_dtype):
    """An address of 0, or one that no array of the kind can have."""
    case = replace(CASE, state_dtype=state_dtype)
    layers = make_layers(backend, case, 2, np.random.default_rng(22))
    good = layers.tables()
    wrong = backend.get(good[table]).copy()
    wrong[1] = address if address == 0 else wrong[1] + address
    layers.tables = lambda: good | {table: backend.put(wrong)}  # type: ignore[method-assign]
    message = f"^{table}: expected an aligned address other than 0, got {int(wrong[1]):#x} at layer"
    with pytest.raises(ssm.ReplaySSMError, match=message):
        layers.materialize(**GOOD, check=True)
    for layer, pools in enumerate(layers.pools):
        same_bits(layers.snapshot(layer), pools, slice(None))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dim": 72}, ValueError, "dim: expected one of 64, 80, 96, 128, got 72 "),
        ({"dstate": 100}, ValueError, "dstate: expected one of 64, 128, 256, got 100 "),
        ({"num_heads": 2**31}, ValueError, "num_heads: expected 1 to 134217728, got 2147483648"),
        ({"num_heads": 0}, ValueError, "num_heads: expected 1 to 134217728, got 0"),
        ({"heads_per_group": 3}, ValueError, "heads_per_group: expected a divisor of num_heads = "
         "4, got 3"),
        ({"max_window": 17}, ValueError, "max_window: expected 1 to 16, got 17"),
        ({"ring_buffer_len": 5}, ValueError, r"ring_buffer_len: expected max_window = 6 to \d+, "
         "got 5"),
        ({"state_dtype": "int32"}, TypeError, "state_dtype: expected one of float32, .* got int32"),
        ({"input_dtype": "int8"}, TypeError, "input_dtype: expected one of .* got int8"),
        ({"matrixA_dtype": "int8"}, TypeError, "matrixA_dtype: expected one of .* got int8"),
        ({"state_dtype": "wrong"}, TypeError, "state_dtype: expected one of .* got wrong"),
        ({"philox_rounds": 11}, ValueError, "philox_rounds: expected 0 to 10, got 11"),
        ({"philox_rounds": 3}, ValueError, r"rand_seed: expected \(1,\) int64 with 3 rounds, got"),
        ({"philox_rounds": 3, "rand_seed": np.zeros(1, np.int64)}, ValueError, "philox_rounds: "
         "expected 0 with a float32 state, which is not rounded, got 3"),
        ({"rand_seed": np.zeros(1, np.int32)}, TypeError, "rand_seed: expected int64, got int32"),
        ({"pad_slot_id": 2**63}, ValueError, "pad_slot_id: expected a 64-bit integer"),
        ({"dependency_inputs": [3]}, TypeError, r"dependency_inputs\[0\]: expected an array"),
        ({"check": "all"}, ValueError, "check: expected False, True"),
        ({"prefix": [1, 2]}, ValueError, r"replay_prefix_len: expected \(batch,\) = \(3,\), got "
         r"\(2,\) \(batch from src_slots\)"),
        ({"active": [0, 1]}, ValueError, r"active_request_indices: expected \(batch,\) = \(3,\), "),
        ({"dst": [0, 1]}, ValueError, r"dst_slots: expected \(layers, batch\) = \(2, 3\), got "),
    ],
)  # fmt: skip
def test_wrong_arguments(place, change, error, message):
    layers = make_layers(place, CASE, 2, np.random.default_rng(23))
    given = GOOD | {"active": [0, 1, -1]} | change
    with pytest.raises(error, match=f"^{message}") as caught:
        layers.materialize(**given)
    assert "\n" not in str(caught.value)
    for layer, pools in enumerate(layers.pools):
        same_bits(layers.snapshot(layer), pools, slice(None))


@pytest.mark.parametrize("fault", ["dtype", "rank", "length", "stride", "slots", "none"])
def test_wrong_tables(place, fault):
    layers = make_layers(place, CASE, 2, np.random.default_rng(24))
    good = layers.tables()
    table, message = place.get(good["B_cache_ptrs"]), "B_cache_ptrs: expected "
    if fault == "dtype":
        table, message = table.astype(np.int32), message + "one of int64, uint64, got int32"
    elif fault == "rank":
        table, message = table[:, None], message + r"\(layers,\) = \(2,\), got \(2, 1\)"
    elif fault == "length":
        table, message = table[:1], message + r"\(layers,\) = \(2,\), got \(1,\)"
    elif fault == "stride":
        message += r"a contiguous array, got strides \(2,\)"
    elif fault == "slots":
        layers.pools = layers.pools[:1]
        message = r"src_slots: expected \(layers, batch\) = \(2, batch\), got \(1, 3\)"
    else:
        good = {name: place.put(place.get(a)[:0]) for name, a in good.items()}
        table = table[:0]
        message = "state_ptrs: expected at least one layer, got 0"
    put = place.put(np.repeat(table, 2))[::2] if fault == "stride" else place.put(table)
    layers.tables = lambda: good | {"B_cache_ptrs": put}  # type: ignore[method-assign]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        layers.materialize(**GOOD)


def test_a_batch_that_an_int_does_not_count(place):
    """One slot seen 2^30 + 1 times through a stride of 0: nothing that large is allocated."""
    layers = make_layers(place, CASE, 1, np.random.default_rng(26))
    rows = 2**30 + 1
    one = place.put(np.zeros((1, 1), np.int32))
    many = (np if place.name != "cuda" else pytest.importorskip("cupy")).broadcast_to(
        one, (1, rows)
    )
    given = {**layers.tables(), **layers.sizes()}
    with pytest.raises(
        ValueError, match=r"^src_slots: expected a batch of at most 1073741824, got"
    ):
        ssm.replayssm_materialize(
            **given, src_slots=many, dst_slots=many, ring_start=many[0], replay_prefix_len=many[0],
            active_request_indices=many[0],
        )  # fmt: skip


def test_an_empty_batch(place):
    layers = make_layers(place, CASE, 2, np.random.default_rng(25))
    layers.materialize([], [], [], [], active=[])
    for layer, pools in enumerate(layers.pools):
        same_bits(layers.snapshot(layer), pools, slice(None))
