"""Callbacks that hand a run's released figures to TensorBoard, MLflow, trackio and wandb.

`RunLogger` decides what is logged; the four loggers decide where it goes. What is logged is public
(the plan), computed from what was released (ε, the norm of the noisy gradient), or measured on
held-out records, which ε does not cover: those names begin with `held_out/`. The loss of a batch,
its size and clipping rates are private and are never logged.
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tacit.queries.bounded_gradient import trainable
from tacit.sampling.scheme import whole_number
from tacit.training.callbacks import Callback, Evaluation
from tacit.training.preconditions import UNPROTECTED_METRICS
from tacit.training.run import Run

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer

Value = str | int | float | bool


class RunLogger(Callback, ABC):
    """Logs the public figures of a run. A subclass writes them: `start`, `log` and `finish`.

    When the run begins: its plan. Every `every` steps: `epsilon`, `learning_rate` and
    `released_gradient_norm`, the norm of the gradient with its noise. After an evaluation:
    `epsilon` and the metrics, as `held_out/…`; of records that were declared `Unprotected`, as
    `unprotected/…`. When the run ends: its ε, δ and notes. All of it but the metrics is public or
    post-processing of what the ledger has charged, so that it costs no privacy.

    A logger that fails warns once and logs nothing more of this run: the run has been charged, and
    a full disk or a lost connection must not cost the model.

    Args:
        every: steps between entries, by default a twentieth of the run.
    """

    package: ClassVar[str]  # what is imported
    extra: ClassVar[str]  # of pyproject.toml

    def __init__(self, *, every: int | None = None) -> None:
        self.every = None if every is None else whole_number("every", every, least=1)
        self._under_way = False
        self._run: Any = None  # the tool's own object, while a run is under way
        _imported(self)  # a missing package is noticed before a run

    def __getstate__(self) -> dict[str, Any]:
        """A copy logs runs of its own: scikit-learn copies what an estimator holds."""
        return {**vars(self), "_under_way": False, "_run": None}

    @abstractmethod
    def start(self, settings: dict[str, Value]) -> None:
        """Open the tool's run. `settings` are public constants of the run."""

    @abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Add figures at this step."""

    @abstractmethod
    def finish(self, result: dict[str, Value] | None) -> None:
        """Close the tool's run: with its result, or None if the run failed."""

    # ---- what the trainer calls ----------------------------------------------------------------

    def on_begin(self, trainer: Trainer) -> None:
        self._under_way = True
        self._attempt(lambda: self.start(settings_of(trainer)))

    def on_step(self, trainer: Trainer, step: int) -> None:
        every = self.every or max(1, trainer.sampler.steps // 20)
        if step % every == 0 or step == trainer.sampler.steps:
            self._attempt(lambda: self.log(figures_of(trainer, step), step))

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        whose = "unprotected" if UNPROTECTED_METRICS in trainer.notes else "held_out"
        metrics = evaluation.metrics.facts()
        values = {f"{whose}/{name}": float(v) for name, v in metrics.items() if v is not None}
        values["epsilon"] = evaluation.epsilon
        self._attempt(lambda: self.log(values, evaluation.step))

    def on_end(self, trainer: Trainer, run: Run) -> None:
        self._attempt(lambda: self.finish(result_of(run)))
        self._under_way, self._run = False, None

    def on_error(self, trainer: Trainer) -> None:
        self._attempt(lambda: self.finish(None))
        self._under_way, self._run = False, None

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._under_way:
            return
        try:
            action()
        except Exception as error:
            self._under_way = False
            warnings.warn(
                f"{type(self).__name__} failed ({type(error).__name__}: {error}); the run goes on, "
                "and is not logged any further",
                RuntimeWarning,
                stacklevel=2,
            )


class TensorBoardLogger(RunLogger):
    """Writes event files into `folder`, for `tensorboard --logdir`.

    Trainer(..., callbacks=[TensorBoardLogger("logs/first")])
    """

    package, extra = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__(every=every)
        self.folder = folder

    def start(self, settings: dict[str, Value]) -> None:
        self._run = _imported(self).SummaryWriter(os.fspath(self.folder))
        self._run.add_text("settings", _as_list(settings))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._run.add_scalar(name, value, step)

    def finish(self, result: dict[str, Value] | None) -> None:
        self._run.add_text("result", "the run failed" if result is None else _as_list(result))
        self._run.close()


class MLflowLogger(RunLogger):
    """Logs to a run of MLflow, at `tracking_uri` or where MLflow is set up to log.

    It does not touch MLflow's active run. The settings are parameters; the result is a set of tags,
    and the statement is the run's description.

        Trainer(..., callbacks=[MLflowLogger("patients", tracking_uri="sqlite:///mlflow.db")])
    """

    package, extra = "mlflow", "mlflow"

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        every: int | None = None,
    ) -> None:
        super().__init__(every=every)
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri

    def start(self, settings: dict[str, Value]) -> None:
        client = _imported(self).MlflowClient(self.tracking_uri)
        known = client.get_experiment_by_name(self.experiment)
        experiment = (
            client.create_experiment(self.experiment) if known is None else known.experiment_id
        )
        self._run = client, client.create_run(experiment, run_name=self.run_name).info.run_id
        for name, value in settings.items():
            client.log_param(self._run[1], name, value)

    def log(self, values: dict[str, float], step: int) -> None:
        client, run_id = self._run
        for name, value in values.items():
            client.log_metric(run_id, name, value, step=step)

    def finish(self, result: dict[str, Value] | None) -> None:
        client, run_id = self._run
        for name, value in (result or {}).items():
            client.set_tag(run_id, name, value)
        if result is not None:
            client.set_tag(run_id, "mlflow.note.content", _as_list(result))
        client.set_terminated(run_id, "FAILED" if result is None else "FINISHED")


