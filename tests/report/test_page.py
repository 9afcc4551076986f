"""The page of a run: well formed, right, harmless whatever the run is called, readable."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import re
import shutil
import time
from pathlib import Path

import pytest

import tacit
from tacit.accounting import Plan, trade_off
from tacit.accounting.composition import COARSE
from tacit.report.charts import HEAT_MOST, Markup, nice_ticks, tag, without_colour
from tacit.report.comparison import MOST_RUNS
from tests.report.conftest import CONFUSION, MakeRun
from tests.report.page_parts import PageReader, read_page

# Every element of a page; none of them loads anything.
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "script", "body", "a", "header", "nav", "main"),
    *("footer", "section", "div", "span", "p", "pre", "code", "strong", "sup", "button"),
    *("h1", "h2", "h3", "h4", "ul", "li", "dl", "dt", "dd", "details", "summary"),
    *("figure", "figcaption", "svg", "g", "path", "circle", "rect", "text"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
}


@pytest.fixture
def full(make_run: MakeRun) -> Path:
    """A run with every fact that a page can show."""
    return make_run(
        "full",
        confusion=CONFUSION,
        class_names=["red", "green", "blue"],
        baseline={"accuracy": 0.35, "loss": 1.1},
        task="classification",
        certificate={
            "unit": 1 / 255,
            "certified_accuracy": [{"radius": r, "share": 0.9 - r / 100} for r in (0.0, 1.0, 4.0)],
            "inputs": "inputs as the network is given them",
        },
        seeded=True,
    )


def page(folder: Path) -> PageReader:
    return read_page(tacit.report.write_page(folder))


def plan_in(folder: Path) -> tuple[Plan, dict]:
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return Plan.from_json(json.dumps(facts["plan"])), facts


# ---- structure -----------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_loads_nothing(full: Path) -> None:
    found = page(full)
    assert {name for name, _ in found.elements} <= ELEMENTS
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for name, attributes in found.elements:
        assert not {"src", "srcset", "style", "action", "data"} & attributes.keys(), name
        assert not any(key.startswith("on") for key in attributes), name
        if "href" in attributes:
            assert attributes["href"][1:] in ids, "a link leads out of the page"
            assert attributes["href"][0] == "#"
        for key in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(key, ids[0]) in ids
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", found.text)
    assert found.named("html") == [{"lang": "en"}]
    assert found.named("main")[0]["id"] == "content"
    first_link = found.named("a")[0]
    assert first_link["href"] == "#content"


def test_the_policy_allows_this_style_and_this_script_alone(full: Path) -> None:
    found = page(full)
    (policy,) = [a["content"] for a in found.named("meta") if "http-equiv" in a]
    digests = re.findall(r"'sha256-([^']+)'", policy)
    for name, digest in zip(("style", "script"), digests, strict=True):
        (inside,) = re.findall(rf"<{name}>(.*?)</{name}>", found.text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() == digest
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_every_chart_has_a_title_a_label_and_a_table_of_its_data(full: Path) -> None:
    found = page(full)
    figures = re.findall(r"<figure.*?</figure>", found.text, re.DOTALL)
    assert len(figures) == 10
    for figure in figures:
        inside = PageReader(figure)
        (picture,) = [a for a in inside.named("svg") if a.get("role") == "img"]
        assert len(picture["aria-label"]) > 20
        assert len(inside.named("h3")) == 1
        assert len(inside.named("summary")) == 1
        ((_, rows),) = inside.tables.items()
        assert len(rows) > 2
    boxes = [a for a in found.named("div") if a.get("class") == "scroll"]
    assert len(boxes) == len(found.named("table"))
    for box in boxes:  # what scrolls can be reached and scrolled by keyboard
        assert box["tabindex"] == "0"
        assert box["role"] == "region"
        assert box["aria-label"]


# ---- numbers -------------------------------------------------------------------------------------


def test_the_privacy_statement_is_that_of_the_run(full: Path) -> None:
    found, (plan, facts) = page(full), plan_in(full)
    assert f"ε = {facts['epsilon']!r}, δ = {facts['delta']!r}" in found.shown
    assert "add-or-remove-one" in found.shown
    assert "Nothing was released from the training records before the first step" in found.shown
    curve = trade_off(plan.noise_multiplier, plan.scheme, plan.steps, relation=plan.relation)
    right = re.findall(r"took part at most ([\d.]+)% of the time", found.shown)
    (detected,) = re.findall(r"detects the record at most ([\d.]+)% of the time", found.shown)
    assert len(right) == 2  # at the top, and in the statement
    for told, bound in (*((r, (1 + curve.advantage) / 2) for r in right),
                        (detected, 1 - float(curve(0.05)[0]))):  # fmt: skip
        assert bound <= float(told) / 100 <= bound + 1.01e-4
    assert f"= {math.exp(facts['epsilon']):.4g} times" in found.shown
    assert "A seeded run" in found.shown
    for note in facts["notes"]:
        assert note in found.shown
    assert "the accuracy of a model" not in found.shown


def test_the_trade_off_table_is_the_accountants(full: Path) -> None:
    (plan, _), rows = plan_in(full), page(full).tables["Data of the chart: Trade-off curve"]
    curve = trade_off(plan.noise_multiplier, plan.scheme, plan.steps, relation=plan.relation)
    assert len(rows) == 7
    for alpha, error in rows[1:]:
        assert float(error) == pytest.approx(float(curve(float(alpha))[0]), abs=5.1e-5)


def test_the_drawn_curve_is_at_its_values(full: Path) -> None:
    """The positions of the points, read back from the SVG."""
    plan, facts = plan_in(full)
    (figure,) = re.findall(r'<figure id="epsilon-steps".*?</figure>', page(full).text, re.DOTALL)
    (mark,) = [a for a in PageReader(figure).named("circle") if a["r"] == "7"]
    x_labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" dy="0.8em"[^>]*>([\d,]+)<', figure)
    y_labels = re.findall(r'<text x="[\d.]+" y="([\d.]+)" dy="0.35em"[^>]*>([\d.]+)<', figure)
    for labels, at, value in (
        (x_labels, mark["cx"], plan.steps),
        (y_labels, mark["cy"], facts["epsilon"]),
    ):
        (p0, v0), (p1, v1) = [(float(p), float(v)) for p, v in (labels[0], labels[-1])]
        drawn = v0 + (float(at) - p0) / (p1 - p0) * (v1 - v0)
        assert drawn == pytest.approx(value, abs=0.01 * abs(v1 - v0))


def test_calibration_is_the_accountants(full: Path) -> None:
    (plan, facts), tables = plan_in(full), page(full).tables
    by_steps = tables["Data of the chart: ε against the number of steps"][1:]
    by_noise = tables["Data of the chart: ε against the noise multiplier"][1:]
    assert len(by_steps) > 8
    assert len(by_noise) > 8
    exact = [plan.epsilon(int(steps.replace(",", "")), facts["delta"]) for steps, _ in by_steps]
    told = [float(epsilon) for _, epsilon in by_steps]
    for z, epsilon in by_noise:
        other = tacit.epsilon(float(z), plan.scheme, plan.steps, delta=facts["delta"])
        exact.append(other)
        told.append(float(epsilon))
    # The coarse grid rounds up by a percent at most; figures have four digits.
    assert all(e * 0.998 <= t <= e * 1.012 for e, t in zip(exact, told, strict=True))


def test_history_certificate_and_confusion_are_the_runs(full: Path) -> None:
    (_, facts), tables = plan_in(full), page(full).tables
    rows = tables["Data of the chart: Accuracy against ε"][1:]
    assert len(rows) == len(facts["history"])
    for (epsilon, accuracy), point in zip(rows, facts["history"], strict=True):
        assert float(epsilon) == pytest.approx(point["epsilon"], rel=1e-3)
        assert float(accuracy.rstrip("%")) == pytest.approx(100 * point["accuracy"], abs=0.01)
    certified = tables["Data of the chart: Certified accuracy by radius"][1:]
    assert [row[1:] for row in certified] == [["0", "90%"], ["1", "89%"], ["4", "86%"]]
    confusion = tables["Data of the chart: Confusion matrix"]
    assert confusion[0] == ["true class", "red", "green", "blue"]
    assert [[int(count) for count in row[1:]] for row in confusion[1:]] == CONFUSION
    metrics = tables["Metrics of held-out records"]
    assert metrics[1] == ["accuracy", f"{facts['accuracy']:.2%}", "35.00%"]


def test_an_epsilon_that_is_not_its_plans_is_pointed_out(make_run: MakeRun) -> None:
    assert "does not match" not in page(make_run("right")).shown
    wrong = make_run("wrong", epsilon=1.5)
    assert "ε does not match the plan" in page(wrong).shown
    found = page(wrong)
    assert "ε = 1.5," in found.shown
    # The plan's curve would promise something of a run that is not the plan's.
    assert "of the time" not in found.shown
    assert not any("Trade-off" in caption for caption in found.tables)


def test_a_run_that_its_budget_ended_answers_for_its_steps(make_run: MakeRun) -> None:
    plan, facts = plan_in(make_run("whole"))
    epsilon = plan.epsilon(7, facts["delta"])
    facts = {"steps": 7, "charged_steps": 7, "stopped": "budget", "epsilon": epsilon}
    found = page(make_run("spent", **facts))
    assert "does not match" not in found.shown
    assert "7 steps of 20 that were planned (ended: budget)" in found.shown


def test_a_run_that_lost_steps_answers_for_what_was_charged(make_run: MakeRun) -> None:
    plan, facts = plan_in(make_run("whole"))
    epsilon = plan.epsilon(9, facts["delta"])
    lost = {"steps": 7, "charged_steps": 9, "stopped": "budget"}
    assert "does not match" not in page(make_run("lost", **lost, epsilon=epsilon)).shown
    less = plan.epsilon(7, facts["delta"])
    assert "does not match" in page(make_run("less", **lost, epsilon=less)).shown


def test_a_baseline_that_was_not_beaten_is_pointed_out(make_run: MakeRun) -> None:
    found = page(make_run("poor", accuracy=0.4, baseline={"accuracy": 0.5}))
    assert "No better than the baseline" in found.shown
    assert "accuracy is 40.00%. An answer that ignores the inputs has 50.00%" in found.shown
    base = {"root_mean_squared_error": 2.0, "predictor": "the mean"}
    errors = {**NO_CLASSES, "accuracy": None, "root_mean_squared_error": 2.5, "baseline": base}
    found = page(make_run("far", **errors))
    assert "RMSE is 2.5. An answer that ignores the inputs has 2." in found.shown
    assert found.tables["Metrics of held-out records"][0] == ["metric", "this model", "the mean"]
    found = page(make_run("good", accuracy=0.6, baseline={"accuracy": 0.5}))
    assert "No better than the baseline" not in found.shown


def test_a_large_epsilon_is_called_what_it_is(make_run: MakeRun) -> None:
    assert "This is no privacy" in page(make_run("vast", epsilon=60.0)).shown
    found = page(make_run("none", epsilon="inf", noise_multiplier=0.0))
    assert "An infinite ε promises nothing" in found.shown


def test_a_scheme_of_another_process_leaves_the_curves_out(make_run: MakeRun) -> None:
    plan = json.loads(plan_in(make_run("known"))[0].to_json())
    plan["scheme"] = {"kind": "SchemeOfNobody", "rate": 0.5}
    found = page(make_run("unknown", plan=plan))
    assert "could not be computed again: the sampling scheme 'SchemeOfNobody'" in found.shown
    assert not any("Trade-off" in caption for caption in found.tables)


def test_the_ledger_states_what_all_runs_cost(make_run: MakeRun) -> None:
    stated = {
        "epsilon": 5.0,
        "budget_epsilon": 8.0,
        "delta": 1e-4,
        "head": "6b1f",
        "runs": [{}, {}],
    }
    found = page(make_run("charged", statement={"ledger": stated}))
    assert "It held 2 runs" in found.shown
    assert "Together: ε = 5 of a budget of 8, at δ = 0.0001." in found.shown
    assert "6b1f" in found.shown


def test_a_saved_classifier_has_its_confusion_matrix(finished_folder: Path) -> None:
    facts = json.loads((finished_folder / "run.json").read_text(encoding="utf-8"))
    counts = facts["confusion"]
    assert len(counts) == 3
    assert sum(map(sum, counts)) == 20
    assert sum(counts[k][k] for k in range(3)) / 20 == facts["accuracy"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"steps": 10**12}, "more than 10,000,000 steps"),
        ({"noise_multiplier": 1e300}, "out of the accountant's range"),
        ({"noise_multiplier": 0.01}, "by Rényi DP it is above 1000"),
        ({"noise_multiplier": 0}, "by Rényi DP it is above 1000"),
    ],
)
def test_a_plan_past_all_use_does_not_hang(make_run: MakeRun, plan: dict, words: str) -> None:
    stored = json.loads(plan_in(make_run("known"))[0].to_json())
    began = time.process_time()
    assert words in page(make_run("changed", plan=stored | plan)).shown
    assert time.process_time() - began < 3


def test_the_circle_is_on_the_curve_at_a_tiny_rate(make_run: MakeRun) -> None:
    """The curve is computed on a coarser grid than the run's own ε."""
    scheme = {"kind": "Poisson", "rate": 2e-4}
    stored = json.loads(plan_in(make_run("known"))[0].to_json())
    plan = Plan.from_json(json.dumps(stored | {"scheme": scheme, "steps": 5000}))
    epsilon = plan.epsilon(5000, 1e-5)
    assert epsilon <= plan.epsilon(5000, 1e-5, COARSE) <= 1.02 * epsilon
    facts = {"plan": json.loads(plan.to_json()), "steps": 5000, "planned_steps": 5000}
    facts["charged_steps"] = 5000
    found = page(make_run("rare", delta=1e-5, epsilon=epsilon, **facts))
    rows = found.tables["Data of the chart: ε against the number of steps"]
    assert ["5,000", f"{epsilon:.4g}"] in rows


NO_CLASSES = dict.fromkeys(("balanced_accuracy", "auroc", "log_loss", "baseline"))


def test_regressions_have_their_error(make_run: MakeRun) -> None:
    history = [
        {"step": s, "epsilon": s / 5, "accuracy": None, "loss": 1 / s,
         "root_mean_squared_error": 2 / s} for s in (1, 2, 3)
    ]  # fmt: skip
    errors = {
        **NO_CLASSES,
        "accuracy": None,
        "root_mean_squared_error": 0.6,
        "mean_absolute_error": 0.5,
    }
    found = page(make_run("regression", history=history, r_squared=0.8, **errors))
    assert "Root mean squared error against ε" in found.shown
    assert "Accuracy against" not in found.shown
    assert ["RMSE", "0.6"] in found.tables["Metrics of held-out records"]


def test_a_run_without_metrics_says_so(make_run: MakeRun) -> None:
    found = page(make_run("bare", history=[], accuracy=None, loss=None, **NO_CLASSES))
    assert "saved without metrics" in found.shown
    assert "not evaluated on its way" in found.shown


def test_what_is_not_finite_is_not_drawn(make_run: MakeRun) -> None:
    history = [{"step": s, "epsilon": s, "loss": v} for s, v in enumerate(["nan", 2.0, "inf"], 1)]
    found = page(make_run("odd", history=history, loss="nan", accuracy=None))
    rows = found.tables["Data of the chart: Loss against ε"]
    assert [row[1] for row in rows[1:]] == ["not a number", "2", "∞"]
    assert "nan" not in "".join(str(a) for a in found.named("path"))


