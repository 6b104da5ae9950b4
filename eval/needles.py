"""S-NIAH and BABILong by small models (table 2 and figure 6 of the paper): in longer texts than those of training."""

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
from eval.streaming.babilong import read_stories
from titans_hf import TitansConfig
from titans_hf.cli.shared.command_line import run_command

LINES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TOLD = " One of the special magic {}s for {} is: "  # the space is a token of its own, which is no part of an answer
ASKED = " The special magic {} for {} mentioned in the provided text is "
SIZE = dict(vocab_size=4096, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.05)
TITANS = {"memory_form": "delta", "memory_num_heads": 1, "memory_start": "recall"}
OTHERS = {"mamba2": {}, "gated-deltanet": {}, "gated-deltanet-start": {"num_attention_heads": 1}, "mistral": {}}
TRAINED, NEEDLES, TESTED = (256, 256, 512, 1024), 3, (1024, 2048, 4096, 16384)


class Texts:
    """Draws texts with needles: numbers in repeated lines ("pk"), numbers ("n") or two words ("w") in prose. Keys are
    RULER's nouns, as are the words. A fourth of the nouns is of the test, whose numbers are multiples of 11. Or hides
    the facts of a story of bAbI's in prose, in their order ("qa1"); `stories` is the folder of its files.
    """

    def __init__(self, task: str, tokenizer: Any, folder: Path, part: str, seed: int, stories: Path | None = None):
        self.is_test, self.random = part == "test", Random(f"{part} {seed}")
        self.encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
        nouns = sorted(RandomWord().filter(include_categories=["nouns"], regex="[a-z]+"))
        self.nouns = [x for i, x in enumerate(nouns) if (i % 4 == 0) == self.is_test]
        self.kind = "word" if task == "w" else "number"
        self.stories = list(read_stories(stories, task, part)) if task == "qa1" else []
        files = sorted((folder / part).glob("*.txt"))[:8] if task != "pk" else ()
        self.prose = self.encode("".join(x.read_text(encoding="utf-8-sig")[20_000:200_000] for x in files) or LINES)

    def needles(self, most: int) -> tuple[list[list[int]], list[int], list[int]]:
        """Returns ids of 1 to `most` needles, of the questions about them, and labels of these: answers, else -100."""
        told, end, labels = [], [], []
        for key in self.random.sample(self.nouns, self.random.randint(1, most)):
            value = 11 * self.random.randrange(10**5, 9 * 10**5) + (not self.is_test) * self.random.randrange(1, 11)
            if self.kind == "word":
                value = "-".join(self.random.sample(self.nouns, 2))
            question, answer = self.encode(ASKED.format(self.kind, key)), self.encode(f"{value}.")
            told.append(self.encode(TOLD.format(self.kind, key)) + answer)
            end, labels = end + question + answer, labels + [-100] * len(question) + answer
        return self.random.sample(told, len(told)), end, labels

    def story(self) -> tuple[list[list[int]], list[int], list[int]]:
        """Returns ids of a story's facts, in their order, of its question, and labels of this as above."""
        facts, question, answer = self.random.choice(self.stories)
        asked, label = self.encode(f" {question}"), self.encode(f" {answer}.")
        return [self.encode(f" {x}") for x in facts], asked + label, [-100] * len(asked) + label

    def draw(self, length: int, most: int) -> tuple[list[int], list[int]]:
        """Returns ids of a text with its questions, and labels: the answers, else -100."""
        told, end, labels = self.story() if self.stories else self.needles(most)
        room = length - len(end) - sum(map(len, told))
        first = self.random.randrange(max(1, len(self.prose) - room))
        text = (self.prose[first:] + self.prose * (room // len(self.prose) + 1))[:room]
        for place in sorted((self.random.randrange(room + 1) for _ in told), reverse=True):
            text[place:place] = told.pop()
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


def train_and_ask(run: Namespace, tokenizer: Any, folder: Path, stories: Path | None) -> dict[str, Any]:
    """Trains a model by its answers, then finds the share of single needles of which each token is the likeliest."""
    model = AutoModelForCausalLM.from_config(fit_config(run.model.removesuffix("-start"), 1_000_000, run.settings))
    if (titans := run.model in VARIANTS) or run.model.endswith("-start"):
        make_keys_of_three_tokens(model)
    texts = Texts(run.data, tokenizer, folder, "train", run.seed, stories)
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
        texts = Texts(run.data, tokenizer, folder, "test", run.seed, stories)
        if titans:
            model.set_memory_learning(on)
        with torch.inference_mode():
            asked = [answer(model, [texts.draw(length, 1)]) for _ in range(run.questions)]
        found = [((logits.argmax(1) == labels) | (labels == -100)).all().item() for logits, labels in asked]
        result[f"{length}" if on else f"{length}, memory off"] = sum(found) / run.questions
    return {"parameters": model.num_parameters(), "result": result, "test": result[f"{TESTED[-1]}"]}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, [*VARIANTS, *OTHERS], batch_size=2048)
    parser.add_argument("data", choices=("pk", "n", "w", "qa1"), help="a number in lines, in prose; words; BABILong")
    parser.add_argument("--stories", type=Path, default=Path("data/babi/en-10k"), help="bAbI's files, for qa1")
    parser.add_argument("--texts", type=Path, default=Path("data/books"), help="folder of train/ and test/")
    parser.add_argument("--steps", type=int, default=600, help="of --batch_size tokens")
    parser.add_argument("--questions", type=int, default=32, help="at each length")
    args, tokenizer = parser.parse_args(argv), AutoTokenizer.from_pretrained("checkpoints/novels-mag")
    changes = check_options(args, TitansConfig(**TITANS), steps=1, questions=1)
    for model, seed in product(args.models, args.seeds):
        settings = SIZE | OTHERS.get(model, TITANS | changes)
        row = f"{model}-{args.label}" if model in VARIANTS and args.label else model
        run = Namespace(data=args.data, row=row, model=model, settings=settings, seed=seed, learning_rate=4e-3)
        run.batch_size, run.steps, run.questions = args.batch_size, args.steps, args.questions
        make = partial(train_and_ask, run, tokenizer, args.texts, args.stories)
        record_run("needles", f"{run.data}: {row}, seed {seed}", run, make, args.output)


if __name__ == "__main__":
    run_command(main)
