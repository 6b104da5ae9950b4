"""How a model with `remember` reads the columns of a call.

A call is cut into pieces so that the model itself never meets padding: within a piece, the same rows have real tokens.
A piece ends where a row's chunk of fast weights is full, where its text leaves the window, where its sink moves, and
where a document begins. Rows are thereby read as if each were alone, whatever the batch, the padding and the cuts.

The step of a chunk is taken when the next token of the row arrives. If the call in which a chunk ends also has that
token, the chunk is read whole in one call of the model, whose graph gives the step. Tokens of the chunk that an earlier
call has read are then read once more, from the columns before the chunk and with the same weights, so with the same
numbers. If the next token arrives in a later call, the whole chunk is read once more there.

Shapes: R rows, T columns, C tokens of a chunk, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import MemoryCache
from .columns import CallColumns
from .fast_weights import IGNORED
from .parts import READING, Memory
from .passages import NAME
from .titans_layer import is_titans, titans_cache
from .window import KeyValueLayer, StateLayer, copied_states, make_layers

SINK_TOKENS = 1024  # tokens that share a sink: it is `window` to `window` + SINK_TOKENS tokens away
TOKENS_OF_A_PIECE = 1024  # most tokens of a piece whose logits are all needed
OF_LAYERS = ("hidden_states", "router_logits")  # outputs that a model may return for each layer


def note_mlp_inputs(module, args: tuple) -> None:
    """A forward pre-hook of the last layer's feed-forward network: notes its input."""
    if (noted := READING.get()) is not None:
        noted["mlp_inputs"] = args[0]


def check_backbone(backbone, args: tuple) -> None:
    """A forward pre-hook of the model's backbone: raises RuntimeError where the backbone would read without memory."""
    if READING.get() is None:
        raise RuntimeError(
            f"{type(backbone).__name__} was called without its memory: call the model that `remember` returned, or "
            "`forget` it first. TRL's trainers call the backbone themselves, so they train a model before `remember`; "
            "Transformers' Trainer trains it with its memory."
        )


def read(
    model: PreTrainedModel, cache: MemoryCache, columns: CallColumns, num_kept: int, arguments: dict
) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
    """Reads columns, updates the cache, and returns the logits (R, num_kept, V) of the last columns, 0 at padding, and
    the outputs OF_LAYERS that the model returns, for each layer (R, T, ...), 0 at padding. A call that raises an error
    leaves the cache as it was.
    """
    with_graph, kept, of_layers = torch.is_grad_enabled(), [], {name: [] for name in OF_LAYERS}
    with torch.inference_mode(False), torch.set_grad_enabled(with_graph), cache.guarded():
        cache.begin(model, len(columns.ids), columns.ids.device)
        read_unread(model, cache)
        ids = columns.ids.to(torch.int64, copy=True)  # ids from `inference_mode` cannot be part of a graph
        on_cpu = CallColumns(ids, *(x.cpu() for x in columns[1:]))
        length, begin, first = ids.shape[1], 0, cache.num_columns
        while begin < length:
            end, rows = next_piece(model.memory, cache, on_cpu, begin)
            piece, wanted = on_cpu.at(begin, end), min(end - begin, end - (length - num_kept))
            if len(rows):
                part = cache if len(rows) == len(ids) else cache.take(rows)
                following = on_cpu.map(lambda x, rows=rows, end=end: x[rows.to(x.device), end : end + 1])
                of_rows = piece.map(lambda x, rows=rows: x[rows.to(x.device)])
                output, logits = _read_piece(model, part, of_rows, following, max(1, wanted), arguments)
                if part is not cache:
                    cache.put(rows, part)
                if wanted > 0:
                    kept.append((end - logits.shape[1], _of_all_rows(logits, rows, len(ids))))
                for name, found in of_layers.items():
                    if (given := output.get(name)) is not None:
                        given = [x if with_graph else x.detach() for x in given]
                        given = [x.view(len(rows), -1, x.shape[-1])[:, begin - end :] for x in given]
                        found.append([(begin, _of_all_rows(x, rows, len(ids))) for x in given])
            cache.num_columns += end - begin
            cache.record(piece, first, notes_state=length - begin <= 2 * model.memory.chunk)
            begin = end
    if not kept:  # no token is real
        size = model.get_output_embeddings().weight.shape[0]
        kept.append((length, torch.zeros(len(ids), 0, size, dtype=model.dtype, device=cache.device)))
    joined = {name: tuple(_joined(x, 0, length) for x in zip(*found, strict=True)) for name, found in of_layers.items()}
    return _joined(kept, length - num_kept, length), {name: x for name, x in joined.items() if x}


