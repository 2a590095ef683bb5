"""The model of an experiment: two encoders, a similarity, and the CNN if that is trained too."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from vse.pipeline.config import ModelConfig
from vse.train.models.encoders import Branch, LinearEncoder, WordEncoder, unit_length
from vse.train.models.similarities import similarity
from vse.train.models.similarity_network import SimilarityNetwork


class TwoBranchModel(nn.Module):
    """An image encoder and a caption encoder into one space, compared by a similarity.

    Parameters
    ----------
    config : the experiment's settings
    feature_dim : length of an image feature
    n_words : size of the vocabulary
    cnn : what turns pixels into image features, if it belongs to the model
    caption_dim : length of a cached caption vector; None: captions are words

    Attributes
    ----------
    similarity : scores (n_images, n_captions) of embeddings (n_images, dim) and (n_captions, dim)
    """

    def __init__(
        self,
        config: ModelConfig,
        feature_dim: int,
        n_words: int,
        cnn: nn.Module | None = None,
        caption_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        image_widths, caption_widths = config.branches.widths
        self.image_encoder = _encoder(config, feature_dim, image_widths or [config.dim])
        words = caption_dim is None
        self.word_encoder = WordEncoder(n_words, config.word_dim, config.dim, config.recurrent) if words else None
        self.caption_encoder: nn.Module = nn.Identity()  # the state of the recurrent network is the embedding
        if caption_dim is not None or caption_widths:
            self.caption_encoder = _encoder(config, caption_dim or config.dim, caption_widths or [config.dim])
        self.cnn = cnn
        is_network = config.similarity == "network"
        self.similarity = SimilarityNetwork(config.embedding_dim, config.network_widths) if is_network else similarity(config)

    @property
    def pairwise(self) -> bool:
        """Whether a score is more than a comparison of two embeddings, so that each pair goes through a network."""
        return isinstance(self.similarity, SimilarityNetwork)

    def of_similarity(self) -> list[nn.Parameter]:
        """The weights by which embeddings are compared: those of the similarity network."""
        return list(self.similarity.parameters()) if isinstance(self.similarity, SimilarityNetwork) else []

    def embed_images(self, images: Tensor) -> Float[Tensor, "n dim"]:
        """Embeddings of features (n, feature_dim) or, with a CNN, of crops (n, n_crops, 3, side, side) of pixels 0-255."""
        embeddings: Tensor = self.image_encoder(images if self.cnn is None else self.cnn(images))
        embeddings = unit_length(embeddings) if self.config.normalize_image else embeddings
        return (embeddings.abs() if self.config.absolute else embeddings).float()

    def embed_captions(self, *captions: Tensor) -> Float[Tensor, "n dim"]:
        """Embeddings of captions: of padded words (n, longest) and lengths (n,), or of cached vectors (n, caption_dim)."""
        vectors = captions[0] if self.word_encoder is None else self.word_encoder(*captions)
        embeddings = unit_length(self.caption_encoder(vectors))
        return (embeddings.abs() if self.config.absolute else embeddings).float()

    def score_pairs(
        self,
        images: Float[Tensor, "n dim"],
        captions: Float[Tensor, "m dim"],
        rows: Int[Tensor, " k"],
        columns: Int[Tensor, " k"],
    ) -> Float[Tensor, " k"]:
        """Scores of the images ``rows`` with the captions ``columns``, one by one."""
        if isinstance(self.similarity, SimilarityNetwork):
            return self.similarity.of_pairs(images[rows], captions[columns])
        scores: Tensor = self.similarity(images, captions)
        return scores[rows, columns]

    def forward(self, images: Tensor, *captions: Tensor) -> Float[Tensor, "n n"]:
        """Scores of every image (row) with every caption (column) of a batch."""
        scores: Tensor = self.similarity(self.embed_images(images), self.embed_captions(*captions))
        return scores


def _encoder(config: ModelConfig, feature_dim: int, widths: Sequence[int]) -> nn.Module:
    """Of feature vectors: layers of these widths, or the one linear map of VSE++."""
    if config.branches.layers == "none":
        return LinearEncoder(feature_dim, widths[-1])
    return Branch(feature_dim, widths, config.branches)
