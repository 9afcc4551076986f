"""Thin adapters between Tacit and the tools that people already use.

`TacitClassifier` and `TacitRegressor` are scikit-learn estimators: they set up a `Trainer` from an
array or a frame, and nothing here bounds a gradient or draws noise. The loggers are callbacks that
hand what a run releases to TensorBoard, MLflow, trackio or wandb; each of these packages is
optional. An adapter for another tool belongs here.
"""

from tacit.integrations.estimators import TacitClassifier, TacitRegressor
from tacit.integrations.experiment_loggers import (
    MLflowLogger,
    RunLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

__all__ = [
    "MLflowLogger",
    "RunLogger",
    "TacitClassifier",
    "TacitRegressor",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
]