def read_unread(model: PreTrainedModel, cache: MemoryCache, rows: Tensor | None = None) -> Tensor | None:
    """Reads the columns that are to be read again, plainly; with rows (I,) int64, those of some rows. Returns the
    logits (R, 1, V) of the last column, 0 at padding; None if there was none to read.
    """
    if cache.unread is None:
        return None
    unread, left = cache.take_unread(), None
    if rows is not None and len(rows) < len(unread.ids):
        others = torch.ones(len(unread.ids), 1, dtype=torch.bool).index_fill(0, rows, False)
        left, unread = (
            unread._replace(real=unread.real.cpu() & x, recalls=unread.recalls.cpu() & x) for x in (others, ~others)
        )
        used = left.real.any(0)
        left = left.map(lambda x: x[:, used.to(x.device)]) if bool(used.any()) else None
    logits = read(model, cache, unread, 1, {})[0]
    cache.unread = left
    if left is not None:
        cache.restart_recording()
    return logits


def read_in_training(
    model: PreTrainedModel, cache: MemoryCache, columns: CallColumns, num_kept: int, arguments: dict
) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
    """As `read`. If weights are trained, rows that end at different columns are read one kind after another: a graph
    ends where a piece ends, which is then an end of the row itself, as if the row were read alone.
    """
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters())
    if not is_trained or cache.recorded is not None or cache.unread is not None:
        return read(model, cache, columns, num_kept, arguments)
    real = columns.real.cpu()
    seen = cache.seen if len(cache.seen) == len(real) else torch.zeros(len(real), dtype=torch.int64)
    facts = torch.cat([real, columns.starts.cpu(), columns.learning.cpu(), seen[:, None]], 1)
    kind = facts.unique(dim=0, return_inverse=True)[1]
    kind = torch.where(real.any(1), kind, kind[real.any(1).int().argmax()])  # a row without tokens cuts no other
    if bool((kind == kind[0]).all()):
        return read(model, cache, columns, num_kept, arguments)
    groups, found = [(kind == x).nonzero()[:, 0] for x in kind.unique()], []
    with cache.guarded():
        cache.begin(model, len(real), columns.ids.device)
        for rows in groups:
            part = cache.take(rows)
            of_rows = columns.map(lambda x, rows=rows: x[rows.to(x.device)])
            found.append(read(model, part, of_rows, num_kept, arguments))
            cache.put(rows, part)
        cache.num_columns += columns.ids.shape[1]
    logits, of_layers = zip(*found, strict=True)
    order = torch.cat(groups).argsort()

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts])[order.to(parts[0].device)]

    layers = {name: tuple(map(joined, zip(*(x[name] for x in of_layers), strict=True))) for name in of_layers[0]}
    return joined(logits), layers


def next_piece(memory: Memory, cache: MemoryCache, columns: CallColumns, begin: int) -> tuple[int, Tensor]:
    """Returns the end of the piece that starts at a column, and its rows (I,) int64."""
    real, learning = columns.real, columns.learning
    changes = (real[:, begin + 1 :] != real[:, begin : begin + 1]) | columns.starts[:, begin + 1 :]
    changes |= learning[:, begin + 1 :] != learning[:, begin : begin + 1]
    changes = changes.any(0).nonzero()
    end = begin + 1 + int(changes[0]) if len(changes) else real.shape[1]
    rows = real[:, begin].nonzero()[:, 0]
    if not len(rows):
        return end, rows
    seen = torch.where(columns.starts[rows, begin], 0, cache.seen[rows])
    limits = []
    if memory.needs_marks or (memory.fast_weights is not None and bool(learning[:, begin].any())):
        limits.append(memory.chunk - seen % memory.chunk)
    if cache.recorded is not None and real.shape[1] - begin <= 2 * memory.chunk and cache.is_ahead:
        end = begin + 1  # the state before the next token has learned it: after that token, it can be kept
    if memory.window is not None:
        limits.append(torch.where(seen < memory.window, memory.window - seen, SINK_TOKENS - seen % SINK_TOKENS))
    if memory.token_list is not None:
        limits.append(TOKENS_OF_A_PIECE - seen % TOKENS_OF_A_PIECE)
    return min([end, *(begin + int(x.min()) for x in limits)]), rows


