"""``torch.ops.replayssm``: the functions' bits, true schemas, whole graphs in torch.compile."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import Case, Shape, make_pools, make_step
from conftest import choose_form
from oracles import bits
from runs import COPIED

import replayssm_cupy as ssm
from replayssm_cupy import plan

torch = pytest.importorskip("torch", reason="torch is not installed")
from replayssm_cupy import torch_ops  # noqa: E402  # imports torch

OPS = torch.ops.replayssm
CASE = Case(Shape("torch-ops", 4, 2, 64, 128), npredicted=2, max_window=6, num_slots=5)
LAYERS = 2


GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda:1")]


@pytest.fixture(params=["cpu", "cpu-kernels", *GPUS])
def device(request, monkeypatch) -> str:
    """Where the tensors are, the first GPU being the current one; with "kernels" those of
    tests/host run on them."""
    name, _, kernels = request.param.partition("-")
    if kernels:
        from host.launcher import HostLauncher

        monkeypatch.setitem(plan.launchers, "cpu", HostLauncher())
    needed, found = {"cuda": 1, "cuda:1": 2}.get(name, 0), torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} GPUs that PyTorch can use, found {found}")
    return name


def put(array: np.ndarray, device: str) -> Any:
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.copy().view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array.copy())
    return tensor.to(device)


def get(tensor: Any) -> np.ndarray:
    """A copy of the tensor's bits."""
    tensor = tensor.detach().cpu().contiguous()
    narrow = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), tensor.dtype)
    return bits(tensor.view(narrow).numpy()).copy()


def pools_on(device: str, seed: int = 0) -> dict[str, Any]:
    pools = make_pools(CASE, np.random.default_rng(seed), fill=True)
    return {name: put(array, device) for name, array in pools.arrays().items()}


def tokens_on(device: str, seed: int = 1, slots: tuple[int, ...] = (4, 1, -1)) -> dict[str, Any]:
    indices = np.array(slots, np.int32)
    step = make_step(CASE, len(slots), np.random.default_rng(seed), slots=indices)
    return {name: put(array, device) for name, array in step.arrays().items()}


def split(tokens: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of an operator: by place and by name."""
    named = {name: tokens[name] for name in tokens if name not in ("x", "dt", "A", "B", "C")}
    return [tokens[name] for name in ("x", "dt", "A", "B", "C")], named | {"dt_softplus": True}


def handle_on(device: str) -> torch_ops.StackHandle:
    """A stack with tokens waiting in its rings, and the layers' A."""
    stack = torch_ops.layer_stack(
        LAYERS, 5, 4, 64, 2, 128, max_window=6, npredicted=2, device=device
    )
    for layer in range(LAYERS):
        for array, source in pools_on(device, layer).items():
            if array not in ("ring_start", "prev_num_accepted_tokens"):
                plural = {"state": "states"}.get(array, f"{array}s")
                getattr(stack, plural)[layer].copy_(source)
    stack.prev_num_accepted_tokens.copy_(torch.tensor([0, 3, 6, 2, 5]))
    stack.refresh([tokens_on(device)["A"]] * LAYERS)
    return torch_ops.StackHandle(stack)


def stack_tokens(device: str, seed: int = 1) -> tuple[list[Any], dict[str, Any]]:
    tokens = tokens_on(device, seed)
    slots = tokens.pop("state_batch_indices")
    return list(split(tokens)[0]), split(tokens)[1] | {"slots": slots}


def contents(stack: ssm.LayerStack) -> list[np.ndarray]:
    lists = (stack.states, stack.x_caches, stack.B_caches, stack.dt_caches)
    arrays = [array for arrays in lists for array in arrays]
    return [*map(get, (*arrays, stack.ring_start, stack.prev_num_accepted_tokens))]


def assert_equal(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(results) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))


# --- The functions' bits -------------------------------------------------------------------------


def test_operators_are_the_functions(device):
    mine, theirs = pools_on(device), pools_on(device)
    cursors = {"max_window": 6, "ring_buffer_len": 8}
    for seed in range(6):
        given, options = split(tokens_on(device, seed))
        slots = options["state_batch_indices"]
        right = ssm.checkpointing_ssu(*theirs.values(), *given, **options)
        if seed % 2:
            out = torch.empty_like(given[0])
            assert OPS.checkpointing_ssu.out(*mine.values(), *given, **options, out=out) is None
        else:
            out = OPS.checkpointing_ssu(*mine.values(), *given, **options)
        assert_equal([get(out)], [get(right)])
        accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
        ring = mine["ring_start"], mine["prev_num_accepted_tokens"]
        OPS.advance_ring(*ring, accepted, 2, slots=slots, **cursors)
        ring = theirs["ring_start"], theirs["prev_num_accepted_tokens"]
        ssm.advance_ring(*ring, accepted, 2, slots, **cursors)
    assert_equal([*map(get, mine.values())], [*map(get, theirs.values())])


