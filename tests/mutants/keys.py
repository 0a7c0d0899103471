"""API keys and what each may use."""

from tests.mutants import Mutant
from tests.mutants.operators import always, call, drop, never, operation, sibling

CALLER = "gateway.admission:Caller"
SHARING = ("tests/unit/gateway/admission/test_identities.py",)
LIMITS = ("tests/unit/gateway/admission/test_key_limits.py",)
KEYS_TESTS = (*LIMITS, "tests/unit/gateway/admission/test_key_ring.py")

KEYS = (
    Mutant(
        "gateway.admission:_identity",
        call("_digest", "key_name", to='_f(_0, _1, "", _3)'),
        "a user is proposed what another of the same key was answered",
        SHARING,
    ),
    Mutant(
        "gateway.admission:corpus_of",
        never("may_read"),
        "where all share what lookup copies from, explain shows it",
        SHARING,
    ),
    Mutant(
        "outrider.drafting:Corpus.add",
        never("corpus_id"),
        "callers of whom nothing is known are proposed each other's text",
        ("tests/unit/outrider/drafting/test_lookup.py",),
    ),
    Mutant("gateway.admission:KeyRing.find", always(), "whatever is sent as a key gets in", KEYS_TESTS),
    Mutant(
        "gateway.admission:Access.caller",
        never("now"),
        "a key that has expired gets in",
        (*KEYS_TESTS, "tests/service/test_keys.py"),
    ),
    Mutant(
        "gateway.admission:KeyRing.find",
        drop("_reload"),
        "a key that was revoked gets in until the gateway is started again",
        KEYS_TESTS,
    ),
    Mutant(f"{CALLER}.count_request", drop("_charge"), "nothing bounds the requests of a minute", LIMITS),
    Mutant(
        f"{CALLER}.settle",
        operation("-", to="_0"),
        "what was charged before an answer is not given back when it is shorter",
        LIMITS,
    ),
    Mutant(
        "gateway.admission:Bucket.wait_s",
        call("min", "_level", to="_1"),
        "who was silent for an hour may send an hour's requests at once",
        LIMITS,
    ),
    Mutant(f"{CALLER}.count_choices", drop("-="), "a key's answers at once are used up for ever", LIMITS),
    Mutant(
        f"{CALLER}._check_concurrent",
        operation("+", "num_choices", to="_0"),
        "a key has more answers at once than it may",
        LIMITS,
    ),
    Mutant(
        "gateway.admission:_rounded_up",
        sibling("ceil", "floor"),
        "who waits as long as was said is refused again",
        LIMITS,
    ),
)
