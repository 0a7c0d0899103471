"""Whether a worker may be used: its failures, its pauses, and when it counts as hung."""

from tests.mutants import Mutant

PEER, HANGS = "outrider/wire/health.py", "outrider/wire/transport/hang_watch.py"
RETRIES, PLACEMENT = "gateway/workers/retry_budget.py", "gateway/workers/placement.py"
HEALTH_TESTS, HANG_TESTS = ("tests/unit/test_health.py",), ("tests/unit/test_hang_watch.py",)
PLACEMENT_TESTS = ("tests/unit/test_placement_of_requests.py",)

HEALTH = (
    Mutant(
        PEER,
        "            if self._weight >= _DOWN:",
        "            if self._weight > _DOWN:",
        "a worker that fails is given one request more",
        HEALTH_TESTS,
    ),
    Mutant(
        PEER,
        "            self.is_down, self._probe, self._weight, self._pause_s = False, None, 0, FIRST_PAUSE_S",
        "            self.is_down, self._probe, self._pause_s = False, None, FIRST_PAUSE_S",
        "failures that lie days apart leave a sound worker alone",
        HEALTH_TESTS,
    ),
    Mutant(
        PEER,
        "        if self.is_down:\n            self._pause(request)",
        "        if self.is_down:\n            self._probe = request",
        "all requests at once probe a worker that has failed",
        HEALTH_TESTS,
    ),
    Mutant(
        PEER,
        "            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)",
        "            self._pause_s = 2 * self._pause_s",
        "a worker that was away for long is hardly ever tried again",
        HEALTH_TESTS,
    ),
    Mutant(
        PEER,
        "        elif self._probe is not None:",
        "        else:",
        "failures of what was under way when a worker went down prolong its pause",
        HEALTH_TESTS,
    ),
    Mutant(
        PEER,
        "        self._probe_from_s = self._clock()",
        "        pass",
        "a worker that was started again is left alone as if it had failed",
        HEALTH_TESTS,
    ),
    Mutant(
        RETRIES,
        "        self._balance -= REQUESTS_PER_RETRY",
        "        self._balance -= 1.0",
        "retries make a bad moment worse",
        HEALTH_TESTS,
    ),
    Mutant(
        HANGS,
        "        if num_steps != self._num_steps:\n            self._num_steps, self._alive_s = num_steps, now",
        "        self._num_steps, self._alive_s = num_steps, now",
        "an engine that hangs while its server answers is never noticed",
        HANG_TESTS,
    ),
    Mutant(
        HANGS,
        "    return min(most_s, max(least_s, STEPS * longest_step_s)) if longest_step_s else most_s",
        "    return least_s",
        "a worker whose steps are long counts as hung",
        HANG_TESTS,
    ),
    Mutant(
        PLACEMENT,
        "    best = min((load.silent, load.full) for load in targets)",
        "    best = (False, False)",
        "while every target is full no request can be placed",
        PLACEMENT_TESTS,
    ),
    Mutant(
        PLACEMENT,
        "hashlib.blake2b(cache_salt, digest_size=32)",
        'hashlib.blake2b(b"", digest_size=32)',
        "the target that a prompt goes to tells what others have asked",
        PLACEMENT_TESTS,
    ),
)
