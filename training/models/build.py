"""The model of an experiment: an image encoder, a caption encoder and a similarity, and a CNN if it is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int, UInt8
from pydantic import Field, PositiveInt, SerializeAsAny, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vse.features.backbones.transformer import Transformer
from vse.features.extractors.cnn import CnnExtractor, normalize_pixels
from vse.pipeline.errors import UserError
from vse.pipeline.presets.parts import part_field
from vse.pipeline.presets.schema import Settings
from vse.training.kinds import BatchVectors, InputKind, add_full_mask
from vse.training.models.encoders import CAPTION_ENCODERS, DEFAULT_CAPTION_ENCODERS, IMAGE_ENCODERS
from vse.training.models.encoders.base import EncoderSettings, EncoderSpec, l2_normalize
from vse.training.models.encoders.linear import LinearSettings
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities.base import Scores, SimilaritySettings
from vse.training.models.similarities.vectors import CosineSettings

MODEL_PARTS = ("image_encoder", "caption_encoder", "similarity", "cnn")


class ModelConfig(Settings):
    """Settings of the model (VSE++ paper, section 2 and Eq. 3; order embeddings: section 3.5; two-branch paper, section 3)."""

    dim: PositiveInt = Field(
        1024, description="length of an embedding, unless an encoder sets the length, and of the state of a recurrent network"
    )
    word_dim: PositiveInt = Field(300, description="length of a word vector, for encoders that read words")
    image_encoder: Annotated[SerializeAsAny[EncoderSettings], part_field(IMAGE_ENCODERS)] = LinearSettings()
    caption_encoder: Annotated[SerializeAsAny[EncoderSettings] | None, part_field(CAPTION_ENCODERS)] = Field(
        None, description="null: a GRU for words, a linear map for cached vectors"
    )
    normalize_image: bool = Field(True, description="unit-length image embeddings; false for VSE0")
    absolute: bool = Field(False, description="absolute values of both embeddings, after their normalisation; true for Order0")
    similarity: Annotated[SerializeAsAny[SimilaritySettings], part_field(SIMILARITIES)] = CosineSettings()

    @model_validator(mode="after")
    def _check_similarity(self) -> ModelConfig:
        if self.similarity.needs_unit_length and not self.normalize_image:
            raise ValueError(f"similarity: {self.similarity.name} takes unit vectors, so normalize_image: true")
        return self

    def with_default_caption_encoder(self, kind: InputKind) -> ModelConfig:
        """Return the settings, with the default caption encoder for captions of this kind if no caption encoder is set."""
        if self.caption_encoder is not None:
            return self
        return self.model_copy(update={"caption_encoder": CAPTION_ENCODERS.parse(DEFAULT_CAPTION_ENCODERS[kind])})


@dataclass(frozen=True)
class InputSpec:
    """The kind and size of a model's input for images, or for captions.

    ``kind`` : vectors, sets, words or tokens.
    ``input_dim`` : length of a vector, or size of the vocabulary of words or tokens.
    ``description`` : name of the input in error messages.
    ``transformer`` : transformer to which the tokens belong; None for other inputs.
    """

    kind: InputKind
    input_dim: int
    description: str
    transformer: Transformer | None = None


class Model(nn.Module):
    """Encoders of images and captions into a joint space, a similarity that scores embeddings, and optionally a CNN."""

    def __init__(
        self, config: ModelConfig, image_input: InputSpec, caption_input: InputSpec, cnn: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config = config.with_default_caption_encoder(caption_input.kind)
        check_compatibility(config, image_input, caption_input)
        image_settings, caption_settings = config.image_encoder, config.caption_encoder
        assert caption_settings is not None
        image_spec, caption_spec = (
            EncoderSpec(side.kind, side.input_dim, config.dim, config.word_dim, side.transformer)
            for side in (image_input, caption_input)
        )
        self.image_encoder = image_settings.build(image_spec)
        self.caption_encoder = caption_settings.build(caption_spec)
        if self.image_encoder.dim != self.caption_encoder.dim:
            raise UserError(
                f"the image encoder {image_settings.name!r} ends in {self.image_encoder.dim} numbers, the caption encoder "
                f"{caption_settings.name!r} in {self.caption_encoder.dim}"
            )
        self.cnn = cnn
        self.similarity = config.similarity.build(self.image_encoder.dim)
        self._frozen_parts: tuple[str, ...] = ()
        self._frozen_modules: tuple[str, ...] = ()
        self._frozen_module_parameters: tuple[nn.Parameter, ...] = ()

    @property
    def dim(self) -> int:
        return self.image_encoder.dim

    @property
    def scores_every_pair(self) -> bool:
        """True if ranks require the model's score of every pair, False if comparing single vectors gives the same ranks."""
        return self.config.similarity.ranking_similarity is None

    @property
    def embedding_kinds(self) -> tuple[InputKind, InputKind]:
        """Kinds of the image and caption embeddings: vectors or sets."""
        return self.config.similarity.image_kind, self.config.similarity.caption_kind

    def freeze(self, *parts: str) -> None:
        """Freeze parts of the model permanently, such as ``cnn``. They get no gradients and stay in evaluation mode.

        The names of all parts are :data:`MODEL_PARTS`.
        """
        self._frozen_parts = parts
        for part in parts:
            getattr(self, part).requires_grad_(False)
        self.train(self.training)

    def freeze_modules(self, *names: str) -> None:
        """Freeze the modules with these dotted names, and train all other modules.

        Modules that a previous call has frozen are trained again, but parts that :meth:`freeze` has frozen stay frozen.
        """
        for weight in self._frozen_module_parameters:
            weight.requires_grad_(True)
        self._frozen_modules = names
        weights = [weight for name in names for weight in self.get_submodule(name).parameters()]
        self._frozen_module_parameters = tuple(weight for weight in weights if weight.requires_grad)
        for weight in self._frozen_module_parameters:
            weight.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Model:
        """Set training mode or, if ``mode`` is False, evaluation mode. Frozen parts and modules stay in evaluation mode."""
        super().train(mode)
        for name in (*self._frozen_parts, *self._frozen_modules):
            self.get_submodule(name).train(False)
        return self

    def embed_images(self, *images: Tensor) -> BatchVectors:
        """Return embeddings of image inputs or, with a CNN, of crops (n, n_crops, 3, side, side) with pixels 0-255."""
        if self.cnn is not None:
            features = self.cnn(*images)
            images = add_full_mask(features) if features.ndim == 3 else (features,)
        vectors, *mask = self.image_encoder(*images)
        vectors = l2_normalize(vectors) if self.config.normalize_image else vectors
        return self._postprocess_embeddings(vectors), *mask

    def embed_captions(self, *captions: Tensor) -> BatchVectors:
        vectors, *mask = self.caption_encoder(*captions)
        return self._postprocess_embeddings(l2_normalize(vectors)), *mask

    def score_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        """Return the scores of k pairs: pair i is the image ``rows[i]`` and the caption ``columns[i]``."""
        return self.similarity.score_pairs(images, captions, rows, columns)

    def forward(self, images: tuple[Tensor, ...], captions: tuple[Tensor, ...]) -> Scores:
        """Return the scores of all images (rows) with all captions (columns) of a batch."""
        scores: Scores = self.similarity(self.embed_images(*images), self.embed_captions(*captions))
        return scores

    def _postprocess_embeddings(self, vectors: Tensor) -> Tensor:
        """Return the vectors or, if the setting ``absolute`` is true, their absolute values, in float32."""
        return (vectors.abs() if self.config.absolute else vectors).float()


