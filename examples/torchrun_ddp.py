"""Train on several processes: gft.GFT sums integer votes, DistributedDataParallel the gradients of the float rest.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py --steps 100     gloo on CPUs, NCCL on GPUs
    python examples/torchrun_ddp.py                                                   the same with one process
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gft


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

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    gft.quantize_(model, bits=4)
    model.to(device)
    # DDP hands the first rank's weights to all; integers ask for no gradient, so it leaves them alone afterwards.
    wrapped = DistributedDataParallel(model)
    optimizer = gft.Hybrid(gft.GFT(gft.quantized(model)), torch.optim.AdamW(gft.dense(model), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=settings.steps)

    teacher = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    for step in range(1, settings.steps + 1):
        x = torch.randn(64, 20, device=device)
        loss = F.cross_entropy(wrapped(x), (x @ teacher).argmax(1))
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        if dist.get_rank() == 0 and (step == 1 or step % 50 == 0 or step == settings.steps):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)

    weights = torch.cat([layer.levels().flatten() for layer in model if isinstance(layer, gft.QuantLinear)])
    first = weights.clone()
    dist.broadcast(first, src=0)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} has the first one's weights: {torch.equal(weights, first)}")
    # DDP before its process group. The last to hold a group waits for gloo's threads; DDP does so with Python's lock in
    # hand, for which a thread that still has to let go of a tensor then waits for ever (pytorch#56297).
    del wrapped
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
