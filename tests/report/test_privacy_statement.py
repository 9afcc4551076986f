"""A privacy statement: what it holds, that it holds, and that no changed digit does."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import jsonschema
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tacit
from tacit import Relation
from tacit.accounting import Plan
from tacit.accounting.event_fields import KINDS, event_from_fields, event_to_fields
from tacit.cli import app
from tacit.errors import UnsupportedEvent
from tacit.report import check_statement, model_card_block, statement
from tacit.report.privacy_statement import (
    SCHEMA_FILE,
    PrivacyStatement,
    figures,
    read_stored,
    sealed,
    state,
)
from tacit.report.statement_check import (
    changed_sections,
    form_of,
    wrong_figures,
    wrong_ledger,
)
from tacit.sampling import (
    MiniSets,
    Poisson,
    SelectedRun,
    ShuffledEpochs,
    TruncatedPoisson,
    Unit,
    WithoutReplacement,
)
from tests.report.page_parts import read_page

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
SCRIPT = Path(__file__).parents[2] / "tools" / "verify_statement.py"
SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
PRELUDE = (dpa.GaussianDpEvent(10.0), dpa.GaussianDpEvent(4.0), dpa.GaussianDpEvent(10.0))

PLANS = {
    "poisson": Plan(Poisson(0.01), 1.1, ADD, 200),
    "poisson, replace": Plan(Poisson(0.05), 1.1, REPLACE, 100),
    "prelude": Plan(Poisson(0.1), 3.0, ADD, 50, prelude=PRELUDE),
    "truncated": Plan(TruncatedPoisson(0.05, 60, 1000), 1.5, ADD, 60),
    "truncated, replace": Plan(TruncatedPoisson(0.05, 60, 1000), 1.5, REPLACE, 60),
    "without replacement": Plan(WithoutReplacement(1000, 50), 1.5, REPLACE, 100),
    "shuffled": Plan(ShuffledEpochs(10), 3.0, REPLACE, 45),
    "mini-sets": Plan(MiniSets(50, 8, chosen=2), 1.5, REPLACE, 100, Unit.MINI_SET),
    "mini-sets by rate": Plan(MiniSets(50, 8, rate=0.04), 1.5, ADD, 100, Unit.MINI_SET),
    "revealed": Plan(MiniSets(50, 8, chosen=2), 3.0, ADD, 100),
    "no noise": Plan(Poisson(0.1), 0.0, ADD, 3),
}


def facts_of(plan: Plan, delta: float = 1e-5, **more: Any) -> dict[str, Any]:
    """What `Run.facts` says of a run of this plan, as far as a statement is made from it."""
    return {
        "epsilon": plan.epsilon(plan.steps, delta),
        "epsilon_rdp": plan.epsilon_rdp(plan.steps, delta),
        "delta": delta,
        "relation": plan.relation.value,
        "sampling": plan.scheme.describe(),
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "planned_steps": plan.steps,
        "charged_steps": plan.steps,
        "stopped": "plan complete",
        "seeded": False,
        "notes": [],
        "plan": json.loads(plan.to_json()),
        **more,
    }


def written(content: Any, folder: Path) -> Path:
    PrivacyStatement(content).save(folder)
    return folder / "statement.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved run that was charged to a ledger, after a release of its own."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "x"
    x = torch.randn(60, 4)
    train = tacit.Records(x[:40], (x[:40, 0] > 0).long(), 2, public_size=40)
    test = tacit.Records(x[40:], (x[40:, 0] > 0).long(), 2)
    budget = tacit.Budget(5.0, 1e-3)
    model = nn.Linear(4, 2)
    with tacit.Ledger(folder / "ledger.sqlite", budget) as ledger:
        trained = tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            tacit.PerSampleClip(0.5),
            tacit.PoissonSampler(train, expected_batch_size=8, steps=12),
            torch.optim.SGD(model.parameters(), lr=0.5),
            budget,
            noise=tacit.Noise(2.0),
            evaluate_on=test,
            ledger=tacit.LedgerRun(ledger, prelude=(dpa.GaussianDpEvent(8.0),)),
            callbacks=(),
        ).fit()
        tacit.save_run(trained, folder, test, ledger=ledger)
    return folder


# ---- one ε everywhere ----------------------------------------------------------------------------


def test_run_page_ledger_statement_and_card_have_one_epsilon(run: Path, tmp_path: Path) -> None:
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    stored = json.loads((run / "statement.json").read_text(encoding="utf-8"))
    (charged,) = tacit.ledger.read_statement(run / "ledger.sqlite").runs
    epsilon = facts["epsilon"]
    assert stored == facts["statement"]
    assert stored["guarantee"]["epsilon"] == epsilon == charged.epsilon_planned
    assert stored["ledger"]["epsilon"] == epsilon
    assert statement(run).epsilon == tacit.load_run(run, model=nn.Linear(4, 2)).epsilon == epsilon
    page = read_page(tacit.report.write_page(run, tmp_path / "page.html"))
    assert f"ε = {epsilon!r}" in page.shown
    assert f"ε = {epsilon!r}" in statement(run).markdown()
    assert f"| ε | {epsilon:.6g} |" in model_card_block(statement(run))


def test_the_sections_are_in_the_order_of_sp_800_226(run: Path) -> None:
    words = statement(run).markdown()
    headings = [
        *("What is protected", "Against whom", "ε and δ", "What a test can learn"),
        *("How batches were drawn", "What was released", "Public by declaration"),
        *("Searched and charged", "What ε does not cover", "Software", "The ledger", "Check it"),
    ]
    places = [words.index(f"## {heading}\n") for heading in headings]
    assert places == sorted(places)
    for said in (
        "1 Gaussian release from the training records before the first step",
        "declared as 40",
        "there are 2 classes".capitalize(),
        "metrics of held-out records",
        "Nothing is recorded of a search",
        "protects against slips, and not against forgery",
        statement(run).content["ledger"]["head"],
    ):
        assert said in words


def test_the_page_says_what_the_statement_says(run: Path, tmp_path: Path) -> None:
    page = read_page(tacit.report.write_page(run, tmp_path / "page.html")).shown
    content = statement(run).content
    for text in (*content["not_covered"], *(row["what"] for row in content["released"])):
        assert " ".join(text.split()) in page
    assert f"μ = {content['guarantee']['mu']['value']:.4g}" in page


def test_a_statement_of_a_run_without_one_is_made_from_its_facts(run: Path, tmp_path: Path) -> None:
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    stored = facts.pop("statement")
    (tmp_path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    made = statement(tmp_path).content
    assert made["ledger"] is None
    for section in ("text", "unit", "relation", "guarantee", "sampling", "events", "released"):
        assert made[section] == stored[section]
    (tmp_path / "run.json").write_text(json.dumps(facts | {"epsilon": 0.1}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"'epsilon' is 0\.1, and 12 steps of the plan have"):
        statement(tmp_path)


# ---- events --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_events_are_read_back_and_cost_the_same(name: str) -> None:
    plan = PLANS[name]
    event, relation = plan.event(plan.steps), plan.accounted_relation
    fields = json.loads(json.dumps(event_to_fields(event, relation)))
    again, accounted = event_from_fields(fields)
    assert accounted is relation
    assert figures(again, relation, 1e-5) == figures(event, relation, 1e-5)
    assert event_to_fields(again, relation) == fields


def test_every_kind_of_event_is_tried() -> None:
    kinds = {p["kind"] for plan in PLANS.values() for p in event_to_fields(plan.event(1), ADD)}
    assert kinds | {"best_of_repeated_runs"} == set(KINDS)  # which has a test of its own


def test_an_event_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(UnsupportedEvent, match="LaplaceDpEvent"):
        event_to_fields(dpa.LaplaceDpEvent(1.0), ADD)


GOOD = {"kind": "poisson_sampled_gaussian", "noise_multiplier": 1.0, "count": 2,
        "relation": "replace-one", "sampling_rate": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "poisson"}, r"events\[0\].kind is 'poisson'; known are gaussian"),
        ({"sampling_rate": 1.5}, r"events\[0\].sampling_rate is 1.5"),
        ({"sampling_rate": 0}, "sampling_rate is 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"count": 1.5}, "count is 1.5; it is a whole number"),
        ({"count": True}, "count is True"),
        ({"rate": 1}, "has 'rate', which poisson_sampled_gaussian does not have"),
        ({"relation": "both"}, "not a valid Relation"),
    ],
)
def test_an_event_that_was_damaged_is_refused(changed: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        event_from_fields([GOOD | changed])
    with pytest.raises(ValueError, match=r"events\[0\] has no 'sampling_rate'"):
        event_from_fields([{k: v for k, v in GOOD.items() if k != "sampling_rate"}])
    with pytest.raises(ValueError, match="for two neighbouring relations"):
        event_from_fields([GOOD, GOOD | {"relation": "add-or-remove-one"}])


# ---- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_the_whole_curve_is_in_the_statement(name: str, tmp_path: Path) -> None:
    """From its pairs (ε, δ) alone, the curve is within 0.01 of the accountant's, and below it."""
    plan = PLANS[name]
    content = state(facts_of(plan)).content
    assert check_statement(written(content, tmp_path)).wrong == ()
    exact = tacit.trade_off(
        plan.noise_multiplier, plan.scheme, plan.steps, relation=plan.relation, unit=plan.unit,
        prelude=plan.prelude,
    )  # fmt: skip
    for alpha in (0.001, 0.01, 0.03, 0.1, 0.3, 0.5):
        lines = [0.0]
        for row in content["guarantee"]["profile"]:
            steep, top = math.exp(row["epsilon"]), 1 - row["delta"]
            lines += [top - steep * alpha, (top - alpha) / steep]
        assert -0.01 <= max(lines) - float(exact(alpha)[0]) <= 1e-9
    rows = content["guarantee"]["errors"]
    assert all(float(exact(r["type_one"])[0]) == r["type_two"] for r in rows)
    mu = float(content["guarantee"]["mu"]["value"])
    if math.isfinite(mu):  # G_μ is below the curve where both errors are large enough
        alphas = torch.linspace(1e-5, 0.9, 400).tolist()
        gaussian = tacit.accounting.gaussian_trade_off(mu)
        assert (gaussian(alphas) <= exact(alphas) + 1e-9).all()


