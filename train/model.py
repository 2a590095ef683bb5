"""The model of an experiment: two encoders and a similarity."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from vse.pipeline.config import ModelConfig
from vse.train.encoders import CaptionEncoder, ImageEncoder


def cosine(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"]
) -> Float[Tensor, "n_images n_captions"]:
    """Inner products (VSE++ paper, Eq. 3); the encoders decide about unit length, so for VSE0 only captions have it."""
    return images @ captions.T


SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine}


class TwoBranchModel(nn.Module):
    """An image encoder and a caption encoder into one space, compared by a similarity."""

    def __init__(self, config: ModelConfig, feature_dim: int, n_words: int) -> None:
        super().__init__()
        self.image_encoder = ImageEncoder(feature_dim, config.dim, config.normalize_image)
        self.caption_encoder = CaptionEncoder(n_words, config.word_dim, config.dim)
        self.similarity = SIMILARITIES[config.similarity]

    def forward(
        self, features: Float[Tensor, "n feature_dim"], words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]
    ) -> Float[Tensor, "n n"]:
        """Scores of every image (row) with every caption (column) of a batch."""
        return self.similarity(self.image_encoder(features), self.caption_encoder(words, lengths))
