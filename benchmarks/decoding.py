"""One step of greedy decoding with a Llama of transformers, in a form that a CUDA graph can capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Step:
    """Feeds one token of each sequence to the model and puts the most likely next ones in its place.

    The model's own modules do the work; the loop over them is written out because the caches of transformers keep
    lengths on the host. Nothing here waits for the GPU, and every tensor that lasts is allocated at the beginning.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        """Start ``batch`` sequences of at most ``length`` tokens, all with token 1."""
        config, weight = model.config, model.model.embed_tokens.weight
        self.model, self.batch, self.length = model, batch, length
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        shape = (config.num_hidden_layers, batch, self.kv_heads, length, self.size)
        self.keys, self.values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.tokens = torch.ones(batch, 1, dtype=torch.int64, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        places = torch.arange(length, device=weight.device)
        angles = places[:, None].float() * model.model.rotary_emb.inv_freq.to(weight.device).float()
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
        self.places = places

    def restart(self) -> None:
        """Begin again with token 1."""
        self.tokens.fill_(1)
        self.position.zero_()

    @torch.no_grad()
    def __call__(self) -> None:
        """Decode one token of each sequence."""
        decoder = self.model.model
        x = decoder.embed_tokens(self.tokens)
        cos, sin = (table.index_select(0, self.position) for table in (self.cos, self.sin))
        seen = (self.places <= self.position).view(1, 1, 1, -1)
        for number, layer in enumerate(decoder.layers):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), number, cos, sin, seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = self.model.lm_head(decoder.norm(x))
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)

    def _attend(self, attention: Any, x: Tensor, number: int, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(self.batch, 1, heads, self.size).transpose(1, 2)

        q = _rotate(split(attention.q_proj(x), self.heads), cos, sin)
        k = _rotate(split(attention.k_proj(x), self.kv_heads), cos, sin)
        self.keys[number].index_copy_(2, self.position, k)
        self.values[number].index_copy_(2, self.position, split(attention.v_proj(x), self.kv_heads))
        y = scaled_dot_product_attention(q, self.keys[number], self.values[number], attn_mask=seen, enable_gqa=True)
        out: Tensor = attention.o_proj(y.transpose(1, 2).reshape(self.batch, 1, -1))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def decode(step: Step, count: int) -> Tensor:
    """Return the next ``count`` tokens of each sequence [batch, count], from the beginning."""
    step.restart()
    found = []
    for _ in range(count):
        step()
        found.append(step.tokens.clone())
    return torch.cat(found, dim=1)
