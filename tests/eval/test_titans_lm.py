"""The class `titans` of lm-eval: scores and texts of lm-eval's own class; choices share the reading of a context."""

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
    if request.param == "remember":
        return remembering(passages=None, vocab_size=259, eos_token_id=1)
    return make_model(request.param, vocab_size=259, eos_token_id=1, pad_token_id=0)


@pytest.mark.parametrize(("batch_size", "max_length"), [(1, None), (3, 20), (16, None)])
def test_scores_are_those_of_lm_eval(model, batch_size, max_length):
    """Log-likelihoods equal lm-eval's HFLM for any batch size, and with a longest text."""
    lm = make_lm(TitansLM, model, batch_size=batch_size, piece_length=7, max_length=max_length)
    found, expected = loglikelihoods(lm), loglikelihoods(make_lm(HFLM, model, max_length=max_length))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)  # HFLM adds in the dtype of the logits, float64


def test_greedy_continuations_are_marked(model):
    """A continuation counts as greedy only if generate() gives all of it; it is read, and learned, as any text."""
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
    assert sum(columns_read) == len("A question") + 4 * len("? ")


@pytest.mark.parametrize("max_length", [None, 33])
def test_rolling_scores_are_those_of_lm_eval(model, max_length):
    """Rolling log-likelihoods, of the whole document or of windows of `max_length`, equal lm-eval's HFLM."""
    texts = requests("loglikelihood_rolling", [(DOCUMENT * 2,), (DOCUMENT,)])
    expected = make_lm(HFLM, model, max_length=max_length or 200).loglikelihood_rolling(texts, True)
    for batch_size in (1, 4):
        lm = make_lm(TitansLM, model, max_length=max_length, batch_size=batch_size, piece_length=11)
        assert lm.loglikelihood_rolling(texts, True) == pytest.approx(expected, abs=1e-9)


def test_nothing_is_cut(model, columns_read):
    """A change 2,100 tokens back changes the score, and no call reads more than 512 tokens."""
    start, rest = "The key is 7. ", "x" * 2100
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
