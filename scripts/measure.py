"""Seconds and peak memory of a function, on a CPU and on a GPU."""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Measures the seconds of `run`: processor time, which other processes do not change; wall-clock time on a GPU."""
    if device.type == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Measures the peak of what `run` allocates for tensors, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = torch.tensor([0, *(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))])
    return int(held.cumsum(0).max())


def unless_out_of_memory(measure: Callable[[], float]) -> float | None:
    """Returns the result of `measure`; None where the GPU has too little memory for it."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def least_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Measures the least of several times, after a first that does not count."""
    return min([seconds(run, device) for _ in range(repeats + 1)][1:])
