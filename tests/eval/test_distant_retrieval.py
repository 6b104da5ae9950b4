"""eval/language/distant_retrieval.py: what is retrieved is what was stored, and only from far enough away."""

import json

import pytest
import torch
from torch.nn.functional import normalize
from transformers import LlamaConfig, LlamaForCausalLM

from eval.language import distant_retrieval
from eval.language.distant_retrieval import Predictions, compare, make_features, pointer_losses, retrieve

VOCAB = 50


def test_the_delta_rule_replaces_what_a_key_had():
    """Repeated writes under one key approach the last value, and other keys keep theirs."""
    keys, values = torch.zeros(1, 30, 4), torch.randn(1, 30, 3, generator=torch.Generator().manual_seed(0))
    keys[0, 0, 1] = 1
    keys[0, 1:, 2] = 1
    values[0, 1:] = values[0, 1]
    keys[0, -1] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    retrieved = retrieve(keys, values, start=28, distance=1)
    torch.testing.assert_close(retrieved[0, 0], values[0, 1], atol=1e-5, rtol=0)
    torch.testing.assert_close(retrieved[0, 1], 0.5 * values[0, 0], atol=1e-5, rtol=0)  # half of the way, by one write


@pytest.mark.parametrize("method", ["pointer", "linear", "relu-512"])
def test_nothing_near_is_retrieved(method):
    """Changing what follows the last `distance` tokens changes no earlier loss."""
    generator = torch.Generator().manual_seed(0)
    hidden, logits = torch.randn(1, 12, 8, generator=generator), torch.randn(1, 12, VOCAB, generator=generator)
    following = torch.arange(12)[None]
    changed = following.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % VOCAB

    def losses(tokens):
        """Losses of token 8 alone, which may see tokens up to 4."""
        x = Predictions(hidden[:, :9], logits[:, :9], torch.cat([tokens[:, :8], following[:, 8:9]], 1))
        if method == "pointer":
            return dict(pointer_losses(x, 8, 3))
        weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1))
        return dict(distant_retrieval.memory_losses(method, x, weight, torch.zeros(8), 8, 3))

    before, after = losses(following), losses(changed)
    assert all(torch.equal(before[name], after[name]) for name in before)
    changed[0, 4] = following[0, 8]  # what token 8 is asked for
    assert any(not torch.equal(before[name], x) for name, x in losses(changed).items())


def test_features_have_length_1():
    """Keys have length 1."""
    keys = make_features("relu-256", torch.randn(2, 3, 16), torch.zeros(16))
    torch.testing.assert_close(keys, normalize(keys, dim=-1))
    assert keys.shape == (2, 3, 256) and (keys == 0).float().mean() > 0.5


def test_repeated_text_is_worth_retrieving():
    """On a text that repeats itself, every method lowers the loss of a model with random weights."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.3, tie_word_embeddings=True, **sizes))
    stretches = torch.randint(VOCAB, (2, 40)).repeat(1, 4)
    table = compare(model, stretches, stretches, ["pointer", "linear", "relu-256"], distance=8)
    assert all(row["score"] < -0.1 for row in table.values()), json.dumps(table)


@pytest.mark.parametrize(
    "options,error",
    [
        (["--methods", "cosine"], "--methods must be of pointer, linear, relu-N, but has cosine"),
        (["--length", "128"], "--distance must be from 0 to less than half of --length 128, but is 64"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, tmp_path):
    """An unknown method, or stretches without a distant token, are refused before any work."""
    folders = [x for name in ("train_text", "choice_text", "score_text") for x in (f"--{name}", str(tmp_path))]
    with pytest.raises(ValueError, match=error):
        distant_retrieval.main(["model", *folders, "--output", str(tmp_path / "x.json"), *options])
