"""Pretrained transformers that read texts: configuration, tokenizer, and weights from safetensors files."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vse.features.backbones.model_folder import copy_checked_model, download_model, find_local_folder, reject_code_references
from vse.features.libraries import OptionalLibrary
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, WatchedFile, wrap_read_errors
from vse.pipeline.files.writing import parse_json, read_json

_PIP_EXTRA = "text"
TRANSFORMERS_LIBRARY = OptionalLibrary("Transformers", "transformers", "transformers", _PIP_EXTRA)
TOKENIZERS_LIBRARY = OptionalLibrary("Tokenizers", "tokenizers", "tokenizers", _PIP_EXTRA)
TINY_MODEL_NAME = "tiny"  # name of the transformer of build_tiny_transformer
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DOWNLOADED_FILE_PATTERNS = ("config.json", "tokenizer.json", "tokenizer_config.json", "model*.safetensors*")
_NORMALIZER_OPTIONS = {  # names of options in tokenizer_config.json and of the same options of the normalizer
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_SHIFTED_POSITION_MODEL_TYPES = ("roberta", "xlm-roberta", "camembert", "mpnet")  # texts start at position pad_index + 1


@dataclass(frozen=True)
class Transformer:
    """A transformer that reads texts: its configuration, its tokenizer, and the files of its weights.

    name : name of the model, for messages
    config : content of ``config.json``
    tokenizer_json : content of ``tokenizer.json``
    max_length : maximum number of tokens of a text, with special tokens; None: the network's number of positions
    weight_files : files of weights; empty for random weights
    commit : hash of the downloaded commit of the Hugging Face hub; None without a download
    """

    name: str
    config: Mapping[str, Any]
    tokenizer_json: str
    max_length: int | None = None
    weight_files: tuple[WatchedFile, ...] = ()
    commit: str | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """A :class:`tokenizers.Tokenizer` that truncates long texts and adds no padding.

        Raises UserError if the tokenizer belongs to another model, or if ``max_length`` does not suit the model.
        """
        tokenizers = TOKENIZERS_LIBRARY.load(self.name)
        with wrap_read_errors(Path(self.name), "a model with a tokenizer, by its tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer_json)
        highest, n_known = max(tokenizer.get_vocab().values(), default=0), int(self.config.get("vocab_size", 0))
        if highest >= n_known:
            raise UserError(
                f"{self.name}: the tokenizer has token ids up to {highest}, but the network knows only {n_known} tokens; "
                "tokenizer and network belong to different models"
            )
        max_length = self.n_positions if self.max_length is None else self.max_length
        n_special = tokenizer.num_special_tokens_to_add(False)
        if not n_special < max_length <= self.n_positions:
            raise UserError(
                f"{self.name}: max_length {max_length} does not suit the model: it has {self.n_positions} positions, and "
                f"{n_special} of them are for special tokens"
            )
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length)
        return tokenizer

    def find_unknown_words(self, text: str) -> list[str]:
        """Return the parts of a text that the tokenizer does not know."""
        encoding, unknown = self.tokenizer.encode(text), getattr(self.tokenizer.model, "unk_token", None)
        return [
            text[slice(*place)] for token, place in zip(encoding.tokens, encoding.offsets, strict=True) if token == unknown
        ]

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text, with special tokens."""
        return list(self.tokenizer.encode(text).tokens)

    @property
    def n_positions(self) -> int:
        """Maximum number of tokens that the network can read."""
        shift = self.pad_index + 1 if self.config.get("model_type") in _SHIFTED_POSITION_MODEL_TYPES else 0
        return int(self.config.get("max_position_embeddings", 512)) - shift

    @property
    def pad_index(self) -> int:
        return int(self.config.get("pad_token_id") or 0)

    @property
    def tokenizer_sha256(self) -> str:
        return hashlib.sha256(self.tokenizer_json.encode()).hexdigest()

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the file of weights; for several files, SHA-256 of the joined hashes; "" without a file."""
        hashes = [file.sha256 for file in self.weight_files]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else ""

    def load_network(self) -> Any:
        """Load the network with its weights, in float32, without the pooler after its last layer.

        Without files of weights, torch's default generator draws random weights. Raises UserError if the library cannot build
        the network, or if the weights do not fit the network.
        """
        reject_code_references(Path(self.name), self.config)
        transformers = TRANSFORMERS_LIBRARY.load(self.name)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with wrap_read_errors(Path(self.name), "a transformer that the library knows, by its config.json"):
            config = transformers.AutoConfig.for_model(**self.config)
        if not self.weight_files:
            with wrap_read_errors(Path(self.name), "a transformer that the library can build, by its config.json"):
                return _remove_pooler(transformers.AutoModel.from_config(config, trust_remote_code=False))
        folder = self.weight_files[0].path.parent
        with (
            copy_checked_model(folder, all_modules=False) as copy,
            torch.random.fork_rng(devices=[]),
            wrap_read_errors(folder, "a folder with the weights of this transformer"),
        ):
            network, loaded = transformers.AutoModel.from_pretrained(
                copy,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        missing = sorted(name for name in loaded["missing_keys"] if not name.startswith("pooler."))
        if missing or loaded.get("mismatched_keys"):
            raise UserError(f"{folder}: the weights do not fit the network in config.json ({missing[:1] or 'shapes'})")
        for file in self.weight_files:
            file.check_unchanged()
        return _remove_pooler(network)


def find_embeddings_and_layers(network: Any, model_name: str) -> tuple[nn.Module, list[nn.Module]]:
    """Return the embeddings and the layers of a transformer, in order.

    Raises UserError, which names ``model_name``, if these modules have other names than in BERT.
    """
    embeddings = getattr(network, "embeddings", None)
    n_layers = getattr(network.config, "num_hidden_layers", None)
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) == n_layers]
    if embeddings is None or not lists:
        raise UserError(f"{model_name}: not a text encoder like BERT; its embeddings and layers have other names than in BERT")
    return embeddings, list(lists[0])


def read_transformer(model: str, weights_dir: Path | None = None, max_length: int | None = None) -> Transformer:
    """Read a transformer from a local folder, or from the Hugging Face hub by its name.

    The folder ``weights_dir/<last part of the model's name>`` replaces a download. Raises UserError if the folder does not
    hold a transformer, or if the settings in it refer to code.

    max_length : maximum number of tokens of a text; None: the number of positions of the model
    """
    folder, commit = _find_or_download_folder(model, weights_dir)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name}; a transformer is a folder with config.json, tokenizer.json and weights")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'}: not the configuration of a transformer (it lacks model_type)")
    reject_code_references(folder / "config.json", config)
    with wrap_read_errors(folder / "tokenizer.json", "the file of a tokenizer"):
        tokenizer_json = InputFile(folder / "tokenizer.json").read().decode()
    return Transformer(
        model, config, _apply_tokenizer_config(folder, tokenizer_json), max_length, _find_weight_files(folder), commit
    )


def _apply_tokenizer_config(folder: Path, tokenizer_json: str) -> str:
    """Return the text of ``tokenizer.json`` with the normalizer settings of ``tokenizer_config.json``, such as lower case.

    The library transformers changes the normalizer in the same way. Raises UserError if texts must be in lower case, but the
    normalizer has no such setting.
    """
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{file}: not the settings of a tokenizer")
    reject_code_references(file, settings)
    tokenizer = parse_json(folder / "tokenizer.json", tokenizer_json.encode())
    normalizer = tokenizer.get("normalizer") if isinstance(tokenizer, dict) else None
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        updated = normalizer | {key: settings[name] for name, key in _NORMALIZER_OPTIONS.items() if name in settings}
        return tokenizer_json if updated == normalizer else json.dumps({**tokenizer, "normalizer": updated})
    if settings.get("do_lower_case") is True and "Lowercase" not in json.dumps(normalizer):
        raise UserError(
            f"{file}: do_lower_case is true, but the normalizer in tokenizer.json keeps capitals; add one of type Lowercase "
            "there, or remove do_lower_case"
        )
    return tokenizer_json


def build_tiny_transformer(words: Iterable[str], max_length: int | None = None) -> Transformer:
    """Return a BERT with 2 layers of size 32, random weights, and a WordPiece tokenizer that knows ``words`` and letters."""
    tokenizers = TOKENIZERS_LIBRARY.load(TINY_MODEL_NAME)
    letters = string.ascii_lowercase + string.digits
    pieces = [*_SPECIAL_TOKENS, *string.punctuation, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *sorted(set(words))]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = (("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
    config = {
        "model_type": "bert",
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    }
    return Transformer(TINY_MODEL_NAME, config, tokenizer.to_str(), max_length)


def _remove_pooler(network: Any) -> Any:
    if getattr(network, "pooler", None) is not None:
        network.pooler = None
    return network.float()


def _find_or_download_folder(model: str, weights_dir: Path | None) -> tuple[Path, str | None]:
    if (folder := Path(model)).is_dir():
        return folder, None
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such folder of a transformer")
    if (local := find_local_folder(model, weights_dir)) is not None:
        return local, None
    downloaded = download_model(model, _DOWNLOADED_FILE_PATTERNS)
    return downloaded.folder, downloaded.commit


def _find_weight_files(folder: Path) -> tuple[WatchedFile, ...]:
    single = folder / "model.safetensors"
    if single.is_file():
        return (WatchedFile(single),)
    parts = [*folder.glob("model.safetensors.index.json"), *sorted(folder.glob("model-*.safetensors"))]
    if not parts:
        raise UserError(f"{folder}: no model.safetensors; weights in other formats may run code and are not read")
    return tuple(map(WatchedFile, parts))
