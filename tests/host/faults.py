"""Small wrong edits of `cuda/`; the tests of the kernels must fail for each of them.

python tests/host/faults.py [NAME ...]      prints a table: fault, first test that fails
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The quickest first: a run stops at the first test that fails.
SUITE = (
    "tests/host/test_edges.py",
    "tests/host/test_early.py",
    "tests/host/test_forms.py",
    "tests/test_two_kernels.py",
    "tests/test_kernels.py",
    "tests/test_conversions.py",
    "tests/test_stochastic.py",
    "tests/test_varlen.py",
    "tests/test_eight_bit.py",
    "tests/test_copied.py",
    "tests/test_checked.py",
    "tests/host/test_histories.py",
)

# The first of two kernels is seen here at once.
TWO_KERNEL_SUITE = ("tests/host/test_early.py", "tests/test_two_kernels.py")
TWO_KERNEL_FILES = ("precompute.cu", "prepare.cuh")

# The kernels of whole slots and the checks have tests of their own.
SNAPSHOT_SUITE = (
    "tests/test_checked.py", "tests/test_snapshots.py", "tests/test_snapshot_errors.py",
    "tests/test_slot_images.py", "tests/test_slot_use.py", "tests/test_prefix.py",
)  # fmt: skip
POSITION_SUITE = ("tests/test_vllm_cache.py",)
SNAPSHOT_FILES = ("materialize.cu", "plan_materialize.cu", "copy_slots.cu", "check.cu")
# States with a read copy have tests of their own, too.
COPY_SUITE = ("tests/test_copied.py", "tests/test_conversions.py")
COPY_FILES = ("copied.cuh", "read_copy.cuh")


@dataclass(frozen=True)
class Fault:
    """`old`, which occurs once in `file`, becomes `new`."""

    file: str
    name: str
    old: str
    new: str

    def apply(self, folder: pathlib.Path) -> None:
        path = folder / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new))


EDITS = {
    "replay.cuh": [
        ("flush one token early", "+ q > max_window;", "+ q >= max_window;"),
        (
            "wrap subtraction dropped",
            "return min(row, row - static_cast<unsigned>(ring_buffer_len));",
            "return row;",
        ),
        (
            "wrap one row late",
            "row - static_cast<unsigned>(ring_buffer_len))",
            "row - static_cast<unsigned>(ring_buffer_len + 1))",
        ),
        ("pad slot test dropped", " && low != pad ? low", " ? low"),
        ("slot upper bound dropped", "static_cast<unsigned>(params.num_slots)", "0x7fffffffu"),
        ("upper half of a slot dropped", "real && high == 0 &&", "real &&"),
        ("pad slot cut to 32 bits", "if (pad != params.pad_slot_id) pad = -1;", ""),
        ("slots read without their stride", "row * params.slots_stride", "row"),
        ("old rows read out after a flush", "flush ? 0 : live;", "live;"),
        ("prefix sum leaves out its edge", "row >= step", "row > step"),
        (
            "low half of a difference dropped",
            "decay(to - from)",
            "decay(static_cast<float>(to) - static_cast<float>(from))",
        ),
        ("dt_bias of the first head", "head * params.dt_bias_stride", "0"),
        (
            "fold weighs from the wrong end",
            "decays.decay(sum, total) * dt",
            "decays.decay(sum) * dt",
        ),
        (
            "fp32 state read in one term",
            "same<T, bf16> || sizeof(T) == 1 ? 1 : 2",
            "same<T, fp16> ? 2 : 1",
        ),
        ("code of the neighbour", "word[q / 2] >> (16 * (q & 1))", "word[q / 2]"),
        ("rows of 8 bits in the order of lanes", "__shfl_xor_sync(kAllLanes, amax, 2)", "amax"),
        ("scale of another lane's row", "if (lane.t == 0) *scale = row.decode;", "*scale = 1.0f;"),
        ("seed not read", "static_cast<uint64_t>(*params.rand_seed)", "uint64_t{0}"),
        ("layers share their noise", "params.layer < 0 ? given", "true ? given"),
        ("random bits of the first piece", "offset + 64 * J);", "offset);"),
    ],
    "convert.cuh": [
        ("softplus overflows", "power = -kLog2e * magnitude;", "power = kLog2e * v;"),
        ("softplus of infinity", "fminf(fabsf(v), 128.0f)", "fabsf(v)"),
        ("softplus of NaN", "v < 0.0f ? 0.0f : v);", "v > 0.0f ? v : 0.0f);"),
        ("softplus of a rounded power", "  e = fmaf(e, kLog2 * lost, e);\n", ""),
        (
            "softplus loses small results",
            "fmaf(s, p, v < 0.0f ? 0.0f : v)",
            "fmaf(s, p, v < 0.0f ? 0.0f : v) + 1.0f - 1.0f",
        ),
        ("softplus to three places", "fmaf(u, p, 0.66666411f)", "0.66666411f"),
        ("upper half of a pair lost", "__uint_as_float(pair & 0xffff0000u)", "0.0f"),
        (
            "scale without its floor",
            "fmaxf(amax, kLargest * 0x1p-117f)",
            "amax",
        ),
        ("rows of NaN stored as numbers", "amax_bits < 0x7f800000u", "amax_bits <= 0xfffffffeu"),
        ("quotient of a row scale not rounded", "fmaf(fmaf(-m, q, a), r, q)", "q"),
        ("offset of the random bits in 32 bits", "static_cast<uint32_t>(offset >> 32)", "0u"),
        ("random field not masked to 13 bits", "field & 0x1fffu", "field"),
        ("codes share their random half", "(a.y, reversed >> 16)", "(a.y, word & 0xffffu)"),
        ("magnitude of an upper e2m1 code", "codes >> 3 & 0x0e0e0e0eu", "codes >> 2 & 0x0e0e0e0eu"),
        ("sign of an e2m1 code lost", " | (bits >> 28 & 8u)", ""),
        ("e2m1 codes below 1 too coarse", "& 0x7f800000u, 0x3f800000u);", "& 0x7f800000u, 0u);"),
        ("block scale for another largest code", "1.0f / 6.0f", "1.0f / 7.0f"),
    ],
    "positions.cu": [
        ("position: not moved on", "position[0] = committed + 1;", ""),
        ("position: all of a window kept", "min(max(accepted, 0), pending);", "pending;"),
        ("position: rows of a flush still live", "replay::flushes(live, q, W) ? 0 : live", "live"),
        ("position: the first row of the ring", "(committed - live) % L;", "0;"),
        (
            "position: flushes with one number",
            "params.events[slot] = committed;",
            "params.events[slot] = 1;",
        ),
        (
            "position: seed not written",
            "*params.rand_seed = params.seed;",
            "*params.rand_seed = 0;",
        ),
        ("position: cleared halfway", "threadIdx.x < params.words", "threadIdx.x < 1"),
        (
            "position: rings of the first head cleared",
            "i < params.heads[array] * words;",
            "i < words;",
        ),
    ],
    "copied.cuh": [
        ("copied: flushes share their noise", "params.events != nullptr", "false"),
        ("copied: unit of the codes left out", " * convert::kE2m1Unit", ""),
        ("copied: block scales of the first row", "row * (kDstate / 16) + of_row", "of_row"),
        ("copied: one block of a piece", "(4 * J + lane.t) + block;", "(4 * J + lane.t);"),
        (
            "copied: upper rows of the checkpoint folded twice",
            "32 * (first + i) + 8 * h * kDstate",
            "32 * (first + i)",
        ),
        ("copied: both rows stored in one place", "checkpoint + 8 * h * kDstate;", "checkpoint;"),
        ("copied: both rows from the first", "rows[0][i] = rows[1][i];", "(void)i;"),
        ("copied: the scale of one row", "scale + 8 * h, folded", "scale, folded"),
    ],
    "read_copy.cuh": [
        (
            "copied: blocks of eight columns",
            "ptx::max_magnitude(amax, __shfl_xor_sync(kAllLanes, amax, 1));",
            "amax;",
        ),
        ("copied: block scale of a broken row", "scale.stored(block.code)", "block.code"),
        ("copied: scale of a row", "*scale = of_all.decode;", "*scale = 1.0f;"),
        ("copied: codes of a row not scaled", "of_all.scaled(v[4 * J + i]);", "v[4 * J + i];"),
    ],
    "flush.cuh": [
        (
            "scale of the last piece of a row",
            "amax[h] = ptx::max_magnitude(amax[h], largest(folded[h]));",
            "amax[h] = largest(folded[h]);",
        ),
        ("pieces of row g in row g + 8", "slab + 64 * J + 8 * h * kDstate;", "slab + 64 * J;"),
        (
            "flush not stored in rows 8 to 15",
            "h < 2; ++h, to += 8 * kDstate) {\n      const int64_t place = kStochastic",
            "h < 2; ++h) {\n      const int64_t place = kStochastic",
        ),
        (
            "fold takes the first rows of B twice",
            "make_uint4(b[0][r], b[1][r],",
            "make_uint4(b[0][r], b[0][r],",
        ),
        (
            "flush rounded as if at its slab's start",
            "const int64_t place = kStochastic ? offset(to) : 0;",
            "const int64_t place = kStochastic ? offset(slab) : 0;",
        ),
        ("random bits of the first half", "place & 8 ? random.z : random.x", "random.x"),
        (
            "flush of codes rounded as if at its slab's start",
            "offset(to), folded[h]",
            "offset(slab), folded[h]",
        ),
        (
            "flush stores the scale of row g + 8 as row g",
            "(to, scale + 8 * h, offset",
            "(to, scale, offset",
        ),
    ],
    "rows.cuh": [
        (
            "odd rows of B and C read as they do not lie",
            "bytes + kBytes * t + swap, bytes + kBytes * t - swap",
            "bytes + kBytes * t, bytes + kBytes * t",
        ),
        ("cursor out of range followed", "min(max(live, 0), params.max_window)", "live"),
        (
            "ring_start out of range followed",
            "min(max(start, 0), params.ring_buffer_len - 1)",
            "start",
        ),
        ("tokens of the first sequence", "request.token = first;", "request.token = 0;"),
        (
            "flush by the longest length",
            "flushes(window.live, window.q, params",
            "flushes(window.live, params.npredicted, params",
        ),
        ("longer than max_seqlen", ", 0), params.npredicted);", ", 0), 99);"),
        ("forced flush of an empty ring", "(forced && window.live > 0)", "forced"),
        ("forced flush forgotten", "(forced && window.live > 0) || ", ""),
        (
            "32-bit slot offset of a ring",
            "(params.x_cache) + slot * params.x_cache_slot_stride",
            "(params.x_cache) + int(slot * params.x_cache_slot_stride)",
        ),
        (
            "32-bit offset of a batch row",
            "(params.x) + request.row * params.x_batch_stride",
            "(params.x) + int(request.row * params.x_batch_stride)",
        ),
        (
            "dead rows of a fold read",
            "ring_row(first, max(min(j, window.live - 1), 0), ring_rows)",
            "ring_row(first, j, ring_rows)",
        ),
        (
            "dead rows of x unmasked",
            "max(min(j, window.rows() - 1), 0) - window.old_rows()",
            "j - window.old_rows()",
        ),
        ("z of every token is the first one's", "(z), params.z_token_stride", "(z), 0"),
        (
            "half of a slab's copies from its start",
            "slab + 16 * kThreads * i);",
            "slab + 16 * kThreads * (i / 2));",
        ),
        (
            "odd rows swapped on one side",
            "const unsigned swap = kSwapped ? lane.g & 1 : 0;",
            "const unsigned swap = 0;",
        ),
        (
            "piece of row g + 8 read as row g",
            "128 * (half * kPiecesOfRow + J / 2)",
            "128 * (J / 2)",
        ),
    ],
    "requests.cuh": [
        (
            "list read from the front only",
            "n < listed.x ? n : params.most_listed - 1 - (n - listed.x)",
            "n",
        ),
        ("list of a step's warps begins anew", "lane < warp ? count : 0", "0"),
        (
            "list of the second half of the block begins anew",
            "listed.x + (before & 0xffff)",
            "(before & 0xffff)",
        ),
        (
            "list holds one sequence of a warp that flushes",
            "(before & 0xffff) + __popc(flushing & lower)",
            "(before & 0xffff)",
        ),
        (
            "list holds one sequence of a warp that does not",
            "first_stay - __popc(staying & lower)",
            "first_stay",
        ),
        ("padding listed", "request.slot >= 0 && !flush", "row < end && !flush"),
        (
            "slots of a list's first rows for those behind",
            "    if (next < end) slot = ask_for_slot(params, next);\n",
            "",
        ),
        (
            "only the first token of padding zeroed",
            "i < request.window.q * per_token",
            "i < min(request.window.q, 1) * per_token",
        ),
        (
            "padding zeroed in a block's first rows",
            "row < params.batch; row += gridDim.x * warps",
            "row < min(params.batch, warps); row += warps",
        ),
    ],
    "step.cuh": [
        (
            "old rows of a flush not read out",
            "if (window.flush) {\n    const RowWeights",
            "if (false) {\n    const RowWeights",
        ),
        (
            "old rows of a flush take the new rows' x",
            "rows.old_x(map, window, lane) + first;",
            "rows.new_x(map, window, lane) + first;",
        ),
        (
            "rows of a slab behind the head handed on",
            "k > 0 && first_row + k * kRows >= head_dim ? 0 : window.q",
            "window.q",
        ),
        ("A of the first head", "? params.A_stride", "? 0"),
        ("D of the first head", "? params.D_stride", "? 0"),
        ("new dt with the bias of the first head", ": params.dt_bias_stride;", ": 0;"),
        (
            "A, D and dt_bias of the item's first head",
            "head += min(lane.index % kHeadsOfItem, heads - 1);",
            "",
        ),
        (
            "bias of the item's first head",
            "constant, 2 * kHeadsOfItem + h)",
            "constant, 2 * kHeadsOfItem)",
        ),
        ("dt of the item's first head", "request, head + h, t)", "request, head, t)"),
        (
            "later tokens seen",
            "(old ? window.live - 1 : own)",
            "(old ? window.live - 1 : 15)",
        ),
        (
            "own token unseen",
            "(old ? window.live - 1 : own)",
            "(old ? window.live - 1 : own - 1)",
        ),
        ("rows 8 to 15 weigh as 0 to 7", "(j & 6) * 4 + (j & 8) / 4", "(j & 6) * 4"),
        (
            "C scaled for four tokens only",
            "first < q; first += kRowsAtOnce",
            "first < min(q, 4); first += kRowsAtOnce",
        ),
        (
            "words y and w of a 16-bit state not read out",
            "even[h][tile][e] + odd[h][tile][2 + e]",
            "even[h][tile][e]",
        ),
        ("low half of a weight dropped", "static_cast<unsigned short>(terms[1])", "0"),
        (
            "C's scale not taken back",
            "decays.decay(decays.sum) * scale[t]",
            "decays.decay(decays.sum)",
        ),
        (
            "tokens of the second tile take the first one's C",
            "tile.C_row(max(min(t, window.q - 1), 0))",
            "tile.C_row(max(min(lane.g, window.q - 1), 0))",
        ),
        (
            "half of the columns not read out",
            "acc[tile][i] += odd[tile][i];",
            "acc[tile][i] += 0.0f;",
        ),
        ("gate of the token before", "silu(of_tokens.y)", "silu(of_tokens.x)"),
        ("codes of row g + 8 scaled as row g", "of_lane[8 * (i >> 1)]", "of_lane[0]"),
        ("odd tokens decay as even ones", "decay[tile][1] = v.y", "decay[tile][1] = v.x"),
    ],
    "checkpointing_ssu.cu": [
        (
            "only the first group appends B",
            "return head == next.group * params.heads_per_group;",
            "return head == 0;",
        ),
        (
            "x of every head where the item's first one's belongs",
            "    appended += params.x_cache_head_stride;\n",
            "",
        ),
        (
            "x of the first rows of tokens appended",
            "while ((t += spread_x.rows) < request.window.q)",
            "while (false)",
        ),
        (
            "append of tokens that are not there",
            "if (t < request.window.q) *reinterpret_cast",
            "*reinterpret_cast",
        ),
        ("copied: the head's first slab", "copy + first_row / kRows * Slab::kBytes", "copy"),
        (
            "copied: stride of the checkpoint",
            "kCopied ? params.state_copy_head_stride : ",
            "",
        ),
        (
            "items of a group counted over all groups",
            "(of_n - group * of_group) * heads",
            "of_n * heads",
        ),
        (
            "products of a flush: old rows take those of the new ones",
            "products + kRows * shape.tokens, group(), window",
            "products, group(), window",
        ),
        (
            "old rows of a flush weigh as the new ones",
            "of_head + weight_shape.old_rows(), of_lane",
            "of_head, of_lane",
        ),
        (
            "32-bit slot offset",
            "(params.state) + slot * params.state_slot_stride",
            "(params.state) + int(slot * params.state_slot_stride)",
        ),
        ("sequences that stay listed as those that flush", "    if (!flush) n += listed.x;\n", ""),
        (
            "item of the next group",
            "next.group = group,",
            "next.group = (group + 1) % (params.nheads / params.heads_per_group),",
        ),
        (
            "last sequence of a list lost",
            "if (n >= listed.x + listed.y) return;",
            "if (n + 1 >= listed.x + listed.y) return;",
        ),
        (
            "first block's items done by all",
            "take(list.taken) * gridDim.x + blockIdx.x",
            "take(list.taken) * gridDim.x",
        ),
        (
            "items end behind their group",
            "min(heads, params.heads_per_group - first)",
            "heads",
        ),
        (
            "ring rows of B from row 0 on",
            "    }\n    group().copy_ring(params, of_item, next.group, window.start,",
            "    }\n    group().copy_ring(params, of_item, next.group, 0,",
        ),
        (
            "ring rows of x from row 0 on",
            "ahead.ring, window.start, window.live",
            "ahead.ring, 0, window.live",
        ),
        (
            "old dt of the item's first head",
            "params, of_item.slot, next.head + i)",
            "params, of_item.slot, next.head)",
        ),
        (
            "new dt of a flush where the old ones have theirs",
            "new_dt.put(dt(0) + first_token(window),",
            "new_dt.put(dt(0) + window.live,",
        ),
        ("next head's rows over this one's", "    ahead.parity ^= 1;\n", ""),
        ("every head in the first tile", "--heads, parity ^= 1;", "--heads;"),
        (
            "rows behind the first four of a lane left out",
            "window.live > RingRows::kAtOnce * spread_x.rows || window.q",
            "window.q",
        ),
        ("tokens behind the first of a lane left out", "window.q > spread_x.rows ||", ""),
        ("z not asked for", "                 shape.gated || (", "                 ("),
        (
            "scales of the next head over this one's",
            "to_smem(scales(ahead.parity) + lane.index)",
            "to_smem(scales(0) + lane.index)",
        ),
        (
            "scales of another head read out",
            "ptx::kept(scales(parity) + lane.g)",
            "ptx::kept(scales(0) + lane.g)",
        ),
        (
            "scales of rows behind the 64th not asked for",
            "ahead.more || params.head_dim > 64",
            "ahead.more",
        ),
        (
            "next item's B before the fold is through",
            "asks = group_due > (begins ? 0 : folding);",
            "asks = group_due > 0;",
        ),
        (
            "B asked for late is not waited for",
            "      ptx::cp_async_wait<0>();\n      __syncwarp();",
            "      __syncwarp();",
        ),
        (
            "stage refilled before it is read",
            "slab(place, i).template copy",
            "slab(place ^ 1, i).template copy",
        ),
        ("stages of the item's first head", ", ahead.state += bytes_to_next_head();", ";"),
        (
            "stages of a head in another order",
            "ptx::mad_wide(ahead.stage, kStageBytes",
            "ptx::mad_wide(ahead.stage ^ 1u, kStageBytes",
        ),
        (
            "slab that is not there read",
            "if (i == 0 || (ahead.stage * kStageSlabs + i) * kRows < params.head_dim)",
            "if (true)",
        ),
        ("stage not waited for", "ptx::cp_async_wait<kStages - 1 + kMore>();", ""),
        (
            "stage waited for one group too few",
            "ptx::cp_async_wait<kStages - 1 + kMore>();",
            "ptx::cp_async_wait<kStages + kMore>();",
        ),
        (
            "lanes wait for their own copies only",
            "ptx::cp_async_wait<kStages - 1 + kMore>();\n    __syncwarp();",
            "ptx::cp_async_wait<kStages - 1 + kMore>();",
        ),
        (
            "rows of a group not waited for",
            "if (asks && !begins) {",
            "if (!begins || group_due == 0) {",
        ),
        (
            "outputs stored before all are there",
            "void finish_head() {\n    __syncwarp();\n",
            "void finish_head() {\n",
        ),
        (
            "outputs of the first tokens only",
            "t < request.window.q; t += spread_x.rows",
            "t < min(request.window.q, spread_x.rows); t += spread_x.rows",
        ),
        ("outputs of all heads in the first one's place", "out += params.out_head_stride, ", ""),
        ("heads share the weights of the first", ", of_head += weight_shape.words();", ";"),
        (
            "folded heads share the weights of the first",
            "of_head + weight_shape.fold()",
            "weights(0) + weight_shape.fold()",
        ),
        ("scale of the first slab read out", "of_scales + first + k * kRows", "of_scales"),
        (
            "scale of the first slab folded",
            "decode = scales(parity) + row;",
            "decode = scales(parity) + lane.g;",
        ),
        (
            "scale of the first slab stored",
            "target.scale = scale_of(slot, head) + row;",
            "target.scale = scale_of(slot, head) + lane.g;",
        ),
        (
            "one slab of a stage flushed",
            "#pragma unroll 1\n      for (int k = 0; k < kStageSlabs;",
            "#pragma unroll 1\n      for (int k = 0; k < 1;",
        ),
        (
            "sequences beyond one list dropped",
            "first < params.batch; first += params.most_listed",
            "first < min(params.batch, params.most_listed); first += params.most_listed",
        ),
        (
            "second list goes on where the first ended",
            "if (threadIdx.x == 0) list.taken",
            "if (threadIdx.x == 0 && first == 0) list.taken",
        ),
        (
            "slots of the first list for the second",
            "    if (first > 0) slot = ask_for_slot(params, first);\n",
            "",
        ),
        (
            "list begun anew while others take from it",
            "worker.run(listed);\n    __syncthreads();",
            "worker.run(listed);",
        ),
        ("padding always zeroed", "if (params.zero_padding) zero_padding", "zero_padding"),
        ("scratch read before it is there", "folding = kPrepared,", "folding = 0,"),
        (
            "scratch not waited for",
            "        if (kPrepared && begins) ptx::grid_dependency_wait();\n",
            "",
        ),
        (
            "weights from scratch over those at work",
            "kPrepared && of_second ? params.heads_of_item : 0",
            "0",
        ),
        (
            "weights from scratch never change places",
            "      second = !second;\n",
            "",
        ),
        (
            "scratch of the item's first head",
            "of_item, next.head + i,\n",
            "of_item, next.head,\n",
        ),
        (
            "scratch copied by half of the pieces",
            "to + 4 * place + 16 * k, scratch",
            "to + 4 * place + 16 * (k / 2), scratch",
        ),
        (
            "no B for a fold beside scratch",
            "if (window.flush) {\n        group().copy_ring",
            "if (false) {\n        group().copy_ring",
        ),
        (
            "step begun before the kernel ahead has ended",
            "  ptx::grid_dependency_wait();\n  ptx::grid_dependency_launch();",
            "  ptx::grid_dependency_launch();",
        ),
    ],
    "prepare.cuh": [
        (
            "append one row late",
            "window.live, params.ring_buffer_len);\n  return",
            "window.live + 1, params.ring_buffer_len);\n  return",
        ),
        (
            "appended tokens in one row",
            "return ring_row(first, t, params.ring_buffer_len)",
            "return ring_row(first, 0, params.ring_buffer_len)",
        ),
        (
            "dt of the item's first head appended",
            "const float* of_head = dt + 2 * kRows * i",
            "const float* of_head = dt",
        ),
        (
            "dt of the first four tokens appended",
            "t < window.q; t += 32 / kHeadsOfItem",
            "t < min(window.q, 4); t += 32 / kHeadsOfItem",
        ),
        (
            "B of the first rows of tokens appended",
            "for (int t = spread.row; t < request.window.q; t += spread.rows)",
            "for (int t = spread.row; t < min(request.window.q, spread.rows); t += spread.rows)",
        ),
        (
            "dead dt folded",
            "live = (row < window.live) | new_row",
            "live = (row < first_token(window)) | new_row",
        ),
        ("every second head of a flush prepared", "first += window.flush ? 1 : 2)", "first += 2)"),
        (
            "heads share A",
            "__shfl_sync(kAllLanes, constant, i);",
            "__shfl_sync(kAllLanes, constant, 0);",
        ),
        ("heads share D", "constant, kHeadsOfItem + i);", "constant, kHeadsOfItem);"),
        ("heads share dt", "dt[2 * kRows * i + row]", "dt[row]"),
        (
            "scratch of the first sequence",
            "n = request.row * params.nheads + head;",
            "n = head;",
        ),
        (
            "scratch of one token",
            "cb_scaled_words), kRows / 4 * window.q);",
            "cb_scaled_words), 4);",
        ),
        ("decays of four tokens in scratch", "(window.q + 3) / 4);", "min(window.q, 1));"),
        (
            "no weights of a flush in scratch",
            "  if (window.flush) {\n    copy(",
            "  if (false) {\n    copy(",
        ),
        (
            "no fold in scratch",
            "(shape.words() - shape.old_rows()) / 4);",
            "(shape.fold() - shape.old_rows()) / 4);",
        ),
    ],
    "precompute.cu": [
        (
            "two kernels: only the first group appends B",
            "if (head != group * params.heads_per_group) return;",
            "if (head != 0) return;",
        ),
        (
            "precompute: groups are the first",
            "group = blockIdx.y / blocks_of_group;",
            "group = 0;",
        ),
        (
            "precompute: heads are a group's first eight",
            "head = group * p.heads_per_group + first;",
            "head = group * p.heads_per_group;",
        ),
        (
            "precompute: heads end behind their group",
            "heads = min(kHeadsOfItem, p.heads_per_group - first);",
            "heads = kHeadsOfItem;",
        ),
        (
            "precompute: dt of the ring from row 0 on",
            "ring_row(window.start, lane.index & 15",
            "ring_row(0, lane.index & 15",
        ),
        (
            "precompute: B of the ring from row 0 on",
            "group, window.start, window.live,",
            "group, 0, window.live,",
        ),
        (
            "precompute: old dt of the first head",
            "dt_ring(params, request.slot, head + i)",
            "dt_ring(params, request.slot, head)",
        ),
        (
            "precompute: old rows of a flush take the new ones' products",
            "products() + kRows * shape.tokens, rows(), window",
            "products(), rows(), window",
        ),
        ("precompute: C keeps its scales", "prepare_C<kScaled>(", "prepare_C<false>("),
        (
            "precompute: scratch of the first head",
            "request, head + i,\n",
            "request, head,\n",
        ),
        (
            "precompute: copies not waited for",
            "  ptx::cp_async_wait<0>();\n  __syncwarp();\n  block",
            "  __syncwarp();\n  block",
        ),
        (
            "precompute: lanes wait for their own copies only",
            "  ptx::cp_async_wait<0>();\n  __syncwarp();\n  block",
            "  ptx::cp_async_wait<0>();\n  block",
        ),
        (
            "precompute: stored before the weights are there",
            "make_weights(new_dt, constants.value());\n  __syncwarp();",
            "make_weights(new_dt, constants.value());",
        ),
        (
            "precompute: begun before the kernel ahead has ended",
            "  ptx::grid_dependency_wait();\n",
            "",
        ),
        ("precompute: padding not left alone", "if (request.slot < 0) return;", ""),
    ],
    "small.cuh": [
        ("small: group of the next head", "2 * head, static", "2 * head + 2, static"),
        (
            "small: every part is the first",
            "first_row(blockIdx.z * p.rows_of_block)",
            "first_row(0)",
        ),
        (
            "small: slot upper bound dropped",
            "static_cast<unsigned>(params.num_slots)) |",
            "0x7fffffffu) |",
        ),
        ("small: upper half of a slot dropped", " | (high != 0) |", " |"),
        ("small: pad slot test dropped", "(low == params.pad_slot);", "false;"),
        ("small: slots read without their stride", "low, params.slots_bytes);", "low, 4);"),
        (
            "small: a sequence without tokens has rows",
            "if (request.window.q == 0) warp = kNoWarp;",
            "",
        ),
        ("small: tokens of the batch row", "sequence = first;", ""),
        (
            "small: tokens behind the last read",
            "min(t, request.window.q - 1);",
            "t;",
        ),
        (
            "small: rows of the next part",
            "return min(params.rows_of_block, params.head_dim - first_row);",
            "return params.rows_of_block;",
        ),
        (
            "small: sum over half of the lanes",
            "step < kLanesOfRow; step *= 2)",
            "step < 4; step *= 2)",
        ),
        (
            "small: tokens of a pass swapped",
            "const float kept = odd ?",
            "const float kept = !odd ?",
        ),
        (
            "small: rows of a long ring taken for places",
            "return ring_row(min(max(first, 0), params.ring_buffer_len - 1), r, params",
            "return ring_row(0, r, params",
        ),
        (
            "small: stray cursor of a long ring",
            "min(max(first, 0), params.ring_buffer_len - 1), r",
            "first, r",
        ),
        (
            "small: never made to flush",
            "forced = params.force_flush[",
            "forced = false && params.force_flush[",
        ),
        (
            "small: append one row late",
            "ring_row(window.start, window.live, params",
            "ring_row(window.start, window.live + 1, params",
        ),
    ],
    "weigh.cuh": [
        ("small: dead dt folded", "if (lane >= window.live) {", "if (lane >= kRows) {"),
        (
            "small: window of the fold not told",
            "shared.live = window.live;",
            "shared.live = kRows;",
        ),
        ("small: slot of the fold not told", "shared.slot = request.slot, ", ""),
        ("small: another head folded", "shared.head = head, ", "shared.head = 0, "),
        ("small: dt of another row folded", "of_row, place & 31);", "of_row, lane);"),
        ("small: dt of a far row not found", "else if (place > 31) {", "else if (false) {"),
        (
            "small: no fold where there are no tokens",
            "if (!window.flush) return 0;\n    const int place",
            "if (!window.flush || window.q == 0) return 0;\n    const int place",
        ),
        (
            "small: cursors swapped",
            "in.start = ptx::ld_global_u32(Base::ring_start_of",
            "in.start = ptx::ld_global_u32(Base::live_rows_of",
        ),
        (
            "small: places in the ring taken for rows",
            "const unsigned j = r - (has(kByPlace) ? request.window.start : 0);",
            "const unsigned j = r;",
        ),
        (
            "small: dt by places",
            "const unsigned place = lane + (has(kByPlace) ? request.window.start : 0);",
            "const unsigned place = lane;",
        ),
        ("small: ring's end taken for rows", "min(j, j + params.ring_buffer_len)", "j"),
        ("small: dt behind the ring's end", "min(place, place - params.ring_buffer_len)", "place"),
        ("small: dt of the row itself", "sums_from(in), j + 1)", "sums_from(in), max(j, 0))"),
        ("small: dead dt", "lane < request.window.live ? dt : 0.0f", "dt"),
        ("small: dt of eight rows", "step < kRows; step *= 2", "step < kRows / 2; step *= 2"),
        ("small: dead rows weigh", "own < 0 && j < request.window.live &&", "own < 0 &&"),
        ("small: rows behind the ring weigh", " && r <= params.last_row;", ";"),
        (
            "small: decay of the last token",
            "kTokens == 1 || t == 0 ? new_dt[0]",
            "kTokens == 1 ? new_dt[0]",
        ),
        ("small: time since the token forgotten", "if (t > own) weight *=", "if (false) weight *="),
        ("small: dt of the second token", "(own == 0 ? new_dt[0] :", "(own == 1 ? new_dt[0] :"),
        ("small: D forgotten", "weight += D;", ""),
        (
            "small: D with all tokens",
            "if (t == own) {\n      weight += D;",
            "weight += D;\n    if (t == own) {",
        ),
        ("small: A, D and bias of the first head", "8 * which), head,", "8 * which), 0,"),
        ("small: dt of the first token", "token(token_of_lane()), params.dt", "0, params.dt"),
        ("small: dt of the first sequence", "Base::sequence, params.dt_sequence_bytes", "0, 0"),
        ("small: fp16 taken for bf16", "if (has(kHalfScalars)) {", "if (false) {"),
        ("small: fp32 taken for bf16", "wide ? in.scalar : in.scalar << 16", "in.scalar << 16"),
        ("small: softplus always", "if (has(kSoftplus)) new_dt", "new_dt"),
        (
            "small: the other of two rows",
            "second_row() ? of_column(1) : of_column(0)",
            "second_row() ? of_column(0) : of_column(1)",
        ),
        (
            "small: half of the columns of C B",
            "(d.odd[0][2 + e] + d.odd[1][2 + e])",
            "0.0f",
        ),
        (
            "small: B of the ring's last row twice",
            "min(r, params.last_row)",
            "min(r + 1, params.last_row)",
        ),
        (
            "small: B of the first sequence",
            "at.of_ring ? slot : Base::sequence",
            "at.of_ring ? slot : 0",
        ),
        (
            "small: B of the first token",
            "at.of_ring ? ring_row_of(rows + g()) : token(own);",
            "at.of_ring ? ring_row_of(rows + g()) : 0;",
        ),
        (
            "small: B of a long ring by places",
            "Base::place_of(at.B_row)",
            "at.B_row",
        ),
        ("small: dt of a long ring by places", "Base::place_of(at.dt_row)", "at.dt_row"),
        (
            "small: only the first group appends B",
            "head != group * params.heads_per_group) return;",
            "head != 0) return;",
        ),
        (
            "small: x of the first part appended",
            "(x + bytes_of_x()) = tokens",
            "(x + 16 * (lane & 7)) = tokens",
        ),
        (
            "small: x of the first rows appended",
            "(token_of_x()) + bytes_of_x());",
            "(token_of_x()) + 16 * (lane & 7));",
        ),
        ("small: x behind the head appended", "(8 * (lane & 7) < Base::rows_of_block())", "true"),
        (
            "small: dt of the last token appended",
            "kTokens > 1 && lane > 0 ? new_dt",
            "kTokens > 1 ? new_dt",
        ),
    ],
    "read_out.cuh": [
        (
            "small: 32-bit slot offset",
            "state = behind(state, slot, params.state_slot_bytes);",
            "state += slot * params.state_slot_bytes;",
        ),
        (
            "small: rows behind the head read",
            "if (first >= static_cast<unsigned>(params.head_dim)) return",
            "if (false) return",
        ),
        ("small: scale of the first row", "scale = ptx::computed_now(scale + 4u * p);", ""),
        ("small: unseen rows added", "seen(is_seen(weight));", "seen(true);"),
        (
            "small: weights not waited for",
            "ptx::barrier_sync<1>(params.threads + ptx",
            "ptx::barrier_arrive<1>(params.threads + ptx",
        ),
        ("small: decay of the first token", "shared.decays[i % kTokens]", "shared.decays[0]"),
        ("small: x of a long ring by places", "return Base::place_of(r);", "return r;"),
        (
            "small: x of the first token",
            "in.new_x[t] = ptx::ld_global_u16(behind(Base::x_of_token(t)",
            "in.new_x[t] = ptx::ld_global_u16(behind(Base::x_of_token(0)",
        ),
        ("small: later tokens seen", "if (own <= t) y = fmaf", "y = fmaf"),
        (
            "small: z of the first token",
            "token_of_lane(), params.z_token_bytes);",
            "0, params.z_token_bytes);",
        ),
        (
            "small: output of the first token",
            "token_of_lane(), params.out_token_bytes);",
            "0, params.out_token_bytes);",
        ),
        ("small: output of the first row", "lane / kTokens & (kQuads - 1);", "0;"),
        ("small: padding always zeroed", "if (params.zero_padding) store", "store"),
        ("small: padding never zeroed", "if (params.zero_padding) store(0.0f, out);", ""),
        ("small: not gated", "y *= gate;", ""),
        ("small: one of two chains of products", "acc[i][t].x + acc[i][t].y;", "acc[i][t].x;"),
    ],
    "checkpointing_ssu_slabs.cu": [
        (
            "slabs: the first part of a head in all blocks",
            "first_row(part * slabs * kRows)",
            "first_row(0)",
        ),
        ("slabs: begun before the kernel ahead has ended", "  ptx::grid_dependency_wait();\n", ""),
        (
            "slabs: the last row of a ring not copied",
            "cp_async16_if_less(row, rows,",
            "cp_async16_if_less(row, rows - 1,",
        ),
        ("slabs: rows of a ring one after another", "stride *= spread.rows;", "stride *= 1;"),
        ("slabs: more lanes than pieces of x", "if (spread.piece >= pieces)", "if (false)"),
        ("slabs: slabs behind the head", "first_row + warp * kRows < params.head_dim;", "true;"),
        (
            "slabs: x of the first slab appended",
            ".x_cache_row_stride) + first_row;",
            ".x_cache_row_stride);",
        ),
        (
            "slabs: only the first head's dt appended",
            "if (first && lane.index == 31)",
            "if (of_group && lane.index == 31)",
        ),
        (
            "slabs: old rows of a flush have no dt",
            "old ? window.live : window.flush",
            "old ? 0 : window.flush",
        ),
        (
            "slabs: outputs of the other half",
            "const int t = i / 2, column = row_of_warp() + i % 2 * 8;",
            "const int t = i / 2, column = row_of_warp();",
        ),
        (
            "slabs: C unscaled beside codes",
            "if (reads && !kScaledC<State, Act>) block",
            "if (reads) block",
        ),
    ],
    "checkpointing_ssu_small.cu": [
        (
            "small: begun before the kernel ahead has ended",
            "  ptx::grid_dependency_wait();\n",
            "",
        ),
        (
            "small: prefetches of slots that are not there",
            "if (slot >= static_cast<unsigned>(params.num_slots)) return;",
            "",
        ),
        (
            "small: folded before all have read",
            "__syncthreads();  // the weights are there, and all have read the checkpoint",
            "",
        ),
        (
            "small: encoded before the row is known",
            "    __syncthreads();\n    if (i >= pieces) return;",
            "    if (i >= pieces) return;",
        ),
        ("small: B of the first columns folded", "bytes = (4 * n + at.t)", "bytes = at.t"),
        ("small: fold of the first columns", " + n * 4 * Piece::kBytes;", ";"),
        (
            "small: x of the first slab folded",
            "x[i] + 2 * kBytesOfHalf * slab;",
            "x[i];",
        ),
        (
            "small: B of the next rows folded",
            "old_row(8 * i + at.g,",
            "old_row(8 * (i ^ 1) + at.g,",
        ),
        ("small: x of the next rows folded", "+ kBytesOfHalf * h)", "+ kBytesOfHalf * (1 - h))"),
        ("small: x of other old rows folded", "in.x[i & 2][i & 1] |", "in.x[i & 1][i & 1] |"),
        (
            "small: scale of row g for row g + 8",
            "decay[1] *= in.scale[1];",
            "decay[1] *= in.scale[0];",
        ),
        ("small: scale of the first slab", "scale + 4 * kRows * slab)", "scale)"),
        ("small: largest of one piece", "of_pieces[k]);", "of_pieces[0]);"),
        ("small: scale not stored", "scale_of(slab)[8 * h] = scales[h].decode;", ";"),
        ("small: operands of B kept from piece to piece", "warps % kPieces != 0", "false"),
        (
            "small: pieces behind the first round left out",
            "i < pieces; i += warps",
            "i < min(pieces, warps); i += warps",
        ),
    ],
    "selective_state_update.cu": [
        (
            "plain output before the update",
            "y[h] = fmaf(s[e], c[2 * q + e], y[h]);",
            "y[h] = fmaf(s[e] - dx[h] * b[2 * q + e], c[2 * q + e], y[h]);",
        ),
        (
            "plain update writes half of the state",
            "const int64_t row = 8 * h * kDstate;",
            "const int64_t row = 0;",
        ),
        (
            "plain sum over two of four lanes",
            "      y[h] += __shfl_xor_sync(kAllLanes, y[h], 2);\n",
            "",
        ),
        ("plain padding zeroed in half of the rows", "      work.store_out(t, 1, 0.0f);\n", ""),
        (
            "plain update takes its first token twice",
            "for (int t = kAhead ? 1 : 0;",
            "for (int t = 0;",
        ),
    ],
    "cursors.cu": [
        ("reset loses to a stale commit", "params.reset != nullptr && ", "false && "),
        (
            "accepted not clamped",
            "min(max(accepted, int64_t{0}), int64_t{q})",
            "accepted",
        ),
        ("seed stands still", "*params.rand_seed += 1;", ";"),
        ("forced flush not followed", "if (forced || ", "if ("),
        ("start moves by the accepted", "ring_row(ring_start, prev,", "ring_row(ring_start, kept,"),
        ("accepted replace the live rows", "prev += kept;", "prev = kept;"),
    ],
    "slots.cu": [
        ("copied: slab of a loaded row", "p / replay::kRows * replay", "p / 32 * replay"),
        (
            "copied: loaded from the first columns",
            "* params.dstate + column + 2 * i;",
            "* params.dstate + 2 * i;",
        ),
        (
            "reset empties the first head only",
            "head * params.state_head_strides[layer]",
            "0 * params.state_head_strides[layer]",
        ),
        (
            "reset keeps the cursors",
            "params.prev_num_accepted_tokens[slot * params.prev_num_accepted_tokens_stride] = 0;",
            "",
        ),
        ("reset keeps the scales", "scales != nullptr && i <", "false && i <"),
        ("loaded row scaled by half of its lanes", "step = 16; step > 0", "step = 8; step > 0"),
        ("loaded state of the first sequence", "row * params.source_batch_stride", "0"),
    ],
    "fold.cuh": [
        ("fold weights written by all", "if (j >= kRows) return;", ""),
        ("state does not decay at a flush", "to[kRows] = decays.decay(total)", "to[kRows] = 1.0f"),
        ("fp32 fold in two terms", "== 4 ? 3 : 2", "== 4 ? 2 : 2"),
        (
            "fold scales row g + 8 as row g",
            "fmaf(decay[1], stored_lower.x",
            "fmaf(decay[0], stored_lower.x",
        ),
        (
            "rows 8 to 15 folded with the weights of 0 to 7",
            "from[8 * (i >> 1) + 2 * lane.t",
            "from[2 * lane.t",
        ),
        (
            "rows of x folded with each other's weights",
            "weights.coefficient + 2 * (i >> 1);",
            "weights.coefficient;",
        ),
    ],
    "materialize.cu": [
        (
            "copied: snapshot of the first slab only",
            "if constexpr (kTwice) {\n      copy +=",
            "if constexpr (kTwice) {\n      copy -=",
        ),
        (
            "copied: only state and scales are copied",
            "lane.index; i < vectors; i += 32",
            "vectors; i < vectors; i += 32",
        ),
        (
            "active list not read",
            "request = params.active_request_indices[request * "
            "params.active_request_indices_stride];",
            "request += 0 * params.active_request_indices[request];",
        ),
        (
            "prefix of the first request",
            "params.replay_prefix_len[request * params.replay_prefix_len_stride]",
            "params.replay_prefix_len[0]",
        ),
        (
            "ring start of the first request",
            "params.ring_start[request * params.ring_start_stride]",
            "params.ring_start[0]",
        ),
        (
            "snapshot rounded as if at its slab's start",
            "rounding, at - storage));",
            "rounding, to - storage));",
        ),
        (
            "snapshot scales row g + 8 as row g",
            "{odd ? own.encode : other, 0.0f}",
            "{odd ? other : own.encode, 0.0f}",
        ),
        ("snapshot lets lanes of a row differ", "theirs);\n    all = ", "theirs);\n    // "),
        (
            "snapshot stores scales of row g only",
            "if (lane.t < 2) *scale",
            "if (lane.t < 1) *scale",
        ),
        ("both rows of a lane have one scale", "scale += 8 * (lane.t & 1);", ";"),
        (
            "snapshot encodes rows that store zeros",
            "if (__any_sync(kAllLanes, own.encode == 0.0f)) ptx::aside",
            "if (false) ptx::aside",
        ),
        (
            "destinations of the first layer",
            "layer * params.dst_slots_layer_stride +",
            "0 * params.dst_slots_layer_stride +",
        ),
        ("snapshot reads dead rows of x", "live[i] ? ptx::ld", "true ? ptx::ld"),
        ("snapshot reads dead rows of B", "j < item.rows);", "true);"),
        ("snapshot reads dead dt", "if (j >= rows) return 0.0f;", ""),
        (
            "copy of a head forgets half of its scales",
            "scale[32 * i] = scales",
            "scale[0] = scales",
        ),
        ("copy of a head repeats a vector", "(first + i), v[i]);", "(first + i), v[0]);"),
        ("copy goes beyond its head", "if (first + i < vectors) ptx::st", "ptx::st"),
        ("snapshot decodes row g + 8 as code", ", decay[1] *= slab.scale[1];", ";"),
        ("layers share random bits", "item.layer);\n    rounding", "0);\n    rounding"),
        ("snapshot folds half of the rows", "movmatrix(b[1][r]),", "movmatrix(0u),"),
        (
            "wide rows take the first columns again",
            "lane.g * kDstate + column +",
            "lane.g * kDstate +",
        ),
        ("B of the first columns again", "j) + column, lane.t", "j), lane.t"),
        ("every slab of a head is its first", "state += kRows * kDstate;", ""),
        ("slabs share their scales", "scale += kRows;\n    x[0]", "scale += 0;\n    x[0]"),
        ("slabs share their rows of x", "x[0] += kRows, x[1] += kRows;", ""),
        ("every slab goes where the first goes", "to += kRows * kDstate;", ""),
        (
            "slabs of wide states never asked for",
            "if (!kAsksEarly<State, Act, Copy> &&",
            "if (false &&",
        ),
        ("snapshot skips requests", "layers, ++position;", "layers, position += 2;"),
        (
            "B of the first group",
            "head / params.heads_per_group * params.B_cache_group_stride",
            "0 * params.B_cache_group_stride",
        ),
        (
            "pad slot takes part",
            "slot == params.pad_slot_id || slot >= params.num_slots",
            "slot >= params.num_slots",
        ),
        (
            "slots too large take part",
            "slot == params.pad_slot_id || slot >= params.num_slots",
            "slot == params.pad_slot_id",
        ),
    ],
    "plan_materialize.cu": [
        ("boundary left behind counts", "boundary > before}", "boundary >= before}"),
        ("list of each warp begins anew", "place += w < warp ? counts[w] : 0;", ""),
        ("list of each batch of rows begins anew", "planned += counts[w];", ""),
        (
            "destinations keep their cursors",
            "if (params.move_cursors) move_cursors(",
            "if (false) move_cursors(",
        ),
        ("end of the list not written", "params.batch;\n       i +=", "0;\n       i +="),
        ("fold in place forgets later rows", "in_place ? row.live - folded : 0;", "0;"),
        (
            "prefix beyond the live rows",
            "prefix = min(prefix, int64_t{max",
            "prefix = max(prefix, int64_t{max",
        ),
        ("boundary beyond the newest token", "boundary >= 0 && boundary <= after", "boundary >= 0"),
    ],
    "copy_slots.cu": [
        (
            "dead rows go along",
            "params.is_ring[array] ? live : 1",
            "params.is_ring[array] ? 16 : 1",
        ),
        ("rows copied from row 0 on", "ring_row(from.start, j,", "ring_row(0, j,"),
        (
            "copied cursor starts at 0",
            "params.ring_start_stride] = start;",
            "params.ring_start_stride] = 0;",
        ),
        ("beams share a slot", "copy * params.dst_slots_copy_stride", "0 * copy"),
        ("images hold one row of a ring", "params.image_rows : 1;", "1 : 1;"),
        (
            "copies take one load of four",
            "first += kAtOnce * step)",
            "first += 2 * kAtOnce * step)",
        ),
        (
            "live rows not counted",
            "params.prev_num_accepted_tokens_stride] = live;",
            "params.prev_num_accepted_tokens_stride] = 0;",
        ),
    ],
    "check.cu": [
        ("duplicate slots pass", "other < row;", "other < 0;"),
        ("illegal ring_start passes", "start < params.ring_buffer_len;", "true;"),
        ("too long sequences pass", "last - first > params.npredicted", "false"),
        ("prefix beyond the live rows passes", "if (rows > live) report", "if (false) report"),
        ("destination of two passes", "theirs.dst == mine.dst && theirs", "false && theirs"),
        ("another's source as destination passes", "theirs.src == mine.dst", "false"),
        ("null address passes", "addresses[table] == 0 || ", ""),
        ("request listed twice passes", "if (before == request) report", "if (false) report"),
        ("request behind the end passes", "if (before < 0) report", "if (false) report"),
        ("fold repeated passes", "params.folds[slot] == step.stamp", "false"),
        ("forced folds leave no stamp", "forced || replay::flushes(", "replay::flushes("),
        ("every step leaves a stamp", "if (step.folds)", "if (true)"),
        ("stamp without ring_start", "live + start * ", "live + 0 * "),
        ("step without tokens may not follow", "q > 0 || forced,", "true,"),
        (
            "only the first layer forgets folds",
            "layer < params.layers; ++layer) {\n    params.f",
            "layer < 1; ++layer) {\n    params.f",
        ),
    ],
}
FAULTS = tuple(Fault(file, *edit) for file, edits in EDITS.items() for edit in edits)


def suite_of(fault: Fault) -> tuple[str, ...]:
    """The tests that may see a fault, the likeliest first."""
    if fault.file == "positions.cu":
        return POSITION_SUITE
    if fault.file in COPY_FILES or fault.name.startswith("copied:"):
        return COPY_SUITE + POSITION_SUITE
    if fault.file == "fold.cuh":  # steps and snapshots share it
        return SUITE[:3] + SNAPSHOT_SUITE
    if fault.file in TWO_KERNEL_FILES:
        return TWO_KERNEL_SUITE + SUITE
    return SNAPSHOT_SUITE if fault.file in SNAPSHOT_FILES else SUITE + SNAPSHOT_SUITE


def first_failure(fault: Fault) -> str | None:
    """The first test that fails with the fault, or None if it survives."""
    with tempfile.TemporaryDirectory() as folder:
        sources = pathlib.Path(folder) / "cuda"
        shutil.copytree(ROOT / "cuda", sources)
        fault.apply(sources)
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-xvk",
                "not cuda",
                "-p",
                "no:cacheprovider",
                *suite_of(fault),
            ],
            cwd=ROOT,
            env=dict(os.environ, REPLAYSSM_HOST_SOURCES=str(sources)),
            capture_output=True,
            text=True,
        )
    if run.returncode == 0:
        return None
    if "host.builder.BuildError" in run.stdout:
        raise ValueError(f"{fault.name} does not compile: {run.stdout[-3000:]}")
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", run.stdout, re.M)
    if failed:
        return failed[1]
    started = re.findall(r"^(\S+::.+?)(?: [A-Z]+ .*)?$", run.stdout, re.M)
    if not started:
        raise ValueError(f"the tests do not run: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return f"{started[-1]} (the process died)"


def main(names: list[str]) -> int:
    """Print the table; 1 if a fault survives."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    survivors = 0
    print("| fault | first test that fails |\n| --- | --- |")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process of its own
        for fault, test in zip(chosen, pool.map(first_failure, chosen), strict=True):
            survivors += test is None
            print(f"| {fault.name} | {test or '**none**'} |", flush=True)
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
