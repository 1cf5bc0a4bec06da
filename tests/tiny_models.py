"""Small seeded language models for the tests of the report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

VOCABULARY = 256


class TinyModel(nn.Module):
    """Embedding, one hidden layer with a residual, output head; called as a model of ``transformers`` is."""

    def __init__(self, hidden: int = 144, *, bias: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 200, bias=bias)
        self.down = nn.Linear(200, hidden, bias=bias)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        x = self.table(input_ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return SimpleNamespace(logits=self.head(x))


def tiny_model(seed: int = 0, *, bias: bool = True) -> TinyModel:
    """A TinyModel with weights from the seed, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyModel(bias=bias)


def tokens(count: int, seed: int = 1) -> Tensor:
    """Random token ids, int64 [count]."""
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def save_llama(folder: Path) -> Path:
    """Save a random Llama of two blocks with a tokenizer of one token a byte, as Hugging Face folders have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=136,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: code for code, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
