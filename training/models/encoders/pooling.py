"""Encoders that pool a set into one vector: mean, attention, WELDON's highest and lowest responses, and GPO.

GPO, the generalised pooling operator, comes from VSE-infinity. Random vectors or words can be dropped in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec, l2_normalize, xavier_linear
from vse.training.models.recurrent_states import unpack_states
from vse.training.processes.group import is_synchronised_batch_norm


class PooledSettings(EncoderSettings):
    """A linear map of each vector of a set, and pooling into one vector, for similarities that compare vectors."""

    name: Literal["pooled"] = "pooled"
    input_kinds: ClassVar = (InputKind.SETS,)
    pooling: Literal["mean", "attention"] = Field(
        "mean",
        description="pooling of the mapped vectors x_k, which have unit length: mean, or attention, sum_k w_k x_k with w = "
        "softmax_k(q . x_k) and a learned vector q",
    )

    def output_kind(self, kind: InputKind) -> InputKind:
        return InputKind.VECTORS

    def build(self, spec: EncoderSpec) -> Encoder:
        return PooledEncoder(spec.input_dim, spec.dim, self.pooling == "attention")


class PooledEncoder(Encoder):
    """The network of :class:`PooledSettings`.

    ``query`` is the learned vector of attention pooling. It starts as 0, so that all vectors of a set have the same weight.
    """

    def __init__(self, input_dim: int, dim: int, attends: bool) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.query = nn.Parameter(torch.zeros(dim)) if attends else None

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> BatchVectors:
        mapped = l2_normalize(self.linear(vectors))
        if self.query is None:
            weights = mask / mask.sum(1, keepdim=True)
        else:
            weights = (mapped @ self.query).float().masked_fill(~mask, -torch.inf).softmax(1)
        return ((mapped * weights[:, :, None]).sum(1),)


class WeldonSettings(EncoderSettings):
    """WELDON pooling of CNN positions, and a linear map into the joint space (DSVE-loc, Engilberge et al., CVPR 2018).

    A 1 x 1 convolution computes ``channels`` responses at each position. The output of a channel is the mean of its ``k_max``
    highest responses over all positions plus the mean of its ``k_min`` lowest responses.
    """

    name: Literal["weldon"] = "weldon"
    input_kinds: ClassVar = (InputKind.SETS,)
    channels: PositiveInt = Field(2400, description="number of responses at each position")
    k_max: PositiveInt = Field(15, description="number of highest responses of a channel in the mean; all, if there are fewer")
    k_min: int = Field(15, ge=0, description="number of lowest responses of a channel in the mean; 0: none")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout of the pooled channels")

    def output_kind(self, kind: InputKind) -> InputKind:
        return InputKind.VECTORS

    def build(self, spec: EncoderSpec) -> Encoder:
        return WeldonEncoder(spec.input_dim, spec.dim, self)


class WeldonEncoder(Encoder):
    """The network of :class:`WeldonSettings`."""

    def __init__(self, input_dim: int, dim: int, settings: WeldonSettings) -> None:
        super().__init__()
        self.dim = dim
        self.k_max, self.k_min = settings.k_max, settings.k_min
        self.convolution = xavier_linear(input_dim, settings.channels)
        self.dropout = nn.Dropout(settings.dropout)
        self.linear = xavier_linear(settings.channels, dim)

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> BatchVectors:
        pooled = weldon_pooling(self.convolution(vectors), mask, self.k_max, self.k_min)
        return (self.linear(self.dropout(pooled)),)


def weldon_pooling(
    responses: Float[Tensor, "n longest channels"], mask: Bool[Tensor, "n longest"], k_max: int, k_min: int
) -> Float[Tensor, "n channels"]:
    """Return the mean of the ``k_max`` highest responses plus the mean of the ``k_min`` lowest (Durand et al., CVPR 2016)."""
    by_channel = responses.transpose(1, 2).contiguous()
    pooled = _mean_of_highest(by_channel, mask, k_max)
    return pooled - _mean_of_highest(-by_channel, mask, k_min) if k_min else pooled


def _mean_of_highest(responses: Tensor, mask: Tensor, k: int) -> Tensor:
    k = min(k, mask.shape[1])
    top = responses.masked_fill(~mask[:, None], -torch.inf).topk(k, sorted=True).values
    top = top.to(torch.promote_types(top.dtype, torch.float32))
    counts = mask.sum(1).clamp(max=k)[:, None]
    exists = torch.arange(k, device=mask.device) < counts
    return top.masked_fill(~exists[:, None], 0).sum(2) / counts


_RANK_ENCODING_DIM = 32  # length of the encoding of a rank, and of a state of the network
_SOFTMAX_TEMPERATURE = 0.1
# A selected word is masked if a random number from [0, 1) is below the first share, changed below the second, else removed.
_MASKED_SHARE, _MASKED_OR_CHANGED_SHARE = 0.5, 0.6


class GeneralisedPooling(nn.Module):
    """Pooling of a set into one vector, sum_k theta_k max_k (VSE-infinity, Chen et al., CVPR 2021, section 4).

    max_k is the k-th highest value of the set, separately in each dimension. The weights theta depend only on the size of the
    set and sum to 1. A bidirectional GRU reads sinusoidal encodings of all ranks k. The logit of rank k is a linear map of the
    mean of the GRU's two states at rank k, and theta is the softmax of the logits at the temperature 0.1.

    ``ranks`` : the GRU over the encodings of ranks.
    ``logit`` : the linear map from a state to a logit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks = nn.GRU(_RANK_ENCODING_DIM, _RANK_ENCODING_DIM, batch_first=True, bidirectional=True)
        self.logit = nn.Linear(_RANK_ENCODING_DIM, 1, bias=False)

    def compute_rank_weights(self, sizes: Int[Tensor, " n"], longest: int) -> Float[Tensor, "n longest"]:
        """Return theta for sets of these sizes, each at least 1. Weights of ranks above the size are 0."""
        if sizes.device.type == "cpu":
            distinct_sizes, rows = torch.unique(sizes, return_inverse=True)
        else:  # all possible sizes, because reading the sizes of the batch would make the CPU wait for the GPU
            distinct_sizes, rows = torch.arange(1, longest + 1), sizes - 1
        encoded = compute_rank_encodings(longest, self.logit.weight).expand(len(distinct_sizes), -1, -1)
        with torch.autocast(sizes.device.type, enabled=False):
            packed = pack_padded_sequence(encoded, distinct_sizes, batch_first=True, enforce_sorted=False)
            states = unpack_states(self.ranks(packed)[0], longest)
            logits: Tensor = self.logit((states[:, :, :_RANK_ENCODING_DIM] + states[:, :, _RANK_ENCODING_DIM:]) / 2)[:, :, 0]
        beyond = torch.arange(longest, device=sizes.device) >= distinct_sizes.to(sizes.device)[:, None]
        return (logits / _SOFTMAX_TEMPERATURE).masked_fill(beyond, -torch.inf).softmax(1)[rows]

    def forward(self, vectors: Float[Tensor, "n longest dim"], mask: Bool[Tensor, "n longest"]) -> Float[Tensor, "n dim"]:
        """Return the pooled vector of each set; ``mask`` is False for padding. No set may be empty."""
        sizes = mask.sum(1)
        weights = self.compute_rank_weights(sizes, mask.shape[1])
        by_dim = vectors.masked_fill(~mask[:, :, None], -torch.inf).transpose(1, 2)
        highest = by_dim.sort(dim=2, descending=True, stable=True).values
        beyond = torch.arange(mask.shape[1], device=mask.device) >= sizes[:, None]
        return (highest.masked_fill(beyond[:, None], 0) * weights[:, None]).sum(2)


