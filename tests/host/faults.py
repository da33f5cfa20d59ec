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
    "tests/test_kernels.py",
    "tests/test_conversions.py",
    "tests/test_stochastic.py",
    "tests/test_varlen.py",
    "tests/test_eight_bit.py",
    "tests/test_checked.py",
    "tests/host/test_histories.py",
)

# The kernels of whole slots and the checks have tests of their own.
SNAPSHOT_SUITE = ("tests/test_checked.py", "tests/test_snapshots.py", "tests/test_prefix.py")
SNAPSHOT_FILES = ("materialize.cu", "plan_materialize.cu", "copy_slots.cu", "fold.cuh", "check.cu")


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
            "return row >= ring_buffer_len ? row - ring_buffer_len : row;",
            "return row;",
        ),
        ("wrap one row late", "row >= ring_buffer_len ?", "row > ring_buffer_len ?"),
        ("pad slot test dropped", "slot == params.pad_slot_id || ", ""),
        ("slot upper bound dropped", " || slot >= params.num_slots", ""),
        ("slots read without their stride", "row * params.slots_stride", "row"),
        ("old rows read out after a flush", "flush ? 0 : live;", "live;"),
        ("prefix sum leaves out its edge", "row >= step", "row > step"),
        (
            "low half of a difference dropped",
            "(a.high - b.high) + (a.low - b.low)",
            "a.high - b.high",
        ),
        ("dt_bias of the first head", "head * params.dt_bias_stride", "0"),
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
        ("softplus overflows", "v <= 20.0f ? log1pf(expf(v)) : v", "log1pf(expf(v))"),
        ("softplus loses small results", "log1pf(expf(v))", "logf(1.0f + expf(v))"),
        ("upper half of a pair lost", "__uint_as_float(pair & 0xffff0000u)", "0.0f"),
        (
            "scale without its floor",
            "fmaxf(__uint_as_float(amax_bits), kLargest * 0x1p-117f)",
            "__uint_as_float(amax_bits)",
        ),
        ("rows of NaN stored as numbers", "amax_bits >= 0x7f800000u", "amax_bits > 0xfffffffeu"),
        ("offset of the random bits in 32 bits", "static_cast<uint32_t>(offset >> 32)", "0u"),
        ("random field not masked to 13 bits", "field & 0x1fffu", "field"),
        ("codes share their random half", "(a.y, reversed >> 16)", "(a.y, word & 0xffffu)"),
    ],
    "flush.cuh": [
        ("fp32 fold in two terms", "== 4 ? 3 : 2", "== 4 ? 2 : 2"),
        ("dead rows of B folded", "lane.t, j < window.live);", "lane.t, true);"),
        (
            "state does not decay at a flush",
            "fold.decay = ptx::ex2(decays.a * total.high);",
            "fold.decay = 1.0f;",
        ),
        (
            "fold weighs from the wrong end",
            "difference(total, shuffle(decays.sum, j))",
            "shuffle(decays.sum, j).high",
        ),
        (
            "flush not stored in rows 8 to 15",
            "8 * kPairsOfPiece * piece + 8 * h * kDstate",
            "8 * kPairsOfPiece * piece",
        ),
    ],
    "step.cuh": [
        (
            "32-bit slot offset",
            "(params.state) + unit.slot * params.state_slot_stride +",
            "(params.state) + int(unit.slot * params.state_slot_stride) +",
        ),
        (
            "group of the next head",
            "group(head / params.heads_per_group)",
            "group((head + 1) % params.nheads / params.heads_per_group)",
        ),
        (
            "dead rows of x unmasked",
            "const bool live = j < window.rows();",
            "const bool live = true;",
        ),
        ("dead dt folded", "window.flush && j < window.live", "window.flush"),
        (
            "old dt processed again",
            "return fresh ? processed_dt(params, dt, unit.head) : dt;",
            "return lane.index < window.rows() ? processed_dt(params, dt, unit.head) : dt;",
        ),
        ("cursor out of range followed", "min(max(live, 0), params.max_window)", "live"),
        ("tokens of the first sequence", "token = params.cu_seqlens[row];", "token = 0;"),
        ("flush by the longest length", "window.q = unit.q;", "window.q = params.npredicted;"),
        ("longer than max_seqlen", ", 0), params.npredicted);", ", 0), 99);"),
        ("forced flush of an empty ring", "(unit.forced && window.live > 0)", "unit.forced"),
        ("forced flush forgotten", "(unit.forced && window.live > 0) || ", ""),
        ("slab that is not there read", "min(s, slabs - 1)", "s"),
    ],
    "checkpointing_ssu.cu": [
        ("A of the first head", "unit.head * params.A_stride", "0"),
        ("D of the first head", "unit.head * params.D_stride", "0"),
        ("later tokens seen", " && j <= row)", ")"),
        ("own token unseen", " && j <= row)", " && j < row)"),
        (
            "append one row late",
            "window.start + window.live - window.old_rows();",
            "window.start + window.live - window.old_rows() + 1;",
        ),
        (
            "only the first group appends B",
            "unit.head != unit.group * params.heads_per_group",
            "unit.head != 0",
        ),
        (
            "first token's dt not appended",
            "if (lane.index >= window.old_rows() &&",
            "if (lane.index > window.old_rows() &&",
        ),
        ("gate of the token before", "silu(of_tokens.y)", "silu(of_tokens.x)"),
        ("padding always zeroed", "if (params.zero_padding) zero_outputs", "zero_outputs"),
        ("only even tokens of padding zeroed", "t = (threadIdx.x & 31) >> 4;", "t = 0;"),
        (
            "second chunk of a wide state not loaded",
            "chunk.load_state(state + column, unit);",
            "chunk.load_state(state, unit);",
        ),
        (
            "only the first slab flushed",
            "s < unit.slabs; ++s) {\n    const int",
            "s < 1; ++s) {\n    const int",
        ),
        ("x of the first slab appended", "x[s][i][h];", "x[0][i][h];"),
        ("scale of the first slab", "scales[unit.first_row(s)],", "scales[unit.first_row(0)],"),
        (
            "rows of a slab that is not there appended",
            "if (s > 0 && s >= unit.slabs) break;\n#pragma",
            "#pragma",
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
        (
            "snapshot adds rows without their decay",
            "ptx::ex2(decays.a * span) * __shfl_sync",
            "1.0f * __shfl_sync",
        ),
        ("snapshot scales row g + 8 as row g", "fmaf(decay[1], l.x,", "fmaf(decay[0], l.x,"),
        ("snapshot folds half of the rows", "movmatrix(B[1][first + q])", "movmatrix(0u)"),
    ],
    "materialize.cu": [
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
        ("snapshot rounded as if at its slab's start", "rounding, at)\n", "rounding, offset)\n"),
        (
            "destinations of the first layer",
            "layer * params.dst_slots_layer_stride +",
            "0 * params.dst_slots_layer_stride +",
        ),
        ("snapshot reads dead rows of x", "j < item.rows ? *reinterpret", "true ? *reinterpret"),
        (
            "snapshot reads dead rows of B",
            "+ column, lane.t, j < item.rows);",
            "+ column, lane.t, true);",
        ),
        ("snapshot reads dead dt", "if (j >= rows) return 0.0f;", ""),
        (
            "copy of a slab forgets its scales",
            "scale != nullptr && lane.index",
            "false && lane.index",
        ),
        (
            "copy of a slab repeats a vector",
            "to[32 * (first + i)] = v[i];",
            "to[32 * (first + i)] = v[0];",
        ),
        ("snapshot decodes row g + 8 as code", ", decay[1] *= scale[1];", ";"),
        ("layers share random bits", "item.layer);\n    target", "0);\n    target"),
        ("second chunk is the first again", "if (chunk > 0) given", "if (chunk > 1) given"),
        ("snapshot forgets the next layer", "inner -= of_layer, ++layer;", "inner -= of_layer;"),
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
    ],
}
FAULTS = tuple(Fault(file, *edit) for file, edits in EDITS.items() for edit in edits)


def suite_of(fault: Fault) -> tuple[str, ...]:
    """The tests that may see a fault, the likeliest first."""
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
