"""`python -m replayssm_cupy`: demo, doctor, kernels.

A command imports its module when it is chosen, so that one works where another does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import ReplaySSMError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for a mistake or something missing."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(_parser(words[:1] == ["demo"]).parse_args(words))
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    except ReplaySSMError as error:
        print(f"error: {error}", file=sys.stderr)  # may hold a compiler's log
    return 2


def _parser(with_demo: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_cupy",
        description="ReplaySSM: decode Mamba-2 layers fast, from any array library.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="decode text with a Mamba-2 model and check it")
    if with_demo:
        from .demo import add_arguments

        add_arguments(demo)
    doctor = commands.add_parser("doctor", help="what this machine has, lacks, and what mends it")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    kernels = commands.add_parser(
        "kernels", help="registers, shared memory, spills, occupancy; needs no GPU"
    )
    kernels.add_argument("--arch", default="sm_90", help="target, such as sm_90 or sm_100")
    kernels.add_argument(
        "--layout",
        metavar="NHEADS,HEADS_PER_GROUP,HEAD_DIM,MAX_WINDOW,RING_BUFFER_LEN",
        help="the decode kernels that know these sizes instead, such as 64,8,64,16,17",
    )
    kernels.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.command == "demo":
        from . import demo

        return demo.run(args)
    if args.command == "doctor":
        from . import doctor

        return doctor.run(args.json)
    from . import resources

    return resources.print_kernels(args.arch, args.json, args.layout)


if __name__ == "__main__":
    sys.exit(main())
