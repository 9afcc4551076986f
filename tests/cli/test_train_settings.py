"""Options are declared once: files, checks, help and the reference page follow the declaration."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.accounting.pld import LEAST_NOISE as ACCOUNTED_NOISE
from tacit.cli import app
from tacit.cli.schema import LEAST_NOISE, check, options_of, read_sections, to_dict
from tacit.cli.settings import LOSSES, TrainSettings
from tacit.losses.record_loss import Task
from tacit.losses.registry import loss_named, numbers_of, registered_losses
from tacit.models.architectures import _REGISTERED

FAST = ["--steps", "2", "--noise-multiplier", "9", "--quiet", "--json"]
HEAVY = ("torch", "scipy", "dp_accounting", "matplotlib", "sklearn", "numpy")


def train(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments])


def facts_of(*arguments: str) -> dict:
    result = train(*arguments)
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def kind_of_loss(name: str) -> type:
    needed = [number for number, has_default in numbers_of(name).items() if not has_default]
    return type(loss_named(name, **dict.fromkeys(needed, 1.0)))


def test_static_lists_are_those_of_the_library() -> None:
    assert LEAST_NOISE == ACCOUNTED_NOISE
    ours = {n for n, make in _REGISTERED.items() if make.__module__.startswith("tacit.")}
    assert set(options_of(TrainSettings)["model"].choices) == ours
    fitting = {
        name
        for name in registered_losses()
        if (kind := kind_of_loss(name)).__module__.startswith("tacit.")
        and getattr(kind, "task", None) is not Task.TOKENS
    }
    assert set(LOSSES) == fitting


def test_settings_come_back_from_what_run_json_holds() -> None:
    values = {
        "data": Path("own.csv"),
        "target": "y",
        "classes": ("a", "b"),
        "feature_range": (0.0, 9.0),
        "unit_norm": True,
        "epochs": 2.0,
        "max_norm": 0.5,
    }
    told = TrainSettings(**values)
    check(told)
    stored = json.loads(json.dumps(to_dict(told)))
    assert TrainSettings(**read_sections(TrainSettings, stored)) == told


def test_a_file_of_settings_and_the_command_line_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\ndataset = "digits"\n[privacy]\ndelta = 1e-4\nepsilon = 2\n'
        "[clipping]\nmax-norm = 0.5\n[training]\nepochs = 1\nseed = 3\n"
    )
    facts = facts_of(*FAST, "--config", str(file), "--epsilon", "2.5", "--out", str(tmp_path / "x"))
    settings = facts["config"]["settings"]
    assert (settings["privacy"]["epsilon"], settings["clipping"]["max_norm"]) == (2.5, 0.5)
    assert (settings["privacy"]["delta"], settings["training"]["seed"]) == (1e-4, 3)
    assert settings["training"]["steps"] == 2
    assert "epochs" not in settings["training"]  # --steps excludes those of the file


def test_a_run_is_repeated_from_its_run_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = facts_of(*FAST, "--seed", "1", "--delta", "1e-4", "--out", "x", "--max-norm", "0.3")
    again = facts_of("--config", "x/run.json", "--json", "--quiet")
    assert again["loss"] == first["loss"]
    assert len(list(Path("runs").iterdir())) == 1
    changed = {"json", "quiet", "out"}
    for name, section in first["config"]["settings"].items():
        kept = {k: v for k, v in section.items() if k not in changed}
        assert kept.items() <= again["config"]["settings"][name].items()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[privacy]\nepsilo = 3", "privacy.epsilo is no setting; give privacy.epsilon"),
        (
            "[model]\nzzz = 3",
            "model.zzz is no setting; give model.model or model.loss or",
        ),
        ("epsilon = 3", "epsilon is no setting; give privacy.epsilon"),
        ("[data]\nepsilon = 3", "data.epsilon is no setting; give privacy.epsilon"),
        ("[privcy]\nepsilon = 3", "privcy is no setting; give [privacy]"),
        ("[dataa]\nepsilon = 3", "dataa is no setting; give [data]"),
        ('[privacy]\nepsilon = "3"', "privacy.epsilon is '3'; give a number"),
        ("[training]\nsteps = 3.5", "training.steps is 3.5; give a whole number"),
        ("[training]\nsteps = true", "training.steps is True; give a whole number"),
        ("[data]\nunit_norm = 1", "data.unit_norm is 1; give true or false"),
        ("[data]\ndataset = 1", "data.dataset is 1; give text in quotes"),
        ("data = 1", "data is 1; it is a section: give [data]"),
        ("[data", "which cannot be read (Expected"),
        ('[model]\nmodel = "resnet9"', "--model is resnet9; give resnet8"),
        ("[training]\nlr = -1.0", "--lr is -1; give a finite number above 0"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    result = train("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "x"))
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for name in ("run.toml", "run.json"):
        said = str(train("--config", str(tmp_path / name)).exception)
        assert said.startswith(f"--config is {tmp_path / name}, which cannot be read")


def test_a_choice_that_does_not_exist_is_refused_with_the_nearest(tmp_path: Path) -> None:
    said = str(train("--query", "clipp", "--out", str(tmp_path / "x")).exception)
    assert said == "--query is clipp; give clip"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    """In time on a processor, as the machine may be busy; and nothing heavy is imported at all."""
    code = (
        "import sys, time\n"
        f"sys.argv = ['tacit', *{arguments}]\n"
        "from tacit.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    assert not set({HEAVY}) & set(sys.modules), sys.modules.keys()\n"
        "    print(time.process_time(), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(result.stderr) < 0.5


def test_the_help_begins_with_what_most_people_need() -> None:
    text = CliRunner().invoke(app, ["train", "--help"], terminal_width=100).stdout
    first, _, rest = text.partition(" Data ")
    common = {o.name for o in options_of(TrainSettings).values() if o.common}
    assert common == {
        *("dataset", "data", "schema", "target", "epsilon", "delta"),
        *("model", "query", "batch_size", "epochs", "out"),
    }
    for o in options_of(TrainSettings).values():
        assert (o.flag in first) if o.common else (o.flag in rest)


def test_the_reference_pages_are_up_to_date() -> None:
    folder = Path(__file__).parents[2] / "docs" / "reference"
    made = runpy.run_path(str(folder / "generate.py"))["pages"]()
    assert made.keys() == {page.name for page in folder.glob("*.md")}
    for name, text in made.items():
        assert text == (folder / name).read_text(encoding="utf-8"), (
            "an option changed; run: python docs/reference/generate.py"
        )
