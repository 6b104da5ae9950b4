"""eval/language/caches.py: what a cache gives a token depends on the tokens before it alone."""

import numpy as np
import pytest
import torch

from eval.common.compared_models import build_model, make_config
from eval.language import caches


@pytest.fixture
def model():
    settings = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    settings |= {"sliding_window": 4, "memory_max_lr": 0, "memory_num_heads": 1}
    torch.manual_seed(0)
    return build_model("mag", make_config("mag", 24, settings)).eval()


def test_the_neural_cache_weighs_what_followed(monkeypatch):
    """m of a token is the sum of the softmax of theta h_t h_i over the earlier places that it followed."""
    monkeypatch.setattr(caches, "QUERIES", 3)
    hidden, ids = torch.randn(9, 4), torch.tensor([0, 1, 2, 1, 1, 0, 2, 2, 1, 0])
    m = caches.neural_cache(hidden, ids)
    assert np.isnan(m[0]).all()
    for t, (i, theta) in [(t, x) for t in range(1, 9) for x in enumerate(caches.THETAS)]:
        weights = (theta * hidden[:t] @ hidden[t]).softmax(0)
        assert m[t, i] == pytest.approx(weights[ids[1 : t + 1] == ids[t + 1]].sum().item(), abs=1e-5)


def test_steps_learn_from_words_that_have_been_scored(model):
    """With a rate of 0 the model gives what it gives a text read at once. With a rate, a token is scored before the
    step on it, a repeated text becomes more probable, and the weights are put back.
    """
    ids = torch.randint(40, (51,)).repeat(4)
    plain = caches.read_text(model, ids)[0]
    np.testing.assert_allclose(caches.steps_while_reading(model, ids, 0.0, 16), plain, rtol=1e-4)
    learned = caches.steps_while_reading(model, ids, 0.3, 16)
    np.testing.assert_allclose(learned[:16], plain[:16], rtol=1e-4)
    assert caches.mean_loss(learned[100:]) < caches.mean_loss(plain[100:]) - 0.1
    np.testing.assert_array_equal(caches.read_text(model, ids)[0], plain)


def test_choices_of_mixtures_are_of_the_parts_given():
    """The columns of a mixture are the model, the neural cache with the best theta, and the counts."""
    rng = np.random.default_rng(0)
    parts = rng.uniform(0.01, 0.1, (2, 30, 1 + len(caches.THETAS) + 3))
    parts[..., 3] = 0.9
    mixtures, losses = caches.choose_mixtures(parts)
    assert {name: x for name, (x, _) in mixtures.items()} == {
        "counts": [0, 8, 9, 10],
        "neural": [0, 3],
        "both": [0, 3, 8, 9, 10],
    }
    assert losses["theta 0.08"] < losses["theta 0.04"] < losses["alone"]
