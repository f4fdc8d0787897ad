"""layers/attention.py: QuantMultiheadAttention against nn.MultiheadAttention, alone and inside torch's transformers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gft
from gft.layers import quantized_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning")

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])  # (batch, keys)

# name -> (arguments of the layer, arguments of the call); queries (5), keys (5), batch 3, features 12
CASES = {
    "plain": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "weights of each head": ({"batch_first": True}, {"average_attn_weights": False}),
    "boolean mask": ({}, {"attn_mask": CAUSAL.isinf()}),
    "float mask, causal": ({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "causal with weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "a mask for each head": ({}, {"attn_mask": torch.randn(12, 5, 5), "need_weights": False}),
    "padding": ({"batch_first": True}, {"key_padding_mask": PADDING, "need_weights": False}),
    "padding, float": ({}, {"key_padding_mask": torch.randn(3, 5)}),
    "padding and mask": ({}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL.isinf(), "need_weights": False}),
    "extra tokens": ({"add_bias_kv": True, "add_zero_attn": True, "bias": False}, {"attn_mask": CAUSAL}),
    "extra tokens, padding": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING,
                                                                             "need_weights": False}),
}


def inputs(batch_first: bool, kdim: int = 12, vdim: int = 12) -> list[torch.Tensor]:
    shape = (3, 5) if batch_first else (5, 3)
    return [torch.randn(*shape, dim) for dim in (12, kdim, vdim)]


def both(**arguments) -> tuple[nn.MultiheadAttention, gft.QuantMultiheadAttention]:
    layer = gft.QuantMultiheadAttention(12, 4, bits=3, **arguments)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return layer.to_float(), layer


def check_same(plain: nn.Module, layer: nn.Module, xs: list[torch.Tensor], **call) -> None:
    results = []
    for module in (plain, layer):
        own = [x.clone().requires_grad_() for x in xs]
        y, weights = module(*own, **call)
        (y.square().sum() + (0 if weights is None else weights.square().sum())).backward()
        results.append((y, weights, *(x.grad for x in own)))
    for wanted, found in zip(*results, strict=True):
        assert (wanted is None) == (found is None)
        if wanted is not None:
            assert wanted.shape == found.shape
            assert torch.allclose(wanted, found, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*has no optimizer:UserWarning", "ignore:.*mismatched:UserWarning")
def test_attention_is_the_float_layer_it_stands_for(case):
    arguments, call = CASES[case]
    plain, layer = both(**arguments)
    assert type(plain) is nn.MultiheadAttention
    xs = inputs(arguments.get("batch_first", False))
    check_same(plain, layer, xs, **call)
    check_same(plain, layer, [xs[0], xs[1], xs[1]], **call)
    x = xs[0]
    with torch.no_grad():
        wanted, found = plain.eval()(x, x, x, **call), layer.eval()(x, x, x, **call)
    assert torch.allclose(wanted[0], found[0], atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*has no optimizer:UserWarning")
def test_attention_takes_other_sizes_and_unbatched_input():
    plain, layer = both(kdim=7, vdim=9, batch_first=True)
    check_same(plain, layer, inputs(True, 7, 9))
    query, key, value = torch.randn(4, 12), torch.randn(6, 7), torch.randn(6, 9)
    check_same(plain, layer, [query, key, value], key_padding_mask=torch.arange(6) > 3)
    check_same(plain, layer, [query, key, value], need_weights=False, attn_mask=torch.randn(4, 4, 6))


def test_attention_drops_out_in_training_only():
    _, layer = both(dropout=0.5)
    x = torch.randn(5, 3, 12)
    for need_weights in (True, False):
        with torch.no_grad():
            assert not torch.equal(layer.train()(x, x, x, need_weights=need_weights)[0], layer(x, x, x)[0])
            first, second = (layer.eval()(x, x, x, need_weights=need_weights)[0] for _ in range(2))
            assert torch.equal(first, second)


def test_attention_refuses_what_it_cannot_do(refuses):
    _, layer = both()
    x = torch.randn(5, 3, 12)
    with refuses(ValueError, r"is_causal=True.*give the mask"):
        layer(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(2, 12), torch.randn(3, 12)])
    with refuses(ValueError, "nested"):
        layer(nested, nested, nested)


def test_quantize_takes_attention_apart_and_dequantize_puts_it_together():
    torch.manual_seed(1)
    model = nn.ModuleDict({"self": nn.MultiheadAttention(16, 2, batch_first=True), "norm": nn.LayerNorm(16),
                           "cross": nn.MultiheadAttention(16, 2, kdim=6, vdim=5, add_bias_kv=True)}).eval()
    nn.init.normal_(model["self"].in_proj_bias)
    plain = copy.deepcopy(model)
    gft.quantize_(model, bits=8)
    assert [type(model[name]) for name in ("self", "cross")] == [gft.QuantMultiheadAttention] * 2
    assert len(quantized_layers(model)) == 8
    assert not model["cross"].training
    assert model["cross"].bias_k in set(gft.dense(model))
    x, key, value = torch.randn(3, 5, 16), torch.randn(4, 5, 6), torch.randn(4, 5, 5)
    y, crossed = model["self"](x, x, x)[0], model["cross"](x, key, value)[0]
    assert torch.allclose(y, plain["self"](x, x, x)[0], atol=0.05)
    gft.dequantize_(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert torch.allclose(model["self"](x, x, x)[0], y, atol=1e-5)
    assert torch.allclose(model["cross"](x, key, value)[0], crossed, atol=1e-5)

    bare = gft.quantize_(nn.Sequential(nn.MultiheadAttention(16, 2)), bias=False)
    assert not any("bias" in name for name, _ in bare.named_parameters())
    assert gft.dequantize_(bare)[0].in_proj_bias is None


def test_quantize_refuses_a_model_that_is_one_attention(refuses):
    with refuses(ValueError, r"gft\.QuantMultiheadAttention\.from_float"):
        gft.quantize_(nn.MultiheadAttention(8, 2))


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm after", "norm first"])
def test_a_whole_transformer_trains_and_evaluates(norm_first):
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    gft.quantize_(model, bits=4)
    assert gft.summary(model).share > 0.9
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.1), torch.optim.AdamW(gft.dense(model), lr=2e-3))
    source, target = torch.randn(12, 6, 16), torch.randn(12, 5, 16)
    wanted = source[:, :5].roll(1, 0)
    losses = []
    for _ in range(25):
        loss = F.mse_loss(model(source, target, tgt_mask=CAUSAL, tgt_is_causal=True), wanted)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]
    assert all(int(optimizer.optimizers[0].state[weight]["flips"]) > 0 for weight in gft.quantized(model))

    # At inference torch looks at its layers' weights for a fused kernel and for nested tensors.
    model.eval()
    plain = gft.dequantize_(copy.deepcopy(model))
    assert type(plain.encoder.layers[0].self_attn) is nn.MultiheadAttention
    padding = torch.arange(6).expand(12, 6) >= 4
    for mask in (None, padding):
        with torch.no_grad():
            y = model(source, target, src_key_padding_mask=mask, memory_key_padding_mask=mask, tgt_mask=CAUSAL)
        slow = plain(source.clone().requires_grad_(), target, src_key_padding_mask=mask, memory_key_padding_mask=mask,
                     tgt_mask=CAUSAL)
        assert torch.allclose(y, slow, atol=1e-5)


def test_one_graph_holds_attention():
    weights = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model, x = gft.QuantMultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
        optimizer = gft.GFT(gft.quantized(model), lr=1.0)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x, x, x)[0].square().sum().backward()
        optimizer.step()
        assert optimizer.flips() > 0
        weights.append([weight.clone() for weight in gft.quantized(model)])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
