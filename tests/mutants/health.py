"""Whether a worker may be used: its failures, its pauses, and when it counts as hung."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, argument, call, comparison, constant, drop, statement

HEALTH_TESTS, HANG_TESTS = (
    ("tests/unit/outrider/wire/processes/test_health.py",),
    ("tests/unit/outrider/wire/transport/test_hang_watch.py",),
)
PLACEMENT_TESTS = ("tests/unit/gateway/workers/test_request_placement.py",)

HEALTH: Faults = {
    HEALTH_TESTS: {
        "a worker that fails is given one request more": Fault(
            "outrider.wire:Health.note", comparison(">=", to="_0 > _1")
        ),
        "failures that lie days apart leave a sound worker alone": Fault(
            "outrider.wire:Health.note", constant(0, to="self._weight")
        ),
        "all requests at once probe a worker that has failed": Fault(
            "outrider.wire:Health.begin", statement("_pause", to="self._probe = request")
        ),
        "a worker that was away for long is hardly ever tried again": Fault(
            "outrider.wire:Health.note", call("min", to="_1")
        ),
        "failures of what was under way when a worker went down prolong its pause": Fault(
            "outrider.wire:Health.note", always("_probe")
        ),
        "a worker that was started again is left alone as if it had failed": Fault(
            "outrider.wire:Health.restarted", drop()
        ),
        "retries make a bad moment worse": Fault(
            "gateway.workers:RetryBudget.use_retry", statement("-=", to="self._balance -= 1.0")
        ),
    },
    HANG_TESTS: {
        "an engine that hangs while its server answers is never noticed": Fault(
            "outrider.wire:HangWatch.note_step", always()
        ),
        "a worker whose steps are long counts as hung": Fault("outrider.wire:allowed_s", call("max", to="_0")),
    },
    PLACEMENT_TESTS: {
        "while every target is full no request can be placed": Fault(
            "gateway.workers:choose_target", call("min", "is_silent", to="(False, False)")
        ),
        "the target that a prompt goes to tells what others have asked": Fault(
            "gateway.workers:prefix_key", argument("blake2b", 0, "cache_salt", to='b""', nth=(2, 2))
        ),
    },
}
