"""Calls that come again: the same launch as after all checks, and every change is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import choose_form

import replayssm_cupy as ssm
from replayssm_cupy import calls, decode, keys, layer_stack, ops, plan, slots, snapshots
from replayssm_cupy.arrays import Device, _cupy_kind, _dense_cupy_kind, _Matcher, kinds_of, view

BF16 = np.dtype(ml_dtypes.bfloat16)
S, BATCH, T, H, G, P, N, L = 6, 3, 2, 4, 2, 64, 128, 8


class Recorder:
    """A launcher that keeps what each launch was given."""

    def __init__(self) -> None:
        self.launches: list[tuple[plan.Plan, bytes]] = []

    def launch(self, plan: plan.Plan, stream: int) -> None:
        self.launches.append((plan, bytes(plan.record)))

    def latest(self) -> list[tuple[object, ...]]:
        """The last launch; of a snapshot the plan before it too."""
        count = 2 if isinstance(self.launches[-1][0].key, keys.MaterializeKey) else 1
        return [
            (plan.key, plan.grid, plan.block, plan.pdl, record)
            for plan, record in self.launches[-count:]
        ]


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    """Host arrays go to kernels that do nothing, and nothing was called before."""
    for module, name in ((ops, "_calls"), (ops, "_plain_calls"), (slots, "_advances")):
        monkeypatch.setattr(module, name, calls.SeenCalls())
    launcher = Recorder()
    monkeypatch.setitem(plan.launchers, "cpu", launcher)
    return launcher


@pytest.fixture(params=["numpy", "torch", "torch piece by piece"])
def put(request, monkeypatch) -> Callable[[np.ndarray], Any]:
    """A copy of a NumPy array in a library, with an address that is a multiple of 64 bytes."""

    def numpy_put(array: np.ndarray) -> np.ndarray:
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    if request.param == "numpy":
        return numpy_put
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if request.param == "torch piece by piece":
        for quick in ("TensorGuards", "_empty_strided_cpu"):
            monkeypatch.delattr(torch._C._dynamo.guards, quick)

    def torch_put(array: np.ndarray) -> Any:
        aligned = numpy_put(array)
        if array.dtype == BF16:
            return torch.from_numpy(aligned.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(aligned)

    return torch_put


def pools(put) -> list[Any]:
    arrays = (
        np.ones((S, H, P, N), np.float32),
        np.ones((S, H, L, P), BF16),
        np.ones((S, G, L, N), BF16),
        np.ones((S, H, L), np.float32),
        np.ones(S, np.int32),
        np.full(S, 5, np.int32),
    )
    return [put(array) for array in arrays]


def tokens(put) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    arrays = {
        "x": rng.standard_normal((BATCH, T, H, P)).astype(BF16),
        "dt": np.ones((BATCH, T, H), np.float32),
        "A": -np.ones(H, np.float32),
        "B": rng.standard_normal((BATCH, T, G, N)).astype(BF16),
        "C": rng.standard_normal((BATCH, T, G, N)).astype(BF16),
        "D": np.ones(H, np.float32),
        "z": np.ones((BATCH, T, H, P), BF16),
        "dt_bias": np.ones(H, np.float32),
        "slots": np.array([4, 0, 2], np.int32),
        "out": np.zeros((BATCH, T, H, P), BF16),
    }
    return {name: put(array) for name, array in arrays.items()}


def a_stack(put, **more: Any) -> ssm.LayerStack:
    one, two = pools(put), pools(put)
    lists = [list(pair) for pair in zip(one[:4], two[:4], strict=True)]
    return ssm.LayerStack.from_arrays(*lists, *one[4:], npredicted=T, **more)


def a_step(put) -> tuple[Callable[..., Any], Callable[[], dict[str, Any]], set[str]]:
    """A function, what makes new arguments for it, and the names of optional arrays."""
    stack = a_stack(put, stochastic_rounding=False)
    return (
        lambda **arguments: stack.step(1, **arguments),
        lambda: tokens(put),
        {"D", "z", "dt_bias", "slots", "out"},
    )


def an_ssu(put):
    names = ("state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")

    def arguments() -> dict[str, Any]:
        given = {**dict(zip(names, pools(put), strict=True)), **tokens(put)}
        given["state_batch_indices"] = given.pop("slots")
        return given

    return ssm.checkpointing_ssu, arguments, {"D", "z", "dt_bias", "state_batch_indices", "out"}


def an_update(put):
    def arguments() -> dict[str, Any]:
        given = {"state": pools(put)[0], **tokens(put)}
        given["state_batch_indices"] = given.pop("slots")
        return given

    optional = {"D", "z", "dt_bias", "state_batch_indices", "out"}
    return ssm.selective_state_update, arguments, optional


def counts(put) -> dict[str, Any]:
    return {
        "num_accepted": put(np.array([1, 2, 0], np.int32)),
        "slots": put(np.array([4, 0, 2], np.int32)),
        "query_lens": put(np.full(BATCH, 2, np.int64)),
        "reset": put(np.zeros(BATCH, np.bool_)),
        "force_flush": put(np.zeros(BATCH, np.uint8)),
    }


def an_advance(put):
    def arguments() -> dict[str, Any]:
        cursors = dict(zip(("ring_start", "prev_num_accepted_tokens"), pools(put)[4:], strict=True))
        return {**cursors, **counts(put), "max_window": 6, "ring_buffer_len": L}

    return ssm.advance_ring, arguments, {"slots", "reset", "force_flush"}


def a_bound_layer(put):
    stack = a_stack(put)
    fixed = {name: array for name, array in tokens(put).items() if name in FIXED}
    layer = stack.bind_layer(1, **fixed)

    def arguments() -> dict[str, Any]:
        return {name: array for name, array in tokens(put).items() if name not in FIXED}

    return layer.step, arguments, {"z", "out"}


FIXED = ("A", "D", "dt_bias", "slots")


def a_stack_advance(put):
    stack = a_stack(put)
    return stack.advance, lambda: counts(put), {"slots", "reset", "force_flush"}


def a_snapshot(put):
    stack = a_stack(put)
    stack.refresh([put(-np.ones(H, np.float32)) for _ in range(2)])

    def arguments() -> dict[str, Any]:
        rows = {"src_slots": [4, 0, 2], "dst_slots": [5, 1, 3], "prefix_len": [3, 0, -1]}
        return {name: put(np.array(row, np.int32)) for name, row in rows.items()}

    return stack.materialize, arguments, set()


def a_snapshot_of_blocks(put):
    stack = a_stack(put)
    stack.refresh([put(-np.ones(H, np.float32)) for _ in range(2)])

    def arguments() -> dict[str, Any]:
        rows = {"src_slots": [4, 0, 2], "dst_slots": [5, 1, 3], "committed_lens": [7, 8, 9],
                "num_accepted": [1, 2, 1]}  # fmt: skip
        arrays = {name: put(np.array(row, np.int64)) for name, row in rows.items()}
        return arrays | {"block_size": 4}

    return stack.materialize_blocks, arguments, set()


WITH_OPTIONS = (
    a_step, an_ssu, an_update, an_advance, a_stack_advance, a_snapshot, a_snapshot_of_blocks
)  # fmt: skip
CALLS = (*WITH_OPTIONS, a_bound_layer)


@pytest.fixture
def unchecked(monkeypatch) -> Callable[[], None]:
    """From its call on, a call that is looked at again fails the test."""

    def stop() -> None:
        def looked(*arguments: object, **more: object) -> None:
            raise AssertionError("the call was checked again")

        for module in (ops, layer_stack):
            monkeypatch.setattr(module, "decode", looked)
        for module in (slots, layer_stack.slot_ops):
            monkeypatch.setattr(module, "advance_views", looked)
        for name in ("plan_views", "materialize_views"):
            monkeypatch.setattr(snapshots, name, looked)

    return stop


@pytest.mark.parametrize("make", CALLS)
def test_a_repeated_call_is_the_same_launch(make, put, recorder, unchecked):
    """New arrays of the same kinds go into the record that a first call would make of them."""
    function, arguments, _ = make(put)
    one, two = arguments(), arguments()
    function(**one)
    expected = recorder.latest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.SeenCalls, "repeat", lambda seen, *arguments: None)
        function(**two)  # goes all the way again
    other = recorder.latest()
    assert other != expected
    unchecked()
    for given, record in ((two, other), (one, expected), (two, other)):
        function(**given)
        assert recorder.latest() == record


@pytest.mark.parametrize("make", CALLS)
def test_each_array_may_be_left_out(make, put, recorder):
    """Whatever is None next time is null in the record, and comes back after that."""
    function, arguments, optional = make(put)
    given = arguments()
    function(**given)
    complete = recorder.latest()
    names = {"state_batch_indices": "slots"}
    for name in sorted(optional):
        function(**(given | {name: None}))
        plan = recorder.launches[-1][0]
        pointer = getattr(plan.record, names.get(name, name))
        if name == "out":
            assert pointer not in (None, address_of(given["out"]))
        else:
            assert pointer is None, name
        function(**given)
        assert recorder.latest() == complete, name


def address_of(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


def changed(array: Any) -> dict[str, Any]:
    """Arrays that differ in one way from the one that was accepted; nearly all are illegal."""
    flat = array.reshape(-1)
    other = {"shape": array[:-1]}
    if isinstance(array, np.ndarray):
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64 + 1
        odd = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        other |= {"dtype": array.astype(np.complex64), "rank": flat[None], "address": odd}
    else:
        other |= {"dtype": array.double(), "rank": flat[None], "meta": array.to("meta")}
    return other


@pytest.mark.parametrize("make", CALLS)
def test_every_change_is_noticed(make, put, recorder):
    """A wrong array ends in the same error after good calls as before them."""
    function, arguments, _ = make(put)
    given = arguments()
    wrong = [
        (name, what, array)
        for name in given
        if not isinstance(given[name], int)
        for what, array in changed(given[name]).items()
    ]

    def outcomes() -> list[object]:
        results: list[object] = []
        for name, _, array in wrong:
            launched = len(recorder.launches)
            try:
                function(**(given | {name: array}))
            except (TypeError, ValueError) as error:
                assert len(recorder.launches) == launched
                results.append(str(error))
            else:
                results.append(recorder.latest())
        return results

    before = outcomes()
    function(**given)
    after = outcomes()
    function(**given)
    assert after == before == outcomes()
    errors = [text for text in before if isinstance(text, str)]
    assert len(errors) > 0.8 * len(before)


@pytest.mark.parametrize("make", WITH_OPTIONS)
def test_options_of_another_type_are_not_taken_for_equal(make, put, recorder):
    function, arguments, _ = make(put)
    given = arguments()
    function(**given, pad_slot_id=1)
    for wrong in (True, 1.0, "1", [1]):
        with pytest.raises(TypeError, match=r"^pad_slot_id: expected an int, got"):
            function(**given, pad_slot_id=wrong)
    function(**given, pad_slot_id=2)
    assert recorder.launches[-1][0].record.pad_slot_id == 2
    function(**given, pad_slot_id=1)
    assert recorder.launches[-1][0].record.pad_slot_id == 1


@pytest.mark.parametrize("make", WITH_OPTIONS)
def test_kinds_that_take_turns_are_all_remembered(make, put, recorder, unchecked):
    """Buffers of two layouts, for instance; of more than a few the latest are kept."""
    function, arguments, _ = make(put)
    several = ("query_lens", "A", "prefix_len", "num_accepted")
    name = next(name for name in several if name in arguments())
    forms = []
    for stride in range(1, calls.MOST_KINDS + 2):
        given = arguments()
        spread = np.repeat(np.asarray(given[name]), stride)
        forms.append(given | {name: put(spread)[::stride]})
    records = []
    for given in forms:
        function(**given)
        records.append(recorder.latest())
    unchecked()
    for _ in range(2):
        for given, record in list(zip(forms, records, strict=True))[1:]:
            function(**given)
            assert recorder.latest() == record
    with pytest.raises(AssertionError, match="checked again"):
        function(**forms[0])


def test_batches_that_take_turns_are_all_remembered(put, recorder, unchecked):
    """A server's batch grows and shrinks; there are more sizes than kinds of one shape."""
    stack = a_stack(put)
    batches = [1, 2, 3, 4, 5, 6]
    assert len(batches) > calls.MOST_KINDS
    steps = []
    for batch in batches:
        given = tokens(put)
        for name in ("x", "B", "C", "z", "out"):
            given[name] = put(np.ones((batch, *given[name].shape[1:]), BF16))
        given["dt"] = put(np.ones((batch, T, H), np.float32))
        given["slots"] = put(np.arange(batch, dtype=np.int32))
        steps.append(given)
    records = []
    for given in steps:
        stack.step(0, **given)
        records.append(recorder.latest())
    unchecked()
    for given, record in [*zip(steps, records, strict=True)] * 2:
        stack.step(0, **given)
        assert recorder.latest() == record


