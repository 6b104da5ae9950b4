"""Recall: a passage of a row's text is read again, and then the row's last tokens once more, with the passage in sight.

A row recalls at one of its tokens. `Passages.choose` chooses the passage by the tokens up to that one. The passage is
read alone behind the sink, at positions right before the window; its keys and values stand between sink and window. All
that follows is read in a branch of the cache, which sees the passage until the row's next recall.

What is recalled leaves no trace: what follows is noted in `MemoryCache.unread`. It is read plainly, without the
passage, before the next recall, or where the text goes on. The branch learns nothing.

Shapes: R rows, T columns, S tokens of a passage, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import reading
from .cache import MemoryCache
from .columns import CallColumns
from .passages import NAME
from .window import KeyValueLayer


def read(
    model: PreTrainedModel,
    cache: MemoryCache,
    columns: CallColumns,
    num_kept: int,
    arguments: dict,
    recalls: bool | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
    """Reads columns as `reading.read` does. Rows recall after the columns that say so; the logits of such a column are
    those that see the passage. recalls: True lets all rows recall before the first column, False ends their recall.
    """
    recalls = None if model.memory.passages is None else recalls
    if not recalls and cache.since_recall is None and not bool(columns.recalls.any()):
        return reading.read_in_training(model, cache, columns, num_kept, arguments)
    length, begin, results = columns.ids.shape[1], 0, []
    ends = sorted({*(columns.recalls.any(0).nonzero()[:, 0] + 1).tolist(), length})
    with_graph = torch.is_grad_enabled()  # leaving inference_mode turns gradients on
    with torch.inference_mode(False), torch.set_grad_enabled(with_graph), cache.guarded():
        if recalls is False:
            cache.end_recall()
        elif recalls:
            cache.begin(model, len(columns.ids), columns.ids.device)
            recall(model, cache, torch.arange(len(cache.seen)))
        columns, cache.first_of_call = columns.map(lambda x: x.clone()), cache.num_columns
        for end in ends:
            part, wanted = columns.at(begin, end), min(end - begin, max(0, end - (length - num_kept)))
            results.append(_read_part(model, cache, part, wanted, arguments))
            begin = end
        cache.first_of_call = None
    logits, of_layers = zip(*results, strict=True)
    joined = {name: [torch.cat(x, 1) for x in zip(*(y[name] for y in of_layers), strict=True)] for name in of_layers[0]}
    return torch.cat(logits, 1), {name: tuple(x) for name, x in joined.items()}


def _read_part(
    model: PreTrainedModel, cache: MemoryCache, part: CallColumns, num_kept: int, arguments: dict
) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
    """Reads columns in the branch, if there is one, and recalls after the last of them in the rows that ask for it."""
    if cache.since_recall is None:
        logits, *others = reading.read_in_training(model, cache, part, num_kept, arguments)
    else:
        if cache.memory.fast_weights is not None and bool((part.starts & part.learning).any()):
            raise ValueError("A document that begins after a recall would not be learned: call with `recall=False`.")
        logits, *others = reading.read_in_training(model, branch_of(model, cache), part.quiet(), num_kept, arguments)
        cache.note_unread(part)
    rows = part.recalls[:, -1:].any(1).nonzero()[:, 0]
    if len(rows):
        found, of_rows = recall(model, cache, rows)
        kept = part.real[found, -1].nonzero()[:, 0]
        if num_kept and len(kept):
            found, of_rows = found[kept].to(logits.device), of_rows[kept.to(of_rows.device)]
            logits = torch.cat([logits[:, :-1], logits[:, -1:].index_copy(0, found, of_rows.to(logits))], 1)
    return logits, *others


def branch_of(model: PreTrainedModel, cache: MemoryCache) -> MemoryCache:
    """Returns the branch that sees the passage of each row; after `crop` it is made again."""
    if cache.branch is None:
        points = [] if cache.unread is None else (cache.unread.recalls.any(0).nonzero()[:, 0] + 1).tolist()
        rest = cache.take_unread(max(points, default=0))
        reading.read_unread(model, cache)
        recall(model, cache, (cache.since_recall >= 0).nonzero()[:, 0])
        reading.read(model, cache.branch, rest.quiet(), 0, {})
        cache.note_unread(rest)
    return cache.branch


def recall(model: PreTrainedModel, cache: MemoryCache, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lets rows (I,) recall at their last token. Returns the rows (F,) that were read again, with a passage in sight
    or, where there was none, plainly, and the logits (F, 1, V) after that token.
    """
    with torch.inference_mode(False), torch.no_grad():
        plain = reading.read_unread(model, cache, rows)
        branch = (cache if len(rows) == len(cache.seen) else cache.take(rows)).as_branch()
        found, passages, logits = look_back(model, branch, cache.state[NAME][rows.to(cache.state[NAME].device)])
        cache.recalled = [*cache.recalled, (rows[found], passages)]
        if cache.branch is None:
            cache.branch, cache.since_recall = cache.as_branch(), torch.full_like(cache.seen, -1)
        if len(rows) == len(cache.seen):
            cache.branch = branch
        else:
            cache.branch.put(rows, branch)
        cache.since_recall = cache.since_recall.index_fill(0, rows, 0)
        cache.note_recall(rows)
        if plain is None:
            return rows[found], logits
        of_rows = plain[rows.to(plain.device)]
        return rows, of_rows.index_copy(0, found.to(plain.device), logits.to(of_rows)) if len(found) else of_rows