def build_model(config: ModelConfig, image_input: InputSpec, caption_input: InputSpec, cnn: nn.Module | None = None) -> Model:
    """Build the model of an experiment. Raises UserError if its parts do not fit each other or the inputs."""
    return Model(config, image_input, caption_input, cnn)


def check_compatibility(config: ModelConfig, image_input: InputSpec, caption_input: InputSpec) -> None:
    """Raise UserError if an encoder cannot read its input, or if the similarity cannot compare the embeddings."""
    similarity, captions = config.similarity, config.with_default_caption_encoder(caption_input.kind).caption_encoder
    assert captions is not None
    _check_encoder("image", config.image_encoder, image_input, similarity, similarity.image_kind)
    _check_encoder("caption", captions, caption_input, similarity, similarity.caption_kind)


_EMBEDDING_TERMS = {InputKind.VECTORS: "one vector", InputKind.SETS: "several vectors"}


def _check_encoder(
    side: str, settings: EncoderSettings, encoder_input: InputSpec, similarity: SimilaritySettings, compared_kind: InputKind
) -> None:
    kind, name = encoder_input.kind, encoder_input.description
    if kind not in settings.input_kinds:
        raise UserError(
            f"the {side} encoder {settings.name!r} reads {' or '.join(settings.input_kinds)}, not the {kind} of {name}"
        )
    output_kind = settings.output_kind(kind)
    if output_kind != compared_kind:
        raise UserError(
            f"the similarity {similarity.name!r} requires {_EMBEDDING_TERMS[compared_kind]} per {side}, but the {side} "
            f"encoder {settings.name!r} computes {_EMBEDDING_TERMS.get(output_kind, output_kind)} from {name}"
        )


