"""What do attacks prove about Tacit's own training?

    step        one step of each route, sampling and relation with a canary at the bound: ε claimed,
                ε proved at least, and their ratio; with --releases, whole releases through the
                ledger beside the vectorised trials
    one-run     CIFAR-10 with mislabelled canaries, each in or out by a coin: ε of whole runs, for
                ε = 8 and for hardly any privacy
    membership  the setting of Table 1 of the clipless paper: Lipschitz networks on CIFAR-10 at
                ε = 20 for several temperatures, and the same without privacy; threshold attacks, a
                logistic regression on the model itself and on a shadow model, and LiRA

One JSON line for each result. Data comes from TACIT_DATA.

    python benchmarks/audits.py --parts step one-run membership --device cuda --out audits.jsonl
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import ks_2samp
from torch import nn

import tacit
from tacit import Records
from tacit.auditing import (
    attack_model,
    audit_one_run,
    audit_step,
    confidence_of_label,
    gradient_scores,
    lira_scores,
    logistic_scores,
    loss_scores,
    measure_attack,
    plant_canaries,
    released_scores,
    worst_case,
)
from tacit.auditing.canaries import shift_of, trial_scores
from tacit.budget import Relation
from tacit.mechanism import Mechanism
from tacit.queries import GradientQuery
from tacit.randomness import Randomness
from tacit.report.run_folder import source
from tacit.sampling import (
    MiniSets,
    Poisson,
    Scheme,
    ShuffledEpochs,
    TruncatedPoisson,
    WithoutReplacement,
)

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
DELTA = 1e-5
Case = tuple[GradientQuery, Scheme, float, Relation]


# ---- one step ------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Routes × samplings × relations; sets of one record go with every sampling of records."""
    record_wise: list[tuple[Scheme, float, Relation]] = [
        (Poisson(0.25), 0.5, ADD),
        (Poisson(0.25), 0.5, REPLACE),
        (TruncatedPoisson(0.25, 18, 24), 0.5, ADD),
        (TruncatedPoisson(0.25, 18, 24), 0.5, REPLACE),
        (WithoutReplacement(16, 4), 0.5, REPLACE),
        (ShuffledEpochs(3), 1.0, REPLACE),
    ]
    by_sets: list[tuple[Scheme, float, Relation]] = [
        (scheme, 0.7, relation)
        for scheme in (MiniSets(8, 16, chosen=2), MiniSets(8, 16, rate=0.25))
        for relation in (ADD, REPLACE)
    ]
    whole_sets: list[tuple[Scheme, float, Relation]] = [
        (scheme, 0.5, relation)
        for scheme in (MiniSets(8, 4, chosen=2), MiniSets(8, 4, rate=0.25))
        for relation in (ADD, REPLACE)
    ]
    routes: list[tuple[GradientQuery, list[tuple[Scheme, float, Relation]]]] = [
        (tacit.PerSampleClip(1.0), record_wise + by_sets),
        (tacit.PerSampleClip(1.0, blocks=tacit.by_layer), record_wise[:2]),
        (tacit.Clipless(gradient_clip=1.0), record_wise + by_sets),
        (tacit.BatchClip(1.0, 1), record_wise),
        (tacit.BatchClip(1.0, 4), whole_sets),
    ]
    return [(query, *case) for query, chosen in routes for case in chosen]


def one_step(args: argparse.Namespace, seed: int) -> Iterator[dict]:
    for number, (query, scheme, noise, relation) in enumerate(cases()):
        began = time.perf_counter()
        audit = audit_step(
            query, scheme, noise, relation,
            delta=1e-2, trials=args.trials, device=args.device, seed=1000 * seed + number,
        )  # fmt: skip
        facts = audit.facts() | {
            "proved": audit.epsilon,
            "proved_ratio": audit.epsilon / audit.claimed,
        }
        if args.releases:
            facts["releases"] = compared(query, scheme, noise, relation, args.releases, seed)
        yield facts | {"seconds": time.perf_counter() - began}


def compared(
    query: GradientQuery, scheme: Scheme, noise: float, relation: Relation, steps: int, seed: int
) -> dict:
    """Kolmogorov and Smirnov's p-values: whole releases beside the trials, on both sides."""
    scene = worst_case(query, scheme, relation)
    mechanism = Mechanism(query, scene.sampler, noise, relation=relation)
    trials = trial_scores(shift_of(scene, mechanism), scheme, 100_000, Randomness(seed))
    found = []
    for neighbour, quick in zip((False, True), trials, strict=True):
        real = released_scores(scene, noise, steps, neighbour=neighbour)
        finite = [np.nan_to_num(scores, neginf=-99) for scores in (real, quick)]
        found.append(float(ks_2samp(*finite).pvalue))
    return {"steps": steps, "p_values": found}


