"""Text encoders of the Hugging Face hub, through sentence-transformers: BERT, MiniLM, E5, GTE and others.

Pretrained text encoders: a tokenizer and a network, whichever library they come from.

Text towers of OpenCLIP, without the positions after a caption's end.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vse.features.backbones.model_folder import copy_checked_model, download, find_local_folder, read_modules, tensors_sha256
from vse.features.backbones.networks import build_open_clip, find_weights_file, load_weights_file, silence_root_logger
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json, sha256_json

if TYPE_CHECKING:
    from vse.features.settings.texts import TextConfig


class TextBackbone(ABC):
    """A tokenizer and a network that reads its tokens, in evaluation mode.

    Attributes
    ----------
    network : what moves to a device
    longest : tokens of a caption that are read, special ones counted
    pad : what a batch is padded with
    weights_sha256 : of all that was learnt
    tokenizer_sha256 : of how a text becomes tokens: the tokenizer, the prompt, the maximal length
    network_sha256 : of what else decides the vectors, such as the layers' sizes; "" if the model's name alone does
    notes : where things came from
    """

    libraries: ClassVar[Sequence[str]]  # distributions whose versions are worth noting
    network: nn.Module
    max_length: int
    pad: int
    weights_sha256: str
    tokenizer_sha256: str
    network_sha256: str = ""
    notes: Mapping[str, Any] = {}

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The tokens of each text, at most ``longest``, and how many texts were cut."""

    @abstractmethod
    def text_vectors(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The model's own vector of each text, from its padded tokens."""

    @abstractmethod
    def token_states(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n width dim"]:
        """The last layer's state of each token; those of padding mean nothing."""


def load_text_backbone(config: TextConfig, weights_dir: Path | None = None) -> TextBackbone:
    """The text encoder of a feature preset, on the CPU.

    What ``weights_dir`` holds stands in for a download: a folder with the last part of the model's name, or for OpenCLIP a
    file. :class:`vse.pipeline.errors.UserError` if the library or the weights are missing.
    """
    config.library.load(config.model)
    if config.open_clip is not None:
        return OpenClipText(config, weights_dir)

    return SentenceText(config, weights_dir)


def hash_tokenizer(tokenizer: Any, *reading: object) -> str:
    """SHA-256 of a tokenizer of transformers and of what else decides a text's tokens, whatever version wrote its file."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        import json

        whole = json.loads(backend.to_str())
        content = {name: whole[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens")}
    return sha256_json([content, *reading])


_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # what is downloaded: no pickle, no code
_NOT_OF_THE_NETWORK = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
_LONGEST = 100_000  # of models without a limit of their own


class SentenceText(TextBackbone):
    """A model of sentence-transformers, or any encoder of transformers, whose own vector is then the mean of its states."""

    libraries = ("sentence-transformers", "transformers")

    def __init__(self, config: TextConfig, weights_dir: Path | None) -> None:
        folder, self.notes = _folder(config, weights_dir)
        modules = read_modules(folder)
        self.network = self._model = _loaded(folder, config)
        self._first = self._model[0]
        transformer, tokenizer = getattr(self._first, "auto_model", None), getattr(self._model, "tokenizer", None)
        if transformer is None or not callable(tokenizer):
            raise UserError(f"{config.model}: its first module is a {type(self._first).__name__}, not a transformer of text")
        self._tokenizer: Any = tokenizer
        limit = min(int(self._model.max_seq_length or _LONGEST), _LONGEST)
        self.max_length = config.max_length or limit
        if self.max_length > limit:
            raise UserError(f"max_length {self.max_length}: {config.model} reads at most {limit} tokens")
        self.pad = self._tokenizer.pad_token_id or 0
        default = self._model.prompts.get(self._model.default_prompt_name or "", "")
        self._prompt = default if config.prompt is None else config.prompt
        self._lower = bool(getattr(self._first, "do_lower_case", False))
        self._skipped = self._prompt_tokens() if any(not getattr(m, "include_prompt", True) for m in self._model) else 0
        weights = {f"0.{name}": tensor for name, tensor in transformer.state_dict().items() if "pooler." not in name}
        if config.pooling == "own":  # and of dense layers after the states
            weights |= {n: t for n, t in self._model.state_dict().items() if not n.startswith("0.")}
        self.weights_sha256 = tensors_sha256(weights)
        self.network_sha256 = sha256_json(_described(folder, modules, config.pooling == "own"))
        self.tokenizer_sha256 = hash_tokenizer(tokenizer, self._prompt, self.max_length, self._lower)

    def tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The tokens of each text behind the prompt, at most ``longest``, and how many texts were cut."""
        if not texts:
            return [], 0
        read = [self._prompt + (text.lower() if self._lower else text) for text in texts]
        rows: list[list[int]] = self._tokenizer(read, truncation=True, max_length=self.max_length)["input_ids"]
        full = [text for text, row in zip(read, rows, strict=True) if len(row) == self.max_length]
        whole = self._tokenizer(full, truncation=False, verbose=False)["input_ids"] if full else []
        return rows, sum(len(row) > self.max_length for row in whole)

    def text_vectors(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The model's own vectors."""
        vectors: Tensor = self._model(self._features(tokens, mask))["sentence_embedding"]
        return vectors

    def token_states(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n width dim"]:
        """The last layer's states."""
        states: Tensor = self._first(self._features(tokens, mask))["token_embeddings"]
        return states

    def _features(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        features: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask.long()}
        return {**features, "prompt_length": self._skipped} if self._skipped else features

    def _prompt_tokens(self) -> int:
        """How many tokens the prompt is, of a model that leaves them out of its mean."""
        tokens = self._tokenizer(self._prompt)["input_ids"] if self._prompt else []
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        return len(tokens) - bool(tokens and tokens[-1] in ends)


def _folder(config: TextConfig, weights_dir: Path | None) -> tuple[Path, Mapping[str, Any]]:
    """The folder of a model, and what is worth noting of it: the user's, or a download's."""
    if config.from_files:
        folder = Path(config.weights)
        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise UserError(f"{folder}: no folder with a text encoder (config.json, model.safetensors, tokenizer.json)")
        return folder, {}
    if (local := find_local_folder(config.model, weights_dir)) is not None:
        return local, {}
    downloaded = download(config.model, _FILES, config.revision)
    return downloaded.folder, {"commit": downloaded.commit}


def _described(folder: Path, modules: Sequence[Mapping[str, Any]], own: bool) -> list[Any]:
    """What decides the vectors beside weights and tokenizer: the network's settings and, of its ``own`` ones, the pooling."""

    def settings(path: str) -> Any:
        file = folder / path / "config.json"
        return read_json(file) if file.is_file() else {}

    network = settings(modules[0]["path"] if modules else "")
    kept = {key: value for key, value in network.items() if key not in _NOT_OF_THE_NETWORK}
    return [kept, *([m["type"].rpartition(".")[2], settings(m["path"])] for m in modules[1:] if own)]


def _loaded(folder: Path, config: TextConfig) -> Any:
    """The model in a folder, in float32, on the CPU; its transformer with random weights if the preset says so."""
    from sentence_transformers import SentenceTransformer

    with copy_checked_model(folder) as copy, _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model: Any = SentenceTransformer(str(copy), device="cpu", local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the libraries raise many kinds for a folder that is not as they want it
            text = str(error).replace(str(copy), str(folder))
            reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
            raise UserError(f"{folder}: not a text encoder that sentence-transformers reads ({reason})") from None
        if config.weights == "random" and hasattr(model[0], "auto_model"):
            torch.manual_seed(config.seed)
            transformer = model[0].auto_model
            transformer.load_state_dict(type(transformer)(transformer.config).state_dict())
    return model.float().eval().requires_grad_(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """In this block transformers shows no progress and only errors, and sentence-transformers only warnings."""
    import transformers

    theirs: Any = transformers.utils.logging
    library = logging.getLogger("sentence_transformers")
    verbosity, level, bar = theirs.get_verbosity(), library.level, theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    library.setLevel(logging.WARNING)
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        library.setLevel(level)
        if bar:
            theirs.enable_progress_bar()


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
        file, notes = find_weights_file(config.model, config.weights, weights_dir), dict[str, Any]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            known = None if file or config.weights == "random" else config.weights
            model = build_open_clip(name, known, notes)
        self.notes = notes
        if file is not None:
            load_weights_file(model, file, _text_weights)
        self.weights_sha256 = tensors_sha256({k: v for k, v in model.state_dict().items() if not _of_images(k)})
        model.visual = nn.Identity()
        self.network = self._model = model.eval().requires_grad_(False)
        self._tower = _causal_tower(model)
        try:
            with silence_root_logger():
                self._tokenizer = open_clip.get_tokenizer(name)
        except Exception as error:  # transformers raises many kinds
            raise UserError(f"{config.model}: cannot get its tokenizer ({str(error).splitlines()[0]})") from None
        inner = getattr(self._tokenizer, "tokenizer", None)  # that of transformers, if it is one
        self.pad = 0 if inner is None else inner.pad_token_id
        self._prompt = config.prompt or ""
        limit = int(self._tokenizer.context_length)
        self.max_length = config.max_length or limit
        if self.max_length > limit:
            raise UserError(f"max_length {self.max_length}: {config.model} reads at most {limit} tokens")
        if self._tower is None and (config.pooling != "own" or self.max_length != limit):
            raise UserError(
                f"{config.model}: runs its whole context at once; only pooling: own goes with it, and no max_length"
            )
        reading = self._prompt, self.max_length
        self.tokenizer_sha256 = (
            sha256_json([list(self._tokenizer.encoder.items()), *reading])
            if inner is None
            else hash_tokenizer(inner, *reading)
        )

    def tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The tokens of each text, its padding cut off where no token sees it, and how many texts were cut."""
        if not texts:
            return [], 0
        texts = [self._prompt + text for text in texts]
        rows = self._tokenizer(texts, context_length=self.max_length)
        full = (rows[:, -1] != self.pad).nonzero()[:, 0].tolist()
        longer = self._tokenizer([texts[k] for k in full], context_length=self.max_length + 1) if full else rows[:0]
        n_cut = int((longer[:, -1] != self.pad).sum())
        if self._tower is None:
            return rows.tolist(), n_cut
        lengths = (rows != self.pad).sum(1).tolist()
        return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)], n_cut

    def text_vectors(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The vectors that are compared with those of images."""
        if self._tower is None:
            vectors: Tensor = self._model.encode_text(tokens)
            return vectors
        tower = self._tower
        ends = tokens.argmax(1) if tower.pool == "argmax" else tokens.eq(tower.end).int().argmax(1)
        state = self.token_states(tokens, mask)[torch.arange(len(tokens), device=tokens.device), ends]
        projection = tower.module.text_projection
        if isinstance(projection, nn.Module):
            projected: Tensor = projection(state)
            return projected
        return state if projection is None else state @ projection

    def token_states(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n width dim"]:
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
