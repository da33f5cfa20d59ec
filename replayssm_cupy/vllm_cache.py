"""vLLM's two functions for caches whose float16 recurrence is read through a quantised copy.

A cache is a tuple of a layer's arrays, L the rows of its rings:

| place | array | shape and dtype |
| --- | --- | --- |
| 0 | conv state | anything, not looked at |
| 1 | checkpoint | (num_slots, nheads, head_dim, dstate) float16 |
| 2, 3, 4 | rings of x, B and dt, or of x, dt and B | (num_slots, nheads, L, head_dim) as x, |
| | | (num_slots, ngroups, L, dstate) as x, (num_slots, nheads, L) float32 |
| 5 | copy | fp8: (num_slots, nheads, head_dim, dstate) float8_e4m3fn |
| | | nvfp4: (num_slots, nheads, head_dim // 16, 9 * dstate) uint8, as in `read_copy.py` |
| 6 | scales of the copy's rows | (num_slots, nheads, head_dim) float32 |
| 7 | positions | (num_slots,) int32, or (num_slots, 2) with pending windows |

Slots may lie in wider pages. The device keeps the positions: a call moves them on itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compiler, reference
from .arrays import (
    View,
    as_numpy,
    contiguous_from,
    current_stream,
    from_numpy,
    itemsize,
    view,
)
from .calls import Seen, SeenCalls
from .checks import (
    Letters,
    check_alignment,
    check_devices,
    check_dtype,
    check_inplace,
    check_int,
    check_packed,
    index_range,
    optional_view,
)
from .decode import decode, wait_for_jax
from .decode_checks import Options, live_slots
from .errors import ReplaySSMError
from .formats import check_state
from .keys import MAX_WINDOW, BeginStepKey, ClearRingsKey
from .numerics import PHILOX_ROUNDS
from .plan import INDEX_TYPES, BeginStepParams, ClearRingsParams, Plan, launchers
from .slots import load_views

THREADS = 256
FORMATS = {"fp8": "float8_e4m3fn", "nvfp4": "uint8"}
NULL_SLOT = 0  # and below: no sequence
_RINGS = ("x_cache", "B_cache", "dt_cache")
_NAMES = ("state", "x_cache", "B_cache", "dt_cache", "state_copy", "state_scale", "positions")


def initialize_replayssm_state(
    cache: Sequence[Any], states: Any, state_indices: Any, *, state_dtype: str, seed: int = 0
) -> None:
    """Takes over what a prefill left: both forms of the states, empty rings, positions 0.

    Parameters
    ----------
    cache : a layer's arrays, as the module describes them; the slots are written.
    states : (batch, nheads, head_dim, dstate) float32. The copy is made from it, not from what was
        rounded to float16. One state for all, with stride 0 over the batch, is not expanded.
    state_indices : (batch,) int32 or int64, distinct; slots below 1 or >= num_slots are left out.
    state_dtype : "fp8" or "nvfp4", the copy's format.
    seed : of the stochastic rounding to float16.

    Raises TypeError or ValueError naming the argument, before anything is written;
    :class:`ReplaySSMError` as the kernels do. Source of the contract: vLLM,
    ``mamba/ops/replayssm_cutedsl``.
    """
    v = _cache_views(cache, state_dtype)
    given, slots = _dense(view(states, "states")), view(state_indices, "state_indices")
    check_dtype(given, ("float32",))
    letters = _check_cache(v)
    check_devices([*v.values(), given, slots])
    load_views(
        v["state"], v["state_copy"], v["state_scale"], given, slots, NULL_SLOT,
        index_range("seed", seed),
    )  # fmt: skip
    _clear(v, slots, letters["num_slots"])


def selective_state_update_replayssm(
    cache: Sequence[Any],
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    state_indices: Any,
    out: Any,
    *,
    state_dtype: str,
    seed: int = 0,
    num_accepted_tokens: Any = None,
    cu_seqlens: Any = None,
    max_seqlen: int = 1,
    z: Any = None,
) -> Any:
    """One decode step of a layer, positions included: two launches, whatever flushes.

    Parameters
    ----------
    cache : a layer's arrays, as the module describes them; changed.
    x : (batch, nheads, head_dim) bfloat16 or float16; with pending windows (batch, q, nheads,
        head_dim), or (tokens, nheads, head_dim) beside `cu_seqlens`.
    dt, A, B, C, D, dt_bias, z : as in :func:`checkpointing_ssu`, tied or one value a head, with the
        axes of x in front; softplus is always on. D, dt_bias and z may be None.
    state_indices : (batch,) int32 or int64, distinct; slots below 1 or >= num_slots are ignored:
        their rows of out become 0.
    out : as x or float32, with as many elements, contiguous; returned.
    state_dtype : "fp8" or "nvfp4".
    seed : of the stochastic rounding of flushes, with the slot and its position: replays of a
        captured graph differ.
    num_accepted_tokens : (batch,) int32 or int64, with pending windows: how many tokens of the
        slot's window before are kept, 0 to its length; None keeps all.
    cu_seqlens, max_seqlen : of windows of different lengths, as in :func:`checkpointing_ssu`;
        without them every window has the q of x. Without pending windows max_seqlen is 1.

    With one-word positions a call appends one token to each sequence, and at most L - 1 old ones
    are replayed. With two-word positions a call's window stays pending until the next one commits
    it; at most L / 2 old tokens are replayed. W is at most 16.

    Raises TypeError or ValueError naming the argument, before anything is written;
    :class:`ReplaySSMError` as the kernels do.
    """
    given = (x, dt, A, B, C, D, z, dt_bias, state_indices, cu_seqlens, num_accepted_tokens)
    key = (
        state_dtype, seed, max_seqlen, type(seed), type(max_seqlen), _address(cache),
        *(array is None for array in given),
    )  # fmt: skip
    if _calls.repeat(key, (*_arrays(cache), *given, out), x) is not None:
        return out
    v = _cache_views(cache, state_dtype)
    _check_cache(v)
    positions = v.pop("positions")
    tokens: dict[str, View | None] = {
        **{name: view(array, name) for name, array in zip("xABC", (x, A, B, C), strict=True)},
        "dt": view(dt, "dt"),
        **{name: optional_view(array, name) for name, array in (("D", D), ("z", z))},
        "dt_bias": optional_view(dt_bias, "dt_bias"),
        "slots": view(state_indices, "state_indices"),
        "cu_seqlens": optional_view(cu_seqlens, "cu_seqlens"),
    }
    accepted = optional_view(num_accepted_tokens, "num_accepted_tokens")
    first = _check_windows(positions, tokens, accepted, max_seqlen)
    target = _shaped(out, first)
    check_devices([*v.values(), positions, accepted, *tokens.values(), view(out, "out")])
    begin = _Begin(positions, tokens, accepted, first, v["x_cache"].shape[2], max_seqlen, seed)
    views: dict[str, View | None] = {
        **{name: v[name] for name in ("state", "state_copy", "state_scale", *_RINGS)},
        **{name: begin.scratch[name] for name in ("ring_start", "prev_num_accepted_tokens")},
        **{name: tokens[name] for name in _TOKENS},
        "force_flush": None,
        **{name: begin.scratch[name] for name in ("rand_seed", "events")},
    }
    longest = None if cu_seqlens is None else max_seqlen
    options = Options(True, NULL_SLOT, True, begin.max_window, longest, PHILOX_ROUNDS)
    names = (*_order_of(cache), *_GIVEN, "out")
    arrays = dict(zip(names, (*_arrays(cache), *given, out), strict=True))
    seen = Seen(_calls, key, x, arrays)
    decode(views, target, options, seen, before=begin.launch)
    return out


_calls = SeenCalls()
_GIVEN = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "slots", "cu_seqlens", "num_accepted")


def _arrays(cache: Any) -> Sequence[Any]:
    """What of a cache a step works on."""
    return cache[1:8] if isinstance(cache, (tuple, list)) else ()


def _address(cache: Any) -> int:
    """Where the positions lie: captured launches of a cache keep their scratch by it."""
    try:
        return view(cache[-1], "cache[7]").ptr
    except (TypeError, ValueError, IndexError, KeyError):
        return 0


_TOKENS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "slots", "cu_seqlens")
_PER_TOKEN = ("x", "dt", "B", "C", "z")


def begin_slot(
    position: Sequence[int], accepted: int | None, q: int, max_window: int, ring_buffer_len: int
) -> tuple[list[int], int, int]:
    """The position of a slot after a step of q tokens, and its ring_start and live rows before it.

    A position of one word is a count of tokens. Of two words the first counts what was committed,
    the second is pending + 256 * the rows that were live before these. `accepted` of the pending
    tokens are committed first, None: all.
    """
    committed, W, L = max(position[0], 0), max_window, ring_buffer_len
    if len(position) == 1:
        live = 0 if committed == 0 else (committed - 1) % W + 1
        after = [committed + 1]
    else:
        pending = position[1] & 0xFF
        kept = pending if accepted is None else min(max(accepted, 0), pending)
        committed += kept
        live = min((position[1] >> 8 & 0xFF) + kept, W, committed)
        after = [committed, q | (0 if reference.flushes(live, q, W) else live) << 8]
    if after[0] >= _MOST_TOKENS:
        after[0] -= (_MOST_TOKENS // (W * L) - 1) * (W * L)
    return after, (committed - live) % L, live


_MOST_TOKENS = 1 << 30  # that a position counts before it starts again at the same place


class _Begin:
    """What comes ahead of a step: cursors from positions, in arrays that are kept for that."""

    def __init__(
        self,
        positions: View,
        tokens: dict[str, View | None],
        accepted: View | None,
        x: View,
        ring_buffer_len: int,
        max_seqlen: int,
        seed: int,
    ) -> None:
        pending = len(positions.shape) == 2
        index_range("seed", seed)
        self.max_window = min(MAX_WINDOW, ring_buffer_len // 2 if pending else ring_buffer_len - 1)
        self.scratch = _scratch_of(positions)
        self._positions, self._accepted, self._seed = positions, accepted, seed
        self._slots, self._ends = tokens["slots"], tokens["cu_seqlens"]
        self._query_len = x.shape[1] if len(x.shape) == 4 else 1
        if self._ends is not None:
            self._query_len = max_seqlen
        self._ring_buffer_len = ring_buffer_len

    def launch(self) -> tuple[list[Plan], dict[str, View | None]]:
        """Moves the positions on, on the device or here."""
        slots, positions = self._slots, self._positions
        assert slots is not None
        others = {"positions": positions, "num_accepted": self._accepted}
        if positions.device.kind not in launchers:
            self._on_host()
            return [], others
        record: Any = BeginStepParams(pad_slot_id=NULL_SLOT, seed=self._seed)
        arrays = {
            "positions": positions, "slots": slots, "num_accepted": self._accepted,
            "cu_seqlens": self._ends, **self.scratch,
        }  # fmt: skip
        for name, array in arrays.items():
            if array is not None:
                check_alignment(array)
                setattr(record, name, array.ptr)
        record.positions_slot_stride = positions.strides[0]
        record.words = 1
        if len(positions.shape) == 2:
            record.positions_word_stride, record.words = positions.strides[1], 2
        record.slots_stride, record.slots_type = slots.strides[0], INDEX_TYPES[slots.dtype]
        if (accepted := self._accepted) is not None:
            record.num_accepted_stride = accepted.strides[0]
            record.num_accepted_type = INDEX_TYPES[accepted.dtype]
        record.num_slots, record.batch = positions.shape[0], slots.shape[0]
        record.npredicted, record.max_window = self._query_len, self.max_window
        record.ring_buffer_len = self._ring_buffer_len
        grid = -(-record.batch // THREADS), 1, 1
        stream = current_stream(positions)
        plan = Plan(BeginStepKey(), grid, (THREADS, 1, 1), record, positions.device)
        plan.launch(stream)
        return [plan], others

    def _on_host(self) -> None:
        a = {name: as_numpy(array) for name, array in self.scratch.items()}
        slots, positions = self._slots, as_numpy(self._positions)
        assert slots is not None
        ends = None if self._ends is None else as_numpy(self._ends)
        accepted = None if self._accepted is None else as_numpy(self._accepted)
        a["rand_seed"][0] = self._seed
        for row, slot in enumerate(as_numpy(slots).tolist()):
            if not live_slots(np.array([slot]), 1, len(positions), NULL_SLOT):
                continue
            q = self._query_len if ends is None else int(ends[row + 1] - ends[row])
            kept = None if accepted is None else int(accepted[row])
            position = np.atleast_1d(positions[slot]).tolist()
            after, start, live = begin_slot(
                position, kept, q, self.max_window, self._ring_buffer_len
            )
            committed = position[0] if len(position) == 1 else after[0]
            a["ring_start"][slot], a["prev_num_accepted_tokens"][slot] = start, live
            a["events"][slot] = committed
            positions[slot] = after[0] if len(position) == 1 else after


_kept: dict[object, tuple[Any, Any]] = {}


def _scratch_of(positions: View) -> dict[str, View]:
    """Cursors, flush events and the seed of a cache, at addresses that captured launches keep."""
    slots = positions.shape[0]
    key = positions.ptr, slots, positions.device, positions.framework
    if key not in _kept:
        check_not_captured(positions)
        rows = from_numpy(np.zeros(3 * max(slots, 1), np.int32), positions)
        _kept[key] = rows, from_numpy(np.zeros(1, np.int64), positions)
    rows, seed = (view(array, "scratch") for array in _kept[key])
    names = ("ring_start", "prev_num_accepted_tokens", "events")
    found = {
        name: rows._replace(name=name, ptr=rows.ptr + 4 * slots * index, shape=(slots,))
        for index, name in enumerate(names)
    }
    return found | {"rand_seed": seed._replace(name="rand_seed")}


def check_not_captured(positions: View) -> None:
    """Scratch cannot be made inside a capture."""
    if positions.device.kind != "cuda":
        return
    stream = current_stream(positions)
    if stream and compiler.import_cupy().cuda.runtime.streamIsCapturing(stream):
        raise ReplaySSMError(
            "cache: expected one that was decoded with before its stream is captured into a CUDA "
            "graph, got one that was not: call the function once before the capture"
        )


def _cache_views(cache: Sequence[Any], state_dtype: str) -> dict[str, View]:
    """The views of a cache by our names; the order of its rings is told by their ranks."""
    if not isinstance(state_dtype, str) or state_dtype not in FORMATS:
        raise ValueError(f'state_dtype: expected "fp8" or "nvfp4", got {state_dtype!r}')
    if not isinstance(cache, (tuple, list)):
        raise TypeError(f"cache: expected a tuple of arrays, got {type(cache).__name__}")
    if len(cache) != 8:
        raise ValueError(f"cache: expected 8 arrays, got {len(cache)}")
    found = {
        name: view(cache[place], f"cache[{place}]")
        for place, name in enumerate(_order_of(cache), 1)
    }
    check_dtype(found["state"], ("float16",))
    check_dtype(found["state_copy"], (FORMATS[state_dtype],), f" with {state_dtype}")
    return found


def _order_of(cache: Sequence[Any]) -> list[str]:
    """Our names of a cache's arrays from place 1 on: x, B, dt, or x, dt, B, as their ranks tell."""
    names = list(_NAMES)
    if len(view(cache[3], "cache[3]").shape) == 3:
        names[2], names[3] = names[3], names[2]
    return names


