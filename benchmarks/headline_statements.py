"""Question: do the statements of all recorded headlines hold, with Tacit and without it?

Each headline of the README and of docs/results.md becomes a privacy statement, made from what its
record holds: noise multiplier, sampling, steps, what was released before. Then `tacit verify` and
tools/verify_statement.py check it.

    python benchmarks/headline_statements.py --out build/headlines

A headline whose record lacks what a statement needs is printed with what is missing.
"""

from __future__ import annotations

import argparse
import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting as dpa

from tacit import Relation
from tacit.accounting import Plan
from tacit.report import check_statement
from tacit.report.privacy_statement import PrivacyStatement, state
from tacit.sampling import MiniSets, Poisson, Unit

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
SCRIPT = ROOT / "tools" / "verify_statement.py"
CLIPLESS, GPU, CPU = (
    f"2026-11-15_{name}" for name in ("clipless_accuracy", "losing_less_h200", "losing_less_cpu")
)
BATCH_CLIPPING = "2026-11-15_batch_clipping_figures"
CIFAR10, MNIST = 50_000, 60_000  # training records; Fashion-MNIST has as many as MNIST


@dataclass(frozen=True)
class Headline:
    """A figure of the documentation, and where its record is: the first line with these fields.

    `prelude` names the settings that hold the noise multipliers of what was released before the
    first step. `steps` replaces those of the record, for a figure on the way.
    """

    name: str
    record: str
    fields: dict[str, Any]
    records: int
    prelude: tuple[str, ...] = ()
    steps: int | None = None
    note: str = ""

    def line(self) -> dict[str, Any]:
        text = (RECORDS / self.record).read_text(encoding="utf-8")
        jsonl = self.record.endswith("l")
        lines = [json.loads(row) for row in text.splitlines()] if jsonl else json.loads(text)
        found = [
            line
            for line in lines
            if all({**line, **line["setting"]}.get(k) == v for k, v in self.fields.items())
        ]
        assert found, f"{self.record} has no line with {self.fields}"
        return found[0]

    def plan(self) -> Plan:
        line = self.line()
        setting, steps = line["setting"], self.steps or line["steps"]
        if line.get("blocks"):  # batch clipping: one of ⌈records ÷ size⌉ mini-sets per step
            sets = MiniSets(self.records, setting["batch_size"], chosen=1)
            multiplier = line["noise_multiplier"]
            return Plan(sets, multiplier, Relation.REPLACE_ONE, steps, Unit.MINI_SET)
        prelude = tuple(dpa.GaussianDpEvent(setting[name]) for name in self.prelude)
        scheme = Poisson(setting["batch_size"] / self.records)
        relation = Relation.ADD_OR_REMOVE_ONE
        return Plan(scheme, line["noise_multiplier"], relation, steps, prelude=prelude)

    def recorded_epsilon(self) -> float:
        line = self.line()
        on_the_way = {point["step"]: point["epsilon"] for point in line.get("path", [])
                      if isinstance(point, dict)}  # fmt: skip
        return line["epsilon"] if self.steps is None else on_the_way[self.steps]

    def statement(self, delta: float = 1e-5) -> PrivacyStatement:
        plan, line = self.plan(), self.line()
        steps = plan.steps
        assert steps is not None
        notes = ["made from a record, after the run: the ledger was not kept"]
        return state(
            {
                "epsilon": plan.epsilon(steps, delta),
                "epsilon_rdp": plan.epsilon_rdp(steps, delta),
                "delta": delta,
                "relation": plan.relation.value,
                "sampling": plan.scheme.describe(),
                "noise_multiplier": plan.noise_multiplier,
                "steps": steps,
                "planned_steps": line["steps"],
                "charged_steps": steps,
                "stopped": "plan complete",
                "seeded": True,
                "notes": [*notes, *filter(None, [self.note])],
                "loss": 0.0,  # metrics of test records were published
                "plan": json.loads(plan.to_json()),
                "public": [f"the number of training records, about {self.records:,}"],
                "environment": line.get("environment", {}),
            }
        )


