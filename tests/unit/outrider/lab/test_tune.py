"""`outrider tune`: what it refuses, before anything was measured and by whom it asks."""

import signal
from collections.abc import Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.lab import tune
from tests.unit.outrider.lab.tuning.known_study import studied

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """The command takes them; in a test it is a guest."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def tuned(*args: str) -> Result:
    return CliRunner().invoke(app, ["tune", *args])


def refused(made: Result, *words: str) -> None:
    assert made.exit_code == 1 and not made.stdout
    assert made.stderr.strip().count("\n") == 0, made.stderr
    for word in words:
        assert word in made.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-tokens", "25"), ("--max-tokens is 25", "26")),
        (("--max-k", "0"), ("--max-k is 0", "at least 1")),
        (("--max-k", "65", "--max-tokens", "200"), ("--max-k is 65", "at most 64")),
        (("--repeats", "0"), ("--repeats is 0",)),
        (("--num-prompts", "0"), ("--num-prompts is 0",)),
        (("--target", "models/x"), ("--target models/x without --draft",)),
        (("--draft", "models/x"), ("--draft models/x without --target",)),
        (("--draft", "ngram"), ("--draft ngram is no model", "--draft FOLDER")),
        (("--target", "models/x", "--draft", "bigram:a.txt"), ("--draft bigram:a.txt is no model",)),
        (("--draft", "models/x", "--draft", "models/y"), ("--draft is there twice, as models/x and models/y",)),
        (("--address", "127.0.0.1:1", "--target", "models/x"), ("--target and --address",)),
        (("--address", "127.0.0.1:1", "--dtype", "float32"), ("--dtype and --address",)),
        (("--address", "127.0.0.1:1", "--price", "target=2,draft=1"), ("--price and --address",)),
        (("--price", "target=2"), ("--price is 'target=2'", "target=2.5,draft=0.4")),
        (("--price", "target=1,target=2,draft=1"), ("--price is 'target=1,target=2,draft=1'",)),
        (("--price", "target=2,draft=x"), ("--price has 'draft=x'",)),
        (("--price", "target=2,draft=0"), ("--price is 'target=2,draft=0'",)),
        (("--seconds", "3"), ("--concurrency and --seconds are of --price",)),
        (("--price", "target=2,draft=1", "--concurrency", "0"), ("--concurrency is 0, must be at least 1",)),
        (
            ("--price", "target=2,draft=1", "--target-cores", "0", "--draft-cores", "0"),
            ("the pair is to be on one device and on two, and both would be on 0",),
        ),
        (("--prompts", "/nowhere.jsonl"), ("cannot read prompts from /nowhere.jsonl",)),
        (("--png", "curve.pdf"), ("curve.pdf", "must end in .png")),
        (("--png", "/nowhere/curve.png"), ("no folder /nowhere",)),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_what_cannot_be_is_refused_at_once(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(tuned(*args), *words)


def test_no_server() -> None:
    refused(tuned("--address", "127.0.0.1:1", "--timeout", "5"), "127.0.0.1:1")


# ---- what to type


PAIR = {
    "target": {"model": "big", "device": "cuda:0", "dtype": "bfloat16", "cpu_cores": None},
    "draft": {"model": "small", "device": None, "dtype": "bfloat16", "cpu_cores": "0"},
}


def test_the_pair_is_started_as_it_was_measured() -> None:
    command = tune.up_command(PAIR)
    assert command == "outrider up --target big --draft small --target-device cuda:0 --dtype bfloat16 --draft-cores 0"
    assert tune.up_command(PAIR, with_draft=False) == (
        "outrider up --target big --target-device cuda:0 --dtype bfloat16 --no-draft"
    )


def test_what_to_start_with_is_the_recommendation() -> None:
    study = studied()
    words = tune.start_with(study, None)
    assert words.startswith("OUTRIDER_GATEWAY_NUM_DRAFT_TOKENS=4 OUTRIDER_GATEWAY_DRAFTER=lookup+model ")
    assert tune.start_with(study, PAIR) == f"{words} {tune.up_command(PAIR)}"
    plain = studied(faster_alone=True)
    assert tune.start_with(plain, None) == "OUTRIDER_GATEWAY_NUM_DRAFT_TOKENS=0"
    assert tune.start_with(plain, PAIR) == tune.up_command(PAIR, with_draft=False)
    ngram = studied(fastest="K = 4, ngram")
    words = tune.start_with(ngram, PAIR)
    assert "OUTRIDER_GATEWAY_DRAFTER=ngram" in words and words.endswith(tune.up_command(PAIR, with_draft=False))
