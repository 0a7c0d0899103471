"""vLLM's flags, as `outrider up` and `outrider serve` take them: one table of what each is here.

Names are those of vLLM 0.15's documentation and of some releases before. docs/vllm.md is for people.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.cli.up.speculative_config import draft_flags
from outrider.wire.errors import ConfigError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""What vLLM's numbers may end in, and by how much they are then multiplied."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """What stands here for one of vLLM's flags."""

    ours: Sequence[str] = ()
    """Flags of `outrider up` that get its value; or, for a flag without a value, that stand in its place."""
    takes: str = "one"
    """How many values it has: "none", "one", or "several", each of which becomes a flag of its own."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Values that are called otherwise here; "" = leave the flag out, for that is so without it."""
    reads: Callable[[str], str] | None = None
    """Turns a value into ours. Raises ValueError."""
    note: str = ""
    """What is said where it is taken, and something has to be known of it."""
    refused: str = ""
    """What to type instead, of a flag that is not taken."""


def _whole(text: str) -> str:
    """Return a number that may be written 8k or 8K, as vLLM takes it."""
    factor = _SUFFIXES.get(text[-1:], 0)
    return str(int(float(text[:-1]) * factor)) if factor else str(int(text))


def _list(text: str) -> str:
    """Return a list in JSON with commas between."""
    return ",".join(json.loads(text)) if text.startswith("[") else text


_SO_ANYWAY = "so anyway"
_READ_ANYWAY = "tool calls and reasoning are read in the form of the model's chat template; nothing is to be named"
_LEAVE_OUT = "leave it out"
_OF_CHECKPOINT = "a checkpoint that is quantised says so itself"
_METHODS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "torchao", "gguf")
_NO_LORA = "adapters are not served; merge one into the weights, and serve that folder"
_TLS = "--public-tls-dir FOLDER, with cert.pem and key.pem, and ca.pem where users show certificates"
_SPECULATIVE = """--speculative-config '{"model": MODEL, "num_speculative_tokens": 5}', or --draft MODEL -K 5"""
_POOLS = "--config FILE with targets: {NAME: {model: MODEL, count: 2}}, several whole targets behind one gateway"
_IMAGES = "models that read images or sound are served for text alone"

