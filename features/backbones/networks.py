"""Build image networks of torchvision, timm or OpenCLIP, load weights, compute a layer's output, and fold batch norms."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from vse.features.backbones.model_folder import download_first_file, hash_tensors
from vse.features.backbones.weight_files import WEIGHTS_FILE_KEY, WeightsFile
from vse.features.libraries import OPTIONAL_LIBRARIES, import_torchvision
from vse.features.settings.base import WEIGHT_FILE_SUFFIXES, NetworkSettings
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.inputs import InputFile

log = logging.getLogger(__name__)


def load_backbone(
    config: NetworkSettings,
    weights_dir: Path | None = None,
    family: ModuleType | None = None,
    notes: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Load the model of ``config`` with its weights, in evaluation mode, on the CPU.

    Raises UserError if the model or its weights are missing.

    weights_dir : folder in which a file ``<model>.safetensors`` or ``<model>.pth`` replaces a download
    family : module of torchvision that has the model, such as ``detection``; None: its classification models
    notes : dictionary that receives the name and hash of the weights file and, for a download from the hub, its commit
    options : further arguments of torchvision's function that builds the model
    """
    notes = {} if notes is None else notes
    file = find_weights_file(config.model, config.weights, weights_dir)
    pretrained = file is None and config.weights != "random"
    is_replaced = file is not None or (pretrained and "/" not in config.model)  # torchvision's weights are loaded below
    with torch.random.fork_rng(devices=[]), _InitialisationSkipper() if is_replaced else nullcontext():
        torch.manual_seed(config.seed)
        model = _build_model(config, pretrained, family, notes, options)
    if file is not None:
        load_weights_file(model, file, _rename_weights, config.weights_sha256)
        notes[WEIGHTS_FILE_KEY] = WeightsFile.describe(file)
    return model.eval().requires_grad_(False)


