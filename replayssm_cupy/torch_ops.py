"""The library as PyTorch operators, for ``torch.compile``, CUDA graphs and exported models.

Importing this module defines ``torch.ops.replayssm.*``. They are the functions of the package with
schemas that name what is changed in place, and shape-only versions for tracing: no graph breaks,
and the compiler keeps calls in order. They run on torch's current stream and allocate from torch.

==========================  ==========================================================  ==========
operator                    does                                                        changes
==========================  ==========================================================  ==========
``checkpointing_ssu``       one ReplaySSM step, returns out; ``.out`` writes ``out=``   rings, state
``selective_state_update``  the plain update, returns out; ``.out`` writes ``out=``     state
``advance_ring``            moves the cursors after acceptance                          cursors
``stack_step``              :meth:`LayerStack.step`                                     the stack
``stack_advance``           :meth:`LayerStack.advance`                                  the stack
``stack_materialize``       :meth:`LayerStack.materialize`                              the stack
``stack_reset``             :meth:`LayerStack.reset`                                    the stack
==========================  ==========================================================  ==========

Arguments are named and shaped as in the functions. The ``stack_*`` operators take the number and
the anchor of a :class:`StackHandle`, whose methods call them, instead of lists of tensors.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import ops
from .arrays import dtype_name
from .formats import arrays_of, copy_shape, format_name
from .keys import SCALED_FORMATS
from .layer_stack import LayerStack
from .slots import advance_ring

Tensor = Any  # torch has no types where it is not installed


def layer_stack(
    num_layers: int,
    num_slots: int,
    nheads: int,
    head_dim: int,
    ngroups: int,
    dstate: int,
    *,
    max_window: int = 16,
    npredicted: int = 1,
    state_dtype: Any = "float32",
    activation_dtype: Any = "bfloat16",
    stochastic_rounding: bool | int = False,
    device: Any = None,
) -> LayerStack:
    """A :class:`LayerStack` over new torch tensors; arguments as of its constructor.

    `device` is a torch device or its name, torch's default device if None. States start as zeros,
    the cursors as 0, scales as 1.
    """
    state_format = format_name(state_dtype, "state_dtype")
    states_of, copies_of = arrays_of(state_format)
    tokens_of = getattr(torch, dtype_name(activation_dtype, "activation_dtype"))
    rows = max_window + npredicted
    layers = range(num_layers)

    def zeros(shape: tuple[int, ...], dtype: Any) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def empty(shape: tuple[int, ...], dtype: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    copies: list[Tensor] = []
    if copies_of is not None:
        inner = num_slots, nheads, *copy_shape(state_format, head_dim, dstate)
        copies = [zeros(inner, getattr(torch, copies_of)) for _ in layers]
    scaled = state_format in SCALED_FORMATS
    scales = [zeros((num_slots, nheads, head_dim), torch.float32) + 1 for _ in layers if scaled]
    return LayerStack.from_arrays(
        [zeros((num_slots, nheads, head_dim, dstate), getattr(torch, states_of)) for _ in layers],
        [empty((num_slots, nheads, rows, head_dim), tokens_of) for _ in layers],
        [empty((num_slots, ngroups, rows, dstate), tokens_of) for _ in layers],
        [empty((num_slots, nheads, rows), torch.float32) for _ in layers],
        zeros((num_slots,), torch.int32),
        zeros((num_slots,), torch.int32),
        npredicted=npredicted,
        max_window=max_window,
        state_scales=scales,
        state_copies=copies,
        stochastic_rounding=stochastic_rounding,
    )


@dataclass(frozen=True, eq=False)
class StackHandle:
    """A stack that compiled code can name: by a number, with an anchor to order its calls.

    Parameters
    ----------
    stack : a :class:`LayerStack` over torch tensors, of :func:`layer_stack` for instance.

    The operators change the stack's tensors behind the compiler's back. So each of them also
    takes `anchor`, one element that it declares to change and does not touch: a chain of such
    calls keeps its order, is neither merged nor dropped, and no state is ever copied. The stack's
    own tensors must not be read or written in the same compiled region by other means.
    Keep the handle as long as compiled code uses it; the number alone keeps nothing alive.

    Raises TypeError if the stack's arrays are not torch tensors.
    """

    stack: LayerStack
    number: int = field(init=False)
    anchor: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        state = self.stack.states[0]
        if not isinstance(state, torch.Tensor):
            got = type(state).__name__
            raise TypeError(f"stack: expected a LayerStack over torch tensors, got one of {got}")
        anchor = torch.zeros(1, dtype=torch.int32, device=state.device)
        # For CUDA graphs of torch.compile, which refuse changes of inputs that may move.
        torch._dynamo.mark_static_address(anchor)
        object.__setattr__(self, "number", next(_numbers))
        object.__setattr__(self, "anchor", anchor)
        _stacks[self.number] = self.stack

    def step(
        self,
        layer: int,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """One step of a layer: ``torch.ops.replayssm.stack_step``; returns out, like x.

        `options` are dt_softplus (True), slots, pad_slot_id, cu_seqlens, max_seqlen, force_flush.
        """
        return torch.ops.replayssm.stack_step(
            self.number, self.anchor, layer, x, dt, A, B, C, D, z, dt_bias, **options
        )

    def advance(self, slots: Tensor | None, num_accepted: Tensor, **options: Any) -> None:
        """Moves the cursors: ``torch.ops.replayssm.stack_advance``.

        `options` are query_len (int) or query_lens (tensor), reset, force_flush, pad_slot_id.
        """
        torch.ops.replayssm.stack_advance(self.number, self.anchor, slots, num_accepted, **options)

    def materialize(
        self, src_slots: Tensor, dst_slots: Tensor, prefix_len: Tensor, pad_slot_id: int = -1
    ) -> None:
        """Snapshots: ``torch.ops.replayssm.stack_materialize``. ``stack.refresh(A)`` comes first.

        It is what the pointer tables and the layers' A are read by; compiled code does not.
        """
        torch.ops.replayssm.stack_materialize(
            self.number, self.anchor, src_slots, dst_slots, prefix_len, pad_slot_id=pad_slot_id
        )

    def reset(self, slots: Tensor | None = None, pad_slot_id: int = -1) -> None:
        """Empties slots: ``torch.ops.replayssm.stack_reset``."""
        torch.ops.replayssm.stack_reset(self.number, self.anchor, slots, pad_slot_id=pad_slot_id)


_numbers = itertools.count()
_stacks: weakref.WeakValueDictionary[int, LayerStack] = weakref.WeakValueDictionary()


def _stack(number: int) -> LayerStack:
    stack = _stacks.get(number)
    if stack is None:
        raise ValueError(f"stack: expected the number of a live StackHandle, got {number}")
    return stack


# The schemas: what is changed in place is marked (a!). Each has a version that runs, and one that
# tells the shapes alone, for tracing.

_TOKENS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C"
_WEIGHTS = "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None"
_REPLAY = f"""(Tensor(a!) state, Tensor(b!) x_cache, Tensor(c!) B_cache, Tensor(d!) dt_cache,
Tensor ring_start, Tensor prev_num_accepted_tokens, {_TOKENS}, *, {_WEIGHTS},
bool dt_softplus=False, Tensor? state_batch_indices=None, int pad_slot_id=-1,
Tensor(e!)? state_scale=None, Tensor? rand_seed=None, int philox_rounds=10,
Tensor? cu_seqlens=None, int? max_seqlen=None, bool enable_pdl=False, int? max_window=None,
Tensor? force_flush=None, str pad_output="zero\""""
_PLAIN = f"""(Tensor(a!) state, {_TOKENS}, {_WEIGHTS}, bool dt_softplus=False,
Tensor? state_batch_indices=None, int pad_slot_id=-1, *, Tensor(b!)? state_scale=None,
Tensor? rand_seed=None, int philox_rounds=10, str pad_output="zero\""""
_STACK = "int stack, Tensor(a!) anchor"
_LENGTHS = "int? query_len=None, Tensor? query_lens=None"


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)

    return call


