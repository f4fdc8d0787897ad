"""GGUF: what the file says is what the layers hold, and llama.cpp continues a text as the model does."""

import pytest
import torch
from export_models import TEXT, VOCABULARY, in_blocks, language_model, with_random_gains
from gguf_reading import GgufFile, divergence
from torch import nn

import gft
from gft.errors import UsageError
from gft.export.gguf import to_gguf
from gft.export.gguf_blocks import FORMATS
from gft.layers import quantized_layers

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
         "up_proj": "ffn_up", "down_proj": "ffn_down"}


def llama(**settings):
    return language_model("Llama", **settings)


# ---------------------------------------------------------------------------------------------------- the file


def weight_in(file, name, layer, heads):
    """A layer's weight as the file has it, in transformers' order of rows."""
    _, _, block, _, last = name.split(".")
    target = f"blk.{block}.{NAMES[last]}"
    weight = file.floats(f"{target}.weight") * file.floats(f"{target}.scale")
    if last in heads:
        weight = weight.view(heads[last], -1, 2, layer.columns).transpose(1, 2).reshape(weight.shape)
    return weight


@pytest.mark.parametrize(("bits", "memory", "gain", "ternary", "expected"), [
    (2, True, True, "TQ2_0", "TQ2_0"), (2, False, True, "TQ1_0", "TQ1_0"), (2, True, False, "Q2_0", "Q2_0"),
    (2, "half", True, "TQ2_0", "TQ2_0"),
    (3, False, False, "TQ2_0", "Q4_0"), (3, True, True, "TQ2_0", "Q4_0"), (4, True, False, "TQ2_0", "Q4_0"),
    (4, False, True, "TQ2_0", "Q4_0"), (6, True, False, "TQ2_0", "Q8_0"),
])
def test_every_weight_is_in_the_file_bit_for_bit(bits, memory, gain, ternary, expected, tmp_path):
    model = with_random_gains(gft.quantize_(llama(), bits, in_blocks, memory=memory, gain=gain))
    file = GgufFile(to_gguf(model, tmp_path / "model.gguf", ternary=ternary))
    assert file.settings["general.file_type"] == FORMATS[expected].file_type
    layers = quantized_layers(model)
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = weight_in(file, name, layer, {"q_proj": 4, "k_proj": 2})
        assert file.types[f"blk.{name.split('.')[2]}.{NAMES[name.split('.')[-1]]}.weight"] == expected
        number = layer.scale if not gain else layer.scale * layer.gain().detach()
        assert torch.equal(weight, layer.levels() * number)
        if bits == 2 or not gain:  # else float_weight multiplies one after the other, and rounds twice
            assert torch.equal(weight, layer.float_weight())
        assert weight.unique().numel() == 2**bits - 1  # every level occurs, so every level was tried
    assert torch.equal(file.floats("token_embd.weight"), model.model.embed_tokens.weight)
    assert torch.equal(file.floats("blk.1.ffn_norm.weight"), model.model.layers[1].post_attention_layernorm.weight)


@pytest.mark.parametrize(("bits", "ternary", "groups"), [(2, "TQ2_0", 1), (2, "Q2_0", 4), (4, "TQ2_0", 4)])
def test_scales_of_rows_and_groups_are_the_scales_of_blocks(bits, ternary, groups, tmp_path):
    model = with_random_gains(gft.quantize_(llama(), bits, in_blocks, gain=True))
    for layer in quantized_layers(model).values():
        layer.scale = (torch.rand(layer.rows, groups) + 0.5).half().float()
    file = GgufFile(to_gguf(model, tmp_path / "model.gguf", ternary=ternary))
    for name, layer in quantized_layers(model).items():
        scaled = layer.levels() * layer.scale.repeat_interleave(layer.columns // groups, 1)
        assert torch.equal(weight_in(file, name, layer, {"q_proj": 4, "k_proj": 2}), scaled * layer.gain().detach())


def test_floats_keep_their_type_unless_another_is_asked_for(tmp_path):
    model = gft.quantize_(llama().to(torch.bfloat16), 4, in_blocks)
    same = GgufFile(to_gguf(model, tmp_path / "same.gguf"))
    assert same.types["token_embd.weight"] == "BF16"
    assert same.types["output_norm.weight"] == "F32"
    assert torch.equal(same.floats("output.weight"), model.lm_head.weight.float())
    half = GgufFile(to_gguf(model, tmp_path / "half.gguf", dtype="F16"))
    assert half.types["token_embd.weight"] == "F16"


def test_a_file_has_the_size_of_its_bits(tmp_path):
    """Over 14 layers of 2 blocks, TQ2_0 takes 2.06 bits a weight and TQ1_0 1.69; the rest is the same."""
    model = gft.quantize_(llama(), 2, in_blocks)
    weights = sum(layer.rows * layer.columns for layer in quantized_layers(model).values())
    sizes = {kind: to_gguf(model, tmp_path / kind, ternary=kind).stat().st_size for kind in ("TQ2_0", "TQ1_0", "Q2_0")}
    assert sizes["TQ2_0"] - sizes["TQ1_0"] == weights * 12 // 256
    assert sizes["Q2_0"] - sizes["TQ1_0"] == weights * (18 * 4 - 54) // 256


# ---------------------------------------------------------------------------------------------------- llama.cpp


@pytest.mark.parametrize("settings", [
    {}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 20},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
], ids=lambda settings: " ".join(settings) or "plain")
def test_llama_cpp_computes_the_same_network(settings, tokenizer, tmp_path):
    """With levels and scales as they are but float32 products, nothing is left to differ but the order of sums. Rows of 48
    and 80 fit into no block, so all layers are written as F32."""
    model = llama(hidden_size=48, intermediate_size=80, initializer_range=0.2, **settings)
    model = with_random_gains(gft.quantize_(model, 4, in_blocks if settings else None, gain=True))
    path = to_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer, fallback="F32")
    _, _, kl = divergence(model, path, list(range(40, 80)), 20)
    assert kl.max() < 2e-6