def test_a_search_is_in_the_statement_and_what_it_cost_is_computed_again(tmp_path: Path) -> None:
    trials = tuple(dpa.GaussianDpEvent(30.0) for _ in range(10))
    plan = Plan(Poisson(0.01), 1.0, ADD, 200, prelude=trials)
    final = replace(plan, prelude=()).epsilon(200, 1e-5)
    search = {
        "method": "cheap trials",
        "trials": 10,
        "epsilon_of_search": plan.epsilon(0, 1e-5),
        "epsilon_of_final_run": final,
        "epsilon_uncharged": final,
        "settings": {"lr": 1.0},
    }
    content = state(facts_of(plan, search=search)).content
    assert check_statement(written(content, tmp_path)).wrong == ()
    words = PrivacyStatement(content).markdown()
    assert "searched for by cheap trials, 10 trials. ε counts it" in words
    for name in ("epsilon_of_search", "epsilon_of_final_run", "epsilon_uncharged"):
        changed = sealed(content | {"searched": content["searched"] | {name: 0.123}}).content
        wrong = check_statement(written(changed, tmp_path)).wrong
        assert any(f"searched.{name}" in text for text in wrong), name
    none = state(facts_of(replace(plan, prelude=()))).content["searched"]
    assert none["recorded"] is False
    with pytest.raises(ValueError, match="'search' is"):
        state(facts_of(plan, search=[1]))


