"""Checks of tests/hub/test_remote_code.py where titans_hf is not installed. Each gets a folder with `<variant>`,
`heads-<class>` and `<variant>.pt` (the package's own outputs).
"""

import importlib.util
import json
import shutil
import sys
import traceback
from pathlib import Path

import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

VARIANTS = ("mac", "mag", "mal", "lmm")
TRUST = dict(trust_remote_code=True)


def assert_same_code(actual: Path, expected: Path) -> None:
    for file in expected.glob("*.py"):
        assert (actual / file.name).read_bytes() == file.read_bytes(), file.name
    maps = [json.loads((path / "config.json").read_text())["auto_map"] for path in (actual, expected)]
    assert maps[0] == maps[1], maps


def same_bits(folder: Path) -> None:
    for variant in VARIANTS:
        model = AutoModelForCausalLM.from_pretrained(folder / variant, **TRUST)
        expected = torch.load(folder / f"{variant}.pt")
        with torch.no_grad():
            assert torch.equal(model(expected["ids"]).logits, expected["logits"]), variant
            body = AutoModel.from_pretrained(folder / variant, **TRUST)
            assert torch.equal(body(expected["ids"]).last_hidden_state, expected["hidden"]), variant


def same_tokens(folder: Path) -> None:
    for variant in VARIANTS:
        model = AutoModelForCausalLM.from_pretrained(folder / variant, **TRUST)
        expected = torch.load(folder / f"{variant}.pt")
        first = model.generate(
            expected["ids"], do_sample=False, max_new_tokens=25, pad_token_id=0, return_dict_in_generate=True
        )
        assert torch.equal(first.sequences, expected["first"]), variant
        read_on = dict(do_sample=False, max_new_tokens=9, pad_token_id=0, cache=first.cache)
        assert torch.equal(model.generate(first.sequences, **read_on), expected["more"]), variant


def memory_files(folder: Path) -> None:
    """A memory is kept and read again by the classes of the model's own code."""
    expected = torch.load(folder / "mag.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / "mag", **TRUST)
    cache = model.cache_class(model.config)
    with torch.no_grad():
        model(expected["ids"][:, :-1], cache=cache)
        cache.save_pretrained(folder / "memory", model)
        cache = model.cache_class.from_pretrained(folder / "memory", model)
        logits = model(expected["ids"][:, -1:], cache=cache).logits
    torch.testing.assert_close(logits, expected["logits"][:, -1:])


def from_the_hub(folder: Path) -> None:
    """A checkpoint in the Hub's cache, in a folder named by its commit, loads and saves with its code."""
    for variant in VARIANTS:
        cached, commit = Path(HF_HUB_CACHE) / f"models--someone--{variant}", 40 * "a"
        shutil.copytree(folder / variant, cached / "snapshots" / commit)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(commit)
        model = AutoModelForCausalLM.from_pretrained(f"someone/{variant}", **TRUST)
        expected = torch.load(folder / f"{variant}.pt")
        with torch.no_grad():
            assert torch.equal(model(expected["ids"]).logits, expected["logits"]), variant
        model.save_pretrained(folder / f"hub-{variant}")
        assert_same_code(folder / f"hub-{variant}", folder / variant)


def trainer_step(folder: Path) -> None:
    """The checkpoint of a training step loads without the package."""
    model = AutoModelForCausalLM.from_pretrained(folder / "mag", **TRUST)
    rows = [{"input_ids": row, "labels": row} for row in torch.load(folder / "mag.pt")["ids"]]
    args = TrainingArguments(folder / "trained", max_steps=1, save_steps=1, report_to="none", use_cpu=True)
    Trainer(model, args, train_dataset=rows).train()
    trained = AutoModelForCausalLM.from_pretrained(folder / "trained" / "checkpoint-1", **TRUST)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert not torch.equal(trained.lm_head.weight, torch.load(folder / "mag.pt")["lm_head"])


def text_pipeline(folder: Path) -> None:
    generate = transformers.pipeline("text-generation", model=str(folder / "mac"), device="cpu", **TRUST)
    text = generate("It was", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    tokenizer, model = AutoTokenizer.from_pretrained(folder / "mac", **TRUST), generate.model
    prompt = tokenizer("It was", return_tensors="pt")
    assert text == tokenizer.decode(model.generate(**prompt, max_new_tokens=5, do_sample=False)[0])


def lm_eval(folder: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=str(folder / "lmm"), device="cpu", batch_size=2, **TRUST)
    requests = [Instance("loglikelihood", {}, ("It was a", end), 0) for end in (" dark", " bright night")]
    for request, (score, _) in zip(requests, harness.loglikelihood(requests, disable_tqdm=True), strict=True):
        whole = harness.tok_encode("".join(request.args))
        logits = harness.model(torch.tensor([whole])).logits[0].log_softmax(-1)
        start = len(harness.tok_encode(request.args[0]))
        expected = sum(logits[i - 1, whole[i]] for i in range(start, len(whole)))
        assert abs(score - expected) < 1e-3, (score, expected)


def heads(folder: Path) -> None:
    """Saved heads, and new ones on a language model, load as their classes with the same outputs."""
    ids = torch.load(folder / "mag.pt")["ids"]
    for name in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
        auto_class = getattr(transformers, f"AutoModelFor{name}")
        expected = torch.load(folder / f"heads-{name}.pt")
        with torch.no_grad():
            output = auto_class.from_pretrained(folder / f"heads-{name}", **TRUST)(ids[:1])
        assert torch.equal(output[0], expected), name
        assert type(auto_class.from_pretrained(folder / "mag", **TRUST)).__name__ == f"TitansFor{name}"


def saved_again(folder: Path) -> None:
    """Saving a loaded model, body or config keeps its code."""
    model = AutoModelForCausalLM.from_pretrained(folder / "mag", **TRUST)
    AutoConfig.from_pretrained(folder / "config", **TRUST).save_pretrained(folder / "config again")
    config = AutoConfig.from_pretrained(folder / "config again", **TRUST)
    made = AutoModelForCausalLM.from_config(config, **TRUST)
    made.load_state_dict(model.state_dict())
    for i, source in enumerate((model, made, model.model)):
        again = folder / f"again-{i}"
        source.save_pretrained(again)
        assert_same_code(again, folder / "mag")
        loaded, expected = AutoModel.from_pretrained(again, **TRUST), torch.load(folder / "mag.pt")
        with torch.no_grad():
            assert torch.equal(loaded(expected["ids"]).last_hidden_state, expected["hidden"]), i


def has_to_be_trusted(folder: Path) -> None:
    try:
        AutoModelForCausalLM.from_pretrained(folder / "mag", trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code=True" in str(error), error
    else:
        raise AssertionError("code that nobody trusts was run")


CHECKS = (
    same_bits,
    same_tokens,
    memory_files,
    from_the_hub,
    trainer_step,
    text_pipeline,
    lm_eval,
    heads,
    saved_again,
    has_to_be_trusted,
)


def main(folder: Path) -> None:
    """Writes to `results.json` the traceback of each check, "" where it passed."""
    assert importlib.util.find_spec("titans_hf") is None
    torch.set_num_threads(1)
    results = {}
    for check in CHECKS:
        results[check.__name__] = ""
        try:
            check(folder)
        except Exception:
            results[check.__name__] = traceback.format_exc()
    assert "titans_hf" not in sys.modules
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
