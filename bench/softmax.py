"""make bench-softmax: forward and backward of the training loss, sampled against exact softmax.

Both use the same rows and the same frozen head (49,152 x 576). The sampled softmax uses 1,000 seen
tokens and the default number of random ones. Its loss estimates the exact one, so `detail` has
both.
"""

import torch

from bench.harness import paired, report
from dflash.frozen_head import Candidates, FrozenHeadLoss
from dflash.training_step import generator
from jobs.base.config import Config

ROWS, HIDDEN, VOCAB, SEEN = 896, 576, 49152, 1000


def main() -> None:
    """Compare and print the JSON line."""
    torch.manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN) * 0.05
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    seen = torch.randperm(VOCAB)[:SEEN].sort().values
    labels, probs = seen[torch.randint(0, SEEN, (ROWS, 1))], torch.ones(ROWS, 1)
    losses = {}

    def step(name: str, num_random: int):
        candidates = Candidates(seen, VOCAB, num_random)

        def run() -> None:
            _, rows, correction = candidates.draw(head, generator(0))
            loss, *_ = FrozenHeadLoss.apply(
                hidden, rows, correction, candidates.position[labels], probs, 0.0
            )
            loss.mean().backward()
            losses[name] = float(loss.detach().mean())

        return run

    num_random = Config().train.random_candidates
    ratios = paired(step("sampled", num_random), step("exact", VOCAB), repeats=5)
    report("softmax", ratios, "s exact / s sampled", losses | {"random": num_random, "rows": ROWS})


if __name__ == "__main__":
    main()
