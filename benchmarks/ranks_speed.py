"""What do ranks cost? Whole steps with and without a mesh, and beside plain training on ranks.

One process (a mesh of one rank) alternates three private steps of one model: without a mesh,
replicated, and sharded by `fully_shard`. Under `torchrun` with N processes it alternates private
steps and plain ones, both replicated: the plain step is a backward pass and an average over ranks
(`DistributedDataParallel`), on the same share of a batch.

    python benchmarks/ranks_speed.py --models resnet18 bert --records 256 --out ranks.jsonl
    torchrun --nproc-per-node 2 benchmarks/ranks_speed.py --device cpu --models mlp --records 256
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from any_model import alone
from any_model_settings import SETTINGS
from timing import wait
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tacit
from tacit.ledger.shared import SharedLedger
from tacit.pytrees import call_model, map_tensors, take_rows
from tacit.ranks import Ranks
from tacit.report.run_folder import source


def private(setting, data, expected: int, device, mesh, sharded: bool):
    torch.manual_seed(0)
    model = setting.model().to(device).train()
    if sharded:
        for block in model.children():
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    sampler = tacit.PoissonSampler(
        tacit.Records(*data), 1e-3, steps=100_000, expected_batch_size=expected, seed=0
    )
    ranks = None if mesh is None else Ranks(mesh)
    if ranks is not None:
        ranks.begin(model)
        sampler.share(ranks)
    mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 1.0, seed=0)

    def made() -> tacit.Ledger:
        return tacit.Ledger(None, tacit.Budget(1e4, 1e-6))

    ledger = made() if ranks is None else SharedLedger(ranks, made)
    ledger.begin(mechanism.plan)
    rows = torch.arange(expected // (1 if ranks is None else ranks.count), device=device)
    batch = tacit.sampling.batch_of(*take_rows(data, rows), divisor=expected, scheme=sampler.scheme)

    def step() -> None:
        ledger.release(mechanism.privatise(model, setting.loss, batch), into=model)
        optimizer.step()

    return step


def plain(setting, data, expected: int, device, mesh):
    torch.manual_seed(0)
    model = setting.model().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    count = 1 if mesh is None else mesh.size()
    wrapped = model
    if count > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    inputs, targets = take_rows(data, torch.arange(expected // count, device=device))

    def step() -> None:
        optimizer.zero_grad()
        setting.loss(call_model(wrapped, inputs), targets).mean().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--together", nargs="+", metavar="DIR N [TIME]", help="as any_model.py has it"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(args.device)
    single = "WORLD_SIZE" not in os.environ
    if single:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for name in args.models:
        setting = SETTINGS[name]
        data = map_tensors(lambda t: t.to(device), setting.batch(args.records))
        made = {"plain": plain(setting, data, args.records, device, None if single else mesh)}
        if single:
            made["no mesh"] = private(setting, data, args.records, device, None, False)
            made["sharded"] = private(setting, data, args.records, device, mesh, True)
        made["replicated"] = private(setting, data, args.records, device, mesh, False)
        for step in made.values():  # past everything that is compiled, and its comparisons
            for _ in range(70):
                step()
        times: dict[str, list[float]] = {kind: [] for kind in made}
        with alone(args.together):
            for _ in range(args.blocks):
                for kind, step in made.items():
                    dist.barrier()
                    wait(device)
                    started = time.perf_counter()
                    for _ in range(args.steps):
                        step()
                    wait(device)
                    times[kind].append(1e3 * (time.perf_counter() - started) / args.steps)
        row = {
            "model": name,
            "records": args.records,
            "ranks": dist.get_world_size(),
            "device": str(device),
            "torch": torch.__version__,
            "source": source(),
            "ms": {kind: statistics.quantiles(those, n=4) for kind, those in times.items()},
        }
        if dist.get_rank() == 0:
            print({kind: round(those[1], 3) for kind, those in row["ms"].items()}, name, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
