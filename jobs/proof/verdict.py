"""What `flywheel verify` concludes: rounds and texts compared, and the faults in words."""

from dataclasses import asdict
from pathlib import Path

from dflash.checkpoint import load_drafter
from dflash.target_model import load_target
from jobs.base.config import Config
from jobs.base.devices import compute_device, compute_dtype
from jobs.dataset.slices import Row
from jobs.proof.choose_k import BATCHES, choose, predicted
from jobs.proof.measurements import Measured
from jobs.proof.round_comparison import Comparison, compare, table, unexplained
from serving.client import Completion
from serving.greedy import LEVEL, GreedyReport, Reading
from serving.vllm_counts import pooled_by_vllm


def compare_served(
    cfg: Config, folder: Path, rows: list[Row], answers: list[Completion], k: int
) -> Comparison:
    """Load our models (the servers have stopped), and compare the answers with their replay."""
    dtype, device = compute_dtype(cfg), compute_device(cfg)
    target = load_target(cfg.target_path, dtype, device)
    drafter = load_drafter(folder, dtype).to(device)
    named = [(row["sample_id"], answer) for row, answer in zip(rows, answers, strict=True)]
    return compare(target, drafter, named, k)


def conclude(rows: list[Row], measured: Measured, compared: Comparison, reference: Row) -> Row:
    """Whether no limit is exceeded (`ok`), and the numbers behind it."""
    faults = [*compared.faults(), *text_faults(measured.text), *reference_faults(reference)]
    if compared.unchecked:
        faults.append(f"not checked: {compared.unchecked}; hold out longer answers")
    by_name = {row["sample_id"]: row for row in rows}
    walked = [by_name[name] for name in compared.names]
    return {
        "ok": not faults,
        "faults": faults,
        "k": measured.k,
        "reference": reference,
        "tau_replay": table(walked, compared.replayed, measured.k),
        "tau_served": table(walked, compared.served, measured.k),
        "vllm_mean_acceptance_length": pooled_by_vllm(measured.answers),
        "same_text": {
            "requests": len(compared.names),
            "identical_rounds": compared.identical,
        },
        "comparison": compared.summary(),
        "greedy": greedy_summary(measured.text),
        "requests": len(rows),
        "rounds": compared.rounds,
        "speedup": {str(s.concurrency): s.ratio for s in measured.speeds},
        "speeds": [asdict(s) for s in measured.speeds],
    }


def chosen_k(
    measured: Measured, taus: dict[int, float], by_slice: dict[str, dict[int, float]]
) -> Row:
    """K by batch size, for the whole and for each slice, and the costs that decided."""
    costs = measured.costs
    return {
        "k_by_batch_size": list(measured.chosen),
        "speed_k": list(measured.timed),
        "k_by_slice": {
            name: list(choose(of_slice, costs)) for name, of_slice in by_slice.items() if costs
        },
        "predicted": {str(b): predicted(taus, costs, b) for b in BATCHES} if costs else {},
        "costs": [asdict(cost) for cost in costs],
    }


def text_faults(text: GreedyReport) -> list[str]:
    """Why the drafter is not lossless, in words; [] if the control explains all differences."""
    if not text.different:
        return []
    gaps = ", ".join("unknown" if d.gap is None else f"{d.gap:.3g}" for d in text.different[:5])
    control, drafted = text.control, text.drafted
    return [
        f"{len(text.different)} greedy texts differ beyond what the plain server explains (gaps "
        f"{gaps}; bound {text.bound:.3g}; when it reads answers again, {drafted.lost} of "
        f"{drafted.tokens} tokens with the drafter are not its choice, and {control.lost} of "
        f"{control.tokens} of its own; chance {text.chance:.2g}, limit {LEVEL:g})"
    ]


def reference_faults(reference: Row) -> list[str]:
    """Which requests replay differently than the reference decoder, near ties of float32 aside."""
    wrong = unexplained(reference)
    return [f"replay differs from the reference decoder on {', '.join(wrong)}"] if wrong else []


def greedy_summary(text: GreedyReport) -> Row:
    """Texts with the drafter against those without, and how the plain server reads both again."""
    return {
        "requests": text.requests,
        "identical": text.identical,
        "near_ties": len(text.near_ties),
        "different": len(text.different),
        "differences": [asdict(d) for d in [*text.different, *text.near_ties]],
        "control": reading_summary(text.control),
        "drafted": reading_summary(text.drafted),
        "bound": text.bound,
        "chance": text.chance,
    }


def reading_summary(reading: Reading) -> Row:
    """How many tokens the plain server does not choose when it reads answers again."""
    return {"tokens": reading.tokens, "lost": reading.lost, "largest_gap": reading.largest}
