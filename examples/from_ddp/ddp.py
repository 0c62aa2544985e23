"""Trains with DistributedDataParallel: torchrun --nproc-per-node 4 examples/from_ddp/ddp.py"""

import torch
import torch.distributed as dist
from task import Classifier, Log, Points, parsed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    options = parsed(__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)

    train, test = Points(options.samples, seed=1), Points(options.samples // 4, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, options.batch // world, sampler=sampler, drop_last=True)
    test_sampler = DistributedSampler(test, num_replicas=world, rank=rank, shuffle=False)
    test_loader = DataLoader(test, options.batch // world, sampler=test_sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader))

    first_epoch = 0
    if options.resume:
        state = torch.load(options.resume / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1

    log = Log(options.losses, is_shown=rank == 0)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            log.step(epoch, step, len(loader), mean.item())

        model.eval()
        sums = torch.zeros(3)  # of losses, right answers and samples
        for x, y in test_loader:
            with torch.no_grad():
                output = model(x)
            loss = F.cross_entropy(output, y, reduction="sum")
            sums += torch.stack([loss, (output.argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(sums)
        log.epoch(epoch, (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item())

        path = options.checkpoints / str(epoch)
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"scheduler": scheduler.state_dict(), "epoch": epoch}, path / "state.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
