"""The loggers against the real packages, offline: what arrives, and that nothing else does."""

from __future__ import annotations

import copy
import importlib
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.base import clone
from torch import nn

import tacit
from tacit.integrations import (
    MLflowLogger,
    RunLogger,
    TacitClassifier,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

FIGURES = {"epsilon", "learning_rate", "released_gradient_norm"}
HELD_OUT = {"held_out/accuracy", "held_out/loss"}
STEPS = 6


def train(*callbacks: tacit.Callback, evaluate_on: object = None, name: str = "x") -> tacit.Run:
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    records = tacit.Records(x, (x[:, 0] > 0).long(), num_classes=2, public_size=64, name=name)
    model = nn.Linear(3, 2)
    if evaluate_on is None:
        test = torch.randn(32, 3)
        evaluate_on = tacit.HeldOut(tacit.Records(test, (test[:, 0] > 0).long(), 2), every=3)
    elif evaluate_on == "training records":
        evaluate_on = tacit.Unprotected(records, every=3)
    return tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, expected_batch_size=64, steps=STEPS),
        torch.optim.SGD(model.parameters(), lr=0.25),
        tacit.Budget(3.0, 1e-5),
        callbacks=callbacks,
        evaluate_on=evaluate_on,
    ).fit()


class Memory(RunLogger):
    """Keeps what it is given; `fails` names the method that raises."""

    package, extra = "json", "nothing"

    def __init__(self, fails: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.fails, self.calls = fails, []

    def _note(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name == self.fails:
            raise OSError("the disk is full")

    def start(self, settings: dict) -> None:
        self._note("start", settings)

    def log(self, values: dict, step: int) -> None:
        self._note("log", values, step)

    def finish(self, result: dict | None) -> None:
        self._note("finish", result)


def logged_norms(logger: Memory) -> list[tuple[float, int]]:
    key = "released_gradient_norm"
    return [(v[key], step) for k, v, *s in logger.calls if k == "log" and key in v for step in s]


def test_only_public_and_released_figures_are_handed_on() -> None:
    logger = Memory()
    run = train(logger)
    names = {name for kind, values, *_ in logger.calls if kind == "log" for name in values}
    assert names == FIGURES | HELD_OUT
    kinds = [call[0] for call in logger.calls]
    assert kinds[0] == "start"
    assert kinds[-1] == "finish"
    _, settings = logger.calls[0]
    assert settings["noise_multiplier"] == run.plan.noise_multiplier
    assert settings["budget_epsilon"] == 3.0
    spent = [v["epsilon"] for kind, v, *_ in logger.calls if kind == "log"]
    assert spent == sorted(spent)
    assert spent[-1] <= run.epsilon == logger.calls[-1][1]["epsilon"]


def test_the_norm_is_that_of_the_noisy_gradient() -> None:
    logger, norms = Memory(every=1), []

    class Look(tacit.Callback):
        def on_step(self, trainer: tacit.Trainer, step: int) -> None:
            grads = [p.grad for p in trainer.model.parameters()]
            norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))

    train(logger, Look())
    assert [norm for norm, _ in logged_norms(logger)] == pytest.approx(norms)


