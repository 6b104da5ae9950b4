"""Counts what a GPU would be asked for: kernels that are started, and values that the host waits for.

Operations of ATen are counted on a CPU as they are called. Views and allocations start no kernel, some operations start
several. Where an operation is a kernel of its own on a GPU only, the number is an estimate, the same in every count.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = set(
    """alias as_strided chunk detach detach_ diagonal empty empty_like empty_strided expand is_pinned is_same_size
    lift_fresh narrow new_empty new_empty_strided permute promote_types resize_ result_type select set_ slice split
    split_with_sizes squeeze sym_size t transpose unbind unfold unsafe_split unsqueeze view view_as
    _local_scalar_dense _reshape_alias _unsafe_view""".split()
)
WEIGHTS = dict(
    masked_fill=2, constant_pad_nd=2, baddbmm=2, linalg_solve_triangular=5, convolution_backward=3, index_copy=2,
    embedding_dense_backward=4, index_put_=3, index_put=4, nonzero=4, repeat_interleave=2, sort=3, index_add=2,
    _scaled_dot_product_flash_attention_for_cpu_backward=3, slice_backward=2, select_backward=2, scatter=2,
    diagonal_backward=2, split_with_sizes_backward=1, unfold_backward=2,
)  # fmt: skip
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "_unique2", "masked_select"}


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors of a tree."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def reads_of(name: str, args: tuple) -> bool:
    """True for an operation whose result the host has to wait for."""
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return name in READS or any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices)


class Launches(TorchDispatchMode):
    """Counts the launches and the host's reads of all calls within."""

    def __init__(self):
        super().__init__()
        self.operations, self.reads, self.is_fused = Counter(), 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        name = function._schema.name.split("::")[1]
        self.reads += reads_of(name, args)
        is_free = function.is_view or name in FREE or self.is_fused
        if not (is_free or (isinstance(result, Tensor) and result.numel() == 0)):
            self.operations[name] += 1
        return result

    @property
    def total(self) -> int:
        """Number of kernels that are started."""
        return sum(WEIGHTS.get(name, 1) * number for name, number in self.operations.items())

    @property
    def solves(self) -> int:
        """Number of triangular systems that cuBLAS would solve."""
        return self.operations["linalg_solve_triangular"]


def count(run: Callable[[], object]) -> Launches:
    """Counts the launches of a function."""
    rms_norm = torch.nn.functional.rms_norm

    def fused(*args, **kwargs) -> Tensor:  # one kernel on a GPU, several operations on a CPU
        launches.is_fused = True
        result = rms_norm(*args, **kwargs)
        launches.is_fused, launches.operations["rms_norm"] = False, launches.operations["rms_norm"] + 1
        return result

    with Launches() as launches, patch.object(torch.nn.functional, "rms_norm", fused):
        run()
    return launches
