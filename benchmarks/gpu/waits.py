"""Section `waits`: where a step of draft and target waits for the device, by place.

torch itself reports each wait (`torch.cuda.set_sync_debug_mode`); the stack says whose it is. A target's step is to
have one: the copy of what was decided.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import DEMO_DRAFT, DEMO_TARGET, REPO, Bench
from benchmarks.gpu.services import prompt_ids
from benchmarks.gpu.stepping import SteppedPair, stepped_pair
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape

PRODUCT = ("outrider/", "draft_service/", "target_service/")
"""Folders whose frames name the place of a wait."""
SYNCHRONIZING = "called a synchronizing"
"""Words of torch's warning of a wait."""
NUM_SLOTS = 4
NUM_ROUNDS = 3
CHAIN = Speculation(3, 3)
TREE = Speculation("auto", 6, TreeShape.parse("2x2"))
CASES: dict[str, tuple[Speculation, dict[str, Any]]] = {
    "chain, greedy": (CHAIN, {"temperature": 0.0}),
    "chain, T = 1": (CHAIN, {}),
    "chain, coupled": (CHAIN, {"acceptance": AcceptanceRule.COUPLED}),
    "tree, greedy": (TREE, {"temperature": 0.0}),
    "tree, T = 1": (TREE, {}),
    "penalties and log-probs": (CHAIN, {"repetition_penalty": 1.2, "num_logprobs": 3}),
}


def run(bench: Bench) -> None:
    prompts = prompt_ids(DEMO_TARGET, NUM_SLOTS)
    settings = {"device": bench.device, "max_slots": 8, "kv_cache_tokens": 8192}
    most = 0.0
    with stepped_pair(str(DEMO_DRAFT), str(DEMO_TARGET), **settings) as pair:
        for case, (speculation, sampling) in CASES.items():
            try:
                pair.open(prompts, speculation, **sampling)
                pair.round()  # tables that are made once
                per_step = _count(bench, case, pair)
            except Exception as error:  # one kind that fails leaves the others
                bench.find(f"{case}: {type(error).__name__}: {error}")
                bench.tell("wait", case=case, place=traceback.format_exc(limit=-3))
                continue
            finally:
                pair.close_all()
            most = max(most, per_step)
            if per_step > 1:
                bench.find(f"{case}: {per_step:.1f} waits a step of the target")
    bench.sum_up(f"at most {most:.1f} waits a step of the target")


def _count(bench: Bench, case: str, pair: SteppedPair) -> float:
    """Report the waits of some rounds by place; return those of a step of the target."""
    places: dict[str, Counter[str]] = {"draft": Counter(), "target": Counter()}
    steps: Counter[str] = Counter()
    for role, worker in (("draft", pair.draft), ("target", pair.target)):
        worker.around_step = partial(_watched, places[role], steps, role)
    for _ in range(NUM_ROUNDS):
        pair.round()
    for worker in (pair.draft, pair.target):
        worker.around_step = nullcontext
    for role, counted in places.items():
        for place, num in counted.most_common():
            bench.tell("wait", case=case, worker=role, place=place, a_step=num / max(1, steps[role]))
        if not counted:
            bench.tell("wait", case=case, worker=role, place="none", a_step=0.0)
    return sum(places["target"].values()) / max(1, steps["target"])


@contextmanager
def _watched(places: Counter[str], steps: Counter[str], role: str) -> Iterator[None]:
    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if SYNCHRONIZING in str(message):
            places[_own_place()] += 1

    def wait_for_event(event: torch.cuda.Event) -> None:
        """Count a wait for an event that has not come yet; torch reports none of them."""
        if not event.query():
            places[f"{_own_place()} (event)"] += 1
        event_synchronize(event)

    steps[role] += 1
    event_synchronize = torch.cuda.Event.synchronize
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.Event.synchronize = wait_for_event  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.cuda.Event.synchronize = event_synchronize  # type: ignore[method-assign]
            torch.cuda.set_sync_debug_mode("default")


def _own_place() -> str:
    """Return the innermost place of the product's code."""
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename.removeprefix(f"{REPO}/")
        if name.startswith(PRODUCT):
            return f"{name}:{frame.lineno} in {frame.name}"
    return "outside"
