"""Times the kernels on a GPU against the fewest bytes they must move.

    python benchmarks/bench.py decode
        [--dtypes float32,bfloat16,float16,int8,float8_e4m3fn,float16+fp8,float16+nvfp4]
        [--tokens 1,4] [--batches 1,2,4,8,16,32,64,128,256]
        [--shapes 64/8/64/128,64/64/64/128,128/1/128/256] [--window 16]
        [--acceptance geometric:0.7 | FILE.csv] [--cycle] [--pdl] [--algorithm auto]
        [--peer flashinfer] [--peer mamba_ssm] [--csv FILE] [--markdown FILE] [--plot FILE.png]
    python benchmarks/bench.py plot FILE.csv FILE.png
    python benchmarks/bench.py host [--no-launch]
    python benchmarks/bench.py memory [--steps 1000]

``decode``: one layer step of the replay kernel, of the plain update (the same tokens in one call)
and of other libraries' kernels, in microseconds: the median of CUDA-graph replays, variants in
turn. *Cold*: a graph goes through many layers, whose caches together are several times the L2, so
each step finds its own evicted. *Steady*: every sequence stands elsewhere in its flush cycle, 200
to 400 steps from its start with random acceptance, so the share of rows that flush is the steady
one; with ``--cycle`` the same graph is timed at W consecutive steps' cursors and averaged, which
counts the whole cycle of each row. The acceptance is a truncated geometric distribution, or a
histogram (lines: accepted count, how often).

A shape is heads/groups/head_dim/dstate. With ``--algorithm two-kernel`` the replay is one kernel's,
and two kernels' have a column of their own. "floor": the fewest bytes at the read rate of this run.
"flush-first": a kernel without arithmetic that reads and writes as many bytes, those it writes
first and with evict_last: what the memory allows once some rows flush. Per cent are either of them
over the time of the replay.

``memory``: the GPU memory in use after a warm-up, after eager steps and after graph replays; exit
status 1 unless it stays the same. ``host``: the host time of eager and bound calls, and the first
call of a configuration in fresh processes, without and with the disk cache; with ``--no-launch``
the host time of calls on torch tensors in host memory whose launches do nothing, without a GPU.

One kernel under Nsight Compute (the second launch of the kernel, all sections)::

    ncu --set full --import-source on -k regex:checkpointing_ssu -s 1 -c 1 -o step \\
        python benchmarks/bench.py decode --dtypes bfloat16 --tokens 1 --batches 256
    ncu --import step.ncu-rep --page details
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from itertools import product

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import report  # noqa: E402
from peers import PEERS, find_peer  # noqa: E402
from workload import STATE_BYTES, Acceptance, Shape  # noqa: E402


def decode(args: argparse.Namespace) -> int:
    from steps import Settings, decode_row
    from timing import environment, read_ceiling

    shapes = [Shape(*sizes, args.window) for sizes in args.shapes]
    acceptance = Acceptance(args.acceptance)
    peers = {}
    for name in args.peer:
        try:
            peers[name] = find_peer(name)
        except ImportError as error:
            print(error)
    machine, ceiling = environment(), read_ceiling()
    notes = [
        *map(str, shapes),
        f"bfloat16 activations; {acceptance.text}"
        f"{', whole cycle' if args.cycle else ''}{', PDL' if args.pdl else ''}, {args.algorithm}",
        f"read ceiling {ceiling / 1e6:.2f} TB/s",
    ]
    print(", ".join(f"{name} {value}" for name, value in machine.items()), *notes, "", sep="\n")
    rows: list[dict[str, object]] = []
    for shape, dtype, tokens, batch in product(shapes, args.dtypes, args.tokens, args.batches):
        settings = Settings(shape, acceptance, args.cycle, args.pdl, args.algorithm, ceiling, peers)
        row = decode_row(settings, dtype, tokens, batch)
        heads = report.columns([row])
        if not rows:
            print(report.header(heads))
        print(report.line(row, heads), flush=True)
        rows.append({**row, "read_tb_s": round(ceiling / 1e6, 3), **machine})
    if args.csv:
        report.write_csv(args.csv, rows)
    if args.markdown:
        pathlib.Path(args.markdown).write_text(report.markdown(rows, machine, notes))
    if args.plot:
        report.plot(rows, args.plot)
    return 0


def plot(args: argparse.Namespace) -> int:
    report.plot(report.read_csv(args.csv), args.image)
    return 0


def host(args: argparse.Namespace) -> int:
    from host_side import first_call, host_times, host_times_without_launches

    if args.no_launch:
        host_times_without_launches()
    else:
        first_call()
        host_times()
    return 0


def memory(args: argparse.Namespace) -> int:
    from host_side import memory

    return 0 if memory(args.steps) else 1


def numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def shapes(text: str) -> list[list[int]]:
    found = [[int(size) for size in word.split("/")] for word in text.split(",")]
    if any(len(sizes) != 4 or min(sizes) < 1 for sizes in found):
        raise ValueError(text)
    return found


def dtypes(text: str) -> list[str]:
    unknown = [word for word in text.split(",") if word not in STATE_BYTES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"expected some of {','.join(STATE_BYTES)}, got {unknown[0]}"
        )
    return text.split(",")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = top.add_subparsers(required=True, metavar="command")
    table = commands.add_parser("decode", help="a layer step against the memory floor")
    table.add_argument("--dtypes", type=dtypes, default="float32,bfloat16")
    table.add_argument("--tokens", type=numbers, default="1,4")
    table.add_argument("--batches", type=numbers, default="1,2,4,8,16,32,64,128,256")
    table.add_argument("--shapes", type=shapes, default=Shape().short)
    table.add_argument("--window", type=int, default=Shape().window)
    table.add_argument("--acceptance", default="geometric:0.7", help="or a CSV file")
    table.add_argument("--cycle", action="store_true", help="average over W consecutive steps")
    table.add_argument("--pdl", action="store_true", help="programmatic dependent launches")
    table.add_argument("--algorithm", choices=("auto", "monolith", "two-kernel"), default="auto")
    table.add_argument("--peer", action="append", choices=PEERS, default=[])
    table.add_argument("--csv", help="write the rows to this file")
    table.add_argument("--markdown", help="write the table to this file")
    table.add_argument("--plot", help="write a plot to this file (needs matplotlib)")
    table.set_defaults(run=decode)
    draw = commands.add_parser("plot", help="a plot of the rows of --csv")
    draw.add_argument("csv")
    draw.add_argument("image")
    draw.set_defaults(run=plot)
    times = commands.add_parser("host", help="host time and first calls")
    times.add_argument("--no-launch", action="store_true", help="on the CPU, launches do nothing")
    times.set_defaults(run=host)
    same = commands.add_parser("memory", help="GPU memory over many calls")
    same.add_argument("--steps", type=int, default=1000)
    same.set_defaults(run=memory)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