FLAGS: dict[str, VllmFlag] = {
    # the model
    "--model": VllmFlag(["--target"]),
    "--served-model-name": VllmFlag(["--model-name"], takes="several"),
    "--tokenizer": VllmFlag(refused=f"{_LEAVE_OUT}: the model's own is read, from its folder"),
    "--tokenizer-mode": VllmFlag(words={"auto": "", "hf": ""}, refused=f"{_LEAVE_OUT}: tokenizer.json is read"),
    "--skip-tokenizer-init": VllmFlag(takes="none", refused=f"{_LEAVE_OUT}: prompts of ids are taken all the same"),
    "--revision": VllmFlag(refused="outrider pull MODEL --revision REVISION, and start the folder that it prints"),
    "--code-revision": VllmFlag(refused=f"{_LEAVE_OUT}: no model's own code is run"),
    "--tokenizer-revision": VllmFlag(refused="outrider pull MODEL --revision REVISION, and start that folder"),
    "--trust-remote-code": VllmFlag(
        takes="none",
        refused=f"{_LEAVE_OUT}: no model's own code is run; `outrider doctor --target MODEL` says if it is served",
    ),
    "--download-dir": VllmFlag(refused="HF_HOME=FOLDER in the environment"),
    "--load-format": VllmFlag(
        words={"auto": "", "safetensors": ""}, refused=f"{_LEAVE_OUT}: the files themselves say their format"
    ),
    "--config-format": VllmFlag(words={"auto": "", "hf": ""}, refused=f"{_LEAVE_OUT}: config.json is read"),
    "--hf-overrides": VllmFlag(refused="edit config.json in the model's folder"),
    "--rope-scaling": VllmFlag(refused="edit rope_scaling in the model's config.json"),
    "--rope-theta": VllmFlag(refused="edit rope_theta in the model's config.json"),
    "--task": VllmFlag(words={"auto": "", "generate": ""}, refused=f"{_LEAVE_OUT}: models are served for text alone"),
    "--runner": VllmFlag(words={"auto": "", "generate": ""}, refused=f"{_LEAVE_OUT}: models are served for text alone"),
    "--model-impl": VllmFlag(refused=f"{_LEAVE_OUT}: `outrider doctor --target MODEL` says whether a model is served"),
    "--dtype": VllmFlag(["--dtype"], words={"half": "float16", "float": "float32"}),
    "--quantization": VllmFlag(
        ["--target-quantization"],
        words={**dict.fromkeys(_METHODS, ""), "int8": "int8", "none": "none"},
        note=f"{_OF_CHECKPOINT}; --quantization int8 rounds whole weights at load",
        refused=f"{_LEAVE_OUT}: {_OF_CHECKPOINT}; or --quantization int8, which rounds whole weights at load",
    ),
    "--max-model-len": VllmFlag(["--target-context-limit"], words={"auto": "", "-1": ""}, reads=_whole),
    "--enable-lora": VllmFlag(takes="none", refused=_NO_LORA),
    "--lora-modules": VllmFlag(takes="several", refused=_NO_LORA),
    "--limit-mm-per-prompt": VllmFlag(refused=f"{_LEAVE_OUT}: {_IMAGES}"),
    "--language-model-only": VllmFlag(takes="none", note=_SO_ANYWAY),
    # memory and batches
    "--gpu-memory-utilization": VllmFlag(["--gpu-memory-utilization"]),
    "--max-num-seqs": VllmFlag(
        ["--max-running", "--target-max-slots", "--draft-max-slots"],
        reads=_whole,
    ),
    "--max-num-batched-tokens": VllmFlag(["--target-max-prefill-tokens"], reads=_whole),
    "--num-gpu-blocks-override": VllmFlag(refused="--target-kv-cache-tokens TOKENS"),
    "--kv-cache-memory-bytes": VllmFlag(refused="--target-kv-cache-tokens TOKENS, or --target-kv-cache-fraction"),
    "--kv-cache-dtype": VllmFlag(words={"auto": ""}, refused=f"{_LEAVE_OUT}: the KV cache has the weights' dtype"),
    "--block-size": VllmFlag(refused=f"{_LEAVE_OUT}: the engine chooses its blocks"),
    "--swap-space": VllmFlag(refused=f"{_LEAVE_OUT}: nothing is swapped; what does not fit waits"),
    "--cpu-offload-gb": VllmFlag(
        refused=f"{_LEAVE_OUT}: weights stay on their device; --quantization int8 halves them"
    ),
    "--enable-prefix-caching": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--no-enable-prefix-caching": VllmFlag(["--no-target-prefix-caching", "--no-draft-prefix-caching"], takes="none"),
    "--enable-chunked-prefill": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--scheduling-policy": VllmFlag(words={"priority": "", "fcfs": ""}, note="a request's priority counts, and is 0"),
    "--async-scheduling": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--enforce-eager": VllmFlag(takes="none", refused=f"{_LEAVE_OUT}: graphs are captured where they pass a self-test"),
    "--compilation-config": VllmFlag(refused=f"{_LEAVE_OUT}: nothing is compiled by settings"),
    "--max-logprobs": VllmFlag(refused=f"{_LEAVE_OUT}: a request may ask for 20"),
    # devices
    "--tensor-parallel-size": VllmFlag(["--target-tensor-parallel"]),
    "--pipeline-parallel-size": VllmFlag(
        words={"1": ""}, refused="--tensor-parallel-size: a target is split by tensors"
    ),
    "--data-parallel-size": VllmFlag(words={"1": ""}, refused=_POOLS),
    "--enable-expert-parallel": VllmFlag(takes="none", refused="--tensor-parallel-size, which splits experts, too"),
    "--distributed-executor-backend": VllmFlag(
        words={"ray": ""}, refused="--no-ray for plain processes; absent, Ray starts the workers"
    ),
    "--device": VllmFlag(["--target-device", "--draft-device"]),
    "--attention-backend": VllmFlag(words={"auto": ""}, refused="--target-attention-path, auto unless set"),
    # the server
    "--api-key": VllmFlag(["--api-key"], takes="several"),
    "--allowed-origins": VllmFlag(["--allowed-origins"], reads=_list),
    "--chat-template-content-format": VllmFlag(
        words={"auto": "", "string": "", "openai": ""}, note="the template itself shows which form it takes"
    ),
    "--response-role": VllmFlag(words={"assistant": ""}, refused=f"{_LEAVE_OUT}: answers are the assistant's"),
    "--enable-auto-tool-choice": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--tool-call-parser": VllmFlag(note=_READ_ANYWAY),
    "--tool-parser-plugin": VllmFlag(refused=f"{_LEAVE_OUT}: {_READ_ANYWAY}"),
    "--reasoning-parser": VllmFlag(note=_READ_ANYWAY),
    "--enable-reasoning": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--guided-decoding-backend": VllmFlag(note="llguidance holds every grammar"),
    "--structured-outputs-config": VllmFlag(refused=f"{_LEAVE_OUT}: llguidance holds every grammar"),
    "--enable-prompt-tokens-details": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--enable-request-id-headers": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--enable-tokenizer-info-endpoint": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--enable-force-include-usage": VllmFlag(takes="none", refused="stream_options.include_usage of the request"),
    "--return-tokens-as-token-ids": VllmFlag(takes="none", refused="return_token_ids of the request"),
    "--disable-log-requests": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--no-enable-log-requests": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--enable-log-requests": VllmFlag(takes="none", refused="--log-level info --verbose: a line for each request"),
    "--disable-log-stats": VllmFlag(
        takes="none", note="statistics are at /metrics and in `outrider top`, not in the log"
    ),
    "--uvicorn-log-level": VllmFlag(refused="--log-level"),
    "--disable-uvicorn-access-log": VllmFlag(takes="none", note=_SO_ANYWAY),
    "--otlp-traces-endpoint": VllmFlag(["--trace-endpoint", "--target-trace-endpoint", "--draft-trace-endpoint"]),
    "--ssl-keyfile": VllmFlag(refused=_TLS),
    "--ssl-certfile": VllmFlag(refused=_TLS),
    "--ssl-ca-certs": VllmFlag(refused=_TLS),
    "--root-path": VllmFlag(refused=f"{_LEAVE_OUT}: strip the prefix in the proxy"),
    "--middleware": VllmFlag(refused=f"{_LEAVE_OUT}: put a proxy in front"),
    "--uds": VllmFlag(refused="--host 127.0.0.1 --port PORT"),
    "--api-server-count": VllmFlag(words={"1": ""}, refused="--config FILE with gateways: 2"),
    "--headless": VllmFlag(takes="none", refused="python -m deploy.launcher, the workers without a gateway"),
    "--seed": VllmFlag(refused="seed of each request; a draw depends on nothing else"),
    "--generation-config": VllmFlag(
        ["--generation-config"],
        words={"auto": "auto", "none": "none", "vllm": "vllm"},
        refused="auto or vllm, with that folder's generation_config.json in the model's folder",
    ),
    "--override-generation-config": VllmFlag(refused="the values in the requests"),
    # drafting
    "--speculative-model": VllmFlag(refused=_SPECULATIVE),
    "--num-speculative-tokens": VllmFlag(refused=_SPECULATIVE),
    "--ngram-prompt-lookup-max": VllmFlag(refused="--no-draft --drafter ngram"),
    "--ngram-prompt-lookup-min": VllmFlag(refused="--no-draft --drafter ngram"),
    "--speculative-draft-tensor-parallel-size": VllmFlag(refused=f"{_LEAVE_OUT}: a draft is not split"),
}
"""By vLLM's name. A name that is the same here, and whose values are, too, is in no table."""

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-asc": "--api-server-count",
}
"""vLLM's short names."""
_OPTIMIZATION = re.compile(r"^-O(?=\d)")
"""Beginning of vLLM's -O3, which has its value in one word with it."""
_SPECULATION = "--speculative-config"
_SIMILAR = 0.75
"""Least likeness, by difflib from 0 to 1, of a flag that may be meant: room for a slip or two."""


