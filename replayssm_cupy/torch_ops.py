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
``stack_step``              :meth:`LayerStack.step`, returns out; ``.out`` writes       the stack
                            ``out=``
``layer_step``              :meth:`BoundLayer.step`, returns out; ``.out`` writes       the stack
                            ``out``
``stack_advance``           :meth:`LayerStack.advance`                                  the stack
``stack_materialize``       :meth:`LayerStack.materialize`                              the stack
``stack_reset``             :meth:`LayerStack.reset`                                    the stack
==========================  ==========================================================  ==========

Arguments are named and shaped as in the functions. The ``stack_*`` operators take the number and
the anchor of a :class:`StackHandle`, whose methods call them, instead of lists of tensors, and
``layer_step`` those of a :class:`LayerHandle`, which holds a layer's weights, slots and options.
The dispatcher takes its time for every argument, more than the rest of a step takes on the host.
So where no mode, tracer, transform or profiler watches and no result needs a derivative, methods
are the stack's own, and ``stack_step``, ``layer_step`` and ``stack_advance`` leave it out too if
they are called by the name of an overload, as compiled code does. ``layer_step.out`` is the
cheapest step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import ops
from .arrays import dtype_name
from .bound_layer import BoundLayer
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

    The methods are those of the stack: called eagerly they are its own, without the time that the
    dispatcher takes; where a compiler, a tracer or a dispatch mode watches they are operators.

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
        _stacks[self.number] = weakref.ref(self.stack, partial(_stacks.pop, self.number))

    def bind_layer(
        self,
        layer: int,
        A: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        **options: Any,
    ) -> LayerHandle:
        """A layer with its weights, slots and options, :meth:`LayerStack.bind_layer`.

        Call it before compiled code runs, which can name the handle that it returns.
        """
        return LayerHandle(self.stack.bind_layer(layer, A, D, dt_bias, **options), self.anchor)

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
        *,
        dt_softplus: bool = True,
        slots: Tensor | None = None,
        pad_slot_id: int = -1,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        force_flush: Tensor | None = None,
        out: Tensor | None = None,
        enable_pdl: bool = False,
        cb_scaled: Tensor | None = None,
        cumAdt_vec: Tensor | None = None,
        cb_old: Tensor | None = None,
        algorithm: str = "auto",
    ) -> Tensor:
        """One step of a layer, :meth:`LayerStack.step`; returns `out`, a new tensor if None."""
        if not _watched(x):
            return self.stack.step(
                layer, x, dt, A, B, C, D, z, dt_bias, dt_softplus=dt_softplus, slots=slots,
                pad_slot_id=pad_slot_id, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                force_flush=force_flush, out=out, enable_pdl=enable_pdl, cb_scaled=cb_scaled,
                cumAdt_vec=cumAdt_vec, cb_old=cb_old, algorithm=algorithm,
            )  # fmt: skip
        given = (
            self.number, self.anchor, layer, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots,
            pad_slot_id, cu_seqlens, max_seqlen, force_flush, enable_pdl, cb_scaled, cumAdt_vec,
            cb_old, algorithm,
        )  # fmt: skip
        if out is None:
            return torch.ops.replayssm.stack_step.default(*given)
        torch.ops.replayssm.stack_step.out(*given, out=out)
        return out

    def advance(
        self,
        slots: Tensor | None,
        num_accepted: Tensor,
        query_len: int | None = None,
        query_lens: Tensor | None = None,
        *,
        reset: Tensor | None = None,
        force_flush: Tensor | None = None,
        pad_slot_id: int = -1,
    ) -> None:
        """Moves the cursors, :meth:`LayerStack.advance`; the length is an int or a tensor."""
        if _watched(num_accepted):
            torch.ops.replayssm.stack_advance.default(
                self.number, self.anchor, slots, num_accepted, query_len, query_lens, reset=reset,
                force_flush=force_flush, pad_slot_id=pad_slot_id,
            )  # fmt: skip
        else:
            self.stack.advance(
                slots, num_accepted, _lengths(query_len, query_lens), reset=reset,
                force_flush=force_flush, pad_slot_id=pad_slot_id,
            )  # fmt: skip

    def materialize(
        self, src_slots: Tensor, dst_slots: Tensor, prefix_len: Tensor, pad_slot_id: int = -1
    ) -> None:
        """Snapshots, :meth:`LayerStack.materialize`. ``stack.refresh(A)`` comes first.

        It is what the pointer tables and the layers' A are read by; compiled code does not.
        """
        given = src_slots, dst_slots, prefix_len
        if _watched(prefix_len):
            torch.ops.replayssm.stack_materialize.default(
                self.number, self.anchor, *given, pad_slot_id=pad_slot_id
            )
        else:
            self.stack.materialize(*given, pad_slot_id=pad_slot_id)

    def reset(self, slots: Tensor | None = None, pad_slot_id: int = -1) -> None:
        """Empties slots, :meth:`LayerStack.reset`."""
        if _watched(self.anchor if slots is None else slots):
            torch.ops.replayssm.stack_reset.default(
                self.number, self.anchor, slots, pad_slot_id=pad_slot_id
            )
        else:
            self.stack.reset(slots, pad_slot_id)


