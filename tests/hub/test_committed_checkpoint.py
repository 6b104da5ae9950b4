"""checkpoints/: the trained model that the repository keeps for its pages."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from titans_hf import TitansForCausalLM

FOLDER = Path(__file__).parents[2] / "checkpoints" / "novels-mag"
# The first sentences of The Hound of the Baskervilles (1902), one of the novels that the model was not trained on.
TEXT = """Mr. Sherlock Holmes, who was usually very late in the mornings, save upon those not infrequent occasions when
he was up all night, was seated at the breakfast table. I stood upon the hearth-rug and picked up the stick which our
visitor had left behind him the night before."""


def test_it_is_small_and_predicts_english():
    """The folder is small, has a card and no code, loads with every weight in bfloat16, and predicts a novel far better
    than by chance (8.3 nats per token)."""
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 9e6 and (FOLDER / "README.md").exists()
    assert not [x for x in files if x.suffix == ".py"] and "auto_map" not in (FOLDER / "config.json").read_text()
    model, found = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert type(model) is TitansForCausalLM and model.dtype == torch.bfloat16
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert (model.config.memory_form, model.config.memory_update_rule) == ("delta", "delta")
    inputs = tokenizer(TEXT, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[0]) == TEXT and len(tokenizer) == model.config.vocab_size
    with torch.no_grad():
        assert model(**inputs, labels=inputs.input_ids).loss < 5


@torch.no_grad()
def test_it_recalls_what_it_has_read():
    """The same sentences, read again beyond the window, are easier by a nat, by the memory alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    other = torch.randint(2, 4096, (1, 100), generator=torch.Generator().manual_seed(0))
    assert other.shape[1] > model.config.sliding_window
    for learns in (True, False):
        model.set_memory_learning(learns)
        first = model(ids, labels=ids)
        model(other, cache=first.cache)
        gain = first.loss - model(ids, labels=ids, cache=first.cache).loss
        assert gain > 0.7 if learns else gain.abs() < 0.4
