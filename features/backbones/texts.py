"""Pretrained text encoders, each a tokenizer and a network.

:class:`SentenceTextBackbone` loads models of the Hugging Face hub with sentence-transformers (BERT, MiniLM, E5, GTE and
others), and :class:`OpenClipTextBackbone` loads the text encoders of OpenCLIP.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vse.features.backbones.model_folder import (
    copy_checked_model,
    download_model,
    find_local_folder,
    hash_tensors,
    read_modules,
)
from vse.features.backbones.networks import (
    build_open_clip,
    find_weights_file,
    load_weights_file,
    prevent_open_clip_log_handler,
)
from vse.features.backbones.weight_files import WEIGHTS_FILE_KEY, WeightsFile
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json, sha256_json

if TYPE_CHECKING:
    from vse.features.settings.captions import TextConfig


class TextBackbone(ABC):
    """A tokenizer and a network that reads its tokens, in evaluation mode.

    distributions : PyPI names of libraries whose versions the cache records
    network : the network, on the CPU until the caller moves it to a device
    max_length : maximum number of tokens of a text, with special tokens
    pad_id : id of the padding token
    weights_sha256 : SHA-256 of all learned parameters
    tokenizer_sha256 : SHA-256 of the tokenizer, the prompt and the maximum length
    settings_sha256 : SHA-256 of the network's settings, such as the sizes of layers; "" if the model has no file of settings
    provenance : notes for the provenance of a cache, such as the commit of a download
    folder : folder with the files of the model; None for OpenCLIP
    """

    distributions: ClassVar[Sequence[str]]
    network: nn.Module
    max_length: int
    pad_id: int
    weights_sha256: str
    tokenizer_sha256: str
    settings_sha256: str = ""
    provenance: Mapping[str, Any] = {}
    folder: Path | None = None

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """Return at most ``max_length`` token ids for each text, and the number of truncated texts."""

    @abstractmethod
    def compute_text_vectors(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """Return the vector of each text by the model's own pooling. ``tokens`` are padded; ``mask`` is False for padding."""

    @abstractmethod
    def compute_token_states(
        self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]
    ) -> Float[Tensor, "n width dim"]:
        """Return the last layer's state of each token. The states of padding have no meaning."""


def load_text_backbone(config: TextConfig, weights_dir: Path | None = None) -> TextBackbone:
    """Load the text encoder of a feature preset, on the CPU. Raises UserError if the library or the weights are missing.

    The folder (for OpenCLIP, the file) ``weights_dir/<last part of the model's name>`` replaces a download.
    """
    config.library.load(config.model)
    return (
        SentenceTextBackbone(config, weights_dir)
        if config.open_clip_name is None
        else OpenClipTextBackbone(config, weights_dir)
    )


def hash_tokenizer(tokenizer: Any, *settings: object) -> str:
    """Return the SHA-256 of a tokenizer of transformers, and of further ``settings`` that determine a text's tokens.

    The hash does not depend on the version of the library that wrote the tokenizer's file.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        saved = json.loads(backend.to_str())
        content = {name: saved[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens")}
    return sha256_json([content, *settings])


_DOWNLOADED_FILE_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors"]  # no pickle, no code
_UNHASHED_SETTINGS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
_DEFAULT_MAX_TOKENS = 100_000  # for models that state no limit


class SentenceTextBackbone(TextBackbone):
    """A text encoder of sentence-transformers or transformers.

    Models that were published for the library transformers have no pooling. Their vector of a text is the mean token state.
    """

    distributions = ("sentence-transformers", "transformers")

    def __init__(self, config: TextConfig, weights_dir: Path | None) -> None:
        folder, provenance = _find_or_download_folder(config, weights_dir)
        self.folder, modules = folder, read_modules(folder)
        self.provenance = {**provenance, **_describe_weights(folder, modules, config)}
        self.network = self._model = _load_model(folder, config)
        self._transformer_module = self._model[0]
        transformer, tokenizer = getattr(self._transformer_module, "auto_model", None), getattr(self._model, "tokenizer", None)
        if transformer is None or not callable(tokenizer):
            raise UserError(
                f"{config.model}: its first module is a {type(self._transformer_module).__name__}, not a transformer of text"
            )
        self._tokenizer: Any = tokenizer
        limit = min(int(self._model.max_seq_length or _DEFAULT_MAX_TOKENS), _DEFAULT_MAX_TOKENS)
        self.max_length = config.max_length or limit
        if self.max_length > limit:
            raise UserError(f"max_length {self.max_length}: {config.model} reads at most {limit} tokens")
        self.pad_id = self._tokenizer.pad_token_id or 0
        default = self._model.prompts.get(self._model.default_prompt_name or "", "")
        self._prompt = default if config.prompt is None else config.prompt
        self._lowercases_text = bool(getattr(self._transformer_module, "do_lower_case", False))
        self._n_skipped_tokens = (
            self._count_prompt_tokens() if any(not getattr(m, "include_prompt", True) for m in self._model) else 0
        )
        weights = {f"0.{name}": tensor for name, tensor in transformer.state_dict().items() if "pooler." not in name}
        if config.pooling == "own":  # the model's own vector also depends on the modules after the transformer
            weights |= {n: t for n, t in self._model.state_dict().items() if not n.startswith("0.")}
        self.weights_sha256 = hash_tensors(weights)
        self.settings_sha256 = sha256_json(_read_network_settings(folder, modules, all_modules=config.pooling == "own"))
        self.tokenizer_sha256 = hash_tokenizer(tokenizer, self._prompt, self.max_length, self._lowercases_text)

    def tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        if not texts:
            return [], 0
        prompted = [self._prompt + (text.lower() if self._lowercases_text else text) for text in texts]
        rows: list[list[int]] = self._tokenizer(prompted, truncation=True, max_length=self.max_length)["input_ids"]
        full = [text for text, row in zip(prompted, rows, strict=True) if len(row) == self.max_length]
        untruncated = self._tokenizer(full, truncation=False, verbose=False)["input_ids"] if full else []
        return rows, sum(len(row) > self.max_length for row in untruncated)

    def compute_text_vectors(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        vectors: Tensor = self._model(self._build_model_inputs(tokens, mask))["sentence_embedding"]
        return vectors

    def compute_token_states(
        self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]
    ) -> Float[Tensor, "n width dim"]:
        states: Tensor = self._transformer_module(self._build_model_inputs(tokens, mask))["token_embeddings"]
        return states

    def _build_model_inputs(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        features: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask.long()}
        return {**features, "prompt_length": self._n_skipped_tokens} if self._n_skipped_tokens else features

    def _count_prompt_tokens(self) -> int:
        """Return the number of the prompt's tokens, without the end token. Some models leave these tokens out of pooling."""
        tokens = self._tokenizer(self._prompt)["input_ids"] if self._prompt else []
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        return len(tokens) - bool(tokens and tokens[-1] in ends)


