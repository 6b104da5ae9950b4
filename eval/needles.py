"""S-NIAH by small models (table 2 of the paper): a needle in longer texts than those of training."""

from argparse import Namespace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from wonderwords import RandomWord

from eval.common.compared_models import VARIANTS, fit_config
from eval.common.harness import check_options, make_parser, record_run
from titans_hf import TitansConfig
from titans_hf.cli.shared.command_line import run_command

LINES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TOLD = " One of the special magic {}s for {} is: "  # the space is a token of its own, which is no part of an answer
ASKED = " The special magic {} for {} mentioned in the provided text is "
SIZE = dict(vocab_size=4096, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.05)
TITANS = {"memory_form": "delta", "memory_num_heads": 1, "memory_start": "recall"}
OTHERS = ("mamba2", "gated-deltanet", "gated-deltanet-start", "mistral")
TRAINED, NEEDLES, TESTED = (256, 256, 512, 1024), 3, (1024, 2048, 4096, 16384)


class Texts:
    """Draws texts with needles: numbers in repeated lines ("pk"), numbers ("n") or two words ("w") in prose. Keys are
    RULER's nouns, as are the words. A fourth of the nouns is of the test, whose numbers are multiples of 11.
    """

    def __init__(self, task: str, tokenizer: Any, folder: Path, part: str, seed: int):
        self.is_test, self.random = part == "test", Random(f"{part} {seed}")
        self.encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
        nouns = sorted(RandomWord().filter(include_categories=["nouns"], regex="[a-z]+"))
        self.nouns = [x for i, x in enumerate(nouns) if (i % 4 == 0) == self.is_test]
        self.kind = "word" if task == "w" else "number"
        files = sorted((folder / part).glob("*.txt"))[:8] if task != "pk" else ()
        self.prose = self.encode("".join(x.read_text(encoding="utf-8-sig")[20_000:200_000] for x in files) or LINES)

    def draw(self, length: int, most: int) -> tuple[list[int], list[int]]:
        """Returns ids of a text and questions about its needles, 1 to `most`, and labels: the answers, else -100."""
        needles, told, end, labels = self.random.randint(1, most), [], [], []
        for key in self.random.sample(self.nouns, needles):
            value = 11 * self.random.randrange(10**5, 9 * 10**5) + (not self.is_test) * self.random.randrange(1, 11)
            if self.kind == "word":
                value = "-".join(self.random.sample(self.nouns, 2))
            question, answer = self.encode(ASKED.format(self.kind, key)), self.encode(f"{value}.")
            told.append(self.encode(TOLD.format(self.kind, key)) + answer)
            end, labels = end + question + answer, labels + [-100] * len(question) + answer
        room = length - len(end) - sum(map(len, told))
        first = self.random.randrange(max(1, len(self.prose) - room))
        text = (self.prose[first:] + self.prose * (room // len(self.prose) + 1))[:room]
        places = sorted((self.random.randrange(room + 1) for _ in told), reverse=True)
        for place, needle in zip(places, self.random.sample(told, needles), strict=True):
            text[place:place] = needle
        return text + end, [-100] * len(text) + labels


def answer(model: PreTrainedModel, drawn: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits from the first answer on, (rows, vocabulary, tokens), and their labels, (rows, tokens)."""
    ids, labels = (torch.tensor(x) for x in zip(*drawn, strict=True))
    last = ids.shape[1] - (labels != -100).any(0).nonzero()[0].item()
    return model(ids, use_cache=False, logits_to_keep=last + 1).logits[:, :-1].mT, labels[:, -last:]


def make_keys_of_three_tokens(model: PreTrainedModel) -> None:
    """Starts q's filters as a token and the two before it, k's as these a token later: equal digits then differ. Gated
    DeltaNet also gets the rest of Titans' start: W_q = W_k, W_o = 3 W_v^T, slow forgetting, values of one token.
    """
    for layer in model.model.layers:
        if hasattr(layer, "mixer"):
            q, k = layer.mixer.memory.q_conv.weight.data, layer.mixer.memory.k_conv.weight.data
        else:
            net = layer.linear_attn
            q, k, v = net.conv1d.weight.data.chunk(3)
            weights = net.in_proj_qkvz.weight.data.unflatten(0, (net.num_k_heads, 4, -1))
            weights[:, 1] = weights[:, 0]
            net.out_proj.weight.data = 3 * weights[:, 2].flatten(0, 1).T
            net.A_log.data.zero_(), net.dt_bias.data.fill_(-7), v.zero_()[..., -1].fill_(1)
        taps = torch.tensor([0.37, 0.53, 0.76]) * torch.randn(len(q), 1, 3).sign()
        q.copy_(pad(taps, (1, 0))), k.copy_(pad(taps, (0, 1)))


def train_and_ask(run: Namespace, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Trains a model by its answers, then finds the share of single needles of which each token is the likeliest."""
    model = AutoModelForCausalLM.from_config(fit_config(run.model.removesuffix("-start"), 1_000_000, run.settings))
    if (titans := run.model in VARIANTS) or run.model.endswith("-start"):
        make_keys_of_three_tokens(model)
    texts = Texts(run.data, tokenizer, folder, "train", run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), run.learning_rate, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, run.learning_rate, run.steps, pct_start=0.1)
    for step in range(run.steps):
        length = TRAINED[0] if step < 0.3 * run.steps else texts.random.choice(TRAINED)
        rows = [texts.draw(length, NEEDLES) for _ in range(max(1, run.batch_size // length))]
        cross_entropy(*answer(model.train(), rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    result, model = {}, model.eval()
    for length, on in [*((x, True) for x in TESTED), (TESTED[0], False)][: None if titans else -1]:
        texts = Texts(run.data, tokenizer, folder, "test", run.seed)
        if titans:
            model.set_memory_learning(on)
        with torch.inference_mode():
            asked = [answer(model, [texts.draw(length, 1)]) for _ in range(run.questions)]
        found = [((logits.argmax(1) == labels) | (labels == -100)).all().item() for logits, labels in asked]
        result[f"{length}" if on else f"{length}, memory off"] = sum(found) / run.questions
    return {"parameters": model.num_parameters(), "result": result, "test": result[f"{TESTED[-1]}"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, [*VARIANTS, *OTHERS], batch_size=2048)
    parser.add_argument("data", choices=("pk", "n", "w"), help="a number in repeated lines or in prose, or two words")
    parser.add_argument("--texts", type=Path, default=Path("data/books"), help="folder of train/ and test/")
    parser.add_argument("--steps", type=int, default=600, help="of --batch_size tokens")
    parser.add_argument("--questions", type=int, default=32, help="at each length")
    args, tokenizer = parser.parse_args(argv), AutoTokenizer.from_pretrained("checkpoints/novels-mag")
    changes = check_options(args, TitansConfig(**TITANS), steps=1, questions=1)
    for model, seed in product(args.models, args.seeds):
        own = {"num_attention_heads": 1} if model == "gated-deltanet-start" else {}
        settings = SIZE | (TITANS | changes if model in VARIANTS else own)
        row = f"{model}-{args.label}" if model in VARIANTS and args.label else model
        run = Namespace(data=args.data, row=row, model=model, settings=settings, seed=seed, learning_rate=4e-3)
        run.batch_size, run.steps, run.questions = args.batch_size, args.steps, args.questions
        make = partial(train_and_ask, run, tokenizer, args.texts)
        record_run("needles", f"{run.data}: {row}, seed {seed}", run, make, args.output)


if __name__ == "__main__":
    run_command(main)