def test_the_best_of_repeated_runs_has_bounds_and_no_curve(tmp_path: Path) -> None:
    plan = Plan(SelectedRun(0.5, 8, 20.0, 3.0, 0.0), 1.5, ADD, 1)
    content = state(facts_of(plan, 1e-4)).content
    file = written(content, tmp_path)
    assert check_statement(file).wrong == ()
    (event,) = content["events"]
    fields = {"what": event["what"], **event_to_fields(plan.event(1), ADD)[0]}
    assert fields == event
    assert event["noise_multiplier"] == 1.5
    pairs = [(row["epsilon"], row["delta"]) for row in content["guarantee"]["profile"]]
    assert pairs[0] == (content["guarantee"]["epsilon"], 1e-4)
    assert len(pairs) == 4
    for epsilon, delta in pairs:
        assert epsilon == pytest.approx(plan.epsilon(1, delta))
    for field, changed in (("score_noise", 30.0), ("mean_runs", 2.5), ("steps", 7)):
        other = sealed(content | {"events": [event | {field: changed}]}).content
        assert check_statement(written(other, tmp_path)).wrong, field
    found = subprocess.run(
        [sys.executable, SCRIPT, written(content, tmp_path)], capture_output=True, text=True
    )
    assert found.returncode == 1
    assert "use tacit verify" in found.stderr


