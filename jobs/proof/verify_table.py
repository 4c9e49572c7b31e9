"""What `flywheel verify` prints for people."""

from statistics import median
from typing import Any

from jobs.base.console import console, print_table, short_name, some_names
from jobs.proof.speed import warn_if_unsteady

SHOWN = 10


def show(result: dict[str, Any]) -> None:
    """Print tau, predicted speed-ups, the chosen K, measured speeds, and the evidence."""
    replayed, counted = result["tau_replay"], result["tau_served"]
    lines = [["pooled", replayed["pooled"], counted["pooled"]]]
    shown = list(replayed["domains"])[:SHOWN]
    lines += [[short_name(n), replayed["domains"][n], counted["domains"][n]] for n in shown]
    pairs = zip(replayed["positions"], counted["positions"], strict=True)
    lines += [[f"draft {i} accepted", a, b] for i, (a, b) in enumerate(pairs, 1)]
    print_table(f"tau, K = {result['k']}", ["slice", "replayed", "served by vLLM"], lines)
    guesses = list(result["predicted"].values())
    if guesses:
        print_table(
            "Predicted speed-up = replayed tau x plain step / round",
            ["K", *(f"batch size {batch}" for batch in result["predicted"])],
            [[k, *(guess[k] for guess in guesses)] for k in guesses[0]],
        )
    k_by_batch = ", ".join(map(str, result["k_by_batch_size"]))
    console.print(f"K chosen for batch size 1, 2, ... (the last for all larger): {k_by_batch}")
    if 0 in result["k_by_batch_size"]:
        timed = ", ".join(map(str, result["speed_k"]))
        console.print(
            f"K 0: no drafts, since none is predicted to pay; speed below is that of K {timed}"
        )
    for name, ks in list(result["k_by_slice"].items())[:SHOWN]:
        console.print(f"  {short_name(name)} alone: {', '.join(map(str, ks))}")
    speeds = [
        [
            s["concurrency"],
            median(s["plain"]),
            median(s["drafted"]),
            s["ratio"],
            f"{min(s['ratios']):.2f} .. {max(s['ratios']):.2f}",
        ]
        for s in result["speeds"]
    ]
    titles = ["concurrency", "plain tokens/s", "with drafter", "ratio", "of passes"]
    how = "interleaved passes" if result["servers_at_once"] > 1 else "passes, a server at a time"
    print_table(f"Speed, medians of {how}", titles, speeds)
    warn_if_unsteady("verify", result["speeds"])
    show_evidence(result)


def show_evidence(result: dict[str, Any]) -> None:
    """Print what agrees in rounds and texts, what differs by how much, and exceeded limits."""
    greedy, compared = result["greedy"], result["comparison"]
    differing = compared["differences"][:SHOWN]
    if differing:
        names = ["request", "round", "anchor", "served", "replayed", "gap"]
        title = f"Rounds that differ ({compared['differing_rounds']}; gap in our logits)"
        print_table(title, names, [[one[name] for name in names] for one in differing])
    console.print(
        f"rounds of {compared['requests']} requests on the text that was served: "
        f"{compared['identical_rounds']} identical, {compared['near_ties']} rounds differ at near "
        f"ties, {compared['differing_rounds'] - compared['near_ties']} otherwise"
    )
    if left_out := compared["left_out"]:
        console.print(
            f"left out, since the engine drafted less than {result['k']} tokens in a round: "
            f"{len(left_out)} ({some_names(left_out)})"
        )
    skipped = result["reference"]["skipped"]
    if skipped:
        console.print(f"reference decoder: {skipped}")
    console.print(
        f"greedy text with the drafter: {greedy['identical']} of {greedy['requests']} identical, "
        f"{greedy['near_ties']} near ties, {greedy['different']} different"
    )
    for whose, name in (("its own answers", "control"), ("those with the drafter", "drafted")):
        one = greedy[name]
        console.print(
            f"  the plain server, reading {whose} again, chooses otherwise at {one['lost']} of "
            f"{one['tokens']} tokens (largest gap {one['largest_gap']:.3g})"
        )
    for fault in result["faults"]:
        console.print(f"verify failed: {fault}", style="bold red")
