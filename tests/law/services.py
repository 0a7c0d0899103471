"""Workers and gateways of the law's tests. Broken workers stand beside the sound ones; each gateway is a pair."""

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.grammars import WORDS, tokenizer_of
from tests.law.cases import ENCODER_DECODER, MEMORY_KINDS, SPARKS, TOPK, VOCAB_SIZE
from tests.memory_kinds import config_of
from tests.random_heads import (
    random_dflash,
    random_eagle1,
    random_eagle3,
    random_lookahead,
    random_medusa,
    random_mtp,
    random_pard,
    random_peagle,
)
from tests.stack import Process, stop_all
from tests.tiny_models import random_model, save, tiny_llama, tiny_t5

OPTIONS = (
    *("--max-queue-wait-s", "600"),
    *(f"@gateway.workers.worker_pools.{name}=600" for name in ("MIN_SILENCE_S", "ROUND_TIMEOUT_S", "DRAFTS_WAIT_S")),
    f"@gateway.workers.drafts.draft_limits.DEFAULT_TOPK={TOPK}",
    *("--lookup-scope", "shared"),
)
"""Nobody is refused or taken for dead, however slow the machine is, and `lookup` copies from all answers."""
PATIENT = ("@target_service.leases.hold.MAX_HOLD_S=3",)
"""Hardly a draft is ever late: what is tested is speculation, not its fallback."""
ENDLESSLY_PATIENT = ("@target_service.leases.hold.MAX_HOLD_S=600",)
"""No draft is ever late. One that has no slot for an answer, or misses what it reads, is waited for as long."""
HASTY = ("@target_service.leases.hold.MAX_HOLD_S=0.3",)
"""What is late is held back; the rest is in time on a slow machine, too."""
OTHER_WORDS = ("2", "[1", "</s>", "]", "22", "<unk>", "12]", ",", ",1", "11")
"""Four of these are words of the target's, too: they are nodes of its drafts. `1` and `[` are unknown here."""
AUTO_MAX_WHOLE_IDS = 32 * VOCAB_SIZE
"""`auto` sends whole laws of answers that begin beside few others, and cuts those of the rest."""


@dataclass(frozen=True)
class Models:
    """Folders. Two seeds share nothing: the laws differ by about 0.5 in total variation."""

    target: str
    draft: str
    text: str
    """A file in which every pair of words comes, each at its own rate."""
    heads: str
    """A folder with a head of each kind."""
    across: tuple[str, str]
    """Target and draft with encoders, as unrelated."""
    other: str
    """A draft that has words of its own, and half of the target's."""
    second: str
    """A draft of another law."""
    kinds: str
    """A folder with a pair of each of MEMORY_KINDS."""

    def pair(self, group: str) -> tuple[str, str]:
        """Target and draft of a group's cases."""
        if group in MEMORY_KINDS:
            folder = f"{self.kinds}/{group.removeprefix('coupled, ')}"
            return f"{folder}/target", f"{folder}/draft"
        return self.across if group in ENCODER_DECODER else (self.target, self.draft)

    def head(self, kind: str) -> tuple[str, ...]:
        """Options of a draft that is a head. They are random: their wiring is not what is tested here."""
        folder = f"{self.heads}/{kind}"
        target = folder if kind == "mtp" else self.target  # the target's weights are in it, too
        return ("--model", folder, "--target-model", target, "--trust-draft-config")

    @property
    def of_drafters(self) -> tuple[str, ...]:
        """Options of a target: what its own drafters need. Its window holds every word after a step or two."""
        return ("--drafter-text", self.text, "--lookahead", "8,3,4", "--lookahead-embeddings", f"{self.heads}/pass")

    def draft_of(self, drafter: str) -> tuple[str, ...]:
        """Options of a draft without a model."""
        settings = {"bigram": ("--drafter-text", self.text), "lookup": ("@outrider.drafting.lookup.MIN_N=1",)}
        return ("--drafter", drafter, *settings.get(drafter, ()))


