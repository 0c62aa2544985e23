"""A Llama of transformers in two stages on one machine: cut by `split_at`, handed over as ready stage modules, and in
torch.distributed.pipelining with the same modules; steps of all three in turn.

The ready modules are what a person writes by hand for such a model: embedding, rotary table and the first half of the
layers; then the other half, norm and head. `#wrong` counts the elements of the first step's gradients that are off from
one process by more than 1e-4 of their parameter's largest. "make" is the time that the engine's constructor took on the
slowest rank, the model's own making apart. Needs transformers.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from parts.pipeline.records import HfRecord
from parts.shared.harness import job_of_arguments, launch, publish
from parts.shared.progress import Listener, ignore_rows, tell
from torch_xmesh.testing.cluster import EmulatedCluster

METHODS = ("split_at", "ready", "torch_1f1b")
_TIMEOUT_SECONDS = 400.0
_VOCABULARY = 256

Step = Callable[[], object]


def run(
    *,
    layers: int = 8,
    width: int = 256,
    length: int = 64,
    samples: int = 2,
    microbatches: int = 8,
    rounds: int = 20,
    methods: Sequence[str] = METHODS,
) -> list[HfRecord]:
    """Measures all methods with `samples` samples in each microbatch.

    Raises:
        MeasurementError: a rank failed or did not end.
    """
    job = {
        "layers": layers,
        "width": width,
        "length": length,
        "samples": samples,
        "microbatches": microbatches,
        "rounds": rounds,
        "methods": list(methods),
    }
    listener = Listener(ignore_rows)
    with EmulatedCluster(hosts=1, devices=2, rate=None, output=listener.stream) as cluster:
        done = launch(cluster, listener, Path(__file__), job, _TIMEOUT_SECONDS)
    return [HfRecord(**record) for record in done.records]


def _make_model(job: dict[str, Any]) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=job["width"],
            intermediate_size=3 * job["width"],
            num_hidden_layers=job["layers"],
            num_attention_heads=8,
            num_key_value_heads=8,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


class _First(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model.model
        self.embed, self.rotary = inner.embed_tokens, inner.rotary_emb
        self.layers = inner.layers[: len(inner.layers) // 2]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _run(self.layers, self.rotary, self.embed(tokens))


class _Second(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model.model
        self.rotary, self.norm, self.head = inner.rotary_emb, inner.norm, model.lm_head
        self.layers = inner.layers[len(inner.layers) // 2 :]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(_run(self.layers, self.rotary, hidden)))
        return logits


def _run(layers: Any, rotary: Any, hidden: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(hidden.shape[1]).unsqueeze(0)
    table = rotary(hidden, position_ids=positions)
    for layer in layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=table, position_ids=positions)
    return hidden


def _loss(logits: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _loss_of_output(output: Any, target: torch.Tensor) -> torch.Tensor:
    return _loss(output.logits, target)


class _Method:
    """One way to train the model: its modules on this rank, a step, and how long it took to make."""

    def __init__(self, name: str, job: dict[str, Any], model: Any, group: dist.ProcessGroup) -> None:
        self.name, self.model = name, model
        batch = torch.randint(3, _VOCABULARY, (job["microbatches"] * job["samples"], job["length"]))
        self.batch, self.target = batch, batch.roll(-1, 1)
        begun = time.perf_counter()
        self.step, self.close = self._torchs(job, group) if name == "torch_1f1b" else self._ours(job)
        self.make_seconds = time.perf_counter() - begun

    def _ours(self, job: dict[str, Any]) -> tuple[Step, Step]:
        import torch_xmesh as xm

        options: dict[str, Any] = {
            "meshes": [xm.Mesh([0]), xm.Mesh([1])],
            "schedule": "1f1b",
            "num_microbatches": job["microbatches"],
        }
        example = (self.batch[: job["samples"]],)
        if self.name == "split_at":
            split = xm.split_at(f"model.layers.{job['layers'] // 2}")
            engine = xm.PipelineEngine(self.model, example, split=split, loss_fn=_loss_of_output, **options)
        else:
            stages = [_First(self.model), _Second(self.model)]
            engine = xm.PipelineEngine(stages, example, loss_fn=_loss, **options)
        return (lambda: engine.step(self.batch, target=self.target, return_outputs=False)), engine.close

    def _torchs(self, job: dict[str, Any], group: dist.ProcessGroup) -> tuple[Step, Step]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank = dist.get_rank()
        tokens = self.batch[: job["samples"]]
        hidden = torch.zeros(*tokens.shape, job["width"], requires_grad=True)
        logits = torch.zeros(*tokens.shape, _VOCABULARY, requires_grad=True)
        stage = PipelineStage(
            (_First, _Second)[rank](self.model),
            rank,
            2,
            torch.device("cpu"),
            input_args=((tokens,), (hidden,))[rank],
            output_args=((hidden,), (logits,))[rank],
            group=group,
        )
        schedule = Schedule1F1B(stage, job["microbatches"], loss_fn=_loss)
        args = (self.batch,) if rank == 0 else ()
        target = self.target if rank == 1 else None
        return (lambda: schedule.step(*args, target=target, return_outputs=False)), lambda: None

    def count_wrong(self, reference: Any, job: dict[str, Any]) -> int:
        """Elements of this rank's gradients after one step."""
        from torch_xmesh.testing import serial_step

        self.step()
        options: dict[str, Any] = {"loss_fn": _loss_of_output, "num_microbatches": job["microbatches"]}
        serial_step(reference, (self.batch,), target=self.target, return_outputs=False, **options)
        wrong = 0
        module = (_First, _Second)[dist.get_rank()](self.model)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in module.parameters():
            expected = reference.get_parameter(names[id(parameter)]).grad
            found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
            wrong += int(((found - expected).abs() > 1e-4 * expected.abs().max()).sum())
        return wrong