def copied_pools_on(device: str, state_format: str) -> tuple[list[Any], dict[str, Any]]:
    """A float16 state with tokens in its rings, by place, and what belongs to it, by name."""
    stack = torch_ops.layer_stack(
        1, 5, 4, 64, 2, 128, max_window=6, npredicted=2, state_dtype=state_format, device=device
    )
    pools = pools_on(device)
    stack.load_state(0, None, pools.pop("state"))
    named = {"state_scale": stack.state_scales[0], "state_copy": stack.state_copies[0]}
    return [stack.states[0], *pools.values()], named


def copied_contents(pools: list[Any], named: dict[str, Any]) -> list[np.ndarray]:
    return [*map(get, (*pools, *named.values()))]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("state_format", COPIED)
def test_operators_with_read_copies(device, state_format, seed):
    """The function's bits, by both overloads; flushes make state, copy and scales anew."""
    (mine, named), (theirs, right) = (copied_pools_on(device, state_format) for _ in range(2))
    before = copied_contents(mine, named)
    for number in range(6):
        given, options = split(tokens_on(device, number))
        if seed is not None:
            options["rand_seed"] = torch.tensor([seed + number], device=device)
        expected = ssm.checkpointing_ssu(*theirs, *given, **options, **right)
        if number % 2:
            out = torch.empty_like(given[0])
            assert OPS.checkpointing_ssu.out(*mine, *given, **options, **named, out=out) is None
        else:
            out = OPS.checkpointing_ssu(*mine, *given, **options, **named)
        assert_equal([get(out)], [get(expected)])
        accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
        for pools in (mine, theirs):
            ssm.advance_ring(*pools[4:6], accepted, 2, options["state_batch_indices"],
                             max_window=6, ring_buffer_len=8)  # fmt: skip
    after = copied_contents(mine, named)
    assert_equal(after, copied_contents(theirs, right))
    changed = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [True] * 8


