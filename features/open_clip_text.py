"""Text towers of OpenCLIP, without the positions after a caption's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vse.features.backbones import load_weights_file, open_clip_model, root_logger_kept, weights_file
from vse.features.tensor_hash import tensors_sha256
from vse.features.text_backbones import TextBackbone, tokenizer_sha256
from vse.pipeline.errors import UserError
from vse.pipeline.files import sha256_json

if TYPE_CHECKING:
    from vse.features.extractors.text import TextConfig


class OpenClipText(TextBackbone):
    """The text tower of an OpenCLIP model, with its projection.

    The library runs all positions, 77 in CLIP. In most towers no token sees a later one, so here a batch ends with its
    longest caption, which gives the same vectors; towers that see padding run whole.
    """

    libraries = ("open_clip_torch",)

    def __init__(self, config: TextConfig, weights_dir: Path | None) -> None:
        import open_clip

        name = config.open_clip
        assert name is not None
        file, notes = weights_file(config.model, config.weights, weights_dir), dict[str, Any]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            known = None if file or config.weights == "random" else config.weights
            model = open_clip_model(name, known, notes)
        self.notes = notes
        if file is not None:
            load_weights_file(model, file, _text_weights)
        self.weights_sha256 = tensors_sha256({k: v for k, v in model.state_dict().items() if not _of_images(k)})
        model.visual = nn.Identity()
        self.network = self._model = model.eval().requires_grad_(False)
        self._tower = _causal_tower(model)
        try:
            with root_logger_kept():
                self._tokenizer = open_clip.get_tokenizer(name)
        except Exception as error:  # transformers raises many kinds
            raise UserError(f"{config.model}: cannot get its tokenizer ({str(error).splitlines()[0]})") from None
        inner = getattr(self._tokenizer, "tokenizer", None)  # that of transformers, if it is one
        self.pad = 0 if inner is None else inner.pad_token_id
        self._prompt = config.prompt or ""
        limit = int(self._tokenizer.context_length)
        self.longest = config.max_length or limit
        if self.longest > limit:
            raise UserError(f"max_length {self.longest}: {config.model} reads at most {limit} tokens")
        if self._tower is None and (config.pooling != "own" or self.longest != limit):
            raise UserError(
                f"{config.model}: runs its whole context at once; only pooling: own goes with it, and no max_length"
            )
        reading = self._prompt, self.longest
        self.reading_sha256 = (
            sha256_json([list(self._tokenizer.encoder.items()), *reading])
            if inner is None
            else tokenizer_sha256(inner, *reading)
        )

    def tokenized(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The tokens of each text, its padding cut off where no token sees it, and how many texts were cut."""
        if not texts:
            return [], 0
        texts = [self._prompt + text for text in texts]
        rows = self._tokenizer(texts, context_length=self.longest)
        full = (rows[:, -1] != self.pad).nonzero()[:, 0].tolist()
        longer = self._tokenizer([texts[k] for k in full], context_length=self.longest + 1) if full else rows[:0]
        n_cut = int((longer[:, -1] != self.pad).sum())
        if self._tower is None:
            return rows.tolist(), n_cut
        lengths = (rows != self.pad).sum(1).tolist()
        return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)], n_cut

    def pooled(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The vectors that are compared with those of images."""
        if self._tower is None:
            vectors: Tensor = self._model.encode_text(tokens)
            return vectors
        tower = self._tower
        ends = tokens.argmax(1) if tower.pool == "argmax" else tokens.eq(tower.end).int().argmax(1)
        state = self.states(tokens, mask)[torch.arange(len(tokens), device=tokens.device), ends]
        projection = tower.module.text_projection
        if isinstance(projection, nn.Module):
            projected: Tensor = projection(state)
            return projected
        return state if projection is None else state @ projection

    def states(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n width dim"]:
        """The states after the last normalisation, before the projection."""
        assert self._tower is not None, "refused before"
        module, width = self._tower.module, tokens.shape[1]
        embedded = module.token_embedding(tokens) + module.positional_embedding[:width]
        states: Tensor = module.ln_final(module.transformer(embedded, attn_mask=module.attn_mask[:width, :width]))
        return states


class _CausalTower:
    """A tower in which no token sees a later one: its modules, and where its vector is taken, at the last token."""

    def __init__(self, module: Any, pool: str, end: int) -> None:
        self.module, self.pool, self.end = module, pool, end


def _causal_tower(model: Any) -> _CausalTower | None:
    """The text tower of a model if it can run without its padding; None if it cannot."""
    whole = hasattr(model, "token_embedding")  # CLIP has the parts of its tower itself; other classes have them in one
    module = model if whole else model.text
    pool = getattr(module, "text_pool_type" if whole else "pool_type", "")
    plain = getattr(module, "attn_mask", None) is not None and getattr(module, "cls_emb", None) is None
    if not plain or getattr(module, "use_pad_mask", False) or pool not in ("argmax", "eos"):
        return None
    return _CausalTower(module, pool, getattr(module, "text_eos_id" if whole else "eos_id", 0))


def _of_images(name: str) -> bool:
    return name.startswith("visual.")


def _text_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published weights of a text tower, with the image tower left as it is."""
    images = {name: tensor for name, tensor in model.state_dict().items() if _of_images(name)}
    return {**images, **{name: tensor for name, tensor in state.items() if not _of_images(name)}}
