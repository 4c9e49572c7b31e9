"""Every layout in which targets are published is read alike, or named and refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from dflash.target_model import (
    EMBEDDING,
    HEAD,
    load_borrowed,
    load_target,
    open_tensors,
    read_target_config,
    ties_embeddings,
)
from tests.helpers.tiny import SHAPE, make_target

DTYPES = (torch.float32, torch.bfloat16)
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def edit(folder, name="config.json", **values):
    """Change keys of a JSON file; None removes one."""
    found = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def shard(source, folder):
    """Save the target in shards of 20 kB, as Transformers does: no shard holds a tied head."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()
    return folder


def stored(folder):
    path = folder / "model.safetensors"
    return path, load_file(path)


def add_head(folder, change):
    """Write a head into the weights: a copy of the embedding, with `change` added to one number."""
    path, tensors = stored(folder)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][3, 5] += change
    save_file(tensors, path, metadata={"format": "pt"})


def add_head_to_shards(folder):
    """Add a copy of the embedding as head, and name it in the index."""
    embedding = open_tensors(folder)(EMBEDDING)
    assert embedding is not None
    save_file({HEAD: embedding}, folder / "head.safetensors", metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][HEAD] = "head.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Name -> folder."""
    root = tmp_path_factory.mktemp("layouts")
    found = {
        "untied": make_target(root / "untied"),
        "tied": make_target(root / "tied", tie_word_embeddings=True),
    }
    for name in ("untied", "tied"):
        found[f"{name}, sharded"] = shard(found[name], root / f"{name} sharded")
    assert HEAD not in json.loads((found["tied, sharded"] / INDEX).read_text())["weight_map"]
    found["tied, head too"] = shutil.copytree(found["tied"], root / "tied head")
    add_head(found["tied, head too"], 0.0)
    found["tied, head in the index"] = shutil.copytree(
        found["tied, sharded"], root / "tied sharded head"
    )
    add_head_to_shards(found["tied, head in the index"])
    found["untied, not said"] = shutil.copytree(found["untied"], root / "untied unsaid")
    edit(found["untied, not said"], tie_word_embeddings=None)
    torch.manual_seed(1)
    found["tied, not said"] = root / "tied unsaid"  # Gemma: its architecture ties
    Gemma2ForCausalLM(Gemma2Config(**SHAPE)).save_pretrained(found["tied, not said"])
    edit(found["tied, not said"], tie_word_embeddings=None)
    return found


LAYOUTS = [
    "untied",
    "untied, sharded",
    "untied, not said",
    "tied",
    "tied, sharded",
    "tied, head too",
    "tied, head in the index",
    "tied, not said",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_borrowed_is_what_the_loaded_target_has(layouts, layout: str, dtype):
    """A tied, sharded target once failed: no such file, model.safetensors."""
    folder = layouts[layout]
    embedding, head = load_borrowed(folder, dtype)
    target = load_target(folder, dtype)
    assert embedding.dtype == head.dtype == target.head.dtype == dtype
    assert torch.equal(embedding, target.embedding)
    assert torch.equal(head, target.head)
    assert ties_embeddings(folder) == layout.startswith("tied")
    assert (head is embedding) == layout.startswith("tied")
    assert torch.equal(head, embedding) == layout.startswith("tied")
    read = open_tensors(folder)
    assert read(NORM) is not None
    assert read("absent.weight") is None


@pytest.fixture
def copy(layouts, tmp_path):
    return lambda layout: shutil.copytree(layouts[layout], tmp_path / "copy")


@pytest.mark.parametrize("names", [["weights"], ["a", "b"]])
def test_weights_under_other_names_are_found_by_their_headers(copy, names):
    """vLLM loads such files; Transformers raises an error that asks for its own file names."""
    folder = copy("untied")
    path, tensors = stored(folder)
    path.unlink()
    for i, name in enumerate(names):
        part = {k: t for j, (k, t) in enumerate(tensors.items()) if j % len(names) == i}
        save_file(part, folder / f"{name}.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_borrowed(folder, torch.float32)[1], tensors[HEAD])
    with pytest.raises(ValueError, match=r"cannot load the target in .*model\.safetensors"):
        load_target(folder, torch.float32)


def without(folder, *names):
    path, tensors = stored(folder)
    kept = {k: t for k, t in tensors.items() if k not in names}
    save_file(kept, path, metadata={"format": "pt"})


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


BROKEN = {
    "untied without a head": (
        "untied",
        lambda folder: without(folder, HEAD),
        "config.json does not tie .* and the weights have no lm_head.weight: fetch what is missing",
    ),
    "tied beside another head": (
        "tied",
        lambda folder: add_head(folder, 0.5),
        "ties the head .* another lm_head.weight, and engines differ .*tie_word_embeddings to",
    ),
    "unknown names": (
        "tied",
        lambda folder: without(folder, EMBEDDING),
        "has no tensor model.embed_tokens.weight: unknown layout",
    ),
    "a shard that is missing": (
        "tied, sharded",
        lambda folder: (folder / "model-00002-of-00014.safetensors").unlink(),
        "lacks model-00002-of-00014.safetensors of its index: fetch what is missing",
    ),
    "a damaged index": (
        "tied, sharded",
        lambda folder: (folder / INDEX).write_text('{"weight_map": ['),
        f"{INDEX} is damaged .*: fetch it again",
    ),
    "an index of other files": (
        "tied, sharded",
        lambda folder: shutil.copy(
            folder / "model-00001-of-00014.safetensors", folder / "model.safetensors"
        ),
        "has model.safetensors beside an index of other files, and engines differ",
    ),
    "cut weights": (
        "untied",
        lambda folder: cut(folder / "model.safetensors"),
        "model.safetensors is damaged .*: fetch it again",
    ),
    "a damaged config": (
        "untied",
        lambda folder: cut(folder / "config.json"),
        "config.json is damaged .*: fetch it again",
    ),
    "a decoder inside": (
        "untied",
        lambda folder: (folder / "config.json").write_text(
            '{"model_type": "gemma3", "text_config": {"hidden_size": 32}}'
        ),
        "gemma3 keeps its decoder in text_config, which is not supported",
    ),
    "a number as text": (
        "untied",
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace('"vocab_size": 97', '"vocab_size": "97"')
        ),
        "vocab_size is '97', not a whole number: repair it",
    ),
    "another kind of model": (
        "untied",
        lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2", "n_embd": 32}'),
        "lacks vocab_size, hidden_size, .*this kind of model is not supported",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_layout_that_engines_read_differently_or_not_at_all_is_named(copy, case: str):
    layout, damage, message = BROKEN[case]
    folder = copy(layout)
    damage(folder)
    for load in (load_borrowed, load_target):
        with pytest.raises(ValueError, match=message):
            load(folder, torch.float32)


def test_a_config_is_read_with_what_is_needed_of_it(layouts):
    assert read_target_config(layouts["tied, sharded"])["hidden_size"] == 32
