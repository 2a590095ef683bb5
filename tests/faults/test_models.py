"""A pretrained model's folder that names code: it is refused by the file and the name, or the code is not run."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.damages import Payload
from tests.faults.suite import Outcome, StartSuite
from tests.features.tiny_text import pooling_module, tiny_bert, with_modules
from vse.features.backbones.networks import load_backbone
from vse.features.backbones.texts import load_text_backbone
from vse.features.backbones.transformer import read_transformer
from vse.features.settings.captions import TextConfig
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError

pytestmark = pytest.mark.nightly

CANARY = """
import os
open(os.environ["CANARY"], "w").close()
import torch
class Module(torch.nn.Module):
    @classmethod
    def load(cls, *arguments, **settings):
        return cls()
    from_pretrained = from_config = load
"""


@dataclass(frozen=True)
class Form:
    """One way to name code: what it changes in a folder, and what the refusal must name; an empty ``named``: harmless.

    ``trainable`` tells whether the trainable encoder, which reads the transformer alone, meets it as well.
    """

    name: str
    spoil: Callable[[Path], None]
    named: str = ""
    trainable: bool = False


def merged(file: str, **content: Any) -> Callable[[Path], None]:
    """Add settings to a JSON file of the folder, which may be new."""

    def spoil(folder: Path) -> None:
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**old, **content}))

    return spoil


def module(kind: str, path: str = "9_Module", at: int = 9, **settings: Any) -> Callable[[Path], None]:
    """Add a module of this class to ``modules.json``, or put it first; ``settings`` become its ``config.json``."""

    def spoil(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        modules.insert(at, {"idx": 9, "name": "9", "path": path, "type": kind})
        (folder / "modules.json").write_text(json.dumps(modules))
        if settings:
            (folder / path).mkdir(exist_ok=True)
            for name in ("config.json", "router_config.json"):
                (folder / path / name).write_text(json.dumps(settings))

    return spoil


def pickled(*files: str, safe: bool = False) -> Callable[[Path], None]:
    """Write pickles that run code; unless ``safe`` the safetensors file next to them goes."""

    def spoil(folder: Path) -> None:
        for file in files:
            torch.save({"a": Payload()}, folder / file)
            if not safe:
                (folder / file).with_name("model.safetensors").unlink(missing_ok=True)

    return spoil


def moved(spoil: Callable[[Path], None]) -> Callable[[Path], None]:
    """Spoil the transformer in a folder of its own, ``0_Transformer``, as older folders have it."""

    def nested(folder: Path) -> None:
        inner = folder / "0_Transformer"
        inner.mkdir(exist_ok=True)
        for file in [*folder.glob("*.json"), *folder.glob("*.txt"), *folder.glob("*.safetensors")]:
            if file.name != "modules.json":
                shutil.move(file, inner / file.name)
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = inner.name
        (folder / "modules.json").write_text(json.dumps(modules))
        (inner / "canary.py").write_text(CANARY)
        spoil(inner)

    return nested


def index(part: str) -> Callable[[Path], None]:
    """Replace the weights by an index that names ``part``, a pickle."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        torch.save({"a": Payload()}, folder / "evil.bin")
        content = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": part.format(folder=folder)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return spoil


ROUTER = {
    "types": {"query_0_Module": "canary.Module"},
    "structure": {"query": ["query_0_Module"]},
    "parameters": {"default_route": "query"},
}
AUTO = {"AutoConfig": "canary.Module", "AutoModel": "canary.Module", "AutoTokenizer": ["canary.Module", "canary.Module"]}
ST = "sentence_transformers"
SETTINGS = "sentence_bert_config.json"
DENSE = {"in_features": 32, "out_features": 32, "bias": True}

