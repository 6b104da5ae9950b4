"""The test classes of `run.py`, one per variant: transformers' mixins, and inputs that cross windows and segments."""

import copy
import inspect
import unittest
from unittest import mock

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_fsdp_mixin import FSDPTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.auto import modeling_auto
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

import titans_hf
from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.generation import test_utils as generation_tests

# The mixins look up the task of a class by its name in these tables, which lack models outside transformers.
modeling_auto.MODEL_MAPPING_NAMES["titans"] = "TitansModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["titans"] = "TitansForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["titans"] = "TitansForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["titans"] = "TitansForTokenClassification"
modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES["titans"] = "TitansForQuestionAnswering"
# The mixins look for `output_attentions` among the annotations of `forward`, which in the generic heads are strings.
for head in (GenericForSequenceClassification, GenericForTokenClassification, GenericForQuestionAnswering):
    inspect.unwrap(head.forward).__annotations__["kwargs"] = Unpack[TransformersKwargs]
# Distributed tests are switched on for a list of model types to save time; None is for all.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
# Gloo's processes need no core each.
test_fsdp_mixin._get_available_fsdp_workers = lambda: 8

SIZES = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)


class ModelTester:
    """The configuration and the input of a test class, by the names that the mixins look for."""

    batch_size, seq_length, is_training = 3, 11, True
    hidden_size, num_hidden_layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]
    num_attention_heads = SIZES["num_attention_heads"]

    def __init__(self, test: "CommonTests"):
        self.settings = SIZES | test.settings
        self.config_class = test.all_model_classes[0].config_class
        self.base_model_class, self.causal_lm_class = test.all_model_classes[:2]
        if test.key_length is not None:
            self.key_length = test.key_length

    def get_config(self):
        return self.config_class(**copy.deepcopy(self.settings))

    def prepare_config_and_inputs_for_common(self):
        shape = self.batch_size, self.seq_length
        inputs = {"input_ids": ids_tensor(shape, SIZES["vocab_size"]), "attention_mask": random_attention_mask(shape)}
        return self.get_config(), inputs


class CommonTests(
    ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, FSDPTesterMixin, TensorParallelTesterMixin
):
    settings = {}
    key_length = None  # columns of an attention map, where it has not one per token
    # The mixin runs this test only for files with a copyright year, which ours lack.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester(self)

    def test_config(self):
        ConfigTester(self, type(self.model_tester.get_config()), **self.model_tester.settings).run_common_tests()


class TitansTests(CommonTests):
    all_model_classes = (
        titans_hf.TitansModel,
        titans_hf.TitansForCausalLM,
        titans_hf.TitansForSequenceClassification,
        titans_hf.TitansForTokenClassification,
        titans_hf.TitansForQuestionAnswering,
    )
    variant = None

    @property
    def settings(self):
        return dict(
            variant=self.variant, sliding_window=5, segment_length=4, memory_chunk_size=2, num_persistent_tokens=2
        )

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self):
        """One window or segment without padding: the map of several, which follow each other, is put together after."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config.sliding_window = config.segment_length = 12
        return config, {"input_ids": inputs["input_ids"]}

    def setUp(self):
        """Lets the tests take a Titans cache, whose size is constant, for the static or the dynamic cache."""
        super().setUp()
        for name, is_static in (("StaticCache", True), ("DynamicCache", False)):
            replaced = mock.patch.object(generation_tests, name, titans_caches(is_static), create=True)
            replaced.start()
            self.addCleanup(replaced.stop)

    def _check_attentions_for_generate(
        self, batch_size, attentions, prompt_length, output_length, config, decoder_past_key_values
    ):
        """Expects `key_length` columns at every step: what attention reads does not grow with the text."""
        self.assertEqual(len(attentions), output_length - prompt_length)
        for step, maps in enumerate(attentions):
            is_single_token = step > 0 and decoder_past_key_values is not None
            num_tokens = 1 if is_single_token else prompt_length + step
            shape = (batch_size, config.num_attention_heads, num_tokens, self.key_length)
            self.assertEqual([weights.shape for weights in maps], [shape] * config.num_hidden_layers)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """Expects the columns to be counted, and a state that no longer grows once a window is full."""
        self.assertEqual((past_key_values.batch_size, past_key_values.get_seq_length()), (batch_size, seq_length))
        full = titans_hf.TitansCache(config)
        tokens = torch.ones(batch_size, min(int(seq_length), config.sliding_window), dtype=torch.long)
        self.all_model_classes[0](config)(tokens, cache=full)
        for layer, expected in zip(past_key_values.layers, full.layers, strict=True):
            self.assertEqual([x.shape for x in layer.tensors()], [x.shape for x in expected.tensors()])


def titans_caches(is_static: bool) -> type:
    """Returns a class for isinstance() alone: of the Titans caches whose step `generate()` compiles, or not."""

    class Caches(type):
        def __instancecheck__(cls, cache):
            return isinstance(cache, titans_hf.TitansCache) and cache.is_compileable == is_static

    return Caches("TitansCaches", (), {})


class TitansMacTest(TitansTests, unittest.TestCase):
    variant = "mac"
    key_length = 2 + 2 * 4  # persistent tokens, what is recalled for a segment, the segment


class TitansMagTest(TitansTests, unittest.TestCase):
    variant = "mag"
    key_length = 2 + 5  # persistent tokens and the window


class TitansMalTest(TitansTests, unittest.TestCase):
    variant = "mal"
    key_length = 2 + 5


class TitansLmmTest(TitansTests, unittest.TestCase):
    variant = "lmm"
    has_attentions = False
