"""Searches: what is tried, in which order, and what is chosen."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from experiments.search import Search, Task, Tasks, drawn_from, log_uniform


def read(line: Mapping) -> tuple[str, float]:
    return line["name"], line["setting"]


def draw(rng: random.Random) -> float:
    return log_uniform(rng, 1.0, 100.0)


def near(setting: float, rng: random.Random) -> float:
    return setting + 1000


def tasks(*names: str, **options: object) -> Tasks:
    task = Task([1000.0, 2000.0], draw, near)
    return Tasks(dict.fromkeys(names, task), read, **options)


def line(name: str, setting: float, score: float, **more: object) -> dict:
    return {"name": name, "setting": setting, "score": score, "held_out": True, **more}


def test_what_is_known_then_anything_then_near_the_best_then_repeats() -> None:
    search = Search(tasks("a", wide=0.5, close=0.75, best=2), ["a"], trials=10)
    settings = []
    while (trial := search.next(0)) is not None:
        name, setting, number = trial
        assert number == len(settings)
        settings.append(setting)
        search.note(line(name, setting, setting))
    assert settings[:2] == [1000.0, 2000.0]
    assert all(1 <= setting <= 100 for setting in settings[2:6])
    assert all(setting >= 2000 for setting in settings[6:8])
    assert set(settings[8:]) <= set(settings[:8])


def test_a_search_goes_on_from_earlier_results_and_its_seed_repeats_it() -> None:
    again = []
    for _ in range(2):
        search = Search(tasks("a"), ["a"], trials=4, seed=3)
        search.note(line("a", 1000.0, 0.5))
        search.note(line("another task", 7.0, 0.5))
        again.append([search.next(0) for _ in range(5)])
    assert again[0] == again[1]
    assert again[0][0] == ("a", 2000.0, 0)  # the other one is known already
    assert again[0][4] is None


def test_what_was_repeated_is_chosen_before_what_was_lucky_once() -> None:
    lines = [line("a", 1.0, 0.9), line("a", 2.0, 0.7), line("a", 2.0, 0.8)]
    lines += [line("a", 3.0, 1.0, held_out=False), {"name": "a", "setting": 4.0, "error": "died"}]
    assert tasks("a").chosen(lines) == {"a": 2.0}
    assert tasks("a").top(tasks("a").scores(lines)["a"]) == [1.0]


@pytest.mark.parametrize(("workers", "expected"), [(1, 1), (2, 2), (3, 2)])
def test_processes_keep_to_their_group(workers: int, expected: int) -> None:
    names = ["mnist/a", "mnist/b", "cifar/a"]
    grouped = tasks(*names, group=lambda name: name.partition("/")[0])
    search = Search(grouped, names, 50, math.inf, workers)
    first, later = ([grouped.group(search.next(i)[0]) for i in range(workers)] for _ in range(2))
    assert first == later
    assert len(set(first)) == expected


def test_a_pair_is_a_range_and_a_list_a_choice() -> None:
    rng = random.Random(0)
    found = [drawn_from({"rate": (0.1, 10.0), "kind": ["a", "b"]}, rng) for _ in range(50)]
    assert all(0.1 <= one["rate"] <= 10 for one in found)
    assert {one["kind"] for one in found} == {"a", "b"}
