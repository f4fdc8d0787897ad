"""What the tests of several formats share."""

import pytest
from export_models import TEXT, VOCABULARY


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE, of a few words less than `language_model` has."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    bare.train_from_iterator([TEXT] * 4, tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|endoftext|>")
