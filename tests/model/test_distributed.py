"""Distribution through Accelerate and Transformers equals one process. Ranks are processes on CPU (gloo). Saving, and
generation by tensor parallelism, are tested by Transformers' own tests (tests/conformance)."""

import multiprocessing
import warnings

import distributed_worker
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from common import TWO_VARIANTS, assert_same, full_logits, left_pad, make_ids, make_model, read
from torch.multiprocessing import ProcessExitedException
from transformers import AutoModelForCausalLM

from titans_hf import TitansCache
from titans_hf.memory_state import tensors_of

# The ranks' packages are imported once, in the process that forks for each rank.
multiprocessing.set_forkserver_preload(["accelerate", "transformers.generation", "titans_hf.modeling_titans"])
CHECKS = {
    "ddp": "a parameter has a wrong gradient on several devices, or none, at which DDP stops",
    "fsdp": "parameters are looked at outside of the layer that gathers them",
    "fsdp_over_calls": "a state that is carried over keeps parameters that are gathered no more",
    "fsdp_accelerate": "Accelerate cuts a layer in two, or the second forward pass of one finds its parameters sharded",
    "fsdp_bfloat16": "a layer with parameters of two dtypes cannot be sharded",
    "tensor_parallel": "a rank has the wrong heads or half of one, or a gradient is that of its own heads only",
}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_equal_one_process(check, tmp_path):
    """Two ranks give what one process gives. Ranks ended by a signal start again once: glibc's heap, 1 in 100."""
    for attempt in (1, 2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        try:
            ranks = (distributed_worker.run, (check, str(folder)), distributed_worker.WORLD_SIZE)
            torch.multiprocessing.start_processes(*ranks, start_method="forkserver")
            return
        except ProcessExitedException as error:
            if error.signal_name is None or attempt == 2:
                raise
            warnings.warn(f"{check}: {error}", stacklevel=1)


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_automatic_placement_with_offloading(variant, tmp_path):
    """A model of which two layers are offloaded gives the same logits and tokens."""
    model = make_model(variant, num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    (ids, mask), whole = left_pad([make_ids(40), make_ids(23, seed=1)]), make_ids(2, 40)
    layer = sum(p.numel() * 8 for p in model.model.layers[0].parameters())
    given = dict(device_map="auto", max_memory={"cpu": int(2.7 * layer)}, offload_folder=tmp_path / "offloaded")
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **given)
    layers = {name: device for name, device in placed.hf_device_map.items() if "layers" in name}
    assert layers == {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    assert_same(full_logits(placed, ids, mask), full_logits(model, ids, mask))
    assert_same(read(placed, whole, [13, *[1] * 10, 17])[0], full_logits(model, whole))
    options = dict(attention_mask=mask, max_new_tokens=15, do_sample=False, pad_token_id=0)
    assert torch.equal(placed.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_a_cache_stays_with_its_layer(variant):
    """Each layer's states stay on its device ("meta" as the second)."""
    model = make_model(variant)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "meta", "model.norm": "meta"}
    skip = model._skip_keys_device_placement
    dispatch_model(model, places | {"lm_head": "meta"}, main_device="cpu", force_hooks=True, skip_keys=skip)
    remove_hook_from_module(model)  # it would take the logits to the first device, which "meta" cannot
    (ids, mask), cache = left_pad([make_ids(40), make_ids(23, seed=1)]), TitansCache(model.config)
    masks = (mask, None, torch.ones(2, 9), torch.tensor([[1] * 5, [0, 1, 1, 0, 1]]))
    for call, call_mask in zip((ids, ids[:, :1], ids[:, :9], ids[:, :5]), masks, strict=True):
        with torch.no_grad():
            logits = model(call, attention_mask=call_mask, cache=cache).logits
        assert logits.device.type == "meta"
        for layer, device in zip(cache.layers, ("cpu", "meta"), strict=True):
            assert {x.device.type for x in tensors_of(layer.state)} == {device}