def _find_or_download_folder(config: TextConfig, weights_dir: Path | None) -> tuple[Path, Mapping[str, Any]]:
    if config.has_local_weights:
        folder = Path(config.weights)
        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise UserError(f"{folder}: no folder with a text encoder (config.json, model.safetensors, tokenizer.json)")
        return folder, {}
    if (local := find_local_folder(config.model, weights_dir)) is not None:
        return local, {}
    downloaded = download_model(config.model, _DOWNLOADED_FILE_PATTERNS, config.revision)
    return downloaded.folder, {"commit": downloaded.commit}


def _describe_weights(folder: Path, modules: Sequence[Mapping[str, Any]], config: TextConfig) -> dict[str, Any]:
    """Return name, size and hash of the transformer's first file of weights, for the provenance; {} for random weights."""
    transformer = folder / (modules[0]["path"] if modules else "")
    files = sorted(transformer.glob("model*.safetensors"))
    return {WEIGHTS_FILE_KEY: WeightsFile.describe(files[0], folder)} if files and config.weights != "random" else {}


def _read_network_settings(folder: Path, modules: Sequence[Mapping[str, Any]], all_modules: bool) -> list[Any]:
    """Return a list with the settings of the transformer in ``folder``, the first of the ``modules`` of the model.

    With ``all_modules``, the class and the settings of each other module, such as its pooling, follow.
    """

    def read_settings(path: str) -> Any:
        file = folder / path / "config.json"
        return read_json(file) if file.is_file() else {}

    network = read_settings(modules[0]["path"] if modules else "")
    relevant = {key: value for key, value in network.items() if key not in _UNHASHED_SETTINGS}
    return [relevant, *([m["type"].rpartition(".")[2], read_settings(m["path"])] for m in modules[1:] if all_modules)]