@pytest.mark.parametrize("layout", ["split", "heads first"])
def test_a_fresh_output_is_row_major(put, recorder, layout):
    """Whatever x is: the record has the strides of the first call's output."""
    stack, given = a_stack(put), tokens(put)
    if layout == "split":  # x is a part of each token's projection
        given["x"] = put(np.ones((BATCH, T, H, 2 * P), BF16))[..., :P]
    else:
        x = put(np.ones((BATCH, H, T, P), BF16))
        given["x"] = x.swapaxes(1, 2)
    del given["out"]
    for _ in range(3):
        out = stack.step(0, **given)
        record = recorder.launches[-1][0].record
        assert record.out == address_of(out)
        assert tuple(out.shape) == (BATCH, T, H, P)
        assert [record.out_batch_stride, record.out_token_stride, record.out_head_stride] == [
            T * H * P, H * P, P
        ]  # fmt: skip
        assert out.flags.c_contiguous if isinstance(out, np.ndarray) else out.is_contiguous()
        assert type(out) is type(given["x"])


@pytest.mark.parametrize("wrong", [object(), SimpleNamespace(shape=[BATCH, T, H, P]), [1.0]])
def test_what_is_no_array_at_all_is_noticed(put, recorder, wrong):
    stack, given = a_stack(put), tokens(put)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^x: expected an array of PyTorch, JAX, CuPy or"):
            stack.step(0, **(given | {"x": wrong}))
        stack.step(0, **given)
    assert len(recorder.launches) == 2


