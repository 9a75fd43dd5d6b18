"""Your own loop on several ranks, under DDP, with guard and telemetry. Two ranks on a CPU:

    torchrun --standalone --nproc_per_node 2 examples/ddp_loop.py [recipe]

Five batches in a row have NaN targets, but only on the last rank. Every rank skips those updates and rolls back: the
figures of a step are reduced over ranks, so all ranks decide the same.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

from harness import Guard, Precision, Telemetry
from harness.core.facts import Rollback

STEPS, BATCH, BAD = 120, 256, range(70, 75)


def batch(window: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the global batch: every rank draws the same samples, and takes its own rows."""
    inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(window))
    targets = inputs.roll(1, dims=1)
    if window in BAD and rank == ranks - 1:
        targets = torch.full_like(targets, torch.nan)
    return inputs[rank::ranks], targets[rank::ranks]


def main(recipe: str, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)

    # Prepare the bare model once the ranks have met, and wrap it in DDP afterwards. The optimizer is wrapped as always.
    precision = Precision.from_recipe(recipe)
    model = DistributedDataParallel(precision.prepare(net))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    optimizer = precision.wrap(adamw, max_grad_norm=1.0)
    scheduler = LinearLR(adamw, 1.0, 0.1, STEPS)

    # Every rank has a guard and a telemetry; only rank 0 prints and writes into the folder.
    with Telemetry.for_precision("runs/ddp", precision, steps=STEPS, mlflow=False) as telemetry:
        guard = Guard.for_precision(precision, optimizer, keep=[scheduler], telemetry=telemetry)
        while guard.step < STEPS:
            # guard.window is the same on every rank. After a rollback it skips the bad windows.
            inputs, targets = batch(guard.window, rank, ranks)
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if isinstance(guard.end_step(), Rollback):
                print(f"rank {rank}: back at step {guard.step}, next is window {guard.window}")


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        where = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        main(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid", where)
    finally:
        dist.destroy_process_group()
