"""Encoders of images and of captions. A new encoder is one file here and one line below.

An encoder is a class of settings, derived from :class:`vse.train.models.encoders.base.EncoderSettings`. Its ``build`` returns
a network from the inputs of a batch to embeddings, see :mod:`vse.train.kinds`.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.train.kinds import Kind
from vse.train.models.encoders.base import EncoderSettings

IMAGE_ENCODERS: Registry[EncoderSettings] = Registry(
    "image encoder",
    base=EncoderSettings,
    lazy={
        "linear": "vse.train.models.encoders.linear:Linear",
        "mlp": "vse.train.models.encoders.mlp:Mlp",
        "residual": "vse.train.models.encoders.mlp:Residual",
        "identity": "vse.train.models.encoders.linear:IdentitySettings",
        "branch": "vse.train.models.encoders.mlp:BranchSettings",
        "pooled": "vse.train.models.encoders.pooling:Pooled",
        "gpo": "vse.train.models.encoders.gpo:Gpo",
        "weldon": "vse.train.models.encoders.pooling:Weldon",
        "weighted": "vse.train.models.encoders.linear:Weighted",
        "relative": "vse.train.models.encoders.linear:Relative",
    },
)
CAPTION_ENCODERS: Registry[EncoderSettings] = Registry(
    "caption encoder",
    base=EncoderSettings,
    lazy={
        "gru": "vse.train.models.encoders.recurrent:Gru",
        "lstm": "vse.train.models.encoders.recurrent:Lstm",
        "sru": "vse.train.models.encoders.recurrent:Sru",
        "bert": "vse.train.models.encoders.bert:Bert",
        "linear": "vse.train.models.encoders.linear:Linear",
        "mlp": "vse.train.models.encoders.mlp:Mlp",
        "residual": "vse.train.models.encoders.mlp:Residual",
        "identity": "vse.train.models.encoders.linear:IdentitySettings",
        "branch": "vse.train.models.encoders.mlp:BranchSettings",
        "gpo": "vse.train.models.encoders.gpo:Gpo",
        "relative": "vse.train.models.encoders.linear:Relative",
    },
)

# The default caption encoder for each kind of captions.
DEFAULT_CAPTION_ENCODERS = {Kind.WORDS: "gru", Kind.VECTORS: "linear", Kind.SETS: "linear"}
