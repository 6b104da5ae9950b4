"""lm-eval's model class for models with a memory: `lm_eval.simple_evaluate("titans", {"pretrained": FOLDER})` after
importing this module.

Nothing is cut: a context may have any length and is read in pieces, in constant memory. The choices of one question
share the reading of their context. Each is scored as an answer of `generate()`, whose recalls see the whole context.
"""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from titans_hf.cli.shared.checkpoints import check_checkpoint
from titans_hf.cli.shared.memories import AnyCache, new_cache
from titans_hf.recalling import remember

Tokens = list[int]
UNLIMITED = 1 << 40  # tokens


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
                rows = [(row, i) for row, same in enumerate(batch) for i in same]
                scores = self._score_choices(
                    [contexts[same[0]] for same in batch], [(row, requests[i][2]) for row, i in rows]
                )
                for (_, i), score in zip(rows, scores, strict=True):
                    results[i] = score
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                progress.update(len(rows))
        return results

    def _score_choices(self, contexts: list[Tokens], choices: list[tuple[int, Tokens]]) -> list[tuple[float, bool]]:
        """Scores continuations as answers of `generate()`: what it reads, recalls and learns is the same, but the
        tokens are given. choices: the number of a context, and a continuation.
        """
        scores: list[tuple[float, bool]] = []

        def decode(model, input_ids: Tensor, **given) -> Tensor:
            cache: AnyCache = given["cache"]
            for logits in self._read(cache, input_ids, real, logits_to_keep=1):
                last = logits.cpu()
            for part in _batches(choices, self.batch_size):
                rows, branch = torch.tensor([row for row, _ in part]), copy.copy(cache)
                branch.batch_select_indices(rows)
                following = self._read(branch, *_pad([continuation[:-1] for _, continuation in part]))
                targets = _pad([continuation for _, continuation in part])
                scores.extend(self._score(chain([last[rows]], following), *targets))
            return input_ids

        ids, real = (x.to(self.device) for x in _pad(contexts, "left"))
        options = {"pad_token_id": self.tokenizer.pad_token_id, "num_beams": 1, "do_sample": False}
        self.model.generate(ids, attention_mask=real, custom_generate=decode, max_new_tokens=1, **options)
        return scores

    @torch.no_grad()
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, read as one stream after the prefix token, or by windows of
        `max_length`.
        """
        windows = []
        for i, x in enumerate(requests):
            found = get_rolling_token_windows(self.tok_encode(x.args[0]), self.prefix_token_id, self.max_length, 1)
            windows += [(i, len(before), [*before, *text]) for before, text in map(make_disjoint_window, found)]
        totals = [0.0] * len(requests)
        for batch in tqdm(_batches(windows, self.batch_size), disable=disable_tqdm or self.rank != 0):
            pieces = self._read(new_cache(self.model), *_pad([ids[:-1] for *_, ids in batch]))
            targets, real = _pad([ids[1:] for *_, ids in batch])
            begins = torch.tensor([begin - 1 for _, begin, _ in batch])
            scores = self._score(pieces, targets, real & (torch.arange(targets.shape[1]) >= begins[:, None]))
            for (i, *_), (total, _) in zip(batch, scores, strict=True):
                totals[i] += total
        for x, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", x.args, total)
        return totals

    def _read(self, cache: AnyCache, ids: Tensor, real: Tensor, logits_to_keep: int = 0) -> Iterator[Tensor]:
        """Reads ids (B, T) where `real` (B, T), and yields the logits (B, P, V) of each piece of P tokens."""
        starts = range(0, ids.shape[1], self.piece_length)
        for start in tqdm(starts, desc="Reading", unit_scale=self.piece_length, unit="token", leave=False, delay=5):
            piece, mask = (x[:, start : start + self.piece_length].to(self.device) for x in (ids, real))
            with torch.autocast(self.device.type, self.mixed_precision_dtype, enabled=bool(self.mixed_precision_dtype)):
                given = {"attention_mask": mask, "logits_to_keep": logits_to_keep, "use_cache": True}
                yield self.model(piece, cache=cache, **given).logits

    def _score(self, pieces: Iterable[Tensor], targets: Tensor, real: Tensor) -> list[tuple[float, bool]]:
        """Scores the `real` ones of targets (B, T) by logits (B, P, V) of one piece after another. Returns the
        log-probability of each row, and whether each of its targets is the most probable token.
        """
        total, greedy = torch.zeros(len(targets), dtype=torch.float64), torch.ones(len(targets), dtype=torch.bool)
        begin = 0
        for logits in pieces:
            end = begin + logits.shape[1]
            wanted, scored = targets[:, begin:end], real[:, begin:end]
            log_probs = logits.log_softmax(-1, dtype=self.softmax_dtype)
            chosen = log_probs.gather(2, wanted[..., None].to(logits.device))[..., 0].cpu().double()
            total += chosen.where(scored, 0).sum(1)
            greedy &= ((logits.argmax(-1).cpu() == wanted) | ~scored).all(1)
            begin = end
        return list(zip(total.tolist(), greedy.tolist(), strict=True))


def _batches(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _pad(rows: list[Tokens], side: str = "right") -> tuple[Tensor, Tensor]:
    """Pads rows to ids (B, T) int64; returns these and where they are real, (B, T) bool."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return pad_sequence(ids, True, padding_side=side), pad_sequence(real, True, padding_side=side)
