"""Folders with pretrained models: find or download them, and check that nothing in them runs as code.

sentence-transformers and transformers import code by names in the JSON files of a model: module classes, ``auto_map``,
kernels, other models. This module allows only known names. The libraries read a copy of the checked files, without Python
files, pickles and adapters.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from vse.features.libraries import OptionalLibrary
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.files.writing import parse_json

_COMMIT_PATTERN = re.compile("[0-9a-f]{40}")
HUB_LIBRARY = OptionalLibrary("the library of the Hugging Face hub", "huggingface_hub", "huggingface_hub", "text")


def find_local_folder(model: str, weights_dir: Path | None) -> Path | None:
    """Return the folder ``weights_dir/<last part of the model's name>``; None if there is no such folder."""
    folder = None if weights_dir is None else weights_dir / model.rstrip("/").rpartition("/")[2]
    return folder if folder is not None and folder.is_dir() else None


@dataclass(frozen=True)
class DownloadedModel:
    """A downloaded model: its folder, and the hash of its commit (40 hexadecimal digits)."""

    folder: Path
    commit: str


def download_model(
    model: str, files: Sequence[str], revision: str | None = None, advice: str | None = None
) -> DownloadedModel:
    """Download the files of a model at one commit, or return the folder of an earlier download.

    Raises UserError if the hub is out of reach, or if the hub's library does not report the commit.

    model : name of the model's repository on the Hugging Face hub
    files : patterns of file names
    revision : branch, tag or commit; None: the newest commit
    advice : end of the error message; None: the advice to put the files into a local folder
    """
    hub = HUB_LIBRARY.load(model)
    try:
        folder = Path(hub.snapshot_download(model, revision=revision, allow_patterns=list(files)))
        if not _COMMIT_PATTERN.fullmatch(folder.name):
            raise ValueError(f"{folder} is not the folder of a commit")
        return DownloadedModel(folder, folder.name)
    except Exception as error:  # the hub's client and the network raise exceptions of many classes
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        at = f" at {revision}" if revision else ""
        otherwise = advice or (
            f"put its files (config.json, model.safetensors, tokenizer.json, ...) into a folder {model.rpartition('/')[2]} "
            "and name the folder around it with --weights-dir"
        )
        raise UserError(f"cannot get {model}{at} from the Hugging Face hub ({reason.rstrip('.')}); {otherwise}") from None


def download_first_file(model: str, names: Sequence[str], revision: str | None, advice: str) -> tuple[Path, str]:
    """Download the first file of ``names`` that a model's repository contains; return its path and the hash of the commit.

    Raises UserError, whose message ends with ``advice``, if the hub is out of reach or the repository has none of the files.
    """
    for name in names:  # one download per file, because the later files are large and rarely needed
        found = download_model(model, [name], revision, advice)
        if (found.folder / name).is_file():
            return found.folder / name, found.commit
        revision = found.commit
    raise UserError(f"cannot get {' or '.join(names)} of {model} from the Hugging Face hub; {advice}")


# Python package and module of each class of sentence-transformers. Versions 2.x to 5.3 have all classes in ``models`` instead.
_CLASS_LOCATIONS = {
    "Transformer": ("base.modules", "transformer"),
    "Pooling": ("sentence_transformer.modules", "pooling"),
    "Dense": ("base.modules", "dense"),
    "LayerNorm": ("sentence_transformer.modules", "layer_norm"),
    "Dropout": ("sentence_transformer.modules", "dropout"),
    "Normalize": ("base.modules", "normalize"),
    "WeightedLayerPooling": ("sentence_transformer.modules", "weighted_layer_pooling"),
}
_LIBRARY_PREFIX = "sentence_transformers."
CLASS_NAMES_BY_TYPE = {
    f"{_LIBRARY_PREFIX}{path}": name
    for name, (package, file) in _CLASS_LOCATIONS.items()
    for path in (
        f"models.{name}",
        f"models.{name}.{name}",
        f"{package}.{name}",
        f"{package}.{file}.{name}",
        f"sentence_transformer.modules.{file}.{name}",  # versions 5.x from 5.4 on
    )
}
_CLASSES_WITH_WEIGHTS = ("Transformer", "Dense", "LayerNorm", "WeightedLayerPooling")
_ACTIVATION_CLASSES = {
    "torch.nn.modules.linear.Identity",
    *map("torch.nn.modules.activation.{}".format, ("ELU", "GELU", "LeakyReLU", "Mish", "ReLU", "SiLU", "Sigmoid", "Tanh")),
}
_ALLOWED_SETTINGS = {"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"}
_ARGUMENT_PREFIXES = {"model", "tokenizer", "processor", "config"}  # prefixes of settings that end in _args or _kwargs
_ALLOWED_ARGUMENTS = {"add_pooling_layer", "attn_implementation", "dtype", "model_max_length", "padding_side", "torch_dtype"}
_CODE_REFERENCE_KEYS = {"auto_map", "custom_generate", "custom_pipelines", "trust_remote_code"}  # settings that name code
_MODEL_REFERENCE_KEYS = {"architecture", "backbone", "base_model_name_or_path", "tokenizer_name_or_path"}
_ATTENTION_IMPLEMENTATIONS = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}