class _InitialisationSkipper(TorchFunctionMode):
    """A context in which the most common initialisers of weights do nothing, because the caller loads all weights later.

    Drawing VGG19's weights takes almost as long as ``import torch``. Other initialisers, such as trunc_normal_, still run.
    """

    _functions = frozenset([nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return (*args, *named.values())[0] if func in self._functions else func(*args, **named)


def hash_weights(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers of a model."""
    return hash_tensors(model.state_dict())


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager for forward passes in the precision ``fp32``, ``bf16`` or ``fp16``."""
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class TruncatedNetwork(nn.Module):
    """A network that maps images to the output of one layer of a model; later layers are not computed.

    The result is (n, dim) or, with ``positions``, (n, n_positions, dim). An output has several positions if it has
    height and width, or a token per patch. Tokens in front of the patches (class token, registers) are dropped.

    layer : name of a module; ``penultimate``, the input of the last Linear layer; or ``output``, the output of ``model``
    grid : number of positions per side to which the output is averaged; ``all`` keeps every position
    positions : True for one vector per position, False to flatten all positions into one vector
    """

    def __init__(self, model: nn.Module, layer: str, grid: int | Literal["all"] = 1, positions: bool = False) -> None:
        super().__init__()
        self.model = model
        self.grid = grid
        self.positions = positions
        self._output: Tensor | None = None
        modules = dict(model.named_modules())
        if layer == "penultimate":
            linear = [module for module in modules.values() if isinstance(module, nn.Linear)]
            if not linear:
                raise UserError("layer 'penultimate': the model has no Linear layer; choose another layer")
            linear[-1].register_forward_pre_hook(lambda _, inputs: self._store_and_stop(inputs[0]))
        elif layer == "output":
            model.register_forward_hook(lambda _, __, output: self._store_and_stop(output))
        else:
            find_module(model, layer, "penultimate", "output").register_forward_hook(
                lambda _, __, output: self._store_and_stop(output)
            )

    def forward(self, images: Tensor) -> Tensor:
        with suppress(_LayerReached):
            self.model(images)
        output, self._output = self._output, None
        assert output is not None, "the model ran without reaching its layer"
        if output.ndim == 3:
            output = _to_feature_map(output)
        if output.ndim == 4:
            output = _move_channels_first(output, images)
            if self.grid != "all":
                output = nn.functional.adaptive_avg_pool2d(output, self.grid)
            pooled = output.flatten(2)
            return pooled.transpose(1, 2) if self.positions else pooled.flatten(1)
        if output.ndim != 2 or self.positions or self.grid != 1:
            raise UserError(
                f"the layer's output has {output.ndim} axes; a grid needs a layer with height and width, or with patches"
            )
        return output

    def _store_and_stop(self, output: Tensor) -> None:
        self._output = output
        raise _LayerReached


def find_module(model: nn.Module, name: str, *others: str) -> nn.Module:
    """Return the module of ``model`` with a dotted name.

    Raises UserError if no module has this name. The message suggests a similar name, perhaps one of ``others``.
    """
    modules: dict[str, nn.Module] = {key: module for key, module in model.named_modules() if key}
    if name not in modules:
        raise UserError(f"unknown layer {name!r}{did_you_mean(name, [*others, *modules])}")
    return modules[name]


def _move_channels_first(output: Tensor, images: Tensor) -> Tensor:
    """Return a feature map of ``images`` as (n, dim, height, width), even if the model puts the channels last.

    The order is recognised only for square images: height and width are then equal. Other maps are returned unchanged.
    """
    _, first, second, last = output.shape
    square = images.shape[2] == images.shape[3]
    return output.permute(0, 3, 1, 2) if square and second != last and first == second else output


def _to_feature_map(tokens: Tensor) -> Tensor:
    """Return the patches among the tokens (n, n_prefix + side * side, dim) as a feature map (n, dim, side, side)."""
    side = math.isqrt(tokens.shape[1])
    patches = tokens[:, tokens.shape[1] - side * side :].transpose(1, 2)
    return patches.reshape(*patches.shape[:2], side, side)


class _LayerReached(Exception): ...


def find_weights_file(model: str, weights: str, weights_dir: Path | None) -> Path | None:
    """Return the path of a model's weights: ``weights`` if it is a file name, or else the file in ``weights_dir``.

    The result is None for random weights, or if the folder lacks the file. A file that ``weights`` names need not exist.
    """
    if weights.endswith(WEIGHT_FILE_SUFFIXES):
        return Path(weights)
    if weights == "random" or weights_dir is None:
        return None
    stem = model.rpartition("/")[2]
    return next((f for suffix in WEIGHT_FILE_SUFFIXES if (f := weights_dir / f"{stem}{suffix}").is_file()), None)


def _build_model(
    config: NetworkSettings, pretrained: bool, family: ModuleType | None, notes: dict[str, Any], options: dict[str, Any]
) -> nn.Module:
    library, _, name = config.model.rpartition("/")
    if library:
        builders: dict[str, Callable[[str, str | None, dict[str, Any]], nn.Module]]
        builders = {"timm": _build_timm, "open_clip": lambda *args: build_open_clip(*args).visual}
        if library not in builders:
            raise UserError(f"unknown library {library!r} of model {config.model}{did_you_mean(library, builders)}")
        return builders[library](name, config.weights if pretrained else None, notes)
    torchvision = import_torchvision()

    names = torchvision.models.list_models(family or torchvision.models)
    if config.model not in names:
        raise UserError(f"unknown torchvision model {config.model!r}{did_you_mean(config.model, names)}")
    # Without init_weights, both models warn before a slow initialisation. transform_input adapts the input to trained weights.
    if config.model in ("googlenet", "inception_v3"):
        options = {"init_weights": config.weights == "random", "transform_input": config.weights != "random"}
    model: nn.Module = torchvision.models.get_model(config.model, weights=None, **options)
    if pretrained:
        model.load_state_dict(_rename_weights(model, _download_weights(config.model, config.weights, notes)))
    return model


def _rename_weights(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename published weights to the parameter names of ``model``.

    DenseNet's files have ``norm.1`` for torchvision's ``norm1``. Some files lack the counters of batch norms (evaluation does
    not need them); the counters of ``model`` then fill the gap. The text encoder of an OpenCLIP checkpoint is left out.
    """
    pattern = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    counters = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("num_batches_tracked")}
    tower = {name.removeprefix("visual."): tensor for name, tensor in state.items() if name.startswith("visual.")}
    return {**counters, **(tower or {pattern.sub(r"\1\2", name): tensor for name, tensor in state.items()})}


def _download_weights(name: str, weights: str, notes: dict[str, Any]) -> dict[str, Tensor]:
    torchvision = import_torchvision()

    choices = torchvision.models.get_model_weights(name)
    if weights != "pretrained" and weights not in choices.__members__:
        raise UserError(f"unknown weights {weights!r} of {name}{did_you_mean(weights, choices.__members__)}")
    entry = choices["DEFAULT" if weights == "pretrained" else weights]
    try:
        state: dict[str, Tensor] = torch.hub.load_state_dict_from_url(
            entry.url, map_location="cpu", check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot download the weights of {name} from {entry.url} ({error}); put the file into a folder as {name}.pth "
            "and name the folder with --weights-dir"
        ) from None
    notes[WEIGHTS_FILE_KEY] = WeightsFile.describe(Path(torch.hub.get_dir(), "checkpoints", entry.url.rpartition("/")[2]))
    return state


def _build_timm(name: str, weights: str | None, notes: dict[str, Any]) -> nn.Module:
    timm = OPTIONAL_LIBRARIES["timm"].load(f"timm/{name}")
    if not set(name).isdisjoint(":/\\@") or not timm.is_model(name):  # timm would take a folder or a model of the hub
        raise UserError(f"unknown timm model {name!r}{did_you_mean(name, timm.list_models())}")
    pinned = {} if weights is None else _download_timm_weights(timm, name, notes)
    try:
        model: nn.Module = timm.create_model(name, pretrained=weights is not None, pretrained_cfg_overlay=pinned)
    except (OSError, RuntimeError) as error:
        raise _weights_error(f"timm/{name}", name, error) from None
    return model


def _download_timm_weights(timm: Any, name: str, notes: dict[str, Any]) -> dict[str, Any]:
    """Download a timm model's weights; return timm's arguments to read them; {} if the hub lacks the weights."""
    source = timm.get_pretrained_cfg(name)
    if source is None or not source.hf_hub_id:
        return {}
    model, _, revision = source.hf_hub_id.partition("@")
    file, notes["commit"] = download_first_file(model, ["model.safetensors"], revision or None, _weights_file_advice(name))
    notes[WEIGHTS_FILE_KEY] = WeightsFile.describe(file)
    return {"file": str(file), "custom_load": False}


def build_open_clip(name: str, weights: str | None, notes: dict[str, Any]) -> Any:
    """Build an OpenCLIP model with both its encoders. Raises UserError if the model or its weights are missing.

    ``weights`` is a tag of pretrained weights in OpenCLIP; None: random weights. ``notes`` receives the file's name and hash.
    """
    open_clip = OPTIONAL_LIBRARIES["open_clip"].load(f"open_clip/{name}")
    if name not in open_clip.list_models():
        raise UserError(f"unknown OpenCLIP model {name!r}{did_you_mean(name, open_clip.list_models())}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights not in (None, *tags):
        raise UserError(f"unknown weights {weights!r} of open_clip/{name}{did_you_mean(str(weights), tags)}")
    file = None if weights is None else _download_open_clip_weights(open_clip, name, weights, notes)
    try:
        with prevent_open_clip_log_handler():
            return open_clip.create_model(name, pretrained=file or weights)
    except (OSError, RuntimeError) as error:
        raise _weights_error(f"open_clip/{name}", name, error) from None


def _download_open_clip_weights(open_clip: Any, name: str, weights: str, notes: dict[str, Any]) -> str | None:
    source = open_clip.get_pretrained_cfg(name, weights)
    model, _, file_name = source.get("hf_hub", "").rpartition("/")
    if not model:
        return None
    stem = file_name.rpartition(".")[0] or "open_clip_model"
    names = [f"{stem}.safetensors", file_name or "open_clip_pytorch_model.bin"]  # the latter is loaded with weights_only
    file, notes["commit"] = download_first_file(model, list(dict.fromkeys(names)), None, _weights_file_advice(name))
    notes[WEIGHTS_FILE_KEY] = WeightsFile.describe(file)
    if source.get("quick_gelu", False) != open_clip.get_model_config(name).get("quick_gelu", False):
        log.warning(
            "open_clip/%s: weights %s were trained with another activation (QuickGELU) than the model has", name, weights
        )
    return str(file)


@contextmanager
def prevent_open_clip_log_handler() -> Iterator[None]:
    """Keep OpenCLIP from adding a handler to the root logger in the caller's ``with`` block; it would repeat log lines."""
    with suppress(ImportError):  # let transformers reject code in a model's folder without asking on the terminal
        from transformers import dynamic_module_utils

        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)


def _weights_error(model: str, stem: str, error: Exception) -> UserError:
    return UserError(f"cannot get the weights of {model} ({str(error).splitlines()[0]}); {_weights_file_advice(stem)}")


def _weights_file_advice(stem: str) -> str:
    return f"put the file into a folder as {stem}.pth and name the folder with --weights-dir"


def load_weights_file(
    model: nn.Module,
    file: Path,
    match_names: Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]],
    expected_sha256: str | None = None,
) -> None:
    """Load weights into ``model``. ``match_names(model, weights)`` returns the weights under the parameter names of ``model``.

    Raises UserError if the file is missing, has another SHA-256 than ``expected_sha256``, or does not fit the model.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such weights file")
    content = InputFile(file)
    if expected_sha256 is not None and content.sha256 != expected_sha256:
        raise UserError(f"{file}: sha256 is {content.sha256}, {expected_sha256} expected")
    try:
        if file.suffix == ".safetensors":
            state = safetensors.torch.load(content.read())
        else:
            content.stream.seek(0)
            state = torch.load(content.stream, map_location="cpu", weights_only=True)
        model.load_state_dict(match_names(model, state))
    except Exception as error:  # torch and safetensors raise many classes of errors for a file that is not a state dict
        raise UserError(f"{file}: not weights of this model ({(str(error) or repr(error)).splitlines()[0]})") from None


_FOLDING_TOLERANCE = 1e-4  # relative to the largest output; folding changes outputs by about 1e-6


@torch.no_grad()
def fold_batch_norms(network: nn.Module, images: Float[Tensor, "n 3 height width"]) -> int:
    """Fold batch norms into the convolutions before them, in place; return the number of folded batch norms.

    A forward pass on ``images`` finds the batch norms that read the output of a convolution. Modules that run more than once
    or have hooks, and batch norms without running statistics, are not changed. Raises UserError if the network's output
    changes, because another module reads the convolution's output as well.
    """
    before = network(images)
    pairs = _find_foldable_pairs(network, images)
    names = {module: name for name, module in network.named_modules()}
    for convolution, norm in pairs:
        mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, mean, variance, norm.eps, norm.weight, norm.bias
        )
        network.set_submodule(names[norm], _build_norm_replacement(norm))
    if (network(images) - before).abs().max() > _FOLDING_TOLERANCE * before.abs().max():
        raise UserError("fold_batch_norm: folding changes what this network computes; set it to false")
    return len(pairs)


def _find_foldable_pairs(network: nn.Module, images: Tensor) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    # The convolution of each output, by the output's id(). Storing the output keeps its id() from being used again.
    convolution_of: dict[int, tuple[nn.Conv2d, Tensor]] = {}
    runs: dict[nn.Module, int] = {}
    pairs = []

    def record_convolution_output(module: nn.Conv2d, _: object, output: Tensor) -> None:
        convolution_of[id(output)] = module, output
        runs[module] = runs.get(module, 0) + 1

    def record_norm_input(module: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        if (found := convolution_of.get(id(inputs[0]))) is not None:
            pairs.append((found[0], module))
        runs[module] = runs.get(module, 0) + 1

    plain = [module for module in network.modules() if not module._forward_hooks and not module._forward_pre_hooks]
    hooks = [m.register_forward_hook(record_convolution_output) for m in plain if isinstance(m, nn.Conv2d)]
    norms = [m for m in plain if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None]
    norms = [m for m in norms if type(m) is nn.BatchNorm2d or {"drop", "act"} <= m._modules.keys()]  # timm's have both
    hooks += [m.register_forward_pre_hook(record_norm_input) for m in norms]
    network(images)
    for hook in hooks:
        hook.remove()
    return [pair for pair in pairs if runs[pair[0]] == runs[pair[1]] == 1]


def _build_norm_replacement(norm: nn.BatchNorm2d) -> nn.Module:
    """Return the replacement of a folded batch norm: the identity or, for timm, the norm's dropout and activation."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    return nn.Sequential(norm.get_submodule("drop"), norm.get_submodule("act"))