IN_TRANSFORMER = [
    Form("config.json: auto_map", merged("config.json", auto_map=AUTO), "auto_map", True),
    Form("config.json: auto_map, unknown type", merged("config.json", auto_map=AUTO, model_type="canary"), "auto_map", True),
    Form("config.json: auto_map of a repository", merged("config.json", auto_map={"AutoModel": "a/b--c.D"}), "auto_map", True),
    Form("config.json: nested auto_map", merged("config.json", text_config={"auto_map": AUTO}), "auto_map", True),
    Form("config.json: kernel", merged("config.json", attn_implementation="some/kernel"), "some/kernel", True),
    Form("config.json: kernel, old name", merged("config.json", _attn_implementation="a/b@v1"), "a/b@v1", True),
    Form("config.json: timm", merged("config.json", model_type="timm_wrapper", architecture="local-dir:."), "local-dir", True),
    Form("config.json: backbone", merged("config.json", backbone="./evil", use_pretrained_backbone=True), "./evil", True),
    Form("config.json: trust_remote_code", merged("config.json", trust_remote_code=True), "trust_remote_code", True),
    Form("tokenizer_config.json: auto_map", merged("tokenizer_config.json", auto_map=AUTO), "auto_map", True),
    Form("adapter_config.json", merged("adapter_config.json", base_model_name_or_path="./evil"), "adapter", True),
    Form("pickled weights", pickled("pytorch_model.bin"), "model.safetensors", True),
    Form("index of a pickle", index("evil.bin"), "evil.bin", True),
    Form("index of a pickle elsewhere", index("{folder}/evil.bin"), "model-*.safetensors", True),
    Form("model_args: trust", merged(SETTINGS, model_args={"trust_remote_code": True}), "trust_remote_code"),
    Form("model_args: folder", merged(SETTINGS, model_args={"config": "./evil"}), "config"),
    Form("tokenizer of a folder", merged(SETTINGS, tokenizer_name_or_path="./evil"), "tokenizer_name_or_path"),
    Form("unknown setting", merged(SETTINGS, loader="canary.Module"), "loader"),
    Form("method of a modality", merged(SETTINGS, modality_config={"text": {"method": "x"}}), "method"),
]
IN_FOLDER = [
    *IN_TRANSFORMER,
    *(Form(f"0_Transformer/{form.name}", moved(form.spoil), form.named) for form in IN_TRANSFORMER),
    Form("own class", module("canary.Module"), "canary.Module"),
    Form("own class, first", module("canary.Module", "", 0), "canary.Module"),
    Form("class of a repository", module("some/model--canary.Module"), "some/model--canary.Module"),
    Form("class by a relative path", module("../canary.Module"), "../canary.Module"),
    Form("class by a relative module", module(".canary.Module"), ".canary.Module"),
    Form("class of a look-alike package", module(f"{ST}_canary.Module"), f"{ST}_canary.Module"),
    Form("class of another library", module("transformers.BertModel"), "transformers.BertModel"),
    Form("function of the library", module(f"{ST}.util.misc.import_from_string"), "import_from_string"),
    Form("module of the library's imports", module(f"{ST}.util.misc.importlib"), "importlib"),
    Form("class after the allowed one", module(f"{ST}.models.Pooling.x"), "models.Pooling.x"),
    Form("Router", module(f"{ST}.models.Router", "", 0, **ROUTER), "models.Router"),
    Form("Router in a folder", module(f"{ST}.models.Router", **ROUTER), "models.Router"),
    Form("Router, its file", module(f"{ST}.models.Router.Router", **ROUTER), "models.Router.Router"),
    Form("Router, new name", module(f"{ST}.base.modules.router.Router", **ROUTER), "base.modules.router.Router"),
    Form("Asym", module(f"{ST}.models.Asym", **ROUTER), "models.Asym"),
    Form("WordEmbeddings", module(f"{ST}.models.WordEmbeddings", tokenizer_class="canary.Module"), "models.WordEmbeddings"),
    Form("activation", module(f"{ST}.models.Dense", activation_function="canary.Module", **DENSE), "canary.Module"),
    Form("activation of torch", module(f"{ST}.models.Dense", activation_function="torch.hub.list", **DENSE), "torch.hub.list"),
    Form("path above", module(f"{ST}.models.Dense", "../other"), "../other"),
    Form("absolute path", module(f"{ST}.models.Dense", "/tmp"), "/tmp"),
    Form("config_sentence_transformers.json", merged("config_sentence_transformers.json", auto_map=AUTO), "auto_map"),
    Form("Python files that nothing names", lambda folder: None),
    Form("processors", merged("preprocessor_config.json", auto_map={"AutoProcessor": "canary.Module"})),
    Form("generation", lambda folder: shutil.copytree(folder / "more", folder / "custom_generate")),
    Form("Router that no module names", merged("router_config.json", **ROUTER)),
    Form("pickle next to safetensors", pickled("pytorch_model.bin", "training_args.bin", safe=True)),
]