def test_layers_are_told_apart(put, recorder):
    stack, given = a_stack(put), tokens(put)
    for layer in (0, 1, 0, 1):
        stack.step(layer, **given)
        assert recorder.launches[-1][0].record.layer == layer
    for wrong in (True, 1.0, 2):
        with pytest.raises((TypeError, ValueError), match=r"^layer: expected"):
            stack.step(wrong, **given)


def test_a_tensor_that_moves_or_changes_its_shape_is_noticed(recorder):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    stack = ssm.LayerStack(1, S, H, P, G, N, max_window=6, npredicted=T, device="cpu")

    def put(array: np.ndarray) -> Any:
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    given = tokens(put)
    for _ in range(2):
        stack.step(0, **given)
    given["D"].set_(torch.zeros(H))
    stack.step(0, **given)
    assert given["D"].data_ptr() == recorder.launches[-1][0].record.D
    given["D"].resize_(H - 1)
    with pytest.raises(ValueError, match=r"^D: expected \(nheads,\) = \(4,\), got \(3,\)"):
        stack.step(0, **given)
    given["D"].resize_(H)
    stack.step(0, **given)
    given["A"] = torch._neg_view(torch.ones(H))
    with pytest.raises(TypeError, match=r"^A: expected plain values, got a negated view"):
        stack.step(0, **given)


