"""Maps from the names of Hugging Face's models to the fused tensors of a serving engine, such as vLLM's.

| source | target of one rank |
|---|---|
| ``q_proj``, ``k_proj``, ``v_proj`` | ``qkv_proj``: the rank's heads; one of fewer K/V heads than ranks on several |
| ``gate_proj``, ``up_proj`` | ``gate_up_proj``: the rank's rows of both |
| ``o_proj``, ``down_proj`` | the rank's columns; a bias whole |
| ``experts.0.gate_proj`` ..., or ``experts.gate_up_proj`` | ``experts.w13_weight``: the rank's experts, stacked |
| ``experts.0.down_proj`` ..., or ``experts.down_proj`` | ``experts.w2_weight``: the same |
| ``embed_tokens``, ``wte``, ``lm_head`` | the rank's rows, padded; ``lm_head`` takes the embedding's where it is tied |
| ``q_a_proj``, ``kv_a_proj_with_mqa`` | ``fused_qkv_a_proj``, whole; without ``q_a_proj`` as they are |
| ``q_b_proj``, ``kv_b_proj``, ``q_proj`` beside ``kv_b_proj`` | the rank's heads |
| ``attn.c_attn``, ``mlp.c_fc``, ``c_proj`` (GPT-2) | transposed back; heads, rows and columns as above |

All else is the same tensor of the same name: norms, gates, positions.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection

from torch_xmesh.arguments import instance_of, positive_int
from torch_xmesh.weight_sync.expression import Expression, concat, stack, take
from torch_xmesh.weight_sync.manifest import Catalog


@dataclasses.dataclass(frozen=True)
class ReplicaRank:
    """A process's position in a serving replica.

    Attributes:
        tp_rank, tp_size: which part of how many it has of what is sharded: heads, rows, columns.
        ep_rank, ep_size: which share of how many it has of the experts. With more than one share an expert is not
            sharded; with one, each expert is, over the ``tp_size`` ranks.

    Raises:
        ValueError: a rank that is not below its size.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for what, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if not isinstance(rank, int) or not 0 <= rank < positive_int(f"{what}_size", size):
                raise ValueError(f"{what}_rank {rank} of {what}_size {size}: expected a rank from 0 up to the size")


def fused_map(
    catalog: Catalog,
    rank: ReplicaRank,
    *,
    config: object = None,
    vocab_multiple: int = 64,
    targets: Collection[str] | None = None,
) -> dict[str, Expression]:
    """Expressions for the fused tensors of one rank of a serving replica, for :func:`resolve`.

    Args:
        catalog: the sources, named as a Llama, Qwen (also mixture of experts), DeepSeek or GPT-2 of ``transformers``.
        rank: whose tensors they are.
        config: a model's config, or anything with ``num_attention_heads`` (or ``n_head``) and, where it differs,
            ``num_key_value_heads``. None: the heads' size is that of ``k_norm``, where the layers have one.
        vocab_multiple: vocabularies are padded with zeros to a multiple of this and of ``tp_size``.
        targets: the names that the rank has, as where a replica is pipelined; entries for others are left out.

    Returns:
        expressions by target name. A target that is the source of its name has none.

    Raises:
        ValueError: heads whose number nothing tells.
    """
    instance_of("catalog", catalog, Catalog, "a Catalog")
    instance_of("rank", rank, ReplicaRank, "a ReplicaRank")
    positive_int("vocab_multiple", vocab_multiple)
    writer = _Writer(catalog, rank, config, vocab_multiple)
    for name in catalog.tensors:
        for pattern, write in _RULES:
            if match := pattern.fullmatch(name):
                write(writer, name, *match.groups())
                break
    writer.write_tied_head()
    return {name: made for name, made in writer.out.items() if targets is None or name in targets}