CENTRE, MIDDLE, CHANNELS = ("centre",), ("middle_centre",), ("channels",)
_ON_THE_WAY = "a figure on the way, at this epsilon alone if the run had been planned to end there"
HEADLINES = [
    Headline("CIFAR-10, clipless, certified", f"{CLIPLESS}/final_h200.jsonl",
             {"task": "cifar10/certified"}, CIFAR10),
    Headline("MNIST, clipless, pixels", f"{CLIPLESS}/final_adapted.jsonl",
             {"task": "mnist/trained"}, MNIST, MIDDLE),
    Headline("Fashion-MNIST, clipless, pixels", f"{CLIPLESS}/final_adapted.jsonl",
             {"task": "fashion-mnist/trained"}, MNIST, MIDDLE),
    Headline("CIFAR-10, clipless, pixels", f"{CLIPLESS}/final_adapted.jsonl",
             {"task": "cifar10/trained"}, CIFAR10, MIDDLE),
    Headline("MNIST, clipless, scattering", f"{CLIPLESS}/final_h200.jsonl",
             {"task": "mnist/scattering"}, MNIST, CENTRE),
    Headline("Fashion-MNIST, clipless, scattering", f"{CLIPLESS}/fashion_scattering.jsonl",
             {"task": "fashion-mnist/scattering"}, MNIST, CENTRE),
    Headline("CIFAR-10, clipless, scattering", f"{CLIPLESS}/final_trained.jsonl",
             {"task": "cifar10/scattering"}, CIFAR10, CHANNELS),
    Headline("MNIST, clipping, scattering", f"{GPU}/final_linear.jsonl",
             {"method": "mnist/linear", "features": "orders"}, MNIST, CENTRE),
    Headline("Fashion-MNIST, clipping, scattering and pixels", f"{CPU}/mixed.jsonl",
             {"method": "fashion-mnist/mixed"}, MNIST, CENTRE),
    Headline("CIFAR-10, tailored loss, pixels", f"{GPU}/figures_3_4.jsonl",
             {"method": "3: CIFAR-10, tailored, pld noise"}, CIFAR10),
    Headline("CIFAR-10, cross-entropy, pixels", f"{GPU}/figures_3_4.jsonl",
             {"method": "3: CIFAR-10, cross-entropy, pld noise"}, CIFAR10),
    Headline("CIFAR-10, tailored loss, standardised features", f"{GPU}/figure_4_released.jsonl",
             {"method": "4: CIFAR-10, tailored, pld noise, released statistics, two convolutions"},
             CIFAR10, CHANNELS),
    Headline("CIFAR-10, the same on the way", f"{GPU}/figure_4_released.jsonl",
             {"method": "4: CIFAR-10, tailored, pld noise, released statistics, two convolutions"},
             CIFAR10, CHANNELS, steps=162, note=_ON_THE_WAY),
    Headline("MNIST, BN-LeNet-5, batch clipping", f"{BATCH_CLIPPING}/lenet5_another_constant.json",
             {"seed": 0}, 843),
]  # fmt: skip


def command_line_headline(delta: float = 1e-5) -> tuple[PrivacyStatement, float]:
    """CIFAR-10 from the command line, whose record is a run.json with its plan; and its ε."""
    path = RECORDS / GPU / "command_line_cifar10.jsonl"
    facts = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    plan = Plan.from_json(facts["plan"])
    assert plan.steps is not None
    recorded, facts["epsilon"] = facts["epsilon"], plan.epsilon(plan.steps, delta)
    return state(facts | {"config": {}, "charged_steps": plan.steps}), recorded


MISSING = {
    "CIFAR-10, 71.06%, and seconds to 70%": "time_to_cifar10.json has no noise multiplier. Batch, "
    "steps, release and ε are those of the command line's record, which has one",
    "seconds to 97% on MNIST, on a GPU and on CPU cores": "time_to.json and "
    "time_to_mnist_97.json have no noise multiplier",
    "tables at ε = 1": "results.json of 2026-11-15_clipless_table_7 has no noise multiplier",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the statements")
    given = parser.parse_args()
    wrong_figures = runpy.run_path(str(SCRIPT))["wrong_figures"]
    made = [(h.name, h.statement(), h.recorded_epsilon()) for h in HEADLINES]
    made.append(("CIFAR-10, command line", *command_line_headline()))
    for name, statement, recorded in made:
        folder = given.out / name.lower().replace(", ", "_").replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        file = statement.save(folder)
        wrong = [*check_statement(file).wrong, *wrong_figures(json.loads(file.read_text("utf-8")))]
        told = "; ".join(wrong) or "holds both ways"
        print(f"{name}: epsilon {statement.epsilon:.7g}, recorded {recorded:.7g}: {told}")
    for name, why in MISSING.items():
        print(f"{name}: no statement. {why}")


if __name__ == "__main__":
    main()
