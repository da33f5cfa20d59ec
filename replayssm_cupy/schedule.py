"""How a decode step is spread over a GPU: which form of the kernel, blocks, warps, shared memory.

The layouts of shared memory are made here; the emulator and compute-sanitizer see a write past
the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntFlag
from typing import NamedTuple

from .arrays import Device, itemsize
from .compiler import import_cupy
from .keys import (
    COPY_DTYPES,
    MAX_BLOCKS_Y,
    SCALED_FORMATS,
    SLAB,
    CheckpointingSsuKey,
    PrecomputeKey,
    PreparedCheckpointingSsuKey,
    SlabCheckpointingSsuKey,
    SmallCheckpointingSsuKey,
    bytes_of_slab,
    plain_key,
    precompute_key,
    replay_keys,
    two_kernel_key,
)

SCRATCH_WORDS = ("cb_scaled_words", "cumAdt_vec_words", "cb_old_words")  # of the record
STAGES = 2  # of slabs, on their way or in use
LIST_HEADER, ENTRY = 144, 16  # of `RequestList` in cuda/requests.cuh, in bytes
MAX_RING_ROWS = 1 << 16  # that a list entry's cursor has bits for
MOST_LISTED = 512  # sequences that a block works on at a time
SHARED_ITEMS = 12  # of a block's, taken by whichever block is free
PRECOMPUTE_HEADS = 8  # of a block: kHeadsOfItem
# algorithm="auto" takes two kernels from this many heads a multiprocessor on, by the state's format
# and tiles of tokens; where there is no bound, one, which was faster wherever it was measured.
TWO_KERNEL_HEADS: dict[tuple[str, int], float] = {}

# Of the small form: rows p that a warp takes at once and a block has at most, rows of ring and step
# that its lanes are there for, and warps that multiply C with B.
ROWS_OF_WARP, MOST_ROWS_OF_BLOCK = 4, 64
STEP_ROWS, PRODUCT_WARPS = 24, 3
RESIDENT_WARPS = 32, 16  # of a multiprocessor with its registers, dstate up to 128 and beyond
MOST_SLABS = 6  # of a block in the form by slabs: kMostSlabs


class SmallFlag(IntFlag):
    """`SmallFlag` of cuda/params.cuh."""

    HAS_SLOTS = 1
    SLOTS_INT64 = 2
    STARTS_EARLY = 4
    PACKED = 8
    SEVERAL_QUADS = 16
    BY_PLACE = 32
    GATED = 64
    WIDE_OUT = 128
    WIDE_DT = 256
    NARROW_DT = 4096
    HALF_SCALARS = 65536
    SOFTPLUS = 131072
    FORCED_FLUSHES = 262144
    ROWS_FIRST = 524288


# What a plain step of the small form has of the flags that make code of their own, and all of them.
PLAIN_FLAGS = SmallFlag.HAS_SLOTS | SmallFlag.BY_PLACE
SETTLED_FLAGS = (
    PLAIN_FLAGS | SmallFlag.SLOTS_INT64 | SmallFlag.PACKED | SmallFlag.GATED | SmallFlag.WIDE_OUT
    | SmallFlag.HALF_SCALARS | SmallFlag.FORCED_FLUSHES | SmallFlag.ROWS_FIRST
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Processor:
    """What a launch may take: multiprocessors, and bytes of shared memory a block."""

    count: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """The sizes of a step that matter for its launch."""

    batch: int
    nheads: int
    heads_per_group: int
    head_dim: int
    tokens: int
    max_window: int
    ring_buffer_len: int
    gated: bool
    algorithm: str = "monolith"
    scratch: tuple[int, int, int] | None = None  # words a head, in the order of `SCRATCH`
    tickets: bool = False  # zeros for items that all blocks share
    not_small: str | None = None  # what keeps the small form from running
    flags: int = 0  # for the small form, of what the call has


@dataclass(frozen=True, slots=True)
class Schedule:
    """A key with its grid, threads, bytes of shared memory, and fields of the record.

    `before` is the launch ahead of it that makes its weights, with the same record.
    """

    key: CheckpointingSsuKey | PrecomputeKey
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    fields: dict[str, int]
    before: Schedule | None = None


def processor(device: Device) -> Processor:
    """Of the GPU; a few small ones for kernels that run on the CPU."""
    if device.kind != "cuda":
        return Processor(3, 227 << 10)
    found = _processors.get(device.index)
    if found is None:
        attributes = import_cupy().cuda.Device(device.index).attributes
        found = _processors[device.index] = Processor(
            attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"]
        )
    return found


_processors: dict[int, Processor] = {}


def schedule(
    state_dtype: str, activation_dtype: str, dstate: int, step: Step, on: Processor
) -> Schedule:
    """The form that is faster, or two kernels if they are asked for, if shared memory is there.

    Raises ValueError for a longer ring than kernels count, if the only form that there is cannot
    run, or if the step does not fit at all.
    """
    if step.ring_buffer_len > MAX_RING_ROWS:
        raise ValueError(
            f"x_cache: expected at most {MAX_RING_ROWS} ring rows, got {step.ring_buffer_len}"
        )
    keys = replay_keys(state_dtype, activation_dtype, dstate, step.tokens)
    if step.not_small is not None:
        keys = [key for key in keys if not isinstance(key, SmallCheckpointingSsuKey)]
        if not keys:
            raise ValueError(f"{step.not_small} ({state_dtype} states with dstate = {dstate})")
    order = [_schedule(key, step, on) for key in keys]
    few = prefers_small(keys[0], step, on)
    if few:
        order.reverse()
    # The small form sums outputs in an order of its own, and two kernels give the bits of one.
    second = None
    if not (few and isinstance(keys[-1], SmallCheckpointingSsuKey)):
        second = two_kernel_key(state_dtype, activation_dtype, dstate, step.tokens)
    if second is not None and takes_two_kernels(second, step, on):
        order.insert(0, _stream(second, step, on))
    for launch in order:
        if launch.shared_bytes <= on.shared_bytes:
            return launch
    needed = min(launch.shared_bytes for launch in order)
    raise ValueError(
        f"x_cache: expected a ring and tokens that fit into {on.shared_bytes} bytes of shared "
        f"memory, got {step.ring_buffer_len} rows and {step.tokens} tokens, which need {needed}"
    )


def _schedule(key: CheckpointingSsuKey, step: Step, on: Processor) -> Schedule:
    if isinstance(key, SmallCheckpointingSsuKey):
        return _small(key, step, on)
    slabs = isinstance(key, SlabCheckpointingSsuKey)
    return _slabs(key, step, on) if slabs else _stream(key, step, on)


def prefers_small(key: CheckpointingSsuKey, step: Step, on: Processor) -> bool:
    """Whether latency counts for more than traffic: few heads a multiprocessor.

    The bounds are where the two forms met on an H200, over whole flush cycles of heads of 64 x 128;
    of one token, wider rows count as several. A fold of several tokens' rows is what the streaming
    form does better. Four heads of 64 rows are what the form by slabs does at once.
    """
    heads = step.batch * step.nheads * step.head_dim / 64 / on.count
    if key.state_dtype in COPY_DTYPES:
        return heads <= (8 if step.tokens == 1 else 2)
    wide = key.state_dtype == "float32"
    if step.tokens == 1:
        bound = 16 if key.state_dtype in SCALED_FORMATS else 24 if wide else 32
        return heads * max(1.0, key.dstate / 128) <= bound
    return heads <= (2 if wide and step.tokens == 2 else 4)


def takes_two_kernels(key: PreparedCheckpointingSsuKey, step: Step, on: Processor) -> bool:
    """Whether weights go through scratch: if its arrays hold them, and who calls wants it so."""
    if step.scratch is None or step.algorithm == "monolith":
        return False
    needed = SLAB * step.tokens, _round_up(step.tokens, 4), SLAB * step.tokens + SLAB + 4
    if any(words < need for words, need in zip(step.scratch, needed, strict=True)):
        return False
    least = TWO_KERNEL_HEADS.get((key.state_dtype, key.token_tiles))
    heads = step.batch * step.nheads * step.head_dim / 64 / on.count
    return step.algorithm == "two-kernel" or (least is not None and heads >= least)


def slabs_of_stage(key: CheckpointingSsuKey) -> int:
    """kSlabsOfStage."""
    return 2 if bytes_of_slab(key.state_dtype, key.dstate) <= 128 * SLAB else 1


def most_warps(key: CheckpointingSsuKey) -> int:
    """Of a block: kMostThreads / 32."""
    copied_fp16 = key.state_dtype in COPY_DTYPES and key.activation_dtype == "float16"
    return 12 if key.token_tiles == 1 and key.dstate <= 128 and not copied_fp16 else 8


def most_heads(key: CheckpointingSsuKey, step: Step, on: Processor) -> tuple[int, ...]:
    """That a warp takes at once: its first item should be its last, with room for the flushes.

    Of a step in which warps take many items, those of 8 bits cost instructions: there are two
    lengths to choose from.
    """
    if key.state_dtype == "float32":
        return (1,)
    heads = step.batch * step.nheads / on.count
    flushing = min(1.0, step.tokens / step.max_window)
    for most in (1, 2, 4):
        if heads * ((1 - flushing) / most + flushing) <= most_warps(key):
            return (most,)
    if heads < 24:
        return (1,)
    return (2, 4) if key.state_dtype in SCALED_FORMATS and heads >= 48 else (2,)


def most_flushing_heads(key: CheckpointingSsuKey, step: Step, on: Processor, most: int) -> int:
    """That a warp takes at once where it folds: few if a flush would outlast what comes behind."""
    if key.state_dtype in COPY_DTYPES or step.batch * step.nheads / on.count < 48:
        return 1
    scaled = key.state_dtype in SCALED_FORMATS
    return max(1, most // 2) if scaled and step.tokens == 1 else most


def _stream(key: CheckpointingSsuKey, step: Step, on: Processor) -> Schedule:
    """The one whose warps have least to do; an item costs about as much as one head more.

    Rows beside float32 states (`kMayBeTight`) are tight where that makes room for a warp: reading
    them costs more.
    """

    def work(launch: Schedule) -> int:
        items = -(-step.batch * launch.fields["items_of_sequence"] // max(1, launch.grid[0]))
        return -(-items // (launch.threads // 32)) * (launch.fields["heads_of_item"] + 1)

    launch = min((_stream_of(key, step, on, n) for n in most_heads(key, step, on)), key=work)
    if key.state_dtype == "float32":
        tight = _stream_of(key, step, on, 1, tight=True)
        launch = tight if tight.threads > launch.threads else launch
    return launch


def _stream_of(
    key: CheckpointingSsuKey, step: Step, on: Processor, most: int, tight: bool = False
) -> Schedule:
    """One block per multiprocessor with as many warps as its shared memory feeds.

    A warp takes up to `most` heads of a group at once: they share B and C. Where items that flush
    have as many, warps know their first ones ahead of the list; not beside 8 bits (`kKnowsFirst`).
    """
    heads, items = _split(step.heads_per_group, most)
    flush_heads, flushes = _split(step.heads_per_group, most_flushing_heads(key, step, on, most))
    groups = step.nheads // step.heads_per_group
    slab = bytes_of_slab(key.state_dtype, key.dstate)
    share = _share(
        key, step, step.max_window,
        state_bytes=STAGES * slabs_of_stage(key) * slab,
        head_tiles=2,
        tight=tight,
        heads=heads,
        dt_rows=2 * SLAB * heads,
        scales=2 * step.head_dim + SLAB,  # a slab behind the head is read, too, and dropped
    )  # fmt: skip
    size = share["bytes_of_share"]
    listed = min(max(step.batch, 1), MOST_LISTED)
    list_bytes = _round_up(LIST_HEADER + ENTRY * listed, 128)
    warps = max(1, min(most_warps(key), (on.shared_bytes - list_bytes) // size))
    blocks = min(on.count, step.batch * groups * flushes)
    share |= {
        "most_listed": listed,
        "bytes_of_list": list_bytes,
        "heads_of_item": heads,
        "items_of_sequence": groups * items,
        "items_of_group": items,
        "inverse_items_of_sequence": inverse(groups * items),
        "inverse_items_of_group": inverse(items),
        "heads_of_flush": flush_heads,
        "flushes_of_sequence": groups * flushes,
        "flushes_of_group": flushes,
        "inverse_flushes_of_sequence": inverse(groups * flushes),
        "inverse_flushes_of_group": inverse(flushes),
        "inverse_pieces": -(-(1 << 16) // (step.head_dim // 8)),
        "tight_rows": int(tight),
    }
    share |= _shared_items(key, step, blocks, groups * items)
    if heads == flush_heads and key.state_dtype not in (*SCALED_FORMATS, *COPY_DTYPES):
        share["early_sequences"] = min(listed, blocks * warps // (groups * items))
    launch = Schedule(key, (blocks, 1, 1), 32 * warps, list_bytes + warps * size, share)
    if not isinstance(key, PreparedCheckpointingSsuKey):
        return launch
    if step.scratch is not None:
        launch.fields.update(zip(SCRATCH_WORDS, step.scratch, strict=True))
    return replace(launch, before=_precompute(precompute_key(key), step))


def _shared_items(
    key: CheckpointingSsuKey, step: Step, blocks: int, items_of_sequence: int
) -> dict[str, int]:
    """The last items of a step with one list, if its blocks have more than twice as many.

    Their warps end together then. Those of float32 states write x of one token behind all items: in
    between, writes cost more.
    """
    shared = SHARED_ITEMS * blocks
    many = step.batch * items_of_sequence > 2 * shared and step.batch <= MOST_LISTED
    if not (step.tickets and many):
        return {"shared_items": 0, "appends_late": 0}
    late = step.tokens == 1 and key.state_dtype == "float32"
    return {"shared_items": shared, "appends_late": int(late)}


def _split(heads_per_group: int, most: int) -> tuple[int, int]:
    """Heads of an item and items of a group."""
    items = -(-heads_per_group // most)
    return -(-heads_per_group // items), items


def _precompute(key: PrecomputeKey, step: Step) -> Schedule:
    """A warp for up to 8 heads of a sequence; cuda/precompute.cu lays its memory out."""
    pitch = key.dstate * itemsize(key.activation_dtype)
    words = PRECOMPUTE_HEADS * (2 * SLAB + _weights(step.tokens))
    words += 2 * SLAB * step.tokens + _round_up(step.tokens, 4)  # products, scales of C
    blocks = step.nheads // step.heads_per_group * -(-step.heads_per_group // PRECOMPUTE_HEADS)
    size = (2 * step.tokens + step.max_window) * pitch + 4 * words
    return Schedule(key, (step.batch, blocks, 1), 32, size, {})


def inverse(divisor: int) -> int:
    """As `divide` of cuda/checkpointing_ssu.cu takes it."""
    return -(-(1 << 44) // divisor)


class Spread(NamedTuple):
    """Of a block in the small form: warps for the state, and how often each takes four rows."""

    state_warps: int
    quads: int

    @property
    def rows(self) -> int:
        return ROWS_OF_WARP * self.state_warps * self.quads

    @property
    def warps(self) -> int:
        return self.state_warps + PRODUCT_WARPS + 1  # the decay warp


def most_quads(key: SmallCheckpointingSsuKey) -> int:
    """`most_quads` of the kernel."""
    row = key.dstate * itemsize(key.state_dtype)
    most = 4 if key.token_tiles == 1 else 2
    return max(1, min(most, 256 * most // row))


def spread_small(key: SmallCheckpointingSsuKey, step: Step, on: Processor) -> Spread:
    """Short blocks, or long ones where those run in fewer waves: their rows share weights."""
    # All pieces of a slab of codes are folded at once.
    folding = key.dstate // 32 if key.state_dtype in SCALED_FORMATS else 1
    quads = most_quads(key)
    parts = -(-step.head_dim // MOST_ROWS_OF_BLOCK)
    rows = -(-step.head_dim // parts // SLAB) * SLAB
    short = [Spread(8, 1)] if step.head_dim % 32 == 0 else [Spread(4, 1), Spread(8, 1)]
    long = [Spread(rows // (ROWS_OF_WARP * quads), quads)] if quads > 1 else []
    possible = [spread for spread in short + long if spread.warps >= folding]

    def waves(spread: Spread) -> int:
        blocks = step.batch * step.nheads * -(-step.head_dim // spread.rows)
        return -(-blocks // (on.count * (RESIDENT_WARPS[key.dstate > 128] // spread.warps)))

    return min(possible, key=waves)


def _small(key: SmallCheckpointingSsuKey, step: Step, on: Processor) -> Schedule:
    """A block has some rows of one head: its warps read the state, weigh rows or append x.

    A ring with more rows than those that weigh take goes by its live ones.
    """
    by_place = step.ring_buffer_len + step.tokens <= STEP_ROWS
    spread = spread_small(key, step, on)
    flags = SmallFlag.BY_PLACE if by_place else SmallFlag(0)
    if spread.quads > 1:
        flags |= SmallFlag.SEVERAL_QUADS
    fields = {
        "flags": int(flags),
        "state_warps": spread.state_warps,
        "rows_of_block": spread.rows,
        "threads": 32 * spread.warps,
        "last_row": (step.ring_buffer_len if by_place else step.max_window) - 1,
        "inverse_heads_per_group": -(-(1 << 31) // step.heads_per_group),
    }
    grid, order = _grid_of_heads(step, -(-step.head_dim // spread.rows))
    fields["flags"] |= order
    plain = (step.flags | fields["flags"]) & SETTLED_FLAGS == PLAIN_FLAGS
    if plain:
        key = plain_key(key)
    return Schedule(key, grid, fields["threads"], _shared_bytes(key), fields)


def _grid_of_heads(step: Step, parts: int) -> tuple[tuple[int, int, int], int]:
    """A block for each part of a head, and the flag that tells the order.

    Heads of a sequence, which flush together, lie side by side: on as many multiprocessors.
    """
    if step.batch > MAX_BLOCKS_Y:
        return (step.batch, step.nheads, parts), int(SmallFlag.ROWS_FIRST)
    return (step.nheads, step.batch, parts), 0


def _shared_bytes(key: SmallCheckpointingSsuKey) -> int:
    """Of `Shared` and `OldRows` in cuda/small.cuh."""
    tokens = key.token_tiles
    words = tokens * (2 * STEP_ROWS + tokens + 1) + 6 + SLAB + 4
    shared = _round_up(4 * words, 16) + 4 * 8 * MOST_ROWS_OF_BLOCK
    return shared + STEP_ROWS * (2 * key.dstate + 16 + 2 * MOST_ROWS_OF_BLOCK + 16)


def _slabs(key: CheckpointingSsuKey, step: Step, on: Processor) -> Schedule:
    """One warp per slab and two more; a head in parts while multiprocessors would be left over."""
    heads, all_slabs = step.batch * step.nheads, step.head_dim // SLAB
    slabs = all_slabs

    def share_of(slabs: int) -> dict[str, int]:
        return _share(
            key, step, step.ring_buffer_len,
            state_bytes=slabs * bytes_of_slab(key.state_dtype, key.dstate),
            head_tiles=1,
            heads=1,
            dt_rows=step.ring_buffer_len + step.tokens,
            scales=slabs * SLAB,
        )  # fmt: skip

    while slabs > 1 and (
        slabs > MOST_SLABS
        or 2 * heads * -(-all_slabs // slabs) <= on.count
        or share_of(slabs)["bytes_of_share"] > on.shared_bytes
    ):
        slabs = -(-slabs // 2)
    share, parts = share_of(slabs), -(-all_slabs // slabs)
    size = share["bytes_of_share"]
    grid, share["flags"] = _grid_of_heads(step, parts)
    return Schedule(key, grid, 32 * (slabs + 2), size, share)


def _share(
    key: CheckpointingSsuKey,
    step: Step,
    old_rows: int,
    *,
    state_bytes: int,
    head_tiles: int,
    heads: int,
    dt_rows: int,
    scales: int,
    tight: bool = False,
) -> dict[str, int]:
    """Where the parts of a share of shared memory lie, as fields of the record.

    They are slabs of state; C and B of a group, with room for what `prepare_B` makes of the old
    rows of B; x and z of a head, `head_tiles` times; its outputs; products of C and B of new and
    old rows; scales of C; dt; weights of `heads` heads (a `WeightShape` each); decode scales of the
    state; cursors. A step whose weights come from scratch has none of what makes them, and its
    weights twice: those of the next heads come early. Where rows are `tight`, x has no padding, and
    outputs are of 16 bits unless the step's are float32.
    """
    prepared = isinstance(key, PreparedCheckpointingSsuKey)
    if prepared:
        dt_rows, heads = 0, 2 * heads
    size = itemsize(key.activation_dtype)
    pitch, row = key.dstate * size, step.head_dim * size
    narrow = tight and not step.flags & SmallFlag.WIDE_OUT
    x_pitch, y_pitch = row + (0 if tight else 16), row if narrow else 2 * row + 16
    tokens = step.tokens
    products = 0 if prepared else 4 * 2 * SLAB * tokens
    B_rows = old_rows + (0 if prepared else tokens)
    parts = {
        "": state_bytes,
        "at_group": tokens * pitch + max(B_rows * pitch, key.dstate * 32),
        "at_head": head_tiles * (old_rows + (2 if step.gated else 1) * tokens) * x_pitch,
        "at_outputs": max(tokens * y_pitch, products + 4 * tokens),
        "at_dt": 4 * dt_rows,
        "at_weights": 4 * heads * _weights(tokens),
        "at_scales": 4 * scales if key.state_dtype in SCALED_FORMATS else 0,
        "at_cursors": 8 if isinstance(key, SlabCheckpointingSsuKey) else 0,
    }
    share, end = {}, 0
    for name, length in parts.items():
        share[name] = end
        end += _round_up(length, 16)
    del share[""]
    # Products and scales are used up when the first outputs come.
    share["at_products"] = share["at_outputs"]
    share["at_scales_of_C"] = share["at_outputs"] + products
    return share | {"bytes_of_share": _round_up(end, 128)}


def _weights(tokens: int) -> int:
    """The words of a `WeightShape`."""
    return _round_up(17 * tokens, 4) + SLAB * tokens + SLAB + 4


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def typical(key: CheckpointingSsuKey | PrecomputeKey, shared_bytes: int) -> Schedule:
    """The launch of a full multiprocessor: 64 heads in 8 groups, head_dim 64, windows of 16."""
    few = isinstance(key, SmallCheckpointingSsuKey | SlabCheckpointingSsuKey)
    tokens = key.least_tokens
    step = Step(1 if few else 256, 64, 8, 64, tokens, 16, 16 + tokens, False)
    if isinstance(key, PrecomputeKey):
        return _precompute(key, step)
    return _schedule(key, step, Processor(132, shared_bytes))
