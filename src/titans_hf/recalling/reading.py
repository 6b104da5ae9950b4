"""How a model with `remember` reads columns: rows are read as if each were alone, whatever the batch and the cuts.

Columns are cut into pieces so that the model itself never meets padding: within a piece, the same rows have real
tokens. A piece also ends where a row's text leaves the window, where its sink moves, where a document begins, and where
the states of recurrent layers are noted.

Shapes: R rows, T columns, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .columns import Columns
from .recording import Recording
from .rows import Rows
from .settings import READING, Memory
from .window import KeyValueLayer, StateLayer, copied_states, make_layers

SINK_TOKENS = 1024  # tokens that share a sink: it is `window` to `window` + SINK_TOKENS tokens away
OF_LAYERS = ("hidden_states", "router_logits")  # outputs that a model may return for each layer
Output = tuple[Tensor, dict[str, tuple[Tensor, ...]]]


def check_backbone(backbone, args: tuple) -> None:
    """A forward pre-hook of the model's backbone: raises RuntimeError where the backbone would read without memory."""
    if not READING.get():
        raise RuntimeError(
            f"{type(backbone).__name__} was called without its memory: call the model that `remember` returned, or "
            "`forget` it first. TRL's trainers call the backbone themselves, so they train a model before `remember`; "
            "Transformers' Trainer trains it with its memory."
        )


def read_columns(
    model: PreTrainedModel,
    rows: Rows,
    columns: Columns,
    num_kept: int,
    arguments: dict,
    recording: Recording | None = None,
) -> Output:
    """Reads columns into rows, and returns the logits (R, num_kept, V) of the last columns, 0 at padding, and the
    outputs OF_LAYERS that the model returns, for each layer (R, T, ...), 0 at padding.
    """
    memory, length, begin = model.memory, columns.width, 0
    kept: list[tuple[int, Tensor]] = []
    of_layers: dict[str, list] = {name: [] for name in OF_LAYERS}
    while begin < length:
        end, real = next_piece(memory, rows, columns, begin)
        wanted = min(end - begin, end - (length - num_kept))
        if len(real):
            part = rows if len(real) == len(rows) else rows.take(real)
            piece = columns.at(begin, end).of_rows(real)
            begin_piece(memory, part, piece)
            for block in missing_sinks(memory, part, end - begin):
                read_sink(model, part, block)
            output = read_piece(model, part, piece, max(1, wanted), arguments)
            if part is not rows:
                rows.put(real, part)
            if wanted > 0:
                logits = output.logits[:, -wanted:]
                kept.append((end - wanted, _of_all_rows(logits, real, len(rows))))
            for name, found in of_layers.items():
                if (given := output.get(name)) is not None:
                    given = (x.view(len(real), -1, x.shape[-1])[:, begin - end :] for x in given)
                    found.append([(begin, _of_all_rows(x, real, len(rows))) for x in given])
        if recording is not None:
            recording.add(columns.at(begin, end))
            if length - begin <= 2 * memory.chunk:
                recording.note(rows, memory.chunk)
        begin = end
    if not kept:  # no token is real
        size = model.get_output_embeddings().weight.shape[0]
        kept.append((length, torch.zeros(len(rows), 0, size, dtype=model.dtype, device=rows.device)))
    joined = {name: tuple(_joined(x, 0, length) for x in zip(*found, strict=True)) for name, found in of_layers.items()}
    return _joined(kept, length - num_kept, length), {name: x for name, x in joined.items() if x}


def read_apart(
    model: PreTrainedModel,
    rows: Rows,
    columns: Columns,
    num_kept: int,
    arguments: dict,
    recording: Recording | None = None,
) -> Output:
    """As `read_columns`. If weights are trained, rows that end at different columns are read one kind after another: a
    graph ends where a piece ends, which is then an end of the row itself, as if the row were read alone.
    """
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters())
    facts = torch.cat([columns.real, columns.starts, rows.seen[:, None]], 1)
    kind, real = facts.unique(dim=0, return_inverse=True)[1], columns.real
    kind = torch.where(real.any(1), kind, kind[real.any(1).int().argmax()])  # a row without tokens cuts no other
    if not is_trained or recording is not None or bool((kind == kind[0]).all()):
        return read_columns(model, rows, columns, num_kept, arguments, recording)
    groups, found = [(kind == x).nonzero()[:, 0] for x in kind.unique()], []
    for members in groups:
        part = rows.take(members)
        found.append(read_columns(model, part, columns.of_rows(members), num_kept, arguments))
        rows.put(members, part)
    logits, of_layers = zip(*found, strict=True)
    order = torch.cat(groups).argsort()

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts])[order.to(parts[0].device)]

    layers = {name: tuple(map(joined, zip(*(x[name] for x in of_layers), strict=True))) for name in of_layers[0]}
    return joined(logits), layers