def sound(folder: Path) -> Path:
    """A sound text encoder with Python files that would write the canary's file if they were run."""
    with_modules(tiny_bert(folder), pooling_module("mean_tokens"))
    for name in ("canary.py", "train_script.py", "__init__.py", "modeling_bert.py", "sitecustomize.py", "more/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CANARY)
    return folder


def outcome(load: Callable[[], str], folder: Path, named: list[str], unspoilt: str, canary: Path) -> tuple[Outcome, str]:
    """Load a model and judge what happened: ``named`` are the names of which the refusal must have one."""
    try:
        loaded = load()
    except UserError as error:
        line = str(error)
        clear = str(folder) in line and "\n" not in line and any(name in line for name in named)
        result: tuple[Outcome, str] = ("refused" if clear else "wrong", line)
    except Exception as error:
        result = "wrong", repr(error)
    else:
        result = ("silent", "loaded") if named or loaded != unspoilt else ("harmless", "")
    return ("silent", f"code ran; {result[1]}") if canary.exists() else result


def read_frozen(folder: Path) -> str:
    return load_text_backbone(TextConfig(name="x", model="tests/tiny", weights=str(folder))).weights_sha256


def read_trainable(folder: Path) -> str:
    network = read_transformer(str(folder)).load_network()
    return str(sum(float(tensor.double().sum()) for tensor in network.state_dict().values()))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound(tmp_path_factory.mktemp("clean") / "model")


def test_nothing_in_a_text_encoder_s_folder_runs(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite_of_faults: StartSuite
) -> None:
    """Each form by itself, through both readers of such folders, then two forms at once; Python finds the folder's modules."""
    canary = tmp_path / "canary"
    monkeypatch.setenv("CANARY", str(canary))
    singles = [
        (read, [form]) for read in (read_frozen, read_trainable) for form in IN_FOLDER if form.trainable or read is read_frozen
    ]
    suite = suite_of_faults("Python code in the folder of a text encoder", len(singles))
    generator = random.Random(0)
    plain = [form for form in IN_FOLDER if not form.name.startswith(("0_", "pickled", "index"))]
    unspoilt = {read: read(clean) for read in (read_frozen, read_trainable)}
    tries = itertools.chain(singles, iter(lambda: (read_frozen, generator.sample(plain, 2)), None))
    for number, (read, forms) in enumerate(itertools.islice(tries, suite.n_tries)):
        folder = tmp_path / f"{number}" / "model"
        shutil.copytree(clean, folder)
        for form in forms:
            form.spoil(folder)
        with monkeypatch.context() as patch:  # as `python -m` does it from inside the folder
            patch.chdir(folder)
            patch.syspath_prepend(str(folder))
            named = [form.named for form in forms if form.named]
            result, detail = outcome(lambda: read(folder), folder, named, unspoilt[read], canary)  # noqa: B023
        suite.record(result, f"{' and '.join(form.name for form in forms)}, {read.__name__}: {detail}")
        canary.unlink(missing_ok=True)
        shutil.rmtree(folder.parent)


OF_TIMM = (
    "local-dir:{folder} hf-hub:some/model hf_hub:some/model resnet18.local-dir:{folder} {folder} resnet18@some resnet18.a:b"
)
NAMES = [f"timm/{name}" for name in (*OF_TIMM.split(), "local-dir:resnet18")]
NAMES += [f"open_clip/{name}" for name in ("local-dir:{folder}", "hf-hub:some/model", "{folder}", "RN50:x")]


@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_no_name_of_a_network_makes_a_library_read_a_folder(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite_of_faults: StartSuite
) -> None:
    canary = tmp_path / "canary"
    monkeypatch.setenv("CANARY", str(canary))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "canary.py").write_text(CANARY)
    (folder / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": {"custom_load": "canary"}}))
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"text_cfg": {"hf_model_name": str(folder)}}}))
    torch.save({"a": Payload()}, folder / "pytorch_model.bin")
    suite = suite_of_faults(f"paths in place of names of networks, {weights} weights", 2 * len(NAMES))
    kinds = (lambda name: CnnConfig(name="x", model=name, weights=weights), lambda name: TextConfig(name="x", model=name))
    for number in range(suite.n_tries):
        name = NAMES[number % len(NAMES)].format(folder=folder)
        kind = kinds[number // len(NAMES) % 2]
        if kind is kinds[1] and not name.startswith("open_clip/"):
            continue
        result: Outcome = "wrong"
        try:
            config = kind(name)
            loaded = load_backbone(config) if isinstance(config, CnnConfig) else load_text_backbone(config)
            detail = f"loaded {type(loaded).__name__}"
        except UserError as error:
            result, detail = "refused", str(error)
        except Exception as error:
            detail = repr(error)
        suite.record("silent" if canary.exists() else result, f"{name}: {detail}")
        canary.unlink(missing_ok=True)


@pytest.mark.parametrize("model", ["timm/resnet18", "open_clip/RN50", "resnet18"])
def test_a_pickle_of_weights_runs_no_code(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    stem = model.rpartition("/")[2]
    torch.save({"a": Payload()}, tmp_path / f"{stem}.pth")
    with pytest.raises(UserError, match=rf"{stem}\.pth: not weights of this model"):
        load_backbone(CnnConfig(name="x", model=model, weights="pretrained"), tmp_path)
    assert not (tmp_path / "canary").exists()
