"""What the programs of perf/ share: the GPU or why it will not do, arguments, a time-out."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable, Sequence

import torch

from cute_moe.host.device import DeviceFacts, device_facts, why_unsupported
from cute_moe.kernels.moe.spec import MAX_TOKENS


def facts() -> DeviceFacts:
    """What the host layer knows of torch's current GPU."""
    return device_facts(torch.cuda.current_device())


def why_not_here() -> str | None:
    """Why nothing can run on torch's current GPU; None if it can."""
    return why_unsupported(facts() if torch.cuda.is_available() else None)


def device() -> torch.device:
    """torch's current GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def count(text: str) -> int:
    """A number of at least 1. Raises argparse's error for anything else."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "1,2,8" as numbers of tokens. Raises argparse's error for anything else."""
    try:
        tokens = tuple(int(part) for part in text.split(","))
    except ValueError:
        tokens = ()
    if not tokens or not all(1 <= m <= MAX_TOKENS for m in tokens):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to {MAX_TOKENS}, got {text!r}")
    return tokens


def parser(name: str, doc: str, seconds: int) -> argparse.ArgumentParser:
    """The command line of perf/NAME.py, with the option that `checked` takes its time-out from."""
    made = argparse.ArgumentParser(prog=f"perf/{name}.py", description=doc.splitlines()[0])
    text = f"end with a traceback and exit code 1 after so long (default {seconds})"
    made.add_argument("--seconds", type=count, default=seconds, help=text)
    return made


def checked(
    made: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """`work` on the parsed command line and its exit code; 2, with the reason, without an sm_90.

    A kernel that never ends cannot hold the program longer than --seconds.
    """
    args = made.parse_args(argv)
    reason = why_not_here()
    if reason:
        print(f"cannot run here: {reason}")
        return 2
    faulthandler.dump_traceback_later(args.seconds, exit=True, file=sys.__stderr__)
    try:
        return work(args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def verdict(name: str, good: bool) -> int:
    """Prints what was tried and whether it went well; 1 if it did not."""
    print(f"{name}: {'ok' if good else 'WRONG'}", flush=True)
    return int(not good)
