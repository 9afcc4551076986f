"""Thin adapters between Tacit and the tools that people already use.

`TacitClassifier` and `TacitRegressor` are scikit-learn estimators: they set up a `Trainer` from an
array or a frame, and nothing here bounds a gradient or draws noise. `TacitTrainer` takes what
`transformers.Trainer` takes, and `tacit finetune` is made of the same parts. `fit_lightning` trains
a LightningModule. The loggers are callbacks that hand what a run releases to TensorBoard, MLflow,
trackio or wandb. All of these packages but scikit-learn are optional. An adapter for another tool
belongs here.
"""

from tacit.integrations.estimators import TacitClassifier, TacitRegressor
from tacit.integrations.experiment_loggers import (
    MLflowLogger,
    RunLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from tacit.integrations.language_models import StackedRows
from tacit.integrations.lightning import fit_lightning
from tacit.integrations.transformers import TacitTrainer

__all__ = [
    "MLflowLogger",
    "RunLogger",
    "StackedRows",
    "TacitClassifier",
    "TacitRegressor",
    "TacitTrainer",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "fit_lightning",
]
