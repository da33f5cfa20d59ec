"""What is fixed when a kernel is compiled: one frozen dataclass per kernel.

A key is the compile cache's key, the list of legal values, and the only place that spells the
kernel's C++ name expression. Everything else is a run-time value in the parameter record, but for
instances that know the layout of their arrays (:class:`LayoutKey`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

SCALED_DTYPES = ("int8", "float8_e4m3fn")
STATE_DTYPES = ("float32", "bfloat16", "float16", *SCALED_DTYPES)
# A state in float16 that steps read a smaller copy of: the dtype of the copy's array.
COPY_DTYPES = {"float16+fp8": "float8_e4m3fn", "float16+nvfp4": "uint8"}
STATE_FORMATS = (*STATE_DTYPES, *COPY_DTYPES)
SCALED_FORMATS = (*SCALED_DTYPES, *COPY_DTYPES)  # with a float32 scale for each row
ACTIVATION_DTYPES = ("bfloat16", "float16")
PLAIN_ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (64, 80, 96, 128)
DSTATES = (64, 128, 256)
MAX_TOKENS = 16
MAX_WINDOW = 16
TOKENS_PER_TILE = 8
MAX_BLOCKS, MAX_BLOCKS_Y = 2**31 - 1, 2**16 - 1  # of a launch along x and y
TOKENS_OF_FORMS = 1, 2, 3, 9  # the least tokens of a step that takes another kernel

_CPP = {
    "float32": "float",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int8": "int8",
    "float8_e4m3fn": "e4m3",
    "float16+fp8": "e4m3",
    "float16+nvfp4": "e2m1",
}
# Of a number that a step reads, block scales included.
_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "float8_e4m3fn": 8,
    "float16+fp8": 8,
    "float16+nvfp4": 4.5,
}
SLAB = 16  # rows p of a head in one tile of state


def _written(state_format: str, others: str) -> str:
    """Template arguments of a kernel that writes states: the state's type, then a copy's."""
    if state_format in COPY_DTYPES:
        return f"fp16, {others}, {_CPP[state_format]}"
    return f"{_CPP[state_format]}, {others}"


def bytes_of_slab(state_format: str, dstate: int) -> int:
    """Of 16 rows of state as a step reads them, without the scales of the rows."""
    return int(SLAB * dstate * _BITS[state_format] / 8)


@dataclass(frozen=True, slots=True)
class CheckpointingSsuKey:
    """A replay decode step: state and activation types, dstate, and tiles of eight tokens."""

    state_dtype: str
    activation_dtype: str
    dstate: int
    token_tiles: int
    source: ClassVar[str] = "checkpointing_ssu.cu"
    kernel: ClassVar[str] = "checkpointing_ssu"

    @property
    def name_expression(self) -> str:
        types = f"{_CPP[self.state_dtype]}, {_CPP[self.activation_dtype]}"
        checkpoint = ", fp16" if self.state_dtype in COPY_DTYPES else ""
        return f"{self.kernel}<{types}, {self.dstate}, {self.token_tiles}{checkpoint}>"

    @property
    def least_tokens(self) -> int:
        """Of a step that takes this kernel."""
        return TOKENS_PER_TILE * (self.token_tiles - 1) + 1


@dataclass(frozen=True, slots=True)
class SmallCheckpointingSsuKey(CheckpointingSsuKey):
    """The same step for few heads and one or two tokens, which are its `token_tiles`."""

    source: ClassVar[str] = "checkpointing_ssu_small.cu"
    kernel: ClassVar[str] = "checkpointing_ssu_small"

    @property
    def least_tokens(self) -> int:
        return self.token_tiles


@dataclass(frozen=True, slots=True)
class PlainCheckpointingSsuKey(SmallCheckpointingSsuKey):
    """That of one token whose step has nothing rare: see `kPlainFlags` in cuda/small.cuh."""

    @property
    def name_expression(self) -> str:
        types = f"{_CPP[self.state_dtype]}, {_CPP[self.activation_dtype]}"
        return f"{self.kernel}<{types}, {self.dstate}, {self.token_tiles}, true>"


@dataclass(frozen=True, slots=True)
class SlabCheckpointingSsuKey(CheckpointingSsuKey):
    """The step for few heads and several tokens, or on a state that has a copy."""

    source: ClassVar[str] = "checkpointing_ssu_slabs.cu"
    kernel: ClassVar[str] = "checkpointing_ssu_slabs"

    @property
    def least_tokens(self) -> int:
        if self.token_tiles > 1:
            return TOKENS_PER_TILE + 1
        return 1 if self.state_dtype in COPY_DTYPES else 3


@dataclass(frozen=True, slots=True)
class PreparedCheckpointingSsuKey(CheckpointingSsuKey):
    """The form for many heads as the second of two kernels: its weights come from scratch."""

    kernel: ClassVar[str] = "checkpointing_ssu_prepared"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a model whose arrays have no gaps between the parts of a slot, nor of a token.

    Their names are those of the record's fields.
    """

    nheads: int
    heads_per_group: int
    head_dim: int
    max_window: int
    ring_buffer_len: int

    def strides(self, dstate: int) -> dict[str, int]:
        """Of arrays and axes, in elements."""
        P, N, R = self.head_dim, dstate, self.ring_buffer_len
        return {
            "slots": 1, "ring_start": 1, "prev_num_accepted_tokens": 1,
            "dt_head": 1, "A": 1, "D": 1, "dt_bias": 1,
            "x_head": P, "out_head": P, "B_group": N, "C_group": N,
            "state_head": P * N, "state_scale_head": P,
            "x_cache_head": R * P, "x_cache_row": P,
            "B_cache_group": R * N, "B_cache_row": N,
            "dt_cache_head": R, "dt_cache_row": 1,
        }  # fmt: skip


