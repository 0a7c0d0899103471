"""`outrider tune`: how fast a pair should be with drafts, how fast it is, and which setting to run."""

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
from outrider.cli.bench import LADDER, SECONDS, Concurrency
from outrider.cli.console import answer_console, note_console
from outrider.cli.demo.demo_runs import first_prompts
from outrider.cli.over_http import url_of
from outrider.cli.progress import Tell, telling
from outrider.cli.up.up import failures_as_lines
from outrider.client import AsyncClient, Drafter, Model
from outrider.lab.load.figures import LEAST_TURNS, RungFigures
from outrider.lab.load.ladder import Plan
from outrider.lab.load.load import Load
from outrider.lab.tuning.deployments import Workers, deployments_of, ladder_of, serving, with_cache
from outrider.lab.tuning.money import COLOCATED, NGRAM, SPLIT, Money, Price, money_to_json, show_money
from outrider.lab.tuning.picture import check_can_draw, draw
from outrider.lab.tuning.report import show, to_json, unsteady
from outrider.lab.tuning.runs import Workload
from outrider.lab.tuning.settings import PLAIN, environment, gateway_settings, needs_draft
from outrider.lab.tuning.study import Study, study
from outrider.wire.errors import ConfigError
from outrider.wire.processes.processes import StopFlag
from outrider.wire.requests.drafters import TABLE_DRAFTERS
from outrider.wire.requests.params import ANY_VOCABULARY, MAX_DRAFT_TOKENS, SamplingParams
from outrider.wire.settings.system import flag_of

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
_NEEDS_MODEL = "every K is measured with a draft model (--draft FOLDER), and what needs none, such as ngram, beside it"
Png = Annotated[Path | None, typer.Option(help="Draw speed by K, and the best K by alpha, into this file.")]


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
    repeats: Annotated[
        int, typer.Option(help="Answers to each prompt under each setting, in turn with the others.")
    ] = 3,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="target=<float>,draft=<float>",
            help="What an hour of each one's device costs: measures tokens for the money, too, of the target alone, "
            "plain and with n-grams, and of the pair on one device and on two, at each --concurrency.",
        ),
    ] = None,
    concurrency: Concurrency = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds of each --concurrency and deployment, {LEAST_TURNS} turns at least; absent = {SECONDS:g}."
        ),
    ] = None,
    png: Png = None,
    connection: opt.CallOptions,
    verbose: opt.Verbose = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure what a pair's speculation gains, and recommend drafter, K or tree, rule and encoding, or none.

    From costs and acceptance it says how fast every K should be (Leviathan et al. 2023, Theorem 3.8, and
    with all that was measured), then measures every K and what else the deployment offers. One answer at a time: on
    machines that do nothing else.
    """
    notes = note_console()
    with failures_as_lines(notes):
        for name, value, least in (
            ("num-prompts", num_prompts, 1),
            ("repeats", repeats, 1),
            ("max-k", max_k, 1),
            ("concurrency", min(concurrency or LADDER), 1),
            ("seconds", seconds or 0, 0),
        ):
            if value < least:
                raise ConfigError(f"--{name} is {value}, must be at least {least}")
        if max_k > MAX_DRAFT_TOKENS:
            raise ConfigError(f"--max-k is {max_k}, must be at most {MAX_DRAFT_TOKENS}")
        if max_tokens < 2 * (max_k + 1):
            raise ConfigError(
                f"--max-tokens is {max_tokens}: answers need two rounds of --max-k {max_k} tokens and the target's "
                f"own at least, {2 * (max_k + 1)}"
            )
        if png is not None:
            check_can_draw(png)
        texts = first_prompts(prompts, num_prompts)
        if draft is not None and len(draft) > 1:
            raise ConfigError(f"--draft is there twice, as {' and '.join(draft)}: tune them one after the other")
        workers = placement.workers(target, draft[0] if draft else None)
        stop = StopFlag()
        stop.install()
        cuts = {
            name: value for name, value in (("top_p", top_p), ("top_k", top_k), ("min_p", min_p)) if value is not None
        }
        temperatures = temperature or [0.0, 1.0]
        for each in temperatures:
            SamplingParams(temperature=each, **cuts).check(ANY_VOCABULARY)  # type: ignore[arg-type]
        options = TuneOptions(texts, max_tokens, temperatures, cuts, max_k, repeats, connection, stop)
        plan = Plan(sorted(set(concurrency or LADDER)), None, SECONDS if seconds is None else seconds)
        _check_pair(address, workers)
        prices = None if price is None else Price.read(price)
        if prices is not None and address is not None:
            raise ConfigError(
                "--price and --address contradict each other: the pair is started on one device and on two"
            )
        if prices is None and (concurrency or seconds is not None):
            raise ConfigError("--concurrency and --seconds are of --price, which is not given; leave them out")
        started = None if address is not None else workers
        money = None
        if address is not None:
            served, studies = _studied(address, options, notes)
        elif prices is None:
            with serving(workers, stop, notes, max_k=max_k, verbose=verbose) as endpoints:
                served, studies = _studied(endpoints.grpc, options, notes)
        else:
            placed = deployments_of(with_cache(workers, texts, max_tokens, max(plan.concurrencies)))
            with serving(placed[SPLIT], stop, notes, max_k=max_k, verbose=verbose) as endpoints:
                served, studies = _studied(endpoints.grpc, options, notes)
                split = asyncio.run(_ladder(SPLIT, endpoints.http, served.id, options, plan, notes))
                ngram = asyncio.run(_ladder(NGRAM, endpoints.http, served.id, options, plan, notes))
            with serving(placed[COLOCATED], stop, notes, max_k=max_k, verbose=verbose) as endpoints:
                colocated = asyncio.run(_ladder(COLOCATED, endpoints.http, served.id, options, plan, notes))
            money = Money({SPLIT: split, NGRAM: ngram, COLOCATED: colocated}, prices)
        if as_json:
            typer.echo(json.dumps(_json(served, options, studies, started, money)))
        else:
            console = answer_console()
            console.print(f"{served.id}, drafted for by {served.draft_id}: {len(texts)} prompts, one at a time")
            for one in studies:
                show_all(one, started, console)
            if money is not None:
                show_money(money, _commands(workers), console)
        if png is not None:
            draw(studies, money, f"{served.id}, drafted for by {served.draft_id}", png)
            notes.print(f"drawn: {png}")


@dataclass(frozen=True)
class TuneOptions:
    prompts: list[str]
    max_tokens: int
    temperatures: list[float]
    cuts: dict[str, float]
    max_k: int
    repeats: int
    connection: opt.CallOptions
    stop: StopFlag


def _check_pair(address: str | None, workers: Workers) -> None:
    """Raises ConfigError for workers that are not to be started, or cannot be tuned."""
    given = [flag_of(role, name) for role in workers for name, value in workers[role].items() if value is not None]
    if address is not None and given:
        raise ConfigError(f"{given[0]} and --address contradict each other: the pair there runs as it was started")
    if str(draft := workers["draft"]["model"]).partition(":")[0] in TABLE_DRAFTERS:
        raise ConfigError(f"--draft {draft} is no model: {_NEEDS_MODEL}")
    given = [f"--{role}" for role, values in workers.items() if values["model"] is not None]
    if len(given) == 1:
        missing = "--draft" if given == ["--target"] else "--target"
        raise ConfigError(
            f"{given[0]} {workers[given[0].lstrip('-')]['model']} without {missing}: say both models of the pair; "
            "what needs no model, such as ngram, is measured beside them"
        )


def _studied(address: str, options: TuneOptions, notes: Console) -> tuple[Model, list[Study]]:
    with telling(notes, "starting") as tell:
        return asyncio.run(_studies(address, options, tell))


async def _ladder(
    deployment: str, url: str, model: str, options: TuneOptions, plan: Plan, notes: Console
) -> list[RungFigures]:
    speculation = {"speculation": {"drafter": NGRAM}} if deployment == NGRAM else {}
    load = Load(
        url_of(url, False),
        tuple(options.prompts),
        options.max_tokens,
        tuple(options.temperatures),
        ignore_eos=False,
        shared_prefixes=False,
        extra={"model": model, **options.cuts, **speculation},
        timeout_s=options.connection.timeout,
    )
    notes.print(f"{deployment}:", markup=False)
    return await ladder_of(load, plan, notes, options.stop)


async def _studies(address: str, options: TuneOptions, tell: Tell) -> tuple[Model, list[Study]]:
    timeout_s = options.connection.timeout
    async with AsyncClient(address, timeout_s=timeout_s, **options.connection.options) as client:
        served = _chosen(await client.models(), options.connection.model, address)
        studies = []
        for temperature in options.temperatures:
            sampling = {"temperature": temperature, **options.cuts}
            load = Workload(options.prompts, options.max_tokens, sampling, served.id, timeout_s, options.stop)
            studies.append(await study(client, load, served.drafters, options.max_k, options.repeats, tell))
        return served, studies


def _chosen(models: tuple[Model, ...], wanted: str | None, address: str) -> Model:
    known = ", ".join(model.id for model in models) or "none"
    found = [model for model in models if wanted in (None, model.id)]
    if len(found) != 1:
        what = "serves several models; say --model" if wanted is None else f"does not serve {wanted}"
        raise ConfigError(f"the gateway at {address} {what}; it has {known}")
    if found[0].draft_id is None:
        raise ConfigError(
            f"the gateway at {address} serves {found[0].id} without a draft worker: there is no K to tune; give it "
            "one (outrider up --draft), or wait until it is back"
        )
    if Drafter.MODEL not in found[0].drafters:
        raise ConfigError(
            f"the gateway at {address} serves {found[0].id} with the draft {found[0].draft_id}, which is no model: "
            f"{_NEEDS_MODEL}"
        )
    return found[0]


def up_command(workers: Workers, *, with_draft: bool = True) -> str:
    """Return the command `outrider up` with the same pair, or its target alone."""
    roles = ("target", "draft") if with_draft else ("target",)
    named = {flag_of(role, name): workers[role][name] for name in workers["target"] for role in roles}
    words = [word for flag, value in named.items() if value is not None for word in (flag, value)]
    return shlex.join(["outrider", "up", *words, *(() if with_draft else ("--no-draft",))])


def show_all(one: Study, workers: Workers | None, console: Console) -> None:
    """Print the tables, and what to type if they are to be relied on."""
    show(one, console)
    if unsteady(one) is None:
        console.print(f"start with: {start_with(one, workers)}\n", markup=False)


def start_with(one: Study, workers: Workers | None) -> str:
    """Return what to type for the recommendation. workers: the pair that was started here; None for another's."""
    options = one.tried[one.choice.name]
    settings = environment(gateway_settings(options))
    if workers is None:
        return settings
    command = up_command(workers, with_draft=needs_draft(options))
    return f"{settings} {command}" if options.enabled else command


def _commands(workers: Workers) -> dict[str, str]:
    """Return what to type for each deployment that money is measured of."""
    alone = up_command(workers, with_draft=False)
    return {
        PLAIN: alone,
        SPLIT: up_command(workers),
        NGRAM: f"{environment({'drafter': NGRAM})} {alone}",
        COLOCATED: up_command(deployments_of(workers)[COLOCATED]),
    }


def _json(
    served: Model, options: TuneOptions, studies: list[Study], started: Workers | None, money: Money | None
) -> dict[str, Any]:
    return {
        "model": served.id,
        "draft": served.draft_id,
        "num_prompts": len(options.prompts),
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "sampling": options.cuts,
        "studies": [{**to_json(one), "start_with": start_with(one, started)} for one in studies],
        "money": None if money is None else money_to_json(money),
    }
