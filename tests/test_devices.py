"""Two devices, whichever is the current one: the same bits, on each one's streams.

On the CPU both are one, which shows that the tests are right; what a second GPU may break is shown
on two.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from cases import make_step

import replayssm_cupy as ssm

torch = pytest.importorskip("torch", reason="torch is not installed")
from test_torch_ops import (  # noqa: E402  # imports torch
    CASE,
    LAYERS,
    assert_equal,
    contents,
    get,
    handle_on,
    loop,
    stack_tokens,
)

from replayssm_cupy import torch_ops  # noqa: E402


def two_gpus() -> tuple[str, str]:
    """The names of the first two; the first is current, before and after each test."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs that PyTorch can use, found {count}")
    assert torch.cuda.current_device() == 0
    return "cuda:0", "cuda:1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def devices(request) -> Any:
    yield ("cpu", "cpu") if request.param == "cpu" else two_gpus()
    if request.param == "cuda":
        assert torch.cuda.current_device() == 0


def counts(device: str, values: tuple[int, ...] = (2, 1, 0)) -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("calls", ["eager", "operators", "compiled"])
def test_a_stack_on_each_device(devices, calls):
    """First calls, repeated calls, and calls in turns."""
    torch.compiler.reset()
    step = torch.compile(loop, fullgraph=True, backend="aot_eager") if calls == "compiled" else loop
    mode = Passing if calls == "operators" else contextlib.nullcontext
    handles = [handle_on(device) for device in devices]
    for seed in range(3):
        outs = []
        for handle, device in zip(handles, devices, strict=True):
            given, options = stack_tokens(device, seed)
            with mode():
                out = step(handle, given, options, counts(device))
            assert str(out.device) == device
            outs.append(get(out))
        assert_equal(outs[:1], outs[1:])
    assert_equal(*(contents(handle.stack) for handle in handles))


class Passing(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that changes nothing; handles call operators in it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_functions_and_snapshots(devices):
    """What else a stack does, on the second device as on the first."""
    results = []
    for device in devices:
        stack = handle_on(device).stack
        given, options = stack_tokens(device)
        bound = stack.bind(1, *given, **options)
        slots, others = options["slots"], counts(device, (0, 3, -1))
        for _ in range(2):
            bound()
            stack.advance(slots, counts(device))
        stack.materialize(slots, others, counts(device, (1, 2, 0)))
        stack.copy_slots(others[:1], slots[:1])
        stack.reset(others[1:2])
        stack.load_state(0, others[1:2], torch.ones(1, 4, 64, 128, device=device))
        stack.step(0, *given, **options, check="finite")
        stack.flush_slots([given[2]] * LAYERS, slots)
        state = stack.states[0].clone()
        plain = ssm.selective_state_update(state, *given, state_batch_indices=slots)
        assert str(bound.out.device) == str(plain.device) == device
        results.append([*contents(stack), get(bound.out), get(plain), get(state)])
    assert_equal(*results)


def test_sequences_move_between_devices(devices):
    first, second = (handle_on(device).stack for device in devices)
    second.reset()
    second.import_slots(first.export_slots([4, 1]), [0, 2])
    outs = []
    for stack, device, slots in ((first, devices[0], (4, 1)), (second, devices[1], (0, 2))):
        given, _ = stack_tokens(device)
        weights = 2  # A, which has no batch
        rows = [a if place == weights else a[:2].clone() for place, a in enumerate(given)]
        outs.append(get(stack.step(1, *rows, slots=counts(device, slots))))
    assert_equal(outs[:1], outs[1:])


def test_heads_split_over_two_devices(devices):
    """A stack of half the heads and groups on each, as tensor-parallel ranks have them."""
    whole = torch_ops.layer_stack(1, 5, 4, 64, 2, 128, npredicted=2, device=devices[0])
    halves = [
        torch_ops.layer_stack(1, 5, 2, 64, 1, 128, npredicted=2, device=device)
        for device in devices
    ]
    state = torch.randn(5, 4, 64, 128, generator=torch.Generator().manual_seed(1))
    whole.load_state(0, None, state.to(devices[0]))
    for stack, device, heads in zip(halves, devices, state.split(2, 1), strict=True):
        stack.load_state(0, None, heads.contiguous().to(device))
    for seed in range(10):
        (x, dt, A, B, C), options = stack_tokens(devices[0], seed)
        slots = options["slots"]
        right = whole.step(0, x, dt, A, B, C, slots=slots)
        whole.advance(slots, counts(devices[0]))
        parts = []
        for rank, (stack, device) in enumerate(zip(halves, devices, strict=True)):
            heads, groups = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
            mine = [x[:, :, heads], dt[:, :, heads], A[heads], B[:, :, groups], C[:, :, groups]]
            there = [tensor.contiguous().to(device) for tensor in mine]
            parts.append(stack.step(0, *there, slots=slots.to(device)).to(devices[0]))
            stack.advance(slots.to(device), counts(device))
        assert_equal([get(torch.cat(parts, 2))], [get(right)])
    states = torch.cat([stack.states[0].to(devices[0]) for stack in halves], 1)
    assert_equal([get(states)], [get(whole.states[0])])
    assert_equal([get(halves[1].ring_start)], [get(whole.ring_start)])
    assert whole.ring_start.any()


# --- Two GPUs ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_work_goes_to_the_stream_of_its_device():
    """x arrives late on a side stream of the second GPU, while the first is current."""
    _, second = two_gpus()
    handle = handle_on(second)
    given, options = stack_tokens(second)
    expected = [get(handle.step(layer, *given, **options)) for layer in range(LAYERS)]
    right = given[0].clone()
    side = torch.cuda.Stream(second)
    for _ in range(10):
        handle = handle_on(second)
        given[0].fill_(torch.nan)
        torch.cuda.synchronize(second)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            with torch.cuda.device(0):
                given[0].copy_(right)
                outs = [handle.step(layer, *given, **options) for layer in range(LAYERS)]
                assert torch.cuda.current_device() == 0
            assert not side.query(), "the call waited for its stream"
        side.synchronize()
        assert_equal([*map(get, outs)], expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_a_graph_of_the_second_gpu():
    """Captured and replayed while the first is current."""
    _, second = two_gpus()
    captured, eager = handle_on(second), handle_on(second)
    given, options = stack_tokens(second)
    accepted = counts(second)
    loop(handle_on(second), given, options, accepted)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(second)), torch.cuda.device(0):
        out = loop(captured, given, options, accepted)
    for seed in range(5):
        for target, source in zip(given, stack_tokens(second, seed)[0], strict=True):
            target.copy_(source)
        with torch.cuda.device(second):
            graph.replay()
        right = loop(eager, given, options, accepted)
        torch.cuda.synchronize(second)
        assert_equal([get(out)], [get(right)])
        assert_equal(contents(captured.stack), contents(eager.stack))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "slots", "out"])