class _NotTaken(ConfigError):
    """A flag of vLLM's that does nothing here."""


def translated(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line with our flags in place of vLLM's, and what to say of those.

    What is no flag of vLLM's stays as it is. Raises ConfigError for all flags that are not taken, with what to type,
    and for a value that is wrong.
    """
    ours: list[str] = []
    notes: list[str] = []
    refused: list[str] = []
    speculation: dict[str, object] = {}
    has_speculation = False
    rest = list(args)
    while rest:
        written = _OPTIMIZATION.sub("-O=", rest.pop(0))
        name, _, value = written.partition("=")
        name = SHORT.get(name, name)
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name == _SPECULATION or name.startswith(f"{_SPECULATION}."):
            has_speculation = True
            text = value if "=" in written else _next_value(name, rest)
            speculation.update(_speculation_of(name, text))
        elif name in FLAGS:
            values = [value] if "=" in written else _values(name, FLAGS[name], rest)
            if name == "--api-key" and len(values) > 1 and not _names_model(args):
                raise ConfigError(
                    f"{name} has {len(values)} values, and no model stands in front of them; say MODEL {name} KEY"
                )
            try:
                flags, note = _ours(name, FLAGS[name], values)
            except _NotTaken as error:
                refused.append(error.message)
                continue
            ours += flags
            notes += [note] if note else []
        elif (switch := FLAGS.get(name.replace("--no-", "--", 1))) is not None and switch.takes == "none":
            if switch.refused:
                notes.append(_said(name, _SO_ANYWAY))
            else:
                refused.append(f"{name} is vLLM's, and not taken here; instead: {_LEAVE_OUT}: it is always so here")
        else:
            ours.append(f"{name}={value}" if "=" in written and name.startswith("--") else written)
    if refused:
        raise ConfigError(". ".join(refused))
    if has_speculation:
        flags, said = draft_flags(speculation)
        ours += flags
        notes += said
    return ours, notes


def similar_flags(written: str, ours: Sequence[str]) -> list[str]:
    """Return the flags, of `ours` and of vLLM's, whose names are nearest to one that is not known, best first."""
    known = {*ours, *FLAGS, _SPECULATION}
    return difflib.get_close_matches(written.replace("_", "-"), known, n=2, cutoff=_SIMILAR)


def _names_model(args: Sequence[str]) -> bool:
    names = {arg.partition("=")[0] for arg in args}
    return not args[0].startswith("-") or not names.isdisjoint(("--model", "--target", "--config"))


def _values(name: str, flag: VllmFlag, rest: list[str]) -> list[str]:
    """Take a flag's values off the rest of the command line."""
    if flag.takes == "none":
        return []
    values = [_next_value(name, rest)]
    while flag.takes == "several" and rest and not rest[0].startswith("-"):
        values.append(rest.pop(0))
    return values


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or (rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0])):
        raise ConfigError(f"{name} has no value; say {name} VALUE")
    return rest.pop(0)


