"""Groups of samples that must stay on one side of the split, whatever the logs call them.

Samples belong together if they carry the same conversation label, or if the prompt of one begins
with the prompt of the other (store.leakage). Labels that say nothing (such as "none") join nothing.

The side of a group is that of its first sample in time (split_of its conversation). Groups are
formed in order of time, so later samples do not move earlier ones, with two exceptions
(docs/decisions/032):

- A sample may join two groups. Then `train` wins over `val`, and `val` over `test`: a drafter must
  not be judged on what it may have learned from.
- A group that grows beyond a tenth of all samples so far becomes training data. Otherwise it could
  be all of the held-out data.
"""

from collections import Counter
from dataclasses import dataclass, field

from store.leakage import TOKEN, forest

ORDER = ("train", "val", "test")
MOST = 0.5  # a label on more than this share of all samples, and on at least FEW, says nothing
FEW = 10
LARGE, LARGE_FROM = 0.1, 50  # a group above both (share of samples so far, samples) is training
ENDING = 16  # most tokens at the end of a prompt that may belong to the chat template
ENDING_SHARE = 0.9  # share of a class of prompts that must have an ending
ENDING_CLASS, ENDING_FEW = 0.1, 8  # a class needs both (share of prompts, prompts) for an ending
LOOKED_AT = 10_000  # most prompts of a class that are looked at


@dataclass
class Groups:
    """Union-find over samples in order of time; the older group keeps its number."""

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    founder: list[int] = field(default_factory=list)  # first sample of each group

    def new(self, sample: int, split: str) -> int:
        """Start a group with this sample and side; returns its number. `form` counts the sample."""
        self.parent.append(len(self.parent))
        self.size.append(0)
        self.split.append(split)
        self.founder.append(sample)
        return len(self.parent) - 1

    def find(self, group: int) -> int:
        """The group that this one has become part of; itself if it was not joined."""
        while self.parent[group] != group:
            self.parent[group] = group = self.parent[self.parent[group]]
        return group

    def join(self, found: list[int]) -> int:
        """Merge these groups into the oldest one; returns its number."""
        first, *others = sorted({self.find(group) for group in found})
        for other in others:
            self.parent[other] = first
            self.size[first] += self.size[other]
            self.split[first] = min(self.split[first], self.split[other], key=ORDER.index)
        return first


def form(
    prompts: list[bytes], labels: list[set[str]], splits: list[str], order: list[int]
) -> tuple[list[int], list[str]]:
    """(founder, split) of each sample's group, as two lists.

    prompts: token ids as bytes. labels: the conversation labels of each sample. splits: the side
    that each sample would have alone. order: the indices of the samples by time.
    """
    groups, by_label = Groups(), {}
    nodes, parents = forest(beginnings(prompts))
    at_node = [-1] * len(parents)
    waiting: dict[int, list[int]] = {}  # node without a sample yet -> groups that begin with it
    mine = [0] * len(prompts)
    for seen, sample in enumerate(order, 1):
        node = nodes[sample] if prompts[sample] else -1
        found = [by_label[label] for label in labels[sample] if label in by_label]
        passed = []
        if node >= 0:
            above = node
            while above >= 0 and at_node[above] < 0:
                passed.append(above)
                above = parents[above]
            found += [at_node[above]] if above >= 0 else []
            found += waiting.pop(node, []) if passed else []
        group = groups.join(found) if found else groups.new(sample, splits[sample])
        for label in labels[sample]:
            by_label[label] = group
        if node >= 0:
            at_node[node] = group
            for inner in passed[1:] if above < 0 else []:
                waiting.setdefault(inner, []).append(group)
        groups.size[group] += 1
        if groups.size[group] > max(LARGE_FROM, LARGE * seen):
            groups.split[group] = "train"
        mine[sample] = group
    final = [groups.find(group) for group in mine]
    return [groups.founder[g] for g in final], [groups.split[g] for g in final]


def idle_labels(counts: Counter[str]) -> set[str]:
    """Labels that most samples carry: they name a service, not a conversation."""
    total = sum(counts.values())
    return {label for label, n in counts.items() if label and n >= FEW and n > MOST * total}


def beginnings(prompts: list[bytes]) -> list[bytes]:
    """Each prompt up to where its last turn ends.

    A chat template ends a prompt with the opening of the answer (and perhaps an empty thinking
    block). Later turns of the chat do not always repeat this ending. It is learned from the data:
    what nine of ten prompts with the same last token end with. Its first token is kept, so that
    "hi" does not count as the beginning of "hi there".
    """
    classes: dict[bytes, list[bytes]] = {}
    distinct = sorted(set(prompts))
    for prompt in distinct:
        classes.setdefault(prompt[-TOKEN:], []).append(prompt)
    enough = max(ENDING_FEW, ENDING_CLASS * len(distinct))
    endings = {last: _ending(some) for last, some in classes.items() if len(some) >= enough}
    return [_without(prompt, endings.get(prompt[-TOKEN:], b"")) for prompt in prompts]


def _ending(prompts: list[bytes]) -> bytes:
    """The longest ending that ENDING_SHARE of the prompts share, at most ENDING tokens."""
    some = prompts[:: -(-len(prompts) // LOOKED_AT)]
    found = b""
    for n in range(TOKEN, (ENDING + 1) * TOKEN, TOKEN):
        ending, count = Counter(p[-n:] for p in some if len(p) >= n).most_common(1)[0]
        if count < ENDING_SHARE * len(some):
            break
        found = ending
    return found


def _without(prompt: bytes, ending: bytes) -> bytes:
    """The prompt without as much of the ending as it has; the first token of that part is kept."""
    while ending and not prompt.endswith(ending):
        ending = ending[TOKEN:]
    cut = min(len(ending) - TOKEN, len(prompt) - 4 * TOKEN)
    return prompt[:-cut] if cut > 0 else prompt
