"""The tokenizer of DNA: one token per base."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eval.dna.sequences import BASES

PAD, END = "[PAD]", "[EOS]"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of A, C, G, T and N (also in small letters; anything else is N) that ends a sequence with
    [EOS]; padding is on the right.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, END, *BASES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="N"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(base.lower(), base) for base in BASES])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", special_tokens=[(END, vocabulary[END])])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )
