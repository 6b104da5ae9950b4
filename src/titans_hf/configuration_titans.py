"""Configuration of Titans models ("Titans: Learning to Memorize at Test Time", arXiv 2501.00663)."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

if TYPE_CHECKING:  # never executed: makes save_pretrained copy every sibling module
    # Transformers finds these files by a regular expression, which reads this line too.
    from .modeling_titans import TitansModel  # noqa: F401

    T = TypeVar("T")
    Derived = Annotated[T, "a field that has a value once its config is made"]
else:
    Derived = Optional  # until then, None asks for the derived value

logger = logging.get_logger(__name__)

# Classes that load a checkpoint without this package, whichever class saved it.
AUTO_MAP = {
    "AutoConfig": "configuration_titans.TitansConfig",
    "AutoModel": "modeling_titans.TitansModel",
    "AutoModelForCausalLM": "modeling_titans.TitansForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_titans.TitansForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_titans.TitansForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_titans.TitansForTokenClassification",
}
PREFIX = "memory_"  # of fields that other configs do not have
# Keywords that every config takes, although its class has no such attribute.
TRANSFORMERS_NAMES = {
    *("attn_implementation", "experts_implementation", "per_layer_config", "auto_map", "quantization_config"),
    *("rope_scaling", "rope_theta", "partial_rotary_factor", *vars(GenerationConfig())),
}
VARIANTS = ("mac", "mag", "mal", "lmm")
WITH_ATTENTION = ("mac", "mag", "mal")
WITH_WINDOW = ("mag", "mal")
# The defaults that `memory_form` sets.
FORMS: dict[str, dict[str, Any]] = {
    "memory_depth": {"titans": 2, "paper": 2},
    "memory_expansion": {"titans": 1, "paper": 4},
    "memory_network": {"titans": "mlp", "paper": "residual"},
    "memory_chunk_size": {"titans": 64, "paper": 16},
    "memory_update_rule": {"titans": "delta", "paper": "chunk"},
    "memory_recurrence": {"titans": "stable", "paper": "paper"},
    "memory_momentum": {"titans": True, "paper": True},
    "memory_conv_noise": {"titans": 0.7, "paper": 1.0},
    "memory_output_norm": {"titans": "clip", "paper": "rms"},
    "memory_residual": {"titans": True, "paper": False},
}
for name, row in FORMS.items():  # "delta" is "titans" with a memory of one layer and no momentum
    row["delta"] = {"memory_depth": 1, "memory_momentum": False}.get(name, row["titans"])


def setting(
    default: Any,
    *,
    at_least: int | None = None,
    above: int | None = None,
    at_most: int | None = None,
    derived: Callable[["TitansConfig"], Any] | None = None,
    variants: tuple[str, ...] = VARIANTS,
    state: Literal["shape", "content", "none"] = "content",
    card: str | None = None,
) -> Any:
    """Declares a field of a config with the facts that other code needs (`field_facts`).

    Args:
        default: the field's default.
        at_least, above, at_most: its range; values are finite. None is allowed if the field's type allows it.
        derived: computes the value from the other fields if it is still the default, usually None. Fields in FORMS are
            derived too.
        variants: the variants in which the field has an effect.
        state: how a layer's state depends on the field. "shape": a cache made with another value does not fit the
            model. "content": a saved memory is valid only with this value. "none": it does not.
        card: the name of the field in the table of sizes of a model card; None if the table does not show it.
    """
    facts = dict(default=default, at_least=at_least, above=above, at_most=at_most, derived=derived)
    return field(default=default, metadata=facts | dict(variants=variants, state=state, card=card))


_FACTS: dict[type, dict[str, Mapping[str, Any]]] = {}  # the results of `field_facts`


def field_facts(config_class: type) -> dict[str, Mapping[str, Any]]:
    """Returns the arguments of `setting` for every field of a config class, in the order of declaration.

    A subclass that changes only a field's default inherits the other facts.
    """
    if config_class in _FACTS:
        return _FACTS[config_class]
    facts: dict[str, Mapping[str, Any]] = {}
    for base in reversed([c for c in config_class.__mro__ if is_dataclass(c)]):
        own = get_annotations(base)
        facts |= {x.name: x.metadata for x in fields(base) if x.name in own and x.metadata}
    return _FACTS.setdefault(config_class, facts)


@strict
class TitansConfig(PreTrainedConfig):
    r"""
    Configures a Titans model. Fields that are not listed here are as in Transformers. *By form* is a default that
    `memory_form` sets; the last table has its values.

    Args:
        variant (`str`, defaults to `"mag"`):
            How memory and attention are combined (paper section 4): `"mac"` memory as context, `"mag"` memory as a
            gate, `"mal"` memory as a layer, `"lmm"` the memory alone.

        > Attention, of all variants but LMM

        head_dim (`int`, *optional*): Entries of an attention head. Default: `hidden_size // num_attention_heads`.
        sliding_window (`int`, defaults to 512): Tokens that a token attends to, itself included, in MAG and MAL.
        segment_length (`int`, defaults to 256):
            Tokens of a segment, the span of attention in MAC; a multiple of `memory_chunk_size`.
        num_persistent_tokens (`int`, defaults to 4):
            Learned tokens in front of every sequence, per layer (N_p, section 3.3); 0 for none.
        rope_parameters (`dict`, *optional*):
            `rope_theta` (10000), `partial_rotary_factor` (0.5, a share of a head) and `rope_type`, `"default"`. No
            distance exceeds window or segment.

        > Memory

        memory_form (`str`, defaults to `"titans"`):
            Sets the defaults below. `"titans"`: a matrix of learned features that learns by the delta rule with
            momentum, and stabilisers. `"delta"`: the same without features and without momentum. `"paper"`: the paper's
            second version, literally.
        memory_depth (`int`, by form):
            Layers of the memory network (L_M). With the delta rule, only the last layer learns while reading, and the
            layers before it make features, which are trained as all weights are; 1 is a memory without features.
        memory_expansion (`int`, by form):
            Width of the network's hidden layers, in multiples of a memory head's size. No effect with one layer.
        memory_network (`str`, by form):
            Form of the network M: `"mlp"`, linear layers with the activation between them (the paper's first version),
            `"residual"`, M(x) = x + LN(of that) (its second). `"residual"` needs `memory_update_rule="chunk"`.
        memory_activation (`str`, defaults to `"silu"`, with `memory_network="residual"` to `"gelu"`):
            `"silu"`, `"gelu"`, `"relu"` or `"identity"`, after each hidden layer. With the delta rule also `"product"`:
            a hidden layer's two halves are multiplied and the result has length 1.
        memory_loss (`str`, *optional*):
            Inner loss of `memory_update_rule="chunk"`. `"l2"`: |M(k) - v|^2 (eq. 12), the default with
            `memory_recurrence="paper"`. `"huber"`, otherwise the default: linear for errors above |v|, and the
            gradient of a layer is clipped at 4 |v|. The delta rule has `"l2"`.
        memory_num_heads (`int`, *optional*):
            Independent memories per layer, of `hidden_size // memory_num_heads` entries each. Default:
            `num_attention_heads`.
        memory_chunk_size (`int`, by form):
            Tokens of a chunk (section 3.2). With `memory_update_rule="chunk"`, their gradients are taken at the same
            weights. With the delta rule, they are computed together, and the results do not depend on it.
        memory_update_rule (`str`, by form; `"chunk"` with `memory_network="residual"`):
            `"delta"`: the last layer learns, with the error at the weights before each token (eq. 10), exactly, so that
            one write can replace the value that a key retrieves. `"chunk"`: all layers learn, with the gradient at the
            weights of the chunk's start (eq. 16).
        memory_max_lr (`float`, *optional*):
            Largest step size (theta, eq. 10); 0 turns the memory off. Default: 1/2 with the delta
            rule, otherwise 1 / b in chunks of b tokens, and 2 / (L b) from L = 3 layers on. A larger value warns: with
            repeated keys updates overshoot, and rounding errors and gradients grow exponentially.
        memory_recurrence (`str`, by form):
            `"paper"`: eq. 10-14 as stated. `"stable"`: forgetting leads back to the learned initial weights instead of
            0, where a network of several layers has no gradient; theta is multiplied by 1 - eta, so that a gradient's
            steps sum to theta; values have length 1, as keys and queries, because the largest stable step decreases
            with their square; and the network starts as 0.
        memory_momentum (`bool`, by form; `True` with `memory_update_rule="chunk"`):
            Momentum of the update (eta, eq. 10). With the delta rule, eta is at most 1/3: above it, bursts of one key
            can make the memory grow exponentially.
        memory_forget (`bool`, defaults to `True`):
            Decay of the memory (alpha, eq. 13). With the delta rule, alpha is at most 0.6.
        memory_start (`str`, defaults to `"random"`):
            Initial weights of a new memory. `"recall"`: W_q = W_k and W_o = 3 W_v^T, so that an untrained memory finds
            the token that it stored for a query and its output points at this token's embedding. Also sets the defaults
            of `memory_forget_bias` and `memory_conv_noise`.
        memory_forget_bias (`float`, defaults to -5; with `memory_start="recall"` to -7):
            Initial logit of alpha: half of what is stored is forgotten after 103 tokens, with -7 after 760.
        memory_conv_kernel (`int`, defaults to 4): Width of the causal convolutions on q, k and v; 1 for none.
        memory_conv_noise (`float`, by form; 0 with `memory_start="recall"`):
            Share n of noise in the initial filters, from 0 to 1: sqrt(1 - n^2) times the identity (on keys a delay of
            one token) plus n times noise of norm 1. With 0, recall is learned fastest; with 1, language.
        memory_output_norm (`str`, by form):
            Normalises the values that a head retrieves (section 4.4): `"rms"` always; `"clip"` only lengths above 1,
            the length of a value, so that small retrievals stay small.
        memory_residual (`bool`, by form):
            Adds the memory's output m to attention's y in MAG, MAL and MAC: `y * sigmoid(norm(m)) + m` instead of eq.
            28, 31 and 25, and attention reads `norm(x + m)` in MAL instead of `norm(m)`.
        memory_recompute (`bool`, defaults to `False`):
            Computes each piece of the memory's update again in the backward: less memory and more time in training.
        memory_kernel (`str`, defaults to `"auto"`):
            The program of the delta rule. `"torch"`: plain PyTorch. `"auto"`: on CUDA, where flash-linear-attention is
            installed (`pip install "titans_hf[gpu]"`), its kernels for several tokens in float32, keys of at most 256
            features (128 with momentum) and calls without `output_surprise`; PyTorch elsewhere and in compiled models.

        > Defaults by form

        TABLE

    Raises `ValueError` or huggingface_hub's `StrictDataclassError`, naming the field, for a value that is not possible,
    and `ValueError` for an unknown keyword that begins with `memory_`. In a saved config, such a field of another
    version only warns. Any other unknown keyword warns.
    """

    model_type = "titans"
    auto_classes = AUTO_MAP
    default_theta = 10000.0
    # "titans_..." are the styles of `parallel_titans`. A model leaves out what its variant has not.
    base_model_tp_plan = {
        "layers.*.mixer": "titans_whole_heads",
        "layers.*.mixer.attention.q_proj": "colwise",
        "layers.*.mixer.attention.k_proj": "colwise",
        "layers.*.mixer.attention.v_proj": "colwise",
        "layers.*.mixer.attention.o_proj": "rowwise",
        "layers.*.mixer.recall.q_proj": "colwise",
        "layers.*.mixer.recall.o_proj": "rowwise",
        "layers.*.mixer.recall.norm": "titans_shared_by_heads",
        "layers.*.mixer.memory.initial_weights": "titans_heads",
        "layers.*.mixer.memory.q_conv": "titans_heads",
        "layers.*.mixer.memory.k_conv": "titans_heads",
        "layers.*.mixer.memory.v_conv": "titans_heads",
        "layers.*.mixer.memory.q_proj": "colwise",
        "layers.*.mixer.memory.k_proj": "colwise",
        "layers.*.mixer.memory.v_proj": "colwise",
        "layers.*.mixer.memory.gate_proj": "colwise",
        "layers.*.mixer.memory.inner_lr": "colwise",
        "layers.*.mixer.memory.momentum": "colwise",
        "layers.*.mixer.memory.forget": "colwise",
        "layers.*.mixer.memory.o_proj": "rowwise",
        "layers.*.mixer.memory.norm": "titans_shared_by_heads",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "layout"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    # Size
    vocab_size: int = setting(32000, at_least=1, card="vocabulary")
    hidden_size: int = setting(1024, at_least=1, state="shape", card="width")
    intermediate_size: int = setting(2816, at_least=1, card="width of the MLP")
    num_hidden_layers: int = setting(24, at_least=1, state="shape", card="layers")
    hidden_act: str = setting("silu")
    variant: Literal["mac", "mag", "mal", "lmm"] = setting("mag", state="shape")
    rms_norm_eps: float = setting(1e-6, at_least=0)
    initializer_range: float = setting(0.02, at_least=0, state="none")
    tie_word_embeddings: bool = setting(False, state="none")
    use_cache: bool = setting(True, state="none")
    pad_token_id: int | None = setting(None, state="none")
    bos_token_id: int | None = setting(1, state="none")
    eos_token_id: int | list[int] | None = setting(2, state="none")
    # Attention
    num_attention_heads: int = setting(16, at_least=1, variants=WITH_ATTENTION, card="attention heads")
    num_key_value_heads: Derived[int] = setting(
        None,
        at_least=1,
        derived=lambda config: config.num_attention_heads,
        variants=WITH_ATTENTION,
        state="shape",
        card="key and value heads",
    )
    head_dim: Derived[int] = setting(
        None,
        at_least=1,
        derived=lambda config: max(1, config.hidden_size // config.num_attention_heads),
        variants=WITH_ATTENTION,
        state="shape",
    )
    sliding_window: int = setting(512, at_least=1, variants=WITH_WINDOW, state="shape", card="window")
    segment_length: int = setting(256, at_least=1, variants=("mac",), state="shape", card="segment")
    num_persistent_tokens: int = setting(4, at_least=0, state="shape", card="persistent tokens")
    rope_parameters: Derived[dict] = setting(None, variants=WITH_ATTENTION)
    attention_dropout: int | float = setting(0.0, at_least=0, at_most=1, variants=WITH_ATTENTION, state="none")
    # Memory
    memory_form: Literal["titans", "delta", "paper"] = setting("titans", state="none")
    memory_depth: Derived[int] = setting(None, at_least=1, state="shape", card="depth of the memory")
    memory_expansion: Derived[int] = setting(None, at_least=1, state="shape", card="expansion of the memory")
    memory_network: Derived[Literal["mlp", "residual"]] = setting(None, state="shape")
    memory_activation: Derived[Literal["silu", "gelu", "relu", "identity", "product"]] = setting(
        None, derived=lambda config: "gelu" if config.memory_network == "residual" else "silu"
    )
    memory_num_heads: Derived[int] = setting(
        None, at_least=1, derived=lambda config: config.num_attention_heads, state="shape", card="memory heads"
    )
    memory_chunk_size: Derived[int] = setting(None, at_least=1, state="shape", card="chunk of the memory")
    memory_update_rule: Derived[Literal["chunk", "delta"]] = setting(
        None,  # a residual network cannot have the delta rule
        derived=lambda config: "chunk" if config.memory_network == "residual" else config.of_form("memory_update_rule"),
        state="shape",
    )
    memory_max_lr: Derived[int | float] = setting(None, at_least=0, derived=lambda config: config.max_stable_lr)
    memory_recurrence: Derived[Literal["stable", "paper"]] = setting(None)
    memory_loss: Derived[Literal["l2", "huber"]] = setting(
        None, derived=lambda config: "huber" if config.is_deep and config.memory_recurrence == "stable" else "l2"
    )
    memory_momentum: Derived[bool] = setting(
        None,
        derived=lambda config: config.memory_update_rule == "chunk" or config.of_form("memory_momentum"),
        state="shape",
    )
    memory_forget: bool = setting(True)
    memory_start: Literal["random", "recall"] = setting("random", state="none")
    memory_forget_bias: Derived[int | float] = setting(
        None, derived=lambda config: -7.0 if config.memory_start == "recall" else -5.0, state="none"
    )
    memory_conv_kernel: int = setting(4, at_least=1, state="shape")
    memory_conv_noise: Derived[int | float] = setting(
        None,
        at_least=0,
        at_most=1,
        derived=lambda config: 0.0 if config.memory_start == "recall" else config.of_form("memory_conv_noise"),
    )
    memory_output_norm: Derived[Literal["rms", "clip"]] = setting(None)
    memory_residual: Derived[bool] = setting(None, variants=WITH_ATTENTION)
    memory_recompute: bool = setting(False, state="none")
    memory_kernel: Literal["auto", "torch"] = setting("auto", state="none")

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Makes a config from config.json. Keywords of the memory's fields replace the file's values before other
        fields derive from them.

        Raises ValueError for another `memory_form` than a saved config's, which has a value for every field.
        """
        form, saved = kwargs.get("memory_form"), config_dict.get("memory_form")
        if "transformers_version" in config_dict and form not in (None, saved):
            raise ValueError(
                f"`memory_form` cannot become {form!r} in a saved config, whose fields were made for {saved!r}: give "
                "the fields to change."
            )
        given = {name: kwargs.pop(name) for name in [*kwargs] if name.startswith(PREFIX)}
        config_dict = _without_former_fields(config_dict, given)
        for name in [name for name in config_dict if name.startswith(PREFIX) and name not in field_facts(cls)]:
            logger.warning_once(f"`{name}` in a saved config has no effect: this titans_hf has no such field.")
            config_dict = {x: value for x, value in config_dict.items() if x != name}
        return super().from_dict(config_dict | given, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises ValueError for a field's value out of its range."""
        _check_range(name, value, field_facts(type(self)).get(name, {}))
        super().__setattr__(name, value)

    def __post_init__(self, **kwargs):
        _check_names(kwargs, field_facts(type(self)))
        for name in self._fields_to_derive():
            derived = field_facts(type(self))[name]["derived"]
            setattr(self, name, derived(self) if derived else self.of_form(name))
        self.rope_parameters = _rope_parameters(
            kwargs.pop("rope_scaling", None) or self.rope_parameters or {}, kwargs.pop("partial_rotary_factor", 0.5)
        )
        super().__post_init__(**kwargs)

    def of_form(self, name: str) -> Any:
        """Returns the default that `memory_form` sets for a field."""
        return FORMS[name][self.memory_form]

    def _fields_to_derive(self) -> list[str]:
        """Returns the derived fields that have no value yet."""
        facts = field_facts(type(self)).items()
        derived = [(name, x["default"]) for name, x in facts if x["derived"] or name in FORMS]
        return [name for name, default in derived if getattr(self, name) == default]

    @property
    def layer_types(self) -> list[str]:
        """Returns "titans" for each decoder layer: a kind of its own, since no cache of Transformers has its states."""
        return ["titans"] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Does nothing: Transformers would look for the layers' kind in a fixed list."""

    @property
    def max_stable_lr(self) -> float:
        """Largest step with which repeated keys never overshoot: with the delta rule 1/2, otherwise 1 / b, or
        2 / (L b) with L > 2 layers, in chunks of b tokens.
        """
        if not self.is_deep:
            return 0.5
        return min(1, 2 / self.memory_depth) / self.memory_chunk_size

    @property
    def is_deep(self) -> bool:
        """True if all layers of the memory network learn while reading, False if only the last one does."""
        return self.memory_update_rule == "chunk"

    @property
    def memory_gates_per_head(self) -> int:
        """Number of gates theta, eta and alpha of a memory head: one, in the paper's recurrence one for each layer."""
        return self.memory_depth if self.is_deep and self.memory_recurrence == "paper" else 1

    @property
    def memory_head_dim(self) -> int:
        """Size of the keys, queries and values of one memory head."""
        return self.hidden_size // self.memory_num_heads

    @property
    def rotary_dim(self) -> int:
        """Number of leading entries of an attention head that are rotated by position."""
        return int(self.head_dim * self.rope_parameters["partial_rotary_factor"])

    @property
    def grid_size(self) -> int:
        """Number of tokens between two places of a row where its slots may begin: in MAC a segment, else
        `memory_grid_size`.
        """
        return self.segment_length if self.variant == "mac" else self.memory_grid_size

    @property
    def memory_grid_size(self) -> int:
        """Number of tokens between two places where the memory's slots may begin: a chunk whose gradients are taken at
        the same weights; with the delta rule, which has no such weights, a token.
        """
        return self.memory_chunk_size if self.is_deep else 1

    @property
    def kv_cache_length(self) -> int:
        """Largest number of keys in the key-value cache of a layer, without the persistent keys; 0 in LMM."""
        return {"mac": 2 * self.segment_length, "lmm": 0}.get(self.variant, self.sliding_window - 1)

    @property
    def n_positions(self) -> int:
        """Returns 2^40 tokens, because the context has no limit. Not a field of config.json: programs such as lm-eval
        read it, and otherwise assume 2,048.
        """
        return 2**40

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Writes config.json and the model's code: a checkpoint loads anywhere with `trust_remote_code=True`."""
        # The user's entries are kept. An entry of another repository ("repo--file.Class") is not: its code is copied
        # here.
        given = getattr(self, "auto_map", None) or {}
        self.auto_map = self.auto_classes | {name: target for name, target in given.items() if "--" not in target}
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    def standardize_rope_params(self) -> None:
        """Does nothing: `rope_parameters` are complete. Transformers would look for a largest position."""

    def validate_rope(self) -> None:
        """Does nothing: `validate_architecture` checks `rope_parameters`. Transformers would compare them with a
        largest position.
        """

    def validate_architecture(self):
        """Checks that values fit each other; part of the validation of `@strict`."""
        if missing := self._fields_to_derive():
            raise ValueError(f"`{missing[0]}` must not be {getattr(self, missing[0])!r} once a config has been made.")
        if self.memory_network == "residual" and self.memory_update_rule == "delta":
            raise ValueError(
                "`memory_update_rule` must be 'chunk' with `memory_network='residual'`, but is 'delta': the errors are "
                "not linear in the last layer's weights."
            )
        only_with = {"memory_loss": ("huber", "chunk"), "memory_activation": ("product", "delta")}
        for name, (value, rule) in only_with.items():
            if getattr(self, name) == value and self.memory_update_rule != rule:
                raise ValueError(f"`{name}={value!r}` needs `memory_update_rule={rule!r}`, but the rule is another.")
        check_multiple("hidden_size", self.hidden_size, "memory_num_heads", self.memory_num_heads)
        if self.variant == "lmm":
            return
        check_multiple("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)
        if self.variant == "mac":
            check_multiple("segment_length", self.segment_length, "memory_chunk_size", self.memory_chunk_size)
        self._check_rope_parameters()

    def _check_rope_parameters(self) -> None:
        for name in ("rope_theta", "partial_rotary_factor"):
            value = self.rope_parameters.get(name)
            if not isinstance(value, int | float) or not (value > 0 or name == "partial_rotary_factor"):
                raise ValueError(f"`rope_parameters['{name}']` must be a number above 0, but is {value!r}.")
        if not 0 <= self.rope_parameters["partial_rotary_factor"] <= 1 or self.rotary_dim % 2:
            raise ValueError(
                "`rope_parameters['partial_rotary_factor']` must be between 0 and 1 and make an even share of "
                f"`head_dim` ({self.head_dim}), but is {self.rope_parameters['partial_rotary_factor']}."
            )


def _without_former_fields(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved config without the fields of former versions; removes `memory_hidden_step` from `given`.

    Raises ValueError for a memory that this version would read otherwise, with the way to convert it if there is one.
    """
    fixed, rule = given.pop("memory_hidden_step", None) == 0, saved.get("memory_update_rule")
    learns = rule == "delta" and saved.get("memory_depth", 1) > 1 and saved.get("memory_hidden_step", 0) != 0
    if learns and not fixed:  # they moved by less than 1 % while reading
        raise ValueError(
            "This checkpoint's memory has hidden layers that learn while reading, which this version of titans_hf does "
            "not have. Load it with `memory_hidden_step=0`, which fixes them as they were trained, and save it again."
        )
    is_paper = saved.get("memory_recurrence") == "paper"
    if rule == "chunk" and saved.get("memory_gates", "layer" if is_paper else "head") != (
        "layer" if is_paper else "head"
    ):
        raise ValueError(
            f"`memory_gates={saved['memory_gates']!r}` is a form of the memory that titans_hf no longer has."
        )
    if rule == "chunk" and (clip := saved.get("memory_error_clip", 1.0)) not in (None, 1.0):
        raise ValueError(
            f"`memory_error_clip` must be None or 1.0 in a saved config, but is {clip}: clips are |v| now."
        )
    if rule == "chunk" and "memory_error_clip" in saved:
        given.setdefault("memory_loss", "l2" if saved["memory_error_clip"] is None else "huber")
    former = {"memory_hidden_step", "memory_gates", "memory_error_clip"}
    former |= {"memory_kernel"} if saved.get("memory_kernel") == "fla" else set()
    return {name: x for name, x in saved.items() if name not in former}


def _check_names(kwargs: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError for an unknown keyword with a prefix of the memory's fields, and warns of any other that
    Transformers does not know. `names`: the fields.
    """
    for name in kwargs:
        if name in TRANSFORMERS_NAMES or name.startswith("_") or hasattr(PreTrainedConfig, name):
            continue
        similar = get_close_matches(name, names, 1)
        text = f"`{name}` is not a field of TitansConfig" + (f": is `{similar[0]}` meant?" if similar else ".")
        if name.startswith(PREFIX):
            raise ValueError(text)
        logger.warning_once(f"{text} It is kept as an attribute, and has no effect.")


def _rope_parameters(given: dict, partial_rotary_factor: float) -> dict:
    """Returns `given` with defaults for missing values. Raises ValueError for another `rope_type` than "default"."""
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type != "default":
        raise ValueError(
            f"`rope_parameters['rope_type']` must be 'default', but is {rope_type!r}: no distance exceeds a window or "
            "a segment, so that no frequency needs to be scaled."
        )
    return {"rope_type": rope_type, "partial_rotary_factor": partial_rotary_factor, **given}


def _check_range(name: str, value: Any, facts: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the field, unless a number is finite and in the range of the field's facts."""
    at_least, above, at_most = facts.get("at_least"), facts.get("above"), facts.get("at_most")
    if not isinstance(value, int | float) or (at_least is None and above is None):
        return
    low = value >= at_least if at_least is not None else above is not None and value > above  # False for nan
    if not low or math.isinf(value) or (at_most is not None and value > at_most):
        limits = f"at least {at_least}" if above is None else f"above {above}"
        limits = limits if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"`{name}` must be {limits}, but is {value}.")


def check_config(config: TitansConfig) -> None:
    """Raises ValueError for values that do not fit each other, since fields may have been set later. Warns of updates
    that can overshoot.
    """
    config.validate_architecture()
    if config.memory_max_lr > config.max_stable_lr:  # for example in a saved model whose rule or chunk was changed
        logger.warning_once(
            f"`memory_max_lr` ({config.memory_max_lr:g}) is above {config.max_stable_lr:g}, its limit and default with "
            f"memory_update_rule={config.memory_update_rule!r}, memory_depth={config.memory_depth} and chunks of "
            f"{config.memory_chunk_size}: steps can overshoot, and training can diverge."
        )


def check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raises ValueError, naming both fields, unless `value` is a multiple of `divisor`."""
    if value % divisor:
        raise ValueError(f"`{name}` ({value}) must be a multiple of `{divisor_name}` ({divisor}).")


TitansConfig.__doc__ = str(TitansConfig.__doc__).replace(
    "TABLE",
    "\n        ".join(
        f"{name}: {', '.join(f'{form} {x!r}' for form, x in row.items())}" for name, row in FORMS.items()
    ),
)
TitansConfig.register_for_auto_class()

__all__ = ["TitansConfig"]
