"""`outrider tune`: measures a pair's speed at every K and with each drafter, and its cost, and recommends settings."""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli import options as opt
from outrider.cli.console import answer_console, note_console
from outrider.cli.demo.demo_runs import first_prompts
from outrider.cli.over_http import parse_url
from outrider.cli.progress import ShowMessage, reporting
from outrider.cli.up.up import failures_as_lines
from outrider.client import AsyncClient, Drafter, Model
from outrider.lab.load.figures import MIN_BATCHES, LoadFigures
from outrider.lab.load.ladder import LadderPlan
from outrider.lab.load.load import Load
from outrider.lab.tuning.deployments import Workers, deployments_of, measure_under_load, serving, with_cache
from outrider.lab.tuning.money import COLOCATED, NGRAM, SPLIT, Money, Price, money_to_json, show_money
from outrider.lab.tuning.picture import check_can_draw, draw
from outrider.lab.tuning.report import show, to_json
from outrider.lab.tuning.runs import Workload
from outrider.lab.tuning.settings import PLAIN, environment, gateway_settings, needs_draft
from outrider.lab.tuning.study import Study, study_pair
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.requests.drafters import TABLE_DRAFTERS
from outrider.wire.requests.params import ANY_VOCABULARY, MAX_DRAFT_TOKENS, SamplingParams
from outrider.wire.settings.system import flag_of

CONCURRENCIES = (1, 2, 4, 8, 16)
"""Default of --concurrency: with --price, the speed is measured with each of these numbers of concurrent requests."""
SECONDS = 30.0
"""Default of --seconds: with --price, the seconds for which each deployment is measured at each concurrency."""

Address = Annotated[
    str | None,
    typer.Option(help="host:port of a running gateway's gRPC server; absent = start the pair here, and end it."),
]
Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; absent = the demo pair.")]
Draft = Annotated[list[str] | None, typer.Option(metavar="<str>", help="Folder or hub id of the draft.")]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL file, a `prompt` in each line; absent = those of the demo pair.")
]
Temperature = Annotated[list[float] | None, typer.Option(help="May be given several times; absent = 0 and 1.")]
Repeats = Annotated[int, typer.Option(help="Answers to each prompt under each setting, alternating with the others.")]
PriceOption = Annotated[
    str | None,
    typer.Option(
        metavar="target=<float>,draft=<float>",
        help="What an hour of each one's device costs: measures tokens for the money, too, of the target alone, "
        "plain and with n-grams, and of the pair on one device and on two, at each --concurrency.",
    ),
]
Concurrency = Annotated[
    list[int] | None,
    typer.Option(help=f"Requests at once; may be given several times; absent = {' '.join(map(str, CONCURRENCIES))}."),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        help=f"Seconds of each --concurrency and deployment, {MIN_BATCHES} batches at least; absent = {SECONDS:g}."
    ),
]
Png = Annotated[Path | None, typer.Option(help="Draw speed by K into this file.")]
_NEEDS_MODEL = "every K is measured with a draft model (--draft FOLDER), and what needs none, such as ngram, beside it"


@dataclass(frozen=True)
class TuneOptions:
    """Options of the measurement by `outrider tune`. The settings of the measured workers are not among them."""

    prompts: list[str]
    max_tokens: int
    """Number of output tokens of each request."""
    temperatures: list[float]
    cuts: dict[str, float]
    """Values of the sampling parameters top_p, top_k and min_p, by name. A parameter that the user did not give is
    absent."""
    max_k: int
    """Largest K (draft tokens per round) to measure."""
    repeats: int
    """Number of outputs for each prompt under each setting."""
    connection: opt.CallOptions
    stop: StopFlag


@dataclass(frozen=True)
class TuneResult:
    """All results of `outrider tune`."""

    served: Model
    studies: list[Study]
    """Results at each temperature."""
    money: Money | None
    """Speeds and prices under load; None = --price was not given."""