@pytest.mark.parametrize("overload", ["default", "out"])
@pytest.mark.parametrize("state_format", COPIED)
def test_opcheck_with_read_copies(device, state_format, overload):
    pools, named = copied_pools_on(device, state_format)
    pools[5].fill_(3)  # a flush would not be the same when it is repeated
    given, options = split(tokens_on(device))
    if overload == "out":
        named["out"] = torch.empty_like(given[0])
    operator = getattr(OPS.checkpointing_ssu, overload)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if state_format == "float16+nvfp4":  # torch compares no e4m3 with what it was
        checks.append("test_schema")
    torch.library.opcheck(operator, (*pools, *given), options | named, test_utils=checks)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_operators_with_read_copies(device, backend):
    """The copies are changed in place, where they are."""
    torch.compiler.reset()

    def step(pools: list[Any], named: dict[str, Any], given: list[Any], options: Any) -> Any:
        return OPS.checkpointing_ssu(*pools, *given, **options, **named) * 2

    (mine, named), (theirs, right) = (copied_pools_on(device, "float16+nvfp4") for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    places = [tensor.data_ptr() for tensor in (*mine, *named.values())]
    for seed in range(3):
        given, options = split(tokens_on(device, seed))
        for pools in (mine, theirs):
            pools[5].fill_(5)  # all flush
        out = compiled(mine, named, given, options)
        assert_equal([get(out)], [get(step(theirs, right, given, options))])
    assert_equal(copied_contents(mine, named), copied_contents(theirs, right))
    assert places == [tensor.data_ptr() for tensor in (*mine, *named.values())]


def test_two_kernels(device, monkeypatch):
    """Scratch and algorithm go through both operators; the bits stay those of one kernel."""
    choose_form(monkeypatch, "stream")
    mine, theirs = pools_on(device), pools_on(device)
    handle, stack = handle_on(device), handle_on(device).stack
    given, options = split(tokens_on(device))
    scratch = ssm.allocate_scratch(3, 4, like=given[0])
    two = {**scratch, "algorithm": "two-kernel", "enable_pdl": True}
    right = ssm.checkpointing_ssu(*theirs.values(), *given, **options)
    assert_equal(
        [get(OPS.checkpointing_ssu(*mine.values(), *given, **options, **two))], [get(right)]
    )
    assert_equal([*map(get, mine.values())], [*map(get, theirs.values())])
    given, options = stack_tokens(device, 1)
    out = handle.step(0, *given, **options, **two)
    assert_equal([get(out)], [get(stack.step(0, *given, **options))])
    assert_equal(contents(handle.stack), contents(stack))


def test_plain_update(device):
    given, options = split(tokens_on(device))
    states = [pools_on(device)["state"] for _ in range(3)]
    out = OPS.selective_state_update(states[0], *given, **options)
    right = ssm.selective_state_update(states[1], *given, **options)
    written = torch.empty_like(right)
    assert OPS.selective_state_update.out(states[2], *given, **options, out=written) is None
    assert_equal([get(out), get(written)], [get(right)] * 2)
    assert_equal([get(states[0]), get(states[2])], [get(states[1])] * 2)


def test_handles_are_the_stack(device):
    handle, stack = handle_on(device), handle_on(device).stack
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    prefix = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    copies = torch.tensor([0, 3, -1], dtype=torch.int32, device=device)
    for seed in range(4):
        given, options = stack_tokens(device, seed)
        for layer in range(LAYERS):
            written = torch.empty_like(given[0]) if seed % 2 else None
            out = handle.step(layer, *given, **options, out=written)
            assert written is None or out is written
            assert_equal([get(out)], [get(stack.step(layer, *given, **options))])
        handle.advance(options["slots"], accepted)
        stack.advance(options["slots"], accepted)
    lengths = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    handle.advance(options["slots"], accepted.clamp(max=1), query_lens=lengths)
    stack.advance(options["slots"], accepted.clamp(max=1), lengths)
    handle.materialize(options["slots"], copies, prefix)
    stack.materialize(options["slots"], copies, prefix)
    assert_equal(contents(handle.stack), contents(stack))
    handle.reset(copies)
    stack.reset(copies)
    assert_equal(contents(handle.stack), contents(stack))
    assert not handle.stack.states[1][0].any()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_stack_of_new_tensors(device, state_dtype):
    stack = torch_ops.layer_stack(
        1, 3, 4, 64, 2, 128, npredicted=2, state_dtype=state_dtype, stochastic_rounding=7,
        device=device,
    )  # fmt: skip
    assert stack.state_dtype == state_dtype and str(stack.device).startswith(device)
    assert isinstance(stack.rand_seed, torch.Tensor) and int(stack.rand_seed) == 7
    assert all(int(scale.sum()) == 3 * 4 * 64 for scale in stack.state_scales)
    given, options = stack_tokens(device)
    options["slots"] = options["slots"].clamp(max=2)
    out = torch_ops.StackHandle(stack).step(0, *given, **options)
    assert torch.isfinite(out.float()).all() and out[:2].any()


def test_bound_layers_are_the_stack(device):
    """With and without out, by their method and by both operators; in inference mode too."""
    handle, stack = handle_on(device), handle_on(device).stack
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    slots, A = stack_tokens(device)[1]["slots"], stack_tokens(device)[0][2]
    layers = [handle.bind_layer(i, A, A * 2, A / 3, slots=slots) for i in range(LAYERS)]
    assert all(layer.anchor is handle.anchor for layer in layers)
    for seed in range(6):
        (x, dt, _, B, C), _ = stack_tokens(device, seed)
        for i, layer in enumerate(layers):
            z = B.new_ones(x.shape) if seed % 2 else None
            with torch.inference_mode(seed > 3):
                named, out = (layer.number, layer.anchor, x, dt, B, C), torch.empty_like(x)
                if seed % 3 == 0:
                    got = layer.step(x, dt, B, C, z)
                elif seed % 3 == 1:
                    got = OPS.layer_step(*named, z)
                else:
                    assert layer.step(x, dt, B, C, z, out) is out
                    assert OPS.layer_step.out(*named, z, out) is None
                    got = out
            for _ in range(2 if seed % 3 == 2 else 1):
                want = stack.step(i, x, dt, A, B, C, A * 2, z, A / 3, slots=slots)
            assert_equal([get(got)], [get(want)])
        handle.advance(slots, accepted)
        stack.advance(slots, accepted)
    assert_equal(contents(handle.stack), contents(stack))


# --- Schemas -------------------------------------------------------------------------------------


def calls_of_every_operator(device: str) -> tuple[dict[str, tuple[Any, ...]], Any]:
    """Arguments of a call of each operator, and the handles that keep them alive."""
    handle = handle_on(device)
    stack, pools = handle.stack, pools_on(device)
    stack.prev_num_accepted_tokens.fill_(3)  # a flush would not be the same when it is repeated
    named = handle.number, handle.anchor
    given, options = split(tokens_on(device))
    out = torch.empty_like(given[0])
    tokens, stack_options = stack_tokens(device)
    slots = stack_options["slots"]
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    nothing = torch.zeros_like(accepted)
    cursors = stack.ring_start.clone(), stack.prev_num_accepted_tokens.clone()
    sizes = {"max_window": 6, "ring_buffer_len": 8}
    copies = torch.tensor([0, 3, -1], dtype=torch.int32, device=device)
    layer = handle.bind_layer(1, tokens[2], slots=slots)
    of_layer = (layer.number, layer.anchor, *tokens[:2], *tokens[3:])
    return {
        "checkpointing_ssu.default": ((*pools.values(), *given), options),
        "checkpointing_ssu.out": ((*pools.values(), *given), options | {"out": out}),
        "selective_state_update.default": ((pools["state"], *given), options),
        "selective_state_update.out": ((pools["state"], *given), options | {"out": out}),
        "advance_ring.default": ((*cursors, accepted, 2, None, slots), sizes),
        "stack_step.default": ((*named, 1, *tokens), stack_options),
        "stack_step.out": ((*named, 0, *tokens), stack_options | {"out": torch.empty_like(out)}),
        "layer_step.default": (of_layer, {}),
        "layer_step.out": ((*of_layer, None, torch.empty_like(out)), {}),
        "stack_advance.default": ((*named, slots, nothing, 2), {}),
        "stack_materialize.default": ((*named, slots, copies, nothing), {}),
        "stack_reset.default": ((*named, copies), {}),
    }, (handle, layer)


NAMES = (
    "checkpointing_ssu.default",
    "checkpointing_ssu.out",
    "selective_state_update.default",
    "selective_state_update.out",
    "advance_ring.default",
    "stack_step.default",
    "stack_step.out",
    "layer_step.default",
    "layer_step.out",
    "stack_advance.default",
    "stack_materialize.default",
    "stack_reset.default",
)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    calls, _handle = calls_of_every_operator(device)
    assert calls.keys() == set(NAMES)
    operator, overload = name.split(".")
    arguments, options = calls[name]
    torch.library.opcheck(getattr(getattr(OPS, operator), overload), arguments, options)


# --- What watches calls --------------------------------------------------------------------------


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "replayssm":
            self.names.append(str(func).removeprefix("replayssm."))
        return func(*args, **(kwargs or {}))


def every_method(
    handle: torch_ops.StackHandle,
    layer: torch_ops.LayerHandle,
    given: list[Any],
    options: dict[str, Any],
) -> Any:
    slots, out = options["slots"], torch.empty_like(given[0])
    first = handle.step(0, *given, **options)
    assert handle.step(1, *given, **options, out=out) is out
    second, given = torch.empty_like(out), [*given[:2], *given[3:]]
    third = layer.step(*given)
    assert layer.step(*given, given[0], second) is second
    handle.advance(slots, torch.ones_like(slots), 2)
    handle.materialize(slots, slots, torch.zeros_like(slots))
    handle.reset(slots)
    handle.reset()
    return first, out, second, third


METHODS = ["stack_step.default", "stack_step.out", "layer_step.default", "layer_step.out",
           "stack_advance.default", "stack_materialize.default", "stack_reset.default",
           "stack_reset.default"]  # fmt: skip


def test_dispatch_modes_see_operators(device):
    """Eagerly the methods are the stack's own; the results are the same."""
    watched, eager = handle_on(device), handle_on(device)
    given, options = stack_tokens(device)
    layers = [handle.bind_layer(1, given[2], slots=options["slots"]) for handle in (watched, eager)]
    expected = every_method(eager, layers[1], given, options)
    with Seen() as seen:
        results = every_method(watched, layers[0], given, options)
    assert seen.names == METHODS
    assert_equal([*map(get, results)], [*map(get, expected)])
    assert_equal(contents(watched.stack), contents(eager.stack))


def test_tracers_see_operators():
    from torch.fx.experimental.proxy_tensor import make_fx

    handle = handle_on("cpu")
    given, options = stack_tokens("cpu")
    layer = handle.bind_layer(1, given[2], slots=options["slots"])
    before = contents(handle.stack)
    for mode in ("fake", "symbolic"):
        trace = make_fx(
            lambda *tensors: every_method(handle, layer, tensors, options), tracing_mode=mode,
            _allow_non_fake_inputs=True,
        )  # fmt: skip
        graph = trace(*given)
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        ours = [name.partition(".")[2] for name in targets if name.startswith("replayssm.")]
        assert ours == METHODS
    assert_equal(contents(handle.stack), before)
    traced = torch.jit.trace(
        lambda x: handle.step(0, x, *given[1:], **options), given[0], check_trace=False
    )
    assert "replayssm::stack_step" in str(traced.graph)
    traced = torch.jit.trace(
        lambda x: layer.step(x, given[1], *given[3:]), given[0], check_trace=False
    )
    assert "replayssm::layer_step" in str(traced.graph)


def test_fake_tensors_have_shapes_alone():
    handle = handle_on("cpu")
    given, options = stack_tokens("cpu")
    fake = torch._subclasses.FakeTensorMode()
    anchor = handle.anchor
    before = contents(handle.stack)
    try:
        object.__setattr__(handle, "anchor", fake.from_tensor(anchor))
        tensors = [fake.from_tensor(tensor) for tensor in given]
        slots = fake.from_tensor(options["slots"])
        out = handle.step(0, *tensors, slots=slots)
    finally:
        object.__setattr__(handle, "anchor", anchor)
    assert type(out) is type(tensors[0]) and out.shape == given[0].shape
    assert_equal(contents(handle.stack), before)


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def calls_of_steps() -> tuple[dict[str, Any], Any, list[Any]]:
    """A call of each step's overloads as a function of x, their handles, and what they take."""
    handle = handle_on("cpu")
    given, options = stack_tokens("cpu")
    x, dt, A, B, C = given
    layer = handle.bind_layer(1, A, slots=options["slots"])
    handle.stack.prev_num_accepted_tokens.fill_(3)  # no step flushes, so all do the same
    named, out = (handle.number, handle.anchor, 0), torch.empty_like(x)
    of_layer = layer.number, layer.anchor
    return (
        {
            "layer_step.default": lambda x: OPS.layer_step.default(*of_layer, x, dt, B, C),
            "layer_step.out": lambda x: OPS.layer_step.out(*of_layer, x, dt, B, C, None, out),
            "stack_step.default": lambda x: OPS.stack_step.default(*named, x, dt, A, B, C),
            "stack_step.out": lambda x: OPS.stack_step.out(*named, x, dt, A, B, C, out=out),
        },
        (handle, layer),
        [x, out],
    )


STEPS = ("layer_step.default", "layer_step.out", "stack_step.default", "stack_step.out")


@pytest.fixture
def dispatched(monkeypatch) -> list[str]:
    """The names of direct operators whose calls go through the dispatcher."""
    seen: list[str] = []

    def watch(name: str, dispatch: Any) -> None:
        def call(*given: Any, **named: Any) -> Any:
            seen.append(name)
            return dispatch(*given, **named)

        operator, overload = name.split(".")
        monkeypatch.setattr(getattr(getattr(OPS, operator), overload), "_op", call)

    for name in (*STEPS, "stack_advance.default"):
        operator, overload = name.split(".")
        watch(name, getattr(getattr(OPS, operator), overload)._op)
    return seen


@pytest.mark.parametrize("name", STEPS)
def test_eager_steps_leave_out_the_dispatcher(dispatched, name):
    """Unless something watches; the results are the same."""
    calls, _handles, (x, out) = calls_of_steps()
    call = calls[name]

    def result(given: Any) -> np.ndarray:
        out.zero_()
        returned = call(given)
        assert (returned is None) == name.endswith("out")
        return get(out if returned is None else returned)

    expected = result(x)
    with torch.no_grad():
        assert_equal([result(x)], [expected])
    assert not dispatched and expected.any()
    watchers = {
        "dispatch mode": Seen(),
        "function mode": Functions(),
        "default device": torch.device("cpu"),
        "profiler": torch.autograd.profiler.profile(),
    }

    def was_dispatched() -> bool:
        names = set(dispatched)
        dispatched.clear()
        return names == {name}

    for watcher in watchers.values():
        with watcher:
            assert_equal([result(x)], [expected])
        assert was_dispatched()
    events = [event.name for event in watchers["profiler"].function_events]
    assert f"replayssm::{name.split('.')[0]}" in events
    assert_equal([result(x.as_subclass(Subclass))], [expected])
    assert was_dispatched()
    torch.jit.trace(lambda x: (call(x), x)[1], x, check_trace=False)
    assert was_dispatched()
    with pytest.raises(RuntimeError, match=r"vmap|Batching rule"):
        torch.vmap(call)(torch.stack([x, x]))
    assert was_dispatched()
    assert_equal([result(x)], [expected])
    assert not dispatched


def test_eager_advances_leave_out_the_dispatcher(dispatched):
    handle = handle_on("cpu")
    accepted = torch.ones(5, dtype=torch.int32)
    call = partial(OPS.stack_advance.default, handle.number, handle.anchor, None, accepted, 1)
    assert call() is None and not dispatched
    with Seen() as seen:
        call()
    assert dispatched == ["stack_advance.default"] == seen.names
    # Two tokens more than the 0, 3, 6, 2 and 5 live rows; those beyond 6 were folded before.
    assert handle.stack.prev_num_accepted_tokens.tolist() == [2, 5, 2, 4, 1]
    with pytest.raises(ValueError, match=r"^stack: expected the number of a live StackHandle"):
        OPS.stack_advance.default(10**9, handle.anchor, None, accepted, 1)


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_no_derivatives(dispatched, name):
    """Autograd takes note of results that should have one."""
    calls, _handles, (x, _) = calls_of_steps()
    x = x.requires_grad_()
    with torch.no_grad():
        calls[name](x)
    assert not dispatched
    result = calls[name](x)
    if name.endswith("out"):
        assert result is None and not dispatched
    else:
        assert dispatched == [name] and result.requires_grad


def test_tensors_without_memory(dispatched):
    given, options = stack_tokens("cpu")
    handle = handle_on("cpu")
    layer = handle.bind_layer(1, given[2], slots=options["slots"])
    x, dt, A, B, C = (tensor.to("meta") for tensor in given)
    before, anchor = contents(handle.stack), handle.anchor.to("meta")
    for y in (
        OPS.layer_step.default(layer.number, anchor, x, dt, B, C),
        OPS.stack_step.default(handle.number, anchor, 0, x, dt, A, B, C),
    ):
        assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, x.dtype)
    out = torch.empty_like(x)
    assert OPS.layer_step.out(layer.number, anchor, x, dt, B, C, None, out) is None
    assert dispatched == ["layer_step.default", "stack_step.default", "layer_step.out"]
    assert_equal(contents(handle.stack), before)


