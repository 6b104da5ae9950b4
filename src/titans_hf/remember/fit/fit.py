"""Fits the memory of `remember` to texts: no weight of the model itself is trained.

1. Directions: with G the mean gradient of a linear layer's weights W over a text, at the original weights, V and s the
   eigenvectors and eigenvalues of the sum of G^T G over texts: A = diag((s_i / s_1)^(-1/4)) V_r^T. The sum is sketched
   by random rows, so that no matrix of (in, in) is needed.
2. Rate: the tried rate with the least loss of texts; each tried rate is twice or half the rate before.
3. Start: two passes through texts, one after another; B_0 is the mean of B over the second pass.
4. List: see `fit_list`. It is fitted to texts that are read with the fast weights.

Shapes: T tokens, r rank, R rows of a sketch, `in` and `out` the sizes of a linear layer.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...cache_files import weight_facts
from ...cache_titans import base_model
from ..attach import forget, remember
from ..cache import MemoryCache
from ..fast_weights import FastWeights, decoder_layers, linear_layers
from ..files import NUMBER
from ..parts import FAST_WEIGHTS, LIST
from ..titans_layer import is_titans
from ..token_list import ReadOut, TokenList, surprisal
from .fit_list import Collector, Evidence, fit_keys, fit_read_out

SKETCH = 128  # rows of a sketch of the gradients
FLOOR = 1e-4  # least s_i / s_1
TOKENS_OF_A_CALL = 256
FIRST_RATE, NUM_RATES = 0.05, 5
NUM_COLUMNS = 8000  # to which the list's read-out is fitted, in blocks spread over the texts
TEXT, COMPARED = 1024, 2048  # tokens of a text for directions and start, and of one by which rates are compared
FIT_TOKENS, COMPARED_TOKENS = 12 * TEXT, 4 * COMPARED  # in all, but at most a quarter of the documents
ROWS = 4  # texts that are read at once
DOCUMENT = "list.document"  # in the state: the number of each row's text in the call


class Gains(NamedTuple):
    """For each text, at some columns: columns (C,) int64, and the losses (C,) in nats of the tokens after them, before
    and after.
    """

    columns: list[Tensor]
    before: list[Tensor]
    after: list[Tensor]


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Turns the gradients of all parameters off, and evaluation mode on, inside of the block."""
    trained, training = [x for x in model.parameters() if x.requires_grad], model.training
    model.eval()
    try:
        for x in trained:
            x.requires_grad_(False)
        yield
    finally:
        for x in trained:
            x.requires_grad_()
        model.train(training)


def cut(documents: Sequence[Tensor], length: int, number: int, skip: int = 0) -> list[Tensor]:
    """Returns parts (T,) of at most `length` tokens, `number` tokens in all if there are as many: the first part of
    every document, then the second of every document, ... The first `skip` tokens of documents are left out.
    """
    parts, left = [], number
    for begin in range(skip, max(map(len, documents)), length):
        for ids in documents:
            if left > 1 and len(part := ids[begin : begin + min(length, left)]) > 1:
                parts.append(part)
                left -= len(part)
    return parts