# ---- a changed digit -----------------------------------------------------------------------------


def figures_in(content: Any, where: str = "") -> Iterator[tuple[str, list[Any]]]:
    """(name, path) of every number, and of the head of the ledger."""

    def walk(value: Any, path: list[Any]) -> Iterator[list[Any]]:
        if isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(inner, [*path, key])
        elif (isinstance(value, int | float) and not isinstance(value, bool)) or (
            path and path[-1] in ("head", "digest")
        ):
            yield path

    for path in walk(content, []):
        if path[1:2] in (["profile"], ["errors"]) and path[2] % 7 != 2:
            continue  # a few points of each
        yield "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path)[1:], path


def with_another_digit(content: Any, path: list[Any], rng: random.Random, first: int = 6) -> Any:
    """One of the first significant digits is another."""
    changed = copy.deepcopy(content)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    old = parent[path[-1]]
    text = old if isinstance(old, str) else repr(old)
    mantissa = text if isinstance(old, str) else text.split("e")[0]
    places = [m.start() for m in re.finditer(r"\d", mantissa)]
    while len(places) > 1 and mantissa[places[0]] == "0" and not isinstance(old, str):
        places.pop(0)
    place = rng.choice(places[:first])
    digit = rng.choice([d for d in "123456789" if d != text[place]])
    new = text[:place] + digit + text[place + 1 :]
    parent[path[-1]] = new if isinstance(old, str) else type(old)(float(new))
    return changed


def test_a_changed_digit_of_any_figure_does_not_hold(run: Path, tmp_path: Path) -> None:
    content, rng = json.loads((run / "statement.json").read_text("utf-8")), random.Random(0)
    assert check_statement(run, run / "ledger.sqlite").wrong == ()
    tried = list(figures_in(content))
    assert len(tried) > 30
    for name, path in tried:
        wrong = changed_sections(with_another_digit(content, path, rng))
        section = name.partition(".")[0].partition("[")[0]
        assert any(text.startswith(section) for text in wrong), name
    changed = with_another_digit(content, ["guarantee", "epsilon"], rng)
    found = check_statement(written(changed, tmp_path)).wrong
    assert found[0].startswith("guarantee was changed")
    assert any(text.startswith("guarantee.epsilon is") for text in found)


# What no other figure depends on: that is between the digest and the ledger.
FREE = ("sampling.expected_participations", "sampling.planned_steps", "sampling.steps")


def test_a_changed_digit_does_not_hold_after_all_digests_are_computed_again(
    run: Path,
) -> None:
    """Somebody who forges digests as well: recomputation and the ledger find every figure."""
    content, rng = json.loads((run / "statement.json").read_text("utf-8")), random.Random(1)
    for name, path in figures_in(content):
        if name.startswith((*FREE, "digest")):
            continue
        forged = sealed(with_another_digit(content, path, rng)).content
        assert changed_sections(forged) == []
        if not (found := form_of(forged, SCHEMA)):
            alone = name.startswith(("guarantee", "events", "sampling"))
            found = wrong_figures(forged) if alone else wrong_ledger(forged, run / "ledger.sqlite")
        assert found, name
        if not name.startswith(("events", "guarantee.delta", "guarantee.profile")):
            assert any(name.split(".")[-1] in text for text in found), (name, found)


def test_a_statement_is_that_of_its_weights_and_of_its_ledger(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "other")
    (folder / "weights.safetensors").write_bytes(b"others")
    assert "weights.safetensors is not the file" in check_statement(folder).wrong[0]
    (folder / "weights.safetensors").unlink()
    assert check_statement(folder).holds
    assert "weights.safetensors, which is not" in check_statement(folder).unchecked[0]
    with tacit.Ledger(tmp_path / "l.sqlite", tacit.Budget(5.0, 1e-3)) as ledger:
        ledger.begin(Plan(Poisson(0.5), 9.0, ADD, 3))
    (found,) = check_statement(folder, tmp_path / "l.sqlite").wrong
    assert found.startswith("ledger.head")
    with pytest.raises(ValueError, match="there is no statement at"):
        check_statement(tmp_path / "nowhere")


