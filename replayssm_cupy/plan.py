"""A ready launch: key, grid, block and the kernel's parameter record. The only file that launches.

The records mirror the structs of ``cuda/params.cuh`` field by field; a test compares the two.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from . import compiler, driver
from .arrays import Device, device_guard
from .errors import ReplaySSMError
from .keys import MAX_BLOCKS, MAX_BLOCKS_Y, Key, Layout

FLOAT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
INDEX_TYPES = {"int32": 0, "int64": 1}
MAX_RESET_LAYERS = 128
SLOT_ARRAYS = 6  # state, copy, scale, x, B and dt rings
RINGS = 3  # x, B and dt
DEFAULT_SHARED_BYTES = 48 << 10  # more of it a kernel must be allowed to take
PDL_CAPABILITY = 90  # programmatic dependent launch exists from here on


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


_TOKEN_STRIDES = """
    x_batch_stride x_token_stride x_head_stride dt_batch_stride dt_token_stride dt_head_stride
    A_stride B_batch_stride B_token_stride B_group_stride C_batch_stride C_token_stride
    C_group_stride D_stride z_batch_stride z_token_stride z_head_stride dt_bias_stride
    out_batch_stride out_token_stride out_head_stride slots_stride"""
_TOKEN_COUNTS = "num_slots batch npredicted nheads heads_per_group head_dim"
_TOKEN_TYPES = """slots_type dt_type A_type D_type dt_bias_type out_type dt_softplus zero_padding
    philox_rounds layer"""


class CheckpointingSsuParams(ctypes.Structure):
    """Pointers, strides in elements, counts and run-time types of ``checkpointing_ssu``."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "slots"),
        *_fields(ctypes.c_int32, "flags num_slots"),
        *_fields(ctypes.c_void_p, "state"),
        *_fields(ctypes.c_int32, "state_slot_bytes pad_slot"),
        *_fields(ctypes.c_void_p, "x_cache"),
        *_fields(ctypes.c_int32, "rows_of_block state_warps"),
        *_fields(ctypes.c_void_p, "B B_cache"),
        *_fields(ctypes.c_int32, "B_sequence_bytes B_cache_slot_bytes"),
        *_fields(ctypes.c_void_p, "dt_cache"),
        *_fields(ctypes.c_int32, "dt_cache_slot_bytes x_cache_slot_bytes"),
        *_fields(ctypes.c_void_p, "ring_start prev_num_accepted_tokens C"),
        *_fields(ctypes.c_int32, "C_sequence_bytes x_sequence_bytes"),
        *_fields(ctypes.c_void_p, "x out"),
        *_fields(
            ctypes.c_int32,
            """out_sequence_bytes out_head_bytes out_item_bytes threads last_row
            inverse_heads_per_group""",
        ),
        *_fields(ctypes.c_void_p, "state_scale"),
        *_fields(ctypes.c_int32, "state_scale_slot_bytes zero_padding"),
        *_fields(ctypes.c_void_p, "dt dt_bias A D"),
        *_fields(
            ctypes.c_int32,
            """dt_sequence_bytes slots_bytes dt_head_bytes dt_bias_bytes A_bytes D_bytes dt_type
            dt_bias_type A_type D_type B_group_bytes B_cache_group_bytes B_token_bytes
            B_cache_row_bytes C_group_bytes C_token_bytes x_head_bytes x_token_bytes
            state_head_bytes state_scale_head_bytes x_cache_head_bytes x_cache_row_bytes
            dt_token_bytes dt_cache_head_bytes dt_cache_row_bytes out_token_bytes
            ring_start_bytes prev_num_accepted_tokens_bytes heads_per_group head_dim max_window
            ring_buffer_len npredicted z_sequence_bytes z_head_bytes z_token_bytes""",
        ),
        *_fields(ctypes.c_void_p, "z cu_seqlens"),
        *_fields(
            ctypes.c_int64,
            """slots_stride pad_slot_id C_batch_stride C_token_stride C_group_stride x_batch_stride
            x_token_stride x_head_stride state_slot_stride state_head_stride
            state_scale_slot_stride state_scale_head_stride x_cache_slot_stride
            x_cache_head_stride x_cache_row_stride out_batch_stride out_token_stride
            out_head_stride dt_batch_stride dt_token_stride dt_head_stride dt_bias_stride
            A_stride D_stride B_batch_stride B_token_stride B_group_stride B_cache_slot_stride
            B_cache_group_stride B_cache_row_stride dt_cache_slot_stride dt_cache_head_stride
            dt_cache_row_stride ring_start_stride prev_num_accepted_tokens_stride z_batch_stride
            z_token_stride z_head_stride""",
        ),
        *_fields(ctypes.c_void_p, "force_flush"),
        *_fields(ctypes.c_int64, "force_flush_stride"),
        *_fields(ctypes.c_int32, "slots_type out_type starts_early dt_softplus"),
        *_fields(ctypes.c_void_p, "rand_seed"),
        *_fields(ctypes.c_int32, "philox_rounds layer"),
        *_fields(ctypes.c_void_p, "state_copy"),
        *_fields(ctypes.c_int64, "state_copy_slot_stride state_copy_head_stride"),
        *_fields(ctypes.c_void_p, "events"),
        *_fields(ctypes.c_int64, "events_stride"),
        *_fields(ctypes.c_void_p, "tickets cb_scaled cumAdt_vec cb_old"),
        *_fields(
            ctypes.c_int64,
            """inverse_items_of_sequence inverse_items_of_group inverse_flushes_of_sequence
            inverse_flushes_of_group""",
        ),
        *_fields(
            ctypes.c_int32,
            """heads_of_item items_of_sequence items_of_group heads_of_flush flushes_of_sequence
            flushes_of_group inverse_pieces nheads batch most_listed bytes_of_list
            bytes_of_share at_group at_head at_outputs at_products at_scales_of_C at_dt
            at_weights at_scales at_cursors cb_scaled_words cumAdt_vec_words cb_old_words
            shared_items appends_late early_sequences tight_rows""",
        ),
    ]


