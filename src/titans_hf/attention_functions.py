"""What `attn_implementation` names: "eager" attention, whose weights are recorded, and the masks that others take."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, arrange=None, **kwargs):
    """Computes attention without a fused kernel, for `attn_implementation="eager"` and to return attention weights;
    boolean mask. `arrange` reorders the returned weights.
    """
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.mT * scaling  # (B, h, T, D) @ (B, h, D, K)
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    arranged = arrange(weights)
    # The values are multiplied by the weights that are returned, so that outputs have a gradient with respect to them.
    weights = _undo(arrange, arranged, weights.shape)
    return (weights @ value).transpose(1, 2), arranged


def _undo(arrange: Callable[[Tensor], Tensor], arranged: Tensor, shape: torch.Size) -> Tensor:
    """Returns x (B, h, T, K) of the given shape with arrange(x) = arranged, zero at entries that `arrange` omits."""
    size = shape[2] * shape[3]
    origin = arrange(torch.arange(1, size + 1, device=arranged.device).view(1, 1, *shape[2:]))  # 0: not from x
    flat = arranged.new_zeros(*shape[:2], size + 1)
    return flat.scatter(2, origin.flatten(2).expand(*shape[:2], -1), arranged.flatten(2))[..., 1:].view(shape)


def mask_for(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask, True where a query attends, in the form registered for an attention implementation: as it is, or
    added to the scores.

    Raises ValueError for an implementation that is registered without either form.
    """
    form = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if form is eager_mask:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if form is not sdpa_mask:
        raise ValueError(
            f"`attn_implementation` {name!r} must be registered with `eager_mask` or `sdpa_mask` of transformers ("
            f"AttentionMaskInterface.register), but its masks are {form}: a Titans model masks windows itself."
        )
    return mask
