"""Tiny text encoders, written to a folder: a BERT of 2 layers of 32 that spells most words, and an OpenCLIP model."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "the", "red", "blue", "green", "circle", "square", "on", "grass", "dog")
OTHERS = ("a", "the", "two", "three", "four", "triangle", "cat", "on", "sand", "bird")  # as many
MAX_TOKENS = 60  # of a caption, that the tiny BERT reads
CLIP = "tiny-clip-of-tests"


def tiny_bert(folder: Path, seed: int = 0, words: tuple[str, ...] = WORDS, **settings: Any) -> Path:
    """A random BERT with its tokenizer, as transformers saves it: no folder of sentence-transformers."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    signs = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *signs, *(f"##{sign}" for sign in signs), *words[1:]]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizer(
        vocab={word: number for number, word in enumerate(vocabulary)}, do_lower_case=True, model_max_length=MAX_TOKENS
    )
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=200, **{**sizes, **settings}))
        for weight in model.parameters():
            if weight.ndim > 1:  # larger than at the start of a training, so that words tell captions apart
                torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return folder


def with_modules(folder: Path, *modules: tuple[str, dict[str, Any]]) -> Path:
    """The folder with a ``modules.json``: its transformer, then some modules of sentence-transformers with their settings."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for k, (name, settings) in enumerate(modules, 1):
        (folder / f"{k}_{name}").mkdir()
        (folder / f"{k}_{name}" / "config.json").write_text(json.dumps(settings))
        listed.append({"idx": k, "name": str(k), "path": f"{k}_{name}", "type": f"sentence_transformers.models.{name}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def pooling_module(mode: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """The module that pools the states of the tiny BERT: ``mode`` is cls_token, mean_tokens, max_tokens, ..."""
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    return "Pooling", {"word_embedding_dimension": 32, **{f"pooling_mode_{m}": m == mode for m in modes}, **settings}


def add_tiny_clip(folder: Path, name: str = CLIP, **text: Any) -> str:
    import open_clip

    tower = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2, **text}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": tower,
    }
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    return f"open_clip/{name}"