@pytest.fixture(scope="module")
def trained(tokenizer):
    """(bits of attention, of the feed-forward part, memory) -> a Llama that has learnt a text by heart. One that has learnt
    nothing has near-ties at every place, which any rounding decides otherwise."""
    made = {}

    def train(attention, feed_forward, memory):
        if (attention, feed_forward) not in made:
            torch.manual_seed(0)
            model = llama().train()
            gft.quantize_(model, attention, lambda m, name: "self_attn" in name, memory=memory)
            gft.quantize_(model, feed_forward, lambda m, name: "mlp" in name, memory=memory)
            optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(gft.dense(model), lr=3e-3))
            text = torch.tensor(tokenizer(TEXT * 8)["input_ids"])
            for _ in range(30):
                x = torch.stack([text[start : start + 49] for start in torch.randint(0, len(text) - 49, (4,))])
                loss = nn.functional.cross_entropy(model(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            made[attention, feed_forward] = model.eval()
        return made[attention, feed_forward]

    return train


@pytest.mark.parametrize(("attention", "feed_forward", "memory", "ternary"), [
    (2, 2, True, "TQ2_0"), (2, 2, True, "TQ1_0"), (2, 2, True, "Q2_0"), (3, 4, False, "TQ2_0"),
])
def test_llama_cpp_writes_the_same_text(attention, feed_forward, memory, ternary, trained, tokenizer, tmp_path):
    """llama.cpp rounds activations to 8 bits before it multiplies them by integer weights; nothing else differs. Measured:
    KL 1.4e-6 in the mean over 200 places, 1.0e-4 at most."""
    model = trained(attention, feed_forward, memory)
    path = to_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer, ternary=ternary)
    theirs, ours, kl = divergence(model, path, tokenizer("The quick")["input_ids"], 200)
    assert tokenizer.decode(theirs).startswith(" brown fox jumps over the lazy dog.\nPack my box")
    assert theirs == ours
    assert kl.mean() < 1e-5
    assert kl.max() < 1e-3


def test_llama_cpp_reads_text_as_the_tokenizer_does(tokenizer, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = to_gguf(gft.quantize_(llama(), 2, in_blocks), tmp_path / "model.gguf", tokenizer=tokenizer)
    runtime = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in (TEXT, "it's 1984, we'll see  42\n\n\t foxes…", "<|endoftext|>The end"):
        assert runtime.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text)["input_ids"]
    assert runtime.token_eos() == tokenizer.eos_token_id


def test_without_a_tokenizer_llama_cpp_takes_token_numbers(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = to_gguf(gft.quantize_(llama(), 2, in_blocks), tmp_path / "model.gguf")
    runtime = llama_cpp.Llama(str(path), n_ctx=64, verbose=False)
    runtime.eval([5, 6, 7])
    assert runtime.n_vocab() == VOCABULARY
    assert runtime.token_eos() == -1


# ---------------------------------------------------------------------------------------------------- tokenizers


def bare_tokenizer(pre_tokenizer, **model):
    bare = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], **model))
    bare.pre_tokenizer = pre_tokenizer
    return bare


@pytest.mark.parametrize(("cut", "model", "expected"), [
    ("bytes", {}, "gpt-2"), ("digits", {}, "smollm"), ("llama 3", {"ignore_merges": True}, "llama-bpe"),
    ("qwen 2", {}, "qwen2"), ("llama 3", {}, None), ("spaces", {}, None),
])
def test_how_text_is_cut_is_told_in_the_words_of_llama_cpp(cut, model, expected, tmp_path, refuses):
    pieces, words = tokenizers.pre_tokenizers, r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    raw = pieces.ByteLevel(add_prefix_space=False, use_regex=False)
    cuts = {"bytes": pieces.ByteLevel(add_prefix_space=False),
            "digits": pieces.Sequence([pieces.Digits(individual_digits=True), pieces.ByteLevel(add_prefix_space=False)]),
            "llama 3": pieces.Sequence([pieces.Split(tokenizers.Regex(words + r"\p{N}{1,3}" + rest), "isolated"), raw]),
            "qwen 2": pieces.Sequence([pieces.Split(tokenizers.Regex(words + r"\p{N}" + rest), "isolated"), raw]),
            "spaces": pieces.Sequence([pieces.WhitespaceSplit(), raw])}
    quantized, bare = gft.quantize_(llama(), 2, in_blocks), bare_tokenizer(cuts[cut], **model)
    if expected is None:
        with refuses(UsageError, "cuts text"):
            to_gguf(quantized, tmp_path / "model.gguf", tokenizer=bare)
    pre = None if expected else "viking"
    file = GgufFile(to_gguf(quantized, tmp_path / "model.gguf", tokenizer=bare, pre=pre))
    assert file.settings["tokenizer.ggml.pre"] == (expected or pre)
    assert file.settings["tokenizer.ggml.merges"] == ["a b"]
    assert file.settings["tokenizer.ggml.tokens"][:4] == ["a", "b", "ab", "[PAD3]"]
    assert file.settings["tokenizer.ggml.token_type"][:4] == [1, 1, 1, 5]
    assert file.settings["tokenizer.ggml.eos_token_id"] == quantized.config.eos_token_id


