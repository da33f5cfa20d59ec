"""Scratch and options of the two-kernel algorithm: what is accepted, refused and left as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import BF16, Call, checkpointing_ssu, label, path, recorder, room, step
from cases import DTYPES, make_pools, make_step
from oracles import bits
from test_interop import CASE, lib, put_step

import replayssm_cupy as ssm
from replayssm_cupy.arrays import view
from replayssm_cupy.scratch import OWN_SHAPES, SCRATCH, peer_shapes

__all__ = ["lib", "path", "recorder"]  # fixtures

F32, F16 = np.float32, np.float16
CALLS = (checkpointing_ssu, step)


def own(batch: int = 3, nheads: int = 4) -> dict[str, np.ndarray]:
    return {name: np.ones((batch, nheads, *shape), F32) for name, shape in OWN_SHAPES.items()}


def peer(batch: int = 3, nheads: int = 4, window: int = 6) -> dict[str, np.ndarray]:
    """FlashInfer's: (>= batch, nheads, 32, 8), (>= batch, nheads, 16), (>= batch, nheads, 32,
    K / 2)."""
    columns = (window + 7) // 8 * 8
    return {
        "cb_scaled": np.ones((batch, nheads, 32, 8), BF16),
        "cumAdt_vec": np.ones((batch, nheads, 16), F32),
        "cb_old": np.ones((batch, nheads, 32, columns // 2), BF16),
    }


FORMATS = pytest.mark.parametrize("scratch", [own, peer])


@pytest.mark.parametrize("window", range(1, 17))
def test_shapes_of_the_peer(window):
    arrays = peer(1, 1, window)
    assert {name: array.shape[2:] for name, array in arrays.items()} == peer_shapes(window)


@FORMATS
@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("algorithm", ["auto", "monolith", "two-kernel"])
@pytest.mark.parametrize("rows", [3, 5])
def test_scratch_is_accepted(make, scratch, algorithm, rows, path):
    """With as many rows as the batch or more; two kernels do a step if they are asked for."""
    call = make()
    call.arguments |= {**scratch(rows), "algorithm": algorithm}
    call()
    call()
    if path is not None:
        assert len(path.plans) == (4 if algorithm == "two-kernel" else 2)


@pytest.mark.parametrize("make", CALLS)
def test_two_kernels_need_scratch(make, path):
    call = make()
    call.arguments["algorithm"] = "two-kernel"
    message = 'algorithm: expected "auto" or "monolith" without scratch .*, got "two-kernel"'
    call.refused(ValueError, f"^{message}$")


@FORMATS
@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("missing", [*([name] for name in SCRATCH), [*SCRATCH[:2]], [*SCRATCH[1:]]])
def test_all_or_none(make, scratch, missing, path):
    call = make()
    call.arguments |= {name: a for name, a in scratch().items() if name not in missing}
    message = rf"{missing[0]}: expected an array beside .* \(all of .*, or none\), got None"
    call.refused(ValueError, f"^{message}$")


@FORMATS
@pytest.mark.parametrize("name", SCRATCH)
@pytest.mark.parametrize("make", CALLS)
def test_wrong_scratch(make, scratch, name, path):
    good = scratch()[name]
    call = make()
    call.arguments |= scratch()
    shapes = [good.shape[1:], (2, *good.shape[1:]), (3, 5, *good.shape[2:])]
    for shape in [*shapes, (*good.shape[:-1], good.shape[-1] + 1)]:
        call.arguments[name] = np.ones(shape, good.dtype)
        call.refused(ValueError, r"^(cb_scaled|cumAdt_vec|cb_old): expected .* = \(at least 3, 4, ")
    for wrong in (F16, np.float64, np.int32):
        call.arguments[name] = good.astype(wrong)
        kind = "bfloat16 as x" if scratch is peer and name != "cumAdt_vec" else "float32"
        expected = kind if wrong is not np.float64 else ".*"
        call.refused(TypeError, f"^{name}: expected {expected}, got {np.dtype(wrong).name}$")
    call.arguments[name] = good.copy()
    call.arguments[name].flags.writeable = False
    call.refused(TypeError, f"^{name}: expected an array to change in place, got a read-only")
    call.arguments[name] = [1.0]
    call.refused(TypeError, f"^{name}: expected an array of PyTorch, .*, got list$")


@FORMATS
@pytest.mark.parametrize("name", SCRATCH)
def test_layout_for_a_kernel(scratch, name, recorder):
    call = checkpointing_ssu()
    call.arguments |= scratch()
    good = call.arguments[name]
    call.arguments[name] = room(good, good.itemsize)
    call.refused(ValueError, f"^{name}: expected an address aligned to 16 bytes, got 0x")
    call.arguments[name] = room(good, 0, gap=16)
    call.refused(ValueError, f"^{name}: expected contiguous axes from axis 0 on, got ")
    assert not recorder.plans


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"algorithm": "two_kernel"}, ValueError,
         'algorithm: expected "auto", "monolith" or "two-kernel", got \'two_kernel\''),
        ({"algorithm": None}, ValueError,
         'algorithm: expected "auto", "monolith" or "two-kernel", got None'),
        ({"algorithm": ["auto"]}, ValueError, r"algorithm: expected .*, got \['auto'\]"),
        ({"d_split": 0}, ValueError, "d_split: expected None, 1 or 2, got 0"),
        ({"d_split": True}, ValueError, "d_split: expected None, 1 or 2, got True"),
        ({"precompute_heads_per_cta": -1}, ValueError,
         "precompute_heads_per_cta: expected at least 0, got -1"),
        ({"precompute_heads_per_cta": 2.0}, TypeError,
         "precompute_heads_per_cta: expected an int, got float"),
    ],
    ids=label,
)  # fmt: skip
def test_values(changes, error, message, path):
    call = checkpointing_ssu()
    call()
    call.arguments |= changes
    call.refused(error, f"^{message}$")


def test_order_of_the_arguments():
    """FlashInfer's, so that a caller changes one import."""
    import inspect

    parameters = inspect.signature(ssm.checkpointing_ssu).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = """state x_cache B_cache dt_cache ring_start prev_num_accepted_tokens x dt A B C
        out D z dt_bias dt_softplus state_batch_indices pad_slot_id state_scale rand_seed
        philox_rounds d_split cu_seqlens max_seqlen enable_pdl cb_scaled cumAdt_vec cb_old
        precompute_heads_per_cta algorithm"""
    assert " ".join(names) == " ".join(expected.split())