def test_steps_take_arguments_by_name(dispatched):
    calls, (handle, layer), (x, out) = calls_of_steps()
    _, dt, A, B, C = stack_tokens("cpu")[0]
    expected = get(calls["layer_step.default"](x))
    y = OPS.layer_step.default(layer.number, layer.anchor, x, dt, B=B, C=C)
    OPS.layer_step.out(layer=layer.number, anchor=layer.anchor, x=x, dt=dt, B=B, C=C, z=None,
                       out=out)  # fmt: skip
    assert_equal([get(y), get(out)], [expected] * 2)
    assert dispatched == ["layer_step.out"]
    with pytest.raises(RuntimeError, match="missing value for argument 'x'"):
        OPS.layer_step.default(layer.number, layer.anchor)
    expected = get(calls["stack_step.default"](x))
    y = OPS.stack_step.default(handle.number, handle.anchor, 0, x, dt, A=A, B=B, C=C)
    assert_equal([get(y)], [expected])


# --- torch.compile -------------------------------------------------------------------------------


def test_compiled_steps_leave_out_the_dispatcher(dispatched):
    torch.compiler.reset()
    handle = handle_on("cpu")
    given, options = stack_tokens("cpu")
    layers, accepted = layers_of(handle, given[2], options["slots"]), torch.ones(5).int()
    compiled = torch.compile(layer_loop, fullgraph=True)
    compiled(handle, layers, layer_tokens("cpu"), accepted)
    dispatched.clear()  # it was traced
    compiled(handle, layers, layer_tokens("cpu", 2), accepted)
    assert not dispatched