# Of the elements of arrays whose types are known when a kernel is compiled, as is the state's.
_KNOWN_BYTES = {
    **dict.fromkeys(("ring_start", "prev_num_accepted_tokens", "state_scale", "dt_cache"), 4),
    **dict.fromkeys(("x", "B", "C", "x_cache", "B_cache"), 2),
}


@dataclass(frozen=True, slots=True)
class LayoutKey:
    """An instance of a decode kernel for one layout: sizes and strides are fixed, too."""

    key: CheckpointingSsuKey
    layout: Layout

    @property
    def source(self) -> str:
        return self.key.source

    @property
    def name_expression(self) -> str:
        return self.key.name_expression

    @property
    def known(self) -> dict[str, int]:
        """Fields of the record, and what they are."""
        known = {field.name: getattr(self.layout, field.name) for field in fields(self.layout)}
        known["inverse_pieces"] = -(-(1 << 16) // (self.layout.head_dim // 8))
        state = "float16" if self.key.state_dtype in COPY_DTYPES else self.key.state_dtype
        sizes = _KNOWN_BYTES | {"state": int(_BITS[state]) // 8}
        for name, stride in self.layout.strides(self.key.dstate).items():
            known[f"{name}_stride"] = stride
            array = name.removesuffix("_head").removesuffix("_group").removesuffix("_row")
            if array in sizes:
                known[f"{name}_bytes"] = stride * sizes[array]
        return known

    @property
    def definition(self) -> str:
        """REPLAYSSM_KNOWN of cuda/params.cuh."""
        members = [
            f"static constexpr {'int64_t' if name.endswith('_stride') else 'int'} {name} = {value};"
            for name, value in self.known.items()
        ]
        return " ".join(members)


@dataclass(frozen=True, slots=True)
class PrecomputeKey:
    """The first of two kernels, which makes the weights.

    Of the state it knows whether C is scaled for it (kScaledC): 8-bit or fp16, beside bfloat16.
    """

    scaled: bool
    activation_dtype: str
    dstate: int
    token_tiles: int
    source: ClassVar[str] = "precompute.cu"

    @property
    def name_expression(self) -> str:
        scaled, activation = str(self.scaled).lower(), _CPP[self.activation_dtype]
        return f"precompute<{scaled}, {activation}, {self.dstate}, {self.token_tiles}>"

    @property
    def least_tokens(self) -> int:
        return TOKENS_PER_TILE * (self.token_tiles - 1) + 1


def precompute_key(key: CheckpointingSsuKey) -> PrecomputeKey:
    """Of the kernel that makes the weights for this one."""
    half = key.state_dtype in ("float16", *SCALED_FORMATS)
    scaled = half and key.activation_dtype == "bfloat16"
    return PrecomputeKey(scaled, key.activation_dtype, key.dstate, key.token_tiles)


def replay_keys(
    state_dtype: str, activation_dtype: str, dstate: int, tokens: int
) -> list[CheckpointingSsuKey]:
    """The forms of a step of up to `tokens` tokens, the one for many heads first.

    That one needs more registers than there are for wide 8-bit states and for wide states with
    two tiles of tokens.
    """
    tiles = max(1, -(-tokens // TOKENS_PER_TILE))
    case = state_dtype, activation_dtype, dstate, tiles
    streams = dstate <= 128 or (tiles == 1 and state_dtype not in SCALED_FORMATS)
    small: CheckpointingSsuKey
    if state_dtype in COPY_DTYPES or tokens > 2:
        small = SlabCheckpointingSsuKey(*case)
    else:
        small = SmallCheckpointingSsuKey(*case[:3], max(tokens, 1))
    return [CheckpointingSsuKey(*case), small] if streams else [small]


def step_keys(
    state_dtype: str, activation_dtype: str, dstate: int, tokens: int
) -> list[CheckpointingSsuKey]:
    """All instances that a step of so many tokens may be, in one kernel."""
    keys = replay_keys(state_dtype, activation_dtype, dstate, tokens)
    plain = [plain_key(key) for key in keys if isinstance(key, SmallCheckpointingSsuKey)]
    return list(dict.fromkeys([*keys, *plain]))


def plain_key(key: SmallCheckpointingSsuKey) -> SmallCheckpointingSsuKey:
    """The instance for plain steps; that of two tokens is the same."""
    case = key.state_dtype, key.activation_dtype, key.dstate, key.token_tiles
    return PlainCheckpointingSsuKey(*case) if key.token_tiles == 1 else key


def two_kernel_key(
    state_dtype: str, activation_dtype: str, dstate: int, tokens: int
) -> PreparedCheckpointingSsuKey | None:
    """The second of the two kernels that do a step, which exists where the streaming form does."""
    key = replay_keys(state_dtype, activation_dtype, dstate, tokens)[0]
    if type(key) is not CheckpointingSsuKey:
        return None
    return PreparedCheckpointingSsuKey(state_dtype, activation_dtype, dstate, key.token_tiles)


@dataclass(frozen=True, slots=True)
class SelectiveStateUpdateKey:
    """The plain update: state and activation types and dstate."""

    state_dtype: str
    activation_dtype: str
    dstate: int
    source: ClassVar[str] = "selective_state_update.cu"

    @property
    def name_expression(self) -> str:
        types = f"{_CPP[self.state_dtype]}, {_CPP[self.activation_dtype]}"
        return f"selective_state_update<{types}, {self.dstate}>"


@dataclass(frozen=True, slots=True)
class AdvanceRingKey:
    """The cursor rule on the device; nothing is fixed at compile time."""

    source: ClassVar[str] = "cursors.cu"
    name_expression: ClassVar[str] = "advance_ring"


@dataclass(frozen=True, slots=True)
class BeginStepKey:
    """Cursors from positions, before a step; nothing is fixed at compile time."""

    source: ClassVar[str] = "positions.cu"
    name_expression: ClassVar[str] = "begin_step"


@dataclass(frozen=True, slots=True)
class ClearRingsKey:
    """Zero rings and positions; nothing is fixed at compile time."""

    source: ClassVar[str] = "positions.cu"
    name_expression: ClassVar[str] = "clear_rings"


@dataclass(frozen=True, slots=True)
class ResetSlotsKey:
    """Zero states and cursors; nothing is fixed at compile time."""

    source: ClassVar[str] = "slots.cu"
    name_expression: ClassVar[str] = "reset_slots"


@dataclass(frozen=True, slots=True)
class LoadStateKey:
    """A prefill's states into slots: the type stored and the type given."""

    state_dtype: str
    source_dtype: str
    source: ClassVar[str] = "slots.cu"

    @property
    def name_expression(self) -> str:
        return f"load_state<{_written(self.state_dtype, _CPP[self.source_dtype])}>"


@dataclass(frozen=True, slots=True)
class CheckStepKey:
    """Checked mode; nothing is fixed at compile time."""

    source: ClassVar[str] = "check.cu"
    name_expression: ClassVar[str] = "check_step"


@dataclass(frozen=True, slots=True)
class StampFoldsKey:
    """Checked mode: which slots a step folds; nothing is fixed at compile time."""

    source: ClassVar[str] = "check.cu"
    name_expression: ClassVar[str] = "stamp_folds"


@dataclass(frozen=True, slots=True)
class ForgetFoldsKey:
    """Checked mode: slots whose cursors have moved; nothing is fixed at compile time."""

    source: ClassVar[str] = "check.cu"
    name_expression: ClassVar[str] = "forget_folds"


@dataclass(frozen=True, slots=True)
class MaterializeKey:
    """States after a prefix of their rings: state and activation types and dstate."""

    state_dtype: str
    activation_dtype: str
    dstate: int
    source: ClassVar[str] = "materialize.cu"

    @property
    def name_expression(self) -> str:
        types = _written(self.state_dtype, f"{_CPP[self.activation_dtype]}, {self.dstate}")
        return f"materialize<{types}>"

    @property
    def resident_blocks(self) -> int:
        """Blocks of a multiprocessor, which its launch bounds name too."""
        wide = self.dstate > 128
        few_registers = self.state_dtype in ("bfloat16", "float16") or (
            self.state_dtype in ("int8", "float8_e4m3fn")
            and self.activation_dtype == "bfloat16"
            and not wide
        )
        return (4 if few_registers else 3) - wide


@dataclass(frozen=True, slots=True)
class PlanMaterializeKey:
    """Which prefixes to materialize; nothing is fixed at compile time."""

    source: ClassVar[str] = "plan_materialize.cu"
    name_expression: ClassVar[str] = "plan_materialize"


@dataclass(frozen=True, slots=True)
class CheckMaterializeKey:
    """Checked mode of snapshots; nothing is fixed at compile time."""

    source: ClassVar[str] = "check.cu"
    name_expression: ClassVar[str] = "check_materialize"


@dataclass(frozen=True, slots=True)
class CopySlotsKey:
    """Slots to slots, to images or from them; nothing is fixed at compile time."""

    source: ClassVar[str] = "copy_slots.cu"
    name_expression: ClassVar[str] = "copy_slots"


Key = (
    CheckpointingSsuKey
    | LayoutKey
    | PrecomputeKey
    | SelectiveStateUpdateKey
    | AdvanceRingKey
    | BeginStepKey
    | ClearRingsKey
    | ResetSlotsKey
    | LoadStateKey
    | CheckStepKey
    | StampFoldsKey
    | ForgetFoldsKey
    | MaterializeKey
    | PlanMaterializeKey
    | CheckMaterializeKey
    | CopySlotsKey
)


def every_key() -> Iterator[Key]:
    """All instances that exist, source file by source file."""
    forms: dict[Key, None] = {}
    firsts: dict[Key, None] = {}
    for case in itertools.product(STATE_FORMATS, ACTIVATION_DTYPES, DSTATES, TOKENS_OF_FORMS):
        forms |= dict.fromkeys(step_keys(*case))
        if second := two_kernel_key(*case):
            forms[second] = firsts[precompute_key(second)] = None
    yield from forms
    yield from firsts
    for plain in itertools.product(STATE_DTYPES, PLAIN_ACTIVATION_DTYPES, DSTATES):
        yield SelectiveStateUpdateKey(*plain)
    yield AdvanceRingKey()
    yield BeginStepKey()
    yield ClearRingsKey()
    yield ResetSlotsKey()
    yield CheckStepKey()
    yield StampFoldsKey()
    yield ForgetFoldsKey()
    for types in itertools.product(STATE_FORMATS, FLOAT_DTYPES):
        yield LoadStateKey(*types)
    for snapshot in itertools.product(STATE_FORMATS, ACTIVATION_DTYPES, DSTATES):
        yield MaterializeKey(*snapshot)
    yield PlanMaterializeKey()
    yield CheckMaterializeKey()
    yield CopySlotsKey()
