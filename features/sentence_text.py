"""Text encoders of the Hugging Face hub, through sentence-transformers: BERT, MiniLM, E5, GTE and others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vse.features.hub import download, local_folder
from vse.features.model_folder import checked_copy, read_modules
from vse.features.tensor_hash import tensors_sha256
from vse.features.text_backbones import TextBackbone, tokenizer_sha256
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, sha256_json

if TYPE_CHECKING:
    from vse.features.extractors.text import TextConfig

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
        self.longest = config.max_length or limit
        if self.longest > limit:
            raise UserError(f"max_length {self.longest}: {config.model} reads at most {limit} tokens")
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
        self.reading_sha256 = tokenizer_sha256(tokenizer, self._prompt, self.longest, self._lower)

    def tokenized(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The tokens of each text behind the prompt, at most ``longest``, and how many texts were cut."""
        if not texts:
            return [], 0
        read = [self._prompt + (text.lower() if self._lower else text) for text in texts]
        rows: list[list[int]] = self._tokenizer(read, truncation=True, max_length=self.longest)["input_ids"]
        full = [text for text, row in zip(read, rows, strict=True) if len(row) == self.longest]
        whole = self._tokenizer(full, truncation=False, verbose=False)["input_ids"] if full else []
        return rows, sum(len(row) > self.longest for row in whole)

    def pooled(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The model's own vectors."""
        vectors: Tensor = self._model(self._features(tokens, mask))["sentence_embedding"]
        return vectors

    def states(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n width dim"]:
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
    if (local := local_folder(config.model, weights_dir)) is not None:
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

    with checked_copy(folder) as copy, _quiet(), torch.random.fork_rng(devices=[]):
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