def _read_piece(
    model: PreTrainedModel,
    cache: MemoryCache,
    piece: CallColumns,
    following: CallColumns,
    num_kept: int,
    arguments: dict,
) -> tuple[object, Tensor]:
    """Reads a piece without padding; following: the columns (R, 1) after it, (R, 0) at the end of the call. Returns the
    model's output, and the logits (R, num_kept, V) of the last columns.
    """
    memory, with_graph = model.memory, torch.is_grad_enabled()
    starts = piece.starts[:, 0] & (cache.seen > 0)
    if bool(starts.any()):
        cache.clear_rows(model, starts.nonzero()[:, 0])
    fast, chunk = memory.fast_weights, memory.chunk
    if fast is not None:
        take_due_steps(model, cache, piece)
    if memory.needs_marks and bool((at_start := cache.seen % chunk == 0).any()):
        for layer in cache.layers:
            if isinstance(layer, StateLayer):
                layer.mark_start(at_start, memory.passages is not None)
    seen, length = cache.seen, piece.ids.shape[1]
    finished = None if fast is None else _finished_chunk(memory, cache, piece, following)
    if finished is None:
        weights = None if fast is None else fast.weights(cache.state)
        if memory.token_list is None and "logits_to_keep" in memory.arguments:
            arguments = arguments | {"logits_to_keep": num_kept}
        output = call(model, cache, piece.ids, weights, arguments, learns=bool(piece.learning.any()))
    else:
        rewind(cache, chunk - length)
        output = learn(model, cache, *finished, with_graph, arguments)
    logits = (output.logits if with_graph else output.logits.detach())[:, -length:]
    if fast is not None:
        for name, x in (("chunk.ids", piece.ids), ("chunk.learns", piece.learns)):
            old = cache.state[name]
            cache.state[name] = torch.cat([old, x.to(old)], 1)[:, -chunk:]
        if is_titans(model) and not bool(piece.learning.any()):
            # In a second reading of the chunk, its own memory would learn these tokens: the chunk's step is left out.
            cache.steps = torch.maximum(cache.steps, (cache.seen + chunk - 1) // chunk)
    if NAME in cache.state:
        cache.state[NAME] = memory.passages.append(cache.state[NAME], piece.ids)
    if memory.token_list is not None:
        y = output.noted["mlp_inputs"] if with_graph else output.noted["mlp_inputs"].detach()
        y = y.reshape(len(seen), -1, y.shape[-1])[:, -length:]
        logits, new = memory.token_list.read(cache.state, piece.ids, y, logits, piece.learns, seen, num_kept)
        cache.state.update(new)
    return output, logits[:, -num_kept:]


def take_due_steps(model: PreTrainedModel, cache: MemoryCache, piece: CallColumns) -> None:
    """Takes the steps of rows whose chunk is full, at the first token of the next one."""
    chunk, ids = model.memory.chunk, cache.state["chunk.ids"]
    due = (cache.seen % chunk == 0) & (cache.steps < cache.seen // chunk)
    if not bool(due.any()):
        return
    if bool(piece.learning.any()):
        labels, learns = _labels(ids, cache.state["chunk.learns"], piece.at(0, 1))
        if labels is not None:
            due &= learns
            rows = due.nonzero()[:, 0]
            if len(rows):
                again = (cache if len(rows) == len(due) else cache.take(rows)).map(lambda x: x)
                rewind(again, chunk)
                learn(model, again, *(x[rows.to(x.device)] for x in (ids, labels)), False, {})
                cache.put_state(rows, again.state)
    cache.steps = torch.where(cache.seen % chunk == 0, cache.seen // chunk, cache.steps)


def rewind(cache: MemoryCache, number: int, is_earlier: bool = False) -> None:
    """Takes back the last tokens of each row from the layers, so that they can be read again by the same weights: at
    most to the start of the unfinished chunk, with `is_earlier` to that of the chunk before it, where there are states.
    """
    for layer in cache.layers if number else ():
        if isinstance(layer, (KeyValueLayer, StateLayer)):
            layer.rewind(number, is_earlier)
    cache.seen = cache.seen - number


def _finished_chunk(
    memory: Memory, cache: MemoryCache, piece: CallColumns, following: CallColumns
) -> tuple[Tensor, Tensor] | None:
    """Returns ids and labels (R, C) of the chunk that a piece ends, if that is so in all rows and a step is due after
    it; None otherwise, and where the chunk's first tokens have another sink.
    """
    length, earlier = piece.ids.shape[1], cache.seen % memory.chunk
    ends = (earlier + length == memory.chunk) & (cache.seen % SINK_TOKENS >= earlier)
    ends &= cache.steps <= cache.seen // memory.chunk
    learning = bool(piece.learning.any()) and bool(following.learning.any())
    if not learning or not bool(ends.all()) or bool(following.starts.any()):
        return None
    kept = ((cache.state["chunk.ids"], piece.ids), (cache.state["chunk.learns"], piece.learns))
    ids, learns = (torch.cat([x[:, length:], new.to(x.device)], 1) for x, new in kept)
    labels, _ = _labels(ids, learns, following)
    return None if labels is None else (ids, labels)


def _labels(ids: Tensor, learns: Tensor, following: CallColumns) -> tuple[Tensor | None, Tensor | None]:
    """Returns the labels (R, C) of a chunk, IGNORED where not learned, and (R,) bool, on the CPU, which rows learn any;
    None for both if a row's last label has not arrived, or no label is learned.
    """
    if not following.ids.shape[1] or not bool(following.real.all()):
        return None, None
    labels = torch.cat([ids[:, 1:], following.ids.to(ids.device)], 1)
    learns = torch.cat([learns[:, 1:], following.learns], 1)
    learns = learns & following.learning  # a step is taken if learning is on when the last label arrives
    rows = learns.any(1)
    return (torch.where(learns.to(ids.device), labels, IGNORED), rows) if bool(rows.any()) else (None, None)


def learn(
    model: PreTrainedModel, cache: MemoryCache, ids: Tensor, labels: Tensor, with_graph: bool, arguments: dict
) -> object:
    """Reads a whole chunk (R, C), and takes its step of the fast weights; returns the model's output."""
    fast = model.memory.fast_weights
    leaves = {name: x.detach().requires_grad_() for name, x in fast.weights(cache.state).items()}
    with torch.enable_grad():
        output = call(model, cache, ids, leaves, arguments)
        of_logits = fast.gradient_of_logits(output.logits, labels)
        gradients = torch.autograd.grad(
            output.logits, [*leaves.values()], of_logits, retain_graph=with_graph, allow_unused=True
        )
    with torch.no_grad():
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), gradients, strict=True)]
        moves = (labels != IGNORED).any(1)
        for name, x in fast.take_step(cache.state, gradients).items():
            cache.state[name] = torch.where(moves.to(x.device)[:, None, None], x, cache.state[name])
    cache.steps = cache.seen // model.memory.chunk
    return output


