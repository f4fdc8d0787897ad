"""The lab's networks: the paper's sizes, patches, positions, and what each cannot read."""

import pytest
import torch

import gft
from gft.errors import UsageError
from gft.lab import build, data, recipes, tables, train
from gft.lab.data.augment import middle
from gft.lab.energy.networks import network
from gft.lab.models import DNN, GPT, Llama, ResNet, ViT, vit
from gft.lab.models.llama import names_in_transformers
from gft.lab.models.resnet import Bottleneck, large_image_stem
from gft.layers import quantized_layers


def test_dnn_has_the_papers_parameters():
    with torch.device("meta"):
        model = DNN(784, 10)
    sizes = [layer.weight.numel() for layer in model.layers]
    assert sum(sizes) == 53_583_872  # the paper: 53.6M
    assert sizes[0] + sizes[-1] == 3_252_224  # the paper's FP32 part of the hybrid: 3.22M


def test_resnets_have_their_papers_parameters():
    with torch.device("meta"):
        small, large = ResNet(), ResNet(3, 1000, 64, (3, 4, 6, 3), Bottleneck, large_image_stem)
        seen = large.blocks(large.stem(torch.empty(2, 3, 224, 224)))
    assert sum(parameter.numel() for parameter in small.parameters()) == 11_173_962  # 11.2M, of the blocks 11.17M
    assert sum(parameter.numel() for parameter in large.parameters()) == 25_557_032  # 25.6M
    assert seen.shape == (2, 2048, 7, 7)


@pytest.mark.parametrize(("table", "layers", "fp32", "quantized"), [
    ("shakespeare-gpt", "none", 10_775_040, 0),  # 10.8M
    ("shakespeare-gpt", "mlp", 3_697_152, 7_077_888),  # 3.7M
    ("shakespeare-gpt", "blocks", 158_208, 10_616_832),  # 158.21K
    ("mnist-vit", "none", 37_869_578, 0),  # 37.87M
    ("mnist-vit", "blocks", 65_546, 37_748_736),  # 70K
    ("imagenette-vit", "mlp", 13_133_322, 25_165_824),  # the paper prints 13.23M
    ("imagenette-vit", "blocks", 525_834, 37_748_736),  # the paper prints 1.03M; neither agrees with its own 38.33M
])
def test_transformers_have_the_papers_parameters(table, layers, fp32, quantized):
    recipe = next(one for one in tables.recipes_of(table) if one.integers.layers == layers)
    assert network(recipe).counts == (fp32, quantized)


def test_models_refuse_data_they_cannot_read(small):
    for name, source in (("shakespeare-gpt-fp", "digits"), ("mnist-dnn-fp", "verses"), ("mnist-vit-fp", "digits")):
        with pytest.raises(UsageError, match="choose"):
            build.build_model(recipes.find(name), data.load(source))
    with pytest.raises(UsageError, match="patch=5"):
        build.build_model(small("mnist-vit-fp", "patch=5"), data.load("digits-images"))
    with pytest.raises(UsageError, match="heads=3"):
        build.build_model(small("shakespeare-gpt-fp", "heads=3"), data.load("verses"))
    with pytest.raises(UsageError, match="context"):
        GPT(9, context=4, width=8, depth=1, heads=1)(torch.zeros(1, 5, dtype=torch.long))


def test_vit_leaves_patches_out_in_training_alone():
    torch.manual_seed(0)
    model, whole = (ViT((1, 8, 8), 10, patch=2, width=16, depth=1, heads=2) for _ in range(2))
    model.drop_patches(0.75)
    whole.load_state_dict(model.state_dict())
    for one in (model, whole):
        torch.nn.init.normal_(one.head.weight, generator=torch.Generator().manual_seed(1))
    x, seen = torch.randn(3, 1, 8, 8), []
    for one in (model, whole):
        one.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    first, second = model(x), model(x)
    assert not torch.equal(first, second)  # other patches each time
    assert not torch.equal(first, whole(x))
    assert torch.equal(model.eval()(x), whole.eval()(x))
    model.drop_patches(0)
    assert torch.equal(model.train()(x), whole.train()(x))
    assert seen == [5, 5, 17, 17, 17, 17, 17]  # 4 of 16 patches, and the class token
    some = vit.some_of(6, 4, torch.zeros(5, 1, 1, 1))
    assert some.shape == (5, 4)
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in some.tolist())


