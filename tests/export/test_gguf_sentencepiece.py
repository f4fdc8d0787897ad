"""Tokenizers in the manner of SentencePiece: llama.cpp makes the same tokens of a text by scores as they do by merges."""

import json
import random
import warnings

import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
import torch
import transformers
from export_models import in_blocks, language_model
from gguf_reading import GgufFile
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

import gft
from gft.errors import UsageError
from gft.export.gguf import to_gguf
from gft.export.gguf_sentencepiece import BYTES

TEXT = "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs!\n"
MORE = "the then them they there, this that those   these; other mother brother, a café, naïve. 1984 and 42"
ODD = [TEXT, MORE, "naïve “quotes” — 東京 🦊🏽\u200d❤", "tabs\tand\n\n\nlines  two   three", "it's 1984", "▁",
       "</s>The end<s> again"]
SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
VOCABULARY = 480


def train_tokenizer(normalizer=None, pre_tokenizer=None, alphabet=BYTES):
    """A BPE tokenizer of some text, whose bytes are tokens of the model and not added ones, as in Llama 2's."""
    special = ["<unk>", "<s>", "</s>"]
    bare = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bare.normalizer, bare.pre_tokenizer = normalizer, pre_tokenizer
    bare.train_from_iterator([TEXT, MORE], trainers.BpeTrainer(vocab_size=VOCABULARY - 10, show_progress=False,
                                                               special_tokens=special + alphabet))
    settings = json.loads(bare.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] in special]
    bare = Tokenizer.from_str(json.dumps(settings))
    bare.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    bare.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace(scheme, split=False):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


@pytest.fixture(scope="module")
def model():
    return gft.quantize_(language_model("Llama", vocab_size=VOCABULARY), 2, in_blocks)


def random_texts(count):
    """Pieces of words that merges can join in several ways."""
    draw = random.Random(0)
    pieces = ["the", "th", "en", "e", "o", "ther", "mo", "▁", "ov", "er", "ox", "qu", "i", "ck", "é", "🦊", " ", "  ", "."]
    return ["the" + "".join(draw.choices(pieces, k=12)) for _ in range(count)]


@pytest.mark.parametrize(("settings", "prefix", "warns"), [
    ({"normalizer": SPACES}, True, False),
    ({"normalizer": normalizers.Replace(" ", "▁")}, False, False),
    ({"pre_tokenizer": metaspace("first")}, True, True),
    ({"pre_tokenizer": metaspace("always", split=True)}, True, True),
    ({"pre_tokenizer": metaspace("never")}, False, False),
], ids=["as Llama 2", "no prefix", "as transformers 5", "cut at spaces", "no prefix by Metaspace"])
def test_llama_cpp_reads_odd_texts_as_the_tokenizer_does(settings, prefix, warns, model, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = train_tokenizer(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = to_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)
    assert any("one more space" in str(warning.message) for warning in caught) == warns
    file = GgufFile(path)
    assert file.settings["tokenizer.ggml.model"] == "llama"
    assert file.settings["tokenizer.ggml.add_space_prefix"] == prefix
    assert file.settings["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # unknown, two control tokens, a byte
    runtime = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    texts = [text for text in ODD + random_texts(200) if not warns or not text.startswith(("▁", "<"))]  # it told of those
    used = set()
    for text in texts:
        expected = tokenizer(text)["input_ids"]
        used.update(expected)
        assert runtime.tokenize(text.encode(), add_bos=True, special=True) == expected, text
    assert len([number for number in used if number < 259]) > 10  # bytes
    assert len([number for number in used if number >= 259]) > 40
    assert (runtime.token_bos(), runtime.token_eos()) == (1, 2)


def test_llama_cpp_writes_the_same_text_after_a_prompt(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = train_tokenizer(pre_tokenizer=metaspace("always", split=True))  # words, so that a prompt is like the text
    network = language_model("Llama", vocab_size=VOCABULARY).train()
    gft.quantize_(network, 4, in_blocks)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(network)), torch.optim.AdamW(gft.dense(network), lr=3e-3))
    text = torch.tensor(tokenizer(TEXT * 8)["input_ids"])
    for _ in range(40):
        x = torch.stack([text[start : start + 49] for start in torch.randint(0, len(text) - 49, (4,))])
        x[0] = text[:49]
        loss = nn.functional.cross_entropy(network(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    prompt = "The quick"
    ours = network.eval().generate(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), do_sample=False,
                                   max_new_tokens=40, pad_token_id=0)[0]
    ours = tokenizer.decode(ours, skip_special_tokens=True)
    assert ours.startswith("The quick brown fox jumps over the lazy dog.\nPack")
    with pytest.warns(UserWarning, match="one more space"):
        path = to_gguf(network, tmp_path / "model.gguf", tokenizer=tokenizer)
    runtime = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False)
    theirs = runtime(prompt, max_tokens=40, temperature=0)["choices"][0]["text"]
    assert prompt + theirs == ours


def test_what_scores_cannot_say_is_refused(model, tmp_path, refuses):
    path = tmp_path / "model.gguf"

    def refused(says, tokenizer, **settings):
        with refuses(UsageError, says):
            to_gguf(model, path, tokenizer=tokenizer, **settings)

    refused("no token for some bytes", train_tokenizer(SPACES, alphabet=BYTES[:200]))
    refused("normalizes or cuts texts", train_tokenizer(normalizers.NFKC(), metaspace("first")))
    refused("normalizes or cuts texts", train_tokenizer(SPACES, pre_tokenizers.Whitespace()))
    refused("pre='llama-bpe': a tokenizer with byte_fallback cuts no text", train_tokenizer(SPACES), pre="llama-bpe")
    good = json.loads(train_tokenizer(SPACES).backend_tokenizer.to_str())

    def changed(change):
        settings = json.loads(json.dumps(good))
        change(settings)
        return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(settings)),
                                                    eos_token="</s>")

    def unmade(settings):  # a token that no merge makes, but two tokens together
        settings["model"]["vocab"]["qz"] = 470

    def of_bytes(settings):
        settings["model"]["vocab"]["<0x00><0x01>"] = 470
        settings["model"]["merges"].append(["<0x00>", "<0x01>"])

    def across_words(settings):
        settings["normalizer"], settings["pre_tokenizer"] = None, {"type": "Metaspace", "replacement": "▁",
                                                                   "prepend_scheme": "always", "split": True}
    refused("do not make its token 'qz', and llama.cpp would", changed(unmade))
    refused("merges bytes", changed(of_bytes))
    refused("has the token '.*', which llama.cpp would make of two words", changed(across_words))
    assert not path.exists()


def test_a_token_added_later_is_taken_out_of_a_text_first(model, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = train_tokenizer(SPACES)
    tokenizer.add_tokens([AddedToken("foxes", normalized=False), AddedToken("<|user|>", special=True, normalized=False)])
    path = to_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)
    runtime = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in ("the foxes jump", "<|user|>the fox"):
        assert runtime.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text)["input_ids"]