class TrainableCnn(nn.Module):
    """The network of an extractor, trained further with the model.

    The features of an image are the mean of the features of its crops: a vector or, for a feature map, a vector at each
    position. The vectors have unit length if the extractor normalises features. Parameters on which the features do not
    depend, such as those of a classifier, are dropped from the network. Dropout is off.

    ``extractor`` : the CNN, and the preparation of images for the CNN.
    ``batch_norm`` : statistics of batch norms during training: kept (``frozen``), or of the current batch (``train``).
    ``checkpointing`` : whether to compute activations again in the backward pass instead of storing them.
    ``compiled`` : whether to compile the network.
    """

    def __init__(
        self,
        extractor: CnnExtractor,
        batch_norm: Literal["frozen", "train"] = "frozen",
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.network = extractor.network
        self.config = extractor.config
        self.batch_norm, self.checkpointing = batch_norm, checkpointing
        self.network.requires_grad_(True)
        self._drop_unused_modules(extractor.device)
        # A function, not the module: checkpoints would contain a module with two names twice.
        self._run_network = torch.compile(self.network.forward) if compiled else self.network.__call__
        self.train(False)

    def forward(self, pixels: UInt8[Tensor, "n n_crops 3 side side"]) -> Float[Tensor, "n *positions dim"]:
        images = normalize_pixels(pixels.flatten(0, 1), self.config.mean, self.config.std, pixels.device)
        keep = not self.checkpointing or not torch.is_grad_enabled()
        output = self._run_network(images) if keep else checkpoint(self._run_network, images, use_reentrant=False)
        vectors = output.float().unflatten(0, pixels.shape[:2]).mean(1)
        return nn.functional.normalize(vectors, dim=-1) if self.config.normalize else vectors

    def train(self, mode: bool = True) -> TrainableCnn:
        """Set evaluation mode, except for batch norms if ``mode`` is True and ``batch_norm`` is ``train``."""
        super().train(False)
        self.training = mode
        if mode and self.batch_norm == "train":
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()
        return self

    def _drop_unused_modules(self, device: torch.device) -> None:
        blank = torch.zeros(1, 3, self.config.crop, self.config.crop, dtype=torch.uint8)
        output = self.network(normalize_pixels(blank, self.config.mean, self.config.std, device))
        names, parameters = zip(*self.network.named_parameters(), strict=True)
        gradients = torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)
        unused = {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}
        for prefix, module in self.network.named_modules():
            own = [name for name, _ in module.named_parameters(recurse=False)]
            if own and all(f"{prefix}.{name}" in unused for name in own):
                for name in [*own, *(name for name, _ in module.named_buffers(recurse=False))]:
                    setattr(module, name, None)
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.track_running_stats = False  # loading weights would restore the removed count of batches