def test_an_array_on_the_other_gpu(name, seen):
    """Refused before anything is written, also where the call was seen before."""
    first, second = two_gpus()
    handle = handle_on(first)
    given, options = stack_tokens(first)
    arguments = dict(zip(("x", "dt", "A", "B", "C"), given, strict=True)) | options
    arguments["out"] = torch.zeros_like(given[0])
    if seen:
        handle.step(0, **arguments)
    before = contents(handle.stack)
    wrong = arguments | {name: arguments[name].to(second)}
    message = rf"^{name}: expected device cuda:0 as states\[0\], got cuda:1$"
    with pytest.raises(ValueError, match=message):
        handle.step(0, **wrong)
    assert_equal(contents(handle.stack), before)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_arrays_of_a_stack_on_two_gpus():
    first, second = two_gpus()
    one, two = (torch_ops.layer_stack(2, 5, 4, 64, 2, 128, device=d) for d in (first, second))
    message = r"^x_caches\[1\]: expected device cuda:1 as states\[1\], got cuda:0$"
    with pytest.raises(ValueError, match=message):
        ssm.LayerStack.from_arrays(
            [one.states[0], two.states[1]], one.x_caches, one.B_caches, one.dt_caches,
            one.ring_start, one.prev_num_accepted_tokens, npredicted=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"expected device cuda:0 as .*, got cuda:1$"):
        one.advance(None, torch.ones(5, dtype=torch.int32, device=second), 1)
    one.refresh([torch.full((4,), -1.0, device=first)] * 2)
    src, dst = counts(first, (0,)), counts(second, (1,))
    with pytest.raises(ValueError, match=r"dst_slots: expected device cuda:0 as .*, got cuda:1$"):
        one.copy_slots(src, dst)
    with pytest.raises(ValueError, match=r"expected device cuda:0 as .*, got cuda:1$"):
        one.materialize(src, dst, counts(first, (0,)))
    with pytest.raises(ValueError, match=r"A\[0\]: expected device cuda:0 as .*, got cuda:1$"):
        one.refresh([torch.full((4,), -1.0, device=second)] * 2)


@pytest.mark.gpu
def test_cupy_arrays_of_the_second_gpu():
    """CuPy's streams are each device's own too."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    two_gpus()
    results = []
    for device in ("cuda:0", "cuda:1"):
        stack = ssm.LayerStack(1, 5, 4, 64, 2, 128, max_window=6, npredicted=2, device=device)
        step = make_step(CASE, 3, np.random.default_rng(1), slots=np.array([4, 1, 0], np.int32))
        with cupy.cuda.Device(stack.device.index):
            given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
            accepted = cupy.ones(3, np.int32)
        slots = given.pop("state_batch_indices")
        for _ in range(5):
            out = stack.step(0, **given, slots=slots)
            stack.advance(slots, accepted)
            assert out.device.id == stack.device.index and cupy.cuda.runtime.getDevice() == 0
        results.append([cupy.asnumpy(out.view(np.int16)), cupy.asnumpy(stack.states[0])])
    assert results[0][1].any()
    assert_equal(*results)
