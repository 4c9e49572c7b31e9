"""The CPU faults exist in the vLLM that is installed, and the plugin removes them."""

import subprocess
import sys

import pytest
import torch

from serving import cpu_fixes

pytest.importorskip("vllm")

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


def _in_fresh_process(code: str) -> str:
    """Patches change modules permanently, so each case runs in its own process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_unpatched_cpu_has_both_faults_and_is_refused():
    # If a newer vLLM no longer lists a fault, it is fixed upstream: remove our patch for it.
    code = (
        "from serving import cpu_fixes\n"
        "faults = cpu_fixes.check()\n"
        "try:\n    cpu_fixes.require()\n"
        "except RuntimeError as error:\n    assert 'dflash_cpu_fixes' in str(error)\n"
        "else:\n    raise SystemExit('not refused')\n"
        "print(faults)"
    )
    assert _in_fresh_process(code) == "['key_norm', 'expansion']"


def test_registered_twice_is_right_and_leaves_the_plain_norm_alone():
    code = (
        "import torch\n"
        "from vllm import _custom_ops as ops\n"
        "from serving import cpu_fixes\n"
        "plain = ops.rms_norm\n"
        "cpu_fixes.register(); cpu_fixes.register()\n"
        "assert ops.rms_norm.original is plain\n"
        "x, w = torch.randn(5, 64), torch.rand(64)\n"
        "a, b = torch.empty_like(x), torch.empty_like(x)\n"
        "plain(a, x, w, 1e-6); ops.rms_norm(b, x, w, 1e-6)\n"
        "assert torch.equal(a, b)\n"
        "print(cpu_fixes.check())"
    )
    assert _in_fresh_process(code) == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rowwise_norm_is_one_norm_per_layer(dtype):
    x = torch.randn(3, 4, 2, 16).to(dtype)
    weight = torch.rand(3, 16) + 0.5
    got = cpu_fixes.rowwise_rms_norm(x, weight, 1e-5)
    for layer in range(3):
        want = torch.nn.functional.rms_norm(x[layer].float(), (16,), weight[layer], 1e-5)
        torch.testing.assert_close(got[layer], want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_repeats_and_replaces(dtype):
    output = torch.full((5,), 99, dtype=dtype)
    values = torch.tensor([0, 3, 7], dtype=dtype)
    cpu_fixes.expand(output, values, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1)
    assert output.tolist() == [1, 1, 7, 7, 7]
