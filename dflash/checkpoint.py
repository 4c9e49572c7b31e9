"""Drafter folders: config.json + model.safetensors in z-lab's layout, checked on every read.

vLLM does not notice a missing tensor (it serves uninitialised memory), so the exact set of names
and shapes is checked here, when writing and when reading. Folders in speculators' format are read
and written too, where asked for (dflash/config_formats.py).
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash.config_formats import is_speculators, to_speculators, to_zlab
from dflash.drafter_config import DrafterConfig
from dflash.identity import file_sha256
from dflash.model import Drafter, drafter_of

WEIGHTS = "model.safetensors"
MASK_EMBEDDING = "mask_embedding.pt"
LM_HEAD = "lm_head.weight"
IDS = (torch.int64, torch.int32)
BORROWED = (
    "embed_tokens.weight",
    LM_HEAD,
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
)
"""Tensors that some folders contain although the target owns them or vLLM ignores them. They are
skipped when reading, except the head of a reduced vocabulary."""


def save_drafter(drafter: Drafter, folder: str | os.PathLike, dtype: torch.dtype) -> Path:
    """Write a drafter as a folder that vLLM and z-lab's client load unchanged.

    The weights are renamed into place before config.json, so a folder with a config is complete.
    A drafter that is loaded and saved in the same dtype, without a training step, keeps every bit.
    """
    state = {k: cast(v.detach().cpu(), dtype) for k, v in drafter.state_dict().items()}
    return write_folder(folder, state, drafter.cfg.to_json(str(dtype).removeprefix("torch.")))


def write_folder(
    folder: str | os.PathLike, state: dict[str, torch.Tensor], config: dict[str, Any]
) -> Path:
    """Write tensors, then config.json, each under a hidden name until complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    save_file(state, partial, metadata={"format": "pt"})
    _publish(partial, folder / WEIGHTS)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _publish(partial, folder / "config.json")
    return folder


def convert_folder(
    source: str | os.PathLike,
    dest: str | os.PathLike,
    form: str,
    target: str | os.PathLike,
    verifier: str,
) -> DrafterConfig:
    """Rewrite a drafter folder of either format as `form`: zlab or speculators; tensors unchanged.

    target: folder of the target; verifier: its name in a speculators config. Returns the config.
    Raises ValueError if `dest` holds a drafter, or if `form` cannot express what the drafter does.
    """
    if (Path(dest) / "config.json").exists():
        raise ValueError(f"{dest} holds a drafter already: choose another convert.dest")
    described = json.loads((Path(target) / "config.json").read_text())
    cfg = read_config(source, described["num_hidden_layers"])
    state = read_tensors(source, cfg)
    config = cfg.to_json(str(state["fc.weight"].dtype).removeprefix("torch."))
    if form == "speculators":
        config = to_speculators(config, verifier, described.get("architectures", []))
    write_folder(dest, state, config)
    return cfg


def read_config(folder: str | os.PathLike, target_layers: int | None = None) -> DrafterConfig:
    """The config of a drafter folder. Raises ValueError naming the folder and the fault.

    target_layers: the target's number of layers. If it is given, speculators' format is read too,
    which does not contain it.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a drafter folder: it has no config.json")
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        if is_speculators(raw) and target_layers is not None:
            raw = to_zlab(raw, target_layers)
        return DrafterConfig.from_json(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def load_drafter(
    folder: str | os.PathLike,
    dtype: torch.dtype = torch.float32,
    target_layers: int | None = None,
) -> Drafter:
    """Read a drafter folder made here or elsewhere; parameters in `dtype`, on the CPU.

    target_layers: as for `read_config`. Raises ValueError if a tensor is missing, unknown or of the
    wrong shape.
    """
    cfg = read_config(folder, target_layers)
    tensors = read_tensors(folder, cfg)
    return drafter_of(cfg, {name: cast(tensor, dtype) for name, tensor in tensors.items()})


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights in `dtype`; token ids stay integers."""
    return tensor.to(dtype if tensor.is_floating_point() else None).contiguous()


def read_tensors(folder: str | os.PathLike, cfg: DrafterConfig) -> dict[str, torch.Tensor]:
    """The tensors of a drafter folder, as they are stored. ValueError as `load_drafter`."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}: save the drafter as safetensors")
    if (Path(folder) / MASK_EMBEDDING).exists():
        raise ValueError(
            f"{folder} has a {MASK_EMBEDDING}, a mask embedding of its own, which vLLM would use "
            "and this code does not read: not supported"
        )
    borrowed = set(BORROWED) - ({LM_HEAD} if cfg.draft_vocab_size else set())
    try:
        with safe_open(path, framework="pt") as file:
            names = [n for n in file.keys() if n not in borrowed]  # noqa: SIM118
            found = {name: file.get_tensor(name) for name in names}
    except Exception as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    check_tensors(found, cfg, path)
    return found


def stored_dtype(folder: str | os.PathLike) -> torch.dtype:
    """The dtype of a drafter folder's matrices. ValueError if it has no readable weights."""
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("fc.weight").dtype
    except Exception as error:
        raise ValueError(f"{path} is not a drafter's safetensors file: {error}") from error


def check_tensors(found: dict[str, torch.Tensor], cfg: DrafterConfig, path: Path) -> None:
    """Raise ValueError unless names and shapes are exactly those of a drafter of this config."""
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in Drafter(cfg).state_dict().items()}
    faults = [f"missing {name}" for name in wanted if name not in found]
    faults += [f"unknown {name}" for name in found if name not in wanted]
    faults += [
        f"{name} is {tuple(found[name].shape)}, not {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    faults += [
        f"{name} is stored as {tensor.dtype}"
        for name, tensor in found.items()
        if not (tensor.dtype in IDS if name == "d2t" else tensor.is_floating_point())
    ]
    if cfg.draft_vocab_size and not faults:
        ids = torch.arange(cfg.draft_vocab_size) + found["d2t"]
        if (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= cfg.vocab_size:
            faults = [f"d2t does not give ascending token ids in 0..{cfg.vocab_size - 1}"]
    if faults:
        shown = "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if len(faults) > 6 else "")
        raise ValueError(f"{path} does not fit its config.json: {shown}")


ENGINE_READS = (".json", ".safetensors", ".pt", ".bin")
"""Suffixes of the files that an engine reads in a drafter folder. Other files, such as a README, do
not change a drafter's identity."""


def drafter_sha256(folder: str | os.PathLike) -> str:
    """The identity of a drafter version: hex sha256 over every file that an engine reads.

    The weights alone do not determine what is served: another rms_norm_eps in config.json halves
    tau. Hidden files (unfinished writes) do not count. Raises ValueError for a folder without
    weights.
    """
    digest = hashlib.sha256()
    for path in engine_files(folder):
        digest.update(f"{path.name}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def engine_files(folder: str | os.PathLike) -> list[Path]:
    """The files an engine reads of a drafter folder, sorted. ValueError for one without weights."""
    folder = Path(folder)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}")
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [p for p in found if p.suffix in ENGINE_READS and not p.name.startswith(".")]


def compat_fields(cfg: DrafterConfig, target_id: str) -> dict[str, object]:
    """What must agree between a drafter and the fleet: target, taps, block, mask id, shape."""
    return {"target_id": target_id, **cfg.shape_fields()}


def compat_key(cfg: DrafterConfig, target_id: str) -> str:
    """Short hash of `compat_fields`."""
    fields = json.dumps(compat_fields(cfg, target_id), sort_keys=True)
    return hashlib.sha256(fields.encode()).hexdigest()[:16]


def _publish(partial: Path, final: Path) -> None:
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, final)