def loop(handle: torch_ops.StackHandle, given: list[Any], options: dict[str, Any], accepted: Any):
    """Steps, two advances that are the same call, and a step on what they leave."""
    first = [handle.step(layer, *given, **options) for layer in range(LAYERS)]
    handle.advance(options["slots"], accepted, query_len=2)
    first.append(handle.step(1, *given, **options, out=torch.empty_like(given[0])))
    handle.advance(options["slots"], accepted, query_len=2)
    handle.advance(options["slots"], accepted, query_len=2)
    second = [handle.step(layer, *given, **options) for layer in range(LAYERS)]
    return torch.stack([*first, *second]).float() * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_loop(device, backend):
    """Nothing is merged, dropped or put in another order, and no state is copied."""
    torch.compiler.reset()
    handle, eager = handle_on(device), handle_on(device)
    places = [state.data_ptr() for state in handle.stack.states]
    compiled = torch.compile(loop, fullgraph=True, backend=backend)
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    for seed in range(3):
        given, options = stack_tokens(device, seed)
        out = compiled(handle, given, options, accepted)
        assert_equal([get(out)], [get(loop(eager, given, options, accepted))])
        assert_equal(contents(handle.stack), contents(eager.stack))
    assert places == [state.data_ptr() for state in handle.stack.states]
    assert not handle.anchor.any()


