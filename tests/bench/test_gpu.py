"""bench/gpu.py on a CPU, in tiny shapes: what its sections find; a failing one stays alone."""

import ast
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import gpu, gpu_sections
from bench.gpu_sections import SECTIONS
from bench.gpu_worlds import TINY, large_world, loss_of, products


def found(name):
    """A section's findings, after a journey through JSON."""
    return json.loads(json.dumps(SECTIONS[name].run(TINY)))


def test_all_sections_end_within_eight_minutes():
    assert sum(section.limit for section in SECTIONS.values()) < 8 * 60


@pytest.mark.parametrize("name", ["attention", "packed"])
def test_the_two_ways_to_compute_a_step_agree(name):
    differences = found(name)["differences"]
    for key, value in differences.items():
        if not key.endswith("rows"):
            # float32 sums in another order; bfloat16 has 8 bits, so a rounding is up to 2**-9
            assert value < (1e-5 if "float32" in key else 2e-2), key
    if name == "packed":
        together, alone = differences["float32 rows"]
        assert together < alone == TINY.samples


def test_a_wrong_mask_is_found(monkeypatch):
    """A flex rule that sees one feature too many must not pass as equal."""
    real = gpu_sections.flex_mask
    monkeypatch.setattr(gpu_sections, "flex_mask", lambda anchors, *rest: real(anchors + 1, *rest))
    assert found("attention")["differences"]["full float32 loss"] > 1e-4


def test_training_in_bfloat16_follows_float32():
    curves = found("curves")
    first, last = curves["losses"]["float32"]
    assert last < 0.9 * first
    assert 0 < curves["largest_difference"] < 0.1


def test_replay_equals_decoding():
    walk = found("rounds")
    assert walk["equal"]
    assert walk["accepted"] > 0


def test_replicas_and_shards_of_one_rank_end_with_the_same_weights():
    differences = found("parallel")["differences"]
    assert differences["ddp"] == 0, "one rank adds nothing"
    assert differences["fsdp"] < 1e-4  # 1e-4 after 30 steps, by roundings alone


@pytest.mark.parametrize("name", ["memory", "head", "muon", "replay", "step"])
def test_a_measuring_section_gives_numbers(name):
    numbers = [json.dumps(value) for value in found(name).values()]
    assert numbers
    assert "null" not in "".join(numbers)


def test_counted_flops_are_those_of_a_step():
    """Against torch's counter, which counts attention not at all or with what the mask hides."""
    drafter, world = large_world(TINY)
    batch = world.batch(0, drafter.cfg.num_drafts, torch.float32)
    with FlopCounterMode(display=False) as counter:
        out = loss_of(drafter, world, batch, torch.float32)
        torch.autograd.grad(out.loss, list(drafter.parameters()))
    slots, keys = TINY.anchors * 4, TINY.tokens + TINY.anchors * 4
    logits = float(batch.supervised_BNK.sum()) * (
        len(world.candidates.seen) + world.candidates.num_random
    )
    bare, whole = (
        products(TINY.large, TINY.tokens, TINY.anchors, seen, logits) for seen in (0, slots * keys)
    )
    assert 0.99 * bare <= counter.get_total_flops() <= 1.2 * whole
    assert bare < gpu_sections.step_flops(TINY.large, world, batch) < whole


def test_a_section_that_fails_or_hangs_is_reported_and_no_more(tmp_path):
    def python(code):
        return [sys.executable, "-c", code]

    assert gpu.run(python("print('noise'); print('{\"a\": 1}')"), 60)["a"] == 1
    assert "out of memory" in gpu.run(python("raise SystemExit('out of memory')"), 60)["failed"]
    assert gpu.run(python("import time; time.sleep(60)"), 0.2) == {"failed": "not done after 0.2 s"}


def imports(name, seen):
    """The packages that a module of this checkout needs, and those that its imports need."""
    if name in seen:
        return set()
    seen.add(name)
    found, spec = set(), find_spec(name)
    assert spec is not None
    for node in ast.walk(ast.parse(Path(str(spec.origin)).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        for other in names:
            root = other.partition(".")[0]
            found |= imports(other, seen) if root in ("bench", "dflash") else {root}
    return found


def test_it_needs_no_more_than_torch_safetensors_and_transformers():
    outside = imports("bench.gpu", set()) - sys.stdlib_module_names
    assert outside == {"torch", "safetensors", "transformers", "tqdm"}, "transformers has tqdm"


def test_it_refuses_to_run_without_a_gpu():
    with pytest.raises(SystemExit, match="no section nothing"):
        gpu.main(["nothing"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch sees no GPU"):
            gpu.main([])
