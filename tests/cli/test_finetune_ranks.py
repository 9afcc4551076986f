"""`tacit finetune` on several ranks, and resumed on another number of them after a SIGKILL.

A rank is a forked process with the environment that `torchrun` gives it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import Result
from safetensors.torch import load_file
from tiny_language_models import llama, saved, write_lines
from typer.testing import CliRunner

from tacit.cli import app, console, launch, main
from tacit.ledger import read_statement
from tacit.mechanism import PendingRelease
from tacit.report.saved_facts import plan_of
from tacit.training.state_file import read_state

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

STEPS = 6
CLASSIFY = ["--task", "classification", "--classes", "bad,good"]
KINDS = {
    "adapter": ["--lora", "4", "--prompt", "the cat", "--new-tokens", "4"],
    "full": [],
    "classifier": ["--lora", "2", *CLASSIFY],
}


@dataclass
class Ended:
    """How the ranks of a command ended."""

    codes: list[int]
    printed: str


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and text."""
    folder = tmp_path_factory.mktemp("given")
    saved(folder / "llama", llama(16, 2))
    write_lines(folder / "train.jsonl", 300)
    write_lines(folder / "test.jsonl", 30, seed=1)
    return folder


def settings(given: Path, kind: str, out: Path) -> list[str]:
    files = [*("--model", given / "llama"), *("--data", given / "train.jsonl"), "--out", out]
    usual = f"--max-length 12 --delta 1e-4 --steps {STEPS} --batch-size 60 --lr 1e-2".split()
    return [*map(str, files), *usual, "--held-out", str(given / "test.jsonl"), *KINDS[kind]]


def in_this_process(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["finetune", *map(str, arguments), "--quiet"])


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def finetune(
    count: int,
    *arguments: object,
    killed: tuple[int, int] | None = None,
    prepare: Callable[[int], None] = lambda rank: None,
) -> Ended:
    """The command on so many ranks; `killed` is a rank, and the step that it does not survive.

    `prepare` is called on each rank, with its number.
    """
    read, write = os.pipe()
    port = str(free_port())
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.dup2(write, 1), os.dup2(write, 2)
            sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
            code = 1
            try:
                if count > 1:
                    as_torchrun_does(rank, count, port)
                kill_at = killed[1] if killed is not None and killed[0] == rank else 0
                watched(rank, kill_at)
                prepare(rank)
                code = exit_code([str(a) for a in ("finetune", *arguments, "--quiet")])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    os.close(write)
    with os.fdopen(read) as pipe:
        printed = pipe.read()
    return Ended([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], printed)


def as_torchrun_does(rank: int, count: int, port: str) -> None:
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))


def exit_code(arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def watched(rank: int, kill_at: int) -> None:
    """Write down the address of every noise that is drawn; die in the middle of a step."""
    draw, step, left = PendingRelease.draw_into, torch.optim.AdamW.step, [kill_at]

    def draw_and_tell(self, model, *address):
        with open(os.environ["DRAWS"], "a") as file:  # one short line is one write
            file.write(f"{rank} {address}\n")
        draw(self, model, *address)

    def step_or_die(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    PendingRelease.draw_into, torch.optim.AdamW.step = draw_and_tell, step_or_die


@pytest.fixture(autouse=True)
def draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "draws.txt"
    monkeypatch.setenv("DRAWS", str(file))
    return file


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "model").glob("*model.safetensors")
    return load_file(file)


@pytest.mark.parametrize("kind", list(KINDS))
def test_one_rank_two_ranks_and_two_sharded_release_the_same_weights(
    kind: str, given: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    assert in_this_process(*settings(given, kind, alone), "--seed", 3).exit_code == 0
    one, facts = weights_of(alone), facts_of(alone)
    initial = load_file(given / "llama" / "model.safetensors")
    moved = [weight - initial.get(name, 0) for name, weight in one.items() if "lora_A" not in name]
    assert all(float(change.abs().max()) > 1e-3 for change in moved)
    for number, more in enumerate(([], ["--shard"])):
        out = tmp_path / f"together{number}"
        told = [*settings(given, kind, out), "--seed", 3, *more]
        ended = finetune(2, *told, prepare=begin_with_other_weights)
        assert ended.codes == [0, 0], ended.printed
        assert ended.printed.count("private training run") == 1  # one rank speaks
        assert not {"resume.json", "checkpoint.safetensors"} & {f.name for f in out.iterdir()}
        other, of_run = weights_of(out), facts_of(out)
        assert other.keys() == one.keys()
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-5)
        assert of_run["loss"] == pytest.approx(facts["loss"], abs=1e-5)
        for same in ("epsilon", "noise_multiplier", "samples", "steps", "stopped"):
            assert of_run[same] == facts[same]


def begin_with_other_weights(rank: int) -> None:
    """Adapters and new layers are drawn from another seed on each rank."""
    seed_of = launch.initial_seed
    launch.initial_seed = lambda *given: seed_of(*given) + rank


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [
        # How many ranks, sharded or not, and the rank that is killed and the step that it is in.
        ("adapter", [(2, [], (1, 3)), (1, [], None)]),
        ("classifier", [(1, [], (0, 3)), (2, ["--shard"], (0, 2)), (2, [], None)]),
    ],
)
def test_a_killed_run_is_resumed_on_another_number_of_ranks(
    kind: str, attempts: list, given: Path, tmp_path: Path, draws: Path
) -> None:
    out = tmp_path / "x"
    told: list[object] = [*settings(given, kind, out), "--checkpoint-every", 1]
    for count, more, killed in attempts:
        ended = finetune(count, *told, *more, killed=killed)
        if killed is None:
            assert ended.codes == [0] * count, ended.printed
            break
        assert ended.codes[killed[0]] == -signal.SIGKILL, ended.printed
        survivors = [code for rank, code in enumerate(ended.codes) if rank != killed[0]]
        assert survivors == [2] * (count - 1), ended.printed
        assert not (out / "run.json").exists()
        kept = read_state(out / "checkpoint.safetensors")["model"]["tensors"]  # no base model
        assert kept.keys() == trained_parameters_and_buffers(kept)
        told = ["--resume", out]
    facts, (run,) = facts_of(out), read_statement(out / "ledger.sqlite").runs
    kills = len(attempts) - 1
    assert STEPS - kills <= facts["steps"] <= run.steps <= STEPS
    assert facts["stopped"] in ("plan complete", "budget")
    assert facts["epsilon"] == plan_of(facts).epsilon_of_count(STEPS, 1e-4) <= 8
    assert any("resumed from a checkpoint" in note for note in facts["notes"])
    assert torch.isfinite(torch.cat([w.flatten() for w in weights_of(out).values()])).all()
    assert not {"resume.json", "checkpoint.safetensors"} & {f.name for f in out.iterdir()}

    # No noise without a charge, and none twice, by any rank.
    drawn = draws.read_text().splitlines()
    assert len(drawn) == len(set(drawn))
    assert len({line.partition(" ")[2] for line in drawn}) <= run.steps

    refused = in_this_process("--resume", out)
    assert "holds a run that is complete" in str(refused.exception)


