"""Pretrained transformers that read texts: configuration, their own tokenizer, and weights of safetensors files alone.

A transformer is a folder with ``config.json``, ``tokenizer.json`` and ``model.safetensors``, as the Hugging Face hub has them.
"""

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

from vse.features.backbones.model_folder import check_settings, checked_transformer, download, local_folder
from vse.features.settings.libraries import Library
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, WatchedFile, wrap_read_errors
from vse.pipeline.files.writing import parse_json, read_json

_EXTRA = "text"
TRANSFORMERS = Library("Transformers", "transformers", "transformers", _EXTRA)
TOKENIZERS = Library("Tokenizers", "tokenizers", "tokenizers", _EXTRA)
TINY = "tiny"  # the name of a transformer of random weights whose tokenizer is made from captions
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DOWNLOADED = ("config.json", "tokenizer.json", "tokenizer_config.json", "model*.safetensors*")
_NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet")  # their positions are counted from the padding's number on


@dataclass(frozen=True)
class Transformer:
    """A transformer that reads texts: all of it but its weights, and where those lie.

    name : the model's, for messages
    config : content of its ``config.json``
    tokenizer_json : content of its ``tokenizer.json``
    longest : tokens of a text beyond which it is cut, the special ones among them; None: as many as it has positions
    weights : files of its weights; none: they are drawn, or are about to be replaced
    commit : hash of the commit of a download from the Hugging Face hub; None if there was no download
    """

    name: str
    config: Mapping[str, Any]
    tokenizer_json: str
    longest: int | None = None
    weights: tuple[WatchedFile, ...] = ()
    commit: str | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """A :class:`tokenizers.Tokenizer` that cuts long texts and pads none.

        :class:`UserError` if it is another model's, or leaves no room for a text.
        """
        tokenizers = TOKENIZERS.load(self.name)
        with wrap_read_errors(Path(self.name), "a model with a tokenizer, by its tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer_json)
        highest, n_known = max(tokenizer.get_vocab().values(), default=0), int(self.config.get("vocab_size", 0))
        if highest >= n_known:
            raise UserError(
                f"{self.name}: its tokenizer numbers tokens up to {highest}, and its network knows {n_known}: they are of "
                "different models"
            )
        longest = self.n_positions if self.longest is None else self.longest
        n_special = tokenizer.num_special_tokens_to_add(False)
        if not n_special < longest <= self.n_positions:
            raise UserError(
                f"{self.name}: max_length {longest} does not suit it; it has {self.n_positions} positions, of which "
                f"{n_special} are for special tokens"
            )
        tokenizer.no_padding()
        tokenizer.enable_truncation(longest)
        return tokenizer

    def unknown(self, text: str) -> list[str]:
        """The words of a text that the tokenizer has no tokens for."""
        encoding, unknown = self.tokenizer.encode(text), getattr(self.tokenizer.model, "unk_token", None)
        return [
            text[slice(*place)] for token, place in zip(encoding.tokens, encoding.offsets, strict=True) if token == unknown
        ]

    def tokens(self, text: str) -> list[str]:
        """What the network reads of a text, special tokens among them."""
        return list(self.tokenizer.encode(text).tokens)

    @property
    def n_positions(self) -> int:
        """How many tokens the network can read."""
        shift = self.padding + 1 if self.config.get("model_type") in _SHIFTED else 0
        return int(self.config.get("max_position_embeddings", 512)) - shift

    @property
    def padding(self) -> int:
        """The number that stands for no token."""
        return int(self.config.get("pad_token_id") or 0)

    @property
    def tokenizer_sha256(self) -> str:
        return hashlib.sha256(self.tokenizer_json.encode()).hexdigest()

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the file of its weights or, of several, of their sums; of none, an empty text."""
        sums = [file.sha256 for file in self.weights]
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest() if sums else ""

    def network(self) -> Any:
        """The network with its weights, in float32, without what follows its last layer.

        Weights that lie nowhere are drawn from torch's default generator.
        """
        check_settings(Path(self.name), self.config)
        transformers = TRANSFORMERS.load(self.name)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with wrap_read_errors(Path(self.name), "a transformer that the library knows, by its config.json"):
            config = transformers.AutoConfig.for_model(**self.config)
        if not self.weights:
            with wrap_read_errors(Path(self.name), "a transformer that the library can build, by its config.json"):
                return _encoder(transformers.AutoModel.from_config(config, trust_remote_code=False))
        folder = self.weights[0].path.parent
        with (
            checked_transformer(folder) as copy,
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
        lacking = sorted(name for name in loaded["missing_keys"] if not name.startswith("pooler."))
        if lacking or loaded.get("mismatched_keys"):
            raise UserError(f"{folder}: its weights are not those of the network in config.json ({lacking[:1] or 'shapes'})")
        for file in self.weights:
            file.check()
        return _encoder(network)


def layers_of(network: Any, name: str) -> tuple[nn.Module, list[nn.Module]]:
    """The embeddings of a transformer, and its layers from the first to the last; :class:`UserError` if it has others."""
    embeddings = getattr(network, "embeddings", None)
    n_layers = getattr(network.config, "num_hidden_layers", None)
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) == n_layers]
    if embeddings is None or not lists:
        raise UserError(f"{name}: not an encoder of texts such as BERT; its embeddings and layers are not where BERT's are")
    return embeddings, list(lists[0])


def read_transformer(model: str, weights_dir: Path | None = None, longest: int | None = None) -> Transformer:
    """A transformer by its name on the Hugging Face hub, or from a local folder.

    The folder of its short name in ``weights_dir`` stands in for a download.
    """
    folder, commit = _folder(model, weights_dir)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name}; a transformer is a folder with config.json, tokenizer.json and weights")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'}: not the configuration of a transformer (it lacks model_type)")
    check_settings(folder / "config.json", config)
    with wrap_read_errors(folder / "tokenizer.json", "the file of a tokenizer"):
        tokenizer_json = InputFile(folder / "tokenizer.json").read().decode()
    return Transformer(model, config, _normalized(folder, tokenizer_json), longest, _weights(folder), commit)


def _normalized(folder: Path, tokenizer_json: str) -> str:
    """Return a ``tokenizer.json`` whose normalizer follows ``tokenizer_config.json``, as the tokenizers of transformers do.

    It is returned unchanged if the two agree. Raises UserError if the latter asks for lower case and the former's normalizer
    cannot be set to it.
    """
    file = folder / "tokenizer_config.json"
    said = read_json(file) if file.is_file() else {}
    if not isinstance(said, dict):
        raise UserError(f"{file}: not the settings of a tokenizer")
    check_settings(file, said)
    tokenizer = parse_json(folder / "tokenizer.json", tokenizer_json.encode())
    normalizer = tokenizer.get("normalizer") if isinstance(tokenizer, dict) else None
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        followed = normalizer | {theirs: said[name] for name, theirs in _NORMALIZER.items() if name in said}
        return tokenizer_json if followed == normalizer else json.dumps({**tokenizer, "normalizer": followed})
    if said.get("do_lower_case") is True and "Lowercase" not in json.dumps(normalizer):
        raise UserError(
            f"{file}: do_lower_case is true, but the normalizer in tokenizer.json keeps capitals; add one of type Lowercase "
            "there, or remove do_lower_case"
        )
    return tokenizer_json


def tiny_transformer(words: Iterable[str], longest: int | None = None) -> Transformer:
    """A BERT of 2 layers of 32 whose WordPiece tokenizer knows the ``words``, and all letters; its weights are drawn."""
    tokenizers = TOKENIZERS.load(TINY)
    letters = string.ascii_lowercase + string.digits
    pieces = [*_SPECIAL, *string.punctuation, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *sorted(set(words))]))}
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
    return Transformer(TINY, config, tokenizer.to_str(), longest)


def _encoder(network: Any) -> Any:
    """The network without a pooler, whose weights nothing would train."""
    if getattr(network, "pooler", None) is not None:
        network.pooler = None
    return network.float()


def _folder(model: str, weights_dir: Path | None) -> tuple[Path, str | None]:
    """Return the folder of a model and, if it was downloaded, the hash of its commit."""
    if (folder := Path(model)).is_dir():
        return folder, None
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such folder of a transformer")
    if (local := local_folder(model, weights_dir)) is not None:
        return local, None
    downloaded = download(model, _DOWNLOADED)
    return downloaded.folder, downloaded.commit


def _weights(folder: Path) -> tuple[WatchedFile, ...]:
    single = folder / "model.safetensors"
    if single.is_file():
        return (WatchedFile(single),)
    parts = [*folder.glob("model.safetensors.index.json"), *sorted(folder.glob("model-*.safetensors"))]
    if not parts:
        raise UserError(f"{folder}: no model.safetensors; weights in other formats, which may run code, are not read")
    return tuple(map(WatchedFile, parts))