def test_diagnostics_are_marked_and_leave_with_their_file(make_run: MakeRun) -> None:
    folder = make_run("seen")
    found = page(folder)
    assert "Not private: for the developer's eyes" in found.shown
    assert "This page holds figures that are not private" in found.shown
    stored = json.loads((folder / "diagnostics.json").read_text(encoding="utf-8"))
    norms = stored["measurements"][0]["points"]
    rows = found.tables["Data of the chart: Gradient norm of one record"]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(
        [point["median"] for point in norms], rel=1e-3
    )
    shares = found.tables["Data of the chart: Clipping rate"]
    assert [float(row[1].rstrip("%")) for row in shares[1:]] == pytest.approx(
        [100 * point["clipped"] for point in norms], abs=0.01
    )
    (folder / "diagnostics.json").unlink()
    found = page(folder)
    assert "developer" not in found.shown
    assert "This page holds figures" not in found.shown
    assert not any("norm" in caption for caption in found.tables)


def test_only_what_a_page_shows_is_saved_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no WeightNorms; give a GradientNormHistory"):
        tacit.report.save_diagnostics(tmp_path, tacit.diagnostics.WeightNorms())
    with pytest.raises(ValueError, match="no folder"):
        tacit.report.save_diagnostics(tmp_path / "x", tacit.diagnostics.GradientNormHistory())


