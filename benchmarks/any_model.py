"""How fast are private gradients of models that others wrote, against compiled plain training?

One process, one device, one batch per model. These steps alternate in blocks:

- plain eager: forward, backward, gradients of all parameters;
- plain compiled: the same as one graph, compiled by Inductor and captured as a CUDA graph;
- tacit: a clipping step as `PerSampleClip` runs it by default, once it has compiled;
- tacit eager: the same without a recording;
- Opacus with hooks and with ghost clipping, where it takes the model;
- whole steps, with noise, ledger and optimizer: plain compiled, and clipless training of the
  model's Lipschitz twin (with MaxMin and true norms, or the light one), projection included.

Times are medians over blocks, with quartiles; a step is gradient and clipping, without noise,
optimizer and sampling, for all of them. `first` is the time to the end of the first step, `ready`
to the end of compiling. Memory is PyTorch's peak while a step runs, less what was there before.

With `--together DIR N [TIME]`, N processes prepare their models side by side, until TIME (seconds
since 1970) at most, and then measure one after another: compiling takes longer than measuring.
Each process holds 5 to 17 GiB of a GPU, so 140 GiB are enough for eight of them and not for twelve.
`--profile` lists the kernels of each compiled step by time.

With `--epochs`, whole epochs of 20 expected batches are timed instead, optimizer included: plain
training on shuffled batches of one size, compiled as above, and Tacit with Poisson batches, noise
and a ledger on disk. Epochs alternate too, after five to ten epochs in which the
shapes of Tacit's batches compile.

    python benchmarks/any_model.py --models resnet18 vit bert --out any_model.jsonl
    python benchmarks/any_model.py --models resnet18 --records 256 --epochs 5
    python benchmarks/any_model.py --models vit --records 256 --profile 20
    for m in vit bert; do python benchmarks/any_model.py --models $m --together /tmp/x 2 & done
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import itertools
import json
import math
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from any_model_settings import SETTINGS, Setting
from timing import print_profile, private_step, step_on, time_block, wait

import tacit
from tacit.engines.book_keeping import run_program
from tacit.engines.recorder import RecordedStep, Recorder
from tacit.lipschitz import Absolute
from tacit.pytrees import call_model, map_tensors, take_rows, tensors_of
from tacit.report.run_folder import source
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of

MAX_NORM = 1.0


def plain_step(model, loss, inputs, targets) -> RecordedStep:
    """Σ ∇ℓ_i of plain training, as work for the recorder: the strongest baseline there is."""

    def work(trained, batch):
        following = iter(batch)
        x, y = map_tensors(lambda t: next(following), (inputs, targets))
        losses = run_program(model, loss, x, y, fused_functions=False)  # an LSTM is cuDNN's
        grads = torch.autograd.grad(losses.mean(), list(trained.values()), allow_unused=True)
        return {n: g for n, g in zip(trained, grads, strict=True) if g is not None}

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return RecordedStep(model, "plain", trained, tensors_of((inputs, targets)), work)


def plain_eager(model, setting, inputs, targets):
    trained = [p for p in model.parameters() if p.requires_grad]

    def step():
        losses = setting.loss(call_model(model, inputs), targets)
        torch.autograd.grad(losses.mean(), trained, allow_unused=True)

    return step


def plain_compiled(model, setting, inputs, targets):
    recorder = Recorder()
    recorder.expect(10**6)
    step = plain_step(model, setting.loss, inputs, targets)
    return lambda: recorder(step)


def tacit_default(model, setting, inputs, targets, recorder=None):
    engine = tacit.engines.Automatic(recorder)
    engine.expect(10**6)
    query = tacit.PerSampleClip(MAX_NORM, engine=engine)
    batch = batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5))
    return lambda: query(model, setting.loss, batch)


def tacit_eager(model, setting, inputs, targets):
    return tacit_default(model, setting, inputs, targets, Recorder(capture=False, compile=False))


def opacus(ghost: bool):
    def make(model, setting, inputs, targets):
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        trained = [p for p in model.parameters() if p.requires_grad]
        if not ghost:
            wrapped = GradSampleModule(model, loss_reduction="sum")

            def step():
                setting.loss(call_model(wrapped, inputs), targets).sum().backward()
                per_sample = [
                    p.grad_sample.flatten(1) for p in trained if p.grad_sample is not None
                ]
                norms = torch.stack([g.norm(dim=1) for g in per_sample]).norm(dim=0)
                scale = (MAX_NORM / (norms + 1e-6)).clamp(max=1.0)
                for p in trained:
                    if p.grad_sample is not None:
                        p.grad = torch.einsum("i,i...", scale, p.grad_sample)
                        p.grad_sample = None

            return step
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=MAX_NORM, use_ghost_clipping=True, loss_reduction="sum"
        )

        def step():
            losses = setting.loss(call_model(wrapped, inputs), targets)
            losses.sum().backward(retain_graph=True)
            wrapped.zero_grad()
            scale = wrapped.get_clipping_coef().detach()
            wrapped.disable_hooks()
            (scale * losses).sum().backward()
            wrapped.enable_hooks()
            wrapped.zero_grad()

        return step

    return make


def plain_whole(model, setting, inputs, targets):
    gradients = plain_compiled(model, setting, inputs, targets)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1e-3, momentum=0.9)

    def step():
        found = gradients()
        for n, p in trained.items():
            p.grad = found.get(n)
        optimizer.step()

    return step


def clipless_whole(light: bool):
    """Absolute values for MaxMin, and kernels bounded by their flattened matrices, if light."""

    def make(model, setting, inputs, targets):
        options = {"activation": lambda channels, axis: Absolute(), "reshaped": True}
        twin = tacit.lipschitz_twin(model, **(options if light else {})).model
        optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
        query = tacit.Clipless(gradient_clip=1.0)
        query.expect(10**6)
        loss = tacit.losses.CrossEntropy(0.1)
        private = private_step(query, twin, loss, optimizer, inputs, targets)

        def step():
            private()
            tacit.project(twin)

        return step

    return make


KINDS = {
    "plain eager": plain_eager,
    "plain compiled": plain_compiled,
    "tacit": tacit_default,
    "tacit eager": tacit_eager,
    "opacus": opacus(False),
    "opacus ghost": opacus(True),
    "plain whole": plain_whole,
    "clipless whole": clipless_whole(False),
    "light clipless whole": clipless_whole(True),
}
STEPS = tuple(KINDS)[:6]
COMPILED = ("plain compiled", "tacit", "plain whole", "clipless whole", "light clipless whole")


def prepare(kind: str, setting: Setting, records: int, device) -> tuple[Callable[[], Any], dict]:
    """A step that has done all its compiling, and how long that took."""
    torch.manual_seed(0)
    model = setting.model().to(device).train()
    inputs, targets = map_tensors(lambda t: t.to(device), setting.batch(records))
    gc.collect()
    before = reserved = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        reserved = torch.cuda.memory_reserved()
    step = KINDS[kind](model, setting, inputs, targets)
    started = time.perf_counter()
    step()
    wait(device)
    facts = {"first_s": time.perf_counter() - started}
    if device.type == "cuda":  # planning and checks keep activations
        facts["first_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(4 if kind in COMPILED else 2):
        step()
    wait(device)
    facts["ready_s"] = time.perf_counter() - started
    if device.type == "cuda":
        if kind not in COMPILED:
            torch.cuda.reset_peak_memory_stats()
            step()
            wait(device)
        peak = torch.cuda.max_memory_allocated() - before
        if kind in COMPILED:  # a CUDA graph holds the memory of its step between steps
            gc.collect()
            torch.cuda.empty_cache()
            peak = torch.cuda.memory_reserved() - reserved
        facts["memory_MiB"] = peak / 2**20
        torch.cuda.empty_cache()  # for the processes beside this one
    return step, facts


def time_steps(step, steps: int, device) -> float:
    return time_block(step_on(device, step), steps)


@contextmanager
def alone(together: list[str] | None):
    """Wait until all processes are prepared, and take the device in turns."""
    if together is None:
        yield
        return
    folder, count = Path(together[0]), int(together[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.ready").touch()
    deadline = float(together[2]) if len(together) > 2 else math.inf
    while len(list(folder.glob("*.ready"))) < count and time.time() < deadline:
        time.sleep(0.2)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(name: str, records: int, kinds: list[str], device, blocks: int, args) -> dict:
    setting = SETTINGS[name]
    made: dict[str, Any] = {}
    row: dict[str, Any] = {"model": name, "records": records, "failed": {}, "facts": {}}

    def try_all(kinds: list[str]) -> None:
        for kind in kinds:
            try:
                made[kind], row["facts"][kind] = prepare(kind, setting, records, device)
            except Exception as error:
                words = " ".join(str(error).split())
                row["failed"][kind] = f"{type(error).__name__}: {words[:200]}"
                if not kind.startswith("opacus"):
                    traceback.print_exc(limit=-4)

    try_all([kind for kind in kinds if kind in COMPILED])
    with alone(args.together):
        try_all([kind for kind in kinds if kind not in COMPILED])  # these may need much memory
        times: dict[str, list[float]] = {kind: [] for kind in kinds if kind in made}
        for kind, step in made.items():
            # Past replays that are compared with an eager step, and steps that are checked: the
            # timed ones are 37 to 61, or more than 66, where the next such step is the 512th.
            time_steps(step, 28 if kind in COMPILED else 2, device)
            first = time_steps(step, 2, device)
            row["facts"][kind]["steps"] = max(5, min(50, int(0.1 / max(first, 1e-6))))
            if kind in COMPILED and blocks * row["facts"][kind]["steps"] > 25:
                time_steps(step, 30, device)
        for _ in range(blocks):
            for kind, step in made.items():
                times[kind].append(time_steps(step, row["facts"][kind]["steps"], device))
        for kind in (k for k in COMPILED if k in made and args.profile):
            title, step = f"{name} {records} {kind}", step_on(device, made[kind])
            # Two steps: a third may be one that is checked.
            print_profile(title, step, device, args.profile, steps=2)
    row["ms"] = {
        kind: [round(1e3 * q, 4) for q in statistics.quantiles(those, n=4)]
        for kind, those in times.items()
    }
    row["parameters"] = sum(p.numel() for p in setting.model().parameters())
    return row


def epochs_of(name: str, records: int, count: int, device, together=None) -> dict:
    """Seconds per epoch of plain compiled training and of Tacit by default."""
    setting = SETTINGS[name]
    data = map_tensors(lambda t: t.to(device), setting.batch(EPOCH * records))
    made = {
        "plain compiled": plain_epoch(setting, data, records, device),
        "tacit": tacit_epoch(setting, data, records, device),
    }
    first = {kind: time_steps(epoch, 1, device) for kind, epoch in made.items()}
    before: list[float] = []  # Tacit has three sizes of batches; the rarest is in 7% of all steps
    while len(before) < 10 and (len(before) < 5 or before[-1] > 1.2 * min(before)):
        before.append(time_steps(made["tacit"], 1, device))
        made["plain compiled"]()
    times: dict[str, list[float]] = {kind: [] for kind in made}
    with alone(together):
        for _ in range(count):
            for kind, epoch in made.items():
                times[kind].append(time_steps(epoch, 1, device))
    medians = {kind: statistics.median(those) for kind, those in times.items()}
    return {
        "model": name,
        "records": records,
        "steps_per_epoch": EPOCH,
        "first_epoch_s": first,
        "warm_up_epochs": len(before),
        "epoch_s": {kind: [round(t, 4) for t in sorted(those)] for kind, those in times.items()},
        "ratio": medians["tacit"] / medians["plain compiled"],
    }


EPOCH = 20


def plain_epoch(setting: Setting, data, records: int, device):
    torch.manual_seed(0)
    model = setting.model().to(device).train()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1e-3, momentum=0.9)
    recorder = Recorder()
    recorder.expect(10**6)

    def epoch():
        order = torch.randperm(EPOCH * records, device=device)
        for rows in order.split(records):
            inputs, targets = take_rows(data, rows)
            found = recorder(plain_step(model, setting.loss, inputs, targets))
            for n, p in trained.items():
                p.grad = found.get(n)
            optimizer.step()

    return epoch


def tacit_epoch(setting: Setting, data, records: int, device):
    torch.manual_seed(0)
    model = setting.model().to(device).train()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9
    )
    sampler = tacit.PoissonSampler(
        tacit.Records(*data), 1 / EPOCH, EPOCH * 100, expected_batch_size=records
    )
    mechanism = tacit.Mechanism(tacit.PerSampleClip(MAX_NORM), sampler, noise_multiplier=1.0)
    folder = tempfile.TemporaryDirectory()
    ledger = tacit.Ledger(Path(folder.name) / "ledger.sqlite", tacit.Budget(1e3, 1e-6))
    batches = iter(sampler)

    def epoch(folder=folder):  # which is deleted with the last reference to it
        for batch in itertools.islice(batches, EPOCH):
            ledger.release(mechanism.privatise(model, setting.loss, batch), into=model)
            optimizer.step()

    return epoch


def show(row: dict) -> str:
    if "epoch_s" in row:
        each = {kind: statistics.median(those) for kind, those in row["epoch_s"].items()}
        parts = [f"{kind} {value:.3f} s an epoch" for kind, value in each.items()]
        return " | ".join(
            [f"{row['model']:18s} {row['records']:5d}", *parts, f"x{row['ratio']:.2f}"]
        )

    ms = {kind: those[1] for kind, those in row["ms"].items()}
    baseline = next((kind for kind in ("plain compiled", "plain whole") if kind in ms), None)
    base, eager = ms.get(baseline), ms.get("plain eager")
    parts = [f"{row['model']:18s} {row['records']:5d}"]
    for kind, value in ms.items():
        ratio = f" x{value / base:.2f}" if base and kind != baseline else ""
        parts.append(f"{kind} {value:.2f} ms{ratio}")
    if base and "tacit" in ms and eager:
        parts.append(f"tacit/eager {ms['tacit'] / eager:.2f}")
        memory = [row["facts"][k].get("memory_MiB", 0) for k in ("tacit", "plain compiled")]
        parts.append(f"memory x{memory[0] / max(memory[1], 1):.2f}")
        parts.append(f"first {row['facts']['tacit']['first_s']:.1f} s")
        parts.append(f"ready {row['facts']['tacit']['ready_s']:.1f} s")
    if row["failed"]:
        parts.append(f"failed {row['failed']}")
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SETTINGS))
    parser.add_argument("--records", type=int, nargs="*")
    parser.add_argument(
        "--kinds", nargs="+", default=list(STEPS), type=lambda kind: kind.replace("_", " ")
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument(
        "--together", nargs="+", metavar="DIR N [TIME]", help="prepare N side by side, until TIME"
    )
    parser.add_argument("--epochs", type=int, default=0, help="time so many whole epochs")
    parser.add_argument("--profile", type=int, default=0, help="list so many kernels of a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module=r"(?!tacit)")
    warnings.filterwarnings("always", message="a (recorded )?step of")  # which is not compiled
    device = torch.device(args.device)
    for name in args.models:
        for records in args.records or SETTINGS[name].records:
            if args.epochs:
                row = epochs_of(name, records, args.epochs, device, args.together)
            else:
                row = measure(name, records, args.kinds, device, args.blocks, args)
            print(show(row), flush=True)
            if args.out:
                row |= {"torch": torch.__version__, "source": source()}
                if device.type == "cuda":
                    row["device"] = torch.cuda.get_device_name()
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            gc.collect()
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
