"""A download is complete with the right checksum, or leaves nothing behind and says what to do."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tacit.data.download import download
from tacit.errors import DataError

BODY = bytes(range(256)) * 4096  # 1 MiB, several chunks


def everything_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_arrives_whole(loopback, tmp_path):
    file = loopback.offer("a.bin", BODY)
    path = download(file, tmp_path / "made" / "here")
    assert path.read_bytes() == BODY
    assert everything_in(tmp_path) == ["a.bin"]


def test_a_server_without_content_length_is_fine(loopback, tmp_path):
    file = loopback.offer("a.bin", BODY, declare_length=False)
    assert download(file, tmp_path).read_bytes() == BODY


def test_the_bar_is_shown_when_asked_and_silent_off_a_terminal(loopback, tmp_path, capsys):
    file = loopback.offer("a.bin", BODY)
    download(file, tmp_path)
    assert capsys.readouterr().err == ""
    download(file, tmp_path, progress=True)
    assert "a.bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("misbehaviour", "says"),
    [
        ({"status": 404}, "404"),
        ({"status": 503}, "503"),
        ({"sent": len(BODY) // 2}, "truncated|connection broke"),
        ({"sent": len(BODY) // 2, "declare_length": False}, "truncated: 524288 bytes of 1048576"),
        ({"sent": 0, "declare_length": False}, "truncated: 0 bytes"),
    ],
)
def test_a_bad_answer_leaves_nothing_and_the_next_attempt_works(
    loopback, tmp_path, misbehaviour, says
):
    file = loopback.offer("a.bin", BODY, **misbehaviour)
    with pytest.raises(DataError, match=says) as caught:
        download(file, tmp_path)
    message = str(caught.value)
    assert file.urls[0] in message
    assert str(tmp_path / "a.bin") in message
    assert "TACIT_DATA" in message
    assert everything_in(tmp_path) == []

    loopback.offer("a.bin", BODY)
    assert download(file, tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("declare_length", [True, False])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BODY[:-1] + b"!", "expected sha256 .* found"),
        (BODY + b"!", "more than the published"),
        (BODY[:-1], "truncated"),
        (b"<html>please log in</html>", "truncated"),
    ],
)
def test_the_wrong_file_is_refused(loopback, tmp_path, body, says, declare_length):
    file = loopback.offer("a.bin", BODY)
    loopback.offer("a.bin", body, declare_length=declare_length)
    with pytest.raises(DataError, match=says):
        download(file, tmp_path)
    assert everything_in(tmp_path) == []


def test_a_failed_download_keeps_an_older_file(loopback, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"older")
    file = loopback.offer("a.bin", BODY, sent=10)
    with pytest.raises(DataError):
        download(file, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"older"
    assert everything_in(tmp_path) == ["a.bin"]


def test_nobody_listens(loopback, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        file = loopback.offer("a.bin", BODY)
        file = dataclasses.replace(file, urls=(f"http://127.0.0.1:{taken.getsockname()[1]}/a.bin",))
        with pytest.raises(DataError, match=r"unreachable.*refused"):
            download(file, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_server_that_stalls_is_given_up(loopback, tmp_path):
    file = loopback.offer("a.bin", BODY, sent=1000, then_wait=True)
    with pytest.raises(DataError, match=r"no answer within 0\.3 s"):
        download(file, tmp_path, timeout=0.3)
    assert everything_in(tmp_path) == []


def test_a_second_address_is_tried_and_both_failures_are_told(loopback, tmp_path):
    file = loopback.offer("a.bin", BODY)
    both = dataclasses.replace(file, urls=(loopback.url("/gone"), *file.urls))
    assert download(both, tmp_path).read_bytes() == BODY
    neither = dataclasses.replace(file, urls=(loopback.url("/gone"), loopback.url("/lost")))
    with pytest.raises(DataError, match=r"/gone.*404.*/lost.*404"):
        download(neither, tmp_path)


def test_a_network_that_goes_away_is_no_disk_error(loopback, tmp_path):
    file = loopback.offer("a.bin", BODY, sent=1000, then_reset=True)
    with pytest.raises(DataError, match=r"connection broke .*reset"):
        download(file, tmp_path)
    assert everything_in(tmp_path) == []


def test_a_full_disk_is_told_apart_from_a_bad_network(loopback, tmp_path, monkeypatch):
    file = loopback.offer("a.bin", BODY)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*No space left.*TACIT_CACHE"):
        download(file, tmp_path)
    assert everything_in(tmp_path) == []


def test_a_folder_that_cannot_be_made(loopback, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot write"):
        download(loopback.offer("a.bin", BODY), tmp_path / "cache")


SCRIPT = """
import importlib.util, json, signal, sys, types
# A shell's background jobs ignore interrupts, and hand that down.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
# Only the modules that download: importing all of Tacit and torch takes seconds.
root = Path(importlib.util.find_spec("tacit").submodule_search_locations[0])
for name, folder in (("tacit", root), ("tacit.data", root / "data")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]
from tacit.data.catalogue import DataFile
from tacit.data.download import download
fields = json.loads(sys.argv[1])
print("ready", flush=True)
download(DataFile(**fields), Path(sys.argv[2]))
"""


def start(file, folder):
    fields = json.dumps(dataclasses.asdict(file))
    return subprocess.Popen([sys.executable, "-c", SCRIPT, fields, str(folder)])


def test_two_processes_at_once_and_one_killed_half_way(loopback, tmp_path):
    file = loopback.offer("a.bin", BODY, sent=len(BODY) // 2, then_wait=True)
    stopped = start(file, tmp_path)
    assert loopback.half_sent.wait(60)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(20) != 0
    assert everything_in(tmp_path) == []

    loopback.offer("a.bin", BODY)
    both = [start(file, tmp_path), start(file, tmp_path)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert everything_in(tmp_path) == ["a.bin"]