def test_scratch_of_every_library(lib):
    """Made like x, all options on: the same bits as without them, in any library."""
    rng = np.random.default_rng(12)
    pools = make_pools(CASE, rng, fill=True)
    arrays = put_step(lib, make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32)))
    scratch = ssm.allocate_scratch(3, CASE.shape.nheads, like=arrays["x"])
    assert [*scratch] == [*SCRATCH]
    for name, array in scratch.items():
        made, x = view(array, name), view(arrays["x"], "x")
        assert (made.shape, made.dtype) == ((3, 4, *OWN_SHAPES[name]), "float32")
        assert made.device == x.device
        assert not made.readonly
        assert made.framework == (x.framework if x.framework != "jax" else lib.base.name)
    results = []
    for options in (
        {},
        {**scratch, "enable_pdl": True, "d_split": 2, "precompute_heads_per_cta": 4},
        {**scratch, "algorithm": "monolith"},
        {**scratch, "algorithm": "two-kernel"},
    ):
        mine = {name: lib.targets.put(array) for name, array in pools.arrays().items()}
        out = ssm.checkpointing_ssu(**mine, **arrays, dt_softplus=True, **options)
        kept = {name: lib.targets.get(array) for name, array in mine.items()}
        results.append([bits(lib.get(out)), *(bits(array) for array in kept.values())])
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert np.array_equal(one, same)


def test_a_stack_takes_scratch():
    rng = np.random.default_rng(13)
    stack = ssm.LayerStack(1, 5, 4, 64, 2, 128, max_window=6, npredicted=2, device="cpu")
    given = make_step(CASE, 3, rng, slots=np.array([4, 1, 0], np.int32)).arrays()
    given["slots"] = given.pop("state_batch_indices")
    scratch = ssm.allocate_scratch(3, 4, device="cpu")
    want = stack.step(0, **given)
    options: dict[str, Any] = {**scratch, "algorithm": "two-kernel", "enable_pdl": True}
    assert np.array_equal(bits(stack.step(0, **given, **options)), bits(want))
    assert np.array_equal(bits(stack.bind(0, **given, **options)()), bits(want))
    assert want.any() and want.dtype == DTYPES["bfloat16"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": -1}, ValueError, "batch: expected at least 0, got -1"),
        ({"batch": 2.0}, TypeError, "batch: expected an int, got float"),
        ({"nheads": 0}, ValueError, "nheads: expected at least 1, got 0"),
        ({"max_window": 17}, ValueError, "max_window: expected 1 to 16, got 17"),
        ({"max_window": 0}, ValueError, "max_window: expected at least 1, got 0"),
        ({"like": [1.0]}, TypeError, "like: expected an array of .*, got list"),
        ({"device": "tpu"}, ValueError, 'device: expected "auto", .*, got \'tpu\''),
    ],
    ids=label,
)  # fmt: skip
def test_bad_sizes_of_scratch(changes, error, message):
    arguments = {"batch": 3, "nheads": 4, "device": "cpu", **changes}
    Call(ssm.allocate_scratch, arguments).refused(error, f"^{message}$")