def _ours(name: str, flag: VllmFlag, values: Sequence[str]) -> tuple[list[str], str]:
    """Return what stands for a flag with these values, and what to say of it."""
    is_known = bool(values) and all(value in flag.words for value in values)
    if flag.refused and not is_known:
        written = " ".join([name, *values])
        raise _NotTaken(f"{written} is vLLM's, and not taken here; instead: {flag.refused}")
    if any(flag.words.get(value) == "" for value in values):  # it is so without it
        return [], _said(name, flag.note)
    values = [flag.words.get(value, value) for value in values]
    if flag.takes == "none":
        return list(flag.ours), _said(name, flag.note)
    if flag.reads is not None:
        values = [_read(name, flag.reads, value) for value in values]
    if name == "--served-model-name" and len(values) > 1:
        raise ConfigError(
            f"{name} has {len(values)} names, and a model has one here; requests may also name its folder"
        )
    flags = [part for value in values for our in flag.ours for part in (our, value)]
    return flags, "" if flags else _said(name, flag.note)


def _said(name: str, note: str) -> str:
    return f"{name}: {note}" if note else ""


def _read(name: str, reads: Callable[[str], str], value: str) -> str:
    try:
        return reads(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{name} is {value!r}, which it cannot be; give a number, or for a list JSON") from None


def _speculation_of(name: str, text: str) -> dict[str, object]:
    """Return what one flag says: the whole as JSON, or one key of it, as --speculative-config.method ngram."""
    key = name.removeprefix(_SPECULATION).removeprefix(".")
    if key:
        try:
            value = json.loads(text)
        except ValueError:
            value = text  # vLLM's, too, takes a bare word
        return {key.replace("-", "_"): value}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, which is no JSON ({error}); say {_EXAMPLE}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{name} is {text!r}, which is no object; say {_EXAMPLE}")
    return given


_EXAMPLE = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'"""