def look_back(model: PreTrainedModel, branch: MemoryCache, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lets a branch see the passages of its rows, whose texts (R, N) end at the same column, and reads the last tokens
    of the rows once more. Returns the rows (F,) with a passage, the passages (F, S), and the logits (F, 1, V) after the
    rows' last token.
    """
    memory, texts, seen = model.memory, texts.cpu().long(), branch.seen.tolist()
    passages, begins, groups = {}, {}, {}
    for row, number in enumerate(seen):
        ids = texts[row, max(0, texts.shape[1] - number) :]
        begin = memory.passages.choose(ids, number, memory.window)
        if begin is not None:
            passages[row] = ids[begin : begin + memory.passages.size]
            begins[row] = number - len(ids) + begin
            groups.setdefault(memory.tokens_again(number), []).append(row)
    found, logits = [], [torch.zeros(0, 1, 1)]
    for (number, is_earlier), members in groups.items():
        rows = torch.tensor(members)
        ids = torch.stack([passages[row] for row in members])
        again = branch.take(rows)
        reading.rewind(again, number, is_earlier)
        read_passage(model, again, ids, torch.tensor([begins[row] for row in members]))
        last = CallColumns.of_text(texts[rows, texts.shape[1] - number :].to(branch.device))
        logits.append(reading.read(model, again, last, 1, {})[0])
        branch.put(rows, again)
        found += members
    chosen = torch.stack([passages[row] for row in found]) if found else texts[:0]
    return torch.tensor(found, dtype=torch.int64), chosen, torch.cat(logits[1:] if found else logits)


def read_passage(model: PreTrainedModel, cache: MemoryCache, ids: Tensor, begins: Tensor) -> None:
    """Reads passages (R, S) alone behind the sink, without fast weights, and puts their keys and values in front of the
    window of a cache, the near ones `copies` times. begins (R,): their positions in the texts, which none leaves to the
    back.
    """
    memory, settings, size = model.memory, model.memory.passages, ids.shape[1]
    first = torch.full((len(ids), 1), memory.first_token)
    begins = torch.maximum(begins, cache.seen - memory.window - size + 1).clamp(min=1)
    alone = reading.read_alone(model, cache, torch.cat([first, ids], 1), begins - 1)
    for layer, new in zip(cache.layers, alone, strict=True):
        if isinstance(layer, KeyValueLayer) and not layer.is_sliding and new.is_initialized:
            pair = (x[..., 1:, :] for x in (new.keys, new.values))  # (R, heads, S, size) each
            layer.passage = tuple(torch.cat([x, *[x[..., settings.near, :]] * (settings.copies - 1)], 2) for x in pair)
            layer.sees_passage = torch.ones(len(ids), dtype=torch.bool)
