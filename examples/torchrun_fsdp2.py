"""Train a model whose integer weights are shared out over processes, by torch's fully_shard (FSDP2; torch 2.12 or newer).

    torchrun --standalone --nproc-per-node 2 examples/torchrun_fsdp2.py --steps 100   gloo on CPUs, NCCL on GPUs
    python examples/torchrun_fsdp2.py                                                 the same with one process
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import gft


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    settings = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    if "RANK" in os.environ:  # torchrun says who and where the others are
        dist.init_process_group("nccl" if on_gpus else "gloo")
    else:
        dist.init_process_group("nccl" if on_gpus else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # fully_shard takes from each rank its own rows, so all must start alike
    model = nn.Sequential(nn.Linear(20, 64), Block(64), Block(64), nn.Linear(64, 5)).to(device)
    gft.quantize_(model, bits=4)  # before fully_shard,
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)),  # and the optimizers after it
                           torch.optim.AdamW(gft.dense(model), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)

    teacher = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    for step in range(1, settings.steps + 1):
        x = torch.randn(64, 20, device=device)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        if dist.get_rank() == 0 and (step == 1 or step % 50 == 0 or step == settings.steps):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)

    # Checkpoints are torch's own (docs/scaling.md). Here each rank puts its rows together with the others'.
    weights = torch.cat([weight.full_tensor().flatten() for weight in gft.quantized(model)])
    own = sum(weight.to_local().nbytes for weight in gft.quantized(model))
    first = weights.clone()
    dist.broadcast(first, src=0)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} has the first one's weights: {torch.equal(weights, first)}; "
          f"it keeps {own:,} of {weights.nbytes:,} bytes")
    dist.barrier()  # gloo's threads let go of the last tensors before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
