"""lm-eval's model class for Titans: `lm_eval.simple_evaluate("titans", {"pretrained": FOLDER})` after importing this.

Nothing is cut: a context may have any length and is read in pieces, in constant memory. What several requests begin
with (a document with many questions, a question with many choices) is read once; its memory is then copied.
"""

import copy
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

from titans_hf import TitansCache
from titans_hf.cli.shared.checkpoints import check_checkpoint

Tokens = list[int]


class Branch(NamedTuple):
    """Prompts, by their places `members`, that have their first `start` tokens in common, which the one row of `cache`
    has read.
    """

    cache: TitansCache
    start: int
    members: list[int]


@register_model("titans")
class TitansLM(HFLM):
    """`HFLM` with a Titans checkpoint.

    Args, beyond the arguments of `HFLM`:
        max_length: unlimited unless given. Then documents of rolling loglikelihoods are cut into windows of so many
            tokens, each read by a fresh memory, as lm-eval does for other models; longer requests of other kinds raise
            ValueError, since they would have to be cut.
        piece_length: tokens read at once.
        share_from: a common beginning of at least so many tokens is read once for all requests that have it.

    Raises ValueError for a checkpoint of another model type, or without a language model's head, and for
    batch_size="auto", which lm-eval determines by trying the longest context.
    """

    def __init__(self, pretrained, *args, piece_length: int = 512, share_from: int = 256, **kwargs):
        if not str(kwargs.get("batch_size", 1)).isdigit():
            raise ValueError(f"`batch_size` must be a number for a Titans model, but is {kwargs['batch_size']!r}.")
        if isinstance(pretrained, str):
            check_checkpoint(pretrained, "`pretrained`")
        super().__init__(pretrained, *args, **kwargs)
        if self.config.model_type != "titans":
            raise ValueError(
                f"`pretrained` must be a Titans checkpoint, but its model_type is {self.config.model_type!r}."
            )
        self.piece_length, self.share_from = piece_length, share_from

    @property
    def max_length(self) -> int:
        return self._max_length or sys.maxsize

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        contexts = [context for _, context, _ in requests]
        self._check_lengths([len(context) + len(continuation) - 1 for _, context, continuation in requests])
        results = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Loglikelihoods") as progress:
            for cache, start, members in self._branches(contexts):
                same_context = [list(same) for _, same in groupby(members, key=contexts.__getitem__)]
                for batch in _batches(same_context, self.batch_size):
                    for i, score in self._score_contexts(cache, start, batch, requests):
                        results[i] = score
                        if requests[i][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                        progress.update()
        return results

    def _score_contexts(
        self, cache: TitansCache, start: int, contexts: list[list[int]], requests: list[tuple]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yields each request's place and score; `contexts` holds the places of the requests with the same context,
        whose first `start` tokens `cache` has read.
        """
        heads = [requests[same[0]][1][start:-1] for same in contexts]
        read = self._read(_repeat(cache, len(contexts)), *_pad(heads, "right"))
        rows = [(row, i) for row, same in enumerate(contexts) for i in same]
        for part in _batches(rows, self.batch_size):
            branch = _select(read, [row for row, _ in part])
            scores = self._score(branch, [(requests[i][1][-1], requests[i][2]) for _, i in part])
            yield from zip((i for _, i in part), scores, strict=True)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        results = [""] * len(requests)
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        order = sorted(range(len(requests)), key=lambda i: repr(requests[i].args[1]))
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Generating") as progress:
            for _, group in groupby(order, key=lambda i: repr(requests[i].args[1])):
                group = list(group)
                kwargs = normalize_gen_kwargs(requests[group[0]].args[1], self.max_gen_toks)
                until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
                num_new = kwargs.pop("max_gen_toks")
                self._check_lengths([len(prompts[i]) + num_new for i in group])
                for cache, start, members in self._branches([prompts[i] for i in group]):
                    for batch in _batches([group[member] for member in members], self.batch_size):
                        texts = self._continue(cache, start, [prompts[i] for i in batch], until, num_new, kwargs)
                        for i, text in zip(batch, texts, strict=True):
                            results[i] = text
                            self.cache_hook.add_partial("generate_until", requests[i].args, text)
                        progress.update(len(batch))
        return results

    def _check_lengths(self, lengths: list[int]) -> None:
        if (longest := max(lengths, default=0)) > self.max_length:
            raise ValueError(
                f"A request has {longest} tokens and would be cut to `max_length` {self.max_length}: leave that out."
            )

    @torch.no_grad()
    def _branches(self, prompts: list[Tokens]) -> Iterator[Branch]:
        """Yields branches that have every prompt once, with at least its last token still to come.

        Members come longest first, equal ones side by side.
        """
        ahead = [np.array(prompt[:-1]) for prompt in prompts]
        pending = [(TitansCache(self.config), 0, 0, sorted(range(len(prompts)), key=prompts.__getitem__))]
        while pending:
            cache, start, end, members = pending.pop()
            if end > start:
                run = prompts[members[0]][start:end]
                cache = self._read(copy.deepcopy(cache), *_pad([run], "right"))
            alone = []
            for run in _runs(members, ahead, end + self.share_from):
                if len(run) == 1:
                    alone += run
                else:
                    pending.append((cache, end, _common_length(ahead[run[0]], ahead[run[-1]]), run))
            if alone:
                yield Branch(cache, end, sorted(alone, key=lambda i: (-len(prompts[i]), prompts[i])))

    def _forward(self, cache: TitansCache, ids: Tensor, real: Tensor, logits_to_keep: Tensor | int) -> Tensor:
        with torch.autocast(self.device.type, self.mixed_precision_dtype, enabled=bool(self.mixed_precision_dtype)):
            return self.model(
                ids.to(self.device),
                attention_mask=real.to(self.device),
                cache=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits

    def _pieces(self, num_tokens: int) -> Iterator[slice]:
        starts = range(0, num_tokens, self.piece_length)
        for start in tqdm(starts, desc="Reading", unit_scale=self.piece_length, unit="token", leave=False, delay=5):
            yield slice(start, start + self.piece_length)

    @torch.no_grad()
    def _read(self, cache: TitansCache, ids: Tensor, real: Tensor) -> TitansCache:
        """Reads ids (B, T) where `real` (B, T); no logits are made."""
        for piece in self._pieces(ids.shape[1]):
            self._forward(cache, ids[:, piece], real[:, piece], torch.tensor([], dtype=torch.long))
        return cache

    @torch.no_grad()
    def _score(self, cache: TitansCache, ends: list[tuple[int, Tokens]]) -> list[tuple[float, bool]]:
        """Scores (last token of the context, continuation) of each row: its log-probability, and whether greedy."""
        ids, real = _pad([[last, *continuation[:-1]] for last, continuation in ends], "right")
        targets, _ = _pad([continuation for _, continuation in ends], "right")
        total = torch.zeros(len(ends), dtype=torch.float64)
        greedy = torch.ones(len(ends), dtype=torch.bool)
        for piece in self._pieces(ids.shape[1]):
            logits = self._forward(cache, ids[:, piece], real[:, piece], 0)
            log_probs, best = F.log_softmax(logits, -1, dtype=self.softmax_dtype), logits.argmax(-1).cpu()
            chosen = log_probs.gather(2, targets[:, piece, None].to(self.device))[..., 0].cpu().double()
            total += chosen.where(real[:, piece], 0).sum(1)
            greedy &= ((best == targets[:, piece]) | ~real[:, piece]).all(1)
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    @torch.no_grad()
    def _continue(
        self, cache: TitansCache, start: int, prompts: list[Tokens], until: list[str], num_new: int, kwargs: dict
    ) -> list[str]:
        """Generates the continuations of prompts whose first `start` tokens `cache` has read."""
        ids, real = _pad([prompt[start:] for prompt in prompts], "left")
        cache = self._read(_repeat(cache, len(prompts)), ids[:, :-1], real[:, :-1])
        shared = torch.tensor(prompts[0][:start], dtype=torch.long).expand(len(prompts), -1)
        ids, real = torch.cat([shared, ids], dim=1), F.pad(real, (start, 0), value=True)
        output = self._model_generate(
            context=ids.to(self.device),
            attention_mask=real.long().to(self.device),
            max_length=ids.shape[1] + num_new,
            stop=until,
            cache=cache,
            **kwargs,
        )
        texts = (self.tok_decode(row) for row in output[:, ids.shape[1] :].tolist())
        return [postprocess_generated_text(text, stop=until, think_end_token=self.think_end_token) for text in texts]


def _batches(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _runs(order: list[int], prompts: list[np.ndarray], least: int) -> list[list[int]]:
    """Cuts the sorted prompts `order` where neighbours have fewer than `least` tokens in common."""
    runs = []
    for i in order:
        if runs and _common_length(prompts[runs[-1][-1]], prompts[i]) >= least:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the tokens that both begin with."""
    length = min(len(a), len(b))
    (different,) = np.nonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _pad(rows: list[Tokens], side: str) -> tuple[Tensor, Tensor]:
    """Pads rows to ids (B, T) int64; returns these and where they are real, (B, T) bool."""
    length = max(map(len, rows))
    ids, real = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], real[i, place] = torch.tensor(row, dtype=torch.long), True
    return ids, real


def _select(cache: TitansCache, rows: list[int]) -> TitansCache:
    """Copies these rows of `cache`."""
    cache = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor(rows))
    return cache


def _repeat(cache: TitansCache, num_rows: int) -> TitansCache:
    """Copies the one row of `cache`, `num_rows` times."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(num_rows)
    return cache
