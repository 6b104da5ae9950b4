"""Reads texts with a reader and any number of chains of memories behind it, in pieces, and scores every token."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from eval.streaming.mixtures import MIXTURES, Found, fit_shares
from eval.streaming.readers import Reader


class Link(NamedTuple):
    """A memory of a chain, and the share of each of its buckets."""

    memory: Any
    shares: Tensor


class Scores(NamedTuple):
    """What a chain says of a text."""

    losses: Tensor  # (T - 1,), of all tokens but the first
    tops: dict[int, int]  # the most probable token after each wanted place
    state_bytes: int  # after the text


class Question(NamedTuple):
    """What is read after a context, and what is right: one of some options, or all strings in a generated answer."""

    kind: str
    text: str
    value: str | list[str]
    options: list[str] = []
    generated: int = 0  # tokens of an answer, at most; 0 with options


def load_texts(path: Path, tokenizer: PreTrainedTokenizerBase, tokens: int, place: float) -> dict[str, Tensor]:
    """Returns the first `tokens` ids after the share `place` of each text of a folder or a file, by name.

    A .raw file is cut into its articles, at lines such as " = Title = ". Texts that are too short are left out.
    """
    texts = {}
    for file in sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8", errors="replace")
        parts = (
            re.split(r"^ = ([^=\n]+) = *$", text, flags=re.MULTILINE)
            if file.suffix == ".raw"
            else ["", file.name, text]
        )
        texts |= {title.strip(): part for title, part in zip(parts[1::2], parts[2::2], strict=True)}
    result = {}
    for name, text in texts.items():
        begin = text.find("\n", int(len(text) * place)) + 1 if place else 0
        ids = tokenizer(text[begin : begin + 8 * tokens], add_special_tokens=False)["input_ids"][:tokens]
        if len(ids) == tokens:
            result[name] = torch.tensor(ids)
    return result


def copy_state(value: Any) -> Any:
    """Copies a part of a state. Tensors are replaced and never changed in place, so they are shared."""
    result = copy.copy(value)
    if isinstance(value, DynamicCache):
        result.layers = [copy.copy(layer) for layer in value.layers]
    return result


class Stream:
    """A reader and chains of memories behind it, at some place of a text. Two chains may share a memory object."""

    def __init__(self, reader: Reader, chains: dict[str, list[Link]]):
        self.reader, self.chains = reader, chains
        self.memories = list({id(link.memory): link.memory for chain in chains.values() for link in chain}.values())
        self.begin()

    def begin(self) -> None:
        """Forgets the text."""
        for part in (self.reader, *self.memories):
            part.begin()

    def read(self, ids: Tensor) -> Iterator[tuple[Tensor, dict[int, Found]]]:
        """Reads on, and yields what the model says after each token of a piece (T, V), and what each memory says."""
        for piece in ids.split(self.reader.piece):
            log_p, states = self.reader.read(piece)
            yield log_p, {id(memory): memory.predict(piece, states) for memory in self.memories}

    def mix(self, name: str, log_p: Tensor, found: dict[int, Found], places: list[int]) -> Tensor:
        """Returns a chain's probabilities of all words after some places of a piece (places, V)."""
        rows = log_p[places].exp()
        for memory, shares in self.chains[name]:
            said = found[id(memory)]
            share = shares[said.buckets][places, None].float()
            m = torch.zeros_like(rows).index_add_(1, said.tokens, said.weights[places])
            rows = (1 - share) * rows + share * m
        return rows

    def after(self, ids: Tensor) -> dict[str, Tensor]:
        """Reads a few tokens on, and returns each chain's probabilities of all words after each of them (T, V)."""
        pieces = list(self.read(ids))
        return {
            name: torch.cat([self.mix(name, log_p, found, list(range(len(log_p)))) for log_p, found in pieces])
            for name in self.chains
        }

    def state_bytes(self, name: str) -> int:
        """Returns the bytes of the reader and of a chain's memories."""
        return self.reader.state_bytes() + sum(link.memory.state_bytes() for link in self.chains[name])

    def save(self) -> list[dict[str, Any]]:
        """Returns a copy of the state, for `restore`: not of the model, which a reader may have changed."""
        return [
            {k: copy_state(v) for k, v in vars(part).items() if k not in ("model", "found")}
            for part in (self.reader, *self.memories)
        ]

    def restore(self, saved: list[dict[str, Any]]) -> None:
        """Goes back to the place at which a state was saved."""
        for part, values in zip((self.reader, *self.memories), saved, strict=True):
            vars(part).update({k: copy_state(v) for k, v in values.items()})


