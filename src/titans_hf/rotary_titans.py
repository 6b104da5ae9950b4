"""Rotary positions of attention, from the position of every token in its document.

Angles are computed in float64 and cos and sin are rounded once: a score depends on the distance of its key alone, at
position 5 million as at position 5.
"""

import torch
from torch import Tensor

from .configuration_titans import TitansConfig


def rotary_factors(config: TitansConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes cos and sin (2, ..., 1, rotary_dim) of the rotary angles at `positions` (...) int64, the same for all
    heads, in float32 at least.
    """
    precise, device = torch.promote_types(dtype, torch.float32), positions.device
    size, base = config.rotary_dim, config.rope_parameters["rope_theta"]
    frequencies = base ** -(torch.arange(0, size, 2, device=device, dtype=precise) / size)
    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    angles = positions[..., None].to(exact) * frequencies.to(exact)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return torch.stack([angles.cos(), angles.sin()]).to(precise)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first rotary_dim entries of x (B, N, h, D); cos, sin (..., N, 1, rotary_dim)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    half = torch.cat([-second, first], dim=-1)
    rotated = torch.addcmul(rotated * cos, half, sin)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
