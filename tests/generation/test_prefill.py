"""Prefill in several calls: any `prefill_chunk_size` gives the results of one call."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import VARIANTS, assert_same, assert_same_cache, left_pad, make_ids, shared_model
from covering import covering

GREEDY = dict(do_sample=False, pad_token_id=0)


@covering(1, {"variant": VARIANTS, "size": [1, 3, 5, 8, 12, 13, 100]})
def test_any_piece_size(variant, size):
    """Any prefill_chunk_size gives the tokens, logits and cache of one call, padded and in a second turn too."""
    model, (ids, mask) = shared_model(variant), left_pad([make_ids(40, seed=1), make_ids(11, seed=2)])
    settings = dict(attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, **GREEDY)
    whole = model.generate(ids, **settings)
    pieces = model.generate(ids, prefill_chunk_size=size, **settings)
    for turn in range(2):
        assert torch.equal(pieces.sequences, whole.sequences)
        assert_same(torch.stack(pieces.logits), torch.stack(whole.logits))
        assert_same_cache(pieces.cache, whole.cache)
        if turn == 0:
            transcript = torch.cat([whole.sequences, make_ids(2, 33, seed=3)], 1)
            settings["attention_mask"] = torch.cat([mask, torch.ones(2, 39, dtype=torch.long)], 1)
            whole = model.generate(transcript, cache=whole.cache, **settings)
            pieces = model.generate(transcript, cache=pieces.cache, prefill_chunk_size=size, **settings)


PEAK = """
import resource, sys
import torch
from common import make_ids, make_model

torch.set_num_threads(1)
model = make_model(sys.argv[1], dtype=torch.float32, memory_chunk_size=16, segment_length=32, sliding_window=32)

def peak_after(num_tokens):
    answer = model.generate(make_ids(1, num_tokens), prefill_chunk_size=512, max_new_tokens=2, pad_token_id=0)
    assert answer.shape == (1, num_tokens + 2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

print(peak_after(4096), peak_after(65536))
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_peak_memory_does_not_grow_with_the_prompt(variant):
    """Peak memory grows by less than 16 MiB from 4,096 to 65,536 tokens (ids, mask, positions)."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK, variant], cwd=Path(__file__).parents[1] / "helpers", capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    short, long = map(float, run.stdout.split())
    assert long - short < 16, f"{short} MiB after 4,096 tokens, {long} MiB after 65,536"
