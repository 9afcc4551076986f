"""A LightningModule is trained in place, and what private training cannot call is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tacit
from tacit.integrations import fit_lightning

lightning = pytest.importorskip("lightning")


class Classifier(lightning.LightningModule):
    """As its documentation writes one."""

    def __init__(self, penalty: float = 0.0) -> None:
        super().__init__()
        self.layer, self.penalty = nn.Linear(6, 2), penalty
        self.seen = 0

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, number):
        x, y = batch
        self.seen += len(x)
        loss = F.cross_entropy(self(x), y) + self.penalty * self.layer.weight.square().sum()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def data(count: int, seed: int = 0) -> torch.utils.data.TensorDataset:
    torch.manual_seed(seed)
    x = torch.randn(count, 6)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())


def fit(module: nn.Module, **options) -> tacit.Run:
    usual = {
        "epsilon": 8.0,
        "delta": 1e-4,
        "expected_batch_size": 128,
        "max_epochs": 4,
        "public_size": 512,
        "callbacks": [],
        "seed": 0,
    }
    return fit_lightning(module, data(512), F.cross_entropy, **(usual | options))


def test_a_module_is_trained_in_place_and_lightning_validates_it() -> None:
    module = Classifier()
    run = fit(module)
    assert run.model is module
    assert run.steps == 16
    assert run.epsilon <= 8
    assert module.seen == 0  # training_step saw nothing of the records that is kept
    trainer = lightning.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    loader = torch.utils.data.DataLoader(data(200, seed=1), batch_size=50)
    (found,) = trainer.validate(module, loader, verbose=False)
    assert found["accuracy"] > 0.8


def test_the_schedule_is_stepped_each_epoch() -> None:
    rates = []

    class Rates(tacit.Callback):
        def on_step(self, trainer, step) -> None:
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    fit(Classifier(), callbacks=[Rates()])
    # Four steps are an epoch; the callback sees the rate before it is changed.
    assert rates == [1.0] * 4 + [0.5] * 4 + [0.25] * 4 + [0.125] * 4


def test_a_training_step_with_another_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training_step gives .* penalties included"):
        fit(Classifier(penalty=1.0))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Classifier):
    def on_after_backward(self) -> None:
        pass


class TwoOptimizers(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(2)]


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "x"}}


class NeedsTrainer(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Manual, "optimises manually"),
        (Hooked, "overrides on_after_backward"),
        (TwoOptimizers, "gives 2 optimizers"),
        (Plateau, "follows a metric"),
        (NeedsTrainer, "without a Trainer of Lightning"),
    ],
)
def test_what_cannot_be_followed(kind: type, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(kind())


def test_other_mistakes() -> None:
    with pytest.raises(TypeError, match="train any other module"):
        fit(nn.Linear(6, 2))
    with pytest.raises(ValueError, match="give one of max_epochs and max_steps"):
        fit(Classifier(), max_steps=3)
    with pytest.raises(tacit.errors.UndeclaredConstant, match="public_size"):
        fit(Classifier(), public_size=None)
    loader, loss = torch.utils.data.DataLoader(data(32)), F.cross_entropy
    told = {"epsilon": 1.0, "delta": 1e-4, "expected_batch_size": 8, "max_steps": 1}
    with pytest.raises(TypeError, match="DataLoader"):
        fit_lightning(Classifier(), loader, loss, **told)
