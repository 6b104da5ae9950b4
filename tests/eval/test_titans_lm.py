"""The class `titans` of lm-eval: each type of request is what `model(...)` and `generate()` say."""

import pytest
import torch
from common import make_model
from datasets.exceptions import DatasetGenerationError
from remember_models import remembering

import titans_hf_console
from titans_hf.cli.training.tokenizer import byte_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from titans_hf.cli.titans_lm import TitansLM  # noqa: E402

DOCUMENT = "It was the best of times, it was the worst of times. "
PAIRS = [
    (DOCUMENT + "What was it?", " the best"),
    (DOCUMENT + "What was it?", " the worst of times"),
    (DOCUMENT + "When?", " then"),
    (DOCUMENT + DOCUMENT + "Once more?", " yes"),
    (DOCUMENT[:40], "!"),
    (DOCUMENT[:40], "?"),
    ("", "No context."),
    ("a", "b"),
    ("Trailing space ", "moves"),
]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def loglikelihoods(lm: HFLM, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[float, bool]]:
    return lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def generated(lm: HFLM, prompts: list[str], **kwargs) -> list[str]:
    return lm.generate_until(requests("generate_until", [(prompt, kwargs) for prompt in prompts]), disable_tqdm=True)


def make_lm(lm_class: type[HFLM], model: torch.nn.Module, **kwargs) -> HFLM:
    return lm_class(pretrained=model, tokenizer=byte_tokenizer(), **kwargs)


@pytest.fixture(scope="module", params=["mac", "mag", "remember"])
def model(request):
    if request.param == "remember":  # a recall after every 6 tokens of an answer
        return remembering(vocab_size=259, eos_token_id=1)
    return make_model(request.param, vocab_size=259, eos_token_id=1, pad_token_id=0)


def score_by_generate(model, context: list[int], answer: list[int]) -> tuple[float, bool]:
    """The log-probability of an answer, whose tokens generate() is made to choose, and whether it would choose them."""
    forced = lambda row, ids: [answer[len(ids) - len(context)]]  # noqa: E731
    options = {"max_new_tokens": len(answer), "do_sample": False, "output_logits": True}
    found = model.generate(
        torch.tensor([context]), prefix_allowed_tokens_fn=forced, return_dict_in_generate=True, **options
    )
    logits = torch.cat(found.logits).double()
    score = logits.log_softmax(-1)[torch.arange(len(answer)), answer].sum().item()
    return score, logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize(("batch_size", "max_length"), [(1, None), (3, 20), (16, None)])
def test_scores_are_those_of_generate(model, batch_size, max_length):
    """Log-likelihoods equal generate()'s for any batch size, and with a longest text."""
    lm = make_lm(TitansLM, model, batch_size=batch_size, piece_length=7, max_length=max_length)
    pairs = [lm._encode_pair(*x) if x[0] else ([lm.prefix_token_id], lm.tok_encode(x[1])) for x in PAIRS]
    cut = [(x[-max(1, max_length + 1 - len(y)) :], y) if max_length else (x, y) for x, y in pairs]
    expected = [score_by_generate(model, *x) for x in cut]
    torch.testing.assert_close(loglikelihoods(lm), expected, rtol=0, atol=1e-6)  # generate() returns float32


def test_greedy_continuations_are_marked(model):
    """A continuation counts as greedy only if generate() gives all of it."""
    prompt = byte_tokenizer().encode(DOCUMENT)
    ids = torch.tensor([prompt])
    continuation = model.generate(ids, max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()
    texts = (continuation, continuation[:1], [*continuation[:9], continuation[9] ^ 1])
    lm = make_lm(TitansLM, model, batch_size=3, piece_length=4)
    scored = lm._loglikelihood_tokens([(None, prompt, x) for x in texts], True)
    assert [greedy for _, greedy in scored] == [True, True, False]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_are_those_of_lm_eval(model, batch_size):
    """Generated texts equal lm-eval's HFLM for any batch size."""
    prompts = [DOCUMENT + "What was it?", DOCUMENT + "When was it?", "Short", DOCUMENT[:40], DOCUMENT + "What was it?"]
    expected = generated(make_lm(HFLM, model), prompts, max_gen_toks=9, until=["e"])
    lm = make_lm(TitansLM, model, batch_size=batch_size, piece_length=7)
    assert generated(lm, prompts, max_gen_toks=9, until=["e"]) == expected
    assert generated(lm, prompts[:1], max_gen_toks=2) == generated(make_lm(HFLM, model), prompts[:1], max_gen_toks=2)


@pytest.fixture
def columns_read(model):
    """The number of tokens of each call, padding left out."""
    found = []
    note = lambda module, args, given: found.append(given["attention_mask"].sum().item())  # noqa: E731
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield found
    hook.remove()


def test_choices_share_their_context(model, columns_read):
    """Choices of one question read its context once."""
    loglikelihoods(make_lm(TitansLM, model, batch_size=8), [("A question?", f" {choice}") for choice in "abcd"])
    assert sum(columns_read) == len("A question?") + 4 * len(" ")


@pytest.mark.parametrize("max_length", [None, 33])
def test_rolling_scores_are_the_loss_of_the_text(model, max_length):
    """Rolling log-likelihoods are the model's own loss of the text after the prefix token, read as one stream. With
    `max_length` they equal HFLM's, by windows.
    """
    texts = requests("loglikelihood_rolling", [(DOCUMENT * 2,), (DOCUMENT,)])
    if max_length:
        expected = make_lm(HFLM, model, max_length=max_length).loglikelihood_rolling(texts, True)
    else:
        ids = [torch.tensor([[1, *byte_tokenizer().encode(x.args[0])]]) for x in texts]
        expected = [-model(x, labels=x).loss.item() * (x.shape[1] - 1) for x in ids]
    for batch_size in (1, 4):
        lm = make_lm(TitansLM, model, max_length=max_length, batch_size=batch_size, piece_length=11)
        assert lm.loglikelihood_rolling(texts, True) == pytest.approx(expected, rel=1e-6)


def test_nothing_is_cut(model, columns_read):
    """A change 2,100 tokens back changes the score, and no call reads more than 512 tokens."""
    start, rest = "The key is 7. ", "x" * 2100 + "The key is"
    lm = make_lm(TitansLM, model)
    changed = loglikelihoods(lm, [(start + rest, " 7"), (start.replace("7", "8") + rest, " 7")])
    assert changed[0][0] != changed[1][0] and max(columns_read) == 512
    assert lm.max_length > 10**9


def test_bad_arguments():
    """A batch size that is no number raises an error that names it."""
    with pytest.raises(ValueError, match="`batch_size` must be a number"):
        make_lm(TitansLM, make_model("mag"), batch_size="auto")


def test_a_task_without_rows_is_one_line(monkeypatch, capsys):
    """A task's data file that holds no rows ends in one line of lm-eval's own command."""

    def without_rows():
        raise DatasetGenerationError("An error occurred") from ValueError("no rows")

    monkeypatch.setattr("titans_hf.cli.lm_eval_command.cli_evaluate", without_rows)
    monkeypatch.setattr("sys.argv", ["titans-hf", "lm-eval", "run"])
    with pytest.raises(SystemExit):
        titans_hf_console.main()
    assert capsys.readouterr().err.endswith("error: the data of a task cannot be read: no rows\n")