def call(model, cache: MemoryCache, ids: Tensor, weights: dict | None, arguments: dict, learns: bool = True) -> object:
    """Calls the model itself with ids (R, T), which are real tokens, and counts them. learns: a Titans' own memory."""
    memory = model.memory
    sinks = _sinks(model, cache, ids.shape[1])
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KeyValueLayer):
            layer.seen, layer.sink = cache.seen, None if layer.is_sliding else sinks[index]
    given = titans_cache(model, cache.layers, cache.seen, learns) if is_titans(model) else cache
    states = copied_states(cache.layers) if ids.shape[1] == 1 else nullcontext()
    with states, nullcontext() if weights is None else memory.fast_weights.active(weights):
        output = memory.call(model, ids, given, cache.seen, **arguments)
    if given is not cache:
        for layer, of_titans in zip(cache.layers, given.layers, strict=True):
            layer.set_state(of_titans.state)
    cache.seen = cache.seen + ids.shape[1]
    return output


def _sinks(model: PreTrainedModel, cache: MemoryCache, length: int) -> list:
    """Returns keys and values (R, H, 1, D) of the sink for each layer; None if no query of a call sees it."""
    window = model.memory.window
    if window is None or int(cache.seen.max()) + length <= window:
        return [None] * len(cache.layers)
    blocks = [sink_of(model, cache, int(x) // SINK_TOKENS) for x in cache.seen]
    if len(blocks) == 1:
        return blocks[0]
    layers = zip(*blocks, strict=True)
    return [
        None if of_rows[0] is None else tuple(torch.cat(x) for x in zip(*of_rows, strict=True)) for of_rows in layers
    ]


@torch.no_grad()
def sink_of(model: PreTrainedModel, cache: MemoryCache, block: int) -> list:
    """Returns the sink of the positions of a block: keys and values (1, H, 1, D) for each layer with full attention,
    of the first token, `window` positions before the block.
    """
    if block not in cache.sinks:
        ids = torch.full((1, 1), model.memory.first_token)
        begin = torch.tensor([max(0, block * SINK_TOKENS - model.memory.window)])
        cache.sinks[block] = [
            (x.keys, x.values) if isinstance(x, KeyValueLayer) and not x.is_sliding and x.is_initialized else None
            for x in read_alone(model, cache, ids, begin)
        ]
        while len(cache.sinks) > len(cache.seen) + 3:
            del cache.sinks[next(iter(cache.sinks))]  # the oldest, never this block
    return cache.sinks[block]


def read_alone(model: PreTrainedModel, cache: MemoryCache, ids: Tensor, begins: Tensor) -> list:
    """Returns the layers of a new cache after ids (R, T), read alone by the model without fast weights and without a
    window, at the positions from begins (R,) on; on the device of `cache`.
    """
    memory, empty = model.memory, MemoryCache(model)
    empty.layers = make_layers(model, None, 0)
    arguments = {"logits_to_keep": 1} if "logits_to_keep" in memory.arguments else {}
    memory.call(model, ids.to(cache.device), empty, begins, **arguments)
    return empty.layers


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