def make_models(folder: Path) -> Models:
    def make(name: str, seed: int, size: int = VOCAB_SIZE) -> str:
        tiny_llama(folder / name, size, seed, hidden_size=16, num_layers=1, context=64, sharpness=1.5)
        tokenizer_of(unknown="<unk>").save(str(folder / name / "tokenizer.json"))
        return str(folder / name)

    def make_across(name: str, seed: int) -> str:
        tiny_t5(folder / name, VOCAB_SIZE, seed, num_layers=1)
        tokenizer_of(unknown="<unk>").save(str(folder / name / "tokenizer.json"))
        return str(folder / name)

    text = folder / "text"
    text.write_text(" ".join(Random(1).choices(WORDS[2:], k=400)))
    target, draft = make("target", 4), make("draft", 3)
    heads = folder / "heads"
    random_eagle3(target, heads / "eagle3")
    random_medusa(target, heads / "medusa")
    random_dflash(target, heads / "dflash")
    for name, kind in SPARKS.items():
        random_dflash(target, heads / name, markov=kind)
    random_eagle1(target, heads / "eagle1")
    random_mtp(target, heads / "mtp")
    random_peagle(target, heads / "peagle")
    random_lookahead(target, heads / "pass")
    random_pard(heads / "pard", VOCAB_SIZE)
    tokenizer_of(unknown="<unk>").save(str(heads / "pard" / "tokenizer.json"))
    across = make_across("target_across", 4), make_across("draft_across", 3)
    kinds = folder / "kinds"
    for kind in {group.removeprefix("coupled, ") for group in MEMORY_KINDS}:
        for name, seed in (("target", 4), ("draft", 3)):
            path = kinds / kind / name
            save(random_model(config_of(kind, VOCAB_SIZE), seed), path)
            tokenizer_of(unknown="<unk>").save(str(path / "tokenizer.json"))
    other = make("other", 5, len(OTHER_WORDS))
    _other_tokenizer().save(f"{other}/tokenizer.json")
    return Models(target, draft, str(text), str(heads), across, other, make("second", 6), str(kinds))


def _other_tokenizer() -> Tokenizer:
    """Of words that no merges lead to: one that the target has, and that this one lacks, is unknown here."""
    tokenizer = Tokenizer(models.Unigram([(word, -len(word)) for word in OTHER_WORDS], OTHER_WORDS.index("<unk>")))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in OTHER_WORDS if word[0] == "<"])
    return tokenizer


class Services:
    """Starts each worker at its first use, and a gateway for each pair; `stop` ends them all."""

    def __init__(self, models: Models, log_folder: Path) -> None:
        self.models = models
        self._log_folder = log_folder
        self._started: dict[tuple[str, ...], Process] = {}
        self.draft_of: dict[int, Process] = {}
        """By the id of a gateway's process."""

    def gateway(
        self,
        target_module: str = "target_service",
        draft_module: str = "draft_service",
        gateway_module: str = "gateway",
        options: tuple[str, ...] = OPTIONS,
        target_options: tuple[str, ...] = PATIENT,
        draft_options: tuple[str, ...] = (),
        pair: tuple[str, str] | None = None,
        beside: str | None = None,
    ) -> Process:
        """pair: models, in place of those that most cases have. beside: the model of another pool of drafts."""
        cores = sorted(os.sched_getaffinity(0))
        common = ("--log-level", "error", "--cpu-cores")
        budget = (f"@draft_service.growing.grower.MAX_WHOLE_IDS={AUTO_MAX_WHOLE_IDS}",)
        target_model, draft_model = pair or (self.models.target, self.models.draft)
        of_drafters = self.models.of_drafters if pair is None else ("--drafter-text", self.models.text)
        own = ("--model", target_model, "--max-prefill-tokens", "4096", *of_drafters)
        target = self._start(target_module, *own, *common, str(cores[-1]), *target_options)
        of_draft = ("--model", draft_model, "--metrics-port", "0", *common, str(cores[0]), *budget)
        draft = self._start(draft_module, *of_draft, *draft_options)
        drafts = [draft]
        if beside is not None:
            drafts.append(self._start(draft_module, "--model", beside, "--port", "0", *of_draft[2:], *draft_options))
        workers = ("--target", target.address, "--draft", ";".join(each.address for each in drafts))
        gateway = self._start(gateway_module, *workers, "--port", "0", "--grpc-port", "0", *options)
        self.draft_of[id(gateway)] = draft
        return gateway

    def _start(self, *command: str) -> Process:
        if command not in self._started:
            module, *args = command
            log = self._log_folder / f"{len(self._started)}-{module}.log"
            self._started[command] = Process(module, args, stderr_path=log, wait="--target" in args)
        return self._started[command]

    def stop(self) -> None:
        stop_all(self._started.values())
        self._started.clear()