def test_metrics_of_training_records_have_another_name() -> None:
    logger = Memory()
    train(logger, evaluate_on="training records")
    names = {name for kind, values, *_ in logger.calls if kind == "log" for name in values}
    assert names == FIGURES | {"unprotected/accuracy", "unprotected/loss"}


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_logger_that_fails_does_not_cost_the_run(fails: str) -> None:
    logger = Memory(fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(logger)
    assert run.stopped == "plan complete"
    said = [str(w.message) for w in caught if "Memory" in str(w.message)]
    assert len(said) == 1
    assert "the disk is full" in said[0]
    assert [call[0] for call in logger.calls].count(fails) == 1
    assert logger.calls[-1][0] == fails
    logger.fails = ""
    train(logger)  # another run is logged again
    assert logger.calls[-1][0] == "finish"


def test_a_run_that_fails_is_closed_as_failed() -> None:
    class Break(tacit.Callback):
        def on_step(self, trainer: tacit.Trainer, step: int) -> None:
            raise RuntimeError("no")

    logger = Memory()
    with pytest.raises(RuntimeError, match="no"):
        train(Break(), logger)
    assert logger.calls[-1] == ("finish", None)


@pytest.mark.parametrize(
    ("logger", "argument"),
    [
        (TensorBoardLogger, "folder"),
        (MLflowLogger, "experiment"),
        (TrackioLogger, "project"),
        (WandbLogger, "project"),
    ],
)
def test_a_missing_package_names_the_extra(
    logger: type[RunLogger], argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, logger.package, None)
    with pytest.raises(ImportError, match=rf"pip install 'tacit\[{logger.extra}\]'"):
        logger(**{argument: "somewhere"})
    extras = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\n{logger.extra} = [" in extras


def test_every_counts_steps() -> None:
    logger = Memory(every=4)
    train(logger)
    assert [step for _, step in logged_norms(logger)] == [4, 6]
    with pytest.raises(ValueError, match="every"):
        Memory(every=0)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "logs")
    run = train(logger, name="secret-records")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == FIGURES | HELD_OUT
    assert [e.step for e in events.Scalars("released_gradient_norm")] == [1, 2, 3, 4, 5, 6]
    assert events.Scalars("epsilon")[-1].value == pytest.approx(run.epsilon, rel=1e-3)
    (text,) = events.Tensors("result/text_summary")
    assert f"({run.epsilon:.4g}, 1e-05)" in text.tensor_proto.string_val[0].decode()
    copy.deepcopy(logger)


def test_tensorboard_from_an_estimator(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    model = TacitClassifier(steps=2, callbacks=[TensorBoardLogger(tmp_path)])
    x = torch.randn(50, 2).numpy()
    clone(model.fit(x, x[:, 0] > 0)).fit(x, x[:, 0] > 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes 15 s to set up
    address = (tmp_path / "mlruns").as_uri()
    for _ in range(2):
        run = train(MLflowLogger("patients", run_name="first", tracking_uri=address))
    client = mlflow.MlflowClient(address)
    experiment = client.get_experiment_by_name("patients")
    _, found = client.search_runs([experiment.experiment_id], order_by=["start_time"])
    assert found.info.status == "FINISHED"
    assert set(found.data.metrics) == FIGURES | HELD_OUT
    assert found.data.metrics["epsilon"] == pytest.approx(run.epsilon, rel=1e-3)
    assert found.data.params["query"].startswith("PerSampleClip(")
    assert float(found.data.tags["epsilon"]) == run.epsilon
    assert "not covered by epsilon" in found.data.tags["mlflow.note.content"]
    assert mlflow.active_run() is None


def test_wandb(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wandb = pytest.importorskip("wandb")

    class Chatter(tacit.Callback):
        def on_step(self, trainer: tacit.Trainer, step: int) -> None:
            print("a record of patient 4711")

    run = train(WandbLogger("patients", mode="offline", folder=tmp_path), Chatter())
    wandb.teardown()  # its own process has written everything when it has ended
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    stored = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert all(name.encode() in stored for name in FIGURES | HELD_OUT)
    assert f"({run.epsilon:.4g}, 1e-05)".encode() in stored
    assert b"4711" not in stored  # wandb would keep what a program prints
    assert {p.name for p in (folder / "files").iterdir()} <= {"requirements.txt", "config.yaml"}


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server, and without a connection to anywhere."""
    pytest.importorskip("trackio")

    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when the package is imported
    for module in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run = train(TrackioLogger("patients", name="first"))
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs("patients", "first")
    figures = [row for row in rows if "released_gradient_norm" in row]
    assert [row["step"] for row in figures] == [1, 2, 3, 4, 5, 6]
    assert figures[-1]["epsilon"] == pytest.approx(run.epsilon, rel=1e-3)
    names = {name for row in rows for name in row if not name.startswith("result/")}
    assert names - {"timestamp", "step"} == FIGURES | HELD_OUT
    assert (tmp_path / "patients.db").exists()
