"""Take a trained float network to 2-bit weights: round it by GPTQ, fine-tune the integers, pack them.

    python examples/finetune_vision.py --steps 300                        a small CNN on scikit-learn's 8 x 8 digits
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gft


def cnn() -> nn.Sequential:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*block(1, 16, 1), *block(16, 32, 2), *block(32, 32, 2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], steps: int) -> None:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model.train()
    for _ in range(steps):
        some = torch.randint(len(data[0]), (64,), device=data[0].device)
        loss = F.cross_entropy(model(data[0][some]), data[1][some])
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return (model.eval()(data[0]).argmax(1) == data[1]).float().mean().item()


def stored_bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in model.state_dict().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of the float training, and again of the fine-tuning")
    parser.add_argument("--bits", type=int, default=2, help="2 to 8")
    settings = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, device=device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(device)
    training, test = ((x[part], y[part]) for part in (order[:1437], order[1437:]))

    model = cnn().to(device)
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), training, settings.steps)
    print(f"float: accuracy {accuracy(model, test):.1%}, {stored_bytes(model):,} bytes")

    # GPTQ runs some batches through the network, and rounds so that its layers' outputs change least.
    batches = training[0][:512].split(128)
    gft.quantize_(model, bits=settings.bits, scales="row", init=gft.GPTQ(batches))
    print(f"rounded to {settings.bits} bits: accuracy {accuracy(model, test):.1%}")

    integers = gft.GFT(gft.quantized(model), lr=0.02)  # a fifth of the rate for a start from scratch
    train(model, gft.Hybrid(integers, torch.optim.AdamW(gft.dense(model), lr=1e-3)), training, settings.steps)
    print(f"fine-tuned: accuracy {accuracy(model, test):.1%}, {stored_bytes(model):,} bytes")

    integers.release()  # training is over: the bits that remember unspent votes can go
    gft.pack_(model)
    print(f"packed: accuracy {accuracy(model, test):.1%}, {stored_bytes(model):,} bytes\n\n{gft.summary(model)}")


if __name__ == "__main__":
    main()
