"""Stacks of borrowed arrays on a backend, whose slots are written, copied and compared."""

from __future__ import annotations

import numpy as np
from cases import Case, Shape
from oracles import Audit, bits, float64
from runs import make_stored

import replayssm_cupy as ssm

SHAPE = Shape("snapshots", 4, 2, 64, 64)
CASE = Case(SHAPE, npredicted=4, max_window=16, num_slots=8)


def make_stack(place, case: Case, layers: int = 2, *, fill: bool = False, seed: int = 0, **options):
    """A stack that borrows arrays: zero states and rings of NaN, or with `fill` random ones."""
    rng = np.random.default_rng(seed)
    pools = [make_stored(case, rng, fill=fill) for _ in range(layers)]
    for one in pools:
        if not fill:
            one.state[...] = 0
            if one.state_scale is not None:
                one.state_scale[...] = 1
            one.ring_start[:] = 0
    put = place.put
    scales = [put(p.state_scale) for p in pools if p.state_scale is not None]
    stack = ssm.LayerStack.from_arrays(
        [put(p.state) for p in pools], [put(p.x_cache) for p in pools],
        [put(p.B_cache) for p in pools], [put(p.dt_cache) for p in pools],
        put(pools[0].ring_start), put(pools[0].prev_num_accepted_tokens),
        npredicted=case.npredicted, state_scales=scales, **options,
    )  # fmt: skip
    return stack, pools


def integers(place, values, dtype=np.int32):
    return place.put(np.asarray(values, dtype))


def weights(place, case: Case, layers: int, value: float = 0.0) -> list:
    return [place.put(np.full(case.shape.nheads, value, np.float32)) for _ in range(layers)]


def step_all(place, stack, step, **options) -> list[np.ndarray]:
    given = {name: place.put(array) for name, array in step.arrays().items()}
    slots = given.pop("state_batch_indices", None)
    return [
        place.get(stack.step(layer, **given, slots=slots, dt_softplus=step.dt_softplus, **options))
        for layer in range(stack.num_layers)
    ]


def edit(place, array, index, value) -> None:
    """Writes a part of a device array through the host, which knows every format."""
    host = place.get(array)
    host[index] = value
    array[...] = place.put(host)


def values(place, stack, slot: int, layer: int = 0) -> np.ndarray:
    state = float64(place.get(stack.states[layer])[slot])
    if stack.state_scales:
        state = state * float64(place.get(stack.state_scales[layer])[slot])[..., None]
    return state


def cursors(place, stack, slot: int) -> tuple[int, int]:
    return (int(place.get(stack.ring_start)[slot]),
            int(place.get(stack.prev_num_accepted_tokens)[slot]))  # fmt: skip


def contents(place, stack) -> dict[str, np.ndarray]:
    """Every byte of a stack."""
    lists = {"states": stack.states, "scales": stack.state_scales, "x": stack.x_caches,
             "B": stack.B_caches, "dt": stack.dt_caches}  # fmt: skip
    found = {f"{name}[{i}]": bits(place.get(a)) for name, arrays in lists.items()
             for i, a in enumerate(arrays)}  # fmt: skip
    found["ring_start"] = bits(place.get(stack.ring_start))
    found["prev"] = bits(place.get(stack.prev_num_accepted_tokens))
    return found


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not np.array_equal(a[name], b[name])]


def feed(place, stack, oracle: Audit, slots: list[int], accepted: list[int], q: int = 4) -> None:
    """One audited step; `slots` are storage lines, the oracle's requests have the same numbers."""
    step, exact = oracle.propose(slots, q)
    for out in step_all(place, stack, step):
        np.testing.assert_array_equal(float64(out), exact)
    stack.advance(integers(place, slots), integers(place, accepted))
    for slot, kept in zip(slots, accepted, strict=True):
        if slot >= 0:
            oracle.accept(slot, kept)
