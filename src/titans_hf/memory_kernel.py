"""What updates the memory on a GPU: PyTorch, the project's Triton kernels (`memory_triton`), or, for a linear memory,
`chunk_comba` of flash-linear-attention (fla).

`chunk_comba` computes exactly the memory of one layer with the delta rule, without momentum, with forgetting to M_0:
S = M - M_0 follows its rule (`memory_listing.torch_chunk_comba` is the same in plain PyTorch). It has no counterpart of
momentum, of several layers or of errors at the chunk's start, and does not return the tokens' errors, their surprise.

Shapes: R rows, H heads, G slots of a row, D head size.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from transformers.utils import logging

from .memory_chunk import GroupFunctions
from .memory_network import UpdateRule
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState
from .token_grid import TokenGrid

logger = logging.get_logger(f"transformers.{__name__}")  # `transformers.logging.set_verbosity_info()` shows its lines

LARGEST_KEY = 256  # of fla's chunk kernels
SMALLEST_LOG_RETAIN = -30.0  # fla returns nan for -inf; exp(-30) is 1e-13
# Of the Triton kernels, whose tiles are powers of two: tokens of a chunk, head sizes, sizes of a hidden layer.
CHUNK_SIZES, HEAD_SIZES, HIDDEN_SIZES = (16, 32, 64), (16, 32, 64, 128), (16, 32, 64, 128, 256)


def choose_kernel(
    requested: str, inputs: MemoryInputs, state: MemoryState, rule: UpdateRule
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns fla's `chunk_comba` if it is to compute an update, None if PyTorch is; logs once which of them and why.

    requested: `TitansConfig.memory_kernel`. "auto" takes the kernel where it can compute the update, but not in a
    compiled model, whose graph it would break.

    Raises ValueError for "fla" where the kernel cannot compute the update, with all that does not fit.
    """
    if requested == "torch" or (requested == "auto" and torch.compiler.is_compiling()):
        return None
    misfits = _misfits(inputs, state, rule)
    # fla is imported on a GPU only: with fla installed, nothing changes on a CPU.
    kernel, failure = (None, None) if misfits else _import_chunk_comba()
    if kernel is not None:
        logger.info_once("The memory is updated by fla's chunk_comba.")
        return kernel
    reason = "; ".join(misfits) or f"{failure}. The kernel needs pip install -e '.[gpu]'"
    if requested == "fla":
        raise ValueError(f"`memory_kernel` must be 'auto' or 'torch' here, but is 'fla': {reason}.")
    log_once = logger.info_once if misfits else logger.warning_once
    log_once(f"The memory is updated by PyTorch, not by fla's kernel: {reason}.")
    return None


def _misfits(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule) -> list[str]:
    """Returns what keeps `chunk_comba` from computing an update; nothing if it can."""
    weights, key_size = state.weights[0], inputs.keys.shape[-1]
    misfits = _misfits_of_any_kernel(weights) | {
        f"the memory has {len(state.weights)} layers, not 1": len(state.weights) != 1,
        "the memory has momentum": bool(state.momentum),
        "the update rule is 'chunk', not 'delta'": not rule.delta_rule,
        f"the keys have {key_size} entries, more than {LARGEST_KEY}": key_size > LARGEST_KEY,
    }
    return [reason for reason, applies in misfits.items() if applies]


def _misfits_of_any_kernel(weights: Tensor) -> dict[str, bool]:
    return {
        f"the memory is on the device {weights.device.type!r}, not 'cuda'": weights.device.type != "cuda",
        f"the memory is in {weights.dtype}, not torch.float32": weights.dtype != torch.float32,
    }


