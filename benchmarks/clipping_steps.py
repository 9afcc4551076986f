"""Who takes which step: models on random data; plain training, Tacit's engines, Opacus, JAX.

A step is gradient, clipping, noise and optimizer, always on the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from timing import Step, private_step, step_on
from torch import Tensor, nn

import tacit
from tacit.engines import Automatic, BookKeeping, Engine, PerRecord, Recorder

MAX_NORM, NOISE, RATE = 0.1, 1.0, 0.01


class NextToken(nn.Module):
    """`next_token_loss` with a reduction that can be switched, as Opacus' ghost clipping does."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses_B = tacit.models.next_token_loss(outputs, targets)
        return losses_B if self.reduction == "none" else losses_B.mean()


@dataclass(frozen=True)
class Setting:
    """`width` is that of `cifar_cnn`, where the model is one: JAX has a twin of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    criterion: Callable[[], nn.Module]
    batch_sizes: tuple[int, ...]
    width: int | None = None


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 32, 32, generator=generator)
    return inputs, torch.randint(10, (count,), generator=generator)


def texts(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Records that are their own targets."""

    def batch(count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (count, length), generator=generator)
        return tokens, tokens.clone()

    return batch


def cifar_cnn(width: int) -> Setting:
    return Setting(
        lambda: tacit.models.cifar_cnn(width=width),
        images,
        nn.CrossEntropyLoss,
        (64, 256, 1024, 4096),
        width,
    )


def wide_resnet(width: int) -> Setting:
    return Setting(
        lambda: tacit.models.wide_resnet(16, width), images, nn.CrossEntropyLoss, (64, 256, 1024)
    )


def gpt(*, tied: bool) -> Setting:
    """GPT-2 small on 256 tokens: 124 M parameters, 163 M where the head has a table of its own."""
    return Setting(
        lambda: tacit.models.gpt(50257, context=256, tied=tied),
        texts(50257, 256),
        NextToken,
        (8, 16, 32),
    )


MODELS = {
    "cifar_cnn": cifar_cnn(32),
    "cifar_cnn_wide": cifar_cnn(64),
    "wrn_16_4": wide_resnet(4),
    "gpt": gpt(tied=True),
    "gpt_untied": gpt(tied=False),
}


def tiny(name: str) -> Setting:
    """The same kind of model, small enough to see in a minute that every kind of step runs."""
    setting = {
        "cifar_cnn": cifar_cnn(4),
        "cifar_cnn_wide": cifar_cnn(8),
        "wrn_16_4": wide_resnet(1),
    }.get(name)
    if setting is None:
        tied = name == "gpt"
        setting = replace(
            gpt(tied=tied),
            model=lambda: tacit.models.gpt(50, 2, 16, 2, context=8, tied=tied),
            batch=texts(50, 8),
        )
    return replace(setting, batch_sizes=(4, 8))


@dataclass(frozen=True)
class Job:
    """One model on one batch; Tacit's steps take it in pieces of `physical` records."""

    setting: Setting
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    physical: int | None


def plain(job: Job) -> Step:
    optimizer = torch.optim.SGD(job.model.parameters(), lr=RATE)
    criterion = job.setting.criterion()

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(job.model(job.inputs), job.targets).backward()
        optimizer.step()

    return step_on(job.inputs.device, run)


def plain_replay(job: Job) -> Step:
    """Plain training as one CUDA graph, recorded as PyTorch's documentation does it."""
    if not job.inputs.is_cuda:
        raise RuntimeError("a CUDA graph needs a CUDA device")
    optimizer = torch.optim.SGD(job.model.parameters(), lr=RATE)
    criterion = job.setting.criterion()

    def eager() -> None:
        criterion(job.model(job.inputs), job.targets).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            eager()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        eager()
    return step_on(job.inputs.device, graph.replay)


def with_engine(make_engine: Callable[[], Engine], *, in_pieces: bool) -> Callable[[Job], Step]:
    """The real thing: query, mechanism and a ledger in memory."""

    def make(job: Job) -> Step:
        optimizer = torch.optim.SGD(job.model.parameters(), lr=RATE)
        query = tacit.PerSampleClip(MAX_NORM, engine=make_engine())
        run = private_step(
            query,
            job.model,
            job.setting.criterion(),
            optimizer,
            job.inputs,
            job.targets,
            job.physical if in_pieces else None,
        )
        return step_on(job.inputs.device, run)

    return make


def opacus(mode: str) -> Callable[[Job], Step]:
    def make(job: Job) -> Step:
        from opacus import PrivacyEngine

        for module in job.model.modules():
            if isinstance(module, nn.Embedding):
                # Its ghost norm takes a view of the indices, which expanded ones do not have.
                module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
        data = torch.utils.data.TensorDataset(job.inputs.cpu(), job.targets.cpu())
        made = PrivacyEngine().make_private(
            module=job.model,
            optimizer=torch.optim.SGD(job.model.parameters(), lr=RATE),
            data_loader=torch.utils.data.DataLoader(data, batch_size=len(data)),
            noise_multiplier=NOISE,
            max_grad_norm=MAX_NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
            criterion=job.setting.criterion(),
        )
        wrapped, private = made[0], made[1]
        criterion = made[2] if mode == "ghost" else job.setting.criterion()

        def run() -> None:
            private.zero_grad(set_to_none=True)
            criterion(wrapped(job.inputs), job.targets).backward()
            private.step()

        return step_on(job.inputs.device, run)

    return make


def jax(*, private: bool) -> Callable[[Job], Step]:
    def make(job: Job) -> Step:
        import clipping_speed_jax as twin

        if job.setting.width is None:
            raise NotImplementedError("the JAX twin is of cifar_cnn alone")
        max_norm, noise = (MAX_NORM, NOISE) if private else (None, None)
        device = "gpu" if job.inputs.is_cuda else "cpu"
        step = twin.Step(
            job.setting.width,
            job.inputs.cpu().numpy(),
            job.targets.cpu().numpy(),
            rate=RATE,
            max_norm=max_norm,
            noise=noise,
            device=device,
        )
        return Step(step.run, step.wait, step.bytes_used if job.inputs.is_cuda else None)

    return make


KINDS: dict[str, Callable[[Job], Step]] = {
    "plain": plain,
    "plain replay": plain_replay,
    "tacit default": with_engine(Automatic, in_pieces=True),
    "tacit": with_engine(BookKeeping, in_pieces=True),
    "tacit captured": with_engine(lambda: Automatic(Recorder(compile=False)), in_pieces=True),
    "tacit per record": with_engine(PerRecord, in_pieces=False),
    "opacus flat": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
    "jax plain": jax(private=False),
    "jax vmap": jax(private=True),
}
# A graph holds its memory between steps, so a step shows none: the recording does.
RECORDED = {"plain replay", "tacit default", "tacit captured"}
