"""`remember` on models that other libraries have changed: PEFT, accelerate, quantisers."""

import copy
from types import SimpleNamespace

import pytest
import remember_models
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, get_peft_model
from remember_models import close, remembering, small_model
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Phi3Config, TorchAoConfig

import titans_hf
from titans_hf import MemoryCache, Passages, forget, remember
from titans_hf.recalling.files import memory_fingerprint
from titans_hf.recalling.recall import recall as recall_rows

TOKENS = remember_models.TOKENS[:2, :60]


@torch.no_grad()
def whole_and_pieces(model, ids=TOKENS):
    """Returns the logits of a text read whole, and in pieces."""
    cache = MemoryCache(model)
    pieces = torch.cat([model(input_ids=x, cache=cache).logits for x in ids.split([9, 1, 20, 30], 1)], 1)
    return model(input_ids=ids).logits, pieces


@torch.no_grad()
def test_a_memory_for_a_block():
    """Inside of the block the model remembers, with the arguments of `remember`; an error ends the memory too."""
    model = small_model()
    before, expected = model(TOKENS).logits, remembering()(TOKENS).logits
    with pytest.raises(KeyError), titans_hf.remembering(model, 12) as same:
        assert same is model and model(TOKENS).logits.equal(expected)
        raise KeyError
    assert not hasattr(model, "memory") and model(TOKENS).logits.equal(before)


