"""A folder that is damaged, incomplete or foreign ends in one sentence, and runs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tacit
from tacit.data import Numeric, PublicScaler, Schema
from tacit.errors import TacitError
from tacit.report import save_run
from tacit.report.privacy_statement import sealed

FEW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    records = tacit.Records(torch.randn(20, 2), torch.rand(20), public_size=20)
    model = tacit.models.mlp((2,), 1, hidden=(3,))
    run = tacit.Trainer(
        model, tacit.losses.Huber(), tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, 0.5, steps=1), torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(50.0, 1e-3), noise=tacit.Noise(1.0), callbacks=(),
    ).fit()  # fmt: skip
    columns = [Numeric(name, range=(0.0, 1.0)) for name in "abc"]
    schema = Schema(tuple(columns), "c")
    save_run(run, folder, records, preprocessing=PublicScaler(0.5, 2.0), schema=schema)
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def loads_or_says_why(folder: Path) -> str:
    try:
        run = tacit.load_run(folder)
        run.predict(torch.zeros(2, 2))
    except (ValueError, TacitError) as error:
        return str(error)
    assert repr(run)
    return ""


@pytest.mark.parametrize("where", ["statement", "facts", "both", "sentence", "file"])
def test_a_folder_states_no_other_epsilon_than_its_plan(folder, where):
    """Also if somebody has computed the digests of the statement again."""
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert tacit.load_run(folder).statement == facts["statement"]
    content = facts["statement"]
    if where in ("statement", "both"):
        content["guarantee"]["epsilon"] = 0.1
    if where in ("facts", "both"):
        facts["epsilon"] = 0.1
    content["text"] = "The weights are private, with epsilon 0.1."
    words = "text was changed"
    if where != "sentence":
        words = "epsilon" if where != "file" else "statement.json is not the statement in run.json"
        content = facts["statement"] = dict(sealed(content).content)
    if where == "both":
        (folder / "statement.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    assert words in loads_or_says_why(folder)


@pytest.mark.parametrize("hidden", [[1] * 10**6, [10**9]])
def test_a_network_that_is_far_larger_than_its_weights_is_refused_at_once(folder, hidden):
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    facts["model"]["architecture"]["arguments"]["hidden"] = hidden
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    begun = time.process_time()
    assert "weights in the folder" in loads_or_says_why(folder)
    assert time.process_time() - begun < 20


INDICES = {"dtype": "int64", "values": [0, 7]}
STAGES = [
    {"kind": "ColumnRanges", "entries": INDICES, "origin": "made up",
     **{end: {"dtype": "float64", "values": [0.0, 1.0]} for end in ("lower", "upper")}},
    *(
        {"kind": "MergedCategories", "entries": entries, "into": into, "counted": INDICES,
         "counts": INDICES, "threshold": 1.0, "origin": "made up"}
        for entries, into in (
            (INDICES, INDICES),
            ({"dtype": "int64", "values": [0]}, {"dtype": "int64", "values": [0, 1]}),
            ({"dtype": "float64", "values": [0.0]}, {"dtype": "int64", "values": [1]}),
        )
    ),
    {"kind": "PublicScaler", "mean": {"dtype": "float32", "values": [0.0] * 3}, "std": 1.0,
     "origin": "made up"},
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_preprocessing_that_does_not_fit_is_refused(folder, stage) -> None:
    """Also if somebody has written its digest into run.json."""
    text = json.dumps({"format": 2, "stages": [stage]})
    (folder / "preprocessing.json").write_text(text)
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    facts["model"]["files"]["preprocessing.json"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    assert "preprocessing.json does not fit its records" in loads_or_says_why(folder)


FILES = ("run.json", "weights.safetensors", "preprocessing.json", "schema.json")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name) -> None:
    (folder / name).unlink()
    assert name in loads_or_says_why(folder)


@pytest.mark.parametrize("name", FILES)
def test_an_empty_or_shortened_file_is_named(folder, name) -> None:
    content = (folder / name).read_bytes()
    for kept in (0, 1, len(content) // 2, len(content) - 3):
        (folder / name).write_bytes(content[:kept])
        assert name in loads_or_says_why(folder)


def test_files_of_two_runs_are_told_apart(folder) -> None:
    """As a kill leaves them while a run is overwritten."""
    weights = folder / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "is not the file that run.json was written with" in loads_or_says_why(folder)


def test_other_folders_are_named(tmp_path, folder) -> None:
    assert "no run.json" in loads_or_says_why(tmp_path / "nowhere")
    file = folder / "run.json"
    facts = json.loads(file.read_text())
    old = {name: value for name, value in facts.items() if name not in ("model", "statement")}
    for changed, words in (
        (old, "an earlier version of Tacit"),
        ({}, "an earlier version of Tacit"),
        ([1, 2], "an earlier version of Tacit"),
        (facts | {"model": facts["model"] | {"format": 99}}, "format 99, and 1 is known"),
    ):
        file.write_text(json.dumps(changed))
        assert words in loads_or_says_why(folder)
    file.write_text('{"model": NaN}')
    assert "is not JSON" in loads_or_says_why(folder)
    file.write_text("[" * 100_000)
    assert "is not JSON" in loads_or_says_why(folder)


def places_in(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    for key, part in children:
        yield from places_in(part, (*path, key))


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.just([]), st.just({}), st.lists(st.integers(), max_size=3),
    st.just("os:system"), st.just(10**12), st.just({"kind": "import"}),
)  # fmt: skip


@given(data=st.data())
@FEW
def test_values_of_the_wrong_type_raise_nothing_else(whole, tmp_path, data) -> None:
    facts = json.loads((whole / "run.json").read_text())
    part = data.draw(st.sampled_from(["model", "statement"]))
    place = (part, *data.draw(st.sampled_from(list(places_in(facts[part])))))
    value = data.draw(ODD)
    parent = facts
    for key in place[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[place[-1]] = value
    else:
        del parent[place[-1]]
    folder = tmp_path / "typed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    (folder / "run.json").write_text(json.dumps(facts))
    loads_or_says_why(folder)


@given(data=st.data())
@FEW
def test_flipped_bits_raise_nothing_else(whole, tmp_path, data) -> None:
    name = data.draw(st.sampled_from(FILES))
    folder = tmp_path / "flipped"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / name).write_bytes(content)
    said = loads_or_says_why(folder)
    unchanged = content == (whole / name).read_bytes()
    assert said or name == "run.json" or unchanged


@given(data=st.data())
@FEW
def test_preprocessing_of_the_wrong_type_raises_nothing_else(whole, tmp_path, data) -> None:
    file = whole / "preprocessing.json"
    content = json.loads(file.read_text())
    place = data.draw(st.sampled_from([p for p in places_in(content) if p]))
    parent = content
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = data.draw(ODD)
    (tmp_path / "preprocessing.json").write_text(json.dumps(content))
    with suppress(ValueError, TacitError):
        tacit.data.load_preprocessing(tmp_path)(torch.zeros(1, 2))


# ---- nothing runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"), ("os", "path.join"), ("subprocess", "Popen"), ("builtins", "eval"),
        ("tests.no_such_module", "Net"), ("../evil", "Net"), ("", ""), ("os:system", "x"),
        ("__main__", "Net"), ("torch.nn.modules.container", "Sequential"), (3, None),
    ],
)  # fmt: skip
def test_a_path_of_another_kind_runs_nothing(folder, monkeypatch, module, name) -> None:
    """With the caller's word the module is imported, and still only a class of modules is made."""
    file = folder / "run.json"
    facts = json.loads(file.read_text())
    facts["model"]["architecture"] = {
        "kind": "import", "module": module, "name": name, "layers": "", "arguments":
        {"command": "touch ran"},
    }  # fmt: skip
    file.write_text(json.dumps(facts))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(f"ran {command}"))
    for allowed in (False, True):
        with pytest.raises(ValueError, match="model="):
            tacit.load_run(folder, import_model=allowed)
    assert not Path("ran").exists()


def test_without_the_callers_word_a_module_is_not_even_imported(folder, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = folder / "run.json"
    facts = json.loads(file.read_text())
    facts["model"]["architecture"] = {
        "kind": "import", "module": "evil_module", "name": "Net", "layers": "", "arguments": {},
    }  # fmt: skip
    file.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"runs its code.*import_model=True"):
        tacit.load_run(folder)
    assert "evil_module" not in sys.modules


def test_a_registered_name_takes_no_number_that_fills_memory(folder) -> None:
    file = folder / "run.json"
    facts = json.loads(file.read_text())
    facts["model"]["architecture"]["arguments"] = {"hidden": [200_000, 200_000]}
    file.write_text(json.dumps(facts))
    assert "numbers, and the weights in the folder have" in loads_or_says_why(folder)
