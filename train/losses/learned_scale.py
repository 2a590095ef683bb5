"""The temperature, and the bias, that a loss learns together with the model."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class LearnedScale(nn.Module):
    """Logits exp(log_scale) s + bias of scores s; both numbers are learned, in float32.

    The scale is learned by its logarithm, so that it stays positive (CLIP: Radford et al., 2021, section 2.3; SigLIP: Zhai
    et al., 2023, Algorithm 1).

    Parameters
    ----------
    temperature : 1 / scale at the start
    bias : at the start; None: there is none
    least : the temperature is held at this or above; None: it is not held
    """

    def __init__(self, temperature: float, bias: float | None = None, least: float | None = None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature), dtype=torch.float32))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias, dtype=torch.float32))
        self._highest = math.inf if least is None else -math.log(least)

    def forward(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        logits = in_full_precision(scores) * self.log_scale.exp()
        return logits if self.bias is None else logits + self.bias

    @torch.no_grad()
    def bound(self) -> None:
        """Hold the temperature at its least; called after each step."""
        self.log_scale.clamp_(max=self._highest)

    def values(self) -> dict[str, float]:
        """The temperature and, if there is one, the bias."""
        temperature = {"temperature": math.exp(-self.log_scale.item())}
        return temperature if self.bias is None else {**temperature, "bias": self.bias.item()}


def in_full_precision(scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Scores in float32 at least."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