class SelectiveStateUpdateParams(ctypes.Structure):
    """Pointers, strides in elements, counts and run-time types of ``selective_state_update``."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "state state_scale x dt A B C D z dt_bias slots rand_seed out"),
        *_fields(
            ctypes.c_int64,
            "state_slot_stride state_head_stride state_scale_slot_stride state_scale_head_stride"
            + _TOKEN_STRIDES
            + " pad_slot_id",
        ),
        *_fields(ctypes.c_int32, f"{_TOKEN_COUNTS} {_TOKEN_TYPES}"),
    ]


class AdvanceRingParams(ctypes.Structure):
    """Pointers, strides in elements and counts of ``advance_ring``."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            """ring_start prev_num_accepted_tokens num_accepted query_lens slots reset force_flush
            rand_seed""",
        ),
        *_fields(
            ctypes.c_int64,
            """ring_start_stride prev_num_accepted_tokens_stride num_accepted_stride
            query_lens_stride slots_stride reset_stride force_flush_stride pad_slot_id""",
        ),
        *_fields(
            ctypes.c_int32,
            """num_slots batch npredicted max_window ring_buffer_len
            num_accepted_type query_lens_type slots_type""",
        ),
    ]


class BeginStepParams(ctypes.Structure):
    """Positions, what follows from them, strides in elements and counts of ``begin_step``."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            """positions slots num_accepted cu_seqlens ring_start prev_num_accepted_tokens events
            rand_seed""",
        ),
        *_fields(
            ctypes.c_int64,
            """positions_slot_stride positions_word_stride slots_stride num_accepted_stride
            pad_slot_id seed""",
        ),
        *_fields(
            ctypes.c_int32,
            """num_slots batch npredicted max_window ring_buffer_len words
            slots_type num_accepted_type""",
        ),
    ]


class ClearRingsParams(ctypes.Structure):
    """Rings, positions, strides in words of four bytes and counts of ``clear_rings``."""

    _fields_ = [
        ("rings", ctypes.c_void_p * RINGS),
        ("ring_slot_strides", ctypes.c_int64 * RINGS),
        ("ring_head_strides", ctypes.c_int64 * RINGS),
        *_fields(ctypes.c_void_p, "positions slots"),
        *_fields(
            ctypes.c_int64,
            "positions_slot_stride positions_word_stride slots_stride pad_slot_id",
        ),
        ("heads", ctypes.c_int32 * RINGS),
        ("words_of_head", ctypes.c_int32 * RINGS),
        *_fields(ctypes.c_int32, "num_slots batch words slots_type"),
    ]


class ResetSlotsParams(ctypes.Structure):
    """The table of states, the cursors and the counts of ``reset_slots``."""

    _fields_ = [
        ("state_scales", ctypes.c_void_p * MAX_RESET_LAYERS),
        ("state_scale_slot_strides", ctypes.c_int64 * MAX_RESET_LAYERS),
        ("state_scale_head_strides", ctypes.c_int64 * MAX_RESET_LAYERS),
        ("states", ctypes.c_void_p * MAX_RESET_LAYERS),
        ("state_slot_strides", ctypes.c_int64 * MAX_RESET_LAYERS),
        ("state_head_strides", ctypes.c_int64 * MAX_RESET_LAYERS),
        *_fields(ctypes.c_void_p, "ring_start prev_num_accepted_tokens slots"),
        *_fields(
            ctypes.c_int64,
            "ring_start_stride prev_num_accepted_tokens_stride slots_stride pad_slot_id",
        ),
        *_fields(ctypes.c_int32, "num_slots batch nheads head_dim vectors_per_head slots_type"),
    ]


class LoadStateParams(ctypes.Structure):
    """Pointers, strides in elements and counts of ``load_state``."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "state state_copy state_scale source slots"),
        *_fields(
            ctypes.c_int64,
            """state_slot_stride state_head_stride state_copy_slot_stride state_copy_head_stride
            state_scale_slot_stride state_scale_head_stride source_batch_stride source_head_stride
            slots_stride pad_slot_id seed""",
        ),
        *_fields(ctypes.c_int32, "num_slots batch nheads head_dim dstate slots_type philox_rounds"),
    ]


