"""API keys and what each may use."""

from tests.mutants import Mutant

ACCESS = "gateway/admission/keys.py"
REQUESTS, SHARING = "gateway/admission/requests.py", ("tests/unit/test_cache_salt.py",)
LIMITS, KEYS_TESTS = ("tests/unit/test_key_limits.py",), ("tests/unit/test_api_keys.py",)

KEYS = (
    Mutant(
        REQUESTS,
        '        return _digest(b"key", key_name, user or "", salt or "")',
        '        return _digest(b"key", key_name, "", salt or "")',
        "a user is proposed what another of the same key was answered",
        SHARING,
    ),
    Mutant(
        REQUESTS,
        '    return b"" if may_read else _digest',
        "    return _digest",
        "where all share what lookup copies from, explain shows it",
        SHARING,
    ),
    Mutant(
        "outrider/drafting/lookup.py",
        "        if not corpus_id or len(kept)",
        "        if len(kept)",
        "callers of whom nothing is known are proposed each other's text",
        ("tests/unit/test_lookup.py",),
    ),
    Mutant(
        ACCESS,
        "            if hmac.compare_digest(key.sha256, digest):",
        "            if key.sha256:",
        "whatever is sent as a key gets in",
        KEYS_TESTS,
    ),
    Mutant(
        ACCESS,
        "        if key.expires is not None and key.expires <= datetime.now(UTC):",
        "        if False:",
        "a key that has expired gets in",
        (*KEYS_TESTS, "tests/service/test_keys.py"),
    ),
    Mutant(
        ACCESS,
        "        self._look()\n        digest",
        "        digest",
        "a key that was revoked gets in until the gateway is started again",
        KEYS_TESTS,
    ),
    Mutant(
        ACCESS,
        '            self._take("requests_per_minute", self._requests, 1)\n',
        "",
        "nothing bounds the requests of a minute",
        LIMITS,
    ),
    Mutant(
        ACCESS,
        "            self._tokens.take(num_prompt + num_output - num_charged)",
        "            self._tokens.take(num_prompt + num_output)",
        "what was charged before an answer is not given back when it is shorter",
        LIMITS,
    ),
    Mutant(
        ACCESS,
        "        self._level = min(self.per_minute, self._level + ",
        "        self._level = (self._level + ",
        "who was silent for an hour may send an hour's requests at once",
        LIMITS,
    ),
    Mutant(
        ACCESS,
        "        finally:\n            self.num_answers -= count",
        "        finally:\n            pass",
        "a key's answers at once are used up for ever",
        LIMITS,
    ),
    Mutant(
        ACCESS,
        "        if most is not None and self.num_answers + count > most:",
        "        if most is not None and self.num_answers > most:",
        "a key has more answers at once than it may",
        LIMITS,
    ),
    Mutant(
        ACCESS,
        "    return math.ceil(wait_s / unit) * unit",
        "    return math.floor(wait_s / unit) * unit",
        "who waits as long as was said is refused again",
        LIMITS,
    ),
)
