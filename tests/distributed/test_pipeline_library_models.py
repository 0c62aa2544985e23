"""Models of transformers, peft, diffusers, torchvision and timm with their defaults, trained through the engine: losses
and gradients are those of one process."""

import contextlib
import copy
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from models.libraries import MODELS, without_chance
from torch import nn

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="runs on any machine with the packages of the extra `models` (tests/run.sh brings them with torch 2.11)",
)

TWO: tuple[list[int], ...] = ([0, 1], [2])
THREE: tuple[list[int], ...] = ([0], [1, 2], [3])
_LAYERS = (("model.layers.1",), ("model.layers.1", "model.layers.2.mlp"))
_WHOLE_LAYERS = (("model.layers.1",), ("model.layers.1", "model.layers.2"))
SPLITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "GPT-2": (("transformer.h.1",), ("transformer.h.1", "transformer.ln_f")),
    "Llama": _LAYERS,
    "Qwen3": _LAYERS,
    "Gemma 3": _LAYERS,
    "Mistral": _LAYERS,
    "Mixtral": _WHOLE_LAYERS,
    "Qwen2-MoE": _WHOLE_LAYERS,
    "BERT": (("bert.encoder.layer.1",), ("bert.encoder.layer.1", "cls")),
    "T5": (("decoder",), ("decoder.block.0", "decoder.block.1")),
    "BART": (("model.decoder",), ("model.decoder.layers.0", "lm_head")),
    "Whisper": (("model.decoder",), ("model.encoder.layers.1", "model.decoder")),
    "ViT": (("vit.layers.1",), ("vit.layers.1", "classifier")),
    "Llama, classifying": (("model.layers.1",), ("model.layers.1", "score")),
}
"""Where two and three stages start."""
FAMILIES = tuple(SPLITS)
_THREE_LAYERS = {"num_hidden_layers": 3}
_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: _THREE_LAYERS for name in FAMILIES if name not in ("T5", "BART", "Whisper")},
    "Gemma 3": {**_THREE_LAYERS, "sliding_window": 4096},
    "Mistral": {**_THREE_LAYERS, "sliding_window": 4096},
    "Mixtral": {**_THREE_LAYERS, "output_router_logits": True},
    "Qwen2-MoE": {**_THREE_LAYERS, "output_router_logits": True},
}


def build(name: str) -> nn.Module:
    """With the defaults that its users have, but without dropout."""
    model = MODELS[name].as_it_comes(**_OPTIONS.get(name, {}))
    without_chance(model)
    return model


def batch_of(name: str, samples: int = 2, length: int = 10, *, is_padded: bool = False) -> dict[str, Any]:
    """Half of the sentences are padded or none. Those to be classified come without a mask: the model finds each one's
    last token itself."""
    if name in ("Whisper", "ViT"):
        given = MODELS[name].batch(samples)
        return {key: one.float() if one.is_floating_point() else one for key, one in given.items()}
    given = MODELS[name].batch(samples, length=length, num_padded=samples // 2 if is_padded else 0)
    if name == "Llama, classifying":
        given["input_ids"] = given["input_ids"] * given.pop("attention_mask")
    return given


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def compare(engine: xm.PipelineEngine, reference: nn.Module, text: str) -> None:
    """Gradients, to 1e-4 of each parameter's largest."""
    for name, parameter in engine.named_parameters():
        expected = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), f"{text}: {name}"
        if expected is not None and parameter.grad is not None:
            off, largest = (parameter.grad - expected).abs().max(), expected.abs().max()
            assert off <= 1e-4 * largest + 1e-7, f"{text}: {name} is off by {off}, its largest is {largest}"