class MaterializeParams(ctypes.Structure):
    """Tables, metadata, strides in elements and counts of ``materialize``."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            """state_ptrs state_slot_strides x_cache_ptrs x_cache_slot_strides B_cache_ptrs
            B_cache_slot_strides dt_cache_ptrs dt_cache_slot_strides A_ptrs state_scale_ptrs
            state_scale_slot_strides state_copy_ptrs state_copy_slot_strides src_slots dst_slots
            ring_start replay_prefix_len active_request_indices rand_seed""",
        ),
        *_fields(
            ctypes.c_int64,
            """state_head_stride state_scale_head_stride state_copy_head_stride
            x_cache_head_stride x_cache_row_stride B_cache_group_stride B_cache_row_stride
            dt_cache_head_stride dt_cache_row_stride A_stride src_slots_layer_stride
            src_slots_batch_stride dst_slots_layer_stride dst_slots_batch_stride ring_start_stride
            replay_prefix_len_stride active_request_indices_stride pad_slot_id num_slots""",
        ),
        *_fields(
            ctypes.c_int32,
            """layers batch nheads heads_per_group head_dim max_window ring_buffer_len
            src_slots_type dst_slots_type A_type philox_rounds""",
        ),
    ]


class PlanMaterializeParams(ctypes.Structure):
    """Cursors, slots, lengths and counts of ``plan_materialize``."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            """ring_start prev_num_accepted_tokens src_slots dst_slots prefix_len committed_lens
            num_accepted boundaries planned_ring_start replay_prefix_len
            active_request_indices""",
        ),
        *_fields(
            ctypes.c_int64,
            """ring_start_stride prev_num_accepted_tokens_stride src_slots_stride dst_slots_stride
            prefix_len_stride committed_lens_stride num_accepted_stride boundaries_stride
            planned_ring_start_stride replay_prefix_len_stride active_request_indices_stride
            block_size pad_slot_id""",
        ),
        *_fields(
            ctypes.c_int32,
            """num_slots batch max_window ring_buffer_len src_slots_type dst_slots_type
            prefix_len_type committed_lens_type num_accepted_type boundaries_type move_cursors""",
        ),
    ]


class CopySlotsParams(ctypes.Structure):
    """Tables, geometry, slots and counts of ``copy_slots``."""

    _fields_ = [
        *_fields(ctypes.c_void_p * SLOT_ARRAYS, "ptrs slot_strides"),
        *_fields(ctypes.c_int64 * SLOT_ARRAYS, "block_strides row_strides image_offsets"),
        *_fields(
            ctypes.c_void_p,
            "image image_live src_slots dst_slots ring_start prev_num_accepted_tokens",
        ),
        *_fields(
            ctypes.c_int64,
            """image_stride image_layer_stride src_slots_stride dst_slots_batch_stride
            dst_slots_copy_stride ring_start_stride prev_num_accepted_tokens_stride
            pad_slot_id""",
        ),
        *_fields(ctypes.c_int32 * SLOT_ARRAYS, "itemsizes blocks row_bytes is_ring wide"),
        *_fields(
            ctypes.c_int32,
            """num_slots batch copies layers max_window ring_buffer_len image_rows
            src_slots_type dst_slots_type""",
        ),
    ]


class CheckStepParams(ctypes.Structure):
    """Pointers, strides in elements and counts of ``check_step``."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            """report ring_start prev_num_accepted_tokens slots cu_seqlens force_flush
            dt_cache x_cache B_cache folds""",
        ),
        *_fields(
            ctypes.c_int64,
            """ring_start_stride prev_num_accepted_tokens_stride slots_stride force_flush_stride
            dt_cache_slot_stride dt_cache_head_stride dt_cache_row_stride
            x_cache_slot_stride x_cache_head_stride x_cache_row_stride
            B_cache_slot_stride B_cache_group_stride B_cache_row_stride pad_slot_id""",
        ),
        *_fields(
            ctypes.c_int32,
            """num_slots batch npredicted tokens nheads ngroups head_dim dstate
            max_window ring_buffer_len slots_type ring_type check_finite""",
        ),
    ]


class ForgetFoldsParams(ctypes.Structure):
    """Stamps, slots and counts of ``forget_folds``."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "folds slots"),
        *_fields(ctypes.c_int64, "slots_stride pad_slot_id"),
        *_fields(ctypes.c_int32, "num_slots batch layers slots_type"),
    ]


