"""Times of kernels that run for microseconds, on torch's current GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 30
WARM_UP_REPLAYS = 5


def capture(launches: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all `launches`; each runs once before, so that nothing compiles in it."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def graph_microseconds(launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median µs per launch of one CUDA graph that holds all `launches`, replayed `replays` times.

    Launches that read different data keep the L2 cache cold; equal ones measure the cache.
    """
    graph = capture(launches)
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    spans = [_span_microseconds(graph.replay) for _ in range(replays)]
    return statistics.median(spans) / len(launches)


def copy_bandwidth(nbytes: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes/s, read and written, of device-to-device copies of `nbytes`: the median copy."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    spans = [_span_microseconds(lambda: target.copy_(source)) for _ in range(repeats)]
    return 2 * nbytes / (statistics.median(spans) * 1e-6)


def _span_microseconds(work: Callable[[], object]) -> float:
    """µs on the current stream from before to after `work`, once the GPU is done with it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
