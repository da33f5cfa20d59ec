"""vLLM's functions: caches with a float16 recurrence and a quantised copy, positions inside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import Recurrence, advance, bits, float64, relative_l2
from runs import NumPyBackend, reference_path

import replayssm_cupy as ssm
from replayssm_cupy import vllm_cache
from replayssm_cupy.read_copy import encode_copy

SHAPE = Shape("layer", 4, 2, 64, 128)
SLOTS = 7
# Of outputs, against the exact recurrence: a copy's quantisation, less where tokens count more.
ERROR = {"fp8": 0.05, "nvfp4": 0.2}

both = pytest.mark.parametrize("state_dtype", ERROR)


class Cache:
    """A cache on a backend, with pages that are wider than their arrays where that is possible."""

    def __init__(self, backend, state_dtype: str, rows: int, words: int, shape: Shape = SHAPE):
        self.backend, self.state_dtype, self.shape = backend, state_dtype, shape
        heads, N = (shape.nheads, shape.head_dim), shape.dstate
        copy, scale = encode_copy(
            np.zeros((SLOTS, *heads, N), np.float32), f"float16+{state_dtype}"
        )
        rng = np.random.default_rng(0)

        def old(*sizes: int) -> np.ndarray:
            return rng.standard_normal((SLOTS, *sizes))

        case = make_step(Case(shape), 1, rng)
        host = [
            np.zeros(1, np.float32),
            old(*heads, N).astype(np.float16),
            old(shape.nheads, rows, shape.head_dim).astype(case.x.dtype),
            old(shape.ngroups, rows, N).astype(case.x.dtype),
            old(shape.nheads, rows).astype(np.float32),
            copy,
            scale,
            np.full((SLOTS, 2) if words == 2 else (SLOTS,), 99, np.int32),
        ]
        self.arrays = tuple(backend.put(array) for array in host)

    def load(self, states: np.ndarray, slots: Any, **options: Any) -> None:
        ssm.initialize_replayssm_state(
            self.arrays, self.backend.put(states), self.backend.put(np.asarray(slots)),
            state_dtype=self.state_dtype, **options,
        )  # fmt: skip

    def step(self, step, out_dtype: Any = np.float32, **options: Any) -> np.ndarray:
        put = self.backend.put
        given = {name: put(getattr(step, name)) for name in ("x", "dt", "A", "B", "C", "D", "z")}
        out = put(np.full(step.x.shape, np.nan).astype(out_dtype))
        options = {n: put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
        result = ssm.selective_state_update_replayssm(
            self.arrays, **given, dt_bias=put(step.dt_bias),
            state_indices=put(step.state_batch_indices), out=out, state_dtype=self.state_dtype,
            **options,
        )  # fmt: skip
        assert result is out
        return self.backend.get(out)

    def get(self, place: int) -> np.ndarray:
        return self.backend.get(self.arrays[place])


def one_token(step, b: slice | None = None):
    """A step of one token without its token axis, or packed tokens of windows."""
    parts = {name: getattr(step, name)[:, 0] for name in ("x", "dt", "B", "C", "z")}
    return replace(step, **parts)


def carried(cache: Cache, slot: int, A: np.ndarray, start: int, live: int) -> np.ndarray:
    """The recurrence of a slot: its checkpoint and the live rows of its rings."""
    state, x, B, dt = (cache.get(place)[slot] for place in (1, 2, 3, 4))
    state = float64(state)
    for j in range(live):
        row = (start + j) % x.shape[1]
        state = advance(state, A, x[:, row], float64(dt[:, row]), B[:, row])
    return state


@both
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_plain_decoding(backend, index, state_dtype):
    """40 tokens, so that every slot flushes more than twice; ignored rows are 0."""
    rng = np.random.default_rng(1)
    cache = Cache(backend, state_dtype, 16, 1)
    states = rng.standard_normal((4, 4, 64, 128)).astype(np.float32)
    slots = np.array([3, 1, 0, 5], index)  # 0 is no sequence
    before = [cache.get(place) for place in range(1, 8)]
    cache.load(states, slots, seed=11)
    for place in range(1, 8):
        kept = cache.get(place)[[0, 2, 4, 6]]
        assert np.array_equal(bits(kept), bits(before[place - 1][[0, 2, 4, 6]]))
    for place in (2, 3, 4, 7):
        assert not float64(cache.get(place)[slots[[0, 1, 3]]]).any()
    copy, scale = encode_copy(states, f"float16+{state_dtype}")
    assert np.array_equal(bits(cache.get(5)[slots[[0, 1, 3]]]), bits(copy[[0, 1, 3]]))
    assert np.array_equal(bits(cache.get(6)[slots[[0, 1, 3]]]), bits(scale[[0, 1, 3]]))

    begin = np.zeros((SLOTS, 4, 64, 128))
    begin[slots[[0, 1, 3]]] = states[[0, 1, 3]]
    exact = Recurrence(begin)
    case = Case(SHAPE, npredicted=1)
    batch = np.array([5, 0, 3, -2, 1, SLOTS], index)
    weights = None
    for token in range(40):
        chosen = batch if token % 3 else batch[:4]
        step = make_step(case, len(chosen), rng, slots=chosen, weights=weights)
        step = replace(step.tied(), pad_slot_id=0)
        weights = (step.A[:, 0, 0], step.D[:, 0], step.dt_bias[:, 0])
        plain = replace(step, A=weights[0], D=weights[1], dt_bias=weights[2], dt=step.dt[..., 0])
        expected = exact.propose(plain)[:, 0]
        out = cache.step(one_token(step), seed=11)
        padding = (chosen <= 0) | (chosen >= SLOTS)
        assert not out[padding].any()
        assert relative_l2(out[~padding], expected[~padding]) < ERROR[state_dtype]
        for slot in chosen[~padding]:
            exact.accept(int(slot), 1)
    counts = {5: 40, 3: 40, 1: 26}
    for slot, count in counts.items():
        assert cache.get(7)[slot] == count
        live = (count - 1) % 15 + 1
        got = carried(cache, slot, weights[0], (count - live) % 16, live)
        # The recurrence was rounded to float16 at the beginning and at each flush.
        assert relative_l2(got, exact.state(slot)) < 1e-3


@both
@pytest.mark.parametrize("packed", [False, True])
def test_pending_windows(backend, packed, state_dtype):
    """A window is committed by the next call, as many tokens of it as were accepted."""
    rng = np.random.default_rng(2)
    cache = Cache(backend, state_dtype, 16, 2)
    state = rng.standard_normal((1, 4, 64, 128)).astype(np.float32)
    slots = np.array([2, 6, 4], np.int32)
    cache.load(np.broadcast_to(state, (3, *state.shape[1:])), slots)
    exact = Recurrence(np.broadcast_to(state, (SLOTS, *state.shape[1:])))
    case, weights = Case(SHAPE, npredicted=4), None
    accepted = np.zeros(3, np.int32)
    for call in range(24):
        lengths = rng.integers(0, 5, 3) if packed else np.full(3, 1 + call % 4)
        step = make_step(case, 3, rng, q=4, slots=slots, weights=weights)
        weights = (step.A, step.D, step.dt_bias)
        expected, previous = [], accepted.copy()
        for b, slot in enumerate(slots):
            one = replace(step.tokens(0, int(lengths[b])), state_batch_indices=slots[b : b + 1])
            parts = {n: getattr(one, n)[b : b + 1] for n in ("x", "dt", "B", "C", "z")}
            expected.append(exact.propose(replace(one, **parts))[0])
            kept = int(rng.integers(0, lengths[b] + 1))
            exact.accept(int(slot), kept)
            accepted[b] = kept
        options: dict[str, Any] = {"num_accepted_tokens": previous} if call else {}
        if packed:
            parts = {
                n: np.concatenate([getattr(step, n)[b, :q] for b, q in enumerate(lengths)])
                for n in ("x", "dt", "B", "C", "z")
            }
            ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            out = cache.step(replace(step, **parts), cu_seqlens=ends, max_seqlen=4, **options)
            wanted = np.concatenate(expected)
        else:
            out = cache.step(step.tokens(0, int(lengths[0])), **options)
            wanted = np.stack(expected)
        if wanted.size:
            assert relative_l2(out, wanted) < ERROR[state_dtype]
    committed, window = cache.get(7)[slots].T
    for b, slot in enumerate(slots):
        pending, live = int(window[b]) & 0xFF, int(window[b]) >> 8
        assert pending == lengths[b]
        rows = live + int(accepted[b])
        start = (int(committed[b]) - live) % 16
        got = carried(cache, slot, weights[0], start, rows)
        assert relative_l2(got, exact.state(int(slot))) < 1e-3


@both
@pytest.mark.parametrize("words", [1, 2])
def test_the_cpu_path_and_the_kernels_agree(backend, words, state_dtype):
    """Positions are the same, and the states but for sums in another order."""

    def run(where) -> Cache:
        rng = np.random.default_rng(3)
        cache = Cache(where, state_dtype, 8, words)
        cache.load(rng.standard_normal((2, 4, 64, 128)).astype(np.float32), [1, 3], seed=5)
        weights = None
        for _ in range(20):
            step = make_step(Case(SHAPE, 1), 2, rng, weights=weights, slots=np.array([3, 1]))
            weights = (step.A, step.D, step.dt_bias)
            out = cache.step(one_token(step), seed=5)
        return cache, out

    kernels, got = run(backend)
    with reference_path():
        host, expected = run(NumPyBackend())
    assert np.array_equal(kernels.get(7), host.get(7))
    assert relative_l2(got, expected) < 0.03
    assert relative_l2(kernels.get(1)[[1, 3]], host.get(1)[[1, 3]]) < 1e-4


@both
def test_flushes_round_by_slot_and_position(backend, state_dtype):
    """The bits of a flush depend on seed and position, and on nothing else."""

    def flushed(position: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(4)
        cache = Cache(backend, state_dtype, 16, 1)
        cache.load(rng.standard_normal((1, 4, 64, 128)).astype(np.float32), [2])
        for place in (2, 3, 4):
            cache.arrays[place][...] = cache.backend.put(
                rng.uniform(0.1, 0.9, cache.get(place).shape).astype(cache.get(place).dtype)
            )
        cache.arrays[7][...] = position
        cache.step(one_token(make_step(Case(SHAPE, 1), 1, rng, slots=np.array([2]))), seed=seed)
        assert cache.get(7)[2] == position + 1
        return cache.get(1)[2]

    first = flushed(15, 0)
    assert np.array_equal(bits(first), bits(flushed(15, 0)))
    for other in (flushed(15 + 240, 0), flushed(15, 1)):
        changed = (first != other).mean()
        assert 0.05 < changed < 0.95
        assert relative_l2(first, other) < 1e-3


def test_a_call_of_a_kind_that_was_seen_is_not_looked_at_again(backend, monkeypatch):
    """Later ones launch at once, and give what a call that is looked at gives."""
    rng = np.random.default_rng(9)
    one, other = (Cache(backend, "fp8", 16, 2) for _ in range(2))
    states = rng.standard_normal((1, 4, 64, 128)).astype(np.float32)
    steps = [make_step(Case(SHAPE, 4), 1, rng, slots=np.array([1])) for _ in range(12)]
    counts = rng.integers(0, 5, (12, 1)).astype(np.int32)
    outs = []
    for cache in (one, other):
        cache.load(states, [1])
        monkeypatch.setattr(vllm_cache, "_calls", vllm_cache.SeenCalls())
        outs.append([cache.step(steps[0], num_accepted_tokens=counts[0])])
        for step, count in zip(steps[1:], counts[1:], strict=True):
            with monkeypatch.context() as changed:
                if cache is one:
                    changed.setattr(vllm_cache, "decode", None)
                else:
                    changed.setattr(vllm_cache, "_calls", vllm_cache.SeenCalls())
                outs[-1].append(cache.step(step, num_accepted_tokens=count))
    for got, expected in zip(*outs, strict=True):
        assert np.array_equal(bits(got), bits(expected))
    assert np.array_equal(one.get(7), other.get(7))


def test_order_of_the_rings(backend):
    """x, dt, B is taken as well as x, B, dt."""
    rng = np.random.default_rng(5)
    one, other = (Cache(backend, "fp8", 16, 1) for _ in range(2))
    a = other.arrays
    states = rng.standard_normal((1, 4, 64, 128)).astype(np.float32)
    step = one_token(make_step(Case(SHAPE, 1), 1, rng, slots=np.array([1])))
    other.arrays = (*a[:3], a[4], a[3], *a[5:])
    outs = []
    for cache in (one, other):
        cache.load(states, [1])
        outs.append(cache.step(step))
    assert np.array_equal(bits(outs[0]), bits(outs[1]))


def test_a_count_starts_again_long_before_it_overflows():
    most, W, L = vllm_cache._MOST_TOKENS, 15, 16
    for count in (most - 2, most - 1, most):
        after, start, live = vllm_cache.begin_slot([count], None, 1, W, L)
        _, next_start, next_live = vllm_cache.begin_slot(after, None, 1, W, L)
        assert 0 < after[0] <= most
        assert (start, live) == ((count - live) % L, (count - 1) % W + 1)
        assert (next_start, next_live) == ((count + 1 - next_live) % L, count % W + 1)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("words", [1, 2])
def test_replays_of_a_captured_step(words, state_dtype):
    """A graph of one step decodes on when it is replayed, with new random bits at every flush."""
    import cupy
    from conftest import CudaBackend

    backend = CudaBackend()
    rng = np.random.default_rng(6)
    states = rng.standard_normal((1, 4, 64, 128)).astype(np.float32)
    step = one_token(make_step(Case(SHAPE, 1), 1, rng, slots=np.array([2])))
    eager, captured = (Cache(backend, state_dtype, 16, words) for _ in range(2))
    given = {n: backend.put(getattr(step, n)) for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")}
    out = backend.put(np.zeros(step.x.shape, np.float32))

    def call(cache: Cache) -> None:
        ssm.selective_state_update_replayssm(
            cache.arrays, **given, state_indices=slots, out=out, state_dtype=state_dtype
        )

    slots = backend.put(np.array([2], np.int32))
    for cache in (eager, captured):
        call(cache)
        cache.load(states, [2])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call(captured)
        graph = stream.end_capture()
    cupy.cuda.Device().synchronize()  # the graph's stream waits for no other
    for _ in range(40):
        call(eager)
        graph.launch(stream)
    stream.synchronize()
    cupy.cuda.Device().synchronize()
    for place in (1, 5, 6, 7):
        assert np.array_equal(bits(eager.get(place)), bits(captured.get(place))), place


# --- Errors --------------------------------------------------------------------------------------


def test_errors(backend):
    rng = np.random.default_rng(7)
    cache, pending = Cache(backend, "fp8", 16, 1), Cache(backend, "fp8", 16, 2)
    states = rng.standard_normal((1, 4, 64, 128)).astype(np.float32)
    step = one_token(make_step(Case(SHAPE, 1), 1, rng, slots=np.array([1])))
    two = make_step(Case(SHAPE, 2), 1, rng, slots=np.array([1]))

    def refused(error: type[Exception], message: str, call, of: Cache = cache) -> None:
        before = [of.get(place) for place in range(8)]
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        for place, array in enumerate(before):
            assert np.array_equal(bits(of.get(place)), bits(array)), place

    def with_array(place: int, array: np.ndarray | None):
        changed = Cache(backend, "fp8", 16, 1)
        arrays = list(changed.arrays)
        arrays[place] = backend.put(array)
        changed.arrays = tuple(arrays)
        return lambda: changed.step(step)

    cache.state_dtype = "int4"
    refused(ValueError, "^state_dtype: expected \"fp8\" or \"nvfp4\", got 'int4'$",
            lambda: cache.step(step))  # fmt: skip
    cache.state_dtype = "nvfp4"
    refused(TypeError, r"^cache\[5\]: expected uint8 with nvfp4, got float8_e4m3fn$",
            lambda: cache.step(step))  # fmt: skip
    cache.state_dtype = "fp8"
    arrays, cache.arrays = cache.arrays, cache.arrays[:7]
    with pytest.raises(ValueError, match=r"^cache: expected 8 arrays, got 7$"):
        cache.load(states, [1])
    cache.arrays = arrays
    refused(TypeError, "^states: expected float32, got float16$",
            lambda: cache.load(states.astype(np.float16), [1]))  # fmt: skip
    refused(ValueError, r"^states: expected \(batch, nheads, head_dim, dstate\) = ",
            lambda: cache.load(states[:, :2], [1]))  # fmt: skip
    refused(ValueError, r"^state_indices: expected \(batch,\) = \(1,\), got \(2,\)",
            lambda: cache.load(states, [1, 2]))  # fmt: skip
    refused(TypeError, "^state_indices: expected one of int32, int64, got float32$",
            lambda: cache.load(states, np.ones(1, np.float32)))  # fmt: skip
    refused(ValueError, "^max_seqlen: expected 1 with positions of one word, got 2$",
            lambda: cache.step(step, max_seqlen=2))  # fmt: skip
    refused(ValueError, "^num_accepted_tokens: expected None with positions of one word",
            lambda: cache.step(step, num_accepted_tokens=np.ones(1, np.int32)))  # fmt: skip
    refused(ValueError, r"^x: expected \(batch, nheads, head_dim\), got \(1, 2, 4, 64\)$",
            lambda: cache.step(two))  # fmt: skip
    for count, error, message in (
        (np.ones(1, np.float32), TypeError, "one of int32, int64, got float32$"),
        (np.ones(2, np.int32), ValueError, r"\(1,\) as state_indices, got \(2,\)$"),
    ):
        refused(error, f"^num_accepted_tokens: expected {message}",
                lambda n=count: pending.step(two, num_accepted_tokens=n), pending)  # fmt: skip
    nine = make_step(Case(SHAPE, 9), 1, rng, slots=np.array([1]))
    refused(ValueError, "^cache.2.: expected ring_buffer_len >= 2 . npredicted = 18, got 16$",
            lambda: pending.step(nine), pending)  # fmt: skip
    refused(TypeError, r"^cache\[7\]: expected int32, got int64$",
            with_array(7, np.zeros(SLOTS, np.int64)))  # fmt: skip
    refused(ValueError, r"^cache\[7\]: expected \(num_slots,\) or \(num_slots, 2\), got \(7, 3\)$",
            with_array(7, np.zeros((SLOTS, 3), np.int32)))  # fmt: skip
    refused(TypeError, r"^cache\[1\]: expected float16, got float32$",
            with_array(1, np.zeros((SLOTS, 4, 64, 128), np.float32)))  # fmt: skip
    refused(ValueError, r"^cache\[6\]: expected \(num_slots, nheads, head_dim\) = \(7, 4, 64\)",
            with_array(6, np.zeros((SLOTS, 4, 32), np.float32)))  # fmt: skip
    short = backend.put(np.zeros((1, 4, 32), np.float32))
    put = {n: backend.put(getattr(step, n)) for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")}
    put |= {"state_indices": backend.put(np.array([1])), "out": short, "state_dtype": "fp8"}
    refused(ValueError, "^out: expected a contiguous array of 256 elements as x, got",
            lambda: ssm.selective_state_update_replayssm(cache.arrays, **put))  # fmt: skip


def test_out_may_have_another_shape(backend):
    rng = np.random.default_rng(8)
    cache = Cache(backend, "nvfp4", 16, 1)
    cache.load(rng.standard_normal((1, 4, 64, 128)).astype(np.float32), [1])
    step = one_token(make_step(Case(SHAPE, 1), 1, rng, slots=np.array([1])))
    put = {n: backend.put(getattr(step, n)) for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")}
    flat = backend.put(np.zeros((1, 256), np.float32))
    ssm.selective_state_update_replayssm(
        cache.arrays, **put, state_indices=backend.put(np.array([1])), out=flat,
        state_dtype="nvfp4",
    )  # fmt: skip
    assert backend.get(flat).any()