def test_a_later_run_on_the_ledger_leaves_a_statement_true(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "room"
    plan, budget = Plan(Poisson(0.1), 4.0, ADD, 5), tacit.Budget(8.0, 1e-5)
    model = nn.Linear(1, 1, bias=False)
    from tests.tiny_run import release

    with tacit.Ledger(folder / "l.sqlite", budget) as ledger:
        ledger.begin(plan, name="first", budget=tacit.Budget(3.0, 1e-5))
        assert release(ledger, plan, 5) == 5
        ledger.end()
        content = state(facts_of(plan), ledger).content
        file = written(content, folder)
        assert check_statement(file, folder / "l.sqlite").wrong == ()
        second = Plan(Poisson(0.1), 6.0, ADD, 5)
        ledger.begin(second, name="second", budget=tacit.Budget(3.0, 1e-5))
        ledger.end()
    assert model is not None
    assert check_statement(file, folder / "l.sqlite").wrong == ()
    other = state(facts_of(Plan(Poisson(0.1), 4.5, ADD, 5))).content
    forged = sealed(other | {"ledger": content["ledger"]}).content
    (found,) = check_statement(written(forged, folder), folder / "l.sqlite").wrong
    assert found.startswith("events: no run of the ledger has these")
    without = written(other, folder)
    assert "names none" in check_statement(without, folder / "l.sqlite").wrong[0]


def release_once(ledger: tacit.Ledger, plan: Plan) -> None:
    """Charge one step and release it."""
    data = tacit.Records(torch.randn(20, 3), torch.arange(20) % 2, num_classes=2, public_size=20)
    model = nn.Linear(3, 2)
    sampler = tacit.PoissonSampler(data, 0.1, steps=5, expected_batch_size=2)
    mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, plan.noise_multiplier)
    pending = mechanism.privatise(model, tacit.losses.CrossEntropy(), next(iter(sampler)))
    ledger.release(pending, into=model)


@pytest.mark.parametrize("later", [False, True])
def test_what_a_statement_says_of_its_ledger_is_all_compared(later: bool, tmp_path: Path) -> None:
    """Also where runs are left out of it, and where the ledger was used since."""
    plan, file = Plan(Poisson(0.1), 4.0, ADD, 5), tmp_path / "l.sqlite"
    with tacit.Ledger(file, tacit.Budget(8.0, 1e-5)) as ledger:
        for name in ("first", "second"):
            ledger.begin(plan, name=name, budget=tacit.Budget(3.0, 1e-5))
            release_once(ledger, plan)
        content = state(facts_of(plan), ledger).content
        if later:
            ledger.begin(plan, name="third", budget=tacit.Budget(3.0, 1e-5))
            release_once(ledger, plan)
    told = content["ledger"]
    assert [run["name"] for run in told["runs"]] == ["first", "second"]
    # The events are of five steps, and one was charged; that is compared elsewhere.
    assert all(text.startswith("events") for text in wrong_ledger(content, file))
    for field, changed in (
        ("runs", []),
        ("runs", told["runs"][1:]),
        ("runs", told["runs"][::-1]),
        ("epsilon", 0.5),
        ("epsilon_charged", 0.5),
        ("method", "PLD"),
        ("another", 1.0),
    ):
        for less in ({}, {"runs": []}):
            forged = sealed(content | {"ledger": told | less | {field: changed}}).content
            assert any(field in text for text in wrong_ledger(forged, file)), field


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("events", "noise_multiplier", 10**400),
        ("events", "noise_multiplier", 1e308),
        ("events", "count", 2**50),
        ("sampling", "charged_steps", 10**400),
        ("guarantee", "epsilon", 10**400),
        ("guarantee", "delta", 1),
    ],
)
def test_numbers_that_nothing_can_be_computed_from_are_refused(
    section: str, field: str, value: Any, tmp_path: Path
) -> None:
    content = state(facts_of(PLANS["poisson"])).content
    if section == "events":
        changed: Any = [content["events"][0] | {field: value}]
    else:
        changed = content[section] | {field: value}
    found = check_statement(written(sealed(content | {section: changed}).content, tmp_path))
    assert any(field in text and "out of range" in text for text in found.wrong)


def test_events_without_number_and_without_noise_are_refused(tmp_path: Path) -> None:
    content = state(facts_of(PLANS["poisson"])).content
    (event,) = content["events"]
    many = [event | {"noise_multiplier": 1 + k / 1000} for k in range(1000)]
    found = check_statement(written(sealed(content | {"events": many}).content, tmp_path))
    assert "1000 entries, and may have 200" in found.wrong[0]
    tiny = [event | {"noise_multiplier": 0.0011, "count": 2**20}]
    assert check_statement(written(sealed(content | {"events": tiny}).content, tmp_path)).wrong


