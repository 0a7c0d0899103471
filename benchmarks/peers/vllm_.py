"""Run vLLM's offline `LLM`, compiled as it is by default. A draft is fixed at its start, so there are two of it."""

from __future__ import annotations

from protocol import NGRAM, Answer, Job, Lacks, Setup, in_groups, serve


class Vllm:
    def __init__(self, setup: Setup) -> None:
        import vllm

        self.version = f"vLLM {vllm.__version__}"
        self._sampling = vllm.SamplingParams
        common = {
            "model": setup.target,
            "dtype": setup.dtype,
            "max_model_len": setup.context,
            "max_num_seqs": setup.max_concurrency,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "enforce_eager": bool(setup.options.get("eager")),
        }
        draft = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": NGRAM}
        if setup.draft:
            draft = {
                "method": "draft_model",
                "model": setup.draft,
                "draft_sample_method": "probabilistic",  # as ours; its default guesses the best at any temperature
            }
        draft["num_speculative_tokens"] = setup.num_draft_tokens
        self._plain = vllm.LLM(**common)
        self._drafted, self._why_not = None, ""
        try:
            self._drafted = vllm.LLM(**common, speculative_config=draft)
        except Exception as error:  # whatever a version has against this pair
            self._why_not = f"does not start with this draft: {type(error).__name__}: {str(error).splitlines()[0]}"

    def run(self, job: Job) -> Answer | list[list[int]]:
        import time

        llm = self._drafted if job.speculative else self._plain
        if llm is None:
            raise Lacks(self._why_not)
        before, started = _counters(llm), time.perf_counter()
        params = self._sampling(
            temperature=job.temperature, max_tokens=job.max_tokens, ignore_eos=True, seed=job.seed, detokenize=False
        )
        outputs = []
        for group in in_groups(job.prompts, job.concurrency):
            made = llm.generate([{"prompt_token_ids": ids} for ids in group], params, use_tqdm=False)
            outputs += [list(each.outputs[0].token_ids) for each in made]
        elapsed = time.perf_counter() - started
        drafted, accepted = (after - then for after, then in zip(_counters(llm), before, strict=True))
        return Answer(outputs, elapsed, drafted or None, accepted if drafted else None)

    def close(self) -> None: ...


def _counters(llm: object) -> tuple[int, int]:
    """Return the tokens drafted and accepted so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}  # type: ignore[attr-defined]
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return tuple(int(values.get(name, 0)) for name in names)  # type: ignore[return-value]


if __name__ == "__main__":
    serve(Vllm)