def _worker(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("xmesh")
    group = dist.new_group(backend="gloo")
    model = _make_model(job)
    torch.manual_seed(1)
    methods = [_Method(name, job, copy.deepcopy(model), group) for name in job["methods"]]
    wrong = [method.count_wrong(copy.deepcopy(model), job) for method in methods]
    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    began = time.monotonic()
    for round_index in range(job["rounds"] + 1):
        for method in methods:
            if dist.get_rank() == 0:
                left = _TIMEOUT_SECONDS - (time.monotonic() - began)
                tell(f"{len(methods)} methods", method.name, f"round {round_index} of {job['rounds']}", left)
            dist.barrier(group=group)
            begun = time.perf_counter()
            method.step()
            seconds[method.name] += [time.perf_counter() - begun] if round_index else []
    mine = [
        [*seconds[method.name], method.make_seconds, float(bad)] for method, bad in zip(methods, wrong, strict=True)
    ]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine, group=group)
    for method in methods:
        method.close()
    dist.barrier(group=group)
    dist.destroy_process_group()
    publish(job, [record.to_json() for record in _records(job, everyone)])


def _records(job: dict[str, Any], everyone: Sequence[Sequence[Sequence[float]]]) -> list[HfRecord]:
    """`everyone`: by rank and method, the seconds of each step, then of making, then elements that were wrong."""
    records = []
    for index, name in enumerate(job["methods"]):
        ranks = [rank[index] for rank in everyone]
        steps = [max(step) for step in zip(*(rank[:-2] for rank in ranks), strict=True)]
        records.append(
            HfRecord(
                suite="hf",
                method=name,
                layers=job["layers"],
                width=job["width"],
                microbatches=job["microbatches"],
                seconds=statistics.median(steps),
                seconds_min=min(steps),
                seconds_max=max(steps),
                make_seconds=max(rank[-2] for rank in ranks),
                runs=len(steps),
                wrong=int(sum(rank[-1] for rank in ranks)),
            )
        )
    return records


if __name__ == "__main__":
    _worker(job_of_arguments())