def _load_model(folder: Path, config: TextConfig) -> Any:
    """Load the model in a folder, in float32, on the CPU. With ``weights: random`` the transformer gets random weights."""
    from sentence_transformers import SentenceTransformer

    with copy_checked_model(folder) as copy, _silence_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model: Any = SentenceTransformer(str(copy), device="cpu", local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the libraries raise many classes of errors for a wrong folder
            text = str(error).replace(str(copy), str(folder))
            reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
            raise UserError(f"{folder}: not a text encoder that sentence-transformers reads ({reason})") from None
        if config.weights == "random" and hasattr(model[0], "auto_model"):
            torch.manual_seed(config.seed)
            transformer = model[0].auto_model
            transformer.load_state_dict(type(transformer)(transformer.config).state_dict())
    return model.float().eval().requires_grad_(False)


@contextmanager
def _silence_libraries() -> Iterator[None]:
    import transformers

    library_logging: Any = transformers.utils.logging
    library = logging.getLogger("sentence_transformers")
    verbosity, level, bar = library_logging.get_verbosity(), library.level, library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    library.setLevel(logging.WARNING)
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        library.setLevel(level)
        if bar:
            library_logging.enable_progress_bar()


class OpenClipTextBackbone(TextBackbone):
    """The text encoder (*tower*) of an OpenCLIP model, with the projection of its output.

    In most towers no token attends to a later one (causal attention), so padding does not change the vectors. A causal tower
    therefore reads batches that are only as wide as their longest caption. Other towers read all positions (77 in CLIP).
    """

    distributions = ("open_clip_torch",)

    def __init__(self, config: TextConfig, weights_dir: Path | None) -> None:
        import open_clip

        name = config.open_clip_name
        assert name is not None
        file, notes = find_weights_file(config.model, config.weights, weights_dir), dict[str, Any]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            weights = None if file or config.weights == "random" else config.weights
            model = build_open_clip(name, weights, notes)
        self.provenance = notes
        if file is not None:
            load_weights_file(model, file, _replace_text_weights)
            notes[WEIGHTS_FILE_KEY] = WeightsFile.describe(file)
        self.weights_sha256 = hash_tensors({k: v for k, v in model.state_dict().items() if not k.startswith("visual.")})
        model.visual = nn.Identity()
        self.network = self._model = model.eval().requires_grad_(False)
        self._tower = _find_causal_tower(model)
        try:
            with prevent_open_clip_log_handler():
                self._tokenizer = open_clip.get_tokenizer(name)
        except Exception as error:  # transformers raises many classes of errors
            raise UserError(f"{config.model}: cannot get its tokenizer ({str(error).splitlines()[0]})") from None
        inner = getattr(self._tokenizer, "tokenizer", None)  # a tokenizer of transformers, or None for OpenCLIP's own
        self.pad_id = 0 if inner is None else inner.pad_token_id
        self._prompt = config.prompt or ""
        limit = int(self._tokenizer.context_length)
        self.max_length = config.max_length or limit
        if self.max_length > limit:
            raise UserError(f"max_length {self.max_length}: {config.model} reads at most {limit} tokens")
        if self._tower is None and (config.pooling != "own" or self.max_length != limit):
            raise UserError(
                f"{config.model}: always computes its complete context, so pooling must be own, and max_length is not allowed"
            )
        settings = self._prompt, self.max_length
        self.tokenizer_sha256 = (
            sha256_json([list(self._tokenizer.encoder.items()), *settings])
            if inner is None
            else hash_tokenizer(inner, *settings)
        )

    def tokenize(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        if not texts:
            return [], 0
        texts = [self._prompt + text for text in texts]
        rows = self._tokenizer(texts, context_length=self.max_length)
        full = (rows[:, -1] != self.pad_id).nonzero()[:, 0].tolist()
        longer = self._tokenizer([texts[k] for k in full], context_length=self.max_length + 1) if full else rows[:0]
        n_cut = int((longer[:, -1] != self.pad_id).sum())
        if self._tower is None:
            return rows.tolist(), n_cut
        lengths = (rows != self.pad_id).sum(1).tolist()
        return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)], n_cut

    def compute_text_vectors(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        if self._tower is None:
            vectors: Tensor = self._model.encode_text(tokens)
            return vectors
        tower = self._tower
        ends = tokens.argmax(1) if tower.end_rule == "argmax" else tokens.eq(tower.end_token_id).int().argmax(1)
        state = self.compute_token_states(tokens, mask)[torch.arange(len(tokens), device=tokens.device), ends]
        projection = tower.module.text_projection
        if isinstance(projection, nn.Module):
            projected: Tensor = projection(state)
            return projected
        return state if projection is None else state @ projection

    def compute_token_states(
        self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]
    ) -> Float[Tensor, "n width dim"]:
        assert self._tower is not None, "the constructor checks this"
        module, width = self._tower.module, tokens.shape[1]
        embedded = module.token_embedding(tokens) + module.positional_embedding[:width]
        states: Tensor = module.ln_final(module.transformer(embedded, attn_mask=module.attn_mask[:width, :width]))
        return states


class _CausalTower:
    """A text tower in which no token attends to a later one. The vector of a text is the state of its last token.

    module : module with the tower's layers
    end_rule : rule that finds the last token: ``argmax``, the token with the highest id, or ``eos``, the token
        ``end_token_id``
    end_token_id : id of the last token of a text
    """

    def __init__(self, module: Any, end_rule: str, end_token_id: int) -> None:
        self.module, self.end_rule, self.end_token_id = module, end_rule, end_token_id


def _find_causal_tower(model: Any) -> _CausalTower | None:
    """Return the text tower of an OpenCLIP model; None if the tower is not causal, or does not pool the last token."""
    is_clip = hasattr(model, "token_embedding")  # class CLIP has the tower's layers itself; others in ``text``
    module = model if is_clip else model.text
    pool = getattr(module, "text_pool_type" if is_clip else "pool_type", "")
    plain = getattr(module, "attn_mask", None) is not None and getattr(module, "cls_emb", None) is None
    if not plain or getattr(module, "use_pad_mask", False) or pool not in ("argmax", "eos"):
        return None
    return _CausalTower(module, pool, getattr(module, "text_eos_id" if is_clip else "eos_id", 0))


def _replace_text_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights for ``model``: the text tower's weights from ``state``, and the image tower's current weights."""
    images = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("visual.")}
    return {**images, **{name: tensor for name, tensor in state.items() if not name.startswith("visual.")}}
