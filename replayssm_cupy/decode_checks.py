"""What the arrays of a decode call must be before anything is launched or written.

The shapes are made canonical on the way: token axes added, ties undone. On the host, where they can
be looked at, cursors and lengths are checked too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import View
from .checks import (
    Letters,
    check_alignment,
    check_devices,
    check_dtype,
    check_inplace,
    check_packed,
    check_seed,
    check_value,
    untie,
    with_token_axis,
)
from .errors import ReplaySSMError
from .formats import check_state
from .keys import (
    ACTIVATION_DTYPES,
    DSTATES,
    FLOAT_DTYPES,
    HEAD_DIMS,
    MAX_TOKENS,
    MAX_WINDOW,
    PLAIN_ACTIVATION_DTYPES,
)
from .plan import INDEX_TYPES, launchers
from .scratch import SCRATCH, check_scratch

Views = dict[str, "View | None"]


class Options(NamedTuple):
    """What a decode call takes beside arrays."""

    dt_softplus: bool
    pad_slot_id: int
    zero_padding: bool
    max_window: int | None = None
    max_seqlen: int | None = None  # of a batch of variable length
    philox_rounds: int = 10
    layer: int = -1  # mixed into the seed; -1 takes it as it is
    check: bool | str = False  # True, or "finite" to look at the live ring rows too
    enable_pdl: bool = False  # start before the kernel ahead has ended, and wait for it inside
    algorithm: str = "auto"  # or "monolith", "two-kernel"


_RINGS = ("x_cache", "B_cache", "dt_cache")


def check_decode(views: Views, options: Options) -> tuple[Views, int]:
    """Everything that the kernels and the reference take for granted; canonical views and W."""
    v = dict(views)
    state, x, out = v["state"], v["x"], v["out"]
    assert state is not None and x is not None and out is not None
    replay = "x_cache" in v
    host = x.device.kind not in launchers
    letters = Letters()
    copy, scale = v.get("state_copy"), v["state_scale"]
    check_state(state, copy, scale, letters)
    check_value(state.name, letters["head_dim"], HEAD_DIMS, "head_dim")
    check_value(state.name, letters["dstate"], DSTATES, "dstate")
    check_dtype(x, ACTIVATION_DTYPES if replay and not host else PLAIN_ACTIVATION_DTYPES)
    _check_tokens(v, letters, options.max_seqlen)
    if not 1 <= letters["npredicted"] <= MAX_TOKENS:
        source = (
            "x: expected npredicted from" if options.max_seqlen is None else "max_seqlen: expected"
        )
        raise ValueError(f"{source} 1 to {MAX_TOKENS}, got {letters['npredicted']}")
    written = [state, out]
    window = 0
    if replay:
        window = _check_rings(v, letters, options.max_window)
        written += [array for name in _RINGS if (array := v[name]) is not None]
        written += check_scratch(v, letters, options.algorithm, window)
    written += [array for array in (copy, scale) if array is not None]
    check_seed(v["rand_seed"])
    if v["rand_seed"] is not None and state.dtype == "float32":
        raise ValueError("rand_seed: expected None with a float32 state, which is not rounded")
    check_devices(list(v.values()))
    check_inplace(*written)
    if v["slots"] is None and letters["batch"] > letters["num_slots"]:
        raise ValueError(
            f"{state.name}: expected num_slots >= batch = {letters['batch']} without an array of "
            f"slots, got {letters['num_slots']}"
        )
    check_layout(v, replay)
    return v, window


def _check_tokens(v: Views, letters: Letters, max_seqlen: int | None) -> None:
    """Binds what a step brings, and makes `v` canonical: token axes added, ties undone."""
    x, ends = v["x"], v.get("cu_seqlens")
    assert x is not None
    tokens = ("npredicted",) if len(x.shape) != 3 else ()
    rows = "batch"
    if (ends is None) != (max_seqlen is None):
        raise ValueError(
            "max_seqlen: expected an int with cu_seqlens and None without, got "
            f"{max_seqlen} {'without' if ends is None else 'with'} cu_seqlens"
        )
    if ends is not None and max_seqlen is not None:
        rows, tokens = "rows", ("tokens",)
        check_dtype(ends, ("int32",))
        letters.bind(ends, ("batch + 1",))
        if not ends.shape[0]:
            raise ValueError(
                "cu_seqlens: expected (batch + 1,) with at least one element, got (0,)"
            )
        letters.set("rows", 1, "cu_seqlens")
        letters.set("npredicted", max_seqlen, "max_seqlen")
        letters.set("batch", ends.shape[0] - 1, "cu_seqlens")
    letters.bind(x, (rows, *tokens, "nheads", "head_dim"))
    if not tokens:
        letters.set("npredicted", 1, "x")
    shapes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "dt": ((rows, *tokens, "nheads"), ("head_dim",)),
        "A": (("nheads",), ("head_dim", "dstate")),
        "B": ((rows, *tokens, "ngroups", "dstate"), ()),
        "C": ((rows, *tokens, "ngroups", "dstate"), ()),
        "D": (("nheads",), ("head_dim",)),
        "z": ((rows, *tokens, "nheads", "head_dim"), ()),
        "dt_bias": (("nheads",), ("head_dim",)),
        "slots": (("batch",), ()),
        "force_flush": (("batch",), ()),
        "out": ((rows, *tokens, "nheads", "head_dim"), ()),
    }
    for name, (plain, tied) in shapes.items():
        array = v.get(name)
        if array is None:
            continue
        if name in ("dt", "A", "D", "dt_bias"):
            check_dtype(array, FLOAT_DTYPES)
        elif name == "slots":
            check_dtype(array, tuple(INDEX_TYPES))
        elif name == "force_flush":
            check_dtype(array, ("bool", "uint8"))
        elif name == "out":
            check_dtype(array, tuple(dict.fromkeys((x.dtype, "float32"))))
        else:
            check_dtype(array, (x.dtype,), " as x")
        is_tied = tied and len(array.shape) == len(plain + tied)
        letters.bind(array, plain + tied if is_tied else plain)
        v[name] = untie(array, len(plain), ", ".join(tied)) if tied else array
    if not tokens:
        for name in ("x", "dt", "B", "C", "z", "out"):
            array = v[name]
            v[name] = None if array is None else with_token_axis(array)
    if letters["ngroups"] == 0 or letters["nheads"] % letters["ngroups"]:
        raise ValueError(
            f"B: expected ngroups that divides nheads = {letters['nheads']}, "
            f"got {letters['ngroups']}"
        )


def _check_rings(v: Views, letters: Letters, max_window: int | None) -> int:
    """Binds rings and cursors; returns W."""
    x = v["x"]
    assert x is not None
    shapes = {
        "x_cache": ("num_slots", "nheads", "ring_buffer_len", "head_dim"),
        "B_cache": ("num_slots", "ngroups", "ring_buffer_len", "dstate"),
        "dt_cache": ("num_slots", "nheads", "ring_buffer_len"),
        "ring_start": ("num_slots",),
        "prev_num_accepted_tokens": ("num_slots",),
    }
    for name, plain in shapes.items():
        array = v[name]
        assert array is not None
        letters.bind(array, plain)
        if name in ("x_cache", "B_cache"):
            check_dtype(array, (x.dtype,), " as x")
        else:
            check_dtype(array, ("float32",) if name == "dt_cache" else ("int32",))
    rings = v["x_cache"]
    assert rings is not None
    return check_window(rings.name, rings.shape[2], letters["npredicted"], max_window)


def check_window(name: str, ring_buffer_len: int, npredicted: int, max_window: int | None) -> int:
    """W of a ring `name` of L rows for steps of up to T tokens: T <= W <= 16 and W + T <= L."""
    if ring_buffer_len < 2 * npredicted:
        raise ValueError(
            f"{name}: expected ring_buffer_len >= 2 * npredicted = {2 * npredicted}, "
            f"got {ring_buffer_len}"
        )
    window = ring_buffer_len - npredicted if max_window is None else max_window
    if not npredicted <= window <= MAX_WINDOW:
        rule = "ring_buffer_len - npredicted" if max_window is None else "max_window"
        raise ValueError(
            f"max_window: expected {rule} from npredicted = {npredicted} to {MAX_WINDOW}, "
            f"got {window}"
        )
    if window + npredicted > ring_buffer_len:
        raise ValueError(
            f"max_window: expected max_window + npredicted <= ring_buffer_len = {ring_buffer_len}, "
            f"got {window} + {npredicted}"
        )
    return window


def check_layout(v: Views, replay: bool) -> None:
    """Where a kernel runs: packed axes, and the alignment of what is read as vectors."""
    packed, vectors = _PACKED, vectors_of(replay)
    for name, array in v.items():
        if array is None or array.device.kind not in launchers:
            continue
        if name in packed:
            check_packed(array, packed[name])
        check_alignment(array, max(packed[name], 1) if name in vectors else 0)
        if name in ("x_cache", "B_cache", "dt_cache") and array.strides[2] > _MOST_ROW_STRIDE:
            raise ValueError(
                f"{name}: expected ring rows at most {_MOST_ROW_STRIDE} elements apart, "
                f"got {array.strides[2]}"
            )


_MOST_ROW_STRIDE = 2**31 - 1  # kernels multiply rows by strides in 32 by 32 bits

# The first axis from which on an array is dense.
_PACKED = {
    **{"state": 2, "x_cache": 3, "B_cache": 3, "x": 3, "B": 3, "C": 3, "z": 3, "out": 3},
    **{"state_copy": 2, "state_scale": 2, "cu_seqlens": 0, **dict.fromkeys(SCRATCH, 0)},
}


def vectors_of(replay: bool) -> tuple[str, ...]:
    """The arrays that a decode kernel reads or writes in vectors of 16 bytes."""
    if not replay:
        return ("state", "B", "C")
    return ("state", "state_copy", "x_cache", "B_cache", "x", "B", "C", "z", "out", *SCRATCH)


def _check_host_lengths(ends: np.ndarray[Any, Any], tokens: int, max_seqlen: int) -> None:
    """Sequences that follow one another, none longer than max_seqlen."""
    lengths = np.diff(ends)
    if ends[0] != 0 or ends[-1] > tokens or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens: expected values that rise from 0 to at most {tokens}, got {ends.tolist()}"
        )
    if (lengths > max_seqlen).any():
        raise ValueError(
            f"cu_seqlens: expected lengths of at most max_seqlen = {max_seqlen}, "
            f"got {lengths.max()}"
        )


def check_host_arrays(
    arrays: dict[str, np.ndarray[Any, Any] | None], options: Options, max_window: int
) -> None:
    """On the host cursors, slots and lengths can be looked at before anything is written."""
    start, prev, x = arrays["ring_start"], arrays["prev_num_accepted_tokens"], arrays["x"]
    rings = arrays["x_cache"]
    assert start is not None and prev is not None and x is not None and rings is not None
    ends = arrays["cu_seqlens"]
    if ends is not None:
        _check_host_lengths(ends, x.shape[1], options.max_seqlen or 0)
    batch = len(x) if ends is None else len(ends) - 1
    live = live_slots(arrays["slots"], batch, len(start), options.pad_slot_id)
    for slot in live:
        check_host_cursors(slot, start[slot], prev[slot], max_window, rings.shape[2])
    if options.check and arrays["slots"] is not None:
        _check_distinct(arrays["slots"].tolist(), set(live))
    if options.check == "finite":
        _check_host_rows(arrays, live)


def _check_distinct(slots: list[int], live: set[int]) -> None:
    """Checked mode: no slot but padding occurs twice."""
    rows: dict[int, int] = {}
    for row, slot in enumerate(slots):
        if slot in live and rows.setdefault(slot, row) != row:
            raise ReplaySSMError(
                f"state_batch_indices: expected distinct slots, got slot {slot} at batch rows "
                f"{rows[slot]} and {row}"
            )


def _check_host_rows(arrays: dict[str, np.ndarray[Any, Any] | None], live: list[int]) -> None:
    """Checked mode: the live ring rows are finite."""
    start, prev = arrays["ring_start"], arrays["prev_num_accepted_tokens"]
    for name in _RINGS:
        ring = arrays[name]
        assert ring is not None and start is not None and prev is not None
        for slot in live:
            rows = (int(start[slot]) + np.arange(int(prev[slot]))) % ring.shape[2]
            finite = np.isfinite(ring[slot][:, rows].astype(np.float32))
            if not finite.all():
                row = np.argwhere(~finite)[0][1]
                raise ReplaySSMError(
                    f"{name}: expected finite values in the {len(rows)} live rows, got others in "
                    f"live row {row} of slot {slot}"
                )


def check_host_cursors(
    slot: int, start: int, prev: int, max_window: int, ring_buffer_len: int
) -> None:
    """The legal range of one slot's cursors."""
    if not 0 <= start < ring_buffer_len:
        raise ValueError(
            f"ring_start: expected values from 0 to {ring_buffer_len - 1}, "
            f"got {start} at slot {slot}"
        )
    if not 0 <= prev <= max_window:
        raise ValueError(
            f"prev_num_accepted_tokens: expected values from 0 to max_window = {max_window}, "
            f"got {prev} at slot {slot}"
        )


def live_slots(
    slots: np.ndarray[Any, Any] | None, batch: int, num_slots: int, pad_slot_id: int
) -> list[int]:
    """The slots of a host call that are not padding."""
    rows = range(batch) if slots is None else [int(slot) for slot in slots]
    return [slot for slot in rows if slot != pad_slot_id and 0 <= slot < num_slots]
