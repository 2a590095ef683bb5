"""The model of an experiment: two encoders, a similarity, and the CNN if that is trained too."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from vse.pipeline.config import ModelConfig
from vse.train.encoders import CaptionEncoder, ImageEncoder
from vse.train.similarities import similarity


class TwoBranchModel(nn.Module):
    """An image encoder and a caption encoder into one space, compared by a similarity.

    Parameters
    ----------
    config : the experiment's settings
    feature_dim : length of an image feature
    n_words : size of the vocabulary
    cnn : what turns pixels into image features, if it belongs to the model
    """

    def __init__(self, config: ModelConfig, feature_dim: int, n_words: int, cnn: nn.Module | None = None) -> None:
        super().__init__()
        self.image_encoder = ImageEncoder(feature_dim, config.dim, config.normalize_image, config.absolute)
        self.caption_encoder = CaptionEncoder(n_words, config.word_dim, config.dim, config.absolute)
        self.cnn = cnn
        self.similarity = similarity(config)

    def embed_images(self, images: Tensor) -> Float[Tensor, "n dim"]:
        """Embeddings of features (n, feature_dim) or, with a CNN, of crops (n, n_crops, 3, side, side) of pixels 0-255."""
        embeddings: Tensor = self.image_encoder(images if self.cnn is None else self.cnn(images))
        return embeddings.float()

    def embed_captions(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Embeddings of padded captions."""
        embeddings: Tensor = self.caption_encoder(words, lengths)
        return embeddings.float()

    def forward(self, images: Tensor, words: Tensor, lengths: Tensor) -> Float[Tensor, "n n"]:
        """Scores of every image (row) with every caption (column) of a batch."""
        scores: Tensor = self.similarity(self.embed_images(images), self.embed_captions(words, lengths))
        return scores
