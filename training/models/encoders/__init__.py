"""Encoders of images and of captions. A new encoder is one file here and one line below.

An encoder is a class of settings, derived from :class:`vse.training.models.encoders.base.EncoderSettings`. Its ``build``
returns a network from the inputs of a batch to embeddings, see :mod:`vse.training.kinds`.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.kinds import Kind
from vse.training.models.encoders.base import EncoderSettings

IMAGE_ENCODERS: Registry[EncoderSettings] = Registry(
    "image encoder",
    base=EncoderSettings,
    lazy={
        "linear": "vse.training.models.encoders.linear:Linear",
        "mlp": "vse.training.models.encoders.mlp:Mlp",
        "residual": "vse.training.models.encoders.mlp:Residual",
        "identity": "vse.training.models.encoders.linear:IdentitySettings",
        "branch": "vse.training.models.encoders.mlp:BranchSettings",
        "pooled": "vse.training.models.encoders.pooling:Pooled",
        "gpo": "vse.training.models.encoders.gpo:Gpo",
        "weldon": "vse.training.models.encoders.pooling:Weldon",
        "weighted": "vse.training.models.encoders.linear:Weighted",
        "relative": "vse.training.models.encoders.linear:Relative",
    },
)
CAPTION_ENCODERS: Registry[EncoderSettings] = Registry(
    "caption encoder",
    base=EncoderSettings,
    lazy={
        "gru": "vse.training.models.encoders.recurrent:Gru",
        "lstm": "vse.training.models.encoders.recurrent:Lstm",
        "sru": "vse.training.models.encoders.recurrent:Sru",
        "bert": "vse.training.models.encoders.bert:Bert",
        "linear": "vse.training.models.encoders.linear:Linear",
        "mlp": "vse.training.models.encoders.mlp:Mlp",
        "residual": "vse.training.models.encoders.mlp:Residual",
        "identity": "vse.training.models.encoders.linear:IdentitySettings",
        "branch": "vse.training.models.encoders.mlp:BranchSettings",
        "gpo": "vse.training.models.encoders.gpo:Gpo",
        "relative": "vse.training.models.encoders.linear:Relative",
    },
)

# The default caption encoder for each kind of captions.
DEFAULT_CAPTION_ENCODERS = {Kind.WORDS: "gru", Kind.VECTORS: "linear", Kind.SETS: "linear"}
