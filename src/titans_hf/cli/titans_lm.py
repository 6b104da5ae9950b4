"""lm-eval's model class for models with a memory: `lm_eval.simple_evaluate("titans", {"pretrained": FOLDER})` after
importing this module.

Nothing is cut: a context may have any length and is read in pieces, in constant memory. The choices of one question
share the reading of their context, at whose end a memory with passages recalls.
"""

import copy
from collections.abc import Iterator
from itertools import groupby

import torch
import torch.nn.functional as F
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from titans_hf.cli.shared.checkpoints import check_checkpoint
from titans_hf.cli.shared.memories import AnyCache, new_cache
from titans_hf.recalling import remember

Tokens = list[int]
UNLIMITED = 1 << 40  # tokens
NO_LOGITS = torch.tensor([], dtype=torch.long)


@register_model("titans")
class TitansLM(HFLM):
    """`HFLM` with a Titans, or with another model, which gets a memory.

    Args, beyond the arguments of `HFLM`:
        window: of `remember`, for another model than a Titans.
        max_length: unlimited by default. If given, lm-eval cuts contexts, as for other models.
        piece_length: tokens read at once.

    Raises ValueError for a model that can have no memory, for `window` beside a Titans, and for batch_size="auto",
    which lm-eval determines by trying the longest context.
    """

    def __init__(self, pretrained, *args, piece_length: int = 512, window=None, **kwargs):
        if not str(kwargs.get("batch_size", 1)).isdigit():
            raise ValueError(f"`batch_size` must be a number for this model class, but is {kwargs['batch_size']!r}.")
        if isinstance(pretrained, str):
            check_checkpoint(pretrained, "`pretrained`")
        super().__init__(pretrained, *args, **kwargs)
        given = {} if window is None else {"window": window}
        if given or (self.config.model_type != "titans" and not hasattr(self.model, "memory")):
            remember(self.model, **given)
        self.piece_length = piece_length

    @property
    def max_length(self) -> int:
        return self._max_length or UNLIMITED

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs) -> Tensor:
        return super()._model_generate(context, max_length, stop, prefill_chunk_size=self.piece_length, **kwargs)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        room = [max(1, self.max_length + 1 - len(continuation)) for _, _, continuation in requests]
        contexts = [context[-length:] for length, (_, context, _) in zip(room, requests, strict=True)]
        results = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: (-len(contexts[i]), contexts[i]))
        same_context = [list(same) for _, same in groupby(order, key=contexts.__getitem__)]
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Loglikelihoods") as progress:
            for batch in _batches(same_context, self.batch_size):
                cache = new_cache(self.model)
                for _ in self._read(cache, *_pad([contexts[same[0]][:-1] for same in batch]), NO_LOGITS):
                    pass
                rows = [(row, i) for row, same in enumerate(batch) for i in same]
                for part in _batches(rows, self.batch_size):
                    branch = copy.deepcopy(cache)
                    branch.batch_select_indices(torch.tensor([row for row, _ in part]))
                    scores = self._score(branch, [(contexts[i][-1], requests[i][2]) for _, i in part])
                    for (_, i), score in zip(part, scores, strict=True):
                        results[i] = score
                        if requests[i][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                    progress.update(len(part))
        return results

    def _read(
        self, cache: AnyCache, ids: Tensor, real: Tensor, keep: Tensor | int, recalls: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Reads ids (B, T) where `real` (B, T), and yields each piece with the logits of the columns to `keep`.
        With `recalls`, a memory with passages recalls before the first piece.
        """
        recalls = recalls and getattr(getattr(self.model, "memory", None), "passages", None) is not None
        starts = range(0, ids.shape[1], self.piece_length)
        for start in tqdm(starts, desc="Reading", unit_scale=self.piece_length, unit="token", leave=False, delay=5):
            piece = slice(start, start + self.piece_length)
            given = {"attention_mask": real[:, piece].to(self.device), "logits_to_keep": keep}
            given |= {"recall": True} if recalls and start == 0 else {}
            with torch.autocast(self.device.type, self.mixed_precision_dtype, enabled=bool(self.mixed_precision_dtype)):
                yield piece, self.model(ids[:, piece].to(self.device), cache=cache, use_cache=True, **given).logits

    def _score(self, cache: AnyCache, ends: list[tuple[int, Tokens]]) -> list[tuple[float, bool]]:
        """Scores (last token of the context, continuation) of each row: its log-probability, and whether it is the
        greedy one.
        """
        ids, real = _pad([[last, *continuation[:-1]] for last, continuation in ends])
        targets, _ = _pad([continuation for _, continuation in ends])
        total = torch.zeros(len(ends), dtype=torch.float64)
        greedy = torch.ones(len(ends), dtype=torch.bool)
        for piece, logits in self._read(cache, ids, real, 0, recalls=True):
            log_probs, best = F.log_softmax(logits, -1, dtype=self.softmax_dtype), logits.argmax(-1).cpu()
            chosen = log_probs.gather(2, targets[:, piece, None].to(self.device))[..., 0].cpu().double()
            total += chosen.where(real[:, piece], 0).sum(1)
            greedy &= ((best == targets[:, piece]) | ~real[:, piece]).all(1)
        return list(zip(total.tolist(), greedy.tolist(), strict=True))


def _batches(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _pad(rows: list[Tokens]) -> tuple[Tensor, Tensor]:
    """Pads rows at their end to ids (B, T) int64; returns these and where they are real, (B, T) bool."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.long)
    return ids, torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
