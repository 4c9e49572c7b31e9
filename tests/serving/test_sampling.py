"""Our rejection sampling and vLLM's own: the same masks, the same distribution."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from dflash.sampling import Sampling, probabilities
from tests.dflash.test_sampling import FALSE_ALARM, GREEDY_DRAFTS, P, Q, law, statistic

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow  # importing vLLM takes seconds

DRAWS = 20_000
# vLLM's sampler on this machine, in its own process: patches change modules permanently.
SAMPLE = """
import json, sys, torch
from types import SimpleNamespace
from serving import cpu_fixes
cpu_fixes.register()
cpu_fixes.require()
from vllm.v1.sample.rejection_sampler import rejection_sample
p, q, greedy, draws = json.load(sys.stdin)
p, q = torch.tensor(p), torch.tensor(q)
torch.manual_seed(0)
k, settings = len(q), SimpleNamespace(
    all_greedy=False, all_random=True, generators={}, temperature=torch.ones(draws)
)
sampled = torch.multinomial(q, draws, replacement=True).T.flatten().contiguous()
bonus = torch.multinomial(p[-1], draws, replacement=True)[:, None].int()
ends = torch.arange(1, draws + 1, dtype=torch.int32) * k
for drafts, chances in (torch.tensor(greedy).repeat(draws), None), (sampled, q.repeat(draws, 1)):
    logits = p[:-1].log().repeat(draws, 1)
    out = rejection_sample(
        drafts.int(), [k] * draws, k, ends, chances, logits, bonus, settings
    )
    print(json.dumps(out.tolist()))
"""


def test_vllm_has_the_law_that_the_reference_decoder_has():
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE],
        input=json.dumps([P.tolist(), Q.tolist(), GREEDY_DRAFTS, DRAWS]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for q, line in zip(
        [torch.eye(4)[GREEDY_DRAFTS], Q], done.stdout.splitlines()[-2:], strict=True
    ):
        seen = Counter(tuple(t for t in row if t >= 0) for row in json.loads(line))
        expected = law(P, q)
        assert statistic(seen, expected) < chi2.isf(FALSE_ALARM, len(expected) - 1)


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.6}, {"top_k": 1}]
)
def test_vllm_keeps_the_same_tokens(settings):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    ours = probabilities(logits, Sampling(temperature=0.8, **settings))
    k = torch.full((64,), settings["top_k"]) if "top_k" in settings else None
    p = torch.full((64,), settings["top_p"]) if "top_p" in settings else None
    theirs = apply_top_k_top_p_pytorch(logits / 0.8, k, p, allow_cpu_sync=True).softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
