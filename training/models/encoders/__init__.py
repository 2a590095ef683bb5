"""Encoders of images and of captions. A new encoder is one file here and one line below.

An encoder is a class of settings, derived from :class:`vse.training.models.encoders.base.EncoderSettings`. The method
``build`` returns a network from the inputs of a batch to embeddings, see :mod:`vse.training.kinds`.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.kinds import InputKind
from vse.training.models.encoders.base import EncoderSettings

IMAGE_ENCODERS: Registry[EncoderSettings] = Registry(
    "image encoder",
    base=EncoderSettings,
    lazy={
        "linear": "vse.training.models.encoders.linear:LinearSettings",
        "mlp": "vse.training.models.encoders.linear:MlpSettings",
        "residual": "vse.training.models.encoders.linear:ResidualSettings",
        "identity": "vse.training.models.encoders.linear:IdentitySettings",
        "branch": "vse.training.models.encoders.linear:BranchSettings",
        "pooled": "vse.training.models.encoders.pooling:PooledSettings",
        "gpo": "vse.training.models.encoders.pooling:GpoSettings",
        "weldon": "vse.training.models.encoders.pooling:WeldonSettings",
        "weighted": "vse.training.models.encoders.linear:WeightedSettings",
        "relative": "vse.training.models.encoders.linear:RelativeSettings",
    },
)
CAPTION_ENCODERS: Registry[EncoderSettings] = Registry(
    "caption encoder",
    base=EncoderSettings,
    lazy={
        "gru": "vse.training.models.encoders.recurrent:GruSettings",
        "lstm": "vse.training.models.encoders.recurrent:LstmSettings",
        "sru": "vse.training.models.encoders.recurrent:SruSettings",
        "bert": "vse.training.models.encoders.bert:BertSettings",
        "linear": "vse.training.models.encoders.linear:LinearSettings",
        "mlp": "vse.training.models.encoders.linear:MlpSettings",
        "residual": "vse.training.models.encoders.linear:ResidualSettings",
        "identity": "vse.training.models.encoders.linear:IdentitySettings",
        "branch": "vse.training.models.encoders.linear:BranchSettings",
        "gpo": "vse.training.models.encoders.pooling:GpoSettings",
        "relative": "vse.training.models.encoders.linear:RelativeSettings",
    },
)

# The default caption encoder for each kind of captions.
DEFAULT_CAPTION_ENCODERS = {InputKind.WORDS: "gru", InputKind.VECTORS: "linear", InputKind.SETS: "linear"}