class TrackioLogger(RunLogger):
    """Logs to a project of trackio: on this machine, unless `options` or the environment say else.

    `options` go to `trackio.init`, such as `space_id`. Figures about the machine are not logged:
    how busy it is depends on the sizes of private batches.

        Trainer(..., callbacks=[TrackioLogger("patients")])
    """

    package, extra = "trackio", "trackio"

    def __init__(
        self, project: str, *, name: str | None = None, every: int | None = None, **options: Any
    ) -> None:
        super().__init__(every=every)
        self.project, self.name, self.options = project, name, options

    def start(self, settings: dict[str, Value]) -> None:
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        options = quiet | self.options
        self._run = _imported(self).init(self.project, self.name, config=settings, **options)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self, result: dict[str, Value] | None) -> None:
        if result is not None:
            self._run.log({f"result/{name}": value for name, value in result.items()})
        self._run.finish()


class WandbLogger(RunLogger):
    """Logs to a project of Weights & Biases; `mode="offline"` keeps it on this machine.

    `options` go to `wandb.init`. wandb also collects what a program prints, its code and how busy
    the machine is, none of which is covered by ε: that is switched off, unless `settings` in
    `options` switch it on.

        Trainer(..., callbacks=[WandbLogger("patients", mode="offline")])
    """

    package, extra = "wandb", "wandb"

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        mode: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        every: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every=every)
        self.project, self.name, self.mode, self.folder = project, name, mode, folder
        self.options = options

    def start(self, settings: dict[str, Value]) -> None:
        wandb = _imported(self)
        quiet = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        folder = None if self.folder is None else os.fspath(self.folder)
        options = {"settings": quiet} | self.options
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            mode=self.mode,
            dir=folder,
            config=settings,
            **options,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self, result: dict[str, Value] | None) -> None:
        self._run.summary.update({f"result/{n}": value for n, value in (result or {}).items()})
        self._run.finish(exit_code=1 if result is None else 0)


def settings_of(trainer: Trainer) -> dict[str, Value]:
    """The public constants of a run, as they were declared or planned."""
    plan, budget = trainer.plan, trainer.budget
    return {
        "budget_epsilon": budget.epsilon,
        "delta": budget.delta,
        "relation": budget.relation.value,
        "sampling": plan.scheme.describe(),
        "noise_multiplier": plan.noise_multiplier,
        "steps": trainer.sampler.steps,
        "expected_batch_size": trainer.sampler.expected_batch_size,
        "model": type(trainer.model).__name__,
        "loss": repr(trainer.loss),
        "query": repr(trainer.query),
        "optimizer": type(trainer.optimizer).__name__,
        "seeded": trainer.seed is not None or trainer.sampler.seed is not None,
    }


@torch.no_grad()
def figures_of(trainer: Trainer, step: int) -> dict[str, float]:
    """What may be shown after a step: all of it is computed from released gradients."""
    released = [p.grad for p in trainable(trainer.model).values() if p.grad is not None]
    norms = [float(torch.linalg.vector_norm(g)) for g in released]
    return {
        "epsilon": trainer.epsilon_after(step),
        "learning_rate": float(trainer.optimizer.param_groups[0]["lr"]),
        "released_gradient_norm": math.hypot(*norms),
    }


def result_of(run: Run) -> dict[str, Value]:
    """What a finished run guarantees, and its notes. Times are left out: ε does not cover them."""
    return {
        "epsilon": run.epsilon,
        "delta": run.budget.delta,
        "relation": run.budget.relation.value,
        "steps": run.steps,
        "stopped": run.stopped,
        "statement": (
            f"({run.epsilon:.4g}, {run.budget.delta:g})-differentially private in the training "
            f"records ({run.budget.relation}); held-out metrics are not covered by epsilon"
        ),
        "notes": "; ".join(run.notes) or "none",
    }


def _as_list(values: dict[str, Value]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())


def _imported(logger: RunLogger) -> Any:
    try:
        return importlib.import_module(logger.package)
    except ImportError as error:
        raise ImportError(
            f"{type(logger).__name__} needs {logger.extra}, which is not installed; "
            f"pip install 'tacit[{logger.extra}]'"
        ) from error
