"""Compares memories behind the last layer of a pretrained model that sees a window: the gain in nats per token.

    titans-hf convert MODEL --output runs/windowed --window 256 --memory none
    python -m eval.studies.read_pretrained runs/windowed --data data --output runs/arrays
    python -m eval.studies.memory_on_pretrained runs/windowed runs/arrays --memory episodic --entries 5400 \
        --output eval/results/memory_on_pretrained.jsonl

No weight of the model is trained. A memory is fitted to the novels of the train set and scored on the others:

    loss = -log((1 - l) p + l m),  l = sigmoid(w f + b),  m the memory's distribution of the next token

    episodic  the package's: entries of surprising tokens, fitted by `titans_hf.episodic_fit`
    cache     the neural cache of Grave et al. (2017): every token, keys of all numbers of y, a constant l
    counts    what has followed the same n - 1 tokens in the text so far, a constant l
    deep      the paper's memory (eq. 12-15): an MLP, in chunks of 64, keys made of y, values random codes of tokens;
              m is a softmax of beta (code . retrieved) + kappa log p over the tokens written so far; keys, initial
              weights, steps, momentum, forgetting and kappa are trained on the train set. Its gate sees the log of the
              sum of the scores, the largest share, the entropy of the model, and the log of the position
    window    no memory: what the model gains that has read --wider, arrays of a larger window or of steps of SGD
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize, pad
from transformers import AutoConfig

from eval.common.records import describe_commit
from titans_hf import TitansForCausalLM
from titans_hf.cli.shared.command_line import run_command
from titans_hf.episodic_fit import PIECE, Piece, collect, evaluate, fit_keys, fit_read_out
from titans_hf.episodic_memory import EpisodicMemory
from titans_hf.memory_network import UpdateRule, layer_shapes
from titans_hf.memory_ops import memorize
from titans_hf.memory_state import MemoryInputs, MemoryState

RANGES = [
    (0, 10**9),
    (0, 1024),
    (1024, 2048),
    (2048, 4096),
    (4096, 8192),
    (8192, 16384),
    (16384, 32768),
    (32768, 65536),
]
BLOCK, CHUNK = 512, 64  # positions scored at once, chunk of `memorize`
KEY_TOKENS, FITTED = 15_000, 8_000  # tokens of the train set that keys are fitted to; positions of the read-out
RATES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.14)  # the constants l that are tried


def load_set(folder: Path, name: str) -> list[dict]:
    """Returns the texts of a set without their last token, whose next one is not known."""
    arrays = torch.load(folder / f"{name}.pt", mmap=True)
    texts = []
    for i in range(len(arrays["ids"])):
        text = {key: arrays[key][i, :-1].float() for key in ("y", "h", "loss", "ent")}
        texts.append(text | {"ids": arrays["ids"][i].long(), "next": arrays["ids"][i, 1:].long()})
    return texts


def principal_directions(texts: list[dict]) -> tuple[Tensor, Tensor]:
    """Returns the mean of y and all principal directions (D, D), each divided by the fourth root of its variance, the
    last one with the largest variance.
    """
    y = torch.cat([text["y"][::2] for text in texts])
    centred = y - y.mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(y))
    return y.mean(0), directions * variances.clamp(min=1e-6) ** -0.25


class Episodic:
    """The package's episodic memory, with texts that have been read already."""

    def __init__(self, args: argparse.Namespace, head: nn.Linear):
        config = AutoConfig.from_pretrained(args.model)
        for name in ("entries", "threshold", "key_size"):
            setattr(config, f"token_memory_{name}", getattr(args, name))
        config.token_memory_form = "episodic"
        self.memory, self.head = EpisodicMemory(config, config.num_hidden_layers).requires_grad_(False), head
        state = self.memory.initial_state(1, torch.bfloat16).entries.entries
        self.num_bytes = sum(x.numel() * x.element_size() for x in vars(state).values())

    def pieces(self, text: dict, length: int):
        """Yields what a model of bfloat16 has found in a text."""
        for begin in range(0, length, PIECE):
            part = slice(begin, min(begin + PIECE, length))
            yield Piece(text["ids"][None, part], *(text[name][None, part].bfloat16() for name in ("y", "h")))

    def evidence(self, text: dict, stride: int):
        """Returns what every `stride`-th position finds."""
        weight = torch.ones(len(text["ids"]))
        pieces = self.pieces(text, len(text["loss"]))
        return collect(self.memory, lambda h: self.head(h.float()), pieces, text["ids"], weight, stride)

    def read(self, texts: list[dict], num_seeds: int) -> None:
        """Fits the keys, and collects what the read-out is fitted to with each seed: every n-th block of 64 tokens."""
        share = math.ceil(KEY_TOKENS / len(texts))
        fit_keys(self.memory, (piece for text in texts for piece in self.pieces(text, share)))
        stride = math.ceil(sum(len(text["loss"]) for text in texts) / FITTED / num_seeds)
        found = [self.evidence(text, stride) for text in texts]
        self.found = [[parts[i::num_seeds] for parts in found] for i in range(num_seeds)]

    def gains(self, texts: list[dict], stride: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns positions and gains of each text. The memory has no entry to see at positions that are left out."""
        all_positions, all_gains = [], []
        for text in texts:
            result = evaluate(self.memory, [self.evidence(text, stride)])
            positions = torch.arange(0, len(text["loss"]), stride)
            gain = torch.zeros(len(text["loss"])).scatter(0, result.columns[0], result.before[0] - result.after[0])
            all_positions.append(positions)
            all_gains.append(gain[positions])
        return all_positions, all_gains


class Cache:
    """The neural cache: the newest N tokens with the y that came before them."""

    def __init__(self, args: argparse.Namespace, mean: Tensor):
        self.entries, self.beta, self.mean = args.entries, 12.0, mean
        self.num_bytes = args.entries * (2 * len(mean) + 4)  # keys in 16 bits, tokens in 32

    def prepare(self, text: dict) -> Tensor:
        """Returns the keys of all positions."""
        return normalize(text["y"] - self.mean, dim=-1)

    def score(self, text: dict, keys: Tensor, at: Tensor) -> tuple[Tensor, None, Tensor]:
        """Returns m of the next token (Q,) at positions `at` (Q,), and whether there are entries."""
        first, last = max(0, int(at[0]) - self.entries), max(int(at[-1]), 1)
        places = torch.arange(first, last)
        scores = self.beta * keys[at] @ keys[places].T  # (Q, D) @ (D, N)
        visible = (places < at[:, None]) & (places >= at[:, None] - self.entries)
        shares = scores.masked_fill(~visible, -1e4).softmax(1)
        m = torch.where(text["next"][places] == text["next"][at][:, None], shares, 0).sum(1)
        return m * (at > 0), None, at > 0


class Deep(nn.Module):
    """The memory of the paper: M(k) is an MLP, or with depth 1 a matrix, whose weights are the state."""

    def __init__(self, args: argparse.Namespace, mean: Tensor, directions: Tensor, head: nn.Linear):
        super().__init__()
        self.head = head
        size, shapes = args.key_size, layer_shapes(args.key_size, args.depth, args.expansion)
        self.threshold, self.momentum = args.threshold, args.momentum
        self.rule = UpdateRule(error_clip=None, delta_rule=args.depth == 1)
        self.mean, projection = mean, directions[:, -size:]
        self.projection = nn.Parameter(projection / (projection.norm() / size**0.5))
        self.initial = nn.ParameterList([nn.Parameter(torch.randn(1, *x)) for x in shapes])
        nn.init.zeros_(self.initial[-1])
        # The mean |h|^2 of the last layer's inputs: a step of 1 / |h|^2 does to them what a step of 1 does to a key
        # of length 1.
        hidden = nn.functional.silu(torch.randn(100_000)).square().mean().item() * shapes[0][1]
        self.step = 0.5 / (hidden if args.depth > 1 else 1)
        self.gates = nn.Linear(size + 2, 3)  # theta, eta, alpha
        nn.init.zeros_(self.gates.weight)
        self.gates.bias.data = torch.tensor([-2.0 if args.depth > 1 else 0.0, 2.0, -7.0])
        self.log_beta = nn.Parameter(torch.tensor(40.0 if args.depth > 1 else 20.0).log())
        self.kappa = nn.Parameter(torch.tensor(0.3))
        self.read_gate = nn.Linear(4, 1)
        generator = torch.Generator().manual_seed(0)
        self.codes = normalize(torch.randn(1 << 18, size, generator=generator), dim=-1)  # one for each token id
        self.num_bytes = 4 * sum(x.numel() for x in self.initial) * (1 + args.momentum)

    def prepare(self, text: dict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what is retrieved at each position (T, size); each written token, and where it was written first."""
        keys = normalize((text["y"] - self.mean) @ self.projection, dim=-1)
        of_token = [pad(text[name][:-1], (1, 0)) for name in ("loss", "ent")]  # of the token at its own position
        gate_inputs = [pad(keys[:-1], (0, 0, 1, 0)), *(x[:, None] / 4 - 1 for x in of_token)]
        theta, eta, alpha = self.gates(torch.cat(gate_inputs, dim=-1)).unbind(-1)
        is_written = (of_token[0] >= self.threshold) & (torch.arange(len(keys)) > 0)
        theta = self.step * theta.sigmoid() * is_written
        if self.momentum:
            theta = theta * eta.neg().sigmoid()  # the steps of a token sum to theta
        state = MemoryState.initial(
            list(self.initial), 1, torch.float32, self.rule.needs_anchor(len(self.initial)), self.momentum
        )
        inputs = MemoryInputs(
            queries=keys[None, None], keys=pad(keys[:-1], (0, 0, 1, 0))[None, None],
            values=self.codes[text["ids"][: len(keys)]][None, None], inner_lr=theta[None, None],
            log_momentum_decay=logsigmoid(eta)[None, None] if self.momentum else None,
            log_retain=(logsigmoid(-alpha) * is_written)[None, None],
        )  # fmt: skip
        retrieved = memorize(inputs, state, self.rule, chunk_size=CHUNK).retrieved[0, 0]
        written = (text["loss"] >= self.threshold).nonzero()[:, 0]
        tokens, inverse = text["next"][written].unique(return_inverse=True)
        first = torch.full(tokens.shape, len(keys)).scatter_reduce(0, inverse, written, "amin")
        return retrieved, tokens, first

    def score(self, text: dict, prepared, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns m of the next token (Q,), features (Q, 4), and whether something is written (Q,), at positions (Q,).
        All tokens written before a position are compared.
        """
        retrieved, tokens, first = prepared
        scores = self.log_beta.exp() * retrieved[at] @ self.codes[tokens].T  # (Q, size) @ (size, words)
        with torch.no_grad():  # up to the constant log Z, which the softmax does not see
            log_p = text["h"][at] @ self.head.weight[tokens].T.float()  # (Q, D) @ (D, words)
        scores = scores + self.kappa * log_p
        scores = scores.masked_fill(first >= at[:, None], -1e4)
        log_sum, has_entries = scores.logsumexp(1), at > first.min()
        shares = (scores - log_sum[:, None]).exp()
        of_next = torch.where(tokens == text["next"][at][:, None], shares, 0).sum(1)
        count = (at + 1).float().log()
        features = torch.stack([log_sum / 10, shares.amax(1), text["ent"][at] / 4, count / 5], dim=1)
        return of_next * has_entries, features * has_entries[:, None], has_entries

    def fit(self, texts: list[dict], steps: int) -> None:
        """Trains keys, initial weights and gates on two texts a step, 512 positions of each."""
        weight, bias = fit_gate(evidence(self, texts[:5], 16))
        self.read_gate.weight.data, self.read_gate.bias.data = weight[None], bias[None]
        slow = [self.projection, *self.initial]
        fast = [*self.gates.parameters(), *self.read_gate.parameters(), self.log_beta, self.kappa]
        optimizer = torch.optim.Adam([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-2}], betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1, (i + 1) / 5) * (0.5 + 0.5 * math.cos(math.pi * i / steps))
        )
        order = [i for _ in range(steps) for i in torch.randperm(len(texts)).tolist()]
        for step in range(steps):
            loss = 0
            for i in order[2 * step : 2 * step + 2]:
                at = torch.randperm(len(texts[i]["loss"]))[:512].sort()[0]
                m, features, has_entries = self.score(texts[i], self.prepare(texts[i]), at)
                gate = self.read_gate(features)[:, 0]
                loss = loss + (mixed_loss(texts[i]["loss"][at], m, gate, has_entries) - texts[i]["loss"][at]).mean() / 2
            optimizer.zero_grad()
            loss.backward()
            if nn.utils.clip_grad_norm_(self.parameters(), 1.0).isfinite():
                optimizer.step()
            schedule.step()
            print(f"step {step + 1}: gain {-loss.item():.4f}", flush=True)


def mixed_loss(loss: Tensor, m: Tensor, gate: Tensor, has_entries: Tensor) -> Tensor:
    """Computes -log((1 - l) p + l m) for the gate's logits; l is 0 without entries."""
    gate = torch.where(has_entries, gate, -1e4)
    return -torch.logaddexp(logsigmoid(-gate) - loss, logsigmoid(gate) + m.clamp(min=1e-12).log())


@torch.no_grad()
def evidence(memory, texts: list[dict], stride: int, offset: int = 0) -> list[tuple[Tensor, ...]]:
    """Scores every `stride`-th position of each text: positions, loss of the model, m, features, has_entries."""
    result = []
    for text in texts:
        prepared, positions = memory.prepare(text), torch.arange(offset, len(text["loss"]), stride)
        parts = zip(*(memory.score(text, prepared, at) for at in positions.split(BLOCK)), strict=True)
        m, features, has_entries = (None if x[0] is None else torch.cat(x) for x in parts)
        result.append((positions, text["loss"][positions], m, features, has_entries))
    return result


@torch.enable_grad()
def fit_gate(found: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Returns w and b of the gate that minimise the loss of the next tokens."""
    _, loss, m, features, has_entries = map(torch.cat, zip(*found, strict=True))
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    weight, bias = torch.zeros(4, requires_grad=True), torch.tensor(-3.0, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias])
    for i in range(400):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - i / 400)
        gate = (features - mean) / deviation @ weight + bias
        optimizer.zero_grad()
        mixed_loss(loss, m, gate, has_entries).mean().backward()
        optimizer.step()
    weight, bias = weight.detach() / deviation, bias.detach()
    return weight, bias - (weight * mean).sum()


def table(positions: list[Tensor], gains: list[Tensor]) -> dict:
    """Returns the mean gain by range of positions, of each text, and a 95 % bootstrap interval over texts."""
    result = {}
    for low, high in RANGES:
        parts = [g[(at >= low) & (at < high)] for at, g in zip(positions, gains, strict=True)]
        if all(len(x) for x in parts):
            key = "all" if low == 0 and high > 1024 else f"{low}-{high}"
            result[key] = round(torch.stack([x.mean() for x in parts]).mean().item(), 4)
    by_text = torch.stack([g.mean() for g in gains])
    samples = torch.randint(len(gains), (4000, len(gains)), generator=torch.Generator().manual_seed(0))
    interval = by_text[samples].mean(1).quantile(torch.tensor([0.025, 0.975]))
    return result | {
        "interval": [round(x, 4) for x in interval.tolist()],
        "by_text": [round(x, 4) for x in by_text.tolist()],
    }


def gains_of_gate(found: list[tuple[Tensor, ...]], gate: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Returns the gain at each position of each text."""
    return [loss - mixed_loss(loss, m, f @ gate[0] + gate[1], has) for _, loss, m, f, has in found]


def gains_of_rate(found: list[tuple[Tensor, ...]], rate: float) -> list[Tensor]:
    """Returns the gains with the constant l = rate where there are entries."""
    gate = torch.tensor(math.log(rate / (1 - rate)))
    return [loss - mixed_loss(loss, m, gate, has) for _, loss, m, *_, has in found]


def count_evidence(texts: list[dict], order: int, stride: int) -> list[tuple[Tensor, ...]]:
    """Returns as `evidence` what the counts of the text so far say of the next token."""
    result = []
    for text in texts:
        counts, shares, ids = defaultdict(Counter), [], text["ids"].tolist()
        for t, token in enumerate(ids[1:]):
            seen = counts[tuple(ids[max(0, t - order + 2) : t + 1]) if order > 1 else ()]
            shares.append(seen[token] / seen.total() if seen else math.nan)
            seen[token] += 1
        at, m = torch.arange(0, len(shares), stride), torch.tensor(shares)
        result.append((at, text["loss"][at], m.nan_to_num()[at], None, ~m.isnan()[at]))
    return result


class Measured:
    """A memory, its gains on a set after a fit with a seed, and what was fitted."""

    def __init__(self, args: argparse.Namespace, head: nn.Linear):
        self.args, self.head, self.settings, self.memory = args, head, {}, None
        if args.memory != "window":  # which is not fitted
            self.train = load_set(args.arrays, "train")
            self.mean, self.directions = principal_directions(self.train)

    def fit(self, seed: int) -> None:
        """Fits the memory to the train set, or chooses the rate on valid."""
        torch.manual_seed(seed)
        args, memory = self.args, self.args.memory
        if memory == "episodic":
            if self.memory is None:
                self.memory = Episodic(args, self.head)
                if args.fitted is None:
                    self.memory.read(self.train, len(args.seeds))
            if args.fitted is None:
                fit_read_out(self.memory.memory, self.memory.found[args.seeds.index(seed)])
            else:
                fitted = TitansForCausalLM.from_pretrained(args.fitted).model.episodic_memory
                self.memory.memory.load_state_dict(fitted.float().state_dict())
                self.settings["fitted"] = args.fitted.name
            for name in ("log_sharpness", "entry_weight", "gate_weight", "gate_bias"):
                self.settings[name] = [round(x, 3) for x in getattr(self.memory.memory, name).tolist()]
        elif memory == "deep":
            self.memory = Deep(args, self.mean, self.directions, self.head)
            if args.steps:
                self.memory.fit(self.train, args.steps)
            self.gate = fit_gate(evidence(self.memory, self.train, 16, 2 * seed))
        elif memory != "window":
            self.memory = Cache(args, self.mean) if memory == "cache" else None
            valid = self._found(load_set(args.arrays, "valid"), 4)
            by_rate = {rate: table([x[0] for x in valid], gains_of_rate(valid, rate))["all"] for rate in RATES}
            self.settings["rate"] = max(by_rate, key=by_rate.get)

    def _found(self, texts: list[dict], stride: int) -> list[tuple[Tensor, ...]]:
        return evidence(self.memory, texts, stride) if self.memory else count_evidence(texts, self.args.order, stride)

    def gains(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Returns positions and gains of each text of a set."""
        texts, stride = load_set(self.args.arrays, name), self.args.stride
        if self.args.memory == "window":
            wider = load_set(self.args.wider, name)
            gains = [(a["loss"] - b["loss"])[::stride] for a, b in zip(texts, wider, strict=True)]
            return [torch.arange(0, len(text["loss"]), stride) for text in texts], gains
        if self.args.memory == "episodic":
            return self.memory.gains(texts, stride)
        found = self._found(texts, stride)
        is_deep = self.args.memory == "deep"
        gains = gains_of_gate(found, self.gate) if is_deep else gains_of_rate(found, self.settings["rate"])
        return [x[0] for x in found], gains


def measure(args: argparse.Namespace) -> None:
    """Fits a memory with every seed, and writes a line for each set."""
    head = TitansForCausalLM.from_pretrained(args.model).lm_head.float().requires_grad_(False)
    used = {
        "episodic": ("entries", "threshold", "key_size"),
        "cache": ("entries",),
        "counts": ("order",),
        "deep": ("threshold", "key_size", "depth", "expansion", "momentum", "steps"),
        "window": (),
    }[args.memory]
    measured = Measured(args, head)
    for seed in args.seeds:
        measured.fit(seed)
        config = {"memory": args.memory, "window": args.window, "sinks": 1} | {x: getattr(args, x) for x in used}
        if args.memory == "window":
            config["wider"] = args.wider.name
        elif args.memory != "counts":
            config["bytes"] = measured.memory.num_bytes
        config |= measured.settings
        for name in args.sets:
            line = {"table": "memory-on-smollm2", "config": config, "data": name, "seed": seed}
            line |= {"result": table(*measured.gains(name)), "stride": args.stride, "commit": describe_commit()}
            print(json.dumps(line), flush=True)
            with args.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the converted model, whose LM head is used")
    parser.add_argument("arrays", type=Path, help="the folder that eval.studies.read_pretrained has made")
    parser.add_argument("--memory", choices=["episodic", "cache", "counts", "deep", "window"], required=True)
    parser.add_argument("--sets", nargs="+", default=["valid", "test"], help="sets to score")
    parser.add_argument("--wider", type=Path, help="for --memory window: arrays of the same texts and a larger window")
    parser.add_argument("--fitted", type=Path, help="a model whose episodic memory is scored as fit-memory left it")
    parser.add_argument("--window", type=int, default=256, help="the window of the model that has read, for the record")
    parser.add_argument("--threshold", type=float, default=1.0, help="nats from which on a token is written")
    parser.add_argument(
        "--entries", type=int, default=5400, help="entries of the episodic memory and of the neural cache"
    )
    parser.add_argument("--key_size", type=int, default=64)
    parser.add_argument("--order", type=int, default=2, help="n of the n-grams that are counted")
    parser.add_argument("--depth", type=int, default=2, help="layers of the deep memory")
    parser.add_argument("--expansion", type=int, default=1, help="expansion of the deep memory's hidden layers")
    parser.add_argument("--momentum", action="store_true", help="momentum of the deep memory's update")
    parser.add_argument(
        "--steps", type=int, default=30, help="training steps of the deep memory; with 0, the read gate alone is fitted"
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--stride", type=int, default=4, help="score every so many tokens of a text")
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, to which lines are added")
    args = parser.parse_args(argv)
    if args.memory == "window" and args.wider is None:
        parser.error("--memory window needs --wider")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    measure(args)


if __name__ == "__main__":
    run_command(main)