def _advance_ring(
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    num_accepted: Tensor,
    query_len: int | None = None,
    query_lens: Tensor | None = None,
    slots: Tensor | None = None,
    **options: Any,
) -> None:
    lengths = _lengths(query_len, query_lens)
    if lengths is None:
        raise ValueError("query_len: expected an int, or query_lens, got None")
    advance_ring(ring_start, prev_num_accepted_tokens, num_accepted, lengths, slots, **options)


def _lengths(query_len: int | None, query_lens: Tensor | None) -> Any:
    if query_len is not None and query_lens is not None:
        raise ValueError("query_len: expected None beside query_lens, got both")
    return query_len if query_lens is None else query_lens


def _stack_step(stack: int, anchor: Tensor, layer: int, *step: Any, **options: Any) -> Tensor:
    return _stack(stack).step(layer, *step, **options)


def _stack_advance(
    stack: int,
    anchor: Tensor,
    slots: Tensor | None,
    num_accepted: Tensor,
    query_len: int | None = None,
    query_lens: Tensor | None = None,
    **options: Any,
) -> None:
    _stack(stack).advance(slots, num_accepted, _lengths(query_len, query_lens), **options)


def _stack_materialize(stack: int, anchor: Tensor, *slots: Any, **options: Any) -> None:
    _stack(stack).materialize(*slots, **options)


