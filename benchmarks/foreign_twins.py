"""How long do Lipschitz twins of networks from torchvision and timm take on one core?

    python benchmarks/foreign_twins.py --repeats 3 --out times.json

Needs torchvision and timm. Seconds of processor time on one thread: building the twin, propagating
bounds through it, and projecting its weights once, as each training step does. Networks without a
twin have the seconds until they are refused, and the refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import tacit

CLASSES = 10
TORCHVISION = {
    "resnet18": 32, "resnet50": 32, "vgg11": 32, "vgg11_bn": 32, "mobilenet_v2": 64,
    "convnext_tiny": 64, "vit_b_16": 224, "swin_t": 224, "efficientnet_b0": 64,
}  # fmt: skip
TIMM = {
    "mixer_s32_224": 64, "mixer_b16_224": 64, "resmlp_12_224": 64, "resnet18": 32,
    "convnext_tiny": 64, "vit_tiny_patch16_224": 224,
}  # fmt: skip


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(model: nn.Module, side: int, repeats: int) -> dict[str, object]:
    twins: list[nn.Module] = []

    def build() -> None:
        twins[:] = [tacit.lipschitz_twin(model).model]

    try:
        built = [seconds(build) for _ in range(repeats)]
    except tacit.errors.UnboundedLayer as error:

        def refuse() -> None:
            with contextlib.suppress(tacit.errors.UnboundedLayer):
                build()

        return {"refused": str(error), "seconds": [seconds(refuse) for _ in range(repeats)]}
    (twin,) = twins
    loss, shape = tacit.losses.CrossEntropy(0.1), (3, side, side)
    found = tacit.lipschitz.propagate(twin, loss, shape)
    return {
        "parameters": sum(p.numel() for p in twin.parameters()),
        "build": built,
        "propagate": [
            seconds(lambda: tacit.lipschitz.propagate(twin, loss, shape)) for _ in range(repeats)
        ],
        "project": [seconds(lambda: tacit.project(twin)) for _ in range(repeats)],
        "bound": found.total(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import timm
    import torchvision

    models: dict[str, tuple[Callable[[], nn.Module], int]] = {}
    for name, side in TORCHVISION.items():
        make = getattr(torchvision.models, name)
        models[f"torchvision {name}"] = (lambda make=make: make(num_classes=CLASSES)), side
    for name, side in TIMM.items():
        size = {"img_size": side} if "mixer" in name or "resmlp" in name else {}
        models[f"timm {name}"] = (
            (lambda name=name, size=size: timm.create_model(name, num_classes=CLASSES, **size)),
            side,
        )
    results = {}
    for name, (build, side) in models.items():
        torch.manual_seed(0)
        found = results[name] = measure(build(), side, options.repeats)
        medians = {
            what: round(statistics.median(times), 2)
            for what, times in found.items()
            if isinstance(times, list)
        }
        print(name, side, medians, found.get("refused", ""), flush=True)
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
    }
    if options.out is not None:
        options.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