def test_a_seed_that_is_replaced_is_followed(put, recorder):
    stack = ssm.LayerStack(
        1, S, H, P, G, N, max_window=6, npredicted=T, state_dtype="float16", device="cpu",
        stochastic_rounding=True,
    )  # fmt: skip
    given = tokens(put)
    for seed in (stack.rand_seed, np.array([5]), np.array([6])):
        stack.rand_seed = seed
        for _ in range(2):
            stack.step(0, **given)
            assert recorder.launches[-1][0].record.rand_seed == seed.ctypes.data


def test_pointers_around_others_that_stay(put, recorder):
    """The seed lies between the arrays of a call in the record, and is the stack's own."""
    stack = ssm.LayerStack(
        1, S, H, P, G, N, max_window=6, npredicted=T, state_dtype="float16", device="cpu",
        stochastic_rounding=True,
    )  # fmt: skip
    for given in (tokens(put), tokens(put)) * 2:
        stack.step(0, **given)
        record = recorder.launches[-1][0].record
        for name, array in given.items():
            assert getattr(record, name) == address_of(array), name
        assert record.rand_seed == stack.rand_seed.ctypes.data
        assert record.cu_seqlens is None and record.state == stack.states[0].ctypes.data


def test_packing():
    """Other pointers are left alone; after one that is wrong, all are written again."""
    record = plan.AdvanceRingParams(ring_start=64, query_lens=128)
    one = plan.Plan(keys.AdvanceRingKey(), (1, 1, 1), (1, 1, 1), record, Device("cpu"))
    views = {
        name: view(np.zeros(4, dtype), name)
        for name, dtype in (
            ("prev_num_accepted_tokens", np.int32), ("num_accepted", np.int64),
            ("slots", np.int32), ("force_flush", np.uint8), ("unknown", np.int32),
            ("rand_seed", np.int64),
        )
    }  # fmt: skip
    packing = calls.Packing(one, views, {"slots"})
    assert packing.fill(one, [4, 8, 16, 1, 12, 24])
    names = [field[0] for field in record._fields_[:8]]
    expected = [64, 4, 8, 128, 16, None, 1, 24]
    assert [getattr(record, name) for name in names] == expected
    assert one.pointers == [4, 8, 16, 1, 12, 24]
    right = one.pointers
    for wrong in ([0, 8, 16, 1, 12, 24], [4, 12, 16, 1, 12, 24], [4, 8, 24, 1, 12, 24],
                  [4, 8, 16, 1, 14, 24], [4, 8, 16, 1, 0, 24]):  # fmt: skip
        assert not packing.fill(one, wrong)
        assert one.pointers is None
        assert packing.fill(one, right)
        assert [getattr(record, name) for name in names] == expected
    assert packing.fill(one, [12, 8, 32, 1, 12, 24])
    assert [getattr(record, name) for name in names] == [64, 12, 8, 128, 32, None, 1, 24]


def test_snapshots_follow_their_scratch(put, recorder):
    """More rows than slots take new room: what was remembered points to the old."""
    materialize, arguments, _ = a_snapshot(put)
    given = arguments()
    materialize(**given)
    materialize(**{name: put(np.full(S + 1, -1, np.int32)) for name in given})
    room = [launched.record.replay_prefix_len for launched, _ in recorder.launches[-2:]]
    materialize(**given)
    again = [launched.record.replay_prefix_len for launched, _ in recorder.launches[-2:]]
    assert len({*room}) == 1 and again == room


def test_a_checked_snapshot_is_checked_again(put, recorder, unchecked):
    materialize, arguments, _ = a_snapshot(put)
    given = arguments()
    materialize(**given)
    unchecked()
    materialize(**given)
    with pytest.raises(AssertionError, match="checked again"):
        materialize(**given, check=True)


def test_without_a_launcher_the_reference_runs(put, recorder):
    stack, given = a_stack(put), tokens(put)
    stack.step(0, **given)
    plan.launchers.pop("cpu")
    try:
        stack.step(0, **given)
    finally:
        plan.launchers["cpu"] = recorder
    assert len(recorder.launches) == 1
    assert (given["out"] != 0).any()