class Saved:
    """The state of a fit on disk: tensors by the name of a stage. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None, key: str):
        self.folder, self.key = folder, hashlib.sha256(key.encode()).hexdigest()[:16]

    def load(self, stage: str) -> dict[str, Tensor]:
        """Returns a stage's saved tensors; an empty dictionary without any, or if the fit had other arguments."""
        if self.folder is None:
            return {}
        try:
            return load_file(self.folder / f"{stage}-{self.key}.safetensors")
        except (OSError, SafetensorError):
            return {}

    def save(self, stage: str, tensors: dict[str, Tensor]) -> None:
        """Replaces a stage's saved tensors, atomically."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"{stage}-{self.key}.safetensors"
            save_file({name: x.contiguous().cpu() for name, x in tensors.items()}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)


def fast_layers(model: PreTrainedModel, rank: int) -> dict[str, tuple[int, int]]:
    """Returns the sizes (in, out), which are at least `rank`, by name of the linear layers that get fast weights: those
    in the upper half of the decoder layers, without the last. Raises ValueError if there are none.
    """
    number = len(decoder_layers(model)[1])
    sizes = linear_layers(model, range(number // 2, max(number - 1, number // 2 + 1)))
    sizes = {name: x for name, x in sizes.items() if min(x) >= rank}
    if not sizes:
        raise ValueError(f"`model` is a {type(model).__name__}, without a linear layer larger than `rank` {rank}.")
    return sizes


def fit_directions(
    model: PreTrainedModel, texts: Sequence[Tensor], rank: int, saved: Saved, bar: tqdm, seed: int = 0
) -> dict[str, Tensor]:
    """Computes A (r, in) by the names of `fast_layers`, of a model that reads with a memory without parts."""
    sizes, state = fast_layers(model, rank), saved.load("directions")
    begin = int(state.pop("begin", 0))
    sketches = state or {name: torch.zeros(SKETCH, size) for name, (size, _) in sizes.items()}
    bar.update(sum(map(len, texts[:begin])))
    for index in range(begin, len(texts)):
        for name, x in _sketches(model, texts[index], sizes, seed + index, bar).items():
            sketches[name] += x.cpu()
        saved.save("directions", sketches | {"begin": torch.tensor(index + 1)})
    directions = {}
    for name, sketch in sketches.items():
        _, roots, vectors = torch.linalg.svd(sketch, full_matrices=False)  # the squares of the roots are s
        kept = min(rank, len(roots))
        share = (roots[:kept] / roots[0].clamp(min=torch.finfo(roots.dtype).tiny)).square().clamp(min=FLOOR)
        directions[name] = vectors[:kept] * share[:, None] ** -0.25
    return directions


def _sketches(
    model: PreTrainedModel, ids: Tensor, sizes: dict[str, tuple[int, int]], seed: int, bar: tqdm
) -> dict[str, Tensor]:
    """Computes N G (R, in) by name, with N (R, out) ~ N(0, 1) of this text and G its mean gradient of W (out, in)."""
    inputs: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}
    noise, results = {}, {}
    for index, (name, (size, out)) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(seed * 100_003 + index)
        noise[name] = torch.randn(SKETCH, out, generator=generator)
        results[name] = torch.zeros(SKETCH, size)

    def probe(name: str):
        def add(module, args: tuple, output: Tensor) -> Tensor:
            x = torch.zeros_like(output, requires_grad=True)
            inputs.setdefault(name, []).append(args[0].detach().flatten(0, -2))
            probes.setdefault(name, []).append(x)
            return output + x

        return add

    modules, cache, device = dict(model.named_modules()), MemoryCache(model), model.get_input_embeddings().weight.device
    targets = torch.cat([ids[1:], ids.new_full((1,), -100)])
    hooks = [modules[name].register_forward_hook(probe(name)) for name in sizes]
    try:
        for tokens, labels in zip(ids.split(TOKENS_OF_A_CALL), targets.split(TOKENS_OF_A_CALL), strict=True):
            with torch.enable_grad():
                logits = model(tokens.to(device)[None], cache=cache).logits[0].float()
                loss = cross_entropy(logits, labels.to(logits.device), reduction="sum") / len(ids)
                names = [(name, i) for name, of_calls in probes.items() for i in range(len(of_calls))]
                gradients = torch.autograd.grad(loss, [probes[name][i] for name, i in names], allow_unused=True)
            for (name, i), g in zip(names, gradients, strict=True):
                if g is not None:
                    low = g.flatten(0, -2).float() @ noise[name].to(g.device).mT  # (T, out) @ (out, R)
                    results[name] = results[name].to(g.device) + low.mT @ inputs[name][i].float()
            inputs.clear()
            probes.clear()
            bar.update(len(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    return results


class Recorder:
    """Replaces a model's list: calls `note` after each piece, and leaves the logits as they are.

    note(state, losses, mlp_inputs, seen) is called with the state, the losses (R, T) of the tokens that were read,
    their y (R, T, D), and the number of tokens (R,) that each row had read before.
    """

    note: Callable[[dict, Tensor, Tensor, Tensor], None] | None = None

    def initial_state(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {
            "list.logits": torch.zeros(rows, vocabulary, dtype=dtype, device=device),
            DOCUMENT: torch.arange(rows, device=device),
        }

    def read(self, state: dict, tokens: Tensor, y: Tensor, logits: Tensor, learns: Tensor, seen: Tensor, num_kept: int):
        if self.note is not None:
            before = torch.cat([state["list.logits"][:, None].to(logits), logits[:, :-1]], 1)
            self.note(state, surprisal(before, tokens), y.detach(), seen)
        return logits, {"list.logits": logits[:, -1].detach()}


def read_texts(model: PreTrainedModel, texts: Sequence[Tensor]) -> None:
    """Reads texts (T,), one per row, each with an empty memory, in one call."""
    device, length = model.get_input_embeddings().weight.device, max(map(len, texts))
    ids = torch.stack([pad(x, (0, length - len(x))) for x in texts])
    mask = torch.stack([pad(torch.ones_like(x), (0, length - len(x))) for x in texts])
    with torch.no_grad():
        model(ids.to(device), attention_mask=mask.to(device), logits_to_keep=1, cache=MemoryCache(model))


def losses_of(model: PreTrainedModel, texts: Sequence[Tensor], bar: tqdm) -> list[Tensor]:
    """Computes the losses (T - 1,) of texts (T,), of a model whose list is a `Recorder`, in nats."""
    losses = []
    for begin in range(0, len(texts), ROWS):
        group = texts[begin : begin + ROWS]
        of_group = [torch.zeros(len(x)) for x in group]

        def note(state, values, mlp_inputs, seen, of_group=of_group) -> None:
            for row, document in enumerate(state[DOCUMENT].tolist()):
                of_group[document][int(seen[row]) :][: values.shape[1]] = values[row].cpu()
            bar.update(values.numel())

        with noting(model, note):
            read_texts(model, group)
        losses += [x[1:] for x in of_group]
    return losses


@contextmanager
def noting(model: PreTrainedModel, note: Callable) -> Iterator[None]:
    """Lets the `Recorder` of a model call `note` inside of the block."""
    model.memory.token_list.note = note
    try:
        yield
    finally:
        model.memory.token_list.note = None


def choose_rate(model: PreTrainedModel, texts: Sequence[Tensor], saved: Saved, bar: tqdm) -> None:
    """Sets one rate for all fast weights: the best of at most NUM_RATES, found by doubling or halving
    FIRST_RATE as long as the mean loss of the texts falls.
    """
    fast, tried = model.memory.fast_weights, {}

    def loss(power: int) -> float:
        if power not in tried:
            stage, fast.rates = f"rate{power:+}", dict.fromkeys(fast.directions, FIRST_RATE * 2.0**power)
            if not (values := saved.load(stage)):
                values = {"loss": torch.cat(losses_of(model, texts, bar)).mean()[None]}
                saved.save(stage, values)
            tried[power] = float(values["loss"].nan_to_num(torch.inf))
        return tried[power]

    best = 0
    for direction in (1, -1):
        while len(tried) < NUM_RATES and loss(best + direction) < loss(best):
            best += direction
    fast.rates = dict.fromkeys(fast.directions, FIRST_RATE * 2.0**best)


def fit_start(model: PreTrainedModel, texts: Sequence[Tensor], saved: Saved, bar: tqdm) -> dict[str, Tensor]:
    """Computes means over the second of two passes through texts: of B, which is B_0 (out, r), by name; of y, "mean"
    (D,), and of its products, "products" (D, D), in float64.
    """
    fast, state = model.memory.fast_weights, saved.load("means")
    begin = int(state.pop("begin", 0))
    sums = {name.removeprefix("sum."): x for name, x in state.items() if name.startswith("sum.")}
    weights = {name: x for name, x in state.items() if name.startswith("B.")}
    order = [*texts, *texts]
    bar.update(sum(map(len, order[:begin])))
    for index in range(begin, len(order)):
        ids, is_second = order[index], index >= len(texts)

        def note(state, losses, mlp_inputs, seen, is_second=is_second) -> None:
            bar.update(losses.numel())
            if is_second:
                y = mlp_inputs[0].cpu().double()
                new = {name: losses.shape[1] * state[f"B.{name}"][0].cpu() for name in fast.directions}
                for name, x in (new | {"mean": y.sum(0), "products": y.T @ y}).items():
                    sums[name] = sums.get(name, 0.0) + x

        cache, device = MemoryCache(model), model.get_input_embeddings().weight.device
        cache.begin(model, 1, device)
        cache.state |= {name: x.to(cache.state[name]) for name, x in weights.items()}
        with noting(model, note), torch.no_grad():
            model(ids[None].to(device), logits_to_keep=1, cache=cache)
        weights = {name: x for name, x in cache.state.items() if name.startswith("B.")}
        of_sums = {f"sum.{name}": x for name, x in sums.items()}
        saved.save("means", weights | of_sums | {"begin": torch.tensor(index + 1)})
    return {name: x / sum(map(len, texts)) for name, x in sums.items()}


def fit_memory(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    *,
    window: int | str | None = "model",
    rank: int = 8,
    entries: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> tuple[Gains, Gains | None]:
    """Fits fast weights, and a list if `entries` says its size, to texts, and gives the model a memory with them, in
    place. Returns the gains of the fast weights over the window alone, on the texts by which rates were compared, and
    of the list over the fast weights, on the documents.

    Args:
        model: a causal language model, with a memory or without, also inside of PEFT's.
        documents: ids (T,) of texts of the kind that the model is to read, each read by itself; some 90,000 tokens.
        window: tokens that a query of full attention sees; None for all; "model" for its memory's, else 1,024, and
            for a Titans, which has its own, None.
        rank: r, of the fast weights.
        entries: of a list of surprising tokens, such as 5,400; None: no list.
        seed: of the sketches of gradients.
        folder: keeps the state of the fit: after an interruption, a fit with the same arguments continues there.
        progress: show bars on standard error.

    Raises ValueError for bad arguments, and with `entries` for documents without a surprising token. A model for which
    an error is raised is as it was before.
    """
    model, documents = base_model(model), [torch.as_tensor(x).long() for x in documents]
    if not documents or any(x.dim() != 1 or len(x) < 2 for x in documents):
        raise ValueError("`documents` must be tensors (T,) of at least two ids.")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"`rank` must be a whole number of at least 1, got {rank!r}.")
    own = getattr(model, "memory", None)
    if window == "model":
        window = own.window if own is not None else None if is_titans(model) else 1024
    digest = hashlib.sha256(torch.cat(documents).cpu().numpy().tobytes()).hexdigest()
    own_key = (model.name_or_path, type(model).__name__, weight_facts(model, NUMBER)["weights"])
    key = (*own_key, window, rank, entries, seed, [len(x) for x in documents], digest)
    saved = Saved(None if folder is None else Path(folder), repr(key))
    first_token = None if own is None else own.first_token
    if own is not None:
        forget(model)
    try:
        with frozen(model):
            fit = _Fit(model, window, first_token, saved, progress)
            fast_weights, means, gains = fit.fast_weights(documents, rank, seed)
            token_list, of_list = None, None
            if entries is not None:
                token_list, of_list = fit.token_list(fast_weights, means, documents, entries)
        kept = {"first_token": first_token, "passages": None if own is None else own.passages}
        remember(model, window, fast_weights=fast_weights, token_list=token_list, **kept)
    except BaseException:
        if own is not None:  # the memory that the model had
            names = ("passages", "fast_weights", "token_list", "first_token", "learn_from")
            remember(model, own.window, own.parts, **{name: getattr(own, name) for name in names})
            model.memory.learning = own.learning
        raise
    if own is not None:
        model.memory.learn_from, model.memory.learning = own.learn_from, own.learning
    return gains, of_list


def parts_for(documents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the texts for directions and start, and the texts by which rates are compared."""
    quarter = sum(map(len, documents)) // 4
    are_long = max(map(len, documents)) > 2 * TEXT
    return (
        cut(documents, TEXT, max(min(FIT_TOKENS, quarter), 2)),
        cut(documents[::-1], COMPARED, max(min(COMPARED_TOKENS, quarter), 2), skip=TEXT * are_long),
    )


