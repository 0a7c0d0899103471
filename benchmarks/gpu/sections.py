"""The sections of the GPU kit: their order, their limits in seconds and the modules that run them."""

from __future__ import annotations

from dataclasses import dataclass

START_S = 20
"""Seconds for unpacking the wheels, looking for a GPU, and the first import of torch from a cold disk."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a kit, run in a process of its own."""

    name: str
    limit_s: int
    """Seconds after which its processes are killed."""
    about: str
    """Its content, in one line."""
    needs_card: bool = False
    """Whether nothing of it runs on a CPU."""
    needs_torch: bool = True
    """Whether torch is imported before its seconds count."""

    @property
    def path(self) -> str:
        """The module with `run(bench)`."""
        return f"benchmarks.gpu.{self.name.replace('-', '_')}"


RIGHT = (
    Section("versions", 18, "libraries, compiler, driver, GPU, and the native library's build"),
    Section("load", 24, "each attention path: load, self-test, one answer beside transformers on the CPU"),
    Section("parity", 46, "greedy answers of the demo pair, each path x plain, chain, named tree, growing tree"),
    Section("laws", 24, "acceptance rules by chi-square over 100,000 draws; coupled bits beside the host's"),
    Section("together", 34, "two workers with default settings on one card, and an answer"),
    Section("heads", 34, "one answer of each kind of draft head"),
    Section("kernels", 10, "attention kernels against float64, in bfloat16 and float16"),
    Section("waits", 10, "waits for the device in a step, by place", needs_card=True),
    Section("memory", 10, "memory before, under and after a load"),
    Section("graphs", 10, "logits with CUDA graphs and without, bit for bit", needs_card=True),
)
FAST = (
    Section("bandwidth", 18, "memory copies, a matrix product, and the native library's build"),
    Section("served", 124, "an 8B target and a 1B draft served: draft on the CPU, both on the card, plain"),
    Section("steps", 34, "steps of a random 8B Llama by slots, rows and context, beside the bytes' floor"),
    Section("profile", 14, "launches and gaps of one step", needs_card=True),
    Section("law-times", 14, "time of each acceptance rule at a vocabulary of 128,256"),
    Section("draft", 16, "a draft's step: a random 1B Llama, its forward and its choice"),
)
KITS = {"right": RIGHT, "fast": FAST}
SECTIONS = {section.name: section for section in (*RIGHT, *FAST)}
"""By name."""
