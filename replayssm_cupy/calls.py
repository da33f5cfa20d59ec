"""Calls that were seen before: arrays of the same kinds go into the same plan, and it is launched.

The first call of a kind looks at every array (`decode_checks`, `checks`); the next ones only ask
whether anything but the addresses has changed. Both end in the same launch.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .arrays import Kinds, View, allocator_like, itemsize, kinds_of, stream_reader
from .checked import everywhere
from .checks import ALIGNMENT
from .plan import Plan, launchers

MOST_CALLS = 4096  # kept of one stack or function
MOST_KINDS = 4  # of arrays that are remembered of one call


class Packing:
    """Where pointers go in the record of a plan, and how they must be aligned.

    Parameters
    ----------
    plan : whose record points to all arrays of its call.
    views : of the arrays that the pointers are of, in their order, by the record's names.
    vectors : names of those that must be aligned to 16 bytes; the others to their elements.
    """

    __slots__ = ("_mask", "_pack", "_runs")

    def __init__(self, plan: Plan, views: dict[str, View], vectors: Iterable[str]) -> None:
        # Null pointers between them in the record are packed as well, so there is mostly one run.
        text, size, end = "<", 0, -1
        runs: list[list[int]] = []  # offset in the record, offset in the pack, bytes
        for name in views:
            field = getattr(type(plan.record), name, None)
            if field is None:  # checked, but of no use to the kernel
                end = -1
            else:
                if 0 <= end <= field.offset and not any(plan.memory[end : field.offset]):
                    gap = field.offset - end
                    text, size = f"{text}{gap}x", size + gap
                    runs[-1][2] += gap
                else:
                    runs.append([field.offset, size, 0])
                runs[-1][2] += 8
                end = field.offset + 8
            text, size = text + "Q", size + 8
        self._pack = struct.Struct(text).pack
        self._runs = [(slice(a, a + n), slice(b, b + n)) for a, b, n in runs]
        wide = set(vectors)
        bytes_ = (
            ALIGNMENT if name in wide else itemsize(view.dtype) for name, view in views.items()
        )
        self._mask = int.from_bytes(self._pack(*(n - 1 for n in bytes_)), "little")

    def fill(self, plan: Plan, pointers: list[int]) -> bool:
        """Writes the pointers to the plan's record, if they are right."""
        packed = self._pack(*pointers)
        # All pointers as one number: one test tells whether each is aligned.
        if int.from_bytes(packed, "little") & self._mask or not all(pointers):
            return False
        for place, part in self._runs:
            plan.memory[place] = packed[part]
        plan.pointers = pointers
        return True


class PlanPool:
    """Copies of a plan, so that threads may launch it at the same time."""

    __slots__ = ("_idle", "_kind", "_packing", "_plan", "_stream")

    def __init__(self, plan: Plan, like: View, packing: Packing | None = None) -> None:
        self._plan = plan.copy()
        self._idle: list[Plan] = []  # copies that nobody uses now
        self._kind = plan.device.kind
        self._stream = stream_reader(like)  # the caller's, who works with arrays such as `like`
        self._packing = packing

    def launch(self, pointers: list[int] | None = None) -> bool:
        """Launches the plan, on other arrays if there are `pointers`.

        False, and nothing is done, if these are not right or the device has no launcher (any more).
        """
        if self._kind not in launchers:
            return False
        try:
            plan = self._idle.pop()
        except IndexError:
            plan = self._plan.copy()
        if pointers != plan.pointers:
            assert pointers is not None and self._packing is not None
            if not self._packing.fill(plan, pointers):
                return False
        plan.launch(self._stream())
        self._idle.append(plan)
        return True


