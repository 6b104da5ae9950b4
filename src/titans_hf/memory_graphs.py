"""The functions of a group of chunks as CUDA graphs, recorded once for each shape and replayed in every layer and at
every length.

In plain PyTorch the host starts every kernel by itself, and the GPU waits for it. A replay starts all kernels of a
function at once. A graph has its arguments and results at fixed places in memory, so a call copies its arguments there,
replays the graph and copies the results. They are equal to the function's to the bit. Products keep the precision (TF32
or not) that was set when the graph was recorded.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .memory_state import named_tensors, tensors_of, with_tensors

# A shape is recorded at this call of its function: a recording costs some tenths of a second, so a shape of one prompt
# (the rest of its tokens, once a layer) is not worth it.
RECORDED_CALL = 32
# Shapes that a function remembers; the one that was used longest ago leaves. A graph holds its arguments and results.
# What is in between has memory that all graphs of a device share, because no two of them run at once.
MOST_SHAPES = 16
_locks: defaultdict[torch.device, Any] = defaultdict(Lock)


class CudaRecording:
    """The kernels that a function without arguments starts, as a CUDA graph; `results` are at the same place after each
    replay.
    """

    _of_devices: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}  # the stream and the memory of recordings

    @staticmethod
    def is_possible(device: torch.device) -> bool:
        """True on the default stream: all replays are then in one order. A graph that the caller records is on another
        stream.
        """
        return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)

    def __init__(self, run: Callable[[], Any], device: torch.device):
        with torch.cuda.device(device):
            if device not in self._of_devices:
                self._of_devices[device] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, pool = self._of_devices[device]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # libraries set themselves up at their first call, which cannot be recorded
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on: one that pins memory would end a recording of the default mode.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.results = run()
        self.replay = graph.replay


RECORDINGS: dict[str, Any] = {"cuda": CudaRecording}  # by the type of device


class Recorded:
    """A function whose first `num_trees` arguments are trees of tensors and whose others are constants. It is recorded
    and replayed where that is possible, and called elsewhere and for arguments that need gradients.
    """

    def __init__(self, function: Callable[..., Any], num_trees: int):
        self.function, self.num_trees = function, num_trees
        # By shapes and constants: the number of calls, or the places of the arguments and the recording
        self.shapes: OrderedDict[tuple, int | tuple[list[Tensor], Any]] = OrderedDict()

    def __call__(self, *arguments: Any) -> Any:
        trees, constants = arguments[: self.num_trees], arguments[self.num_trees :]
        given = tensors_of(trees)
        device, has_grad = given[0].device, torch.is_grad_enabled()
        is_plain = all(type(x) is Tensor and not (has_grad and x.requires_grad) for x in given)
        recording = RECORDINGS.get(device.type) if is_plain else None
        if recording is None or not recording.is_possible(device):
            return self.function(*arguments)
        key = (device, constants, *((name, x.shape, x.dtype) for name, x in named_tensors(trees)))
        with _locks[device]:
            found = self.shapes.pop(key, 0)
            if isinstance(found, int):
                found = self._record(recording, trees, constants) if found + 1 >= RECORDED_CALL else found + 1
            self.shapes[key] = found
            if len(self.shapes) > MOST_SHAPES:
                self.shapes.popitem(last=False)
            if not isinstance(found, int):
                places, recorded = found
                copy([x.contiguous() for x in given], places)  # else one launch for each
                recorded.replay()
                results = tensors_of(recorded.results)
                copies = list(map(torch.empty_like, results))
                copy(results, copies)
                return with_tensors(recorded.results, copies)
        return self.function(*arguments)

    def _record(self, recording: Any, trees: tuple, constants: tuple) -> tuple[list[Tensor], Any]:
        """Records the function with arguments at places of their own, which it returns too."""
        with torch.inference_mode(False), torch.no_grad():  # a place of inference_mode could not be written outside
            places = [x.clone(memory_format=torch.contiguous_format) for x in tensors_of(trees)]
            run = lambda: self.function(*with_tensors(trees, places), *constants)  # noqa: E731
            return places, recording(run, places[0].device)


def copy(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Copies tensors to others, in one launch for each dtype."""
    for dtype in {x.dtype for x in tensors}:
        torch._foreach_copy_(*([x for x in part if x.dtype == dtype] for part in (places, tensors)))