def trained_parameters_and_buffers(names: Iterable[str]) -> set[str]:
    marks = ("lora_", "modules_to_save", "inv_freq")
    return {name for name in names if any(mark in name for mark in marks)}


def test_what_would_make_it_another_run_is_refused(given: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "x", tmp_path / "train.jsonl"
    lines = (given / "train.jsonl").read_text().splitlines(keepends=True)
    text.write_text("".join(lines))
    body = saved(tmp_path / "llama", llama(16, 2))
    told = settings(given, "classifier", out)
    told[told.index("--data") + 1], told[told.index("--model") + 1] = str(text), str(body)
    for option in ("--classes", "--held-out"):  # the classes are those of the file
        del told[told.index(option) : told.index(option) + 2]
    ended = finetune(1, *told, killed=(0, 4))
    assert ended.codes == [-signal.SIGKILL], ended.printed
    before = {file.name: file.read_bytes() for file in out.iterdir() if "sqlite" not in file.name}

    def refusal(command: str, *more: object) -> str:
        result = CliRunner().invoke(app, [command, "--resume", str(out), *map(str, more)])
        assert isinstance(result.exception, ValueError | RuntimeError), result.output
        return str(result.exception)

    for given_too in (["--epsilon", 9], ["--lora", 2], ["--data", text], ["--seed", 1]):
        assert f"{given_too[0]} is given beside --resume" in refusal("finetune", *given_too)
    assert "keeps its checkpoint up to date" in refusal("finetune", "--checkpoint-every", 0)
    assert f"resume it with: tacit finetune --resume {out}" in refusal("train")
    begun_again = in_this_process(*told)
    assert f"resume it with: tacit finetune --resume {out}" in str(begun_again.exception)
    text.write_text("".join(lines[:-10]))
    assert "began with another number of records" in refusal("finetune")
    text.write_text("".join(lines).replace('"good"', '"fine"'))
    assert "is of another data (classes: ['bad', 'good'] there" in refusal("finetune")
    text.write_text("".join(lines))
    other = llama(16, 2)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    saved(body, other)
    assert "other values in 'model.base_model.model.model.layers.1.mlp" in refusal("finetune")
    assert before == {name: (out / name).read_bytes() for name in before}

    saved(body, llama(16, 2))
    result = in_this_process("--resume", out)
    assert result.exit_code == 0, result.exception
    assert read_statement(out / "ledger.sqlite").runs[0].steps == STEPS


def test_a_mistake_is_said_once(given: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    ended = finetune(2, *settings(given, "full", out), "--text-field", "body")
    assert ended.codes == [2, 2]
    assert ended.printed.count("error:") == 1
    assert "has no field 'body'" in ended.printed
    assert not out.exists()

    # Only one rank does not find the text; it says so, and not that another is gone.
    told = settings(given, "full", out)
    told[told.index("--data") + 1] = "train.jsonl"

    def be_elsewhere(rank: int) -> None:
        os.chdir(tmp_path if rank else given)
        leave = dist.destroy_process_group

        def tell_and_leave() -> None:
            print(f"rank {rank} leaves, and is to say why: {console._tells}")
            leave()

        dist.destroy_process_group = tell_and_leave

    ended = finetune(2, *told, prepare=be_elsewhere)
    assert ended.codes == [2, 2]
    assert "rank 1 leaves, and is to say why: True" in ended.printed
    assert ended.printed.count("error:") == 1
    assert "error: train.jsonl cannot be used: No such file" in ended.printed
    assert not out.exists()

    told = [*settings(given, "full", out), "--shard"]
    alone = in_this_process(*told)
    assert "start: torchrun --nproc-per-node N -m tacit finetune" in str(alone.exception)
    del told[told.index("--out") : told.index("--out") + 2]
    assert "under torchrun the run needs a folder" in finetune(2, *told).printed