# ---- what a run says is only ever text -----------------------------------------------------------

EVIL = "</style></script><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;"


def poisoned(value: object) -> object:
    if isinstance(value, str) and value not in ("inf", "nan"):
        return value + EVIL
    if isinstance(value, dict):
        return {key + EVIL: poisoned(inner) for key, inner in value.items()}
    return [poisoned(inner) for inner in value] if isinstance(value, list) else value


def test_no_text_of_a_run_becomes_an_element(full: Path, tmp_path: Path) -> None:
    plain = page(full)
    facts = json.loads((full / "run.json").read_text(encoding="utf-8"))
    kept = ("plan", "relation", "history", "certificate", "stopped")
    for key in facts.keys() - kept:
        if key in ("notes", "class_names", "environment", "sampling", "task"):
            facts[key] = poisoned(facts[key])
    facts["certificate"]["inputs"] += EVIL
    facts["stopped"] += EVIL
    facts["config"] = poisoned({"settings": {"data": {"dataset": "x"}}, "used": {"y": ["z", "\n"]}})
    folder = tmp_path / "<script>alert(1)<script>"
    shutil.copytree(full, folder)
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    diagnostics = json.loads((folder / "diagnostics.json").read_text(encoding="utf-8"))
    for one in diagnostics["measurements"]:
        one |= {"notice": EVIL, "quantity": EVIL, "name": EVIL}
    (folder / "diagnostics.json").write_text(json.dumps(diagnostics), encoding="utf-8")
    found = page(folder)
    assert len(found.named("script")) == 1
    assert {name for name, _ in found.elements} <= ELEMENTS
    assert not found.named("img")
    assert "<script>alert" not in found.text
    assert 'onerror="' not in found.text
    assert found.shown.count("<script>alert(1)<script>") > 1  # as text, as it was
    assert found.text.count("<svg") == plain.text.count("<svg")