def _check_cache(v: dict[str, View]) -> Letters:
    """The arrays of a cache against each other."""
    letters = Letters()
    check_state(v["state"], v["state_copy"], v["state_scale"], letters)
    letters.bind(v["x_cache"], ("num_slots", "nheads", "ring_buffer_len", "head_dim"))
    letters.bind(v["B_cache"], ("num_slots", "ngroups", "ring_buffer_len", "dstate"))
    letters.bind(v["dt_cache"], ("num_slots", "nheads", "ring_buffer_len"))
    check_dtype(v["dt_cache"], ("float32",))
    check_dtype(v["B_cache"], (v["x_cache"].dtype,), f" as {v['x_cache'].name}")
    positions = v["positions"]
    check_dtype(positions, ("int32",))
    letters.bind(positions, ("num_slots", "2")[: max(len(positions.shape), 1)])
    if len(positions.shape) == 2 and positions.shape[1] != 2:
        raise ValueError(
            f"{positions.name}: expected (num_slots,) or (num_slots, 2), got {positions.shape}"
        )
    if letters["ring_buffer_len"] < 2:
        raise ValueError(
            f"{v['x_cache'].name}: expected at least 2 ring rows, got {letters['ring_buffer_len']}"
        )
    check_inplace(*v.values())
    for name in ("state", "state_copy", "state_scale"):
        check_packed(v[name], 2)
    for name in _RINGS:
        check_packed(v[name], 3 if name != "dt_cache" else 2)
        if v[name].device.kind in launchers:
            check_alignment(v[name], 0 if name == "dt_cache" else 3)
    return letters


