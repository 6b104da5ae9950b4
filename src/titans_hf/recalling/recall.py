"""Recall: passages of a row's text are read again, and then the row's last tokens once more, with these in sight.

A row recalls at one of its tokens. `Passages.choose` chooses by the prompt up to that token. The passages are joined in
the order of the text and read alone behind the sink, at positions right before the window; their keys and values stand
between sink and window. All that follows is read in a branch, which sees them until the row's next recall.

What is recalled leaves no trace: what follows is noted in `MemoryCache.unread`. It is read plainly, without passages,
before the next recall, or where the text goes on.

Shapes: R rows, T columns, S tokens of a row's passages, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import reading
from .cache import MemoryCache
from .columns import Columns
from .rows import Rows
from .texts import Passage
from .window import KeyValueLayer, RowLayer, make_layers


def read_call(
    model: PreTrainedModel,
    cache: MemoryCache,
    columns: Columns,
    num_kept: int,
    arguments: dict,
    recalls: bool | None = None,
) -> reading.Output:
    """Reads the columns of a call as `reading.read_columns` does. Rows recall after the columns that say so; the logits
    of such a column are those that see passages. recalls: True lets all rows recall before the first column, False ends
    their recall. A call that raises an error leaves the cache as it was.
    """
    length, begin, results = columns.width, 0, []
    ends = sorted({*(columns.recalls.any(0).nonzero()[:, 0] + 1).tolist(), length})
    with_graph = torch.is_grad_enabled()  # leaving inference_mode turns gradients on
    with torch.inference_mode(False), torch.set_grad_enabled(with_graph), cache.guarded():
        columns = columns.map(lambda x: x.clone())  # ids from `inference_mode` cannot be part of a graph
        cache.begin(len(columns.ids), columns.ids.device)
        if cache.recording is not None:
            cache.recording.call = cache.num_columns
        if recalls is False:
            cache.end_recall()
        elif recalls:
            recall(model, cache, torch.arange(len(cache.rows)))
        elif cache.since_recall is not None and cache.branch is None:  # after `crop`: the recall is made again
            points = (cache.unread.recalls.any(0).nonzero()[:, 0] + 1).tolist()
            rest = cache.take_unread(max(points, default=0))
            read_unread(model, cache)
            recalled = cache.recalled
            recall(model, cache, (cache.since_recall >= 0).nonzero()[:, 0])
            cache.recalled = recalled
            reading.read_columns(model, cache.branch, rest, 0, {})
            cache.note_unread(rest)
        for end in ends:
            part, wanted = columns.at(begin, end), min(end - begin, max(0, end - (length - num_kept)))
            if cache.since_recall is None:
                read_unread(model, cache)
                logits, *others = reading.read_apart(model, cache.rows, part, wanted, arguments, cache.recording)
                cache.num_columns += part.width
            else:
                logits, *others = reading.read_apart(model, cache.branch, part, wanted, arguments)
                cache.note_unread(part)
            rows = part.recalls[:, -1:].any(1).nonzero()[:, 0]
            if len(rows):
                again, of_rows = recall(model, cache, rows)
                kept = part.real[again, -1].nonzero()[:, 0]
                if wanted and len(kept):
                    places, of_rows = again[kept].to(logits.device), of_rows[kept.to(of_rows.device)]
                    logits = torch.cat([logits[:, :-1], logits[:, -1:].index_copy(0, places, of_rows.to(logits))], 1)
            results.append((logits, *others))
            begin = end
    of_parts, of_layers = zip(*results, strict=True)
    joined = {name: [torch.cat(x, 1) for x in zip(*(y[name] for y in of_layers), strict=True)] for name in of_layers[0]}
    return torch.cat(of_parts, 1), {name: tuple(x) for name, x in joined.items()}


@torch.no_grad()
def read_unread(model: PreTrainedModel, cache: MemoryCache, rows: Tensor | None = None) -> Tensor | None:
    """Reads the columns that are to be read again, plainly; with rows (I,) int64, those of some rows. Returns the
    logits (R, 1, V) of the last column, 0 at padding; None if there was none to read.
    """
    if not cache.unread.width:
        return None
    unread, left = cache.take_unread(), None
    if rows is not None and len(rows) < len(cache.rows):
        others = torch.ones(len(cache.rows), 1, dtype=torch.bool).index_fill(0, rows, False)
        left, unread = (
            unread._replace(real=unread.real & x, starts=unread.starts & x, recalls=unread.recalls & x)
            for x in (others, ~others)
        )
        used = left.real.any(0)
        left = left.map(lambda x: x[:, used.to(x.device)]) if bool(used.any()) else None
    logits = reading.read_columns(model, cache.rows, unread, 1, {}, cache.recording)[0]
    cache.num_columns += unread.width
    if left is not None:
        cache.unread = left
        cache.restart_recording()
    return logits


@torch.no_grad()
def recall(model: PreTrainedModel, cache: MemoryCache, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lets rows (I,) recall at their last token. Returns the rows (F,) that were read again, with passages in sight or,
    where there were none, plainly, and the logits (F, 1, V) after that token.
    """
    plain = read_unread(model, cache, rows)
    branch = copy_of(cache.rows, rows)
    found, members, logits = look_back(model, branch)
    cache.note_recall(rows, branch, found)
    if plain is None:
        return rows[members], logits
    of_rows = plain[rows.to(plain.device)]
    return rows, of_rows.index_copy(0, members.to(plain.device), logits.to(of_rows)) if len(members) else of_rows


