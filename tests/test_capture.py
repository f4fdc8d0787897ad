"""A step replayed as a CUDA graph is the same step."""

import copy

import pytest
import torch
import torch.nn.functional as F

import gft
from gft.lab.capture import WARM_UP, Captured, can_capture
from gft.lab.models import DNN

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def trained(capture: bool, rule: str, bits: int, memory: bool, steps: int = WARM_UP + 6):
    torch.manual_seed(0)
    model = gft.quantize_(DNN(24, 5, 72, 4), bits, lambda module, name: name != "layers.3", memory=memory).cuda()
    own = gft.GFT(gft.quantized(model), 0.3, rule, seed=3)
    optimizer = gft.Hybrid(own, torch.optim.AdamW(gft.dense(model), fused=True, capturable=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss

    take = Captured(step, optimizer) if capture else step
    losses = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        size = 40 if number == WARM_UP + 3 else 128  # a short batch in between
        losses.append(take(torch.randn(size, 24).cuda(), torch.randint(5, (size,)).cuda()).item())
        schedule.step()
    return model, own, losses


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "bits", "memory"), [("rounding", 4, True), ("rounding", 2, False), ("topk", 3, False)])
def test_replayed_steps_are_the_steps(rule, bits, memory):
    one, other = trained(False, rule, bits, memory), trained(True, rule, bits, memory)
    for a, b in zip(gft.quantized(one[0]), gft.quantized(other[0]), strict=True):
        assert torch.equal(a, b)
    assert one[2] == pytest.approx(other[2], rel=1e-4)
    assert one[1].flips() == other[1].flips() > 0
    states = [copy.deepcopy(part.state_dict()) for part in (one[1], other[1])]
    assert [state["param_groups"][0]["step"] for state in states] == [len(one[2])] * 2
    assert isinstance(states[1]["param_groups"][0]["lr"], float)


def test_only_optimizers_known_to_stay_on_the_gpu_are_captured():
    layer = torch.nn.Linear(3, 3)
    assert not can_capture(gft.Hybrid(torch.optim.SGD(layer.parameters())), torch.device("cuda"))
    assert can_capture(gft.Hybrid(torch.optim.AdamW(layer.parameters())), torch.device("cuda"))
    assert not can_capture(gft.Hybrid(torch.optim.AdamW(layer.parameters())), torch.device("cpu"))
