"""Time and peak memory of functions, alone or in turn with others."""

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

Pass = Callable[[], object]  # the function that is measured
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt
MMAP_MIN_BYTES = 1 << 16  # bytes from which on memory is mapped, and given back when it is freed


def seconds(run: Pass, device: torch.device) -> float:
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


def in_turn(functions: Mapping[str, Pass], device: torch.device, repeats: int) -> dict[str, float]:
    """Returns the median seconds of each function. After a warm-up round, every round runs each function once, so that
    other processes slow all of them equally.
    """
    rounds = [{name: seconds(run, device) for name, run in functions.items()} for _ in range(repeats + 1)]
    return {name: median(times[name] for times in rounds[1:]) for name in functions}


def peak_bytes(run: Pass, device: torch.device) -> int:
    """Measures the peak memory of `run` in bytes, less the memory that was allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # memory freed before would be reused without being counted
    child = os.fork()  # in a process of its own, because returning freed memory to the system at once is slow
    if not child:
        try:
            libc.mallopt(MMAP_THRESHOLD, MMAP_MIN_BYTES)
            _use_up_free_chunks(libc)
            before = _status_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            run()
            os.write(writer, str(_status_bytes("VmHWM") - before).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("the process whose memory was measured ended without an answer; out of memory?")
    return int(text)


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns; `fordblks` are the free bytes."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _use_up_free_chunks(libc: ctypes.CDLL) -> None:
    """Allocates the free chunks of the heap, so that later allocations are mapped and counted."""
    libc.mallinfo2.restype = MallocInfo
    for _ in range(libc.mallinfo2().fordblks // (MMAP_MIN_BYTES // 2)):
        libc.malloc(MMAP_MIN_BYTES // 2)


def _status_bytes(field: str, process: int | str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def resident_bytes(process: int | str = "self") -> int:
    """Returns the resident memory of a process in bytes. Raises OSError or StopIteration if it has ended."""
    return _status_bytes("VmRSS", process)


def large_product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measures the multiply-adds per second of one large matrix product."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    repeats = 5

    def multiply() -> None:
        for _ in range(repeats):
            a @ b

    return repeats * size**3 / in_turn({"product": multiply}, device, 5)["product"]


def check_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raises AssertionError where two tensors differ by more than `tolerance` of the expected norm."""
    distance = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    if not distance <= tolerance:
        raise AssertionError(f"{name} is off by {distance:.1e} of its length; at most {tolerance:.0e} was expected")