def next_piece(memory: Memory, rows: Rows, columns: Columns, begin: int) -> tuple[int, Tensor]:
    """Returns the end of the piece that starts at a column, and its rows (I,) int64."""
    real = columns.real
    changes = (real[:, begin + 1 :] != real[:, begin : begin + 1]) | columns.starts[:, begin + 1 :]
    changes = changes.any(0).nonzero()
    end = begin + 1 + int(changes[0]) if len(changes) else columns.width
    chosen = real[:, begin].nonzero()[:, 0]
    if not len(chosen):
        return end, chosen
    seen = torch.where(columns.starts[chosen, begin], 0, rows.seen[chosen])
    limits = [torch.where(seen < memory.window, memory.window - seen, SINK_TOKENS - seen % SINK_TOKENS)]
    if memory.needs_marks:
        limits.append(memory.chunk - seen % memory.chunk)
    return min([end, *(begin + int(x.min()) for x in limits)]), chosen


def begin_piece(memory: Memory, rows: Rows, piece: Columns) -> None:
    """Forgets what was read before a document that begins, and notes the states of recurrent layers."""
    starts = piece.starts[:, 0] & (rows.seen > 0)
    if bool(starts.any()):
        rows.clear(starts.nonzero()[:, 0])
    at_start = rows.seen % memory.chunk == 0
    if memory.needs_marks and bool(at_start.any()):
        for layer in rows.layers:
            if isinstance(layer, StateLayer):
                layer.mark_start(at_start)


def read_piece(model: PreTrainedModel, rows: Rows, piece: Columns, num_kept: int, arguments: dict):
    """Reads a piece without padding, and returns the model's output, with logits of the last columns at least."""
    memory = model.memory
    sinks = [rows.sinks[x] for x in blocks_of(memory, rows, piece.width)]
    for index, layer in enumerate(rows.layers):
        if isinstance(layer, KeyValueLayer):
            layer.seen, of_rows = rows.seen, [x[index] for x in sinks]
            has_sink = sinks and of_rows[0] is not None
            layer.sink = tuple(torch.cat(x) for x in zip(*of_rows, strict=True)) if has_sink else None
    with copied_states(rows.layers) if piece.width == 1 else nullcontext():
        output = memory.call(model, piece.ids, rows, rows.seen, num_kept, **arguments)
    rows.count(piece.ids, 0 if memory.passages is None else memory.passages.max_tokens)
    return output


def blocks_of(memory: Memory, rows: Rows, length: int) -> list[int]:
    """Returns for each row the block of positions whose sink it sees; none if no query of a call sees a sink."""
    if int(rows.seen.max()) + length <= memory.window:
        return []
    return [int(x) // SINK_TOKENS for x in rows.seen]


def missing_sinks(memory: Memory, rows: Rows, length: int) -> list[int]:
    """Returns the blocks whose sinks a call will need, after it has forgotten the oldest of the others."""
    needed = {*blocks_of(memory, rows, length)}
    if needed:
        others = [x for x in rows.sinks if x not in needed]
        rows.sinks = {x: y for x, y in rows.sinks.items() if x in needed or x in others[-3:]}
    return sorted(needed - rows.sinks.keys())


@torch.no_grad()
def read_sink(model: PreTrainedModel, rows: Rows, block: int) -> None:
    """Notes the sink of the positions of a block: keys and values (1, H, 1, D) for each layer with full attention, of
    the first token, `window` positions before the block.
    """
    memory, alone = model.memory, Rows(make_layers(model, None, 0), False)
    ids = torch.full((1, 1), memory.first_token, device=rows.device)
    memory.call(model, ids, alone, torch.tensor([max(0, block * SINK_TOKENS - memory.window)]), 1)
    rows.sinks = rows.sinks | {
        block: [
            (x.keys, x.values) if isinstance(x, KeyValueLayer) and not x.is_sliding and x.is_initialized else None
            for x in alone.layers
        ]
    }


def _joined(pieces: Sequence[tuple[int, Tensor]], begin: int, end: int) -> Tensor:
    """Returns columns (R, end - begin, ...) of pieces, each after the number of its first column; 0 between pieces."""
    parts, at, last = [], begin, pieces[-1][1]
    for first, x in (*pieces, (end, last[:, :0])):
        x, first = x[:, max(0, begin - first) :], max(begin, first)
        parts += [last.new_zeros(len(last), first - at, *last.shape[2:]), x]
        at = first + x.shape[1]
    return torch.cat(parts, 1)


def _of_all_rows(x: Tensor, rows: Tensor, number: int) -> Tensor:
    """Returns x (I, T, ...) of some rows (I,) as (number, T, ...), 0 in the others."""
    if len(rows) == number:
        return x
    return x.new_zeros(number, *x.shape[1:]).index_copy(0, rows.to(x.device), x)
