"""Settings of float32 products are respected and left alone, whichever interface set them.

Both interfaces are process-wide and some states cannot be set back, so every setting is tried in a
process of its own, forked from one that has imported everything.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.torch_version import TorchVersion

# What is set, and whether CUDA's matrix products and convolutions then run in TensorFloat-32.
SETTINGS = {
    "pass": (False, True),
    "b.cuda.matmul.allow_tf32 = True": (True, True),
    "b.cuda.matmul.allow_tf32 = False": (False, True),
    "b.cudnn.allow_tf32 = False": (False, False),
    "torch.set_float32_matmul_precision('high')": (True, True),
    "torch.set_float32_matmul_precision('medium')": (True, True),
    "b.cuda.matmul.fp32_precision = 'tf32'": (True, True),
    "b.cuda.matmul.fp32_precision = 'ieee'": (False, True),
    "b.cudnn.conv.fp32_precision = 'tf32'": (False, True),
    "b.cudnn.conv.fp32_precision = 'ieee'": (False, False),
    "b.cudnn.fp32_precision = 'tf32'": (True, True),
    "b.fp32_precision = 'tf32'": (True, True),
    # In torch 2.9 a convolution of cuDNN keeps its default under a general setting.
    "b.fp32_precision = 'ieee'": (False, TorchVersion(torch.__version__) < (2, 10)),
    "b.mkldnn.matmul.fp32_precision = 'bf16'": (False, True),
    "b.cuda.matmul.allow_tf32 = True; b.cudnn.conv.fp32_precision = 'ieee'": (True, False),
}

PROGRAM = """
import json, os, sys, warnings
import torch
from torch import nn
import tacit
from tacit.engines.recorder import model_state
from tacit.lipschitz import SpectralLinear
from tacit.precision import rounding_of
from tacit.precision import ieee_float32, rounds_factors_on_cpu, uses_tensor_float

warnings.simplefilter("ignore")
b, cuda = torch.backends, torch.device("cuda")
NEW = (
    lambda: b.cudnn.fp32_precision,
    lambda: b.cuda.matmul.fp32_precision, lambda: b.cudnn.conv.fp32_precision,
    lambda: b.cudnn.rnn.fp32_precision, lambda: b.mkldnn.matmul.fp32_precision,
    lambda: b.mkldnn.conv.fp32_precision,
)
OLD = (
    lambda: b.cuda.matmul.allow_tf32, lambda: b.cudnn.allow_tf32,
    lambda: torch.get_float32_matmul_precision(),
)

def read(ways):
    found = []
    for way in ways:
        try:
            found.append(way())
        except RuntimeError:
            found.append("refused")
    return found

def read_all():
    # Also after changes higher up in the tree: what was inherited must still be.
    found, before = [b.fp32_precision, read(NEW), read(OLD)], b.fp32_precision
    for value in ("ieee", "tf32"):
        b.fp32_precision = value
        found.append(read(NEW))
    b.fp32_precision = before
    return found

def tried(setting):
    exec(setting)
    before = read_all()
    said = [uses_tensor_float("matmul", cuda), uses_tensor_float("convolution", cuda)]
    model = nn.Sequential(SpectralLinear(4, 3))
    tacit.project(model)
    coarse = rounding_of(torch.float32, cuda).name
    model_state(model, cuda)
    with ieee_float32():
        plain = set(read(NEW))
    return {
        "same": read_all() == before, "said": said, "plain": sorted(plain),
        "coarse": coarse, "cpu": rounds_factors_on_cpu(),
    }

answers = {}
for setting in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            answer = tried(setting)
        except Exception as error:
            answer = repr(error)
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    answers[setting] = json.loads(os.read(reading, 1 << 16))
    os.wait()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers():
    program = textwrap.dedent(PROGRAM)
    run = subprocess.run(
        [sys.executable, "-c", program, json.dumps(list(SETTINGS))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_read_and_left_as_it_was(setting, answers):
    found = answers[setting]
    assert isinstance(found, dict), found
    assert found["same"]
    assert found["said"] == list(SETTINGS[setting])
    assert found["plain"] == ["ieee"]
    assert found["coarse"] == ("TensorFloat-32" if any(SETTINGS[setting]) else "float32")
    lowered = ("'medium'", "'high'", "mkldnn", "b.fp32_precision = 'tf32'")
    assert found["cpu"] == any(word in setting for word in lowered)
