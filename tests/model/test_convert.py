"""Converted models: their logits are those of the Llama, Mistral, Qwen2 or Qwen3 that they were made of, in float64."""

import copy
import os
from pathlib import Path

import pytest
import torch
from byte_model import save_llama
from common import assert_same, full_logits, left_pad, make_ids, read
from covering import in_one_test
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from titans_hf import TitansCache, TitansForCausalLM, convert
from titans_hf.cli.convert import main, original_bytes
from titans_hf.cli.shared.checkpoints import load_titans
from titans_hf.convert_titans import StoredWeights, convert_checkpoint, convert_parts, make_skeleton

WINDOW = 12
SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=None,
)
SCALED = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied, bos of the config": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True)),
    "llama, biases and one key head": (LlamaForCausalLM, LlamaConfig, dict(attention_bias=True, num_key_value_heads=1)),
    "llama 3": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=LLAMA3, head_dim=10)),
    "llama, linear": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}),
    ),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=20, head_dim=6)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2, some windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        dict(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    ),
    "qwen3, yarn": (
        Qwen3ForCausalLM,
        Qwen3Config,
        dict(head_dim=12, rope_parameters={**SCALED, "rope_type": "yarn"}),
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


class RotaryInDouble(nn.Module):
    """The rotary factors of a model in float64; Transformers computes them in float32."""

    def __init__(self, original):
        super().__init__()
        self.scale = original.attention_scaling
        config = original.config
        frequencies = original.inv_freq.double()
        if config.rope_parameters["rope_type"] == "default":
            size = 2 * len(frequencies)
            frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
        self.frequencies = frequencies

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def make_original(name: str, **changes):
    """Returns a random model of a family that computes in float64 throughout; its norms and rotary factors would be of
    float32.
    """
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **settings, **changes})).double().eval()
    model.set_attn_implementation("sdpa")  # eager attention has its softmax in float32
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    for path, module in list(model.named_modules()):
        if "RMSNorm" in type(module).__name__:
            norm = nn.RMSNorm(len(module.weight), model.config.rms_norm_eps, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(path, norm)
    model.model.rotary_emb = RotaryInDouble(model.model.rotary_emb)
    return model


def window_mask(length: int, window: int) -> torch.Tensor:
    """Returns a mask to add to scores, (1, 1, T, T): a query sees `window` tokens, itself included."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)


@torch.no_grad()
def windowed_logits(original, ids: torch.Tensor, window: int = WINDOW) -> torch.Tensor:
    """Returns the original's logits of ids (B, T) with a window as its mask."""
    mask = window_mask(ids.shape[1], window)
    if hasattr(original.config, "layer_types") and original.config.layer_types is not None:
        mask = {kind: mask for kind in set(original.config.layer_types)}
    return original(ids, attention_mask=mask, use_cache=False).logits


@every_model
def test_logits_are_the_originals(name):
    """Within the window the logits are those of the original as it is, beyond it those with the window as a mask."""
    original, ids = make_original(name), make_ids(2, 40)
    model = convert(original, window=WINDOW, sinks=0, memory=None)
    assert type(model) is TitansForCausalLM and not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    logits = full_logits(model, ids)
    assert_same(logits, windowed_logits(original, ids))
    with torch.no_grad():
        assert_same(logits[:, :WINDOW], original(ids[:, :WINDOW]).logits)
    assert (logits[:, WINDOW:] - original(ids).logits[:, WINDOW:]).abs().max() > 1e-3  # the window matters
    assert_same(read(model, ids, [7, 1, 1, 31])[0], logits)


class SinkAttention:
    """The original's eager attention with one more column: the key and value of the first position of every text, at a
    constant distance before every query. Registered as an attention function for the layers of `original`.
    """

    def __init__(self, original, token: int, distance: int):
        self.original, self.distance = original, distance
        with torch.no_grad():
            first = original(torch.tensor([[token]]), output_hidden_states=True, use_cache=False)
        self.inputs = [
            layer.input_layernorm(x) for layer, x in zip(original.model.layers, first.hidden_states[:-1], strict=True)
        ]

    def __call__(self, module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        x = self.inputs[module.layer_idx]
        sink_key, sink_value = (
            proj(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for proj in (module.k_proj, module.v_proj)
        )
        if hasattr(module, "k_norm"):
            sink_key = module.k_norm(sink_key)
        rotary, length = self.original.model.rotary_emb, query.shape[2]
        groups = query.shape[1] // key.shape[1]
        scores = []
        for t in range(length):  # rotated by hand to the position t - distance, as query t is to t
            cos, sin = rotary(query, torch.tensor([[t - self.distance]]))
            first, second = sink_key.chunk(2, dim=-1)
            rotated = sink_key * cos + torch.cat([-second, first], dim=-1) * sin
            scores.append((query[:, :, t : t + 1] * rotated.repeat_interleave(groups, 1)).sum(-1))
        key, value, sink_value = (y.repeat_interleave(groups, 1) for y in (key, value, sink_value))
        own = query @ key.mT * scaling + attention_mask
        weights = torch.cat([torch.stack(scores, 2) * scaling, own], dim=-1).softmax(-1)
        values = torch.cat([sink_value.expand(len(value), -1, -1, -1), value], dim=2)
        return (weights @ values).transpose(1, 2), weights


@every_model
def test_a_sink_is_the_first_position_at_a_constant_distance(name, monkeypatch):
    """With a sink the logits are the original's with one more column in its attention: the begin token's key and value
    at a constant distance behind every query.
    """
    original, ids = make_original(name), make_ids(2, 30)
    model = convert(original, window=WINDOW, memory=None, persistent_distance=9, first_token=3)
    attention = SinkAttention(original, 3, 9)
    module = __import__(type(original).__module__, fromlist=["eager_attention_forward"])
    original.set_attn_implementation("eager")
    monkeypatch.setattr(module, "eager_attention_forward", attention)
    expected = windowed_logits(original, ids)
    logits = full_logits(model, ids)
    assert_same(logits, expected)
    assert (logits - full_logits(convert(original, window=WINDOW, memory=None, first_token=4), ids)).abs().max() > 1e-3
    assert_same(read(model, ids, [1] * 5 + [13, 12])[0], logits)


def test_defaults_of_a_sink():
    """The sink is made of the begin token, at a distance of 256 or of the window if it is shorter."""
    original, ids = make_original("llama"), make_ids(1, 20)
    model = convert(original, window=WINDOW, memory=None)
    assert (model.config.num_persistent_tokens, model.config.persistent_distance) == (1, WINDOW)
    assert_same(full_logits(model, ids), full_logits(convert(original, window=WINDOW, memory=None, first_token=1), ids))
    long = make_original("llama", max_position_embeddings=2048)
    assert convert(long, memory=None).config.persistent_distance == 256


@every_model
def test_generation_is_the_originals(name):
    """`generate()` gives the tokens of the original, for prompts with padding on the left too."""
    original = make_original(name, max_position_embeddings=64)
    model = convert(original, window=16, sinks=0, memory=None)
    ids, mask = left_pad([make_ids(5), make_ids(3, seed=1)])
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert (model.generate(ids, **options) == original.generate(ids, **options)).all()


@pytest.mark.parametrize("sinks", [0, 1])
def test_every_operation_of_a_cache(sinks, tmp_path):
    """Padding, packed documents, rollback and memory folders give the logits of each text alone."""
    model = convert(make_original("llama 3"), window=WINDOW, sinks=sinks, memory=None)
    texts = [make_ids(23), make_ids(17, seed=1)]
    alone = [full_logits(model, text[None])[0] for text in texts]
    ids, mask = left_pad(texts)
    padded = full_logits(model, ids, mask)
    packed = full_logits(
        model, torch.cat(texts)[None], position_ids=torch.cat([torch.arange(23), torch.arange(17)])[None]
    )
    for i, (text, logits) in enumerate(zip(texts, alone, strict=True)):
        assert_same(padded[i, -len(text) :], logits)
        assert_same(packed[0, 23 * i : 23 * i + len(text)], logits)
    cache = TitansCache(model.config)
    cache.activate_past_recording()
    read(model, torch.cat([texts[0][:15], texts[1][:6]])[None], None, cache)
    cache.crop(-6)
    cache.save_pretrained(tmp_path, model)
    cache = TitansCache.from_pretrained(tmp_path, model)
    assert_same(read(model, texts[0][None, 15:], None, cache)[0], alone[0][None, 15:])
    branch = copy.copy(cache)
    branch.reset()
    assert_same(read(model, texts[1][None], None, branch)[0], alone[1][None])
    with pytest.raises(ValueError, match="no layer of its model has one"):
        cache.merge(cache)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3, yarn"])
def test_memories_in_layers_start_without_effect(name):
    """Layers with a memory change no logit before they are trained, and their memory gets gradients."""
    original, ids = make_original(name), make_ids(2, 40)
    model = convert(original, window=WINDOW, memory=None, memory_layers=[1], memory_num_heads=4)
    assert model.model.layers[0].mixer.memory is None and model.model.layers[1].mixer.memory is not None
    plain = convert(original, window=WINDOW, memory=None)
    assert_same(full_logits(model, ids), full_logits(plain, ids))
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[1].mixer.memory.o_proj.weight.grad.abs().max() > 0


def test_a_memory_is_trained_whole_with_lora_on_the_rest(tmp_path):
    """PEFT saves the memories' parameters beside LoRA's: loaded on a new conversion they give the same logits."""
    original, ids = make_original("llama"), make_ids(2, 40)
    options = dict(
        window=WINDOW, memory_layers=[1], memory_num_heads=4, token_memory_entries=8, token_memory_key_size=8
    )
    lora = LoraConfig(target_modules=["attention.q_proj"], modules_to_save=["memory", "memory_norm"])
    model = get_peft_model(convert(original, **options), lora)
    trained = {name.split(".modules_to_save")[0] for name, x in model.named_parameters() if x.requires_grad}
    assert (
        sum("lora" not in name for name in trained) == 3
    )  # the layer's memory, its norm, the memory behind the layers
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(convert(original, **options), tmp_path).eval()
    assert_same(full_logits(loaded, ids), full_logits(model.eval(), ids))
    assert (full_logits(loaded, ids) - full_logits(convert(original, **options), ids)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_checkpoint_is_converted_shard_by_shard(name, tmp_path):
    """A sharded checkpoint of bfloat16 becomes one with the weights and logits of `convert`, which loads by AutoModel;
    generation settings come along.
    """
    original = make_original(name).to(torch.bfloat16)
    original.generation_config.temperature = 0.3
    original.generation_config.do_sample = True
    original.save_pretrained(tmp_path / "original", max_shard_size="10KB")
    assert len(list((tmp_path / "original").glob("*.safetensors"))) > 2
    convert_checkpoint(tmp_path / "original", tmp_path / "titans", window=WINDOW, memory=None, max_shard_size="10KB")
    assert len(list((tmp_path / "titans").glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "titans").eval()
    assert type(model) is TitansForCausalLM and model.dtype == torch.bfloat16
    assert model.generation_config.temperature == 0.3
    expected = convert(tmp_path / "original", window=WINDOW, memory=None)
    assert expected.state_dict().keys() == model.state_dict().keys()
    for key, x in expected.state_dict().items():
        assert torch.equal(x, model.state_dict()[key]), key
    assert torch.equal(full_logits(model, make_ids(1, 20)), full_logits(expected, make_ids(1, 20)))


def test_one_part_is_in_memory_at_a_time(tmp_path):
    """Each weight is read once, and only the weights of one part are there while a checkpoint is converted."""
    original = make_original("llama")
    original.save_pretrained(tmp_path, max_shard_size="10KB")
    reads = []

    class Counted(StoredWeights):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    skeleton = make_skeleton(convert(original, window=WINDOW, memory=None).config, torch.float64)
    weights = Counted(tmp_path)
    for _, part in convert_parts(skeleton, weights, 1):
        there = {id(x) for x in skeleton.parameters() if not x.is_meta}
        assert there == {id(x) for x in part.parameters()}
        part.to("meta")
    assert sorted(reads) == sorted(weights)


def refused(message: str, name: str = "llama", options: dict | None = None, **changes):
    return pytest.param(name, changes, options or {}, message, id=message)


@in_one_test("name,changes,options,message", [
    refused("`window` must be from 1 to 64, the model's `max_position_embeddings`, but is 65", options=dict(window=65)),
    refused("the model's `sliding_window`, but is 21", "mistral", dict(window=21)),
    refused("the model's `sliding_window`, but is 17", "qwen2, some windows", dict(window=17)),
    refused("`window` must be from 1 to 64, the model's `max_position_embeddings`, but is 0", options=dict(window=0)),
    refused("`sinks` must be 0 or 1, but is 2", options=dict(sinks=2)),
    refused("`memory` must be 'episodic' or None", options=dict(memory="deep")),
    refused("`memory_layers` must be", options=dict(memory_layers=[2])),
    refused("`first_token` must be from 0 to 49, but is 50", options=dict(first_token=50)),
    refused("has no begin token and no end token either", bos_token_id=None),
    refused("has model.layers.0.mlp.gate_proj.bias, which a Titans has no place for", mlp_bias=True),
    refused(
        "must be one of 'default', .*, but is 'dynamic'",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    ),
])  # fmt: skip
def test_what_cannot_be_exact_is_refused(name, changes, options, message):
    """Windows above the trained length, rotary types that depend on the length and parts that a Titans lacks are
    refused by name.
    """
    model_class, config_class, settings = MODELS[name]
    original = model_class(config_class(**{**SIZES, **settings, **changes}))
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        convert(original, **{"window": WINDOW, "memory": None, **options})


def test_other_models_and_weights_are_refused():
    """Another family, quantised weights, and weights that misfit the configuration are refused by name."""
    other = PhiForCausalLM(PhiConfig(vocab_size=50, hidden_size=32, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=4))  # fmt: skip
    with pytest.raises(ValueError, match="a model of type 'phi' cannot be converted, only one of llama"):
        convert(other, memory=None)
    original = LlamaForCausalLM(LlamaConfig(**SIZES))
    original.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"quantised weights \(gptq\) cannot be converted"):
        convert(original, window=WINDOW, memory=None)
    original = LlamaForCausalLM(LlamaConfig(**SIZES))
    original.model.layers[1].self_attn.extra = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"has model\.layers\.1\.self_attn\.extra\.weight, which a Titans has no place"
    ):
        convert(original, window=WINDOW, memory=None)
    del original.model.layers[1].self_attn.extra, original.model.layers[1].mlp.up_proj
    with pytest.raises(ValueError, match=r"the checkpoint lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(original, window=WINDOW, memory=None)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_an_episodic_memory_starts_nearly_closed(name):
    """With an episodic memory, whose gate is nearly closed, no probability falls by more than 1 % before training."""
    original, ids = make_original(name), make_ids(2, 40)
    model = convert(original, window=WINDOW, memory="episodic", token_memory_entries=20, token_memory_threshold=0.5)
    plain = full_logits(convert(original, window=WINDOW, memory=None), ids).log_softmax(-1)
    mixed = full_logits(model, ids).log_softmax(-1)
    assert (mixed - plain).min() > -0.01 and (mixed - plain).abs().max() > 1e-6
    assert_same(read(model, ids, [1, 17, 22])[0].log_softmax(-1), mixed)


def test_the_command_converts_a_folder(tmp_path, monkeypatch, capsys):
    """`titans-hf convert` in any folder writes a checkpoint with tokenizer, chat template and card that other commands
    load, and prints bytes and speed.
    """
    original = save_llama(tmp_path / "original")
    monkeypatch.chdir(tmp_path)
    main(["original", "--output", "titans", "--window", "16", "--memory_layers", "1"])
    printed = capsys.readouterr().out
    model, tokenizer = load_titans("titans", "cpu")
    assert model.config.token_memory_entries == 5400 and model.config.memory_layers == [1]
    chat = [{"role": "user", "content": "Who?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Who?"
    card = ModelCard.load("titans/README.md")
    assert card.data.license == "apache-2.0" and "with the weights of original" in card.text
    num_bytes = read(model, make_ids(1, 20))[1].num_bytes
    assert f"| {num_bytes / 1e6:,.1f} MB" in printed
    cache = DynamicCache()
    original(make_ids(1, 100), cache=cache)
    num_bytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert original_bytes(model.config, 100, 4) == num_bytes
    assert "tokens/s" in printed


def test_the_command_also_fits_the_memory(tmp_path, monkeypatch, capsys):
    """With --fit, the checkpoint has the original's weights and a fitted memory, and the command prints its gain."""
    original = save_llama(tmp_path / "original")
    (tmp_path / "book.txt").write_text("A king and a queen. " * 60)
    monkeypatch.chdir(tmp_path)
    options = ["--window", "16", "--no-speed", "--recalls=1", "--entries=50"]
    main(["original", "--output", "runs/titans", *options, "--fit", "book.txt"])
    printed = capsys.readouterr().out
    assert "tokens of text: loss" in printed and "nats)" in printed and "original's cache" in printed
    assert printed.endswith("runs/titans\n") and [x.name for x in (tmp_path / "runs").iterdir()] == ["titans"]
    model, _ = load_titans("runs/titans", "cpu")
    memory = model.model.episodic_memory
    assert memory.gate_weight.any() and memory.center.any()
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    assert ModelCard.load("runs/titans/README.md").data.license == "apache-2.0"


@in_one_test("arguments,message", [
    (["original", "--output", "original"], "--output original exists: give the name of a new folder"),
    (["original", "--output", "new", "--window", "65"], "`window` must be from 1 to 64"),
    (["original", "--output", "new", "--fit", "nowhere"], "--fit nowhere does not exist"),
    (["original", "--output", "new", "--fit", "original", "--recalls", "-1"], "--recalls must be at least 0"),
    (["original", "--output", "new", "--fit", ".", "--memory", "none"], "--fit fits the episodic memory: it cannot"),
    (["small", "--output", "new"], "the tokenizer has 259 tokens, but the model's vocabulary 50: it is not the"),
    (["nothing", "--output", "new"], "MODEL nothing has no tokenizer: no such folder, nor to be had from the Hub"),
])  # fmt: skip
def test_bad_input_of_the_command(arguments, message, tmp_path, monkeypatch):
    """Bad input ends in a ValueError before anything is written."""
    save_llama(tmp_path / "original")
    save_llama(tmp_path / "small", vocab_size=50)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        main([*arguments, "--no-speed", *(["--window", "16"] if "--window" not in arguments else [])])
    assert not (tmp_path / "new").exists()


def test_zero_sinks_are_noted(tmp_path, capsys):
    """Without sinks the command says what it costs."""
    save_llama(tmp_path / "original")
    options = ["--output", f"{tmp_path / 'new'}", "--window", "16", "--memory", "none", "--no-speed"]
    main([f"{tmp_path / 'original'}", "--sinks", "0", *options])
    assert "cost about half a nat" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif("TITANS_HF_SMOLLM2" not in os.environ, reason="TITANS_HF_SMOLLM2 names no GGUF file")
def test_a_real_model(tmp_path):
    """SmolLM2-135M-Instruct, a GGUF file: within the window its logits and answers are the original's."""
    file = Path(os.environ["TITANS_HF_SMOLLM2"])
    options = ["--gguf_file", file.name, "--window", "64", "--sinks", "0", "--memory", "none", "--dtype", "float32"]
    main([f"{file.parent}", "--output", f"{tmp_path / 'titans'}", *options, "--no-speed"])
    model, tokenizer = load_titans(f"{tmp_path / 'titans'}", "cpu")
    original = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert_same(model(**ids).logits, original(**ids).logits, 1e-3)
    length = dict(max_new_tokens=12, do_sample=False)
    answer = model.generate(**ids, **length)
    assert (answer == original.generate(**ids, **length)).all() and "Paris" in tokenizer.decode(answer[0])
