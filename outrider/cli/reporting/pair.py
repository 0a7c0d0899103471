"""The sections of a report of one pair: what each runs, and where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any

from rich.console import Console

from outrider import __version__
from outrider.cli.benching.ladder import Plan
from outrider.cli.benching.load import Load
from outrider.cli.benching.machine import machine, source_commit
from outrider.cli.benching.prompts import PROMPTS
from outrider.cli.benching.report import to_json, verdicts
from outrider.cli.benching.server import model_at
from outrider.cli.child_events import events_of
from outrider.cli.demo_runs import NUM_DRAFT_TOKENS, first_prompts
from outrider.cli.doctor import findings_of
from outrider.cli.over_http import url_of
from outrider.cli.reporting.document import P_WRONG
from outrider.cli.reporting.sections import Section
from outrider.cli.tuning.deployments import Workers, deployments_of, ladder_of, serving, settings_of, with_cache
from outrider.cli.tuning.money import COLOCATED
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes import Event, StopFlag
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.settings.system import demo_model

LIBRARIES = ("torch", "transformers", "ray", "grpcio", "numpy", "safetensors", "tokenizers")
NUM_PROMPTS = 16


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    batches: Sequence[int]
    """Rows of a step."""
    num_rounds: int
    """Steps of each kind."""
    context_tokens: int
    """Of each row of a step."""
    loads: Sequence[int]
    """Requests at once."""
    seconds: float
    """After which no turn of a load begins."""
    max_tokens: int
    """Of an answer."""


ON_GPUS = Scale((1, 8, 32), 30, 512, (1, 4, 16), 20.0, 128)
REHEARSAL = Scale((1, 2), 2, 32, (1, 2), 0.0, 16)


class PairReport:
    """Makes the sections of one pair."""

    def __init__(self, workers: Workers, is_widened: bool, scale: Scale, devices: Event, notes: Console) -> None:
        """workers: with a device each; models that are None are those of the demo pair. is_widened: widen these first.
        devices: what torch sees. Raises ConfigError for a pair that cannot be started.
        """
        settings_of(workers)
        self._workers, self._is_widened, self._scale, self._notes = workers, is_widened, scale, notes
        self._of_demo = workers["target"]["model"] is None
        self._devices = devices
        self._models: dict[str, str] = {}
        """By role, once they are there."""
        if not is_widened:
            self._models = {role: values["model"] or demo_model(role) for role, values in workers.items()}
        self.without_split: str | None = None
        """Why the pair is not on two devices; None where it is."""
        try:
            deployments_of(workers)
        except ConfigError as error:
            self.without_split = error.message

    def sections(self) -> list[Section]:
        """Return them in the order in which they are to run."""
        found = [
            Section("versions", "Versions of the libraries, the processor, the GPUs and their driver.", self._versions)
        ]
        if self._is_widened:
            plan = (
                "Widens the demo pair to 1.0 and 2.8 thousand million parameters in bfloat16: its own text and "
                "acceptance at the cost of models of that size. 8 GB in the user's cache, kept for the next report."
            )
            found.append(Section("pair", plan, self._widen))
        found.append(Section("doctor", "What `outrider doctor` says of the machine and the pair.", self._doctor))
        for device in dict.fromkeys(str(values["device"]) for values in self._workers.values()):
            plan = (
                f"Draws 16,384 short sequences on {device} by both rejection rules and without drafts, and compares "
                "their counts with the law that they should have (chi-square)."
            )
            found.append(Section(f"laws on {device}", plan, partial(self._laws, device)))
        for role, values in self._workers.items():
            plan = (
                f"Loads the {role} on {values['device']}, where it tests itself, captures CUDA graphs, and times "
                f"{self._scale.num_rounds} steps each of {_list(self._scale.batches)} rows, of 1 token and of "
                f"{NUM_DRAFT_TOKENS + 1}, eagerly and as graphs, beside what the memory's speed allows."
            )
            found.append(Section(f"{role} on {values['device']}", plan, partial(self._model, role)))
        for name, workers in self._deployments().items():
            places = " and ".join(f"the {role} on {_place(values)}" for role, values in workers.items())
            plan = (
                f"Serves the pair, {places}, and measures tokens per second at {_list(self._scale.loads)} requests at "
                f"once, with {NUM_DRAFT_TOKENS} drafts a round and without, in turns."
            )
            found.append(Section(name, plan, partial(self._served, name)))
        return found

    def _versions(self) -> Iterator[Event]:
        libraries = {name: _version(name) for name in LIBRARIES}
        versions = {"outrider": __version__, "commit": source_commit() or "not of a checkout", **libraries}
        yield {"event": "versions", **versions, **machine()}
        yield self._devices

    def _widen(self) -> Iterator[Event]:
        for event in _child({"section": "pair"}, "widening"):
            self._models[event["role"]] = event["folder"]
            yield event

    def _doctor(self) -> Iterator[Event]:
        self._check_models()
        target = self._workers["target"]
        task = {
            "target": self._models["target"],
            "drafts": [self._models["draft"]],
            "device": target["device"],
            "dtype": target["dtype"] or "auto",
        }
        fields = GatewayConfig.model_fields
        host, port, grpc_port = (fields[name].default for name in ("host", "port", "grpc_port"))
        for finding in findings_of(task, [], host, port, grpc_port, self._notes, None):
            yield {"event": "found", **{name: getattr(finding, name) for name in finding.__slots__}}

    def _laws(self, device: str) -> Iterator[Event]:
        wrong = list[str]()
        for event in _child({"section": "laws", "device": device}, f"laws on {device}"):
            yield event
            if event["event"] == "law" and event["p_value"] < P_WRONG:
                wrong.append(event["rule"])
        if wrong:
            raise OutriderError(f"not the law of the target: {'; '.join(wrong)}")

    def _model(self, role: str) -> Iterator[Event]:
        self._check_models()
        values, scale = self._workers[role], self._scale
        task = {
            "section": "model",
            "model": self._models[role],
            "device": values["device"],
            "dtype": values["dtype"] or "auto",
            "batches": list(scale.batches),
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "context_tokens": scale.context_tokens,
            "num_rounds": scale.num_rounds,
        }
        yield from _child(task, f"{role} on {values['device']}")

    def _deployments(self) -> dict[str, Workers]:
        workers = {role: {**values, "model": self._models.get(role)} for role, values in self._workers.items()}
        workers = with_cache(workers, self._prompts(), self._scale.max_tokens, max(self._scale.loads))
        return {COLOCATED: workers} if self.without_split is not None else deployments_of(workers)

    def _served(self, name: str) -> Iterator[Event]:
        self._check_models()
        stop = StopFlag()
        with stop.installed(), serving(self._deployments()[name], stop, self._notes) as endpoints:
            load = asyncio.run(self._load(url_of(endpoints.http, False)))
            for concurrency in self._scale.loads:
                plan = Plan([concurrency], None, self._scale.seconds)
                rungs = asyncio.run(ladder_of(load, plan, self._notes, stop))
                yield {"event": "rung", **to_json(rungs)[0], "said": list(verdicts(rungs))}

    def _prompts(self) -> tuple[str, ...]:
        return tuple(first_prompts(None, NUM_PROMPTS)) if self._of_demo else PROMPTS

    async def _load(self, url: str) -> Load:
        load = Load(url, self._prompts(), self._scale.max_tokens, temperatures=(0.0,), shared_prefixes=False)
        async with load.client() as client:
            served = await model_at(client, None)
        return replace(load, extra={"model": served["id"], "speculation": {"num_draft_tokens": NUM_DRAFT_TOKENS}})

    def _check_models(self) -> None:
        if self._models.keys() != self._workers.keys():
            raise ConfigError("there is no pair: it was not widened, as told above")


def devices_here() -> Event:
    """Return what torch sees. Raises OutriderError where torch cannot be asked."""
    (found,) = _child({"section": "devices"}, "look at the devices")
    return found


def _child(task: dict[str, Any], what: str) -> Iterator[Event]:
    with closing(events_of("outrider.engine.reporting", task, what, grace_s=1.0)) as events:
        yield from events


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"


def _list(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"


def _place(values: dict[str, str | None]) -> str:
    cores = values.get("cpu_cores")
    return f"{values['device']}" if cores is None else f"{values['device']}, core {cores}"