def test_tokenizers_that_cannot_be_written_are_refused(tmp_path, refuses):
    model, bytes_only = gft.quantize_(llama(), 2, in_blocks), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "model.gguf"
    with refuses(UsageError, "only a BPE tokenizer with merges can be written"):
        to_gguf(model, path, tokenizer=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")))
    with refuses(TypeError, "is not a tokenizer"):
        to_gguf(model, path, tokenizer=str)
    with refuses(UsageError, "names no token that ends a text"):
        to_gguf(model, path, tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=bare_tokenizer(bytes_only)))
    with refuses(UsageError, "the tokenizer has 301 tokens"):
        many = {f"t{number}": number for number in range(298)} | {"a": 298, "b": 299, "ab": 300}
        bare = tokenizers.Tokenizer(tokenizers.models.BPE(many, [("a", "b")]))
        bare.pre_tokenizer = bytes_only
        to_gguf(model, path, tokenizer=bare)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, tiny_net, refuses):
    path = tmp_path / "model.gguf"
    with refuses(UsageError, "a TinyNet cannot be written; GGUF export takes causal language models"):
        to_gguf(tiny_net(), path)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=50))
    with refuses(UsageError, "a GPT2LMHeadModel cannot be written"):
        to_gguf(gpt, path)
    with refuses(UsageError, "no quantized layer in this model"):
        to_gguf(llama(), path)
    for setting in ("ternary", "dtype", "fallback"):
        with refuses(UsageError, f"{setting}='Q9': choose one of"):
            to_gguf(llama(), path, **{setting: "Q9"})
    with refuses(UsageError, "hidden_act='gelu'"):
        to_gguf(gft.quantize_(llama(hidden_act="gelu"), 2, in_blocks), path)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with refuses(UsageError, "'dynamic' cannot be written"):
        to_gguf(gft.quantize_(llama(rope_parameters=rope), 2, in_blocks), path)
    model = gft.quantize_(llama(), 2, in_blocks)
    model.model.layers[0].mlp.adapter = nn.Linear(4, 4)
    with refuses(UsageError, "model.layers.0.mlp.adapter is no part of llama.cpp's llama"):
        to_gguf(model, path)
    model = gft.quantize_(llama(), 2, in_blocks)
    model.model.layers[1].mlp.up_proj.scale.fill_(torch.inf)
    with refuses(UsageError, "up_proj has a scale or gain that is not finite"):
        to_gguf(model, path)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_fits_no_block_is_refused_with_what_would_fit(tmp_path, refuses):
    path, narrow = tmp_path / "model.gguf", gft.quantize_(llama(hidden_size=64, intermediate_size=96), 2, in_blocks)
    with refuses(UsageError, "rows of 64 weights do not divide into the blocks of 256 of TQ2_0; pass fallback='Q2_0'"):
        to_gguf(narrow, path)
    with refuses(UsageError, "down_proj: rows of 96 .* into the blocks of 64 of Q2_0; pass fallback='Q4_0'"):
        to_gguf(narrow, path, ternary="Q2_0")
    with refuses(UsageError, "fallback='F32'"):
        to_gguf(gft.quantize_(llama(hidden_size=48), 4, in_blocks), path)
    model = gft.quantize_(llama(), 2, in_blocks)
    layer = model.model.layers[0].self_attn.q_proj
    layer.scale = torch.ones(layer.rows, 2)
    with refuses(UsageError, "groups of 128 weights that share a scale do not divide into the blocks of 256"):
        to_gguf(model, path)
    layer.scale = torch.full((layer.rows, 1), 0.1)
    with refuses(UsageError, "scales that are not float16 numbers"):
        to_gguf(model, path)
    assert not list(tmp_path.iterdir())
    file = GgufFile(to_gguf(narrow, path, ternary="Q2_0", fallback="Q4_0"))
    assert [file.types[f"blk.0.{name}.weight"] for name in ("ffn_up", "ffn_down")] == ["Q2_0", "Q4_0"]
    weight = weight_in(file, "model.layers.0.mlp.down_proj", layer, {})
    assert torch.equal(weight, narrow.model.layers[0].mlp.down_proj.float_weight())
