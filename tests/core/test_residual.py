"""Which layers add to a residual stream, and that they move by less the more of them there are."""

import copy

import pytest
import torch
from torch import nn

import gft
from gft.errors import UsageError
from gft.layers.residual import count_branches


class Block(nn.Module):
    """Attention and an MLP around a stream of 8, by layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)


class Parts(nn.Module):
    """The same as two modules, one layer for queries, keys and values."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.norm = nn.RMSNorm(width)


def model_of(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict({"embed": nn.Linear(5, 8), "blocks": nn.ModuleList(blocks), "head": nn.Linear(8, 5)})


def test_layers_that_end_a_branch_of_like_blocks_add_to_the_stream():
    assert count_branches(model_of(Block(), Block(), Block())) == {
        f"blocks.{number}.{name}": 6 for number in range(3) for name in ("out", "down")}
    assert count_branches(model_of(Parts(), Parts())) == {
        f"blocks.{number}.{name}": 4 for number in range(2) for name in ("attention.out", "mlp.2")}


@pytest.mark.parametrize("attention", [
    {"out": nn.Linear(8, 8), "qkv": nn.Linear(8, 24)},  # Phi-3
    {"q": nn.Linear(8, 16), "k": nn.Linear(8, 8), "v": nn.Linear(8, 8), "out": nn.Linear(16, 8)}],  # Qwen3 of 0.6B
    ids=["output first", "keys as wide as the stream"])
def test_of_attention_its_output_alone_adds(attention):
    blocks = [Parts(), Parts()]
    for block in blocks:
        block.attention = nn.ModuleDict(copy.deepcopy(attention))
    assert list(count_branches(nn.ModuleList(blocks))) == ["0.attention.out", "0.mlp.2", "1.attention.out", "1.mlp.2"]


def test_each_stage_of_a_model_is_a_stream_of_its_own():
    stages = nn.ModuleList(nn.ModuleDict({"blocks": nn.ModuleList(Parts(width) for _ in range(count))})
                           for width, count in ((8, 2), (16, 3)))
    found = count_branches(stages)
    assert (found["0.blocks.0.mlp.2"], found["1.blocks.2.attention.out"], len(found)) == (4, 6, 10)


@pytest.mark.parametrize("model", [
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), model_of(Block()),
    nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), nn.Linear(8, 8),
    nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3))],
    ids=["plain layers", "one block", "convolutions", "one layer", "heads without norms"])
def test_where_no_blocks_repeat_nothing_is_taken_for_a_stream(model):
    assert not count_branches(model)


def test_torchs_own_transformer_and_its_twin_are_read_alike():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2, enable_nested_tensor=False)
    expected = {f"layers.{number}.{name}": 4 for number in range(2) for name in ("self_attn.out_proj", "linear2")}
    assert count_branches(model) == expected
    assert count_branches(gft.quantize_(model)) == expected


def test_quantize_tells_layers_and_counts_branches_that_stay_float():
    model = gft.quantize_(model_of(Parts(), Parts()), filter_fn=lambda module, name: ".mlp." in name)
    told = {name: layer.branches for name, layer in model.named_modules() if isinstance(layer, gft.QuantLinear)}
    assert told == {"blocks.0.mlp.0": None, "blocks.0.mlp.2": 4, "blocks.1.mlp.0": None, "blocks.1.mlp.2": 4}
    assert "branches=4" in repr(model)


def test_what_a_user_sets_stays():
    model = gft.quantize_(model_of(Parts(), Parts()))
    layer = model.get_submodule("blocks.0.mlp.2")
    layer.branches = 1
    gft.quantized(model)
    assert layer.branches == 1
    for wrong in (0, -2, 1.5, True, "4"):
        with pytest.raises(UsageError, match="branches="):
            layer.branches = wrong


@pytest.mark.parametrize("settings", [{}, {"memory": False}], ids=["memory", "packed"])
def test_a_layer_that_adds_moves_less_where_more_than_twelve_do(settings):
    ends = []
    for branches in (None, 12, 48):
        torch.manual_seed(0)
        layer = gft.QuantLinear(64, 96, 4, **settings)
        layer.branches = branches
        start = layer.storage.values(layer.qweight.detach(), 64).double()
        optimizer = gft.GFT([layer.qweight], lr=0.4, rule=gft.Rounding(threshold=0.0))
        layer(torch.randn(50, 64)).square().sum().backward()
        optimizer.step()
        moved = layer.storage.values(layer.qweight.detach(), 64).double() - start
        ends.append(moved.abs().sum().item())
    assert ends[0] == ends[1]
    assert ends[0] / ends[2] == pytest.approx(4.0, rel=0.25)
