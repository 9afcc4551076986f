"""Certificates under attack: no record that is certified may change its class within its radius.

Trains the network that a search has chosen, then moves every test record uphill in pixel space
(projected gradient ascent on the margin, within an L2 ball): what is still right bounds the true
robust accuracy from above, certified accuracy bounds it from below. Ends with an error if a
certified record falls.

    python -m experiments.clipless attacked --chosen search.jsonl --out attacked.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.clipless.figure_3b import TASKS
from experiments.clipless.networks import default_epsilon, is_certified
from experiments.clipless.spaces import KNOWN
from experiments.clipless.training import PIXEL, Trial, features_of, pixel_unit, run_once
from experiments.images import parts
from experiments.runner import Paper, options, plain, read_lines
from tacit import Records
from tacit.certificates import certified_radius
from tacit.data.catalogue import lookup
from tacit.report.run_folder import environment, to_json

RADII = (1, 2, 4, 8, 16, 36)


def attacked(
    model: nn.Module, x: Tensor, y: Tensor, radius: float, std: Tensor, steps: int
) -> Tensor:
    """Whether each record keeps its class y against `steps` of ascent within `radius` of pixels.

    A move δ of the pixels is a move δ/std of the record. Steps are a fifth of the radius long,
    along the gradient of max_{j≠y} f_j − f_y, from the record itself and from a random point.
    """
    right = model(x).argmax(1) == y
    for begin in (0.0, radius):
        move = torch.randn_like(x)
        move *= begin / _norms(move)
        for _ in range(steps):
            move.requires_grad_(True)
            margins = _margins(model(x + move / std), y)
            (slope,) = torch.autograd.grad(margins.sum(), move)
            with torch.no_grad():
                right &= margins < 0
                move = move + 0.2 * radius * slope / _norms(slope)
                move = move * (radius / _norms(move)).clamp(max=1.0)
        with torch.no_grad():
            right &= _margins(model(x + move / std), y) < 0
    return right


def _margins(outputs: Tensor, y: Tensor) -> Tensor:
    own = outputs.gather(1, y[:, None]).squeeze(1)
    others = outputs.scatter(1, y[:, None], -torch.inf)
    return others.amax(1) - own


def _norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1, 1)


def rows(model: nn.Module, test: Records, dataset: str, steps: int) -> list[dict]:
    """For each radius over 255: certified, right under attack, and certified records that fell."""
    std = torch.tensor(lookup(dataset).std, device=test.device).view(1, -1, 1, 1)
    table = []
    for over_255 in RADII:
        radius = over_255 * PIXEL
        counts = torch.zeros(3, dtype=torch.long)
        for x, y in zip(test.inputs.split(2000), test.targets.split(2000), strict=True):
            safe = certified_radius(model, x, y) > over_255 * pixel_unit(dataset)
            kept = attacked(model, x, y, radius, std, steps)
            counts += torch.stack([safe.sum(), kept.sum(), (safe & ~kept).sum()]).cpu()
        certified, right, fell = counts.tolist()
        table.append(
            {
                "radius_over_255": over_255,
                "certified": certified / len(test),
                "under_attack": right / len(test),
                "certified_that_fell": fell,
            }
        )
        print(table[-1], flush=True)
    return table


def main(paper: Paper, arguments: Sequence[str]) -> dict:
    """Certificates under attack: no certified record may change its class within its radius."""
    parser = options("Certificates under attack")
    tasks = [task for task in KNOWN if is_certified(task)]
    parser.add_argument("--task", choices=tasks, default="cifar10/certified")
    parser.add_argument("--chosen", type=Path, help="a search's file; else what is known to work")
    parser.add_argument("--epsilon", type=float, help="else that of the task's search")
    parser.add_argument("--steps", type=int, default=20, help="of ascent, from each start")
    args = parser.parse_args(arguments)
    setting = KNOWN[args.task][0]
    if args.chosen is not None:
        setting = TASKS.chosen(read_lines(args.chosen))[args.task]
    trial = Trial(args.task, setting, args.epsilon or default_epsilon(args.task))
    trial = paper.small(trial) if args.small else trial
    limit = paper.small_records if args.small else None
    seed = (args.seeds or [0])[0]
    place = (trial.dataset, setting.features, args.device, limit, False)
    train, test = parts(features_of, *place)
    model, facts = run_once(trial.setting, train, trial.epsilon, seed)
    report = {
        "task": trial.task,
        "seed": seed,
        "setting": vars(trial.setting),
        **facts,
        "steps_of_ascent": 2 * args.steps,
        "rows": rows(model.eval(), test, trial.dataset, args.steps),
        "environment": environment(),
    }
    if args.out is not None:
        args.out.write_text(to_json(report) + "\n", encoding="utf-8")
    if any(row["certified_that_fell"] for row in report["rows"]):
        raise SystemExit("a certified record fell: its certificate is wrong")
    return plain(report)
