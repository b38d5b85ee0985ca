"""The command line: `python -m cute_moe demo` and `python -m cute_moe doctor`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

MAX_DEMO_TOKENS = 64


def parse_tokens(text: str) -> tuple[int, ...]:
    """Batch sizes from "1,2,8" or "1-8"; ArgumentTypeError on anything outside 1..64."""
    tokens: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            tokens.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        tokens = []
    if not tokens or not all(1 <= count <= MAX_DEMO_TOKENS for count in tokens):
        raise argparse.ArgumentTypeError(
            f"expected numbers from 1 to {MAX_DEMO_TOKENS}, such as 1,2,8 or 1-8; got {text!r}"
        )
    return tuple(tokens)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m cute_moe", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="run one MoE layer and check and time it")
    demo.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="block-FP8 safetensors checkpoint; without it one with random weights is written",
    )
    demo.add_argument("--layer", type=int, default=0, metavar="L", help="default: 0")
    demo.add_argument(
        "--tokens", type=parse_tokens, default="1-8", metavar="LIST", help="1,2,8 or 1-8 (default)"
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    demo.add_argument(
        "--keep", type=Path, metavar="DIR", help="write the random checkpoint there and keep it"
    )

    doctor = commands.add_parser("doctor", help="say what this machine has and can run")
    doctor.add_argument(
        "--compile", action="store_true", help="compile every kernel for sm_90a and inspect it"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command: exit code 0, 1 for a bad result or a failure, 2 for wrong usage."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        if given.command == "doctor":
            from cute_moe.doctor import run_doctor

            return run_doctor(given.compile, given.json, console)
        if given.checkpoint and given.keep:
            parser.error("--keep is for the checkpoint that is written when --checkpoint is absent")
        from cute_moe.demo import DemoOptions, run_demo

        options = DemoOptions(
            given.checkpoint, given.layer, given.tokens, keep=given.keep, seed=given.seed
        )
        return run_demo(options, console)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