# ---- one run -------------------------------------------------------------------------------------


def cifar(args: argparse.Namespace) -> tuple[Records, Records]:
    train, test = tacit.load("cifar10")
    if args.limit is not None:
        train = replace(train.take(slice(args.limit)), public_size=args.limit, num_ids=args.limit)
        test = test.take(slice(args.limit))
    return train, test


def mislabelled(records: Records, seed: int) -> Records:
    """The same images, each with another class."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(1, 10, (len(records),), generator=generator)
    return replace(records, targets=(records.targets + shift) % 10)


def one_run(args: argparse.Namespace, seed: int) -> Iterator[dict]:
    train, test = cifar(args)
    canaries = mislabelled(test.take(slice(args.canaries)), seed)
    rest = test.take(slice(args.canaries, None))
    for epsilon in (8.0, 1000.0):
        began = time.perf_counter()
        planted = plant_canaries(train, canaries)
        torch.manual_seed(seed)
        model = (nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)) if args.linear
                 else tacit.models.cifar_cnn()).to(args.device)  # fmt: skip
        initial = copy.deepcopy(model)
        loss = tacit.losses.CrossEntropy()
        sampler = tacit.PoissonSampler(
            planted.train.to(args.device), expected_batch_size=args.batch, steps=args.steps
        )
        run = tacit.Trainer(
            model, loss, tacit.PerSampleClip(args.clip), sampler,
            torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
            tacit.Budget(epsilon, DELTA), callbacks=[],
        ).fit()  # fmt: skip
        trained = time.perf_counter()
        moved = [b.detach() - a.detach() for a, b in zip(
            initial.parameters(), run.model.parameters(), strict=True)]  # fmt: skip
        scores = {
            "loss": loss_scores(run.model, loss, planted.records),
            "fall of the loss": loss_scores(run.model, loss, planted.records, initial),
            "gradient": gradient_scores(initial, loss, planted.records, moved),
        }
        for name, values in scores.items():
            audit = audit_one_run(values, planted.included, delta=DELTA, plan=run.plan)
            yield {
                "score": name,
                "target_epsilon": epsilon,
                "epsilon": run.epsilon,
                "accuracy": run.evaluate(rest).accuracy,
                "noise_multiplier": run.plan.noise_multiplier,
                "steps": run.steps,
                **audit.facts(),
                "training_seconds": trained - began,
                "seconds": time.perf_counter() - began,
            }


# ---- membership inference ------------------------------------------------------------------------

TEMPERATURES = (0.01, 0.22, 0.74, 5.4)  # four of the six of Table 1


def lipschitz_model(
    args: argparse.Namespace, train: Records, temperature: float, private: bool, seed: int
) -> tuple[nn.Module, float | None]:
    """Clipless training at ε = 20, or SGD with momentum on the same network without privacy."""
    torch.manual_seed(seed)
    model = tacit.models.lipschitz_mlp(train.shape, 10, hidden=(args.width,)).to(args.device)
    loss = tacit.losses.CrossEntropy(temperature)
    clip = 0.5 * loss.lipschitz_for(10)
    records = train.to(args.device)
    batch = min(args.large_batch, len(train) // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / clip, momentum=0.9)
    if private:
        # Compiling takes longer than one of these runs.
        query = tacit.Clipless(gradient_clip=clip, recorder=tacit.engines.Recorder(compile=False))
        sampler = tacit.PoissonSampler(
            records, expected_batch_size=batch, steps=args.large_steps,
            pad_to=512 if args.device == "cuda" else None,
        )  # fmt: skip
        run = tacit.Trainer(
            model, loss, query, sampler, optimizer, tacit.Budget(20.0, DELTA),
            noise=tacit.Noise(_noise(batch / len(train), args.large_steps), tacit.PerLayerNoise()),
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.large_steps),
            callbacks=[],
        ).fit()  # fmt: skip
        return run.model, run.epsilon
    generator = torch.Generator().manual_seed(seed)
    size = min(500, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 * temperature, momentum=0.9)
    for _ in range(args.plain_epochs):
        order = torch.randperm(len(records), generator=generator)
        for step, rows in enumerate(order.split(size)):
            optimizer.zero_grad()
            outputs = model(records.inputs[rows.to(args.device)])
            loss(outputs, records.targets[rows.to(args.device)]).mean().backward()
            optimizer.step()
            if step % 10 == 0:
                tacit.project(model)
    tacit.project(model)
    return model, None


@functools.cache
def _noise(rate: float, steps: int) -> float:
    return tacit.calibrate(tacit.Budget(20.0, DELTA), Poisson(rate), steps)


@torch.no_grad()
def outputs_of(model: nn.Module, records: Records, device: str) -> np.ndarray:
    model.eval()
    return torch.cat([model(x.to(device)).cpu() for x in records.inputs.split(2048)]).numpy()


def membership(args: argparse.Namespace, seed: int) -> Iterator[dict]:
    """Half of the training set are members; shadow models have halves of their own."""
    everyone, test = cifar(args)
    coins = np.random.default_rng(seed)
    y = everyone.targets.numpy()

    def half() -> tuple[Records, np.ndarray]:
        inside = coins.permutation(len(everyone)) < len(everyone) // 2
        rows = torch.from_numpy(np.flatnonzero(inside))
        count = len(rows)
        side = replace(everyone.take(rows), public_size=count, num_ids=count,
                       record_ids=torch.arange(count))  # fmt: skip
        return side, inside

    for private in (True, False):
        for temperature in TEMPERATURES if private else TEMPERATURES[:2]:
            began = time.perf_counter()
            train, members = half()
            model, epsilon = lipschitz_model(args, train, temperature, private, seed)
            outputs = outputs_of(model, everyone, args.device)
            known = []
            for shadow in range(args.shadows if temperature == TEMPERATURES[0] else 0):
                side, inside = half()
                other, _ = lipschitz_model(args, side, temperature, private, seed + 1000 + shadow)
                known.append((outputs_of(other, everyone, args.device), y, inside))
            attacks = attack_model(outputs, y, members, temperature=temperature, resamples=50,
                                   seed=seed)  # fmt: skip
            if known:
                odds = logistic_scores(known, outputs, y, temperature)
                attacks.append(
                    measure_attack(
                        "logistic, shadow models", odds[members], odds[~members], resamples=50
                    )
                )
            if len(known) >= 4:
                outside = np.stack([~inside for *_, inside in known])
                clear = outside.sum(axis=0) >= 2
                phi = confidence_of_label(outputs, y, temperature)
                of_shadows = np.stack([confidence_of_label(o, t, temperature) for o, t, _ in known])
                scores = lira_scores(phi[clear], of_shadows[:, clear], outside[:, clear])
                inside = members[clear]
                attacks.append(
                    measure_attack("LiRA, offline", scores[inside], scores[~inside], resamples=50)
                )
            right = outputs.argmax(1) == y
            accuracy = (
                outputs_of(model, test, args.device).argmax(1) == test.targets.numpy()
            ).mean()
            yield {
                "private": private,
                "epsilon": epsilon,
                "temperature": temperature,
                "accuracy": float(accuracy),
                "accuracy_of_members": float(right[members].mean()),
                "shadow_models": len(known),
                "attacks": [attack.facts() for attack in attacks],
                "seconds": time.perf_counter() - began,
            }


PARTS = {"step": one_step, "one-run": one_run, "membership": membership}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, help="file that lines are added to")
    parser.add_argument("--trials", type=int, default=1_000_000, help="of one step, each side")
    parser.add_argument("--releases", type=int, default=0, help="whole releases to compare with")
    parser.add_argument("--limit", type=int, help="records of each side of CIFAR-10")
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--linear", action="store_true", help="a linear model for the one run")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--large-batch", type=int, default=8192, help="of clipless runs")
    parser.add_argument("--large-steps", type=int, default=200)
    parser.add_argument("--plain-epochs", type=int, default=20, help="without privacy")
    parser.add_argument("--shadows", type=int, default=8, help="shadow models, at τ = 0.01")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    common = {"device": device, "torch": torch.__version__, **source()}
    settings = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()}
    for part in args.parts:
        for seed in args.seeds:
            for facts in PARTS[part](args, seed):
                line = {"part": part, "seed": seed, **facts, "settings": settings, **common}
                print(json.dumps({k: v for k, v in line.items() if k != "settings"}), flush=True)
                if args.out is not None:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
