"""CNNs by name, with weights from torchvision, timm, a file, or a seed."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from vse.pipeline.config import FeatureConfig
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files import sha256_file

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt")


def load_backbone(config: FeatureConfig, weights_dir: Path | None = None) -> nn.Module:
    """The model of ``config`` with its weights, in evaluation mode, on the CPU.

    A file ``<model>.safetensors`` or ``<model>.pth`` in ``weights_dir`` stands in for a download.
    """
    file = _weights_file(config, weights_dir)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = _build(config, pretrained=file is None and config.weights != "random")
    if file is not None:
        _load_file(model, file, config.weights_sha256)
    return model.eval().requires_grad_(False)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b"")
    return digest.hexdigest()


class LayerOutput(nn.Module):
    """A model cut off at one layer: (n, 3, height, width) -> (n, dim).

    ``layer`` is the name of a module of ``model``, whose output is taken, or ``penultimate``, what the model's
    last Linear layer reads. An output with height and width is averaged to ``grid`` x ``grid`` and flattened.
    Nothing behind the layer is computed.
    """

    def __init__(self, model: nn.Module, layer: str, grid: int = 1) -> None:
        super().__init__()
        self.model = model
        self.grid = grid
        self._found: Tensor | None = None
        modules = dict(model.named_modules())
        if layer == "penultimate":
            linear = [module for module in modules.values() if isinstance(module, nn.Linear)]
            if not linear:
                raise UserError("layer 'penultimate': the model has no Linear layer; name another layer")
            linear[-1].register_forward_pre_hook(lambda _, inputs: self._stop(inputs[0]))
        elif layer in modules and layer:
            modules[layer].register_forward_hook(lambda _, __, output: self._stop(output))
        else:
            raise UserError(f"unknown layer {layer!r}{did_you_mean(layer, ['penultimate', *filter(None, modules)])}")

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        with suppress(_LayerReached):
            self.model(images)
        output, self._found = self._found, None
        assert output is not None, "the model ran without reaching its layer"
        if output.ndim == 4:
            output = nn.functional.adaptive_avg_pool2d(output, self.grid).flatten(1)
        if output.ndim != 2:
            raise UserError(f"the layer gives {output.ndim} axes; choose one with (n, dim) or (n, dim, height, width)")
        return output

    def _stop(self, output: Tensor) -> None:
        self._found = output
        raise _LayerReached


class _LayerReached(Exception):
    """Ends a forward pass at the layer that was asked for."""


def _weights_file(config: FeatureConfig, weights_dir: Path | None) -> Path | None:
    if config.weights.endswith(WEIGHT_SUFFIXES):
        return Path(config.weights)
    if config.weights == "random" or weights_dir is None:
        return None
    stem = config.model.removeprefix("timm/")
    return next((f for suffix in WEIGHT_SUFFIXES if (f := weights_dir / f"{stem}{suffix}").is_file()), None)


def _build(config: FeatureConfig, pretrained: bool) -> nn.Module:
    if config.model.startswith("timm/"):
        return _build_timm(config.model.removeprefix("timm/"), pretrained)
    names = torchvision.models.list_models(torchvision.models)
    if config.model not in names:
        raise UserError(f"unknown torchvision model {config.model!r}{did_you_mean(config.model, names)}")
    # These two draw their weights slowly and with a warning unless told to, and turn their input to suit trained weights.
    options = {}
    if config.model in ("googlenet", "inception_v3"):
        options = {"init_weights": config.weights == "random", "transform_input": config.weights != "random"}
    model: nn.Module = torchvision.models.get_model(config.model, weights=None, **options)
    if pretrained:
        model.load_state_dict(_renamed(_download(config.model, config.weights)))
    return model


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """DenseNet's published weights say ``norm.1`` where torchvision's model says ``norm1``."""
    pattern = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
    return {pattern.sub(r"\1\2", name): tensor for name, tensor in state.items()}


def _download(name: str, weights: str) -> dict[str, Tensor]:
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
    return state


def _build_timm(name: str, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise UserError(f"model timm/{name} needs timm: pip install 'vse-pipeline[timm]'") from None
    if not timm.is_model(name):
        raise UserError(f"unknown timm model {name!r}{did_you_mean(name, timm.list_models()[:2000])}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot get the weights of timm/{name} ({str(error).splitlines()[0]}); put the file into a folder as {name}.pth "
            "and name the folder with --weights-dir"
        ) from None
    return model


def _load_file(model: nn.Module, file: Path, expected: str | None) -> None:
    if not file.is_file():
        raise UserError(f"{file}: no such weights file")
    if expected is not None and (found := sha256_file(file)) != expected:
        raise UserError(f"{file}: sha256 is {found}, {expected} expected")
    try:
        if file.suffix == ".safetensors":
            state = safetensors.torch.load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(_renamed(state))
    except Exception as error:  # torch and safetensors raise many kinds for a file that is not a state dict
        raise UserError(f"{file}: not weights of this model ({(str(error) or repr(error)).splitlines()[0]})") from None