def read_text(
    reader: Reader, chains: dict[str, list[Link]], ids: Tensor, wanted: set[int] = frozenset()
) -> dict[str, Scores]:
    """Reads ids (T,) once: the scores of each chain by its name."""
    stream, start = Stream(reader, chains), 0
    losses, tops = {name: [] for name in chains}, {name: {} for name in chains}
    for log_p, found in stream.read(ids):
        targets = ids[start + 1 : start + 1 + len(log_p)]
        asked = [i for i in range(len(log_p)) if start + i in wanted]
        of_targets = log_p[: len(targets)].gather(1, targets[:, None])[:, 0].double().exp()
        for name, chain in chains.items():
            p = of_targets
            for memory, shares in chain:
                said = found[id(memory)]
                share = shares[said.buckets[: len(p)]]
                p = (1 - share) * p + share * said.of_targets(targets)
            losses[name].append(-p.clamp(min=1e-30).log())
            rows = stream.mix(name, log_p, found, asked)
            tops[name] |= {start + i: int(row.argmax()) for i, row in zip(asked, rows, strict=True)}
        start += len(log_p)
    return {name: Scores(torch.cat(losses[name]), tops[name], stream.state_bytes(name)) for name in chains}


class Prepared(NamedTuple):
    """A choice text as a reader has read it, cut into pieces."""

    ids: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    p: Tensor  # (T,), of the targets
    states: list[Tensor]


def prepare(reader: Reader, texts: list[Tensor]) -> list[Prepared]:
    """Reads choice texts."""
    reader.prepare(texts)
    result = []
    for text in texts:
        reader.begin()
        ids, targets = text[:-1].split(reader.piece), text[1:].split(reader.piece)
        read = [reader.read(x) for x in ids]
        log_p = [x.log_p.gather(1, t[:, None])[:, 0] for x, t in zip(read, targets, strict=True)]
        result.append(Prepared(ids, targets, torch.cat(log_p).double().exp(), [x.states for x in read]))
    return result


def choose_links(texts: list[Prepared], names: list[str]) -> tuple[list[Link], list[dict[str, Any]]]:
    """Chooses the memories of a chain one after the other, by the loss of choice texts; returns settings too."""
    p, links, settings = torch.cat([x.p for x in texts]), [], []
    for name in names:
        tried = []
        for options in MIXTURES[name].options:
            memory, found = MIXTURES[name](**options), []
            memory.prepare(torch.cat([state for x in texts for state in x.states]))
            for text in texts:
                memory.begin()
                for ids, targets, states in zip(text.ids, text.targets, text.states, strict=True):
                    said = memory.predict(ids, states)
                    found.append((said.of_targets(targets), said.buckets))
            m, buckets = map(torch.cat, zip(*found, strict=True))
            shares = fit_shares(p, m, buckets, memory.num_buckets)
            if memory.share is not None:
                shares = torch.full_like(shares, memory.share)
            mixed = (1 - shares[buckets]) * p + shares[buckets] * m
            tried.append((-mixed.log().mean().item(), len(tried), Link(memory, shares), mixed, options))
        loss, _, link, p, options = min(tried)
        links.append(link)
        settings.append(
            {"memory": name, **options, "loss": loss, "shares": [round(x, 4) for x in link.shares.tolist()]}
        )
    return links, settings
