"""Who takes the step: plain training, Tacit's engines, Opacus, JAX.

A step is gradient, clipping, noise and optimizer, always on the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from clipping_speed_models import Setting
from torch import Tensor, nn

import tacit
from tacit.engines import Automatic, BookKeeping, Engine, PerRecord, Recorder

MAX_NORM, NOISE, RATE = 0.1, 1.0, 0.01


@dataclass(frozen=True)
class Job:
    """One model on one batch; Tacit's steps take it in pieces of `physical` records."""

    setting: Setting
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    physical: int | None


@dataclass(frozen=True)
class Step:
    """`wait` returns when the device is done; `bytes_used` is known where a compiler planned it."""

    run: Callable[[], None]
    wait: Callable[[], None]
    bytes_used: int | None = None


def on_torch(job: Job, run: Callable[[], None]) -> Step:
    device = job.inputs.device
    return Step(run, (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else _done)


def _done() -> None:
    """A CPU is done when the call returns."""


def plain(job: Job) -> Step:
    optimizer = torch.optim.SGD(job.model.parameters(), lr=RATE)
    criterion = job.setting.criterion()

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(job.model(job.inputs), job.targets).backward()
        optimizer.step()

    return on_torch(job, run)


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
    return on_torch(job, graph.replay)


def with_engine(make_engine: Callable[[], Engine], *, in_pieces: bool) -> Callable[[Job], Step]:
    """The real thing: query, mechanism and a ledger in memory."""

    def make(job: Job) -> Step:
        inputs, targets, criterion = job.inputs, job.targets, job.setting.criterion()
        optimizer = torch.optim.SGD(job.model.parameters(), lr=RATE)
        query = tacit.PerSampleClip(MAX_NORM, engine=make_engine())
        sampler = tacit.PoissonSampler(
            (inputs, targets), sampling_rate=1e-3, expected_batch_size=len(inputs), steps=100_000
        )
        mechanism = tacit.Mechanism(query, sampler, NOISE)
        ledger = tacit.Ledger(None, tacit.Budget(epsilon=20.0, delta=1e-5))
        ledger.begin(mechanism.plan)
        batch = tacit.sampling.batch_of(
            inputs,
            targets,
            divisor=len(inputs),
            scheme=sampler.scheme,
            max_physical=job.physical if in_pieces else None,
        )

        def run() -> None:
            private = mechanism.privatise(job.model, criterion, batch)
            ledger.release(private, into=job.model)
            optimizer.step()

        return on_torch(job, run)

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

        return on_torch(job, run)

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
