"""make bench-sizing: disk, network and hours of one training run, by target and number of GPUs.

Arithmetic, nothing is run. Bytes are those of our formats, measured (docs/decisions/038); FLOPs
are counted from the shapes; rates are the ASSUMED ones, which it prints. Three ways to bring
features to the trainer: a cache (harvested once, stored, read in every epoch), recomputing (each
GPU computes them again in every epoch, beside the drafter), streaming (some GPUs compute them in
every epoch and send them to the others). It prints the tables of docs/explanation/sizing.md.
"""

from dataclasses import dataclass

from bench.gpu_worlds import products, shape
from dflash.drafter_config import DrafterConfig
from dflash.training_memory import model_bytes

STORED = {"bf16": 0.686, "fp8": 0.358}
"""Stored bytes over those of raw bf16: `make bench-features`, SmolLM2-135M, 2026-12-01 (038)."""

DECODED = 300e6
"""Raw bytes that one core decodes in a second: the same benchmark, AVX2."""

ASSUMED = {
    "tokens of all samples": 1e9,
    "tokens of a sample": 2048,
    "anchors of a sample": 512,
    "epochs": 3,
    "tokens in the softmax": 32768,
    "bfloat16 FLOP/s of a GPU": 989e12,
    "share of it in prefill": 0.4,
    "share of it in training": 0.3,
    "memory of a GPU, bytes": 80e9,
    "GPUs of a node": 8,
    "cores of a node": 96,
    "object store, bytes/s of a node": 5e9,
    "network, bytes/s of a GPU": 50e9,
}
GPUS = (8, 64, 512)


@dataclass(frozen=True)
class Size:
    """A target, and its drafter of five layers and five taps."""

    name: str
    parameters: float
    active: float  # of them in the pass of one token
    drafter: DrafterConfig

    @property
    def token_bytes(self) -> int:
        """Raw bf16 features of one token."""
        return 2 * len(self.drafter.target_layer_ids) * self.drafter.hidden_size


def _size(
    name: str, parameters: float, active: float, layers: int, hidden: int, **other: int
) -> Size:
    heads = other.pop("heads")
    cfg = shape(hidden, 5, heads, 8, target_layers=layers, block_size=16, **other)
    return Size(name, parameters, active, cfg)


SIZES = (
    _size("8B (Qwen3-8B)", 8.2e9, 8.2e9, 36, 4096, heads=32, head_dim=128,
          intermediate_size=12288, vocab_size=151936),
    _size("32B (Qwen3-32B)", 32.8e9, 32.8e9, 64, 5120, heads=64, head_dim=128,
          intermediate_size=25600, vocab_size=151936),
    _size("120B of experts (gpt-oss-120b)", 117e9, 5.1e9, 36, 2880, heads=64, head_dim=64,
          intermediate_size=8640, vocab_size=201088),
    _size("123B dense (Mistral Large 2)", 123e9, 123e9, 88, 12288, heads=96, head_dim=128,
          intermediate_size=28672, vocab_size=32768),
)  # fmt: skip


def plan(size: Size, gpus: int) -> dict[str, float]:
    """Hours and bytes of a run on `gpus`."""
    a, cfg = ASSUMED, size.drafter
    samples = a["tokens of all samples"] / a["tokens of a sample"]
    nodes = gpus / a["GPUs of a node"]
    peak = gpus * a["bfloat16 FLOP/s of a GPU"]
    prefill = 2 * size.active * a["tokens of all samples"] / (peak * a["share of it in prefill"])
    blocks, place = a["anchors of a sample"], a["tokens of a sample"] * 0.75  # mean anchor
    seen = blocks * cfg.block_size * (place + cfg.block_size)
    rows = blocks * cfg.num_drafts * a["tokens in the softmax"]
    flops = products(cfg, a["tokens of a sample"], blocks, seen, rows)
    training = a["epochs"] * samples * flops / (peak * a["share of it in training"])
    raw = size.token_bytes * a["tokens of all samples"]
    stored = STORED["bf16"] * raw
    reading = a["epochs"] * max(
        stored / (nodes * a["object store, bytes/s of a node"]),
        raw / (nodes * a["cores of a node"] * DECODED),
    )
    writing = stored / (nodes * a["object store, bytes/s of a node"])
    again = a["epochs"] * prefill + training
    sent = a["epochs"] * raw
    trainers = gpus * training / again
    streamed = max(again, sent / (trainers * a["network, bytes/s of a GPU"]))
    cached = max(prefill, writing) + max(training, reading)
    return {
        "stored_bf16": stored,
        "stored_fp8": STORED["fp8"] * raw,
        "cached": cached / 3600,
        "harvest": max(prefill, writing) / 3600,
        "store_rate": a["epochs"] * stored / max(training, reading) / nodes,
        "recomputed": again / 3600,
        "streamed": streamed / 3600,
        "trainers": trainers,
        "network_rate": sent / streamed / trainers,
    }


def memory(size: Size) -> dict[str, float]:
    """GPUs of one copy of the target in bf16, and bytes of the drafter's training state."""
    state = sum(model_bytes(size.drafter, "muon", 1).values())
    room = 0.9 * ASSUMED["memory of a GPU, bytes"]
    return {"copy": -(-2 * size.parameters // room), "target": 2 * size.parameters, "state": state}


def tables() -> str:
    """The tables, as Markdown."""
    lines = ["| target | bytes a token, raw | GPUs of a copy | target, GB | training state, GB |"]
    lines.append("|---|---|---|---|---|")
    for size in SIZES:
        m = memory(size)
        lines.append(
            f"| {size.name} | {size.token_bytes:,} | {m['copy']:.0f} | {m['target'] / 1e9:.0f} "
            f"| {m['state'] / 1e9:.0f} |"
        )
    lines += [
        "",
        "| target | GPUs | stored, TB (fp8) | cache, h (harvest) | store, GB/s of a node "
        "| recomputing, h | streaming, h | GPUs that train | network, GB/s of each |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for gpus in GPUS:
            p = plan(size, gpus)
            lines.append(
                f"| {size.name.split(' (')[0]} | {gpus} "
                f"| {p['stored_bf16'] / 1e12:.1f} ({p['stored_fp8'] / 1e12:.1f}) "
                f"| {p['cached']:.2f} ({p['harvest']:.2f}) | {p['store_rate'] / 1e9:.1f} "
                f"| {p['recomputed']:.2f} | {p['streamed']:.2f} | {p['trainers']:.0f} "
                f"| {p['network_rate'] / 1e9:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Print what is assumed, then the tables."""
    for name, value in ASSUMED.items():
        print(f"- {name}: {value:,g}")
    print()
    print(tables())


if __name__ == "__main__":
    main()