_SETTINGS_FILE_PATTERNS = ("config.json", "config_sentence_transformers.json", "modules.json", "sentence_*_config.json")
_CHECKED_FILE_PATTERNS = (*_SETTINGS_FILE_PATTERNS, "tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER_FILE_PATTERNS = ("tokenizer.json", "added_tokens.json", "vocab.json", "*.txt", "*.model")
_WEIGHT_INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILE_PATTERNS = ("model.safetensors", "model-*.safetensors")


@contextmanager
def copy_checked_model(folder: Path, all_modules: bool = True) -> Iterator[Path]:
    """Yield a temporary copy of a text encoder's folder: copies of the checked files, and symbolic links to the weights.

    With ``all_modules``, the subfolders of all modules (parts of a sentence-transformers model, such as pooling) are copied.
    Without it, only the files in ``folder`` itself are copied. Raises UserError if a file refers to code, to another model or
    to an unknown module class, or if the weights are not safetensors files.
    """
    with tempfile.TemporaryDirectory(prefix="vse-model-") as temporary:
        copy = Path(temporary) / (folder.name or "model")
        modules = read_modules(folder) if all_modules else []
        classes = {module["path"]: CLASS_NAMES_BY_TYPE[module["type"]] for module in modules}
        for path, class_name in {
            "": "",
            **(classes or {"": "Transformer"}),
        }.items():  # the root folder is copied even if no module lies in it
            _copy_module(folder / path, copy / path, class_name)
        yield copy


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of ``modules.json``, the list of the modules of a sentence-transformers model.

    A module is a part of the model, such as its transformer or its pooling. An entry has the class (``type``) and the
    subfolder (``path``) of a module. The result is empty if the file does not exist. Raises UserError if the file contains an
    unknown class (:data:`CLASS_NAMES_BY_TYPE`), or a path outside the folder.
    """
    file = folder / "modules.json"
    if not file.exists():
        return []
    modules: list[dict[str, Any]] = parse_json(file, InputFile(file).read())
    sound = isinstance(modules, list) and all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in modules
    )
    if not sound or not modules:
        raise UserError(f"{file}: not the modules of a text encoder")
    for module in modules:
        _check_module_class(file, module["type"])
        path = PurePosixPath(module["path"])
        if path.is_absolute() or ".." in path.parts or "\\" in module["path"]:
            raise UserError(f"{file}: the path {module['path']} leads out of the folder; name a folder inside it")
    first = CLASS_NAMES_BY_TYPE[modules[0]["type"]]
    if first != "Transformer":
        raise UserError(f"{file}: the first module is a {first}, not a transformer of text")
    return modules


def reject_code_references(file: Path, content: Any) -> None:
    """Raise UserError if the settings ``content`` refer to code or to another model, at any depth of nesting.

    ``file`` is the JSON file that contains the settings, for the message.
    """
    for key, value in _walk_json_entries(content):
        if key in _CODE_REFERENCE_KEYS and value:
            raise UserError(f"{file}: {key} names code of the model ({_shorten(value)}); use a model without code")
        if key in _MODEL_REFERENCE_KEYS and isinstance(value, str):
            raise UserError(f"{file}: {key} names another model ({value}); use a complete model")
        if key.endswith("attn_implementation"):
            for kind in value.values() if isinstance(value, dict) else [value]:
                if kind is not None and kind not in _ATTENTION_IMPLEMENTATIONS:
                    raise UserError(f"{file}: {key} names code of the model ({kind}); remove the line")


def _copy_module(source: Path, target: Path, class_name: str) -> None:
    """Check and copy the files of one module of a text encoder, such as its transformer or its pooling.

    ``class_name`` is the class of the module; "" for a main folder in which no module lies.
    """
    if not source.is_dir():  # a module without settings has no folder
        return
    target.mkdir(parents=True, exist_ok=True)
    if class_name == "Transformer" and (source / "adapter_config.json").exists():
        raise UserError(f"{source / 'adapter_config.json'}: an adapter for another model; merge it into that model first")
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    for file in [
        source / name
        for name in names
        if _matches_any(name, (*_CHECKED_FILE_PATTERNS, *_TOKENIZER_FILE_PATTERNS, _WEIGHT_INDEX_NAME))
    ]:
        content = InputFile(file).read()
        if _matches_any(file.name, _CHECKED_FILE_PATTERNS):
            _check_settings_file(file, parse_json(file, content), class_name)
        elif file.name == _WEIGHT_INDEX_NAME:
            _check_weight_index(file, parse_json(file, content), names)
        (target / file.name).write_bytes(content)
    weights = [name for name in names if _matches_any(name, _WEIGHT_FILE_PATTERNS)]
    if not weights and class_name in _CLASSES_WITH_WEIGHTS:
        raise UserError(
            f"{source}: not a text encoder with model.safetensors; weights in other formats may run code and are not read"
        )
    for weight in weights:
        (target / weight).symlink_to((source / weight).resolve())


def _check_settings_file(file: Path, content: Any, class_name: str) -> None:
    if file.name != "modules.json" and not isinstance(content, dict):
        raise UserError(f"{file}: not the settings of a model")
    reject_code_references(file, content)
    if class_name == "Transformer" and fnmatchcase(file.name, "sentence_*_config.json"):
        _check_transformer_settings(file, content)
    if class_name == "Dense" and file.name == "config.json":
        activation = content.get("activation_function")
        if activation is not None and activation not in _ACTIVATION_CLASSES:
            raise UserError(f"{file}: the activation_function {_shorten(activation)} is not a known activation of torch")


def _check_transformer_settings(file: Path, content: Mapping[str, Any]) -> None:
    """Raise UserError if ``sentence_bert_config.json`` has a setting that could load or call other code."""
    for key, value in content.items():
        if key.rpartition("_")[0] in _ARGUMENT_PREFIXES and isinstance(value, dict):
            unknown = sorted(set(value) - _ALLOWED_ARGUMENTS)
        else:
            unknown = [] if key in _ALLOWED_SETTINGS or value in (None, False, "", {}, []) else [key]
        if unknown:
            raise UserError(f"{file}: the setting {unknown[0]} is not supported; remove it if the model works without it")
    methods = [value for key, value in _walk_json_entries(content.get("modality_config")) if key == "method"]
    if any(method != "forward" for method in methods) or content.get("transformer_task", "feature-extraction") != (
        "feature-extraction"
    ):
        raise UserError(f"{file}: not the settings of a text encoder (method: forward, transformer_task: feature-extraction)")


def _check_weight_index(file: Path, content: Any, names: list[str]) -> None:
    parts = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(parts, dict):
        raise UserError(f"{file}: not the list of a model's weights (it lacks weight_map)")
    for part in parts.values():
        if part not in names or not _matches_any(part, _WEIGHT_FILE_PATTERNS):
            raise UserError(f"{file}: {_shorten(part)} is not one of the model-*.safetensors files next to it")


def _check_module_class(file: Path, name: str) -> None:
    if name not in CLASS_NAMES_BY_TYPE:
        is_of_library = name.startswith(_LIBRARY_PREFIX)
        problem = f"the module class {name} is not supported" if is_of_library else f"{name} is code of the model"
        raise UserError(f"{file}: {problem}; use a model of {', '.join(_CLASS_LOCATIONS)}")


def _walk_json_entries(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key, value
            yield from _walk_json_entries(value)
    elif isinstance(content, list):
        for value in content:
            yield from _walk_json_entries(value)


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shorten(value: Any) -> str:
    text = ", ".join(map(str, value.values())) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, types, shapes and values of tensors on any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
