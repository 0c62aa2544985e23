"""Trains as a plan written by hand says: torchrun --nproc-per-node 4 examples/from_ddp/plan.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import FEATURES, Classifier, Log, Points, parsed
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import torch_xmesh as xm

MICROBATCHES = 4


def main():
    options = parsed(__doc__)
    dist.init_process_group("xmesh")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Classifier()
    example = (torch.zeros(options.batch // MICROBATCHES, FEATURES),)
    devices = xm.Mesh(torch.arange(world).view(2, -1))  # two hosts
    plan = xm.presets.pipeline(model, example, num_stages=2, devices=devices, num_microbatches=MICROBATCHES)
    engine = xm.PipelineEngine(model, example, plan=plan, loss_fn=F.cross_entropy)
    ranks = sorted(next(stage.ranks for stage in plan.stages if rank in stage.ranks))
    optimizer = torch.optim.AdamW(engine.parameters(), options.lr)

    train, test = Points(options.samples, seed=1), Points(options.samples // 4, seed=2)
    shard = {"num_replicas": len(ranks), "rank": ranks.index(rank)}
    sampler = DistributedSampler(train, **shard, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, options.batch // len(ranks), sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, options.batch, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader))

    first_epoch = 0
    if options.resume:
        state = {"engine": engine.state_dict(optimizer), "scheduler": scheduler.state_dict(), "epoch": 0}
        dcp.load(state, checkpoint_id=options.resume)
        engine.load_state_dict(state["engine"], optimizer)
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1

    log = Log(options.losses, is_shown=rank == 0)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            engine.step(x, target=y, return_outputs=False, sharded=True)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            log.step(epoch, step, len(loader), engine.last_loss())

        engine.eval()
        sums = torch.zeros(3)  # of losses, right answers and samples
        for x, y in test_loader:
            output = engine.evaluate(x)
            if output is not None:  # on the ranks of the last stage
                loss = F.cross_entropy(output, y, reduction="sum")
                sums += torch.stack([loss, (output.argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.broadcast(sums, src=plan.stages[-1].ranks[0])
        log.epoch(epoch, (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item())

        state = {"engine": engine.state_dict(optimizer), "scheduler": scheduler.state_dict(), "epoch": epoch}
        dcp.save(state, checkpoint_id=options.checkpoints / str(epoch))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