class CheckMaterializeParams(ctypes.Structure):
    """Tables, metadata, strides in elements and counts of ``check_materialize``."""

    _fields_ = [
        *_fields(
            ctypes.c_void_p,
            """report state_ptrs x_cache_ptrs B_cache_ptrs dt_cache_ptrs A_ptrs state_scale_ptrs
            state_copy_ptrs src_slots dst_slots ring_start replay_prefix_len active_request_indices
            prev_num_accepted_tokens""",
        ),
        *_fields(
            ctypes.c_int64,
            """src_slots_layer_stride src_slots_batch_stride dst_slots_layer_stride
            dst_slots_batch_stride ring_start_stride replay_prefix_len_stride
            active_request_indices_stride prev_num_accepted_tokens_stride pad_slot_id num_slots""",
        ),
        *_fields(
            ctypes.c_int32,
            """layers batch max_window ring_buffer_len src_slots_type dst_slots_type scaled
            copied bytes_of_A""",
        ),
    ]


@dataclass(slots=True)
class Plan:
    """A launch that is ready but for its stream: the record may be refilled and launched again."""

    key: Key
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    record: ctypes.Structure
    device: Device
    shared_bytes: int = 0  # of dynamic shared memory a block
    pdl: bool = False  # may start before the kernel ahead of it in the stream has ended
    before: Plan | None = None  # launched first; it reads the same record
    layout: Layout | None = None  # of the arrays, if a kernel may know it
    ready: Callable[[int], None] | None = field(default=None, init=False, repr=False, compare=False)
    alone: bool = field(default=False, init=False, repr=False, compare=False)  # the only device
    words: memoryview = field(init=False, repr=False, compare=False)  # the record, 8 bytes each
    pointers: list[int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.words = memoryview(self.record).cast("B").cast("Q")
        if self.grid[0] > MAX_BLOCKS:
            raise ValueError(
                f"batch: expected at most {MAX_BLOCKS} (batch row, head) pairs in a call, "
                f"got {self.grid[0]}"
            )
        if self.grid[1] > MAX_BLOCKS_Y:
            raise ValueError(f"nheads: expected at most {MAX_BLOCKS_Y}, got {self.grid[1]}")

    def launch(self, stream: int) -> None:
        """Enqueues the kernel on ``stream``, a raw handle of the plan's device.

        A plan is launched by one thread at a time; threads take a :meth:`copy` each.
        """
        if self.before is not None:
            self.before.launch(stream)
        launchers[self.device.kind].launch(self, stream)

    def copy(self) -> Plan:
        """The same launch with a record of its own."""
        record = type(self.record).from_buffer_copy(self.record)
        before = None if self.before is None else replace(self.before, record=record)
        return replace(self, record=record, before=before)


class Launcher(Protocol):
    """Where plans run: on a GPU, or in the tests on the CPU."""

    def launch(self, plan: Plan, stream: int) -> None: ...


class CudaLauncher:
    """The driver's launch with the record as the one parameter."""

    def launch(self, plan: Plan, stream: int) -> None:
        """Compiles at the first launch of a key; raises :class:`ReplaySSMError` if that fails."""
        ready = plan.ready
        if ready is not None and (plan.alone or _runtime().getDevice() == plan.device.index):
            try:
                ready(stream)
            except Exception as error:
                _launch_again(plan, ready, stream, error)
        else:
            with device_guard(plan.device):
                if ready is None:
                    plan.ready, plan.alone = _prepare(plan, stream), compiler.gpu_count() == 1
                self.launch(plan, stream)


def _prepare(plan: Plan, stream: int) -> Callable[[int], None]:
    """The driver's side of a plan, whose device is the current one."""
    index = plan.device.index
    handle = compiler.function_for(plan.key, plan.layout, index, stream)
    if plan.shared_bytes > DEFAULT_SHARED_BYTES:
        compiler.allow_shared_bytes(handle, plan.shared_bytes)
    launch = handle, plan.grid, plan.block, plan.shared_bytes, plan.record
    if plan.pdl and compiler.capability(index) >= PDL_CAPABILITY:
        return driver.dependent_launch(*launch)
    return driver.plain_launch(*launch, compiler.import_cupy())


def _launch_again(plan: Plan, ready: Callable[[int], None], stream: int, error: Exception) -> None:
    """After an error of a thread that has not touched the device yet; others are raised."""
    try:
        if getattr(error, "status", 0) != driver.INVALID_CONTEXT:
            raise error
        _runtime().setDevice(plan.device.index)  # which makes its context current
        ready(stream)
    except Exception as error:
        raise ReplaySSMError(
            f"launching {plan.key.name_expression} with grid {plan.grid} and block "
            f"{plan.block} failed: {error}"
        ) from error


@functools.cache
def _runtime() -> Any:
    return compiler.import_cupy().cuda.runtime


# By device kind. Host arrays have no launcher: they run the reference, unless a test adds one.
launchers: dict[str, Launcher] = {"cuda": CudaLauncher()}
