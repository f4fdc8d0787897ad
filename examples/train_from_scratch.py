"""Train a small GPT with 2-bit weights from scratch, in a plain loop. It reads this file, character by character.

    python examples/train_from_scratch.py --steps 200
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gft

CONTEXT, WIDTH, HEADS = 64, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bits", type=int, default=2, help="2 to 8")
    settings = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    text = Path(__file__).read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text], device=device)

    model = GPT(len(characters))
    gft.quantize_(model, bits=settings.bits, filter_fn=lambda module, name: name.startswith("blocks."))
    model.to(device)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model), lr=0.2),                 # attention and MLPs: integers
                           torch.optim.AdamW(gft.dense(model), lr=3e-3))          # embeddings, norms, biases, head
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)

    losses = []
    for step in range(1, settings.steps + 1):
        starts = torch.randint(len(data) - CONTEXT, (16, 1), device=device)
        windows = data[starts + torch.arange(CONTEXT + 1, device=device)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        losses.append(loss.detach())
        if step == 1 or step % 25 == 0 or step == settings.steps:
            print(f"step {step:4d}  loss {torch.stack(losses).mean():.3f} nats a character")
            losses.clear()

    print("levels of a weight:", model.blocks[0].up.levels().unique().tolist())


if __name__ == "__main__":
    main()
