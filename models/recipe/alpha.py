"""Measure how often a target accepts its draft's guesses, on text that the target itself writes.

    python -m models.recipe.alpha WORK                                    prompts from WORK/val.bin
    python -m models.recipe.alpha models/demo --prompts tests/data/prompts.jsonl

WORK holds the model folders target/ and draft/. Per temperature, over all positions of all continuations:

rejection   E[sum_i min(target_i, draft_i)], the acceptance rate alpha of Leviathan et al. 2023, Corollary 3.6
coupled     share of positions where target and draft say the same under shared Gumbel noise
bound       E[(1 - TV) / (1 + TV)], which `coupled` never falls below in expectation
top 16, 64  rejection with the draft cut to its best tokens and renormalised
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from models.recipe.pair import END_OF_TEXT_ID, load_model, read_ids, sample_windows


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts padded on the left, so that all continuations begin in one column."""

    ids: torch.Tensor
    """[B, P] int64"""
    mask: torch.Tensor
    """[B, P] int64: 1 for a token, 0 for padding"""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Means over all positions at one temperature."""

    rejection: float
    coupled: float
    coupled_bound: float
    rejection_top16: float
    rejection_top64: float


def prompts_from_val(path: Path, num_prompts: int, num_tokens: int) -> Prompts:
    """Return windows of the held-out ids at fixed pseudo-random places."""
    ids = sample_windows(read_ids(path), num_prompts, num_tokens, np.random.default_rng(3))
    return Prompts(ids, torch.ones_like(ids))


def prompts_from_file(path: Path, model: Path, num_prompts: int, num_tokens: int) -> Prompts:
    """Return the last `num_tokens` tokens of each `prompt` of a JSON-lines file; shorter ones are padded."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [tokenizer.encode(text, add_special_tokens=False)[-num_tokens:] for text in texts[:num_prompts]]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[END_OF_TEXT_ID] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Prompts(ids, mask)


def continuations(target: LlamaForCausalLM, prompts: Prompts, num_new: int, temperature: float) -> torch.Tensor:
    """Return the prompts with `num_new` tokens drawn from the target, [B, P + num_new] int64."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    text: torch.Tensor = target.generate(
        prompts.ids, attention_mask=prompts.mask, max_new_tokens=num_new, min_new_tokens=num_new, **sampling
    )
    return text


def next_token_logits(model: LlamaForCausalLM, text: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    """Return the logits for every continued position, given the text before it, [B, T, V] float32."""
    num_new = text.shape[1] - prompts.ids.shape[1]
    mask = torch.cat([prompts.mask, prompts.mask.new_ones(len(text), num_new)], dim=1)  # [B, P + T]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = model(text, attention_mask=mask, position_ids=positions, logits_to_keep=num_new + 1).logits
    return logits[:, :-1].float()


def cut_to_best(probs: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Return probabilities [..., V] with all but the best set to 0, renormalised."""
    values, ids = probs.topk(min(num_kept, probs.shape[-1]))
    return torch.zeros_like(probs).scatter_(-1, ids, values / values.sum(-1, keepdim=True))


def overlap(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Return 1 - TV of each row, [...] from two [..., V]."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


def measure(target_logits: torch.Tensor, draft_logits: torch.Tensor, temperature: float) -> Acceptance:
    """Return the acceptance for logits [B, T, V] float32 at the same positions. `temperature` must be above 0."""
    target_probs = torch.softmax(target_logits / temperature, -1)  # [B, T, V]
    draft_probs = torch.softmax(draft_logits / temperature, -1)  # [B, T, V]
    alpha = overlap(target_probs, draft_probs)  # [B, T]
    noise = -torch.empty_like(target_probs).exponential_().log()  # [B, T, V] standard Gumbel
    said = (target_probs.log() + noise).argmax(-1)
    guessed = (draft_probs.log() + noise).argmax(-1)
    return Acceptance(
        rejection=alpha.mean().item(),
        coupled=(said == guessed).float().mean().item(),
        coupled_bound=(alpha / (2 - alpha)).mean().item(),  # TV = 1 - alpha
        rejection_top16=overlap(target_probs, cut_to_best(draft_probs, 16)).mean().item(),
        rejection_top64=overlap(target_probs, cut_to_best(draft_probs, 64)).mean().item(),
    )


def greedy_tokens_per_round(matches: torch.Tensor, num_draft_tokens: int) -> float:
    """Return the mean accepted length (1 + accepted / rounds) of greedy decoding, walked round by round.

    `matches` [B, T] bool says where the draft's best token is the target's. Exact, because under greedy the text is the
    target's own whatever was drafted. A round that the end of the text cuts short is not counted.
    """
    num_rounds = num_tokens = 0
    for row in matches.tolist():
        at = 0
        while at + num_draft_tokens < len(row):
            run = row[at : at + num_draft_tokens]
            num_accepted = run.index(False) if False in run else num_draft_tokens
            at += num_accepted + 1
            num_tokens += num_accepted + 1
            num_rounds += 1
    if not num_rounds:
        raise ValueError(f"{matches.shape[1]} tokens a text hold no round of {num_draft_tokens} draft tokens")
    return num_tokens / num_rounds


@torch.inference_mode()
def report(work: Path, prompts: Prompts, num_new: int, temperatures: Sequence[float]) -> None:
    target, draft = (load_model(work / which, torch.float32, "cpu") for which in ("target", "draft"))
    print(f"{len(prompts.ids)} prompts, {num_new} tokens each")
    for temperature in temperatures:
        torch.manual_seed(0)
        text = continuations(target, prompts, num_new, temperature)
        target_logits, draft_logits = (next_token_logits(model, text, prompts) for model in (target, draft))
        if not temperature:
            matches = target_logits.argmax(-1) == draft_logits.argmax(-1)  # [B, T]
            lengths = {k: greedy_tokens_per_round(matches, k) for k in (2, 4, 5, 8) if k < num_new}
            per_round = ", ".join(f"{length:.2f} at K={k}" for k, length in lengths.items())
            print(f"T=0    greedy {matches.float().mean():.3f}   tokens a round: {per_round}")
            continue
        found = measure(target_logits, draft_logits, temperature)
        print(
            f"T={temperature:<4} rejection {found.rejection:.3f}   coupled {found.coupled:.3f} "
            f"(bound {found.coupled_bound:.3f})   "
            f"draft cut to top 16 {found.rejection_top16:.3f}, top 64 {found.rejection_top64:.3f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder with target/ and draft/")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a `prompt` each; default: WORK/val.bin")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens kept of each prompt")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens that the target continues each prompt by")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.6, 1.0])
    args = parser.parse_args(argv)
    for name in ("num_prompts", "prompt_tokens", "new_tokens"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, must be at least 1")
    if bad := [value for value in args.temperatures if not 0 <= value < float("inf")]:
        parser.error(f"--temperatures has {bad[0]}, must be 0 or above and finite")
    if args.prompts:
        prompts = prompts_from_file(args.prompts, args.work / "target", args.num_prompts, args.prompt_tokens)
    else:
        prompts = prompts_from_val(args.work / "val.bin", args.num_prompts, args.prompt_tokens)
    report(args.work, prompts, args.new_tokens, args.temperatures)


if __name__ == "__main__":
    main()
