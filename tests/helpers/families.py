"""Small random models of many families; `python tests/helpers/families.py` prints docs/dev/families.md."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ContextDecorator

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from titans_hf import MemoryCache, Passages, forget, remember

# One value for each field that some configuration has; a configuration takes those that it has.
FIELDS = {
    "vocab_size": 53,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "block_ff_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "mamba_n_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "rotary_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("q_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state"), 8),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 4096),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 9),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "laurel_rank"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 53,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    **dict.fromkeys(("attention_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "layerdrop"), 0.0),
}
OWN_FIELDS = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    **{x: {"sliding_window": None} for x in "doge ministral3 mistral mixtral phi3 starcoder2".split()},
    **{
        x: {"layer_types": ["sliding_attention", "full_attention"] * 2}
        for x in ("gemma3_text", "gemma3n_text", "ministral")
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
}
# Each stands for a way in which a model can be built; the test of `.ci/run` has these.
CHOSEN = (
    "bamba cohere2 deepseek_v3 falcon_h1 gemma2 gemma4_text gpt2 gpt_neox gpt_oss granite lfm2 llama llama4_text "
    "mixtral olmo2 olmo_hybrid phi3 qwen3 qwen3_5_text smollm3"
).split()
OTHERS = (
    "apertus arcee biogpt bitnet codegen cohere deepseek_v2 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 "
    "flex_olmo gemma gemma3_text gemma3n_text glm glm4 glm4_moe gptj granitemoe granitemoehybrid helium "
    "hunyuan_v1_dense jetmoe ministral ministral3 mistral nemotron olmo olmo3 olmoe opt persimmon phi qwen2 qwen2_moe "
    "qwen3_moe qwen3_next seed_oss stablelm starcoder2 vaultgemma"
).split()
REFUSED = "bloom falcon jamba mamba mpt".split()
WINDOW = 12
PIECES = [5, 1, 1, 9, 1, 20, 8]
PASSAGES = Passages(block=2, before=1, after=3, query=6, again=6, every=4, share=0.4, most=3)
RECALLED = 32  # tokens before a recall


class as_double(ContextDecorator):
    """Computes in float64 what modeling files compute in float32, so that a difference is one of the ways to read."""

    def __enter__(self):
        self.saved = torch.float32, torch.float, torch.Tensor.float
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double

    def __exit__(self, *_):
        torch.float32, torch.float, torch.Tensor.float = self.saved


def small_model(family: str) -> PreTrainedModel:
    """Returns a random model of float64 whose weights are large enough that a window matters."""
    kind = CONFIG_MAPPING[family]
    fields = {name: x for name, x in FIELDS.items() if name in inspect.signature(kind.__init__).parameters}
    torch.manual_seed(0)
    config = kind(**fields | OWN_FIELDS.get(family, {}))
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.add_(0.1 * torch.randn_like(p))
    return model


@torch.no_grad()
def differences(model: PreTrainedModel, window: int = WINDOW) -> dict[str, float]:
    """Returns the largest differences of logits from the whole, of tokens that `generate()` makes, and of the forgotten
    model from the original; and how much the passages in sight change."""
    ids = torch.randint(3, 53, (2, 45), generator=torch.Generator().manual_seed(1))
    with as_double():
        before = model(ids).logits
        remember(model, window, passages=PASSAGES)
        whole, cache = model(ids).logits, MemoryCache(model)
        pieces = torch.cat([model(x, cache=cache).logits for x in ids.split(PIECES, 1)], 1)
        padded, mask = ids.clone(), torch.ones_like(ids)
        padded[0, :5], padded[0, 5:], mask[0, :5] = 0, ids[0, :40], 0
        of_padded = model(padded, attention_mask=mask).logits
        settings = {"max_new_tokens": 9, "do_sample": False}
        made = model.generate(padded, attention_mask=mask, **settings)[:, 45:]
        expected = [model.generate(x, **settings)[0, x.shape[1] :] for x in (ids[:1, :40], ids[1:])]
        alone = model(ids[:1]).logits
        recalled, passages = recalls_of(model, ids)
        after = forget(model)(ids).logits
    distance = lambda a, b: float((a - b).abs().max())  # noqa: E731
    return {
        "pieces": distance(pieces, whole),
        "padding": max(distance(of_padded[0, 5:], whole[0, :40]), distance(of_padded[1], whole[1])),
        "row alone": distance(alone, whole[:1]),
        "generated": distance(made, torch.stack(expected)),
        "recall": max(distance(x, recalled[0]) for x in recalled[1:]),
        "passages": passages,
        "recalling": distance(recalled[0], whole[:, RECALLED : RECALLED + 7]),
        "forgotten": distance(after, before),
    }


def recalls_of(model: PreTrainedModel, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Returns the logits after a recall: of one call, of pieces, of the rows alone, and of left-padded rows; and how
    many passages each row recalls."""
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.int64), ids], 1)
    whole, pieces = (after_recall(model, ids, x) for x in ([7], [5, 1, 1]))
    alone = torch.cat([after_recall(model, x, [7])[0] for x in ids.split(1)])
    return [whole[0], pieces[0], alone, after_recall(model, padded, [7], 5)[0]], whole[1]


def after_recall(model: PreTrainedModel, ids: torch.Tensor, cuts: list[int], padding: int = 0):
    """Returns the logits after the token RECALLED, at which all rows recall, read in pieces behind some padding; and
    the number of passages of each row."""
    cache, first = MemoryCache(model), padding + RECALLED
    mask = (torch.arange(first) >= padding).long().expand(len(ids), -1)
    model(ids[:, :first], attention_mask=mask, cache=cache)
    pieces = ids[:, first : first + sum(cuts)].split(cuts, 1)
    logits = [model(x, cache=cache, recall=True if i == 0 else None).logits for i, x in enumerate(pieces)]
    return torch.cat(logits, 1), [len(x) for x in cache.recalled]


def page() -> Iterator[str]:
    """Yields the lines of docs/dev/families.md."""
    yield "# Families of models that `remember` was tried with\n"
    yield f"{', '.join(sorted(CHOSEN + OTHERS))}.\n"
    yield f"These raise an error when they are given to `remember`: {', '.join(REFUSED)}.\n"
    yield "## Differences\n"
    yield "Random models of four layers in float64, with a window of 12 tokens. A column is the largest difference of"
    yield "the logits from one call over 45 tokens: when the text is read in pieces, behind padding on the left, or as"
    yield "a row alone. *Recall* compares seven tokens after a recall of up to three passages in these ways."
    yield f"Transformers {transformers.__version__}. This page is printed by `python tests/helpers/families.py`.\n"
    yield "| model_type | in pieces | left padding | row alone | recall |"
    yield "|---|---|---|---|---|"
    for family in sorted(CHOSEN + OTHERS):
        found = differences(small_model(family))
        if found["generated"] or found["forgotten"]:
            raise ValueError(f"{family} generates otherwise, or is not the original when it is forgotten: {found}")
        yield f"| {family} | {' | '.join(f'{found[x]:.0e}' for x in ('pieces', 'padding', 'row alone', 'recall'))} |"
        print(family, file=sys.stderr)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print("\n".join(page()))
