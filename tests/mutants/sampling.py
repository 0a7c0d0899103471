"""The law of one token: penalties, truncations, noise, and the draw."""

from tests.mutants import Mutant

PENALTIES, ROW_LAW = "outrider/engine/sampling/penalties.py", "outrider/engine/sampling/row_law.py"
NOISE, COUPLED = "outrider/engine/sampling/noise.py", "outrider/engine/sampling/coupled.py"
WIRE = "outrider/wire/transport/codec.py"
HOST, DENSE = "tests/unit/test_host_sampling.py", "tests/unit/test_sampling.py"

SAMPLING = (
    Mutant(
        PENALTIES,
        "        edited: Array = where(x < 0, x * factor, x / factor) + offset",
        "        edited: Array = x / factor + offset",
        "the repetition penalty makes unlikely tokens more likely",
        (DENSE,),
    ),
    Mutant(
        PENALTIES,
        "        factor = [p.repetition_penalty if n or i in self._prompt else 1.0",
        "        factor = [p.repetition_penalty if n else 1.0",
        "the repetition penalty ignores the prompt",
        (DENSE, HOST),
    ),
    Mutant(
        PENALTIES,
        "return self._with(list(counts), {i: n + self._num_output[i] for i, n in counts.items()})",
        "return self._with(list(counts), dict(counts))",
        "penalties after draft tokens forget what was said before them",
        (DENSE, HOST),
    ),
    Mutant(
        PENALTIES,
        "                self._columns.forget_output()",
        "                pass",
        "tokens that were taken back are penalised for ever",
        (DENSE,),
    ),
    Mutant(
        PENALTIES,
        "        if self._num_output + len(draft_prefix) < self.params.min_tokens:",
        "        if self._num_output < self.params.min_tokens:",
        "a round bans the end past the minimum length",
        (DENSE, HOST),
    ),
    Mutant(
        PENALTIES,
        "        return (*self._prompt_tail, *tail, *draft_prefix)",
        "        return (*self._prompt_tail, *tail)",
        "a bad word that begins in the drafts is completed",
        (DENSE, HOST),
    ),
    Mutant(
        ROW_LAW,
        "    num_kept = max(1, int(np.count_nonzero(before < wanted)))",
        "    num_kept = max(1, int(np.count_nonzero(reached < wanted)))",
        "top-p leaves out the token that completes its mass",
        (HOST,),
    ),
    Mutant(
        ROW_LAW,
        "    return ids if ids.size == n else _without_last_equals(ids, x[ids] == edge, ids.size - n)",
        "    return ids",
        "top-k keeps more than k where several are equal",
        (HOST,),
    ),
    Mutant(
        ROW_LAW,
        "        goal -= float(chunk_cdf[chunk - 1]) if chunk else 0.0\n",
        "",
        "of a long row mostly the last token of a chunk is drawn",
        (HOST,),
    ),
    Mutant(
        ROW_LAW,
        "        return np.where(self.ids[places] == other.ids, mine[places], 0.0)",
        "        return mine[places]",
        "tokens that the draft could not have drawn count as if it could",
        (HOST, "tests/unit/test_acceptance_law.py"),
    ),
    Mutant(
        NOISE,
        "    counter[0] = rounds\n",
        "",
        "a later round draws with the numbers of the one before",
        ("tests/unit/test_noise.py",),
    ),
    Mutant(
        NOISE,
        "    counter[3] = candidates\n",
        "",
        "siblings of a tree are kept or rejected by one number",
        ("tests/unit/test_noise.py",),
    ),
    Mutant(
        NOISE,
        "    counter[2] = choices << np.uint64(8) | np.uint64(purposes)",
        "    counter[2] = choices << np.uint64(8)",
        "what keeps a draft token is what drew it",
        ("tests/unit/test_noise.py",),
    ),
    Mutant(
        NOISE,
        "    return np.maximum(bits.astype(np.float64), 0.5) * 2.0**-53",
        "    return bits.astype(np.float64) * 2.0**-53",
        "a token of probability 0 can be kept",
        ("tests/unit/test_noise.py",),
    ),
    Mutant(
        COUPLED,
        "    return params.choice << 8 | Purpose.TARGET",
        "    return Purpose.TARGET",
        "all choices of a coupled request are one text",
        ("tests/unit/test_coupled.py",),
    ),
    Mutant(
        COUPLED,
        "    return params.choice << 8 | Purpose.TARGET",
        "    return params.choice << 8 | Purpose.DRAFT",
        "what the target draws itself depends on what was drafted",
        ("tests/unit/test_coupled.py",),
    ),
    Mutant(
        COUPLED,
        "    return -fixed_log(-fixed_log(u))",
        "    return -fixed_log(u)",
        "coupled text does not have the target's law",
        ("tests/unit/test_coupled.py",),
    ),
)
