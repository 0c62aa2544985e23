"""Language models: GPT with a tied embedding, a BERT-like encoder with masks and dict outputs, a mixture of experts."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Self-attention over [batch, tokens, width]; `mask` is bool [batch, tokens], True where a token counts."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        keep = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.feed(self.norm2(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Next-token logits [batch, tokens, vocabulary]; the output layer's weight is the embedding's."""

    def __init__(
        self,
        vocabulary: int = 13,
        width: int = 8,
        depth: int = 4,
        tokens: int = 6,
        dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, 2, causal=True, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout, self.recompute = dropout, recompute

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        batch, length = indices.shape
        x = self.tokens(indices) + self.positions(torch.arange(length, device=indices.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x)).view(batch, length, -1)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """BERT-like: bool masks to every layer, a dict of outputs, one made early, a constant among them."""

    def __init__(self, vocabulary: int = 11, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.kinds = nn.Embedding(2, width)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.layers = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.pooler = nn.Linear(width, width)
        self.classes = nn.Linear(width, 3)

    def forward(self, indices: torch.Tensor, *, mask: torch.Tensor, kinds: torch.Tensor) -> dict[str, object]:
        x = self.tokens(indices) + self.kinds(kinds) * self.scale
        embedded = x
        for layer in self.layers:
            x = layer(x, mask)
        counted = mask.to(x.dtype).sum(1, keepdim=True)
        pooled = torch.tanh(self.pooler((x * mask[:, :, None]).sum(1) / counted))
        return {"logits": self.classes(pooled), "hidden": (x, embedded), "width": x.shape[-1]}


class Experts(nn.Module):
    """Each token to its best expert: looks at its data, so that it can only run whole. Returns (output, load)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)
            if rows[0].numel():
                result = result.index_put(rows, expert(x[rows]) * weights[rows].unsqueeze(-1))
        return result, torch.bincount(chosen.flatten(), minlength=len(self.experts))


class MixtureOfExperts(nn.Module):
    """Alternates dense layers and experts; integer loads of early layers leave the model."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.experts = nn.ModuleList(Experts(width, 2) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loads = []
        for dense, experts in zip(self.dense, self.experts, strict=True):
            chosen, load = experts(torch.relu(dense(x)))
            x = x + chosen
            loads.append(load)
        return x, loads