def triton_functions(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule, chunk_size: int) -> GroupFunctions:
    """Returns the functions of a group whose chain of chunks is computed by the Triton kernels, for `memorize`.

    Raises ValueError where the kernels cannot compute the update, with all that does not fit, and without Triton.
    """
    (_, hidden_size), head_size = state.weights[0].shape[-2:], inputs.keys.shape[-1]
    misfits = _misfits_of_any_kernel(state.weights[0]) | {
        "the model is being compiled": torch.compiler.is_compiling(),
        f"the memory has {len(state.weights)} layers, more than 2": len(state.weights) > 2,
        f"the memory's network is {rule.network!r}, not 'mlp'": rule.network != "mlp",
        "the memory's layers have gates of their own": inputs.has_gates_per_layer,
        f"a chunk has {chunk_size} tokens, not {_one_of(CHUNK_SIZES)}": chunk_size not in CHUNK_SIZES,
        f"a head has {head_size} entries, not {_one_of(HEAD_SIZES)}": head_size not in HEAD_SIZES,
        f"the hidden layer has {hidden_size} units, not {_one_of(HIDDEN_SIZES)}": hidden_size not in HIDDEN_SIZES,
    }
    reasons = [reason for reason, applies in misfits.items() if applies]
    functions, failure = (None, None) if reasons else _import_kernel_functions()
    if functions is None:
        reason = "; ".join(reasons) or failure
        raise ValueError(f"`memory_kernel` must be 'auto' or 'torch' here, but is 'triton': {reason}.")
    logger.info_once("The memory is updated by its Triton kernels.")
    return functions


def _one_of(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


@cache
def _import_kernel_functions() -> tuple[GroupFunctions | None, str | None]:
    """Returns the functions with the Triton kernels, or None and why there are none."""
    from .memory_triton import KERNEL_FUNCTIONS, triton

    return (KERNEL_FUNCTIONS, None) if triton else (None, "Triton cannot be imported")


@cache
def _import_chunk_comba() -> tuple[Callable[..., tuple[Tensor, Tensor]] | None, str | None]:
    """Returns fla's `chunk_comba`, or None and why it cannot be imported."""
    try:
        from fla.ops.comba import chunk_comba
    except Exception as error:  # an fla that does not fit torch or Triton raises anything
        return None, f"fla cannot be imported ({error})"
    return chunk_comba, None


def memorize_by_kernel(
    chunk_comba: Callable[..., tuple[Tensor, Tensor]],
    inputs: MemoryInputs,
    state: MemoryState,
    grid: TokenGrid,
    decay_target: tuple[Tensor, ...] = (),
) -> MemorizeOutput:
    """Computes `memorize` of a linear memory with the delta rule by `chunk_comba`, for tokens on the slots of a grid.

    Of S = M - M_0, with v' = v - M_0 k and b = 2 theta / max(1, |k|^2):

        S_t = (1 - alpha_t) S_{t-1} + b_t (v'_t - S_{t-1} k_t) k_t^T    y_t = (S_t + M_0) q_t    (eq. 10, 13, 15)

    The surprise of the output is None.
    """
    inputs, (weights,) = inputs.map(lambda x: x.to(state.weights[0].dtype)), state.weights
    queries, keys, values = inputs.queries, inputs.keys, inputs.values
    # With gates per layer, (R, H, G, 1)
    inner_lr, log_retain = (x.reshape(keys.shape[:3]) for x in (inputs.inner_lr, inputs.log_retain))
    beta = 2 * inner_lr / keys.square().sum(-1).clamp(min=1.0)
    g = log_retain.clamp(min=SMALLEST_LOG_RETAIN)
    if (filled := grid.filled) is not None:  # an empty slot writes nothing and forgets nothing
        beta, g = (x.masked_fill(~filled[:, None], 0.0) for x in (beta, g))
    target = decay_target[0] if decay_target else None  # M_0 (H, D, D)
    if target is not None:
        values, weights = values - keys @ target, weights - target  # (G, D) @ (D, D)
    q, k, v, g, beta = (x.transpose(1, 2) for x in (queries, keys, values, g, beta))  # (R, G, H, ...)
    retrieved, weights = chunk_comba(
        q, k, v, p=k, g=g, beta=beta, scale=1.0, initial_state=weights, output_final_state=True
    )
    retrieved = retrieved.transpose(1, 2)
    if target is not None:
        retrieved, weights = retrieved + queries @ target, weights + target  # (G, D) @ (D, D)
    num_seen = state.num_seen + grid.row_ends - grid.row_starts
    return MemorizeOutput(retrieved, None, MemoryState((weights,), (), (), num_seen))
