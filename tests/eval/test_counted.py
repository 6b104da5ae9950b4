"""eval/language/counted.py: the counted models are probabilities, and the cache counts what the text has read."""

import numpy as np
import pytest

from eval.language import counted


def test_kneser_ney_is_a_probability():
    """After any history, seen or not, the probabilities of all words sum to 1, and the word seen there is likeliest."""
    words, rng = 5, np.random.default_rng(0)
    model = counted.KneserNey(rng.integers(0, words, size=(30, 20)), words)
    for history in ([], [1], [1, 2], [1, 2, 3], [4, 4, 4, 4]):
        texts = np.array([[*history, 0, word] for word in range(words)])
        assert model.probabilities(texts)[:, -1].sum() == pytest.approx(1)
    pairs = counted.KneserNey(np.array([[0, 1, 2, 3] * 20 + [0, 2, 4, 1, 3]]), words)
    after = [pairs.probabilities(np.array([[0, 1, 2, word]]))[0, -1] for word in range(words)]
    assert np.argmax(after) == 3


def test_the_cache_counts_what_came_before():
    """The share of a word among what followed its 0, 1 and 2 last words so far; nan where these are new."""
    expected = [[0, np.nan, np.nan], [1 / 2, np.nan, np.nan], [1 / 3, 1, np.nan], [2 / 4, 1, 1], [0, 0, 0]]
    np.testing.assert_allclose(counted.cache_probabilities(np.array([7, 8, 7, 8, 7, 9])), expected)


def test_shares_go_to_the_better_model():
    """The mixture's shares sum to 1 for each number of contexts, and the model that predicts better has most."""
    parts = np.array([[0.1, 0.9, np.nan, np.nan]] * 3 + [[0.6, 0.1, 0.1, 0.2]] * 3)
    shares = counted.Shares(parts)
    assert [shares.shares[2].argmax(), shares.shares[4].argmax()] == [1, 0]
    assert all(share.sum() == pytest.approx(1) for share in shares.shares.values())
    assert (shares.mix(parts) > [0.85] * 3 + [0.55] * 3).all()