@pytest.mark.parametrize("name", ["/proc/self/maps", "../../secret"])
def test_no_file_is_read_but_those_beside_the_statement(name: str, tmp_path: Path) -> None:
    content = state(facts_of(PLANS["poisson"])).content
    other = sealed(content | {"model_files": {name: "f" * 64}}).content
    assert "not a file beside" in check_statement(written(other, tmp_path)).wrong[0]


def test_a_search_that_is_said_to_be_free_has_no_cost(tmp_path: Path) -> None:
    content = state(facts_of(PLANS["poisson"])).content
    searched = content["searched"] | {
        "recorded": True, "method": "simulation", "trials": 9, "epsilon_of_search": 0.7,
    }  # fmt: skip
    other = sealed(content | {"searched": searched}).content
    found = check_statement(written(other, tmp_path)).wrong
    assert any("searched.epsilon_of_search" in text for text in found)


# ---- the schema ----------------------------------------------------------------------------------

ODD: list[Any] = [None, True, -1, 0, 1.5, "inf", "text", [], {}, [{}], 10**12, "f" * 64]


def test_the_schema_is_a_schema_and_every_statement_is_of_it(run: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for content in (
        json.loads((run / "statement.json").read_text("utf-8")),
        *(state(facts_of(plan)).content for plan in PLANS.values()),
    ):
        jsonschema.validate(content, SCHEMA)
        assert form_of(content, SCHEMA) == []


def test_our_validator_and_jsonschema_agree(run: Path) -> None:
    """On hundreds of statements with a value that is odd, missing or too much."""
    content, rng = json.loads((run / "statement.json").read_text("utf-8")), random.Random(2)
    reference, refused = jsonschema.Draft202012Validator(SCHEMA), 0
    for _ in range(300):
        changed = copy.deepcopy(content)
        parent, key = changed, rng.choice(list(changed))
        while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8:
            parent = parent[key]
            key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if isinstance(parent, dict) and rng.random() < 0.3:
            parent.pop(key) if rng.random() < 0.5 else parent.update(more=1)
        else:
            parent[key] = rng.choice(ODD)
        ours, theirs = form_of(changed, SCHEMA), reference.is_valid(changed)
        assert (not ours) == theirs, (key, parent.get(key) if isinstance(parent, dict) else parent)
        refused += not theirs
    assert 100 < refused < 300


# ---- without Tacit -------------------------------------------------------------------------------

# To import Tacit is an error.
ALONE = "import runpy, sys; sys.modules.update(tacit=None);" \
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip


def by_script(file: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(SCRIPT), str(file)]
    return subprocess.run(command, capture_output=True, text=True, env=clean, cwd=file.parent)


def script_of() -> dict[str, Any]:
    import runpy

    return runpy.run_path(str(SCRIPT))


def test_the_script_is_short_and_does_not_import_tacit(tmp_path: Path) -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert not re.search(r"^\s*(import|from) (tacit|torch)", text, re.MULTILINE)


def test_a_statement_holds_without_tacit_and_a_changed_digit_does_not(
    run: Path, tmp_path: Path
) -> None:
    done = by_script(run / "statement.json")
    assert done.returncode == 0, done.stderr
    assert "by dp-accounting" in done.stdout
    content = json.loads((run / "statement.json").read_text("utf-8"))
    content["guarantee"]["epsilon"] *= 0.99
    done = by_script(written(content, tmp_path))
    assert done.returncode == 1
    assert "digest" in done.stderr
    done = by_script(written(sealed(content).content, tmp_path))
    assert done.returncode == 1
    assert "digest" not in done.stderr
    assert f"epsilon {content['guarantee']['epsilon']} at delta" in done.stderr


@pytest.mark.parametrize("name", PLANS)
def test_dp_accounting_agrees_on_every_kind_of_event(name: str) -> None:
    by_dp_accounting, plan = script_of()["wrong_figures"], PLANS[name]
    content = json.loads(json.dumps(state(facts_of(plan)).content))
    assert by_dp_accounting(content) == []
    if not plan.noise_multiplier:
        return
    for path, factor in (
        (("guarantee", "epsilon"), 0.998),
        (("events", -1, "noise_multiplier"), 1.01),
    ):
        forged = copy.deepcopy(content)
        parent = forged
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] *= factor
        assert by_dp_accounting(dict(sealed(forged).content)), path


