"""A step replayed as a CUDA graph is the same step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import gft
from gft.capture import WARM_UP, on_the_host
from gft.lab import train
from gft.lab.models import DNN
from gft.lab.recipes import find

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def trained(capture: bool, rule: str, bits: int, memory: bool, sizes: str, steps: int = WARM_UP + 6):
    torch.manual_seed(0)
    model = gft.quantize_(DNN(24, 5, 72, 4), bits, lambda module, name: name != "layers.3", memory=memory).cuda()
    own = gft.GFT(gft.quantized(model), 0.3, rule, sizes=sizes, seed=3)
    optimizer = gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), fused=True, capturable=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss

    take = gft.Captured(step, optimizer) if capture else step
    losses = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        size = 40 if number == WARM_UP + 3 else 128  # a short batch in between
        losses.append(take(torch.randn(size, 24).cuda(), torch.randint(5, (size,)).cuda()).item())
        schedule.step()
    return model, own, losses


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "bits", "memory", "sizes"), [
    ("rounding", 4, True, "step"), ("rounding", 2, False, "step"), ("rounding", 4, False, "running"),
    ("topk", 3, False, "step")])
def test_replayed_steps_are_the_steps(rule, bits, memory, sizes):
    one, other = trained(False, rule, bits, memory, sizes), trained(True, rule, bits, memory, sizes)
    for a, b in zip(gft.quantized(one[0]), gft.quantized(other[0]), strict=True):
        assert torch.equal(a, b)
    assert one[2] == pytest.approx(other[2], rel=1e-4)
    assert one[1].flips() == other[1].flips() > 0
    states = [copy.deepcopy(part.state_dict()) for part in (one[1], other[1])]
    assert [state["param_groups"][0]["step"] for state in states] == [len(one[2])] * 2
    assert isinstance(states[1]["param_groups"][0]["lr"], float)


def test_optimizers_with_state_on_the_host_are_known():
    layer = torch.nn.Linear(3, 3)
    own = gft.GFT(gft.quantized(gft.quantize_(torch.nn.Sequential(torch.nn.Linear(3, 3)), bits=4)))
    adamw = torch.optim.AdamW(layer.parameters(), capturable=True)
    assert on_the_host(gft.Hybrid(own, adamw)) is None
    assert on_the_host(own) is None
    sgd = torch.optim.SGD(layer.parameters())
    assert on_the_host(gft.Hybrid(own, sgd)) is sgd


def test_on_a_cpu_the_step_is_taken_as_it_is():
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = gft.Captured(lambda x, y: F.cross_entropy(layer(x), y), optimizer)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    assert all(torch.equal(step(x, y), F.cross_entropy(layer(x), y)) for _ in range(WARM_UP + 3))


@needs_gpu
@pytest.mark.gpu
def test_an_optimizer_on_the_host_is_refused_with_the_mend():
    layer = torch.nn.Linear(3, 2).cuda()
    with pytest.raises(ValueError, match="capturable=True"):
        gft.Captured(lambda x, y: layer(x).sum(), torch.optim.AdamW(layer.parameters()))


@needs_gpu
@pytest.mark.gpu
def test_a_stopped_run_with_dropout_goes_on_to_the_same_bits(tmp_path):
    """The graph draws dropout's masks from where the checkpoint says the generator was."""
    recipe = find("digits-hybrid-4bit").changed(["dropout=0.3", "input_dropout=0.1", "steps=24"])

    def run(name: str, stop: int | None = None, resume: bool = False) -> dict:
        for told in train.training(recipe, tmp_path / name, device="cuda", resume=resume, checkpoint_every=WARM_UP + 7):
            if told.step == stop:
                return {}
        return load_file(tmp_path / name / "checkpoint" / "state.safetensors")

    run("stopped", stop=WARM_UP + 9)
    resumed, whole = run("stopped", resume=True), run("whole")
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


@needs_gpu
@pytest.mark.gpu
def test_a_graph_for_each_number_of_patches(tmp_path, monkeypatch):
    """A training that sees whole images at last goes on as it would without graphs."""
    recipe = find("mnist-vit-hybrid1-4bit-packed").changed(
        ["data=digits-images", "augment=blended", "width=32", "depth=2", "heads=2", "patch=2", "patch_dropout=0.75",
         "whole=0.4", "steps=120", "batch=32", "warmup=5", "precision=fp32", "compiled=false"])
    curves = []
    for host in (on_the_host, lambda optimizer: optimizer):
        monkeypatch.setattr(train, "on_the_host", host)
        told = train.training(recipe, tmp_path / str(len(curves)), device="cuda")
        curves.append([one.loss for one in told if one.loss is not None])
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert curves[0][-1] < curves[0][0]