@opt.grouped
def tune(
    *,
    address: Address = None,
    target: Target = None,
    draft: Draft = None,
    placement: opt.PlacementOptions,
    prompts: Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="The first so many of the file.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each answer.")] = 96,
    temperature: Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    max_k: Annotated[int, typer.Option(help="The largest K that is measured.")] = 12,
    repeats: Repeats = 3,
    price: PriceOption = None,
    concurrency: Concurrency = None,
    seconds: Seconds = None,
    png: Png = None,
    connection: opt.CallOptions,
    verbose: opt.Verbose = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure what a pair's speculation gains, and recommend K and drafter, or none.

    Every K is measured, then each drafter at the best K, and compared with plain decoding and with theory (Leviathan et
    al. 2023, Theorem 3.8). Requests run one at a time; use machines that do nothing else.
    """
    notes = note_console()
    with failures_as_lines(notes):
        concurrencies = sorted(set(concurrency or CONCURRENCIES))
        _check_numbers(
            {
                "num-prompts": (num_prompts, 1),
                "repeats": (repeats, 1),
                "max-k": (max_k, 1),
                "concurrency": (concurrencies[0], 1),
                "seconds": (seconds or 0, 0),
            }
        )
        _check_lengths(max_k, max_tokens)
        if png is not None:
            check_can_draw(png)
        texts = first_prompts(prompts, num_prompts)
        workers = placement.workers(target, _only(draft))
        stop = StopFlag()
        stop.install()
        cuts = _given_cuts(top_p=top_p, top_k=top_k, min_p=min_p)
        temperatures = temperature or [0.0, 1.0]
        for value in temperatures:
            SamplingParams(temperature=value, **cuts).check(ANY_VOCABULARY)  # type: ignore[arg-type]
        options = TuneOptions(texts, max_tokens, temperatures, cuts, max_k, repeats, connection, stop)
        _check_pair(address, workers)
        hourly = _hourly(price)
        if hourly is None and (concurrency or seconds is not None):
            raise ConfigError("--concurrency and --seconds are of --price, which is not given; leave them out")
        started: Workers | None = workers
        if address is not None:
            if hourly is not None:
                raise ConfigError(
                    "--price and --address contradict each other: the pair is started on one device and on two"
                )
            started = None
            result = _tune_served(address, options, notes)
        elif hourly is None:
            result = _tune_started(workers, options, notes, verbose)
        else:
            plan = LadderPlan(concurrencies, SECONDS)
            if seconds is not None:
                plan = LadderPlan(concurrencies, seconds)
            result = _tune_with_price(workers, options, plan, hourly, notes, verbose)
        if as_json:
            typer.echo(json.dumps(_to_json(result, options, started)))
        else:
            _show(result, options, started)
        if png is not None:
            draw(result.studies, _title(result), png)
            notes.print(f"drawn: {png}")


def _check_numbers(numbers: dict[str, tuple[float, int]]) -> None:
    for name, (value, minimum) in numbers.items():
        if value < minimum:
            raise ConfigError(f"--{name} is {value}, must be at least {minimum}")


def _check_lengths(max_k: int, max_tokens: int) -> None:
    if max_k > MAX_DRAFT_TOKENS:
        raise ConfigError(f"--max-k is {max_k}, must be at most {MAX_DRAFT_TOKENS}")
    if max_tokens < 2 * (max_k + 1):
        raise ConfigError(
            f"--max-tokens is {max_tokens}: answers need two rounds of --max-k {max_k} tokens and the target's "
            f"own at least, {2 * (max_k + 1)}"
        )


def _only(draft: list[str] | None) -> str | None:
    if not draft:
        return None
    if len(draft) > 1:
        raise ConfigError(f"--draft is there twice, as {' and '.join(draft)}: tune them one after the other")
    return draft[0]


def _given_cuts(**cuts: float | None) -> dict[str, float]:
    return {name: value for name, value in cuts.items() if value is not None}


def _hourly(price: str | None) -> Price | None:
    if price is None:
        return None
    return Price.parse(price)


def _check_pair(address: str | None, workers: Workers) -> None:
    """Raise ConfigError for workers that are given together with an address, or that cannot be tuned."""
    given_flags = list[str]()
    for role, settings in workers.items():
        given_flags += [flag_of(role, name) for name, value in settings.items() if value is not None]
    if address is not None and given_flags:
        raise ConfigError(
            f"{given_flags[0]} and --address contradict each other: the pair there runs as it was started"
        )
    target = workers["target"]["model"]
    draft = workers["draft"]["model"]
    if str(draft).partition(":")[0] in TABLE_DRAFTERS:
        raise ConfigError(f"--draft {draft} is no model: {_NEEDS_MODEL}")
    if (target is None) == (draft is None):
        return
    given = f"--target {target}"
    missing = "--draft"
    if target is None:
        given = f"--draft {draft}"
        missing = "--target"
    raise ConfigError(
        f"{given} without {missing}: say both models of the pair; what needs no model, such as ngram, is measured "
        "beside them"
    )


def _tune_served(address: str, options: TuneOptions, notes: Console) -> TuneResult:
    with reporting(notes, "starting") as show_message:
        served, studies = asyncio.run(_studies(address, options, show_message))
    return TuneResult(served, studies, None)


def _tune_started(workers: Workers, options: TuneOptions, notes: Console, verbose: bool) -> TuneResult:
    with serving(workers, options.stop, notes, max_k=options.max_k, verbose=verbose) as endpoints:
        return _tune_served(endpoints.grpc, options, notes)


def _tune_with_price(
    workers: Workers, options: TuneOptions, plan: LadderPlan, price: Price, notes: Console, verbose: bool
) -> TuneResult:
    """Measure the pair with the draft on its own device, one request at a time and under load. Then measure it under
    load with both on the target's device.
    """
    placed = deployments_of(with_cache(workers, options.prompts, options.max_tokens, max(plan.concurrencies)))
    with serving(placed[SPLIT], options.stop, notes, max_k=options.max_k, verbose=verbose) as endpoints:
        result = _tune_served(endpoints.grpc, options, notes)
        model = result.served.id
        split = _under_load(SPLIT, endpoints.http, model, options, plan, notes)
        ngram = _under_load(NGRAM, endpoints.http, model, options, plan, notes)
    with serving(placed[COLOCATED], options.stop, notes, max_k=options.max_k, verbose=verbose) as endpoints:
        colocated = _under_load(COLOCATED, endpoints.http, model, options, plan, notes)
    money = Money({SPLIT: split, NGRAM: ngram, COLOCATED: colocated}, price)
    return TuneResult(result.served, result.studies, money)


def _under_load(
    deployment: str, url: str, model: str, options: TuneOptions, plan: LadderPlan, notes: Console
) -> list[LoadFigures]:
    fields: dict[str, Any] = {"model": model, **options.cuts}
    if deployment == NGRAM:
        fields["speculation"] = {"drafter": NGRAM}
    load = Load(
        parse_url(url, False),
        tuple(options.prompts),
        options.max_tokens,
        tuple(options.temperatures),
        ignore_eos=False,
        shared_prefixes=False,
        extra=fields,
        timeout_s=options.connection.timeout,
    )
    notes.print(f"{deployment}:", markup=False)
    return asyncio.run(measure_under_load(load, plan, notes, options.stop))


async def _studies(address: str, options: TuneOptions, show_message: ShowMessage) -> tuple[Model, list[Study]]:
    timeout_s = options.connection.timeout
    async with AsyncClient(address, timeout_s=timeout_s, **options.connection.options) as client:
        served = _chosen(await client.models(), options.connection.model, address)
        studies = list[Study]()
        for temperature in options.temperatures:
            sampling = {"temperature": temperature, **options.cuts}
            load = Workload(options.prompts, options.max_tokens, sampling, served.id, timeout_s, options.stop)
            studies.append(
                await study_pair(client, load, served.drafters, options.max_k, options.repeats, show_message)
            )
        return served, studies


def _chosen(models: tuple[Model, ...], requested: str | None, address: str) -> Model:
    candidates = [model for model in models if requested in (None, model.id)]
    if len(candidates) != 1:
        known = ", ".join(model.id for model in models) or "none"
        what = f"does not serve {requested}"
        if requested is None:
            what = "serves several models; say --model"
        raise ConfigError(f"the gateway at {address} {what}; it has {known}")
    model = candidates[0]
    if model.draft_id is None:
        raise ConfigError(
            f"the gateway at {address} serves {model.id} without a draft worker: there is no K to tune; give it "
            "one (outrider up --draft), or wait until it is back"
        )
    if Drafter.MODEL not in model.drafters:
        raise ConfigError(
            f"the gateway at {address} serves {model.id} with the draft {model.draft_id}, which is no model: "
            f"{_NEEDS_MODEL}"
        )
    return model


def up_command(workers: Workers, *, with_draft: bool = True) -> str:
    """Return the command line of `outrider up` that starts a pair with these settings. with_draft: False = start its
    target without a draft.
    """
    roles = ["target"]
    if with_draft:
        roles.append("draft")
    flags = dict[str, str]()
    for name in workers["target"]:
        for role in roles:
            value = workers[role][name]
            if value is not None:
                flags[flag_of(role, name)] = value  # --dtype is of both
    words = ["outrider", "up"]
    for flag, value in flags.items():
        words += [flag, value]
    if not with_draft:
        words.append("--no-draft")
    return shlex.join(words)


def start_with(study: Study, workers: Workers | None) -> str:
    """Return a text that tells a user how to start the system with the setting that the study recommends.

    workers: settings of the pair that `outrider tune` started; the text is then a whole command. None = the gateway
    already ran; the text then has only the environment variables for the gateway.
    """
    options = study.options[study.choice.name]
    settings = environment(gateway_settings(options))
    if workers is None:
        return settings
    command = up_command(workers, with_draft=needs_draft(options))
    if not options.enabled:
        return command
    return f"{settings} {command}"


def _title(result: TuneResult) -> str:
    return f"{result.served.id}, drafted for by {result.served.draft_id}"


def _show(result: TuneResult, options: TuneOptions, started: Workers | None) -> None:
    console = answer_console()
    console.print(f"{_title(result)}: {len(options.prompts)} prompts, one at a time")
    for study in result.studies:
        show(study, console)
        console.print(f"start with: {start_with(study, started)}\n", markup=False)
    if result.money is not None and started is not None:
        show_money(result.money, _commands(started), console)


def _commands(workers: Workers) -> dict[str, str]:
    """Return the command that starts each deployment, by name of the deployment."""
    alone = up_command(workers, with_draft=False)
    return {
        PLAIN: alone,
        SPLIT: up_command(workers),
        NGRAM: f"{environment({'drafter': NGRAM})} {alone}",
        COLOCATED: up_command(deployments_of(workers)[COLOCATED]),
    }


def _to_json(result: TuneResult, options: TuneOptions, started: Workers | None) -> dict[str, Any]:
    studies = list[dict[str, Any]]()
    for study in result.studies:
        studies.append({**to_json(study), "start_with": start_with(study, started)})
    return {
        "model": result.served.id,
        "draft": result.served.draft_id,
        "num_prompts": len(options.prompts),
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "sampling": options.cuts,
        "studies": studies,
        "money": result.money and money_to_json(result.money),
    }