def test_the_last_steps_may_see_every_patch(tmp_path, monkeypatch, small, run):
    seen, forward = [], ViT.forward

    def counting(model, images):
        seen.extend([model.seen_in_training] if model.training else [])
        return forward(model, images)

    monkeypatch.setattr(ViT, "forward", counting)
    recipe = small("mnist-vit-hybrid2-2bit", "patch_dropout=0.75", "whole_images=0.4", "steps=5")
    whole = (8 // recipe.model.patch) ** 2
    for progress in train.training(recipe, tmp_path / "run", device="cpu", checkpoint_every=1):
        if progress.step == 4:
            break  # stopped among the last
    assert seen == [whole // 4] * 3 + [whole]
    seen.clear()
    run(recipe, tmp_path / "run", resume=True)
    assert seen == [whole]


def test_patches_are_cut_where_a_convolution_would_see_them(monkeypatch):
    torch.manual_seed(0)
    model = ViT((2, 6, 6), 10, patch=2, width=8, depth=0, heads=2)
    model.drop_patches(0.5)
    convolution = torch.nn.Conv2d(2, 8, 2, 2)
    convolution.load_state_dict({"weight": model.patches.weight.view(8, 2, 2, 2), "bias": model.patches.bias})
    seen = torch.tensor([[7, 0, 3, 5], [8, 2, 1, 4]])
    monkeypatch.setattr(vit, "some_of", lambda *_: seen)
    tokens = []
    model.dropout.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0][:, 1:]))
    images = torch.randn(2, 6, 6, 2).permute(0, 3, 1, 2)  # channels last in memory
    model(images)
    model.eval()(images)
    some, whole = tokens
    torch.testing.assert_close(whole, convolution(images).flatten(2).transpose(1, 2) + model.positions[:, 1:])
    torch.testing.assert_close(some, torch.stack([row[places] for row, places in zip(whole, seen, strict=True)]))


def test_evaluation_sees_the_middle_alone(small):
    digits = data.load("digits-images")
    recipe, seen = small("mnist-vit-fp", "eval_crop=0.5", "eval_batch=100"), []
    model = build.build_model(recipe, digits)
    model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0]))
    value = train.evaluate(model, digits, "val", recipe)
    whole, labels = digits.normalised(digits.val[0]), digits.val[1]
    torch.testing.assert_close(torch.cat(seen), middle(whole, 0.5))
    assert value == pytest.approx(100 * (model(middle(whole, 0.5)).argmax(1) == labels).double().mean().item())


def test_positions_of_waves_tell_neighbours():
    side, width = 6, 16
    model = ViT((1, 12, 12), 10, patch=2, width=width, depth=1, heads=2, positions="waves")
    start = model.positions[0, 1:].detach()
    assert start.square().mean().sqrt().item() == pytest.approx(vit.POSITIONS_RMS)
    for row, column in ((0, 0), (2, 3), (5, 5)):
        angles = torch.tensor([place * 10000 ** (-n / 3) for place in (column, row) for n in range(4)]).view(2, 4)
        expected = torch.cat([part for one in angles for part in (one.sin(), one.cos())])
        assert torch.allclose(start[row * side + column], vit.POSITIONS_RMS * 2**0.5 * expected, atol=1e-6)
    apart = torch.cdist(start, start)
    right, above, two_right = apart[14, [15, 8, 16]].tolist()
    assert right == pytest.approx(above, rel=1e-4)
    assert right < two_right
    assert not torch.equal(model.positions, ViT((1, 12, 12), 10, patch=2, width=width, depth=1, heads=2).positions)
    with pytest.raises(UsageError, match="width that 4 divides"):
        ViT((1, 12, 12), 10, patch=2, width=6, depth=1, heads=2, positions="waves")
    with pytest.raises(UsageError, match="positions='circles': choose one of random, waves"):
        ViT((1, 12, 12), 10, patch=2, width=8, depth=1, heads=2, positions="circles")


def test_gpt_sees_no_later_character():
    torch.manual_seed(0)
    model = GPT(20, context=12, width=16, depth=2, heads=2).eval()
    tokens = torch.randint(20, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 20
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


# ---------------------------------------------------------------------------------------------------- Llama


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["all heads", "grouped queries"])
def test_llama_gives_the_logits_and_gradients_of_transformers(kv_heads):
    transformers = pytest.importorskip("transformers")
    ours = Llama(50, 24, 32, 2, 4, kv_heads, inner=72)
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=72, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=24,
                                      rms_norm_eps=1e-6, tie_word_embeddings=False, attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(config)
    for parameter in ours.parameters():  # norms too: ones would hide a norm that is left out
        torch.nn.init.normal_(parameter, std=0.3)
    names = names_in_transformers(ours)
    weights = {names[name]: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    assert not theirs.load_state_dict(weights).missing_keys
    tokens = torch.randint(50, (3, 20))
    mine, hers = ours(tokens), theirs(tokens).logits
    assert hers.std() > 0.2
    torch.testing.assert_close(mine, hers, rtol=1e-4, atol=1e-4)
    mine.square().mean().backward()
    hers.square().mean().backward()
    of_theirs = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, of_theirs[names[name]].grad, rtol=1e-3, atol=1e-5)


def test_llamas_body_becomes_integers_and_its_later_tokens_do_not_speak_to_earlier_ones():
    model = Llama(20, 8, 16, 2, 2)
    gft.quantize_(model, 2, lambda module, name: name.startswith("blocks."))
    assert len(quantized_layers(model)) == 2 * 7
    tokens = torch.randint(20, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 20
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3
    with pytest.raises(UsageError, match="9 tokens are more than"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(UsageError, match="kv_heads=3"):
        Llama(20, 8, 16, 1, 4, 3)
