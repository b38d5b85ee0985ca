"""The host side, µs at M = 1. First calls: each in a new process, after imports, until the result
is there, with an empty compile cache (cold JIT) and with the one that it left. Calls: CPU time of a
call, median of bursts of 16 that start with an idle GPU and leave the launch queue far from full.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import protocol as p
import torch
from contest import Advance, Launch, Options, Result, rows, skip
from peers import find_peers
from report import TARGETS_US

import cute_moe
from cute_moe import reference
from cute_moe.checkpoint import LayerTensors
from cute_moe.host.compile import CACHE_VARIABLE
from cute_moe.timing import capture

BURST = 16  # calls between two waits for the GPU: a launch queue holds about a thousand
BURSTS = 3000  # some seconds: the clock of a shared host has slower and faster ones
STARTS = 2  # new processes for each kind of first call; quick: 1
COLD_JIT, WARM_START, MONO_MOE = TARGETS_US


def make_inputs() -> tuple[torch.Tensor, ...]:
    """(x, logits, w_up, s_up, w_down, s_down, out) at M = 1, with e4m3 weights of random bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    e, k, n = p.SHAPE.num_experts, p.SHAPE.hidden, p.SHAPE.intermediate

    def draw(r: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"generator": generator, "device": "cuda", "dtype": torch.uint8}
        bits = torch.randint(0, 120, (e, r, c), **options)
        signs = torch.randint(0, 2, (e, r, c), **options) * 128
        return (bits + signs).view(reference.E4M3), torch.full(
            (e, r // 128, c // 128), 1e-4, device="cuda"
        )

    x = torch.randn(1, k, generator=generator, device="cuda").bfloat16()
    logits = torch.randn(1, e, generator=generator, device="cuda").bfloat16()
    out = torch.full_like(x, torch.nan)
    return x, logits, *draw(2 * n, k), *draw(k, n), out


def first_call() -> dict[str, object]:
    """Times the first call of this process; for a process of its own."""
    started = time.perf_counter()
    import cutlass.cute  # noqa: F401  what the first call would import by itself

    imported = time.perf_counter()
    *inputs, out = make_inputs()
    pad = cute_moe.alloc_scratchpad("cuda")
    torch.cuda.synchronize()
    before = time.perf_counter()
    cute_moe.mono_moe(*inputs, p.TOP_K, out=out, scratchpad=pad)
    torch.cuda.synchronize()
    after = time.perf_counter()
    error = reference.relative_error(out, reference.moe_block_fp8(*inputs, p.TOP_K))
    check = p.OK if error <= p.MAX_ERROR else f"wrong, error {error:.3g}"
    return {"call": (after - before) * 1e6, "import": (imported - started) * 1e6, "check": check}


def in_new_process(cache: str) -> dict[str, object]:
    """`first_call` in a new process with its compile cache in `cache`."""
    environment = {**os.environ, CACHE_VARIABLE: cache}
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def start_results(starts: int) -> dict[str, Result]:
    """First calls with an empty cache, then with the cache that the first one left."""
    kinds: dict[str, list[dict[str, object]]] = {COLD_JIT: [], WARM_START: []}
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as cache:
            for found in kinds.values():
                found.append(in_new_process(cache))
    results = {
        kind: Result([f["call"] for f in found], _worst(f["check"] for f in found))
        for kind, found in kinds.items()
    }
    imports = [f["import"] for f in kinds[WARM_START]]
    return {**results, "import of the compiler": Result(imports, p.NOTHING_TO_CHECK)}


def _worst(checks: Iterable[str]) -> str:
    return next((check for check in checks if check != p.OK), p.OK)


def call_times(calls: Mapping[str, Launch], bursts: int) -> dict[str, list[float]]:
    """CPU µs of one call for each burst that starts with an idle GPU, the calls taking turns.

    As in timeit, the garbage collector does not run meanwhile.
    """
    times = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(p.WARM_UP_REPLAYS + bursts):
            for name, call in calls.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(BURST):
                    call()
                times[name].append((time.perf_counter() - started) * 1e6 / BURST)
        torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    return {name: found[p.WARM_UP_REPLAYS :] for name, found in times.items()}


def call_results(options: Options, bursts: int) -> list[tuple[str, str, Result]]:
    """(contestant, case, result) of our function, our layer, a graph and the peers' functions."""
    *tensors, out = make_inputs()
    x, logits, *weights = tensors
    want = reference.moe_block_fp8(*tensors, p.TOP_K)
    pad = cute_moe.alloc_scratchpad("cuda")
    layer = cute_moe.MoELayer(LayerTensors(*weights), top_k=p.TOP_K)

    def ours() -> torch.Tensor:
        return cute_moe.mono_moe(*tensors, p.TOP_K, out=out, scratchpad=pad)

    calls = {
        ("cute_moe", MONO_MOE): (ours, p.MAX_ERROR),
        ("cute_moe", "call of MoELayer"): (lambda: layer(x, logits), p.MAX_ERROR),
    }
    for name, peer in find_peers(options, [tuple(weights)]).items():
        if peer.baseline:
            continue
        call = functools.partial(peer.call, x, logits, *peer.copies[0], out)
        try:
            call()
        except Exception as error:  # whatever a foreign package raises
            skip(name, error)
        else:
            calls[name, "call"] = (call, peer.max_error)
    graph = capture([ours] * p.LAUNCHES)
    times = call_times({key: call for key, (call, _) in calls.items()}, bursts)
    found = []
    for key, (call, max_error) in calls.items():
        out.fill_(torch.nan)
        error = reference.relative_error(call(), want)
        check = p.OK if error <= max_error else f"wrong, error {error:.3g}"
        found.append((*key, Result(times[key], check)))
    out.fill_(torch.nan)
    (replays,) = call_times({"graph": graph.replay}, bursts // p.LAUNCHES).values()
    check = p.OK if reference.relative_error(out, want) <= p.MAX_ERROR else "wrong"
    case = f"a launch of a replayed graph of {p.LAUNCHES}"
    return [*found, ("cute_moe", case, Result([us / p.LAUNCHES for us in replays], check))]


def measure(options: Options, advance: Advance) -> list[p.Row]:
    """All rows of the host side."""
    shared = {"op": "host", "tokens": None, "routing": "none", "bytes": 0, "experts": 0}
    made = []

    def add(contestant: str, case: str, cache: str, result: Result) -> None:
        made.extend(rows({contestant: result}, case=case, cache=cache, reuse_bytes=0, **shared))

    advance("new processes", 2)
    for case, result in start_results(1 if options.quick else STARTS).items():
        add("cute_moe", case, "cold" if case == COLD_JIT else "warm", result)
    advance("calls", 2)
    for contestant, case, result in call_results(options, 300 if options.quick else BURSTS):
        add(contestant, case, "eager", result)
    return made


if __name__ == "__main__":
    print(json.dumps(first_call()))
