"""The public decode functions.

Arrays of PyTorch, JAX, CuPy and NumPy are borrowed, never copied. Those on a CUDA device run the
kernels on the caller's stream; host arrays run ``reference.py``, with the same results within the
tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arrays import view
from .calls import Seen, SeenCalls
from .checked import check_mode, everywhere
from .checks import (
    check_optional_int,
    check_rounds,
    index_range,
    pad_output_is_zero,
)
from .decode import decode
from .decode_checks import Options, Views
from .scratch import SCRATCH, check_algorithm, check_hints


def checkpointing_ssu(
    state: Any,
    x_cache: Any,
    B_cache: Any,
    dt_cache: Any,
    ring_start: Any,
    prev_num_accepted_tokens: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    out: Any = None,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    state_batch_indices: Any = None,
    pad_slot_id: int = -1,
    state_scale: Any = None,
    rand_seed: Any = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: Any = None,
    cumAdt_vec: Any = None,
    cb_old: Any = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
    *,
    max_window: int | None = None,
    force_flush: Any = None,
    pad_output: str = "zero",
    check: bool | str = False,
    state_copy: Any = None,
) -> Any:
    """One ReplaySSM decode step: outputs from checkpoint, ring and new tokens.

    The new tokens are appended to the ring behind the live rows. The checkpoint is rewritten only
    if ``prev_num_accepted_tokens + npredicted > max_window`` (a flush): the live rows are folded
    into it, the new tokens are not. The cursors are read, not moved: call :func:`advance_ring`
    once the accepted tokens are known. Repeating a step that does not flush changes nothing;
    repeating one that flushes, with the old cursors, folds the live rows twice.

    Parameters
    ----------
    state : (num_slots, nheads, head_dim, dstate), float32, bfloat16, float16, int8 or
        float8_e4m3fn; changed on flush. head_dim is 64, 80, 96 or 128, dstate 64, 128 or 256; the
        last two axes are packed.
    x_cache : (num_slots, nheads, ring_buffer_len, head_dim), as x; appended to.
    B_cache : (num_slots, ngroups, ring_buffer_len, dstate), as x; appended to.
    dt_cache : (num_slots, nheads, ring_buffer_len), float32; processed dt is appended.
    ring_start : (num_slots,) int32, in [0, ring_buffer_len): the oldest live row.
    prev_num_accepted_tokens : (num_slots,) int32, in [0, max_window]: how many rows are live.
        All other rows may hold anything, NaN too.
    x : (batch, npredicted, nheads, head_dim), bfloat16 or float16 (float32 on the CPU path), with
        npredicted from 1 to 16. A rank-3 x (batch, nheads, head_dim) is one token, and then dt, B,
        C, z and out have no token axis either.
    dt : (batch, npredicted, nheads), or with a last axis head_dim of stride 0; any float type.
    A : (nheads,) or (nheads, head_dim, dstate) with strides (s, 0, 0); negative; any float type.
    B, C : (batch, npredicted, ngroups, dstate), as x; nheads is a multiple of ngroups.
    out : as x or float32, written; a new array like x, in its framework, if None.
    D, dt_bias : (nheads,) or (nheads, head_dim) with strides (s, 0); any float type; optional.
    z : as x, optional: out is multiplied by z * sigmoid(z).
    dt_softplus : dt <- log(1 + exp(dt + dt_bias)), the identity above 20.
    state_batch_indices : (batch,) int32 or int64 slots, distinct; None is slot = batch row. A slot
        equal to `pad_slot_id`, negative or >= num_slots is padding: nothing of any slot is touched.
    state_scale : (num_slots, nheads, head_dim) float32, for 8-bit states: the decode scale of each
        row, state = code * scale; changed on flush. A row of zeros has scale 1, a row with a NaN
        or an inf has scale NaN and stays visible.
    rand_seed : (1,) int64 on the arrays' device, read when the kernel runs: states other than
        float32 are rounded stochastically, the same way for the same seed, slot, head, row and
        column; None rounds to nearest.
    philox_rounds : of the random bits, 1 to 10.
    d_split : None, 1 or 2, a hint for FlashInfer's kernels that these do not need: no effect.
    cu_seqlens : (batch + 1,) int32, for sequences of different lengths: sequence i is the tokens
        cu_seqlens[i] to cu_seqlens[i + 1] - 1 of x (1, tokens, nheads, head_dim), and so on for
        dt, B, C, z and out. Empty sequences are left alone. A flush goes by the actual length.
    max_seqlen : with cu_seqlens: the longest sequence, 1 to 16. Tokens of a sequence beyond it are
        left out.
    enable_pdl : launch the kernel so that its blocks may start while the kernel ahead of it in the
        stream is still running (programmatic dependent launch). No array is used early, weights,
        slots and cursors included: the kernel waits first until the one ahead has ended, so the
        results are those of a plain launch whatever that one writes, and when. While it waits, the
        form for few heads asks the L2 cache for the states and rings of the slots that it finds,
        a hint that changes nothing but the time. The kernel behind may start early in turn if it
        was launched that way, and must wait likewise (``griddepcontrol.wait``); what was launched
        before the step has ended by then. Without effect before compute capability 9.0, and on
        the CPU path.
    cb_scaled, cumAdt_vec, cb_old : scratch for two kernels, all three or none, from
        :func:`allocate_scratch`, or as FlashInfer has it: (>= batch, nheads, 32, 8) as x,
        (>= batch, nheads, 16) float32 and (>= batch, nheads, 32, K / 2) as x, with K = max_window
        rounded up to 8. Contiguous. Their contents are of no use afterwards; steps that may run at
        the same time need scratch each.
    precompute_heads_per_cta : 0 or more, a hint for FlashInfer's kernels: no effect.
    algorithm : "monolith": one kernel. "two-kernel": the first writes the weights of the rows to
        the scratch, without which this is an error, and the second, which may start while the first
        still runs, takes them from there. "auto": by measured bounds, of which there are none so
        far: one kernel. The bits are those of one kernel. One kernel does the step too with few
        heads and one or two tokens, where scratch of FlashInfer's shape does not hold the weights
        as they are (more than 6 tokens, or more than 2 with max_window up to 8), and with dstate
        256 if the state is 8-bit or there are more than 8 tokens.
    max_window : W, the most live rows, at most 16; ring_buffer_len - npredicted (or max_seqlen) if
        None.
    force_flush : (batch,) bool or uint8: rows where it is set fold whatever is live. Pass the same
        to :func:`advance_ring`.
    pad_output : "zero" sets `out` to 0 in rows of padding, "keep" leaves them.
    check : True looks at cursors, slots and cu_seqlens first, with a kernel of its own and a wait
        for it; "finite" at the live ring rows too. The environment variable REPLAYSSM_CHECK=1 (or
        =finite) does so everywhere. Not inside a CUDA-graph capture.
    state_copy : beside a float16 state, the copy of it that outputs are read from, with
        `state_scale`; made anew at every flush, from the state before it is rounded. e4m3 codes
        (num_slots, nheads, head_dim, dstate) float8_e4m3fn, or e2m1 codes and their block scales
        (num_slots, nheads, head_dim // 16, 9 * dstate) uint8; :func:`load_state` makes it first.

    Returns
    -------
    out, in the caller's framework. Work is enqueued on the caller's stream; JAX arrays, whose
    memory cannot be tied to a foreign stream, make the call wait for it.

    Raises
    ------
    TypeError, ValueError : one line naming the argument, what was expected and what came.
    ReplaySSMError : no CuPy, driver, NVRTC or headers, a kernel that does not compile, or what a
        check found.

    Notes
    -----
    Equivalent to, for a sequence with checkpoint S, live and new rows j (``c = cumsum(A * dt)``)::

        y[t] = exp(c[t]) * S @ C[t] + sum(exp(c[t] - c[j]) * dt[j] * (C[t] @ B[j]) * x[j], j <= t)
        out[t] = (y[t] + D * x[t]) * silu(z[t])

    A NaN in one token may reach the outputs of the other tokens of the same call. Source of the
    algorithm: ReplaySSM in FlashInfer (``checkpointing_ssu``), for the recurrence of Mamba-2.
    """
    numbers = (
        pad_slot_id, max_seqlen, philox_rounds, max_window, d_split, precompute_heads_per_cta
    )  # fmt: skip
    key = (
        numbers, (*map(type, numbers),), dt_softplus, pad_output, enable_pdl, algorithm,
        D is None, z is None, dt_bias is None, state_batch_indices is None, state_scale is None,
        rand_seed is None, cu_seqlens is None, force_flush is None, cb_scaled is None,
        cumAdt_vec is None, cb_old is None, state_copy is None, out is None,
    )  # fmt: skip
    given = (
        state, state_copy, state_scale, x_cache, B_cache, dt_cache, ring_start,
        prev_num_accepted_tokens, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, cu_seqlens,
        force_flush, rand_seed, cb_scaled, cumAdt_vec, cb_old, out,
    )  # fmt: skip
    if check is False and not everywhere():
        repeated = _calls.repeat(key, given, x)
        if repeated is not None:
            return repeated[1]
    arrays = dict(zip(_SSU_ARRAYS, given, strict=False))
    views = _views(arrays, _SSU_OPTIONAL)
    check_hints(d_split, precompute_heads_per_cta)
    options = Options(
        bool(dt_softplus),
        index_range("pad_slot_id", pad_slot_id),
        pad_output_is_zero(pad_output),
        check_optional_int("max_window", max_window),
        check_optional_int("max_seqlen", max_seqlen),
        check_rounds(philox_rounds),
        check=check_mode(check),
        enable_pdl=bool(enable_pdl),
        algorithm=check_algorithm(algorithm),
    )
    return decode(views, out, options, Seen(_calls, key, x, arrays | {"out": out}))


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    state_batch_indices: Any = None,
    pad_slot_id: int = -1,
    out: Any = None,
    *,
    state_scale: Any = None,
    rand_seed: Any = None,
    philox_rounds: int = 10,
    pad_output: str = "zero",
) -> Any:
    """The plain update: advances the state by every token of the call and writes it back.

    Arguments, padding and errors as in :func:`checkpointing_ssu`, with these differences: there is
    no ring, `state` changes at every call, and x may be float32 on CUDA too.

    Notes
    -----
    Equivalent to, token by token::

        S = exp(A * dt[t]) * S + dt[t] * outer(x[t], B[t])
        out[t] = (S @ C[t] + D * x[t]) * silu(z[t])

    S stays in float32 within a call and is rounded to the state's type once. Source: Mamba-2,
    ``selective_state_update`` of mamba_ssm.
    """
    key = (
        pad_slot_id, philox_rounds, type(pad_slot_id), type(philox_rounds), dt_softplus,
        pad_output, D is None, z is None, dt_bias is None, state_batch_indices is None,
        state_scale is None, rand_seed is None, out is None,
    )  # fmt: skip
    given = (
        state, state_scale, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, rand_seed, out
    )  # fmt: skip
    repeated = _plain_calls.repeat(key, given, x)
    if repeated is not None:
        return repeated[1]
    arrays = dict(zip(_UPDATE_ARRAYS, given, strict=False))
    options = Options(
        bool(dt_softplus),
        index_range("pad_slot_id", pad_slot_id),
        pad_output_is_zero(pad_output),
        philox_rounds=check_rounds(philox_rounds),
    )
    views = _views(arrays, ("state_scale", *_OPTIONAL, "rand_seed"))
    return decode(views, out, options, Seen(_plain_calls, key, x, arrays | {"out": out}))


_calls, _plain_calls = SeenCalls(), SeenCalls()
_TOKENS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "slots")
_RINGS = ("x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")
_SSU_ARRAYS = (
    "state", "state_copy", "state_scale", *_RINGS, *_TOKENS, "cu_seqlens", "force_flush",
    "rand_seed", *SCRATCH,
)  # fmt: skip
_UPDATE_ARRAYS = ("state", "state_scale", *_TOKENS, "rand_seed")
_OPTIONAL = ("D", "z", "dt_bias", "slots")
_SSU_OPTIONAL = (
    "state_copy", "state_scale", *_OPTIONAL, "cu_seqlens", "force_flush", "rand_seed", *SCRATCH
)  # fmt: skip


def _views(arrays: dict[str, Any], optional: Sequence[str]) -> Views:
    """The views of a call's arrays, in the order of the parameter records."""
    return {
        name: None if array is None and name in optional else view(array, _NAMES.get(name, name))
        for name, array in arrays.items()
    }


_NAMES = {"slots": "state_batch_indices"}  # of arguments, where records have another
