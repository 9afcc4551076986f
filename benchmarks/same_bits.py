"""Do the clipped sums of one batch depend on whether the step was recorded?

Asks five times (eager, recorded, replayed three times) and counts the entries that differ from the
first answer, with and without TensorFloat-32 and cuDNN's deterministic mode. Needs a GPU.

    python benchmarks/same_bits.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tacit
from tacit.report.run_folder import source

LOSS = tacit.losses.CrossEntropy()
RECORDS, TIMES = 256, 5


def networks() -> dict[str, nn.Module]:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.Tanh(), nn.Linear(256, 10))
    return {"cnn": tacit.models.cifar_cnn(), "mlp": flat}


def answers(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    query, found = tacit.PerSampleClip(0.3), []
    for _ in range(TIMES):
        batch = tacit.sampling.batch_of(
            inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        blocks = query(model, LOSS, batch).blocks
        found.append(torch.cat([s.reshape(-1).clone() for block in blocks for s in block.sums]))
    return found


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("a step is recorded on a CUDA device only, and there is none here")
    print(source())
    torch.manual_seed(0)
    for tensor_float in (True, False):
        for deterministic in (False, True):
            torch.backends.cudnn.allow_tf32 = tensor_float
            torch.backends.cudnn.deterministic = deterministic
            for name, model in networks().items():
                inputs = torch.randn(RECORDS, 3, 32, 32).cuda()
                targets = torch.randint(10, (RECORDS,)).cuda()
                first, *others = answers(model.cuda(), inputs, targets)
                differ = [int((first != other).sum()) for other in others]
                replays = [bool(torch.equal(others[1], other)) for other in others[2:]]
                print(
                    f"{name}, TensorFloat-32 {tensor_float}, deterministic {deterministic}: "
                    f"{differ} of {len(first)} differ; replays alike: {replays}"
                )


if __name__ == "__main__":
    main()
