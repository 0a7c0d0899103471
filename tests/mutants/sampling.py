"""The law of one token: penalties, truncations, noise, and the draw."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, argument, call, drop, drop_element, never, operation, sibling

SAMPLING_ROOM = "outrider.engine.sampling"
STATE = f"{SAMPLING_ROOM}:SamplingState"
HOST = (
    "tests/unit/outrider/engine/sampling/test_host_sampling.py",
    "tests/unit/outrider/engine/sampling/test_token_distribution.py",
)
DENSE = (
    "tests/unit/outrider/engine/sampling/test_device_sampling.py",
    "tests/unit/outrider/engine/sampling/test_penalties.py",
)
NOISE, COUPLED = (
    ("tests/unit/outrider/engine/sampling/test_noise.py",),
    ("tests/unit/outrider/engine/sampling/test_coupled.py",),
)

SAMPLING: Faults = {
    DENSE: {
        "the repetition penalty makes unlikely tokens more likely": Fault(
            f"{SAMPLING_ROOM}:_edited", operation("*", to="_0 / _1")
        ),
        "tokens that were taken back are penalised for ever": Fault(f"{STATE}.set_output", drop("forget_output")),
    },
    (*DENSE, *HOST): {
        "the repetition penalty ignores the prompt": Fault(f"{SAMPLING_ROOM}:Columns._columns_of", never("_prompt")),
        "penalties after draft tokens forget what was said before them": Fault(
            f"{SAMPLING_ROOM}:Columns.after", operation("+", to="_0")
        ),
        "a round bans the end past the minimum length": Fault(f"{STATE}.banned", operation("+", to="_0")),
        "a bad word that begins in the drafts is completed": Fault(f"{STATE}._context", drop_element("draft_prefix")),
    },
    HOST: {
        "top-p leaves out the token that completes its mass": Fault(
            f"{SAMPLING_ROOM}:_edge", argument("max", 1, to="_ - 1")
        ),
        "top-k keeps more than k where several are equal": Fault(f"{SAMPLING_ROOM}:exactly_best", always()),
        "of a long row mostly the last token of a chunk is drawn": Fault(f"{SAMPLING_ROOM}:draw_index", drop("-=")),
    },
    (*HOST, "tests/unit/outrider/engine/sampling/test_acceptance_law.py"): {
        "tokens that the draft could not have drawn count as if it could": Fault(
            f"{SAMPLING_ROOM}:TokenDistribution.probs_at", call("where", to="_1")
        )
    },
    NOISE: {
        "a later round draws with the numbers of the one before": Fault(
            f"{SAMPLING_ROOM}:host_uniforms", drop("rounds")
        ),
        "siblings of a tree are kept or rejected by one number": Fault(
            f"{SAMPLING_ROOM}:host_uniforms", drop("sample_indices")
        ),
        "what keeps a draft token is what drew it": Fault(f"{SAMPLING_ROOM}:host_uniforms", operation("|", to="_0")),
        "a token of probability 0 can be kept": Fault(f"{SAMPLING_ROOM}:unit_doubles", call("maximum", to="_0")),
    },
    COUPLED: {
        "all choices of a coupled request are one text": Fault(f"{SAMPLING_ROOM}:_purpose", operation("|", to="_1")),
        "what the target draws itself depends on what was drafted": Fault(
            f"{SAMPLING_ROOM}:_purpose", sibling("TARGET", "DRAFT")
        ),
        "coupled text does not have the target's law": Fault(
            f"{SAMPLING_ROOM}:gumbels_of", call("fixed_log", to="-_0")
        ),
    },
}