def copy_of(rows: Rows, chosen: Tensor) -> Rows:
    """Returns a copy of some rows (I,) int64."""
    return rows.map(lambda x: x) if len(chosen) == len(rows) else rows.take(chosen)


def look_back(model: PreTrainedModel, branch: Rows) -> tuple[dict[int, list[Passage]], Tensor, Tensor]:
    """Lets a branch see passages of its texts, and reads the last tokens of its rows once more. Returns the passages by
    row, and of the rows (F,) that have any the logits (F, 1, V) after their last token.
    """
    memory, text, chosen, found = model.memory, branch.text.cpu().long(), {}, {}
    groups: dict[tuple[int, bool, int], list[int]] = {}
    branch.text = None
    for row, seen in enumerate(branch.seen.tolist()):
        ids = text[row, max(0, text.shape[1] - seen) :]
        choice = memory.passages.choose(ids, seen, memory.window, int(branch.asked[row]))
        if choice is not None:
            found[row] = [Passage(seen - len(ids) + begin, ids[begin:end]) for begin, end in choice.pieces]
            chosen[row], size = choice, sum(len(x.ids) for x in found[row])
            groups.setdefault((*memory.tokens_again(seen), size), []).append(row)
    members, logits = [], [torch.zeros(0, 1, 1)]
    for (number, is_earlier, _), same in groups.items():
        again = branch.take(torch.tensor(same))
        again.layers = [x.rewound(number, is_earlier) if isinstance(x, RowLayer) else x for x in again.layers]
        again.seen = again.seen - number
        read_passages(model, again, [found[row] for row in same], [chosen[row] for row in same])
        last = Columns.of_text(text[same, text.shape[1] - number :].to(branch.device))
        logits.append(reading.read_columns(model, again, last, 1, {})[0])
        branch.put(torch.tensor(same), again)
        members += same
    return found, torch.tensor(members, dtype=torch.int64), torch.cat(logits[1:] if members else logits)


def read_passages(model: PreTrainedModel, rows: Rows, found: list[list[Passage]], chosen: list) -> None:
    """Reads the passages of each row, S tokens in all rows, alone behind the sink, and puts their keys and values in
    front of the window, the near ones several times. Their positions end right before the window, or where the newest
    ends in the text.
    """
    memory = model.memory
    ids = torch.stack([torch.cat([torch.tensor([memory.first_token]), *(x.ids for x in row)]) for row in found])
    size, alone = ids.shape[1] - 1, Rows(make_layers(model, None, 0), False)
    ends = torch.tensor([row[-1].begin + len(row[-1].ids) for row in found])
    begins = (torch.maximum(ends, rows.seen - memory.window + 1) - size).clamp(min=1)
    memory.call(model, ids.to(rows.device), alone, begins - 1, 1)
    places = [[*range(1, size + 1), *[1 + i for i in x.near] * x.more] for x in chosen]
    width = max(map(len, places))
    sees = torch.tensor([[True] * len(x) + [False] * (width - len(x)) for x in places])[:, None, :, None]
    index = torch.tensor([x + [0] * (width - len(x)) for x in places], device=rows.device)[:, None, :, None]
    for layer, new in zip(rows.layers, alone.layers, strict=True):
        if isinstance(layer, KeyValueLayer) and not layer.is_sliding and new.is_initialized:
            pair = (
                x.gather(2, index.to(x.device).expand(-1, x.shape[1], -1, x.shape[3])) for x in (new.keys, new.values)
            )
            layer.passage = (*pair, sees)
