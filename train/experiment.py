"""An experiment: every setting of a training, put together from the parts that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, SerializeAsAny, model_validator

from vse.pipeline.config import ExperimentPlan, ImagesConfig, TrainSettings, WarmupConfig
from vse.pipeline.parts import part_of
from vse.pipeline.presets import experiment_settings, validated
from vse.train.data.samplers import SAMPLERS
from vse.train.data.samplers.base import Sampler
from vse.train.data.samplers.shuffled import Shuffled
from vse.train.losses import LOSSES
from vse.train.losses.base import Loss
from vse.train.losses.max_of_hinges import MaxOfHinges
from vse.train.models.build import ModelConfig
from vse.train.solvers import ADVERSARIES, SOLVERS
from vse.train.solvers.adam import GradientSettings
from vse.train.solvers.adversary import AdversarySettings
from vse.train.solvers.base import SolverSettings

_RENAMED = {
    "model.recurrent": "model.caption_encoder.name",
}