def layer_loop(handle: torch_ops.StackHandle, layers: list[Any], given: list[Any], accepted: Any):
    """Steps of bound layers around moves of the cursors; one writes a given out."""
    x, dt, B, C = given
    first = [layer.step(x, dt, B, C, x) for layer in layers]
    handle.advance(None, accepted, query_len=2)
    first.append(layers[1].step(x, dt, B, C, out=torch.empty_like(x)))
    handle.advance(None, accepted, query_len=2)
    return torch.stack([*first, layers[0].step(x, dt, B, C)]).float() * 2


def layers_of(handle: torch_ops.StackHandle, A: Any, slots: Any) -> list[torch_ops.LayerHandle]:
    return [handle.bind_layer(i, A, slots=slots) for i in range(LAYERS)]


def layer_tokens(device: str, seed: int = 1) -> list[Any]:
    given = stack_tokens(device, seed)[0]
    return [*given[:2], *given[3:]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_loop_of_bound_layers(device, backend):
    torch.compiler.reset()
    handle, eager = handle_on(device), handle_on(device)
    given, options = stack_tokens(device)
    mine, theirs = (layers_of(one, given[2], options["slots"]) for one in (handle, eager))
    compiled = torch.compile(layer_loop, fullgraph=True, backend=backend)
    accepted = torch.tensor([2, 1, 0, 1, 2], dtype=torch.int32, device=device)
    for seed in range(3):
        given = layer_tokens(device, seed)
        out = compiled(handle, mine, given, accepted)
        assert_equal([get(out)], [get(layer_loop(eager, theirs, given, accepted))])
        assert_equal(contents(handle.stack), contents(eager.stack))
    assert not handle.anchor.any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_change_the_callers_tensors(device, backend):
    torch.compiler.reset()

    def update(pools: dict[str, Any], given: list[Any], options: dict[str, Any]) -> Any:
        out = OPS.checkpointing_ssu(*pools.values(), *given, **options)
        cursors = pools["ring_start"], pools["prev_num_accepted_tokens"]
        accepted = torch.ones_like(options["state_batch_indices"])
        OPS.advance_ring(
            *cursors, accepted, 2, None, options["state_batch_indices"],
            max_window=6, ring_buffer_len=8,
        )  # fmt: skip
        return out, OPS.checkpointing_ssu(*pools.values(), *given, **options)

    mine, theirs = pools_on(device), pools_on(device)
    places = [tensor.data_ptr() for tensor in mine.values()]
    compiled = torch.compile(update, fullgraph=True, backend=backend)
    for seed in range(3):
        given, options = split(tokens_on(device, seed))
        outs, expected = compiled(mine, given, options), update(theirs, given, options)
        assert_equal([*map(get, outs)], [*map(get, expected)])
    assert_equal([*map(get, mine.values())], [*map(get, theirs.values())])
    assert places == [tensor.data_ptr() for tensor in mine.values()]


# --- Errors --------------------------------------------------------------------------------------


def test_handles_that_are_gone():
    handle = handle_on("cpu")
    number, anchor = handle.number, handle.anchor
    assert number in torch_ops._stacks
    del handle
    gc.collect()
    assert number not in torch_ops._stacks
    with pytest.raises(ValueError, match=rf"^stack: .* a live StackHandle, got {number}$"):
        OPS.stack_reset(number, anchor)


def test_bound_layers_that_are_gone():
    """A layer keeps its stack alive, not the other way round."""
    handle = handle_on("cpu")
    given, options = stack_tokens("cpu")
    layer = handle.bind_layer(0, given[2], slots=options["slots"])
    token, number, anchor = layer_tokens("cpu"), layer.number, layer.anchor
    del handle
    gc.collect()
    assert layer.step(*token).shape == token[0].shape
    del layer
    gc.collect()
    assert number not in torch_ops._layers
    for call in (OPS.layer_step, lambda *a: OPS.layer_step.out(*a, None, token[0].clone())):
        with pytest.raises(ValueError, match=rf"^layer: .* a live LayerHandle, got {number}$"):
            call(number, anchor, *token)


def test_stack_of_other_arrays():
    stack = ssm.LayerStack(1, 2, 4, 64, 2, 128, device="cpu")
    with pytest.raises(TypeError, match=r"^stack: .* over torch tensors, got one of ndarray$"):
        torch_ops.StackHandle(stack)


def test_errors_name_the_argument():
    handle = handle_on("cpu")
    given, options = stack_tokens("cpu")
    wrong = [given[0].expand(3, 2, 4, 64).repeat(1, 2, 1, 1), *given[1:]]
    with pytest.raises(ValueError, match=r"^x: expected at most npredicted = 2 tokens, got 4$"):
        handle.step(0, *wrong, **options)
    two = torch.tensor([2, 1, 0], dtype=torch.int32)
    message = r"^query_len: expected None beside query_lens, got both$"
    with pytest.raises(ValueError, match=message):
        handle.advance(options["slots"], two, query_len=2, query_lens=two)
    cursors = handle.stack.ring_start, handle.stack.prev_num_accepted_tokens
    with pytest.raises(ValueError, match=r"^query_len: expected an int, or query_lens, got None$"):
        OPS.advance_ring(*cursors, two, max_window=6, ring_buffer_len=8)


# --- CUDA ----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graph_and_side_stream():
    """A captured loop replays on new contents of its inputs, on any stream."""
    captured, eager = handle_on("cuda"), handle_on("cuda")
    given, options = stack_tokens("cuda")
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device="cuda")
    loop(handle_on("cuda"), given, options, accepted)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = loop(captured, given, options, accepted)
    side = torch.cuda.Stream()
    for seed in range(5):
        with torch.cuda.stream(side):
            for mine, theirs in zip(given, stack_tokens("cuda", seed)[0], strict=True):
                mine.copy_(theirs)
            graph.replay()
            right = loop(eager, given, options, accepted)
        side.synchronize()
        assert_equal([get(out)], [get(right)])
        assert_equal(contents(captured.stack), contents(eager.stack))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_bound_layers_in_cuda_graphs(compiled):
    """Captured by hand, and by torch.compile."""
    torch.compiler.reset()
    mine, eager = handle_on("cuda"), handle_on("cuda")
    given, options = stack_tokens("cuda")
    layers, theirs = (layers_of(one, given[2], options["slots"]) for one in (mine, eager))
    given = layer_tokens("cuda")
    accepted = torch.tensor([2, 1, 0, 1, 2], dtype=torch.int32, device="cuda")
    warm = handle_on("cuda")
    layer_loop(warm, layers_of(warm, stack_tokens("cuda")[0][2], options["slots"]), given, accepted)
    if compiled:
        step = torch.compile(layer_loop, fullgraph=True, mode="reduce-overhead")
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer_loop(mine, layers, given, accepted)
    for seed in range(6):
        for here, new in zip(given, layer_tokens("cuda", seed), strict=True):
            here.copy_(new)
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
            out = step(mine, layers, given, accepted).clone()
        else:
            graph.replay()
        assert_equal([get(out)], [get(layer_loop(eager, theirs, given, accepted))])
    assert_equal(contents(mine.stack), contents(eager.stack))