class _Fit:
    """The stages of a fit of one model, which has no memory between them."""

    def __init__(self, model, window: int | None, first_token: int | None, saved: Saved, progress: bool):
        self.model, self.window, self.first_token = model, window, first_token
        self.saved, self.progress = saved, progress

    @contextmanager
    def memory(self, fast_weights: FastWeights | None, token_list) -> Iterator[None]:
        """Gives the model a memory inside of the block."""
        memory = [name for name, x in ((FAST_WEIGHTS, fast_weights), (LIST, token_list)) if x is not None]
        arguments = {"fast_weights": fast_weights, "token_list": token_list, "first_token": self.first_token}
        remember(self.model, self.window, memory, **arguments)
        try:
            yield
        finally:
            forget(self.model)

    def bar(self, name: str, total: int) -> tqdm:
        return tqdm(desc=f"fitting {name}", total=total, unit="token", disable=not self.progress)

    def fast_weights(self, documents: Sequence[Tensor], rank: int, seed: int) -> tuple[FastWeights, dict, Gains]:
        """Fits directions, rate and start; returns the means of `fit_start` and the gains too."""
        model, saved, (texts, compared) = self.model, self.saved, parts_for(documents)
        number, number_compared = sum(map(len, texts)), sum(map(len, compared))
        with self.memory(None, None), self.bar("directions", number) as bar:
            directions = fit_directions(model, texts, rank, saved, bar, seed)
        outputs = {name: out for name, (_, out) in fast_layers(model, rank).items()}
        fast = FastWeights(directions, dict.fromkeys(directions, FIRST_RATE), outputs)
        with self.memory(fast, Recorder()):
            with self.bar("rate", NUM_RATES * number_compared) as bar:
                choose_rate(model, compared, saved, bar)
            with self.bar("start", 2 * number) as bar:
                means = fit_start(model, texts, saved, bar)
            with tqdm(desc="measuring", total=2 * number_compared, unit="token", disable=not self.progress) as bar:
                model.set_memory_learning(False)
                before = losses_of(model, compared, bar)
                model.set_memory_learning(True)
                fast.start = {name: means[name] for name in directions}
                after = losses_of(model, compared, bar)
        return fast, means, Gains([torch.arange(len(x)) for x in before], before, after)

    def token_list(self, fast_weights: FastWeights, means: dict, documents: Sequence[Tensor], entries: int) -> tuple:
        """Fits the list to texts that are read with the fast weights: returns list and gains."""
        center, projection = fit_keys(means["mean"], means["products"])
        collector = Collector(center, projection, ReadOut.cautious(), entries=entries)
        collector.stride = math.ceil(sum(map(len, documents)) / NUM_COLUMNS)
        with self.memory(fast_weights, collector):
            evidence = self.evidence(collector, documents)
        read_out, none = fit_read_out([x for parts in evidence for x in parts]), torch.zeros(0)
        columns = [torch.cat([none.long(), *(x.columns for x in parts)]) for parts in evidence]
        before = [torch.cat([none, *(-x.log_p[0] for x in parts)]) for parts in evidence]
        after = [torch.cat([none, *(x.losses(read_out)[0] for x in parts)]) for parts in evidence]
        return TokenList(center, projection, read_out, entries=entries), Gains(columns, before, after)

    def evidence(self, collector: Collector, documents: Sequence[Tensor]) -> list[list[Evidence]]:
        """Reads documents with the collector, ROWS at once, and returns the evidence of each."""
        evidence, order = [[] for _ in documents], sorted(range(len(documents)), key=lambda i: len(documents[i]))
        with self.bar("the list", sum(map(len, documents))) as bar:
            for begin in range(0, len(order), ROWS):
                group, stage = order[begin : begin + ROWS], f"list-{begin}"
                collector.texts, collector.noted = [documents[i] for i in group], self.saved.load(stage)
                if not collector.noted:
                    read_texts(self.model, collector.texts)
                    self.saved.save(stage, collector.noted)
                for text, new in collector.evidence():
                    evidence[group[text]].append(new)
                bar.update(sum(len(documents[i]) for i in group))
        return evidence
