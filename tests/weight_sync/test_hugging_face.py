"""Ready maps for models of ``transformers``: the tensors of every rank of a serving replica, bit for bit, against plain
torch operations on the whole state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_xmesh.weight_sync import Catalog, apply_map, resolve
from torch_xmesh.weight_sync.hugging_face import ReplicaRank, fused_map

transformers = pytest.importorskip("transformers")

Tensors = dict[str, torch.Tensor]
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 37, "num_hidden_layers": 2, "intermediate_size": 24}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
MULTIPLE = 8  # of padded vocabularies


def weights_of(model: torch.nn.Module) -> Tensors:
    """Its state dict, with values of which no two are alike; tied tensors stay tied."""
    for index, parameter in enumerate([*model.parameters(), *model.buffers()]):
        if parameter.is_floating_point():
            parameter.data = torch.arange(parameter.numel()).view(parameter.shape) + index * 1e4
    return dict(model.state_dict())


def part(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim)[rank]


def kv_part(tensor: torch.Tensor, num_heads: int, rank: int, size: int) -> torch.Tensor:
    """As an engine loads it: where there are more ranks than heads, neighbors have the same one."""
    return tensor.chunk(num_heads)[rank // (size // num_heads)] if size > num_heads else tensor.chunk(size)[rank]


def vocabulary_part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    rows = -(-tensor.shape[0] // MULTIPLE) * MULTIPLE
    return part(torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])]), 0, rank, size)


def expected_attention(source: Tensors, module: str, kv_heads: int, rank: int, size: int) -> Tensors:
    out = {}
    for kind in ("weight", "bias"):
        if f"{module}.q_proj.{kind}" in source:
            query, key, value = (source[f"{module}.{letter}_proj.{kind}"] for letter in "qkv")
            mine = [part(query, 0, rank, size), *(kv_part(each, kv_heads, rank, size) for each in (key, value))]
            out[f"{module}.qkv_proj.{kind}"] = torch.cat(mine)
    out[f"{module}.o_proj.weight"] = part(source[f"{module}.o_proj.weight"], 1, rank, size)
    return out


def expected_mlp(source: Tensors, module: str, rank: int, size: int) -> Tensors:
    if f"{module}.gate_proj.weight" not in source:
        return {}
    gate, up, down = (source[f"{module}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {
        f"{module}.gate_up_proj.weight": torch.cat([part(gate, 0, rank, size), part(up, 0, rank, size)]),
        f"{module}.down_proj.weight": part(down, 1, rank, size),
    }


def expected_experts(source: Tensors, module: str, experts: slice, rank: int, size: int) -> Tensors:
    if f"{module}.gate_up_proj" not in source:
        return {}
    gate, up = source[f"{module}.gate_up_proj"][experts].chunk(2, 1)
    down = source[f"{module}.down_proj"][experts]
    return {
        f"{module}.w13_weight": torch.cat([part(gate, 1, rank, size), part(up, 1, rank, size)], 1),
        f"{module}.w2_weight": part(down, 2, rank, size),
    }


FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "experts.down_proj")


def check(source: Tensors, expected: Tensors, rank: ReplicaRank, given: Tensors | None = None, **options: Any) -> None:
    """Fills tensors like the expected ones; ``expected`` gets what is the same on both sides.

    Args:
        given: what the trainer has, where it is not the whole state dict.
    """
    kept = {name: tensor for name, tensor in source.items() if not any(fused in name for fused in FUSED)}
    expected = {**kept, **expected}
    targets = {name: torch.full(tensor.shape, -1.0) for name, tensor in expected.items()}
    given = source if given is None else given
    mapping = fused_map(Catalog.of(given), rank, vocab_multiple=MULTIPLE, targets=set(targets), **options)
    apply_map(given, resolve(targets, mapping, Catalog.of(given)))
    for name, tensor in expected.items():
        assert torch.equal(targets[name], tensor.float()), name


def vocabularies(source: Tensors, rank: int, size: int) -> Tensors:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: vocabulary_part(source[name], rank, size) for name in names}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_llama(size: int) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=False)
    source = weights_of(transformers.LlamaForCausalLM(config))
    for rank in range(size):
        expected = vocabularies(source, rank, size)
        for layer in ("model.layers.0", "model.layers.1"):
            expected |= expected_attention(source, f"{layer}.self_attn", 2, rank, size)
            expected |= expected_mlp(source, f"{layer}.mlp", rank, size)
        check(source, expected, ReplicaRank(rank, size), config=config)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_tied_head(has_head: bool) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)
    source = weights_of(transformers.LlamaForCausalLM(config))
    given = {name: tensor for name, tensor in source.items() if has_head or name != "lm_head.weight"}
    embedding = torch.empty(20, 16)
    targets = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    for rank in range(2):
        mapping = fused_map(Catalog.of(given), ReplicaRank(rank, 2), config=config, vocab_multiple=8, targets=targets)
        apply_map(given, resolve(targets, mapping, Catalog.of(given)))
        assert torch.equal(embedding, vocabulary_part(source["lm_head.weight"], rank, 2))


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_qwen_with_experts(tp_size: int, ep_size: int, is_stacked: bool) -> None:
    config = transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, shared_expert_intermediate_size=12, decoder_sparse_step=1
    )
    source = weights_of(transformers.Qwen2MoeForCausalLM(config))
    for rank in (ReplicaRank(tp, tp_size, ep, ep_size) for tp in range(tp_size) for ep in range(ep_size)):
        tp = (rank.tp_rank, rank.tp_size)
        experts = slice(*{1: [(0, 4)], 2: [(0, 2), (2, 4)], 3: [(0, 2), (2, 3), (3, 4)]}[ep_size][rank.ep_rank])
        expected = vocabularies(source, *tp)
        for layer in ("model.layers.0", "model.layers.1"):
            expected |= expected_attention(source, f"{layer}.self_attn", 2, *tp)
            expected |= expected_mlp(source, f"{layer}.mlp.shared_expert", *tp)
            of_expert = tp if ep_size == 1 else (0, 1)
            expected |= expected_experts(source, f"{layer}.mlp.experts", experts, *of_expert)
        check(source, expected, rank, None if is_stacked else single_experts(source), config=config)


def single_experts(source: Tensors) -> Tensors:
    """The same state dict with a tensor per expert, as in checkpoints."""
    out = {}
    for name, tensor in source.items():
        module, _, last = name.rpartition(".")
        if not module.endswith(".experts"):
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            if last == "down_proj":
                out[f"{module}.{expert}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                out |= {f"{module}.{expert}.gate_proj.weight": gate, f"{module}.{expert}.up_proj.weight": up}
    return out


def test_the_number_of_heads_is_known_from_norms_or_asked_for() -> None:
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=4, num_key_value_heads=2)
    source = weights_of(transformers.Qwen3MoeForCausalLM(config))
    for rank in range(4):
        expected = vocabularies(source, rank, 4)
        for layer in ("model.layers.0", "model.layers.1"):
            expected |= expected_attention(source, f"{layer}.self_attn", 2, rank, 4)
            expected |= expected_experts(source, f"{layer}.mlp.experts", slice(0, 4), rank, 4)
        check(source, expected, ReplicaRank(rank, 4))
    without = {name: tensor for name, tensor in source.items() if "k_norm" not in name}
    with pytest.raises(ValueError) as caught:
        fused_map(Catalog.of(without), ReplicaRank(1, 4))
    assert "nothing tells how many heads 'model.layers.0.self_attn.q_proj.weight' of shape (16, 16) has" in str(
        caught.value
    )
    fused_map(Catalog.of(without), ReplicaRank(0, 1))


@pytest.mark.parametrize("q_lora_rank", [8, None])
def test_deepseek(q_lora_rank: int | None) -> None:
    latent = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8}
    config = transformers.DeepseekV3Config(
        **SIZES, **latent, **experts, v_head_dim=4, first_k_dense_replace=1, num_key_value_heads=4
    )
    source = weights_of(transformers.DeepseekV3ForCausalLM(config))
    for rank in range(2):
        expected = vocabularies(source, rank, 2)
        for layer in ("model.layers.0", "model.layers.1"):
            attention = f"{layer}.self_attn"
            sharded = ["kv_b_proj.weight", "q_proj.weight" if q_lora_rank is None else "q_b_proj.weight"]
            expected |= {f"{attention}.{name}": part(source[f"{attention}.{name}"], 0, rank, 2) for name in sharded}
            expected[f"{attention}.o_proj.weight"] = part(source[f"{attention}.o_proj.weight"], 1, rank, 2)
            if q_lora_rank is not None:
                ends = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
                fused = torch.cat([source[f"{attention}.{name}"] for name in ends])
                expected[f"{attention}.fused_qkv_a_proj.weight"] = fused
            expected |= expected_mlp(source, f"{layer}.mlp", rank, 2)
            expected |= expected_mlp(source, f"{layer}.mlp.shared_experts", rank, 2)
            expected |= expected_experts(source, f"{layer}.mlp.experts", slice(0, 4), rank, 2)
        check(source, expected, ReplicaRank(rank, 2), config=config)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gpt2(size: int) -> None:
    config = transformers.GPT2Config(n_embd=16, n_head=4, n_layer=2, vocab_size=37, n_positions=8)
    source = weights_of(transformers.GPT2LMHeadModel(config))
    for rank in range(size):
        expected = {
            name: vocabulary_part(source[name], rank, size) for name in ("transformer.wte.weight", "lm_head.weight")
        }
        for layer in ("transformer.h.0", "transformer.h.1"):
            for kind in ("weight", "bias"):
                fused = source[f"{layer}.attn.c_attn.{kind}"].t().chunk(3)
                expected[f"{layer}.attn.c_attn.{kind}"] = torch.cat([part(each, 0, rank, size) for each in fused])
                expected[f"{layer}.mlp.c_fc.{kind}"] = part(source[f"{layer}.mlp.c_fc.{kind}"].t(), 0, rank, size)
            for module in ("attn", "mlp"):
                name = f"{layer}.{module}.c_proj.weight"
                expected[name] = part(source[name].t(), 1, rank, size)
        check(source, expected, ReplicaRank(rank, size), config=config)


def test_a_vocabulary_is_padded_for_as_many_ranks_as_there_are() -> None:
    source = {"lm_head.weight": torch.arange(37.0)[:, None].expand(37, 2)}
    for rank in range(3):
        target = torch.empty(16, 2)
        mapping = fused_map(Catalog.of(source), ReplicaRank(rank, 3), vocab_multiple=8)
        apply_map(source, resolve({"lm_head.weight": target}, mapping, Catalog.of(source)))
        whole = torch.cat([source["lm_head.weight"], torch.zeros(11, 2)])
        assert torch.equal(target, whole[rank * 16 : rank * 16 + 16])


def test_wrong_ranks() -> None:
    with pytest.raises(ValueError, match="tp_rank 2 of tp_size 2: expected a rank from 0 up to the size"):
        ReplicaRank(2, 2)
    with pytest.raises(ValueError, match="ep_rank -1 of ep_size 2: expected a rank from 0 up to the size"):
        ReplicaRank(ep_rank=-1, ep_size=2)