def test_markup_is_what_tag_made_and_nothing_else() -> None:
    assert tag("p", "<b>") == "<p>&lt;b&gt;</p>"
    assert tag("p", tag("b", "x"), title='"') == '<p title="&quot;"><b>x</b></p>'
    joined_by_hand = tag("b", "x") + tag("b", "y")
    assert not isinstance(joined_by_hand, Markup)
    assert "&lt;b&gt;" in tag("p", joined_by_hand)


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", "{}", '{"epsilon": 1}', "[" * 100_000, b"\xff\xfe\x00"]
)
def test_a_damaged_file_is_one_clear_error(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"run\.json (is damaged|is not JSON|holds no JSON)"):
        tacit.report.write_page(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def places(value: object, at: tuple = ()) -> list[tuple]:
    """The way to every value inside of a JSON value, of lists to the first entry alone."""
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = list(enumerate(value[:1])) if isinstance(value, list) else []
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


WRONG = (None, "<b>", -1, [], {}, True, 1e400)


def test_every_wrong_value_is_a_page_or_one_clear_error(full: Path) -> None:
    original = json.loads((full / "run.json").read_text(encoding="utf-8"))
    original["plan"]["scheme"]["rate"] = 1.0  # the quickest to account for
    (full / "diagnostics.json").unlink()
    errors = []
    for number, way in enumerate(places(original)[1:]):
        for wrong in (WRONG[number % 7], WRONG[(number + 3) % 7]):
            facts = copy.deepcopy(original)
            inside = facts
            for key in way[:-1]:
                inside = inside[key]
            inside[way[-1]] = wrong
            (full / "run.json").write_text(json.dumps(facts), encoding="utf-8")
            try:
                page(full)
            except ValueError as error:
                errors.append(str(error))
    assert len(errors) > 20
    assert all(error.startswith(str(full)) and "\n" not in error for error in errors)


def test_a_folder_without_a_run_and_a_place_that_cannot_be_written(
    make_run: MakeRun, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"has no run\.json; give the folder of a run"):
        tacit.report.write_page(tmp_path / "nothing")
    folder = make_run()
    with pytest.raises(ValueError, match="is a folder; give a file"):
        tacit.report.write_page(folder, tmp_path)
    with pytest.raises(ValueError, match=r"give a file that ends in \.html"):
        tacit.report.write_page(folder, folder / "run.json")
    with pytest.raises(ValueError, match="cannot be written"):
        tacit.report.write_page(folder, folder / "run.json" / "page.html")
    assert tacit.report.write_page(folder, tmp_path / "new" / "folder" / "page.html").is_file()


# ---- comparison ----------------------------------------------------------------------------------


def test_a_comparison_shows_every_run_and_what_differs(make_run: MakeRun, tmp_path: Path) -> None:
    one = make_run("one", config={"settings": {"training": {"lr": 0.5, "momentum": 0.9}}})
    two = make_run("two", config={"settings": {"training": {"lr": 0.1, "momentum": 0.9}}})
    three = make_run("three", delta=1e-4, seeded=True)
    found = read_page(tacit.report.compare([one, two, three], tmp_path / "all.html"))
    assert {name for name, _ in found.elements} <= ELEMENTS
    rows = found.tables["Figures of each run"]
    assert [row[0] for row in rows[1:]] == ["one", "two", "three"]
    settings = found.tables["Settings that differ"]
    assert ["settings.training.lr", "0.5", "0.1", "not set"] in settings
    momentum = [row for row in settings if "momentum" in row[0]]
    assert momentum == [["settings.training.momentum", "0.9", "0.9", "not set"]]
    assert "ε are at different δ" in found.shown
    assert "A seeded run" in found.shown
    assert "ε does not match the plan" in found.shown  # three's ε is for another δ
    both = read_page(tacit.report.compare([one, one], tmp_path / "same.html"))
    assert "All settings are the same" in both.shown
    assert [row[0] for row in both.tables["Figures of each run"][1:]] == ["one (1)", "one (2)"]


def test_a_comparison_takes_a_few_runs(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run()
    for count in (0, 1, MOST_RUNS + 1):
        with pytest.raises(ValueError, match="2 to 12 runs"):
            tacit.report.compare([folder] * count, tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


# ---- looks ---------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """[WCAG 2.2, contrast ratio]"""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def blend(over: str, under: str, opacity: float) -> str:
    parts = [
        round(opacity * int(over[i : i + 2], 16) + (1 - opacity) * int(under[i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def themes(text: str) -> list[dict[str, str]]:
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    blocks = re.findall(r"color-scheme:(light|dark);([^}]*)\}", style)
    assert [name for name, _ in blocks] == ["light", "dark", "dark", "light"]
    found = [dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6});", block)) for _, block in blocks]
    assert found[1] == found[2]
    assert found[0] == found[3]  # print
    rest = re.sub(r"--[\w-]+:#[0-9a-f]{6};", "", style)
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", rest)) <= {"#fff"}  # the paper of a printer
    return found[:2]


def test_text_and_lines_stand_out_in_both_themes(full: Path) -> None:
    for theme in themes(page(full).text):
        on_all = [
            (c, ground) for c in ("ink", "soft", "accent", "warn") for ground in ("paper", "card")
        ]
        pairs = [(theme[c], theme[ground]) for c, ground in on_all]
        pairs += [(theme[f"s{n}"], theme["card"]) for n in range(1, 7)]
        pairs += [(theme[c], theme["warn-card"]) for c in ("ink", "warn")]
        pairs.append((theme["ink"], blend(theme["heat"], theme["card"], HEAT_MOST)))
        worst = min(pairs, key=lambda pair: contrast(*pair))
        assert contrast(*worst) >= 4.5, worst


def test_contrast_is_the_published_formula() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_lines_differ_without_their_colours() -> None:
    styles = [without_colour(number) for number in range(MOST_RUNS)]
    assert len(set(styles)) == MOST_RUNS


@pytest.mark.parametrize(
    ("low", "high"), [(0, 3), (0.1, 0.3), (0.774, 0.913), (-3e-7, 2e-7), (1e5, 9.3e6), (5, 5)]
)
def test_ticks_are_round_and_hold_the_data(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 3 <= len(ticks) <= 12
    step = ticks[1] - ticks[0]
    assert f"{step:e}"[0] in "125" or f"{step:.3e}"[:5] in ("1.000", "2.000", "5.000")
    assert all(len(f"{tick:.10g}".lstrip("-").replace(".", "").lstrip("0")) <= 8 for tick in ticks)


def test_a_page_takes_less_than_three_seconds(full: Path) -> None:
    began = time.process_time()
    tacit.report.write_page(full)
    assert time.process_time() - began < 3