def test_threads_do_not_share_a_record(put, recorder, monkeypatch):
    """Each launch sees its own arrays, however the threads interleave."""
    stack = a_stack(put)
    mine = [tokens(put) for _ in range(4)]
    for given in mine:
        stack.step(0, **given)
    expected = [record for _, record in recorder.launches]
    assert len(set(expected)) == 4
    together = threading.Barrier(4)
    found: list[set[bytes]] = [set() for _ in mine]
    who = threading.local()

    class Slow:
        def launch(self, plan: plan.Plan, stream: int) -> None:
            together.wait(10)  # all records are filled by now
            found[who.number].add(bytes(plan.record))

    monkeypatch.setitem(plan.launchers, "cpu", Slow())

    def work(number: int) -> None:
        who.number = number
        for _ in range(20):
            stack.step(0, **mine[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{record} for record in expected]


def test_what_is_remembered_is_bounded(put, recorder, monkeypatch):
    monkeypatch.setattr(calls, "MOST_CALLS", 3)
    monkeypatch.setattr(decode, "MOST_CALLS", 3)
    stack, given = a_stack(put), tokens(put)
    for pad in range(-10, 0):
        stack.step(0, **given, pad_slot_id=pad)
        assert len(stack._calls._calls) <= 3
        assert len(decode._plans) <= 3


def test_a_call_keeps_no_array_alive():
    """A remembered call knows addresses and kinds, not the caller's memory."""
    import gc
    import weakref

    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = [torch.zeros(4), torch.zeros(8)]
    kinds = kinds_of(tensors)
    assert kinds is not None and kinds.match(*tensors)
    watch = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


def test_torch_tensors_are_compared_in_one_call():
    """Where this torch has what torch.compile uses, and whichever of the tensors are the same."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        pytest.skip("this torch has no TensorGuards")
    one, two, three = (torch.zeros(size) for size in (4, 8, 4))
    kinds = kinds_of([one, two, three])
    assert kinds is not None
    assert isinstance(kinds.match.__self__, guards.TensorGuards)
    for tensors, same in (
        ((one, two, three), True),
        ((three, two, one), True),
        ((one, two, torch.zeros(4)), True),
        ((one, two, two), False),
        ((one, two, torch.zeros(4, dtype=torch.int32)), False),
        ((one, two, torch.zeros(8)[::2]), False),
        ((one, two, torch._neg_view(three)), False),
        ((one, two, torch.zeros(4, device="meta")), False),
        ((one, two, np.zeros(4, np.float32)), False),
    ):
        assert kinds.match(*tensors) == same
    kinds = kinds_of([one, two, one])
    assert kinds is not None
    assert kinds.match(one, two, one) and kinds.match(three, two, three)
    assert not kinds.match(one, two, two)


def test_kinds_of_no_kind(put):
    one = put(np.zeros(4, np.float32))
    assert kinds_of([one, object()]) is None
    kinds = kinds_of([one, one])
    assert kinds is not None
    other = put(np.zeros(4, np.float32))
    assert kinds.match(one, one)
    assert not kinds.match(one, other.reshape(2, 2))
    assert not kinds.match(one, [1.0])
    assert kinds_of([one, other]).match(other, one)


# --- Bound calls ---------------------------------------------------------------------------------


def test_a_bound_call_is_the_step(put, recorder):
    stack, given = a_stack(put), tokens(put)
    stack.step(1, **given)
    expected = recorder.latest()
    bound = stack.bind(1, **given)
    assert len(recorder.launches) == 1, "binding launches nothing"
    for _ in range(3):
        assert bound() is given["out"]
        assert recorder.latest() == expected
    assert len(recorder.launches) == 4


def test_a_bound_call_allocates_its_output_once(put, recorder):
    stack, given = a_stack(put), tokens(put)
    del given["out"]
    bound = stack.bind(0, **given)
    assert bound() is bound()
    assert tuple(bound.out.shape) == (BATCH, T, H, P)
    assert type(bound.out) is type(given["x"])


def test_a_bound_call_on_the_reference_path(put):
    """New tokens in the same arrays, step after step: the same bits as step(...)."""
    one, two = a_stack(put), a_stack(put)
    given, mine = tokens(put), tokens(put)
    bound = one.bind(1, **given)
    rng = np.random.default_rng(8)
    for _ in range(5):
        fresh = rng.standard_normal((BATCH, T, H, P)).astype(BF16)
        for arrays in (given, mine):
            arrays["x"][...] = put(fresh)
        got, want = bound(), two.step(1, **mine)
        assert (got == want).all() and (got != 0).any()
        for stack, arrays in ((one, given), (two, mine)):
            stack.advance(arrays["slots"], put(np.array([2, 1, 2], np.int32)))
    assert (one.states[1] == two.states[1]).all() and (one.states[1] != 1).any()
    assert (one.x_caches[1] == two.x_caches[1]).all()


@pytest.mark.parametrize("kernel", [True, False])
def test_binding_checks_what_a_step_checks(put, recorder, kernel, monkeypatch):
    if not kernel:
        monkeypatch.delitem(plan.launchers, "cpu")
    stack, given = a_stack(put), tokens(put)
    with pytest.raises(ValueError, match=r"^dt: expected \(batch, npredicted, nheads\)"):
        stack.bind(0, **(given | {"dt": given["dt"][:, :1]}))
    with pytest.raises(ValueError, match=r"^layer: expected 0 to 1, got 2"):
        stack.bind(2, **given)


def test_a_bound_call_is_what_advance_follows(put, recorder):
    """The step's length is that of the latest call, bound or not."""
    stack, given = a_stack(put), tokens(put)
    short = {name: given[name][:, :1] for name in ("x", "dt", "B", "C", "z", "out")}
    bound = stack.bind(0, **(given | short))
    stack.step(0, **given)
    for call, length in ((bound, 1), (lambda: stack.step(0, **given), 2), (bound, 1)):
        call()
        stack.advance(given["slots"], given["slots"])
        assert recorder.launches[-1][0].record.npredicted == length


def bound_layer_of(stack: ssm.LayerStack, layer: int, given: dict[str, Any]) -> Callable[..., Any]:
    """A step of a bound layer that takes some of the arrays, and x."""
    fixed = {name: given[name] for name in FIXED}
    bound = stack.bind_layer(layer, **fixed)
    token = {name: array for name, array in given.items() if name not in FIXED}
    return lambda **others: bound.step(**(token | others))


def test_a_bound_layer_is_the_step(put, recorder):
    """With what other calls gave it, whatever the order; its length is what advance follows."""
    stack, given = a_stack(put), tokens(put)
    stack.step(1, **given)
    expected = recorder.latest()
    step = bound_layer_of(stack, 1, given)
    assert len(recorder.launches) == 1, "binding launches nothing"
    short = {name: given[name][:, :1] for name in ("x", "dt", "B", "C", "z", "out")}
    for others, length in (({}, 2), ({}, 2), (short, 1), (short, 1), ({}, 2)):
        assert step(**others) is (others or given)["out"]
        if not others:
            assert recorder.latest() == expected
        stack.advance(given["slots"], given["slots"])
        assert recorder.launches[-1][0].record.npredicted == length


def test_a_bound_layer_on_the_reference_path(put):
    one, two = a_stack(put), a_stack(put)
    given, mine = tokens(put), tokens(put)
    step = bound_layer_of(one, 1, given)
    for _ in range(5):
        got, want = step(out=None), two.step(1, **mine)
        assert type(got) is type(want) and (got == want).all() and (got != 0).any()
        for stack, arrays in ((one, given), (two, mine)):
            stack.advance(arrays["slots"], put(np.array([2, 1, 2], np.int32)))
    assert (one.states[1] == two.states[1]).all() and (one.x_caches[1] == two.x_caches[1]).all()


def test_a_bound_layer_takes_every_option(recorder):
    """All that a step takes beside the tokens, in the same record."""
    given = tokens(np.ndarray.copy)
    joined = {name: given[name].reshape(1, BATCH * T, *given[name].shape[2:])
              for name in ("x", "dt", "B", "C", "z", "out")}  # fmt: skip
    fixed = {name: given[name] for name in FIXED} | {
        "cu_seqlens": np.array([0, 1, 3, 3], np.int32), "max_seqlen": 2, "dt_softplus": False,
        "pad_slot_id": 4, "pad_output": "keep", "force_flush": np.ones(BATCH, np.uint8),
        "enable_pdl": True, "algorithm": "two-kernel",
        **ssm.allocate_scratch(BATCH, H, like=given["x"]),
    }  # fmt: skip
    stack = a_stack(np.ndarray.copy)
    stack.step(1, **joined, **fixed)
    expected = recorder.latest()
    layer = stack.bind_layer(1, **fixed)
    for _ in range(2):
        layer.step(**joined)
        assert recorder.latest() == expected
    assert stack._last_query_len is None


def test_a_bound_layer_follows_its_stack(recorder):
    """A seed that is replaced, and arrays that are read anew."""
    stack = ssm.LayerStack(
        1, S, H, P, G, N, max_window=6, npredicted=T, state_dtype="float16", device="cpu",
        stochastic_rounding=True,
    )  # fmt: skip
    step = bound_layer_of(stack, 0, tokens(np.ndarray.copy))
    for seed in (stack.rand_seed, np.array([5]), np.array([6])):
        stack.rand_seed = seed
        for _ in range(2):
            step()
            assert recorder.launches[-1][0].record.rand_seed == seed.ctypes.data
    stack.states[0] = stack.states[0].copy()
    stack.refresh()
    for _ in range(2):
        step()
        assert recorder.launches[-1][0].record.state == stack.states[0].ctypes.data


@pytest.mark.parametrize("wrong, message", [
    ({"layer": 2}, r"^layer: expected 0 to 1, got 2$"),
    ({"A": None}, r"^A: expected an array of PyTorch, JAX, CuPy or NumPy, got NoneType$"),
    ({"D": [1.0]}, r"^D: expected an array of PyTorch, JAX, CuPy or NumPy, got list$"),
    ({"pad_slot_id": 1.0}, r"^pad_slot_id: expected an int, got"),
    ({"algorithm": "fast"}, r"^algorithm: expected"),
    ({"check": 2}, r"^check: expected False, True or"),
    ({"pad_output": "none"}, r"^pad_output: expected"),
])  # fmt: skip
def test_binding_a_layer_checks_what_it_is_given(recorder, wrong, message):
    stack, given = a_stack(np.ndarray.copy), tokens(np.ndarray.copy)
    right = {name: given[name] for name in FIXED} | {"layer": 0}
    with pytest.raises((TypeError, ValueError), match=message):
        stack.bind_layer(**(right | wrong))
    layer = stack.bind_layer(**(right | {"D": given["D"][:1]}))
    token = [given[name] for name in ("x", "dt", "B", "C")]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^D: expected \(nheads,\) = \(4,\), got \(1,\)"):
            layer.step(*token)
    assert not recorder.launches


def test_checked_mode_reaches_bound_and_repeated_calls(monkeypatch):
    """The environment asks for checks between two calls of a kind."""
    from host.launcher import HostLauncher

    monkeypatch.setitem(plan.launchers, "cpu", HostLauncher())
    stack = ssm.LayerStack(1, S, H, P, G, N, max_window=6, npredicted=T, device="cpu")
    given = tokens(np.ndarray.copy)
    bound, step = stack.bind(0, **given), bound_layer_of(stack, 0, given)
    checked = stack.bind_layer(0, **{name: given[name] for name in FIXED}, check=True)
    token = [given[name] for name in ("x", "dt", "B", "C")]
    checked.step(*token)
    for call in (bound, step, lambda: stack.step(0, **given)):
        call()
    given["slots"][...] = 4  # three times
    with pytest.raises(ssm.ReplaySSMError, match=r"^state_batch_indices: expected distinct"):
        checked.step(*token)
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    for call in (bound, step, lambda: stack.step(0, **given)):
        with pytest.raises(ssm.ReplaySSMError, match=r"^state_batch_indices: expected distinct"):
            call()


def test_jax_needs_an_output_of_its_own():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    stack = ssm.LayerStack(1, S, H, P, G, N, max_window=6, npredicted=T, device="cpu")
    given = tokens(jax.numpy.asarray)
    out = given.pop("out")
    with pytest.raises(ValueError, match=r"^out: expected an array to write at every call"):
        stack.bind(0, **given)
    with pytest.raises(TypeError, match=r"^out: expected an array to change in place"):
        stack.bind(0, **given, out=out)
    target = np.zeros((BATCH, T, H, P), BF16)
    assert stack.bind(0, **given, out=target)() is target
    assert target.any()


@pytest.mark.parametrize("rows, stride, message", [
    (70_000, P, r"^x_cache: expected at most 65536 ring rows, got 70000"),
    (T + 6, 2**31, r"^x_cache: expected ring rows at most 2147483647 elements apart, got 2"),
])  # fmt: skip
def test_a_ring_beyond_what_kernels_count(recorder, rows, stride, message):
    """Nothing of it is read: the memory is not there."""
    rings = {
        "x_cache": np.zeros((S, H, 1, P), BF16), "B_cache": np.zeros((S, G, 1, N), BF16),
        "dt_cache": np.zeros((S, H, 1), np.float32),
    }  # fmt: skip
    far = np.lib.stride_tricks.as_strided
    long = {
        name: far(ring, (*ring.shape[:2], rows, *ring.shape[3:]),
                  (*ring.strides[:2], stride * 2 if name == "x_cache" else ring.strides[2],
                   *ring.strides[3:]))
        for name, ring in rings.items()
    }  # fmt: skip
    given = tokens(np.ndarray.copy)
    given["state_batch_indices"] = given.pop("slots")
    cursors = {n: np.zeros(S, np.int32) for n in ("ring_start", "prev_num_accepted_tokens")}
    with pytest.raises(ValueError, match=message):
        ssm.checkpointing_ssu(np.zeros((S, H, P, N), np.float32), **long, **cursors, **given,
                              max_window=6)  # fmt: skip
    assert not recorder.launches


@pytest.mark.parametrize("kind", [_cupy_kind, _dense_cupy_kind])
@pytest.mark.parametrize("dtype", [np.float32, BF16, ml_dtypes.float8_e4m3fn])
def test_numpy_arrays_are_not_taken_for_those_of_cupy(dtype, kind):
    """The same call on a GPU's arrays and then on the host's: NumPy shows no buffer of bfloat16."""
    host = np.zeros((2, 4), dtype)
    remote = SimpleNamespace(
        dtype=host.dtype, shape=host.shape, strides=host.strides, _c_contiguous=True,
        data=SimpleNamespace(device_id=0),
    )  # fmt: skip
    matches = _Matcher(kind, [remote])
    assert matches(remote)
    assert not matches(host)


def cupy_array(
    shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None, device: int = 0
) -> Any:
    """An array of CuPy over host memory, which nothing can read but its attributes."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    host = np.zeros(4096, np.uint8)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def test_kinds_of_cupy_arrays():
    one, two = cupy_array((3, 4), BF16), cupy_array((8,), np.float32)
    kinds = kinds_of([one, two])
    assert kinds is not None and kinds.match(one, two)
    assert kinds.address(one) == one.data.ptr
    assert kinds.match(cupy_array((3, 4), BF16), two)
    for other in (
        cupy_array((4, 3), BF16),
        cupy_array((3, 4), np.float16),
        cupy_array((3, 4), BF16, (16, 2)),
        cupy_array((3, 4), BF16, (0, 2)),
        cupy_array((3, 4), BF16, device=1),
        np.zeros((3, 4), BF16),
        None,
    ):
        assert not kinds.match(other, two)
    spread = cupy_array((3, 4), BF16, (16, 2))
    kinds = kinds_of([spread, two])
    assert kinds is not None and kinds.match(cupy_array((3, 4), BF16, (16, 2)), two)
    for other in (one, cupy_array((3, 4), BF16, (32, 2)), cupy_array((3, 4), BF16, (16, 4))):
        assert not kinds.match(other, two)


# --- On a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def cuda_put() -> Callable[[np.ndarray], Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device")

    def put(array: np.ndarray) -> Any:
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).cuda()
        return torch.from_numpy(array.copy()).cuda()

    return put


def both_stacks(put, **more: Any) -> tuple[ssm.LayerStack, dict[str, Any], Any, Any]:
    """A bound step and the same as eager calls on arrays of their own; repeats change nothing."""
    one, two = a_stack(put), a_stack(put)
    for stack in (one, two):
        stack.prev_num_accepted_tokens[...] = 3  # no flush, which would fold again
    given, mine = tokens(put), tokens(put)
    if more.get("algorithm") == "two-kernel":
        more |= ssm.allocate_scratch(BATCH, H, like=given["x"])
    return one, given, one.bind(1, **given, **more), lambda: two.step(1, **mine)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["monolith", "two-kernel"])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_bound_call_on_a_side_stream_and_in_a_graph(cuda_put, monkeypatch, pdl, algorithm):
    """The call works on the stream that is current then, and allocates nothing."""
    import torch

    choose_form(monkeypatch, "stream")  # of two kernels

    _, given, bound, step = both_stacks(cuda_put, enable_pdl=pdl, algorithm=algorithm)
    step()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        bound()
        assert not side.query(), "the call waited, or went to another stream"
    torch.cuda.synchronize()
    assert torch.equal(given["out"], step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        bound()
        assert torch.cuda.memory_allocated() == before
    given["out"].zero_()
    graph.replay()
    assert torch.equal(given["out"], step())


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["monolith", "two-kernel"])
def test_a_bound_call_in_a_graph_of_cupy(monkeypatch, algorithm):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    choose_form(monkeypatch, "stream")  # of two kernels
    _, given, bound, step = both_stacks(cupy.asarray, algorithm=algorithm)
    want = step().copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        bound()
        graph = stream.end_capture()
        assert not cupy.asnumpy(given["out"].view(np.int16)).any()
        graph.launch(stream)
        stream.synchronize()
    assert (cupy.asnumpy(given["out"].view(np.int16)) == cupy.asnumpy(want.view(np.int16))).all()


@pytest.mark.gpu
def test_dependent_launches_give_the_same_bits(cuda_put, monkeypatch):
    """Steps and cursor moves one after another, each allowed to start early."""
    import torch

    choose_form(monkeypatch, "stream")  # of two kernels

    results = []
    for pdl, algorithm in ((False, "monolith"), (True, "monolith"), (True, "two-kernel")):
        stack, given = a_stack(cuda_put), tokens(cuda_put)
        scratch = ssm.allocate_scratch(BATCH, H, like=given["x"])
        options = {"enable_pdl": pdl, "algorithm": algorithm, **scratch}
        accepted = cuda_put(np.array([2, 1, 2], np.int32))
        outs = []
        for _ in range(20):
            for layer in range(2):
                outs.append(stack.step(layer, **given, **options).clone())
            stack.advance(given["slots"], accepted)
        results.append([*outs, *stack.states, *stack.dt_caches])
    for plain, *dependent in zip(*results, strict=True):
        for array in dependent:
            assert torch.equal(plain, array)


@pytest.mark.gpu
def test_a_thread_that_never_touched_the_gpu_may_launch(cuda_put):
    stack, given = a_stack(cuda_put), tokens(cuda_put)
    stack.prev_num_accepted_tokens[...] = 3  # no flush, which would fold again
    want = stack.step(0, **given).clone()
    bound = stack.bind(0, **given)
    given["out"].zero_()
    failed: list[Exception] = []

    def work() -> None:
        try:
            bound()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    import torch

    torch.cuda.synchronize()
    assert torch.equal(given["out"], want)