def _stack_reset(stack: int, anchor: Tensor, slots: Tensor | None = None, **options: Any) -> None:
    _stack(stack).reset(slots, **options)


def _like_x(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


def _operators() -> Any:
    library = torch.library.Library("replayssm", "DEF")
    replay, plain = ops.checkpointing_ssu, ops.selective_state_update
    for schema, run, trace in (
        (f"checkpointing_ssu{_REPLAY}) -> Tensor", replay, lambda *a, **_: _like_x(a[6])),
        (f"checkpointing_ssu.out{_REPLAY}, Tensor(f!) out) -> ()", _without_result(replay),
         _nothing),
        (f"selective_state_update{_PLAIN}) -> Tensor", plain, lambda *a, **_: _like_x(a[1])),
        (f"selective_state_update.out{_PLAIN}, Tensor(c!) out) -> ()", _without_result(plain),
         _nothing),
        (f"""advance_ring(Tensor(a!) ring_start, Tensor(b!) prev_num_accepted_tokens,
         Tensor num_accepted, {_LENGTHS}, Tensor? slots=None, *, int max_window,
         int ring_buffer_len, Tensor? reset=None, Tensor? force_flush=None,
         Tensor(c!)? rand_seed=None, int pad_slot_id=-1) -> ()""", _advance_ring, _nothing),
        (f"""stack_step({_STACK}, int layer, {_TOKENS}, {_WEIGHTS}, *, bool dt_softplus=True,
         Tensor? slots=None, int pad_slot_id=-1, Tensor? cu_seqlens=None, int? max_seqlen=None,
         Tensor? force_flush=None) -> Tensor""", _stack_step, lambda *a, **_: _like_x(a[3])),
        (f"""stack_advance({_STACK}, Tensor? slots, Tensor num_accepted, {_LENGTHS}, *,
         Tensor? reset=None, Tensor? force_flush=None, int pad_slot_id=-1) -> ()""",
         _stack_advance, _nothing),
        (f"""stack_materialize({_STACK}, Tensor src_slots, Tensor dst_slots, Tensor prefix_len, *,
         int pad_slot_id=-1) -> ()""", _stack_materialize, _nothing),
        (f"stack_reset({_STACK}, Tensor? slots=None, *, int pad_slot_id=-1) -> ()",
         _stack_reset, _nothing),
    ):  # fmt: skip
        library.define(schema)
        name = schema.partition("(")[0]
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        library.impl(name, trace, "Meta")
    return library


_library = _operators()  # the operators exist as long as this does