def compute_rank_encodings(longest: int, like: Tensor) -> Float[Tensor, "longest 32"]:
    """Return the sinusoidal encodings of the ranks 1 to ``longest``, with the type and device of the tensor ``like``.

    The encoding of the rank k + 1 holds sin(a) and cos(a) of the angles a = k / 10000^(2 i / 32), for i = 0 to 15.
    """
    ranks = torch.arange(longest, device=like.device, dtype=like.dtype)
    scales = torch.exp(
        torch.arange(0, _RANK_ENCODING_DIM, 2, device=like.device, dtype=like.dtype)
        * (-math.log(10_000.0) / _RANK_ENCODING_DIM)
    )
    angles = ranks[:, None] * scales
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class GpoSettings(EncoderSettings):
    """A linear map of each vector of a set, a small residual network, and generalised pooling (Chen et al., CVPR 2021)."""

    name: Literal["gpo"] = "gpo"
    input_kinds: ClassVar = (InputKind.SETS,)
    residual: bool = Field(
        True,
        description="add the output of two layers to the linear map: the first has dim / 2 outputs, batch normalisation and "
        "ReLU, as in the code of VSE-infinity for cached features",
    )
    size_augmentation: float = Field(
        0.2, ge=0, lt=1, description="share of the vectors of a set that is removed at random in each training step"
    )

    def output_kind(self, kind: InputKind) -> InputKind:
        return InputKind.VECTORS

    def build(self, spec: EncoderSpec) -> Encoder:
        return GpoEncoder(spec.input_dim, spec.dim, self)


