"""API keys and what each may use."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, call, drop, never, operation, sibling

CALLER = "gateway.admission:Caller"
SHARING = ("tests/unit/gateway/admission/test_identities.py",)
LIMITS = ("tests/unit/gateway/admission/test_key_limits.py",)
KEYS_TESTS = (*LIMITS, "tests/unit/gateway/admission/test_key_ring.py")

KEYS: Faults = {
    SHARING: {
        "a user is proposed what another of the same key was answered": Fault(
            "gateway.admission:_identity", call("_digest", "key_name", to='_f(_0, _1, "", _3)')
        ),
        "where all share what lookup copies from, explain shows it": Fault(
            "gateway.admission:corpus_of", never("may_read")
        ),
    },
    ("tests/unit/outrider/drafting/test_lookup.py",): {
        "callers of whom nothing is known are proposed each other's text": Fault(
            "outrider.drafting:Corpus.add", never("corpus_id")
        )
    },
    KEYS_TESTS: {
        "whatever is sent as a key gets in": Fault("gateway.admission:KeyRing.find", always()),
        "a key that was revoked gets in until the gateway is started again": Fault(
            "gateway.admission:KeyRing.find", drop("_reload")
        ),
    },
    (*KEYS_TESTS, "tests/service/test_keys.py"): {
        "a key that has expired gets in": Fault("gateway.admission:Access.caller", never("now"))
    },
    LIMITS: {
        "nothing bounds the requests of a minute": Fault(f"{CALLER}.count_request", drop("_charge")),
        "what was charged before an answer is not given back when it is shorter": Fault(
            f"{CALLER}.settle", operation("-", to="_0")
        ),
        "who was silent for an hour may send an hour's requests at once": Fault(
            "gateway.admission:Bucket.wait_s", call("min", "_level", to="_1")
        ),
        "a key's answers at once are used up for ever": Fault(f"{CALLER}.count_choices", drop("-=")),
        "a key has more answers at once than it may": Fault(
            f"{CALLER}._check_concurrent", operation("+", "num_choices", to="_0")
        ),
        "who waits as long as was said is refused again": Fault(
            "gateway.admission:_rounded_up", sibling("ceil", "floor")
        ),
    },
}
