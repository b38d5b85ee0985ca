"""The command line: `python -m cute_moe demo` and `python -m cute_moe doctor`."""

import argparse
import codecs
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cute_moe.shapes import DEFAULT_SHAPE, SHAPES

MAX_DEMO_TOKENS = 64
MAX_SEED = 2**63 - 1
# What stands for a character that the output's encoding lacks; a question mark for the others.
PLAIN = {"µ": "u", "…": "."}
INTERRUPTED = 130  # the exit code of a shell for a command that Ctrl-C ended


def parse_tokens(text: str) -> tuple[int, ...]:
    """Batch sizes from "1,2,8" or "1-8"; ArgumentTypeError on anything outside 1..64."""
    tokens: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,2})(?:-(\d{1,2}))?\s*", part, re.ASCII)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not 1 <= first <= last <= MAX_DEMO_TOKENS:
            raise argparse.ArgumentTypeError(
                f"expected numbers from 1 to {MAX_DEMO_TOKENS}, such as 1,2,8 or 1-8; got {text!r}"
            )
        tokens.extend(range(first, last + 1))
    return tuple(tokens)


def parse_count(text: str) -> int:
    """A layer or a seed; ArgumentTypeError for what is no whole number from 0 to 2^63 - 1."""
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 0, got {text!r}")
    return int(text)


def parse_folder(text: str) -> Path:
    """A path; ArgumentTypeError for the empty text, which a Path takes for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got an empty text")
    return Path(text)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m cute_moe", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="run one MoE layer and check and time it")
    demo.add_argument(
        "--checkpoint",
        type=parse_folder,
        metavar="DIR",
        help="block-FP8 safetensors checkpoint; without it one with random weights is written",
    )
    demo.add_argument("--layer", type=parse_count, default=0, metavar="L", help="default: 0")
    demo.add_argument(
        "--tokens", type=parse_tokens, default="1-8", metavar="LIST", help="1,2,8 or 1-8 (default)"
    )
    demo.add_argument("--seed", type=parse_count, default=0, metavar="N", help="default: 0")
    demo.add_argument(
        "--keep", type=parse_folder, metavar="DIR",
        help="write the random checkpoint there and keep it",
    )  # fmt: skip
    demo.add_argument(
        "--shape", choices=SHAPES, help=f"of the random checkpoint (default: {DEFAULT_SHAPE})"
    )

    doctor = commands.add_parser("doctor", help="say what this machine has and can run")
    doctor.add_argument(
        "--compile", action="store_true", help="compile every kernel for sm_90a and inspect it"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command: exit code 0, 1 for a bad result or a failure, 2 for wrong usage."""
    _let_stdout_degrade()
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.command == "demo" and given.checkpoint and given.keep:
        parser.error("--keep is for the checkpoint that is written when --checkpoint is absent")
    if given.command == "demo" and given.checkpoint and given.shape:
        parser.error("--shape is for the checkpoint that is written when --checkpoint is absent")
    try:
        code = _run(given, Console(highlight=False, markup=False, emoji=False))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has had enough
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _drop_what_stdout_refuses()


def _run(given: argparse.Namespace, console: Console) -> int:
    if given.command == "doctor":
        from cute_moe.doctor import run_doctor

        return run_doctor(given.compile, given.json, console)
    from cute_moe.demo import DemoOptions, run_demo

    options = DemoOptions(
        given.checkpoint, given.layer, given.tokens, keep=given.keep, seed=given.seed,
        shape=SHAPES[given.shape or DEFAULT_SHAPE],
    )  # fmt: skip
    return run_demo(options, console)


def _let_stdout_degrade() -> None:
    """From here on stdout writes "us" where its encoding has no "µs", and never raises for it."""
    codecs.register_error("cute_moe_plain", _plain)
    if hasattr(sys.stdout, "reconfigure"):  # not where it is closed, or replaced by another object
        sys.stdout.reconfigure(errors="cute_moe_plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in lacking), error.end


def _drop_what_stdout_refuses() -> None:
    """Without this the interpreter would complain, at its end, of what stdout could not write."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
