# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer that keeps the documents of a row apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


def attention_mask(document_ids: Tensor) -> Tensor:
    """True where a token may look: bool, (rows, 1, tokens, tokens)."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones_like(same[0, 0]).tril()


class Block(nn.Module):
    """Attention, then two linear layers, each added to what comes in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x))
        heads = parts.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Logits of the next token, for each token of a row."""

    def __init__(
        self, num_tokens: int, max_tokens: int, width: int = 256, num_layers: int = 3
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(max_tokens, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        return self.decode(self.tokens(input_ids), position_ids, document_ids)

    def decode(self, x: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Return the logits for embedded tokens, (rows, tokens, vocabulary)."""
        x = x + self.positions(position_ids)
        mask = attention_mask(document_ids)  # once for all layers
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.tokens.weight.T