class SeenCall:
    """A call that passed its checks, to be repeated on other arrays of the same kinds.

    Parameters
    ----------
    plans : of the call, in order; the last one's record points to all arrays of the call.
    views : of all arrays of the call.
    arrays : the caller's own, which may be others next time, by the names that the record and
        `views` have for them. None stays None; an `out` that is None is allocated.
    kinds : of these arrays, without those that are None.
    vectors : as for :class:`Packing`.
    query_len : of the step, if all sequences have the same.
    """

    __slots__ = ("_address", "_empty", "_match", "_pick", "_pools", "query_len")

    def __init__(
        self,
        plans: Sequence[Plan],
        views: dict[str, View | None],
        arrays: dict[str, Any],
        kinds: Kinds,
        vectors: Iterable[str],
        query_len: int | None,
    ) -> None:
        self.query_len = query_len
        self._match, self._address = kinds.match, kinds.address
        self._pick = _picker([i for i, array in enumerate(arrays.values()) if array is not None])
        self._empty: Callable[[], Any] | None = None
        if "out" in arrays and arrays["out"] is None and (x := views["x"]) is not None:
            self._empty = allocator_like(x)
        given = {name: view for name in arrays if (view := views[name]) is not None}
        like = next(iter(given.values()))
        self._pools = [PlanPool(plan, like, Packing(plan, given, vectors)) for plan in plans]

    def launch(self, arrays: tuple[Any, ...]) -> tuple[SeenCall, Any] | None:
        """Launches on these arrays: this call, and the last of `arrays`, which may be its `out`.

        An `out` that is None is allocated. None, and nothing is done, if the arrays are not of
        the same kinds.
        """
        given = self._pick(arrays)
        if not self._match(*given):
            return None
        last = arrays[-1]
        if self._empty is not None:
            last = self._empty()
            given = (*given, last)
        pointers = [*map(self._address, given)]
        for pool in self._pools:
            if not pool.launch(pointers):
                return None
        return self, last


def _picker(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks these elements of a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return operator.itemgetter(slice(indices[0], indices[0] + 1))


class SeenCalls:
    """The calls of a function or a stack that were seen before.

    A key tells apart what the kinds of the arrays do not: options, and which arrays are None. Of
    a key the latest call is tried first; the others are found by the shape of one array.
    """

    __slots__ = ("_calls", "_latest")

    def __init__(self) -> None:
        self._latest: dict[object, SeenCall] = {}
        self._calls: dict[object, tuple[SeenCall, ...]] = {}

    def repeat(
        self, key: object, arrays: tuple[Any, ...], like: Any
    ) -> tuple[SeenCall, Any] | None:
        """The call of `key` on these arrays, launched, and its `out`, which is the last of them;
        None if it must be checked. `like` is x, or the array that has the batch.
        """
        try:
            call = self._latest.get(key)
        except TypeError:  # an argument that cannot be hashed, so none that is right
            return None
        if call is None:
            return None
        repeated = call.launch(arrays)
        if repeated is None:
            shape = getattr(like, "shape", None)
            others = self._calls.get((key, shape), ()) if isinstance(shape, tuple) else ()
            for other in others:
                if other is not call and (repeated := other.launch(arrays)) is not None:
                    self._latest[key] = other
                    break
        return repeated

    def add(self, key: object, like: Any, call: SeenCall) -> None:
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
            self._latest.clear()
        self._latest[key] = call
        key = key, like.shape
        self._calls[key] = (call, *self._calls.get(key, ()))[:MOST_KINDS]


class Seen(NamedTuple):
    """Where to remember a call: under which key, and the arrays that may be others next time."""

    calls: SeenCalls
    key: object
    like: Any
    arrays: dict[str, Any]  # the caller's own, in the order of the calls to come
    query_len: int | None = None

    def add(
        self,
        plan: Plan,
        views: dict[str, View | None],
        vectors: Iterable[str] = (),
        before: Sequence[Plan] = (),
    ) -> None:
        """Remembers the call that passed its checks; the plan's record points to all `views`.

        Plans in `before` are launched first; their records may lack some of the arrays.
        """
        kinds = kinds_of([array for array in self.arrays.values() if array is not None])
        if kinds is not None and all(plan.grid):
            call = SeenCall([*before, plan], views, self.arrays, kinds, vectors, self.query_len)
            self.calls.add(self.key, self.like, call)


class BoundCall:
    """A step on fixed arrays: calling it launches the same work again.

    Made by :meth:`LayerStack.bind`. The call takes no arguments, works on the caller's stream at
    that time, allocates nothing and returns `out`. It holds the arrays; write new tokens into them
    in place. Their memory must stay where it is: no ``resize_`` or ``set_`` of a bound tensor.
    """

    __slots__ = ("_after", "_arrays", "_pool", "_step", "out")

    def __init__(
        self,
        pool: PlanPool | None,
        step: Callable[[], Any],
        arrays: object,
        out: Any,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._pool, self._step, self._after = pool, step, after
        self._arrays, self.out = arrays, out

    def __call__(self) -> Any:
        if self._pool is None or everywhere() or not self._pool.launch():
            return self._step()
        if self._after is not None:
            self._after()
        return self.out