def _check_windows(
    positions: View, tokens: dict[str, View | None], accepted: View | None, max_seqlen: int
) -> View:
    """Which tokens a layout of positions allows; adds the row of packed ones, and returns x."""
    x, slots, ends = tokens["x"], tokens["slots"], tokens["cu_seqlens"]
    assert x is not None and slots is not None
    check_int("max_seqlen", max_seqlen)
    if len(positions.shape) == 1:
        for name, array in (("cu_seqlens", ends), ("num_accepted_tokens", accepted)):
            if array is not None:
                raise ValueError(f"{name}: expected None with positions of one word, got an array")
        if max_seqlen != 1:
            raise ValueError(f"max_seqlen: expected 1 with positions of one word, got {max_seqlen}")
        if len(x.shape) != 3:
            raise ValueError(f"x: expected (batch, nheads, head_dim), got {x.shape}")
    if accepted is not None:
        check_dtype(accepted, tuple(INDEX_TYPES))
        if accepted.shape != slots.shape:
            raise ValueError(
                f"{accepted.name}: expected {slots.shape} as {slots.name}, got {accepted.shape}"
            )
    if ends is not None and len(x.shape) == 3:
        for name in _PER_TOKEN:
            if (array := tokens[name]) is not None:
                tokens[name] = array._replace(shape=(1, *array.shape), strides=(0, *array.strides))
    first = tokens["x"]
    assert first is not None
    return first


