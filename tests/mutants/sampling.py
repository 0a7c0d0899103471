"""The law of one token: penalties, truncations, noise, and the draw."""

from tests.mutants import Mutant
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

SAMPLING = (
    Mutant(
        f"{SAMPLING_ROOM}:_edited",
        operation("*", to="_0 / _1"),
        "the repetition penalty makes unlikely tokens more likely",
        DENSE,
    ),
    Mutant(
        f"{SAMPLING_ROOM}:Columns._columns_of",
        never("_prompt"),
        "the repetition penalty ignores the prompt",
        (*DENSE, *HOST),
    ),
    Mutant(
        f"{SAMPLING_ROOM}:Columns.after",
        operation("+", to="_0"),
        "penalties after draft tokens forget what was said before them",
        (*DENSE, *HOST),
    ),
    Mutant(f"{STATE}.set_output", drop("forget_output"), "tokens that were taken back are penalised for ever", DENSE),
    Mutant(f"{STATE}.banned", operation("+", to="_0"), "a round bans the end past the minimum length", (*DENSE, *HOST)),
    Mutant(
        f"{STATE}._context",
        drop_element("draft_prefix"),
        "a bad word that begins in the drafts is completed",
        (*DENSE, *HOST),
    ),
    Mutant(
        f"{SAMPLING_ROOM}:_edge",
        argument("max", 1, to="_ - 1"),
        "top-p leaves out the token that completes its mass",
        HOST,
    ),
    Mutant(f"{SAMPLING_ROOM}:exactly_best", always(), "top-k keeps more than k where several are equal", HOST),
    Mutant(f"{SAMPLING_ROOM}:draw_index", drop("-="), "of a long row mostly the last token of a chunk is drawn", HOST),
    Mutant(
        f"{SAMPLING_ROOM}:TokenDistribution.probs_at",
        call("where", to="_1"),
        "tokens that the draft could not have drawn count as if it could",
        (*HOST, "tests/unit/outrider/engine/sampling/test_acceptance_law.py"),
    ),
    Mutant(
        f"{SAMPLING_ROOM}:host_uniforms",
        drop("rounds"),
        "a later round draws with the numbers of the one before",
        NOISE,
    ),
    Mutant(
        f"{SAMPLING_ROOM}:host_uniforms",
        drop("candidates"),
        "siblings of a tree are kept or rejected by one number",
        NOISE,
    ),
    Mutant(
        f"{SAMPLING_ROOM}:host_uniforms", operation("|", to="_0"), "what keeps a draft token is what drew it", NOISE
    ),
    Mutant(f"{SAMPLING_ROOM}:unit_doubles", call("maximum", to="_0"), "a token of probability 0 can be kept", NOISE),
    Mutant(
        f"{SAMPLING_ROOM}:_purpose", operation("|", to="_1"), "all choices of a coupled request are one text", COUPLED
    ),
    Mutant(
        f"{SAMPLING_ROOM}:_purpose",
        sibling("TARGET", "DRAFT"),
        "what the target draws itself depends on what was drafted",
        COUPLED,
    ),
    Mutant(
        f"{SAMPLING_ROOM}:gumbels_of",
        call("fixed_log", to="-_0"),
        "coupled text does not have the target's law",
        COUPLED,
    ),
)