class GpoEncoder(Encoder):
    """The network of :class:`GpoSettings`."""

    def __init__(self, input_dim: int, dim: int, settings: GpoSettings) -> None:
        super().__init__()
        self.dim = dim
        self.size_augmentation = settings.size_augmentation
        self.linear = xavier_linear(input_dim, dim)
        self.residual = _ResidualLayers(input_dim, max(1, dim // 2), dim) if settings.residual else None
        self.pooling = GeneralisedPooling()

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> BatchVectors:
        if self.training and self.size_augmentation:
            mask = drop_elements(mask, self.size_augmentation)
        rows = vectors[mask]
        mapped = self.linear(rows)
        if self.residual is not None:
            mapped = mapped + self.residual(rows)
        sets = mapped.new_zeros(*mask.shape, self.dim)
        sets[mask] = mapped
        return (self.pooling(sets, mask),)


class _ResidualLayers(nn.Module):
    def __init__(self, input_dim: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(input_dim, hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, dim)

    def forward(self, rows: Float[Tensor, "n input_dim"]) -> Float[Tensor, "n dim"]:
        hidden = self.first(rows)
        norm = self.batch_norm
        if self.training and len(rows) < 2 and not is_synchronised_batch_norm(norm):  # a single row has no variance
            hidden = torch.nn.functional.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        else:
            hidden = norm(hidden)
        mapped: Tensor = self.last(hidden.relu())
        return mapped


def drop_elements(mask: Bool[Tensor, "n longest"], share: float) -> Bool[Tensor, "n longest"]:
    """Remove a random ``share`` of the elements of each set from ``mask``, but never all elements of a set."""
    drawn = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1)
    return mask & ((drawn >= share) | (drawn == drawn.amax(1, keepdim=True)))


class WordAugmentation(nn.Module):
    """Random masking, replacement and removal of words during training (VSE-infinity, Chen et al., CVPR 2021).

    Half of the selected words are replaced by the mask, a tenth by a random word, and the others are removed, as in the
    authors' code.

    ``share`` : probability in [0, 1) that a word is selected.
    ``n_words`` : size of the vocabulary.
    ``special_words`` : indices of words that are never selected, and never replace another word.
    ``replacement_words`` : indices of the words that can replace a selected word.
    ``mask_word`` : index of the mask.
    ``padding`` : index of the word that pads short captions.
    ``continuation_pieces`` : indices of word pieces that continue a word. All pieces of a word are treated in the same way.
    """

    special_word_mask: Tensor
    continuation_mask: Tensor
    replacement_words: Tensor

    def __init__(
        self,
        share: float,
        n_words: int,
        special_words: Iterable[int],
        mask_word: int,
        padding: int = 0,
        continuation_pieces: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.share, self.mask_word, self.padding = share, mask_word, padding
        marks = torch.zeros(2, n_words, dtype=torch.bool)
        marks[0, list(special_words)] = True
        marks[1, list(continuation_pieces)] = True
        others = (~marks[0]).nonzero()[:, 0]
        self.register_buffer("special_word_mask", marks[0], persistent=False)
        self.register_buffer("continuation_mask", marks[1], persistent=False)
        self.register_buffer("replacement_words", others if len(others) else torch.tensor([mask_word]), persistent=False)

    def forward(
        self, words: Int[Tensor, "n n_words"], mask: Bool[Tensor, "n n_words"]
    ) -> tuple[Int[Tensor, "n n_left"], Bool[Tensor, "n n_left"]]:
        """Mask, replace and remove random words; return the words that are left, without gaps between them, and their mask.

        Each caption keeps at least one word. In evaluation mode, the words and the mask are returned unchanged.
        """
        if not self.training or not self.share:
            return words, mask
        drawn = torch.rand(words.shape, device=words.device)
        drawn = drawn.gather(1, (~self.continuation_mask[words]).cumsum(1).sub(1).clamp(min=0)) / self.share
        may_change = mask & ~self.special_word_mask[words]
        others = self.replacement_words[torch.randint(len(self.replacement_words), words.shape, device=words.device)]
        changed = torch.where(may_change & (drawn >= _MASKED_SHARE) & (drawn < _MASKED_OR_CHANGED_SHARE), others, words)
        changed = changed.masked_fill(may_change & (drawn < _MASKED_SHARE), self.mask_word)
        kept = mask & ~(may_change & (drawn >= _MASKED_OR_CHANGED_SHARE) & (drawn < 1))
        kept = kept | (mask & ~kept.any(1, keepdim=True))
        lengths = kept.sum(1)
        order = (~kept).byte().argsort(dim=1, stable=True)[:, : int(lengths.max())]
        left = torch.arange(order.shape[1], device=words.device) < lengths[:, None]
        return changed.gather(1, order).masked_fill(~left, self.padding), left