@dataclass(frozen=True, eq=False)
class LayerHandle:
    """A layer that compiled code can name; of :meth:`StackHandle.bind_layer`, whose anchor it has.

    Keep it as long as compiled code uses it.
    """

    bound: BoundLayer
    anchor: Tensor = field(repr=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", next(_numbers))
        _layers[self.number] = weakref.ref(self.bound, partial(_layers.pop, self.number))

    def step(
        self,
        x: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        z: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One step, :meth:`BoundLayer.step`; returns `out`, a new tensor if None."""
        if not _watched(x):
            return self.bound.step(x, dt, B, C, z, out)
        given = self.number, self.anchor, x, dt, B, C, z
        if out is None:
            return torch.ops.replayssm.layer_step.default(*given)
        torch.ops.replayssm.layer_step.out(*given, out)
        return out


def _watched(tensor: Tensor) -> bool:
    """Whether calls must be operators, which compilers, tracers and dispatch modes see."""
    return _compiled() or _modes() > 0 or _traced() or type(tensor) is not torch.Tensor


_compiled = torch.compiler.is_compiling
_modes, _traced = torch._C._len_torch_dispatch_stack, torch._C._is_tracing


_numbers = itertools.count()
_stacks: dict[int, weakref.ref[LayerStack]] = {}
_layers: dict[int, weakref.ref[BoundLayer]] = {}


def _stack(number: int) -> LayerStack:
    found = _stacks.get(number)
    stack = None if found is None else found()
    if stack is None:
        raise ValueError(f"stack: expected the number of a live StackHandle, got {number}")
    return stack


def _layer(number: int) -> BoundLayer:
    found = _layers.get(number)
    layer = None if found is None else found()
    if layer is None:
        raise ValueError(f"layer: expected the number of a live LayerHandle, got {number}")
    return layer


# The schemas: what is changed in place is marked (a!). Each has a version that runs, and one that
# tells the shapes alone, for tracing.

_TOKENS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C"
_WEIGHTS = "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None"
_REPLAY = f"""(Tensor(a!) state, Tensor(b!) x_cache, Tensor(c!) B_cache, Tensor(d!) dt_cache,
Tensor ring_start, Tensor prev_num_accepted_tokens, {_TOKENS}, *, {_WEIGHTS},
bool dt_softplus=False, Tensor? state_batch_indices=None, int pad_slot_id=-1,
Tensor(e!)? state_scale=None, Tensor? rand_seed=None, int philox_rounds=10,
Tensor? cu_seqlens=None, int? max_seqlen=None, bool enable_pdl=False, int? max_window=None,
Tensor? force_flush=None, str pad_output="zero", Tensor(g!)? cb_scaled=None,
Tensor(h!)? cumAdt_vec=None, Tensor(i!)? cb_old=None, str algorithm="auto",
Tensor(j!)? state_copy=None"""
_PLAIN = f"""(Tensor(a!) state, {_TOKENS}, {_WEIGHTS}, bool dt_softplus=False,
Tensor? state_batch_indices=None, int pad_slot_id=-1, *, Tensor(b!)? state_scale=None,
Tensor? rand_seed=None, int philox_rounds=10, str pad_output="zero\""""
_STACK = "int stack, Tensor(a!) anchor"
_STEP = f"""({_STACK}, int layer, {_TOKENS}, {_WEIGHTS}, bool dt_softplus=True,
Tensor? slots=None, int pad_slot_id=-1, Tensor? cu_seqlens=None, int? max_seqlen=None,
Tensor? force_flush=None, bool enable_pdl=False, Tensor(b!)? cb_scaled=None,
Tensor(c!)? cumAdt_vec=None, Tensor(d!)? cb_old=None, str algorithm="auto\""""
_LAYER_STEP = "(int layer, Tensor(a!) anchor, Tensor x, Tensor dt, Tensor B, Tensor C, Tensor? z"
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


def _stack_step(
    stack: int,
    anchor: Tensor,
    layer: int,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    slots: Tensor | None = None,
    pad_slot_id: int = -1,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    force_flush: Tensor | None = None,
    enable_pdl: bool = False,
    cb_scaled: Tensor | None = None,
    cumAdt_vec: Tensor | None = None,
    cb_old: Tensor | None = None,
    algorithm: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    return _stack(stack).step(
        layer, x, dt, A, B, C, D, z, dt_bias, dt_softplus=dt_softplus, slots=slots,
        pad_slot_id=pad_slot_id, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
        force_flush=force_flush, out=out, enable_pdl=enable_pdl, cb_scaled=cb_scaled,
        cumAdt_vec=cumAdt_vec, cb_old=cb_old, algorithm=algorithm,
    )  # fmt: skip


def _layer_step(
    layer: int, anchor: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None
) -> Tensor:
    return _layer(layer).step(x, dt, B, C, z)


def _layer_step_out(
    layer: int,
    anchor: Tensor,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    out: Tensor,
) -> None:
    _layer(layer).step(x, dt, B, C, z, out)


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
        (f"stack_step{_STEP}) -> Tensor", _stack_step, lambda *a, **_: _like_x(a[3])),
        (f"stack_step.out{_STEP}, *, Tensor(e!) out) -> ()", _without_result(_stack_step),
         _nothing),
        (f"layer_step{_LAYER_STEP}=None) -> Tensor", _layer_step, lambda *a: _like_x(a[2])),
        (f"layer_step.out{_LAYER_STEP}, Tensor(b!) out) -> ()", _layer_step_out, _nothing),
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


class _Direct(torch._ops.OpOverload):  # type: ignore[misc]
    """An overload that runs its function at once, which is what the dispatcher would come to.

    The dispatcher gets calls with other than plain tensors that have memory, and those that
    something watches, transforms or differentiates.
    """

    direct: Callable[..., Any]
    place: int  # among the arguments, of the tensor that is looked at
    derives: bool  # a tensor is returned, which may belong to a graph of autograd

    def __call__(self, /, *given: Any, **named: Any) -> Any:
        if (
            len(given) <= self.place
            or type(tensor := given[self.place]) is not torch.Tensor
            or tensor.is_meta
            or _modes() > 0
            or _function_modes() > 0
            or _transform() is not None
            or _traced()
            or _profiled()
            or (self.derives and _grad_mode() and _require_grad(given, named))
        ):
            return super().__call__(*given, **named)
        return self.direct(*given, **named)


_grad_mode = torch.is_grad_enabled
try:
    _function_modes = torch._C._len_torch_function_stack
    _transform = torch._C._functorch.peek_interpreter_stack
    _profiled = torch._C._autograd._profiler_enabled
    _knows_who_watches = True
except AttributeError:  # another version of torch
    _knows_who_watches = False


def _require_grad(given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    for argument in (*given, *named.values()) if named else given:  # any() takes twice as long
        if getattr(argument, "requires_grad", False):
            return True
    return False


def _make_direct(
    overload: Any, direct: Callable[..., Any], place: int, derives: bool = False
) -> None:
    if _knows_who_watches:
        overload.direct, overload.place, overload.derives = direct, place, derives
        overload.__class__ = _Direct


_library = _operators()  # the operators exist as long as this does
_make_direct(torch.ops.replayssm.layer_step.default, _layer_step, 2, derives=True)
_make_direct(torch.ops.replayssm.layer_step.out, _layer_step_out, 2)
_make_direct(torch.ops.replayssm.stack_step.default, _stack_step, 3, derives=True)
_make_direct(torch.ops.replayssm.stack_step.out, _without_result(_stack_step), 3)
_make_direct(torch.ops.replayssm.stack_advance.default, _stack_advance, 3)
