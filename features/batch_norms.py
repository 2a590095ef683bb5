"""Batch norms in evaluation are linear: they can be folded into the convolutions before them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from vse.pipeline.errors import UserError

_CLOSE = 1e-4  # of the largest output; folding moves them by some 1e-6


@torch.no_grad()
def fold_batch_norms(network: nn.Module, images: Float[Tensor, "n 3 height width"]) -> int:
    """Fold batch norms into the convolutions whose output they read, in place; returns how many.

    Which ones these are is seen as ``network``, which is in evaluation mode, runs on the ``images``. Left as they are: modules
    that run more than once or have hooks, and batch norms without running statistics. :class:`UserError` if the network's
    output is another one afterwards, because something else reads a convolution, too.
    """
    before = network(images)
    pairs = _pairs(network, images)
    names = {module: name for name, module in network.named_modules()}
    for convolution, norm in pairs:
        mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, mean, variance, norm.eps, norm.weight, norm.bias
        )
        network.set_submodule(names[norm], _rest_of(norm))
    if (network(images) - before).abs().max() > _CLOSE * before.abs().max():
        raise UserError("fold_batch_norm: folding changes what this network computes; set it to false")
    return len(pairs)


def _pairs(network: nn.Module, images: Tensor) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions and the batch norms that read their output."""
    made_by: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # by the output's identity; it is held, so that it stays the only one
    runs: dict[nn.Module, int] = {}
    pairs = []

    def after_convolution(module: nn.Conv2d, _: object, output: Tensor) -> None:
        made_by[id(output)] = module, output
        runs[module] = runs.get(module, 0) + 1

    def before_norm(module: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        if (made := made_by.get(id(inputs[0]))) is not None:
            pairs.append((made[0], module))
        runs[module] = runs.get(module, 0) + 1

    plain = [module for module in network.modules() if not module._forward_hooks and not module._forward_pre_hooks]
    hooks = [m.register_forward_hook(after_convolution) for m in plain if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(before_norm) for m in plain if isinstance(m, nn.BatchNorm2d) and _can_fold(m)]
    network(images)
    for hook in hooks:
        hook.remove()
    return [pair for pair in pairs if runs[pair[0]] == runs[pair[1]] == 1]


def _can_fold(norm: nn.BatchNorm2d) -> bool:
    return norm.running_mean is not None and (type(norm) is nn.BatchNorm2d or {"drop", "act"} <= norm._modules.keys())


def _rest_of(norm: nn.BatchNorm2d) -> nn.Module:
    """What a batch norm does after it has normalised: nothing or, in timm's, an activation."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    return nn.Sequential(norm.get_submodule("drop"), norm.get_submodule("act"))
