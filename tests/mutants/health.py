"""Whether a worker may be used: its failures, its pauses, and when it counts as hung."""

from tests.mutants import Mutant
from tests.mutants.operators import always, argument, call, comparison, constant, drop, statement

HEALTH_TESTS, HANG_TESTS = (
    ("tests/unit/outrider/wire/processes/test_health.py",),
    ("tests/unit/outrider/wire/transport/test_hang_watch.py",),
)
PLACEMENT_TESTS = ("tests/unit/gateway/workers/test_request_placement.py",)

HEALTH = (
    Mutant(
        "outrider.wire:Health.note",
        comparison(">=", to="_0 > _1"),
        "a worker that fails is given one request more",
        HEALTH_TESTS,
    ),
    Mutant(
        "outrider.wire:Health.note",
        constant(0, to="self._weight"),
        "failures that lie days apart leave a sound worker alone",
        HEALTH_TESTS,
    ),
    Mutant(
        "outrider.wire:Health.begin",
        statement("_pause", to="self._probe = request"),
        "all requests at once probe a worker that has failed",
        HEALTH_TESTS,
    ),
    Mutant(
        "outrider.wire:Health.note",
        call("min", to="_1"),
        "a worker that was away for long is hardly ever tried again",
        HEALTH_TESTS,
    ),
    Mutant(
        "outrider.wire:Health.note",
        always("_probe"),
        "failures of what was under way when a worker went down prolong its pause",
        HEALTH_TESTS,
    ),
    Mutant(
        "outrider.wire:Health.restarted",
        drop(),
        "a worker that was started again is left alone as if it had failed",
        HEALTH_TESTS,
    ),
    Mutant(
        "gateway.workers:RetryBudget.use_retry",
        statement("-=", to="self._balance -= 1.0"),
        "retries make a bad moment worse",
        HEALTH_TESTS,
    ),
    Mutant(
        "outrider.wire:HangWatch.note_step",
        always(),
        "an engine that hangs while its server answers is never noticed",
        HANG_TESTS,
    ),
    Mutant("outrider.wire:allowed_s", call("max", to="_0"), "a worker whose steps are long counts as hung", HANG_TESTS),
    Mutant(
        "gateway.workers:choose_target",
        call("min", "is_silent", to="(False, False)"),
        "while every target is full no request can be placed",
        PLACEMENT_TESTS,
    ),
    Mutant(
        "gateway.workers:prefix_key",
        argument("blake2b", 0, "cache_salt", to='b""', nth=(2, 2)),
        "the target that a prompt goes to tells what others have asked",
        PLACEMENT_TESTS,
    ),
)
