"""Check whether a model's KV cache fails in transformers, too. Called by `attention_choice` when no path passed."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.loading.self_test import TOLERANCE, random_ids, relative_error
from outrider.engine.model_facts import ModelFacts


@torch.inference_mode()
def own_cache_refusal(model: PreTrainedModel, facts: ModelFacts) -> str | None:
    """Test a model with transformers' own KV cache: feed several tokens at once after a prefill, as verifying draft
    tokens does, and compare their logits with the logits of a forward without a cache.

    Returns a clause for an error that says what is wrong; None if the logits agree. The test's sequence repeats a few
    token ids, so that classes that select keys by their scores are also tested with keys of equal scores.
    """
    generator = random.Random(3)
    few = random_ids(generator, facts.vocab_size, 8)
    num_tokens = min(48, facts.context_limit)
    ids = torch.tensor([generator.choices(few, k=num_tokens)], device=model.device)  # [1, T] int64
    begin = num_tokens // 2
    end = begin + 6
    tolerance = TOLERANCE[facts.dtype]
    name = "input_ids"
    inputs: dict[str, Tensor] = {}
    if facts.decoder_start_ids:
        name = "decoder_input_ids"
        inputs = {"input_ids": ids}
    try:
        reference = model(**inputs, **{name: ids}, use_cache=False).logits[0]  # [T, V] in the model's dtype
        prefill = model(**inputs, **{name: ids[:, :begin]}, use_cache=True)
        is_causal = relative_error(prefill.logits[0], reference[:begin]) <= tolerance
        if not is_causal and getattr(model.config, "is_decoder", None) is False:
            return "it reads its text in both directions (is_decoder is false in config.json)"
        more = {name: ids[:, begin:end], "past_key_values": prefill.past_key_values}
        logits = model(**inputs, **more, use_cache=True).logits[0]  # [6, V]
        is_right = relative_error(logits, reference[begin:end]) <= tolerance
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the class does with it
        return "in transformers, too, its cache takes no several tokens at once behind others"
    if is_right:
        return None
    return "in transformers, too, several tokens fed behind its cache get other logits than without a cache"
