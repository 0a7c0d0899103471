"""Every class of transformers that writes text, served from a tiny checkpoint or refused: `make architectures`.

A checkpoint of random weights is saved by transformers' own class, loaded by the loader, and put over ragged rounds
and token trees against a forward of that class without any cache. Each class has a process of its own.
"""

import multiprocessing
import resource
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from outrider.engine.architectures.absent_parts import stand_in_for_timm
from outrider.engine.architectures.layer_memory import layer_types
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.rounds import Truth, largest_error, largest_tree_error, truth_of
from tests.shrunk import VARIANTS, VOCAB, shrunk
from tests.tiny_models import class_of, random_model, save, write_tokenizer

NUM_PROCESSES = 2
MAX_SECONDS = 60
MAX_BYTES = 12 << 30
"""Address space of one class's process: torch alone takes 4 GB of it."""
KV_TOKENS = 1024
STATE, LATENT, CROSS = "running state", "latent", "encoder's"
CONTEXT = multiprocessing.get_context("forkserver")
PATHS = ("fused", "paged", "dense")
"""Those that a CPU has."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of one class."""

    name: str
    class_name: str
    memory: tuple[str, ...] = ()
    """What its decoder's layers keep, a word each."""
    refusal: str | None = None
    """Why it is not served; None where it is."""
    own_error: str | None = None
    """transformers' error where its own class does not run on ids alone."""
    paths: tuple[str, ...] = ()
    """The path that auto takes, and the others that accept it."""
    error: float = 0.0
    """Largest logit error of any path, as a share of the largest logit; trees included where they run."""
    has_trees: bool = False
    features_refusal: str | None = None
    """Why its hidden states cannot be tapped."""
    seconds: float = 0.0

    @property
    def is_served(self) -> bool:
        return self.refusal is None


def class_names() -> dict[str, str]:
    """Return the class that a checkpoint of each model type states, of all that transformers has for writing text."""
    names: dict[str, str] = {}
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        names |= auto._model_mapping._model_mapping
    return names


def row_names() -> list[str]:
    """Return the name of each row: a model type, or a variant of one."""
    return sorted([*class_names(), *VARIANTS])


def measure(name: str) -> Measured:
    """Build, save, load and run one class."""
    model_type, stated = VARIANTS.get(name, (name, {}))
    class_name = class_names()[model_type]
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = shrunk(model_type, **stated)
        except Exception as error:
            return Measured(name, class_name, own_error=one_line(error))
        memory = memory_of(config)
        own_error, model = None, None
        try:
            built = random_model_of(config)
            save(built, folder)
            writer = getattr(built, "thinker", None)  # of a class that only holds several models together
            model = writer or class_of(config).from_pretrained(folder).eval()  # what is in no file is as it will be
            UncachedModel(model).forward([1, 2, 3], [4, 5] if config.is_encoder_decoder else [])
        except Exception as error:  # it is refused for a reason of our own, or runs nowhere
            own_error = one_line(error)
        if model is None:
            save_configuration(config, class_name, folder)
        try:
            return served(Measured(name, class_name, memory, own_error=own_error), model, folder)
        except ConfigError as refusal:
            return Measured(name, class_name, memory, one_line(refusal).replace(folder, model_type), own_error)


def random_model_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Return transformers' own class with random weights, of which no vector is left as it begins, 0 or 1: of
    what is scaled by a number near 0, which is largest would be chance.
    """
    stand_in_for_timm()
    model = random_model(config, seed=3)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            sign = 2 * torch.randint(2, parameter.shape, generator=generator) - 1
            parameter.add_(sign * (0.3 + 0.3 * torch.rand(parameter.shape, generator=generator)))
    return model


def save_configuration(config: PreTrainedConfig, class_name: str, folder: str) -> None:
    """Write a folder without the weights: what is refused from its configuration needs none."""
    config.architectures = [class_name]
    config.save_pretrained(folder)
    save_file({"x": torch.zeros(1)}, f"{folder}/model.safetensors")
    write_tokenizer(folder, VOCAB)


def load(folder: str, path: str) -> ModelRunner:
    """Load a folder as a target, on a path by name. Raises ConfigError."""
    options: dict[str, Any] = {"device": "cpu", "max_slots": 4, "kv_cache_tokens": KV_TOKENS, "attention_path": path}
    return load_runner(TargetConfig(model=folder, **options))


def served(measured: Measured, model: PreTrainedModel, folder: str) -> Measured:
    """Return what the paths do that take the class. model: the truth. Raises ConfigError where none does."""
    truth = truth_of(model)
    chosen = load(folder, "auto")
    errors = {chosen.path.name: error_of(chosen, truth)}
    for path in PATHS[PATHS.index(chosen.path.name) + 1 :]:
        try:
            errors[path] = error_of(load(folder, path), truth)
        except ConfigError:
            continue
    error = max(errors.values(), key=lambda each: (each != each, each))  # NaN is the largest
    reached = {"paths": tuple(errors), "error": error, "has_trees": chosen.supports_trees}
    return replace(measured, **reached, features_refusal=chosen.features_refusal)


def error_of(runner: ModelRunner, truth: Truth) -> float:
    """Return the largest error of ragged rounds, and of token trees where the runner takes them."""
    error = largest_error(runner, truth, relative=True)
    return max(error, largest_tree_error(runner, truth, relative=True)) if runner.supports_trees else error


WORDS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "indexed_attention": "indexer",
    "minimax_m3_sparse": "block indexer",
    "conv": "convolution",
    "hybrid": "convolution and full",
    "hybrid_sliding": "convolution and window",
    "dummy": "shared or none",
    "linear_attention": STATE,
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "compressed",
    "reference_sliding_attention": "prompt and ring",
}
"""What a layer keeps, by transformers' name of its type."""


def memory_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return a word for what each kind of layer keeps; nothing where transformers says nothing of it."""
    try:
        words = [WORDS.get(layer_type, layer_type) for layer_type in layer_types(config)]
        is_stateful = class_of(config)._is_stateful
    except Exception:  # of a class that is no decoder of text
        return ()
    if is_stateful and not {STATE, "compressed"} & {*words}:
        words.append(STATE)
    has_latents = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
    special = [LATENT] * has_latents + [CROSS] * config.is_encoder_decoder
    return tuple(dict.fromkeys([*special, *words]))


def one_line(error: Exception) -> str:
    """Return the class and the first line of an error; of ours, the sentence alone."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text[:200]}"


def measure_all(names: Sequence[str]) -> Iterator[Measured]:
    """Yield what came of each, in order; each in a process of its own, two at a time."""
    CONTEXT.set_forkserver_preload([__name__])  # so that transformers is imported once
    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        yield from threads.map(measure_apart, names)


def measure_apart(name: str) -> Measured:
    """Run `measure` in a process of its own; one that dies or takes too long is a row that says so."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_child, args=(name, sender))
    begun = time.monotonic()
    process.start()
    sender.close()
    try:
        if receiver.poll(MAX_SECONDS):
            return replace(receiver.recv(), seconds=time.monotonic() - begun)
        failure = f"takes more than {MAX_SECONDS} s"
    except EOFError:
        failure = "its process died"
    finally:
        process.kill()
        process.join()
    return Measured(name, "", refusal=failure, own_error=failure)


def _child(name: str, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    torch.set_num_threads(1)  # models this small only lose by more
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        sender.send(measure(name))
    except Exception as error:  # of the loader: a row that shows it
        sender.send(Measured(name, class_names()[VARIANTS.get(name, (name, {}))[0]], refusal=f"BUG: {one_line(error)}"))
        traceback.print_exc()