def _shaped(out: Any, x: View) -> Any:
    """`out`, which has as many elements, in the shape of x."""
    target = view(out, "out")
    if math.prod(target.shape) != math.prod(x.shape) or not contiguous_from(target, 0):
        raise ValueError(
            f"out: expected a contiguous array of {math.prod(x.shape)} elements as x, got "
            f"{target.shape} with strides {target.strides}"
        )
    return out if target.shape == x.shape else out.reshape(x.shape)


def _dense(states: View) -> View:
    """States whose last axes are packed, copied if they are not; the batch may have stride 0."""
    if len(states.shape) != 4 or contiguous_from(states, 2) or 0 in states.shape:
        return states
    owner: Any = states.owner
    if states.framework == "torch":
        return view(owner.contiguous(), states.name)
    return view(owner.copy(), states.name)


def _clear(v: dict[str, View], slots: View, num_slots: int) -> None:
    """Rings and positions of slots become 0."""
    positions = v["positions"]
    if positions.device.kind not in launchers:
        chosen = live_slots(as_numpy(slots), len(slots.shape), num_slots, NULL_SLOT)
        for name in (*_RINGS, "positions"):
            as_numpy(v[name])[chosen] = 0
        return
    record: Any = ClearRingsParams(positions=positions.ptr, slots=slots.ptr, pad_slot_id=NULL_SLOT)
    for index, name in enumerate(_RINGS):
        ring = v[name]
        words = 4 // itemsize(ring.dtype)  # elements in one
        record.rings[index] = ring.ptr
        record.ring_slot_strides[index] = ring.strides[0] // words
        record.ring_head_strides[index] = ring.strides[1] // words
        record.heads[index] = ring.shape[1]
        record.words_of_head[index] = math.prod(ring.shape[2:]) // words
    record.positions_slot_stride, record.words = positions.strides[0], 1
    if len(positions.shape) == 2:
        record.positions_word_stride, record.words = positions.strides[1], 2
    record.slots_stride, record.slots_type = slots.strides[0], INDEX_TYPES[slots.dtype]
    record.num_slots, record.batch = num_slots, slots.shape[0]
    if record.batch == 0:
        return
    stream = current_stream(positions)
    grid = record.batch, len(_RINGS), 1
    Plan(ClearRingsKey(), grid, (THREADS, 1, 1), record, positions.device).launch(stream)
    wait_for_jax([slots], positions.device, stream)