def train(
    engine: xm.PipelineEngine,
    reference: nn.Module,
    batches: Sequence[dict[str, Any]],
    *,
    text: str,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    mode: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    """AdamW steps in the engine and in one process. Its eps is large: a gradient that is rounding noise would move a
    parameter as far as any other, one way or the other."""
    optimizers = [
        torch.optim.AdamW([p for p in parameters if p.requires_grad] or [nn.Parameter(torch.ones(1))], 1e-3, eps=1e-4)
        for parameters in (list(engine.parameters()), list(reference.parameters()))
    ]
    for step, batch in enumerate(batches):
        losses: list[torch.Tensor] = []
        with mode():
            engine.step(**batch, losses=losses)
            expected = serial_step(reference, (), batch, loss_fn=loss, num_microbatches=2, step=step)
        for mine, known in zip(losses, expected.losses, strict=bool(losses)):
            torch.testing.assert_close(mine, known, rtol=1e-4, atol=1e-6)
        compare(engine, reference, f"{text}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def batches_of(name: str, lengths: Sequence[int] = (10, 10, 13)) -> list[dict[str, Any]]:
    """Masks are all ones in one step and padded in the next."""
    torch.manual_seed(7)
    return [batch_of(name, 4, length, is_padded=step % 2 == 1) for step, length in enumerate(lengths)]


def make(model: nn.Module, example: dict[str, Any], meshes: Any, split: Sequence[str], **options: Any) -> Any:
    options = {"loss_fn": loss_of, "schedule": "1f1b", "num_microbatches": 2, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return xm.PipelineEngine(
            model, (), example, meshes=[xm.Mesh(ranks) for ranks in meshes], split=xm.split_at(*split), **options
        )


def families(rank: int, world_size: int, names: Sequence[str], meshes: Any, is_three: bool) -> None:
    """In two stages each length has both kinds of masks."""
    lengths = (10, 10, 13) if is_three else (10, 10, 13, 8, 13)
    for name in names:
        torch.manual_seed(0)
        model = build(name)
        reference = copy.deepcopy(model)
        engine = make(model, batch_of(name), meshes, SPLITS[name][is_three])
        train(engine, reference, batches_of(name, lengths), text=name)
        engine.close()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("names", [FAMILIES[:4], FAMILIES[4:8], FAMILIES[8:]], ids=" ".join)
def test_families_in_two_stages(names: Sequence[str]) -> None:
    spawn(families, 3, names, TWO, False, timeout=170)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("names", [FAMILIES[:4], FAMILIES[4:8], FAMILIES[8:]], ids=" ".join)
def test_families_in_three_stages(names: Sequence[str]) -> None:
    spawn(families, 4, names, THREE, True, timeout=170)


def habits(rank: int, world_size: int, names: Sequence[str]) -> None:
    """What people do with a model before they train it; both kinds of meshes."""
    for name in names:
        HABITS[name](rank)


def _of(name: str, meshes: Any = TWO) -> tuple[nn.Module, Sequence[str]]:
    torch.manual_seed(0)
    return build(name), SPLITS[name][len(meshes) - 2]


def _meshes(rank: int) -> Iterator[Any]:
    """Those of the two kinds on which this rank has a stage."""
    for meshes in (TWO, THREE):
        if any(rank in ranks for ranks in meshes):
            yield meshes


def checkpointing(rank: int) -> None:
    cases = (("GPT-2", True), ("Llama", False), ("Llama", True), ("T5", False))
    for meshes, (name, is_reentrant) in itertools.product(_meshes(rank), cases):
        model, split = _of(name, meshes)
        if "mlp" in split[-1]:
            split = (*split[:-1], "model.layers.2")  # a checkpointed layer stays whole
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})  # type: ignore[operator]
        reference = copy.deepcopy(model)
        engine = make(model.train(), batch_of(name), meshes, split)
        text = f"{name}, use_reentrant={is_reentrant}, {meshes}"
        train(engine, reference.train(), batches_of(name), text=text)
        engine.close()


def checkpoint_wrapper(rank: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    for meshes in _meshes(rank):
        model, _ = _of("Llama")
        reference = copy.deepcopy(model)
        layer = type(model.get_submodule("model.layers.0"))
        apply_activation_checkpointing(model, check_fn=functools.partial(_is_a, layer))
        split = ["model.layers.1", "model.layers.2"][: len(meshes) - 1]
        engine = make(model, batch_of("Llama"), meshes, split)
        for name, parameter in engine.named_parameters():
            assert torch.equal(parameter, reference.get_parameter(name))
        train(engine, reference, batches_of("Llama"), text=f"checkpoint_wrapper, {meshes}")
        engine.close()


def _is_a(kind: type, module: nn.Module) -> bool:
    return isinstance(module, kind)


def mixed_precision(rank: int) -> None:
    lower = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    for name in ("BERT", "GPT-2", "ViT", "Whisper"):
        model, split = _of(name)
        untied(model)  # tied gradients are summed in another order, after which values round to other bf16 ones
        reference = copy.deepcopy(model)
        engine = make(model, batch_of(name), ([0], [2]), split) if rank in (0, 2) else None
        if engine is not None:
            train(engine, reference, batches_of(name), text=f"{name}, bf16", mode=lower)
            engine.close()


def untied(model: Any) -> None:
    head = model.get_output_embeddings()
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())


def built_on_meta(rank: int) -> None:
    for meshes in _meshes(rank):
        reference, split = _of("Llama", meshes)
        with torch.device("meta"):
            model = build("Llama")
        engine = make(model, batch_of("Llama"), meshes, split)
        engine.load_state_dict(reference.state_dict())
        train(engine, reference, batches_of("Llama"), text=f"meta, {meshes}")
        engine.close()


def adapters(rank: int) -> None:
    from peft import LoraConfig, get_peft_model

    for meshes, is_checkpointed in itertools.product(_meshes(rank), (False, True)):
        model, _ = _of("Llama")
        if is_checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            model.enable_input_require_grads()  # type: ignore[operator]
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        adapted = get_peft_model(model, config).train()
        reference = copy.deepcopy(adapted)
        layers = "base_model.model.model.layers"
        split = [f"{layers}.1", f"{layers}.2"][: len(meshes) - 1]
        engine = make(adapted, batch_of("Llama"), meshes, split)
        train(engine, reference, batches_of("Llama"), text=f"LoRA, checkpointing {is_checkpointed}, {meshes}")
        trained = [name for name, parameter in engine.named_parameters() if parameter.requires_grad]
        assert trained
        assert all("lora_" in name for name in trained)
        engine.close()


def compiled(rank: int) -> None:
    for meshes in _meshes(rank):
        model, _ = _of("Llama")
        reference = copy.deepcopy(model)
        for layer in model.get_submodule("model.layers").children():
            layer.compile(backend="eager")
        split = ["model.layers.1", "model.layers.2"][: len(meshes) - 1]
        engine = make(model, batch_of("Llama"), meshes, split)
        train(engine, reference, batches_of("Llama"), text=f"compiled layers, {meshes}")
        engine.close()


def diffusion(rank: int) -> None:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    batches = [{"sample": torch.randn(4, 1, 8, 8), "timestep": torch.tensor([3, 1, 4, 1])} for _ in range(5)]
    example = {name: value[:2] for name, value in batches[0].items()}

    def loss(output: Any) -> torch.Tensor:
        return output.sample.square().mean()  # type: ignore[no-any-return]

    for meshes, split in ((([0, 1], [2]), ["mid_block"]), (([0], [1, 2], [3]), ["down_blocks.1", "up_blocks.1"])):
        trained = copy.deepcopy(model)
        reference = copy.deepcopy(model)
        if any(rank in ranks for ranks in meshes):
            engine = make(trained, example, meshes, split, loss_fn=loss)
            train(engine, reference, batches, text=f"UNet, {split}", loss=loss)
            engine.close()


def scaled(rank: int) -> None:
    """float16 with a loss scale: the gradients are those of the scaled loss."""
    if rank not in (0, 2):
        return
    model, split = _of("ViT")
    reference = copy.deepcopy(model)
    engine = make(model, batch_of("ViT"), ([0], [2]), split)
    engine.scaler(torch.amp.GradScaler("cpu", init_scale=256.0))
    for step, batch in enumerate(batches_of("ViT")):
        with torch.autocast("cpu", torch.float16):
            engine.step(**batch)
            serial_step(reference, (), batch, loss_fn=lambda output: output.loss * 256.0, num_microbatches=2)
        compare(engine, reference, f"float16, step {step}")
    engine.close()


def vision(rank: int) -> None:
    """Convolutions whose batch norms see one data shard, and a timm model without labels."""
    import timm
    import torchvision

    def loss(output: Any, target: Any = None) -> torch.Tensor:
        return output.square().mean()  # type: ignore[no-any-return]

    for name, build, split in (
        ("resnet18", functools.partial(torchvision.models.resnet18, num_classes=5), ["layer3"]),
        ("timm vit", functools.partial(timm.create_model, "vit_tiny_patch16_224", img_size=32, depth=3), ["blocks.1"]),
    ):
        torch.manual_seed(0)
        model = build()
        reference = copy.deepcopy(model)
        x = torch.randn(4, 3, 32, 32)
        if rank < 2:
            engine = xm.PipelineEngine(
                model,
                (x[:2],),
                meshes=[xm.Mesh([0]), xm.Mesh([1])],
                split=xm.split_at(*split),
                num_microbatches=2,
                loss_fn=loss,
            )
            for step in range(2):
                engine.step(x)
                serial_step(reference, (x,), loss_fn=loss, num_microbatches=2)
                compare(engine, reference, f"{name}, step {step}")
            engine.close()


HABITS = {
    "scaled": scaled,
    "vision": vision,
    "checkpointing": checkpointing,
    "checkpoint_wrapper": checkpoint_wrapper,
    "mixed_precision": mixed_precision,
    "built_on_meta": built_on_meta,
    "adapters": adapters,
    "compiled": compiled,
    "diffusion": diffusion,
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "names",
    [("checkpointing", "checkpoint_wrapper"), ("mixed_precision", "scaled"), ("adapters", "compiled"), ("vision",)],
    ids=" ".join,
)
def test_habits(names: Sequence[str]) -> None:
    spawn(habits, 4, names, timeout=170)


def test_meta_and_diffusion() -> None:
    spawn(habits, 4, ("built_on_meta", "diffusion"), timeout=170)