def adapted(model):
    torch.manual_seed(2)
    kinds = ["v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=kinds, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def test_peft():
    """An adapter before `remember` is one after it; both can go."""
    before = small_model()(TOKENS).logits
    first = remember(adapted(small_model()), 12)
    whole, pieces = whole_and_pieces(first)
    close(pieces, whole)
    for logits in whole_and_pieces(adapted(remembering())):
        close(logits, whole)
    with first.disable_adapter():
        close(whole_and_pieces(first)[0], whole_and_pieces(remembering())[0])
    assert_close(whole_and_pieces(first.merge_and_unload())[0], whole, atol=1e-10, rtol=0)
    assert adapted(small_model()).unload()(TOKENS).logits.equal(before)


def test_training_an_adapter():
    """An adapter of PEFT is trained behind a window."""
    model = adapted(remembering()).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("order", ["remember first", "offload first"])
@pytest.mark.parametrize("tied", [False, True])
def test_offloaded_weights(order, tied, tmp_path):
    """A model whose weights accelerate keeps elsewhere reads, recalls and saves as one that has them."""
    plain = remembering(tie_word_embeddings=tied)
    expected = whole_and_pieces(plain)[0]
    for offload in (lambda x: cpu_offload(x, "cpu"), lambda x: disk_offload(x, tmp_path, "cpu")):
        model = small_model(tie_word_embeddings=tied)
        model = remember(offload(model), 12) if order == "offload first" else offload(remember(model, 12))
        for logits in whole_and_pieces(model):
            close(logits, expected)
        assert memory_fingerprint(model) == memory_fingerprint(plain)
        model.generate(TOKENS, max_new_tokens=3)


def test_a_tied_head_names_and_files(tmp_path):
    """Class, configuration and parameters of a model with a tied head stay, and so does what it saves."""
    model = small_model(tie_word_embeddings=True)
    names, config = [name for name, _ in model.named_parameters()], model.config.to_dict()
    remember(model, 12)
    close(*whole_and_pieces(model))
    assert [name for name, _ in model.named_parameters()] == names
    assert model.config.to_dict() == config and type(model).__name__ == "LlamaForCausalLM"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded(TOKENS).logits.equal(forget(model)(TOKENS).logits)


def test_quantised_weights(tmp_path):
    """Weights of 8 bits are read; what changes them when their `state_dict()` is made is not changed by a memory."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    small_model(hidden_size=64, intermediate_size=64).float().save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    remember(model, 12)
    whole, pieces = whole_and_pieces(model)
    assert_close(pieces, whole, atol=1e-3, rtol=1e-3)
    for module in model.modules():
        module.state_dict = None  # a call is an error
    cache = MemoryCache(model)
    model(TOKENS, cache=cache)
    cache.save_pretrained(tmp_path / "memory", model)
    assert MemoryCache.from_pretrained(tmp_path / "memory", model).seen.tolist() == [60, 60]


def test_a_quantisation_that_reads_otherwise_in_pieces_is_named():
    """Where outputs depend on what else is in a call, the refusal says that the quantisation is why."""
    model = small_model().float()
    model.config.quantization_config = SimpleNamespace(quant_method="bitsandbytes")
    layer, own = model.model.layers[0].mlp, model.model.layers[0].mlp.forward
    layer.forward = lambda x: own(x) * x.abs().amax()
    with pytest.raises(ValueError, match=r"differ if a text is read in pieces.*quantised \(bitsandbytes\)"):
        remember(model, 12)


def test_defaults():
    """By default a memory has passages and a window of 1,024."""
    memory = remember(small_model()).memory
    assert memory.window == 1024 and memory.passages == Passages()


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1}, "none of whose layers has full attention"),
        ("mistral", {"sliding_window": 9}, "`from_pretrained\\(..., sliding_window=None\\)` may give them it"),
        ("titans", {}, "which has a memory of its own: read with a `TitansCache`"),
    ],
)
def test_who_gets_no_memory_is_told(family, fields, message):
    """A model that could see no passage is an error that says why and what would work, and is left as it was."""
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {} if family == "mamba2" else {"num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | heads | fields))
    with pytest.raises(ValueError, match=message):
        remember(model)
    assert not hasattr(model, "memory")


def scaled_model(kind: str):
    """A model whose rotary frequencies are others beyond 64 tokens: a Phi-3, or a Llama with "dynamic"."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": None, "attention_dropout": 0.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "dynamic":
        config = LlamaConfig(**sizes, max_position_embeddings=64, rope_parameters=rope)
    else:
        rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 64}
        own = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "sliding_window": None}
        config = Phi3Config(**sizes, **own, rope_parameters=rope if kind == "longrope" else None)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.add_(0.15 * torch.randn_like(p))
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_rotary_frequencies_that_depend_on_the_length(kind):
    """A row's logits do not depend on the length of another, nor on cuts; `generate()` keeps its cache; and up to the
    window and after `forget` the model is itself."""
    ids = torch.randint(3, 53, (2, 100), generator=torch.Generator().manual_seed(1))
    own, model, mask = scaled_model(kind)(ids[:, :12]).logits, scaled_model(kind), torch.ones_like(ids)
    long = model(ids).logits  # the modules now have the frequencies of a long text
    mask[0, :60] = 0
    remember(model, 12)
    close(model(ids[:, :12]).logits, own)
    batch, alone = model(ids, attention_mask=mask).logits[0, 60:], model(ids[:1, 60:]).logits[0]
    close(batch, alone)
    close(*whole_and_pieces(model, ids[1:].repeat(1, 2)[:, :60]))
    for begin, end in ((50, 70), (30, 60), (60, 100)):
        cache, settings = MemoryCache(model), {"max_new_tokens": 9, "do_sample": False}
        model(ids[:1, :begin], cache=cache)
        cache.start_prompt()
        made = model.generate(ids[:1, begin:end], cache=cache, **settings)[:, end - begin :]
        assert cache.num_tokens_seen.tolist() == [end + 8]
        plain = MemoryCache(model)
        model(ids[:1, :begin], cache=plain)
        plain.start_prompt()
        logits, expected = model(ids[:1, begin : end - 1], cache=plain).logits, []
        branch = copy.copy(plain)
        logits = model(ids[:1, end - 1 : end], cache=branch).logits
        again, after = recall_rows(model, branch, torch.arange(1))
        expected.append(int((after if len(again) else logits)[0, -1].argmax()))
        assert made[0, 0] == expected[0]
    close(forget(model)(ids).logits, long)
    if kind != "default":
        with pytest.raises(ValueError, match=f"`window` must be at most 64.*{kind}"):
            remember(model, 65)
