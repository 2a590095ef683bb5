"""Small pretrained transformers: folders as the Hugging Face hub has them, with random weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

WORDS = ("an", "and", "the", "on", "in", "of", "is", "two", "red", "green", "blue", "disc", "square", "triangle", "grass",
         "sky")  # fmt: skip
LETTERS = string.ascii_lowercase
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "!", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
POSITIONS = 128
BERT = {"vocab_size": len(PIECES) + len(WORDS), "max_position_embeddings": POSITIONS, "hidden_size": 32}
BERT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def word_pieces(*more: str) -> tokenizers.Tokenizer:
    """A tokenizer as BERT's, of a few words and all letters."""
    vocabulary = {piece: number for number, piece in enumerate([*PIECES, *WORDS, *more])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=20)  # as published ones have it
    tokenizer.enable_truncation(20)
    return tokenizer


def make_bert(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """The folder of a BERT of 2 layers of 32."""
    return make_transformer(folder, transformers.BertConfig(**{**BERT, **settings}), seed)


def make_transformer(folder: Path, config: Any, seed: int = 0, tokenizer: tokenizers.Tokenizer | None = None) -> Path:
    """The folder of a transformer of some configuration, whose weights are larger than those of a new one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModel.from_config(config)
        for weight in network.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    network.save_pretrained(folder)
    (tokenizer or word_pieces()).save(str(folder / "tokenizer.json"))
    return folder