class _Writer:
    """Entries of the map. A rule's method writes its entries, given a source's name and the pattern's groups."""

    def __init__(self, catalog: Catalog, rank: ReplicaRank, config: object, vocab_multiple: int) -> None:
        self.out: dict[str, Expression] = {}
        self._catalog = catalog
        self._rank = rank
        config = getattr(config, "text_config", config)
        self._num_heads: int | None = getattr(config, "num_attention_heads", getattr(config, "n_head", None))
        self._num_kv_heads: int | None = getattr(config, "num_key_value_heads", None) or self._num_heads
        self._experts: dict[str, list[int]] = {}
        for name in catalog.tensors:
            if match := _SINGLE_EXPERT.fullmatch(name):
                self._experts.setdefault(match[1], []).append(int(match[2]))
        self._vocab_multiple = math.lcm(vocab_multiple, rank.tp_size)

    def vocabulary(self, name: str) -> None:
        self.out[name] = self._vocabulary(name)

    def write_tied_head(self) -> None:
        """``lm_head`` takes the embedding where the sources have no head of their own."""
        embedding = next((name for name in self._catalog.tensors if _EMBEDDING.fullmatch(name)), None)
        if embedding is not None and not any(name.endswith("lm_head.weight") for name in self._catalog.tensors):
            self.out["lm_head.weight"] = self._vocabulary(embedding)

    def query(self, name: str, module: str, kind: str) -> None:
        key, value = f"{module}.k_proj.{kind}", f"{module}.v_proj.{kind}"
        if key not in self._catalog.tensors:
            self.out[name] = self._heads(take(name), name, module, self._num_heads)
            return
        parts = [self._heads(take(name), name, module, self._num_heads)]
        parts += [self._heads(take(source), source, module, self._num_kv_heads) for source in (key, value)]
        self.out[f"{module}.qkv_proj.{kind}"] = concat(parts)

    def latent_heads(self, name: str, module: str) -> None:
        self.out[name] = self._heads(take(name), name, module, self._num_heads)

    def latent_in(self, name: str, module: str, kind: str) -> None:
        self.out[f"{module}.fused_qkv_a_proj.{kind}"] = concat([name, f"{module}.kv_a_proj_with_mqa.{kind}"])

    def gate(self, name: str, module: str, kind: str) -> None:
        self.out[f"{module}.gate_up_proj.{kind}"] = concat(
            [self._shard(take(name), 0), self._shard(take(f"{module}.up_proj.{kind}"), 0)]
        )

    def columns(self, name: str) -> None:
        self.out[name] = self._shard(take(name), 1)

    def single_experts(self, name: str, module: str) -> None:
        found = sorted(self._experts[module])
        mine = found[slice(*self._share_of_experts(len(found)))]
        ups, downs = [], []
        for expert in mine:
            gate, up, down = (take(f"{module}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
            ups.append(concat([self._of_expert(gate, 0), self._of_expert(up, 0)]))
            downs.append(self._of_expert(down, 1))
        if mine:
            self.out[f"{module}.w13_weight"], self.out[f"{module}.w2_weight"] = stack(ups), stack(downs)

    def stacked_gate_up(self, name: str, module: str) -> None:
        num_experts, rows, _ = self._catalog.tensors[name].shape
        mine = take(name).narrow(0, *self._share_of_experts(num_experts))
        halves = (mine.narrow(1, 0, rows // 2), mine.narrow(1, rows // 2, rows))
        self.out[f"{module}.w13_weight"] = concat([self._of_expert(half, 1) for half in halves], 1)

    def stacked_down(self, name: str, module: str) -> None:
        mine = take(name).narrow(0, *self._share_of_experts(self._catalog.tensors[name].shape[0]))
        self.out[f"{module}.w2_weight"] = self._of_expert(mine, 2)

    def transposed_qkv(self, name: str, module: str) -> None:
        whole = take(name).t()
        third = self._catalog.tensors[name].shape[-1] // 3
        parts = (whole.rows(part * third, (part + 1) * third) for part in range(3))
        self.out[name] = concat([self._heads(part, name, module, self._num_heads) for part in parts])

    def transposed_rows(self, name: str) -> None:
        self.out[name] = self._shard(take(name).t(), 0)

    def transposed_columns(self, name: str) -> None:
        self.out[name] = self._shard(take(name).t(), 1)

    def _vocabulary(self, name: str) -> Expression:
        rows = self._catalog.tensors[name].shape[0]
        padded = -(-rows // self._vocab_multiple) * self._vocab_multiple
        return self._shard(take(name).pad(0, padded), 0)

    def _shard(self, whole: Expression, dim: int) -> Expression:
        return whole.shard(dim, self._rank.tp_rank, self._rank.tp_size)

    def _heads(self, whole: Expression, name: str, module: str, num_heads: int | None) -> Expression:
        if self._rank.tp_size == 1:
            return whole
        norm = self._catalog.tensors.get(f"{module}.k_norm.weight")
        if num_heads is None and norm is not None:
            num_heads = self._catalog.tensors[name].shape[0] // norm.shape[0]
        if num_heads is None:
            raise ValueError(
                f"nothing tells how many heads {name!r} of shape {self._catalog.tensors[name].shape} has: expected a "
                "config with num_attention_heads and num_key_value_heads"
            )
        return whole.heads(0, self._rank.tp_rank, self._rank.tp_size, num_heads=num_heads)

    def _share_of_experts(self, num_experts: int) -> tuple[int, int]:
        """The rank's experts, one behind the other; the first ranks have one more where an even share leaves a rest."""
        share, rest = divmod(num_experts, self._rank.ep_size)
        begin = self._rank.ep_rank * share + min(self._rank.ep_rank, rest)
        return begin, begin + share + (self._rank.ep_rank < rest)

    def _of_expert(self, expert: Expression, dim: int) -> Expression:
        return self._shard(expert, dim) if self._rank.ep_size == 1 else expert


_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte)\.weight")


def _nothing(writer: _Writer, name: str) -> None:
    """For sources that another one's rule takes."""


_SINGLE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.gate_proj\.weight")
_RULES: list[tuple[re.Pattern[str], Callable[..., None]]] = [  # the first that matches a source's whole name counts
    (_EMBEDDING, _Writer.vocabulary),
    (re.compile(r"(?:.*\.)?lm_head\.(?:weight|bias)"), _Writer.vocabulary),
    (re.compile(r"(.*\.experts)\.0\.gate_proj\.weight"), _Writer.single_experts),
    (re.compile(r".*\.experts\.\d+\..*"), _nothing),
    (re.compile(r"(.*\.experts)\.gate_up_proj"), _Writer.stacked_gate_up),
    (re.compile(r"(.*\.experts)\.down_proj"), _Writer.stacked_down),
    (re.compile(r"(.*)\.q_proj\.(weight|bias)"), _Writer.query),
    (re.compile(r"(.*)\.(?:q_b|kv_b)_proj\.weight"), _Writer.latent_heads),
    (re.compile(r"(.*)\.q_a_proj\.(weight|bias)"), _Writer.latent_in),
    (re.compile(r"(.*)\.gate_proj\.(weight|bias)"), _Writer.gate),
    (re.compile(r".*\.(?:o|down)_proj\.weight"), _Writer.columns),
    (re.compile(r"(.*\.attn)\.c_attn\.(?:weight|bias)"), _Writer.transposed_qkv),
    (re.compile(r".*\.mlp\.c_fc\.(?:weight|bias)"), _Writer.transposed_rows),
    (re.compile(r".*\.(?:attn|mlp)\.c_proj\.weight"), _Writer.transposed_columns),
]
