"""Calls that were seen before: arrays of the same kinds go into the same plan, and it is launched.

The first call of a kind looks at every array (`decode_checks`, `checks`); the next ones only ask
whether anything but the addresses has changed. Both end in the same launch.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .arrays import Kinds, View, allocator, itemsize, kinds_of, stream_reader
from .checked import everywhere
from .checks import ALIGNMENT
from .plan import Plan, launchers

MOST_CALLS = 4096  # kept of one stack or function
MOST_KINDS = 4  # of arrays that are remembered of one call


class PlanPool:
    """Copies of a plan, so that threads may launch it at the same time."""

    __slots__ = ("_idle", "_plan", "kind", "stream")

    def __init__(self, plan: Plan, like: View) -> None:
        self._plan = plan.copy()
        self._idle: list[Plan] = []
        self.kind = plan.device.kind
        self.stream = stream_reader(like)  # the caller's, who works with arrays such as `like`

    def take(self) -> Plan:
        """A copy that nobody else uses; hand it back when it is launched."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._plan.copy()

    def give_back(self, plan: Plan) -> None:
        self._idle.append(plan)

    def launch(self) -> bool:
        """Launches the plan as it is; False if its device has no launcher (any more)."""
        launcher = launchers.get(self.kind)
        if launcher is None:
            return False
        plan = self.take()
        launcher.launch(plan, self.stream())
        self.give_back(plan)
        return True


class SeenCall:
    """A call that passed its checks, to be repeated on other arrays of the same kinds.

    Parameters
    ----------
    plans : of the call, in order; pointers that are not among `names` stay as their records have
        them.
    views : of all arrays of the call.
    names : of the arrays that may be others next time, as the record and `views` have them.
    kinds : of these arrays.
    vectors : names of arrays that must be aligned to 16 bytes; the others to their elements.
    query_len : of the step, if all sequences have the same.
    """

    __slots__ = ("_kinds", "_launches", "_masks", "empty", "query_len")

    def __init__(
        self,
        plans: Sequence[Plan],
        views: dict[str, View | None],
        names: Sequence[str],
        kinds: Kinds,
        vectors: Iterable[str],
        query_len: int | None,
    ) -> None:
        self.query_len = query_len
        arrays = [view for name in names if (view := views[name]) is not None]
        self._launches = [
            (PlanPool(plan, arrays[0]), _runs(type(plan.record), names)) for plan in plans
        ]
        self._kinds = kinds
        wide = set(vectors)
        self._masks = [
            (ALIGNMENT if name in wide else itemsize(view.dtype)) - 1
            for name, view in zip(names, arrays, strict=True)
        ]
        out = views.get("out")
        self.empty: Callable[[], Any] | None = (
            None if out is None else allocator(out, out.shape, out.dtype, out.device)
        )

    def launch(self, arrays: Iterable[Any]) -> bool:
        """Launches on these arrays, leaving out every None; False, and nothing done, if they are
        not of the same kinds."""
        given = [array for array in arrays if array is not None]
        launcher = launchers.get(self._launches[0][0].kind)
        if launcher is None or not self._kinds.match(*given):
            return False
        pointers = [*map(self._kinds.address, given)]
        if not all(pointers) or any(map(operator.and_, pointers, self._masks)):
            return False
        for pool, runs in self._launches:
            plan = pool.take()
            record: Any = plan.record
            for pack, offset, first, last in runs:
                pack(record, offset, *pointers[first:last])
            launcher.launch(plan, pool.stream())
            pool.give_back(plan)
        return True


def _runs(
    record: type[Any], names: Sequence[str]
) -> list[tuple[Callable[..., None], int, int, int]]:
    """Those of the pointers `names` that follow one another in a record: how to pack them, where,
    and which."""
    places = [(i, getattr(record, n).offset) for i, n in enumerate(names) if hasattr(record, n)]
    runs = []
    first = 0
    for end in range(1, len(places) + 1):
        index, offset = places[end - 1]
        if end == len(places) or places[end] != (index + 1, offset + 8):
            start, where = places[first]
            pack = struct.Struct(f"{end - first}Q").pack_into
            runs.append((pack, where, start, index + 1))
            first = end
    return runs


class SeenCalls:
    """The calls of a function or a stack that were seen before.

    A key tells apart what the kinds of the arrays do not: options, and which arrays are None.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[object, tuple[SeenCall, ...]] = {}

    def repeat(
        self, key: object, arrays: Iterable[Any], out: Any = None
    ) -> tuple[SeenCall, Any] | None:
        """The call of `key` on these arrays, launched, and its `out`; None if it must be checked.

        An `out` that is None is allocated, where the call has one.
        """
        try:
            calls = self._calls.get(key, ())
        except TypeError:  # an argument that cannot be hashed, so none that is right
            return None
        for call in calls:
            y = call.empty() if out is None and call.empty is not None else out
            if call.launch((*arrays, y)):
                return call, y
        return None

    def add(self, key: object, call: SeenCall) -> None:
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        self._calls[key] = (call, *self._calls.get(key, ()))[:MOST_KINDS]


class Seen(NamedTuple):
    """Where to remember a call: under which key, and the arrays that may be others next time."""

    calls: SeenCalls
    key: object
    arrays: dict[str, Any]  # the caller's own
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
        given = {name: array for name, array in self.arrays.items() if array is not None}
        kinds = kinds_of([*given.values()])
        if kinds is not None and all(plan.grid):
            call = SeenCall([*before, plan], views, [*given], kinds, vectors, self.query_len)
            self.calls.add(self.key, call)


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
