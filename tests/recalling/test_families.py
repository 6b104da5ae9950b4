"""`remember` on models of many families as they are."""

import families
import pytest

from titans_hf import remember

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", families.CHOSEN)
def test_a_family_reads_exactly(family):
    """Pieces, padding, a row alone and recalls of several passages are exact, and a forgotten model is the original."""
    found = families.differences(families.small_model(family))
    assert found["recalling"] > 0.01 and max(found["passages"]) > 1, found
    assert found["forgotten"] == found["generated"] == 0, found
    assert max(found["pieces"], found["padding"], found["row alone"], found["recall"]) < 1e-12, found


@pytest.mark.parametrize("family", families.REFUSED)
def test_a_family_that_cannot_is_an_error(family):
    """A model that ignores the window, or continues no text in pieces, is an error, and is left as it was."""
    model = families.small_model(family)
    with pytest.raises(ValueError, match=type(model).__name__):
        remember(model, 12)
    assert not hasattr(model, "memory")
