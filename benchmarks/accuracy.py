"""Errors of the kernels on a GPU against the float64 recurrence on the same stored inputs.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py copies [--cpu]

Relative L2 errors of the outputs before and after their rounding to 16 bits, beside the error of
rounding the exact result, for random cursors (wrap and flush included); of outputs and states
over 1,000 steps with random acceptance, beside the plain update's; and of every state format after
1, 16 and 256 flushes, beside the plain update that rounds at every token. Shapes and inputs are
the tests'.

``copies``: 2,048 tokens with 256 flushes of a float16 state alone, of one with a read copy, and of
an 8-bit state: errors of outputs and of the recurrence at the beginning and at the end, and how
they grow. ``--cpu`` runs the CPU path.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import Case, Shape, make_pools, make_step  # noqa: E402
from oracles import Recurrence, advance, relative_l2  # noqa: E402

SHAPE = Shape("nemotron-3-nano", 64, 8, 64, 128)
SLOTS = 16


def exact_outputs(pools, step):
    """Float64 outputs of a step whose slot b is batch row b, z and D included."""
    exact = Recurrence(pools.state)
    for slot in range(len(pools.state)):
        rows = int(pools.ring_start[slot]) + np.arange(int(pools.prev_num_accepted_tokens[slot]))
        state = pools.state[slot].astype(np.float64)
        for j in rows % pools.x_cache.shape[2]:
            dt = pools.dt_cache[slot][:, j].astype(np.float64)
            state = advance(state, step.A, pools.x_cache[slot][:, j], dt, pools.B_cache[slot][:, j])
        exact.resync(slot, state, 0)
    return exact.propose(step)


def one_step(tokens: int, state_dtype: str) -> str:
    """One row: the errors of a single step from random cursors."""
    import cupy

    import replayssm_cupy as ssm

    case = Case(SHAPE, tokens, 16, state_dtype, num_slots=SLOTS)
    rng = np.random.default_rng(tokens)
    pools = make_pools(case, rng, fill=True)
    step = make_step(case, SLOTS, rng)
    exact = exact_outputs(pools, step)
    errors = []
    for dtype in (np.float32, step.x.dtype):
        device = {name: cupy.asarray(array) for name, array in pools.arrays().items()}
        given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
        out = cupy.empty(step.x.shape, dtype)
        ssm.checkpointing_ssu(**device, **given, out=out, dt_softplus=True)
        errors.append(relative_l2(cupy.asnumpy(out), exact))
    rounding = relative_l2(exact.astype(step.x.dtype), exact)
    return (
        f"| {state_dtype} | {tokens} | {errors[0]:.2e} | {errors[1]:.3e} | {rounding:.3e} "
        f"| {errors[1] / rounding:.4f} |"
    )


def long_decode(state_dtype: str, steps: int = 1000) -> str:
    """One row: `steps` verification windows of four tokens, 0 to 4 of them accepted."""
    import cupy

    import replayssm_cupy as ssm

    case = Case(Shape("long", 8, 2, 64, 128), 4, 16, state_dtype, num_slots=2)
    rng = np.random.default_rng(7)
    pools = make_pools(case, rng)
    device = {name: cupy.asarray(array) for name, array in pools.arrays().items()}
    plain_state = cupy.asarray(pools.state)
    exact = Recurrence(pools.state)
    waiting, worst = [0, 0], 0.0
    weights = None
    for _ in range(steps):
        step = make_step(case, 2, rng, weights=weights)
        weights = (step.A, step.D, step.dt_bias)
        expected = exact.propose(step)
        given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
        out = ssm.checkpointing_ssu(**device, **given, dt_softplus=True)
        worst = max(worst, relative_l2(cupy.asnumpy(out), expected))
        accepted = rng.integers(0, 5, 2).astype(np.int32)
        ssm.advance_ring(
            device["ring_start"], device["prev_num_accepted_tokens"], cupy.asarray(accepted), 4,
            max_window=16, ring_buffer_len=20,
        )  # fmt: skip
        for slot, kept in enumerate(accepted.tolist()):
            waiting[slot] = kept + (0 if waiting[slot] + 4 > 16 else waiting[slot])
            exact.accept(slot, kept)
            if kept:
                row = {
                    name: given[name][slot : slot + 1, :kept] for name in ("x", "dt", "B", "C", "z")
                }
                ssm.selective_state_update(
                    plain_state, **row, A=given["A"], D=given["D"], dt_bias=given["dt_bias"],
                    dt_softplus=True, state_batch_indices=cupy.asarray([slot], np.int32),
                )  # fmt: skip
    stored, plain = cupy.asnumpy(device["state"]), cupy.asnumpy(plain_state)
    replay = max(relative_l2(stored[s], exact.state(s, waiting[s])) for s in range(2))
    beside = max(relative_l2(plain[s], exact.state(s)) for s in range(2))
    return f"| {state_dtype} | {steps} | {worst:.3e} | {replay:.2e} | {beside:.2e} |"


FORMATS = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
CHECKPOINTS = (1, 16, 256)  # flushes


def many_flushes() -> list[str]:
    """Rows: errors of state and output after some flushes of 16 tokens, all formats fed alike.

    Beside each format, to nearest and stochastically, the plain update of the same format, which
    rounds at every token. Slow decay (A dt near -0.01) keeps old roundings alive.
    """
    import cupy

    import replayssm_cupy as ssm

    nheads, tokens = 8, 16
    case = Case(Shape("flushes", nheads, 2, 64, 128), tokens, 16)
    rng = np.random.default_rng(8)
    A = np.full(nheads, -1.0, np.float32)
    runs = {}
    for dtype in FORMATS:
        for stochastic in (False, True) if dtype != "float32" else (False,):
            for kind in ("replay", "plain"):
                stack = ssm.LayerStack(
                    1, 1, nheads, 64, 2, 128, npredicted=tokens, state_dtype=dtype,
                    stochastic_rounding=stochastic, device="cuda",
                )  # fmt: skip
                runs[dtype, stochastic, kind] = stack
    exact = np.zeros((nheads, 64, 128))
    rows: list[str] = []
    for flush in range(max(CHECKPOINTS) + 1):
        step = make_step(case, 1, rng, weights=(A, np.zeros_like(A), np.zeros_like(A)))
        step.dt[...] = rng.uniform(0.005, 0.015, step.dt.shape)
        given = {n: cupy.asarray(getattr(step, n)) for n in ("x", "dt", "A", "B", "C")}
        out = {}
        for (dtype, stochastic, kind), stack in runs.items():
            y = cupy.empty(step.x.shape, np.float32)
            if kind == "replay":
                stack.step(0, **given, dt_softplus=False, out=y)
                stack.advance(None, cupy.asarray([tokens], np.int32))
            else:
                for t in range(tokens):
                    one = {n: given[n][:, t : t + 1] for n in ("x", "dt", "B", "C")}
                    ssm.selective_state_update(
                        stack.states[0], **one, A=given["A"], out=y[:, t : t + 1],
                        state_scale=stack.state_scales[0] if stack.state_scales else None,
                        rand_seed=stack.rand_seed,
                    )  # fmt: skip
                    if stochastic:
                        stack.rand_seed += 1
            out[dtype, stochastic, kind] = cupy.asnumpy(y)
        before, outputs = exact, np.zeros(step.x.shape)
        for t in range(tokens):
            exact = advance(exact, A, step.x[0, t], step.dt[0, t].astype(np.float64), step.B[0, t])
            C = np.repeat(step.C[0, t].astype(np.float64), nheads // 2, 0)
            outputs[0, t] = np.einsum("hpn,hn->hp", exact, C)
        if flush in CHECKPOINTS:
            for name, stack in runs.items():
                state = cupy.asnumpy(stack.states[0][0]).astype(np.float32)
                if stack.state_scales:
                    state = state * cupy.asnumpy(stack.state_scales[0][0])[..., None]
                # The replay's state lacks the tokens that wait in its ring.
                due = before if name[2] == "replay" else exact
                rows.append(
                    f"| {name[0]} | {'stochastic' if name[1] else 'nearest'} | {name[2]} | {flush} "
                    f"| {relative_l2(state, due):.2e} | {relative_l2(out[name], outputs):.2e} |"
                )
    return sorted(rows, key=lambda row: (FORMATS.index(row.split(" | ")[0][2:]), row))


COPIES = ("float16", "float16+fp8", "float16+nvfp4", "float8_e4m3fn")
STEPS, WINDOW = 257, 8  # every step but the first folds the eight tokens of the one before


def copies(device: str) -> list[str]:
    """Rows: what errors grow to where a copy is read, and where codes carry the recurrence.

    A dt near -0.001 keeps what 1,000 tokens brought, and every rounding of it.
    """
    import replayssm_cupy as ssm

    nheads = 4
    case = Case(Shape("copies", nheads, 2, 64, 128), WINDOW, WINDOW)
    rng = np.random.default_rng(10)
    A = np.full(nheads, -1.0, np.float32)
    runs = {
        (name, stochastic): ssm.LayerStack(
            1, 1, nheads, 64, 2, 128, max_window=WINDOW, npredicted=WINDOW, state_dtype=name,
            stochastic_rounding=stochastic, device=device,
        )
        for name in COPIES
        for stochastic in (False, True)
    }  # fmt: skip
    errors: dict[tuple[str, bool], list[tuple[float, float]]] = {name: [] for name in runs}
    exact = np.zeros((nheads, 64, 128))
    for _ in range(STEPS):
        step = make_step(case, 1, rng, weights=(A, np.zeros_like(A), np.zeros_like(A)))
        step.dt[...] = rng.uniform(0.0005, 0.0015, step.dt.shape)
        before, outputs = exact, np.zeros(step.x.shape)
        for t in range(WINDOW):
            exact = advance(exact, A, step.x[0, t], step.dt[0, t].astype(np.float64), step.B[0, t])
            C = np.repeat(step.C[0, t].astype(np.float64), nheads // 2, 0)
            outputs[0, t] = np.einsum("hpn,hn->hp", exact, C)
        for name, stack in runs.items():
            given = {n: _put(getattr(step, n), device) for n in ("x", "dt", "A", "B", "C")}
            y = _put(np.empty(step.x.shape, np.float32), device)
            stack.step(0, **given, dt_softplus=False, out=y)
            stack.advance(None, _put(np.array([WINDOW], np.int32), device))
            state = _get(stack.states[0])[0].astype(np.float64)
            if stack.state_scales and not stack.state_copies:
                state = state * _get(stack.state_scales[0])[0][..., None]
            if before.any():  # the state lacks the tokens that wait in the ring
                errors[name].append((relative_l2(_get(y), outputs), relative_l2(state, before)))
    rows = []
    for (name, stochastic), found in errors.items():
        of_outputs, of_states = np.array(found).T
        first, last = (of_outputs[part].mean() for part in (slice(0, 32), slice(-32, None)))
        late = np.arange(len(of_outputs))[128:]
        slope = 100 * np.polyfit(late, of_outputs[128:], 1)[0]
        rows.append(
            f"| {name} | {'stochastic' if stochastic else 'nearest'} | {first:.2e} | {last:.2e} "
            f"| {slope:+.1e} | {of_states[:32].mean():.2e} | {of_states[-32:].mean():.2e} |"
        )
    return rows


def _put(array: np.ndarray, device: str):
    if device == "cpu":
        return array.copy()
    import cupy

    return cupy.asarray(array)


def _get(array) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    if array.dtype.itemsize == 1:  # CuPy copies no 8-bit floats
        return array.view(np.uint8).get().view(array.dtype)
    return array.get()


def print_copies(device: str) -> None:
    print("| state | rounding | outputs, flushes 1-32 | outputs, the last 32 ", end="")
    print("| slope per 100 flushes, from 128 on | states, 1-32 | states, the last 32 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(copies(device)))


def main() -> None:
    if sys.argv[1:2] == ["copies"]:
        print_copies("cpu" if "--cpu" in sys.argv else "cuda")
        return
    print("| state | T | out in fp32 | out in bf16 | rounding alone | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype in ("float32", "bfloat16", "float16"):
        for tokens in (1, 4, 16):
            print(one_step(tokens, dtype))
    print("\n| state | steps | worst out | final state | plain update's state |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in ("float32", "bfloat16"):
        print(long_decode(dtype))
    print("\n| state | rounding | update | flushes | state error | output error |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(many_flushes()))
    print()
    print_copies("cuda")


if __name__ == "__main__":
    main()