# ---- command line, card, registry ----------------------------------------------------------------


def test_the_command_line_verifies_and_names_what_is_wrong(run: Path, tmp_path: Path) -> None:
    def verify(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["verify", *map(str, arguments)])

    done = verify(run / "statement.json", "--ledger", run / "ledger.sqlite")
    assert done.exit_code == 0, done.exception
    assert "checked: form, digests, figures, files of the model, ledger" in done.stdout
    assert "not checked: the ledger" in verify(run).stdout
    content = json.loads((run / "statement.json").read_text("utf-8"))
    content["guarantee"]["epsilon"] = 0.1
    file = written(content, tmp_path)
    command = [sys.executable, "-m", "tacit", "verify", str(file)]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "- guarantee.epsilon is 0.1, and by the events it is" in failed.stderr
    told = verify(file, "--json")
    assert told.exit_code == 2
    assert json.loads(told.stdout)["verified"] is False
    file.write_text("{}")
    failed = subprocess.run(command, capture_output=True, text=True)
    assert (failed.returncode, "is not a 'tacit privacy statement 1'" in failed.stderr) == (2, True)


def test_the_command_line_prints_the_words_and_the_json(run: Path) -> None:
    done = CliRunner().invoke(app, ["statement", str(run)])
    assert done.stdout == statement(run).markdown()
    done = CliRunner().invoke(app, ["statement", str(run), "--json"])
    assert json.loads(done.stdout) == json.loads((run / "statement.json").read_text("utf-8"))


def test_a_model_card_has_the_statement(run: Path) -> None:
    block = model_card_block(statement(run))
    content = statement(run).content
    for said in (
        "## Privacy statement",
        content["text"],
        "| neighbouring relation | add-or-remove-one |",
        "| noise multiplier | 2 |",
        f"| head of the ledger | `{content['ledger']['head']}` |",
        *(f"- {item}" for item in content["not_covered"]),
        "tacit verify statement.json",
    ):
        assert said in block


REGISTRY: dict[str, Any] = {
    "name": "Digits of nobody",
    "data_curators": [{"data_curator_name": "Nobody", "data_curator_type": "Academia"}],
    "description": "A model of handwritten digits.",
    "intended_use": "To be looked at.",
    "region": "Global",
    "sector": "Education",
    "publication_date": "2026-11-20",
    "data_domain": "Tables of digits.",
    "actors": "One person who trains, and everybody else.",
    "justification": "An example.",
    "registry_authors": ["Nobody"],
}


def test_the_fields_of_the_deployments_registry(run: Path) -> None:
    found = statement(run)
    entry = tacit.report.deployments_registry_entry(found, **REGISTRY)
    deployment = entry["deployment"]
    assert entry["url_slug"] == "digits-of-nobody"
    assert deployment["privacy_loss"]["privacy_parameters"] == {
        "epsilon": found.epsilon,
        "delta": found.delta,
    }
    assert "one record added or removed" in deployment["privacy_loss"]["privacy_unit_details"]
    assert "metrics of held-out records" in deployment["dp_variant"]["unprotected_quantities"]
    assert found.content["ledger"]["head"] in json.dumps(entry)
    assert "" not in deployment["implementation"].values()
    for field in REGISTRY:
        with pytest.raises(ValueError, match=f"{field} is"):
            tacit.report.deployments_registry_entry(found, **REGISTRY | {field: ""})
    with pytest.raises(ValueError, match="YYYY-MM-DD"):
        tacit.report.deployments_registry_entry(found, **REGISTRY | {"publication_date": "May"})
    given = {k: v for k, v in REGISTRY.items() if k != "sector"}
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'sector'"):
        tacit.report.deployments_registry_entry(found, **given)


def test_what_is_read_is_what_was_written(run: Path, tmp_path: Path) -> None:
    found = read_stored(run)
    assert read_stored(found.save(tmp_path)).content == found.content
    assert repr(found) == f"PrivacyStatement(epsilon={found.epsilon:.4g}, delta=0.001)"
    (tmp_path / "statement.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_stored(tmp_path)