@pytest.mark.gpu
def test_reduce_overhead():
    """torch.compile's own CUDA graphs."""
    torch.compiler.reset()
    handle, eager = handle_on("cuda"), handle_on("cuda")
    compiled = torch.compile(loop, fullgraph=True, mode="reduce-overhead")
    accepted = torch.tensor([2, 1, 0], dtype=torch.int32, device="cuda")
    loop(handle_on("cuda"), *stack_tokens("cuda"), accepted)
    for seed in range(6):
        given, options = stack_tokens("cuda", seed)
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(handle, given, options, accepted).clone()
        assert_equal([get(out)], [get(loop(eager, given, options, accepted))])
    torch.cuda.synchronize()
    assert_equal(contents(handle.stack), contents(eager.stack))


@pytest.mark.parametrize("state_format", ["float16+fp8", "float16+nvfp4"])
def test_a_stack_with_read_copies(state_format):
    """The same as over NumPy arrays, through the operator."""
    import ml_dtypes

    import replayssm_cupy as ssm

    stack = torch_ops.layer_stack(
        1, 3, 4, 64, 2, 128, npredicted=4, state_dtype=state_format, device="cpu"
    )
    own = ssm.LayerStack(1, 3, 4, 64, 2, 128, npredicted=4, state_dtype=state_format, device="cpu")
    assert stack.state_dtype == own.state_dtype == state_format
    handle, rng = torch_ops.StackHandle(stack), np.random.default_rng(0)
    A = -np.ones(4, np.float32)
    for _ in range(6):
        x, B, C = (
            rng.standard_normal((3, 4, *size)).astype(ml_dtypes.bfloat16)
            for size in ((4, 64), (2, 128), (2, 128))
        )
        dt = rng.standard_normal((3, 4, 4)).astype(np.float32)
        given = [torch.from_numpy(a.astype(np.float32)) for a in (x, dt, A, B, C)]
        for place in (0, 3, 4):
            given[place] = given[place].bfloat16()
        y = handle.step(0, *given)
        expected = own.step(0, x, dt, A, B, C)
        assert np.array_equal(y.float().numpy(), expected.astype(np.float32))
        handle.advance(None, torch.full((3,), 4, dtype=torch.int32), query_len=4)
        own.advance(None, np.full(3, 4, np.int32))
    assert np.array_equal(
        stack.state_copies[0].view(torch.uint8), own.state_copies[0].view(np.uint8)
    )


def test_another_torch_keeps_its_dispatcher():
    """Where torch's own flags are not there, calls are not direct."""
    code = """
import torch
del torch._C._autograd._profiler_enabled
from replayssm_cupy import torch_ops
operators = torch.ops.replayssm
for overload in (operators.layer_step.out, operators.stack_step.default):
    assert type(overload) is torch._ops.OpOverload
"""
    subprocess.run([sys.executable, "-c", code], check=True)
