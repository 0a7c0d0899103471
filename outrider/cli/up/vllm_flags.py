"""Translates vLLM's command-line flags into flags of `outrider up`, by one table. For `up.py`.

Names are those of vLLM 0.15's documentation and of some earlier releases. docs/vllm.md is for users.
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
"""Factor for each suffix of a number, the same as in vLLM: 8k is 8000, 8K is 8192."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """How one of vLLM's flags is translated."""

    our_flags: Sequence[str] = ()
    """Flags of `outrider up` that replace vLLM's flag. Each gets the value of vLLM's flag, if there is one."""
    num_values: str = "one"
    """Number of values of vLLM's flag: "none", "one" or "several". For each of several values, our flag is written
    once."""
    words: Mapping[str, str] = field(default_factory=dict)
    """For values of vLLM's flag that Outrider writes differently: Outrider's value. "" = the flag is left out, since
    Outrider always works in this way. Values that are not listed stay as they are."""
    convert: Callable[[str], str] | None = None
    """Function that converts a value of the flag to Outrider's value, or raises ValueError; None = values are not
    converted."""
    note: str = ""
    """Note that is printed if vLLM's flag has no values, or if no flag of ours takes its place; empty = none."""
    refused: str = ""
    """What the user should type instead of vLLM's flag with a value that is not in `words`; that value is refused.
    Empty = every value is accepted."""


def _whole(text: str) -> str:
    factor = _SUFFIXES.get(text[-1:])
    if factor is None:
        return str(int(text))
    return str(int(float(text[:-1]) * factor))


def _list(text: str) -> str:
    # '["a", "b"]': "a,b"
    if text.startswith("["):
        return ",".join(json.loads(text))
    return text


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
    "--served-model-name": VllmFlag(["--model-name"], num_values="several"),
    "--tokenizer": VllmFlag(refused=f"{_LEAVE_OUT}: the model's own is read, from its folder"),
    "--tokenizer-mode": VllmFlag(words={"auto": "", "hf": ""}, refused=f"{_LEAVE_OUT}: tokenizer.json is read"),
    "--skip-tokenizer-init": VllmFlag(
        num_values="none", refused=f"{_LEAVE_OUT}: prompts of ids are taken all the same"
    ),
    "--revision": VllmFlag(refused="outrider pull MODEL --revision REVISION, and start the folder that it prints"),
    "--code-revision": VllmFlag(refused=f"{_LEAVE_OUT}: no model's own code is run"),
    "--tokenizer-revision": VllmFlag(refused="outrider pull MODEL --revision REVISION, and start that folder"),
    "--trust-remote-code": VllmFlag(
        num_values="none",
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
    "--max-model-len": VllmFlag(["--target-context-limit"], words={"auto": "", "-1": ""}, convert=_whole),
    "--enable-lora": VllmFlag(num_values="none", refused=_NO_LORA),
    "--lora-modules": VllmFlag(num_values="several", refused=_NO_LORA),
    "--limit-mm-per-prompt": VllmFlag(refused=f"{_LEAVE_OUT}: {_IMAGES}"),
    "--language-model-only": VllmFlag(num_values="none", note=_SO_ANYWAY),
    # memory and batches
    "--gpu-memory-utilization": VllmFlag(["--gpu-memory-utilization"]),
    "--max-num-seqs": VllmFlag(
        ["--max-running", "--target-max-slots", "--draft-max-slots"],
        convert=_whole,
    ),
    "--max-num-batched-tokens": VllmFlag(["--target-max-prefill-tokens"], convert=_whole),
    "--num-gpu-blocks-override": VllmFlag(refused="--target-kv-cache-tokens TOKENS"),
    "--kv-cache-memory-bytes": VllmFlag(refused="--target-kv-cache-tokens TOKENS, or --target-kv-cache-fraction"),
    "--kv-cache-dtype": VllmFlag(words={"auto": ""}, refused=f"{_LEAVE_OUT}: the KV cache has the weights' dtype"),
    "--block-size": VllmFlag(refused=f"{_LEAVE_OUT}: the engine chooses its blocks"),
    "--swap-space": VllmFlag(refused=f"{_LEAVE_OUT}: nothing is swapped; what does not fit waits"),
    "--cpu-offload-gb": VllmFlag(
        refused=f"{_LEAVE_OUT}: weights stay on their device; --quantization int8 halves them"
    ),
    "--enable-prefix-caching": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--no-enable-prefix-caching": VllmFlag(
        ["--no-target-prefix-caching", "--no-draft-prefix-caching"], num_values="none"
    ),
    "--enable-chunked-prefill": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--scheduling-policy": VllmFlag(words={"priority": "", "fcfs": ""}, note="a request's priority counts, and is 0"),
    "--async-scheduling": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--enforce-eager": VllmFlag(
        num_values="none", refused=f"{_LEAVE_OUT}: graphs are captured where they pass a self-test"
    ),
    "--compilation-config": VllmFlag(refused=f"{_LEAVE_OUT}: nothing is compiled by settings"),
    "--max-logprobs": VllmFlag(refused=f"{_LEAVE_OUT}: a request may ask for 20"),
    # devices
    "--tensor-parallel-size": VllmFlag(["--target-tensor-parallel"]),
    "--pipeline-parallel-size": VllmFlag(
        words={"1": ""}, refused="--tensor-parallel-size: a target is split by tensors"
    ),
    "--data-parallel-size": VllmFlag(words={"1": ""}, refused=_POOLS),
    "--enable-expert-parallel": VllmFlag(
        num_values="none", refused="--tensor-parallel-size, which splits experts, too"
    ),
    "--distributed-executor-backend": VllmFlag(
        words={"ray": ""}, refused="--no-ray for plain processes; absent, Ray starts the workers"
    ),
    "--device": VllmFlag(["--target-device", "--draft-device"]),
    "--attention-backend": VllmFlag(words={"auto": ""}, refused="--target-attention-path, auto unless set"),
    # the server
    "--api-key": VllmFlag(["--api-key"], num_values="several"),
    "--allowed-origins": VllmFlag(["--allowed-origins"], convert=_list),
    "--chat-template-content-format": VllmFlag(
        words={"auto": "", "string": "", "openai": ""}, note="the template itself shows which form it takes"
    ),
    "--response-role": VllmFlag(words={"assistant": ""}, refused=f"{_LEAVE_OUT}: answers are the assistant's"),
    "--enable-auto-tool-choice": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--tool-call-parser": VllmFlag(["--tool-call-parser"]),
    "--tool-parser-plugin": VllmFlag(refused=f"{_LEAVE_OUT}: {_READ_ANYWAY}"),
    "--reasoning-parser": VllmFlag(["--reasoning-parser"]),
    "--enable-reasoning": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--guided-decoding-backend": VllmFlag(note="llguidance holds every grammar"),
    "--structured-outputs-config": VllmFlag(refused=f"{_LEAVE_OUT}: llguidance holds every grammar"),
    "--enable-prompt-tokens-details": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--enable-request-id-headers": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--enable-tokenizer-info-endpoint": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--enable-force-include-usage": VllmFlag(num_values="none", refused="stream_options.include_usage of the request"),
    "--return-tokens-as-token-ids": VllmFlag(num_values="none", refused="return_token_ids of the request"),
    "--disable-log-requests": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--no-enable-log-requests": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--enable-log-requests": VllmFlag(num_values="none", refused="--log-level info --verbose: a line for each request"),
    "--disable-log-stats": VllmFlag(
        num_values="none", note="statistics are at /metrics and in `outrider top`, not in the log"
    ),
    "--uvicorn-log-level": VllmFlag(refused="--log-level"),
    "--disable-uvicorn-access-log": VllmFlag(num_values="none", note=_SO_ANYWAY),
    "--otlp-traces-endpoint": VllmFlag(["--trace-endpoint", "--target-trace-endpoint", "--draft-trace-endpoint"]),
    "--ssl-keyfile": VllmFlag(refused=_TLS),
    "--ssl-certfile": VllmFlag(refused=_TLS),
    "--ssl-ca-certs": VllmFlag(refused=_TLS),
    "--root-path": VllmFlag(refused=f"{_LEAVE_OUT}: strip the prefix in the proxy"),
    "--middleware": VllmFlag(refused=f"{_LEAVE_OUT}: put a proxy in front"),
    "--uds": VllmFlag(refused="--host 127.0.0.1 --port PORT"),
    "--api-server-count": VllmFlag(words={"1": ""}, refused="--config FILE with gateways: 2"),
    "--headless": VllmFlag(num_values="none", refused="python -m deploy.launcher, the workers without a gateway"),
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
"""Translation of each flag, by its name in vLLM. Flags with the same name and values in `outrider up` are not
listed."""

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
"""Long name of each of vLLM's short flags, by the short flag."""
_OPTIMIZATION = re.compile(r"^-O(?=\d)")
"""Matches the flag in vLLM's -O3, where flag and value are one word."""
_SPECULATION = "--speculative-config"
_SIMILAR = 0.75
"""Minimum similarity (difflib's ratio, 0 to 1) at which a flag is suggested for a mistyped one."""


class _NotTaken(ConfigError):
    """A flag of vLLM is not accepted."""


def translated(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate vLLM's flags in a command line. Return (command line with our flags instead, notes to print on the
    replaced flags).

    Other words stay as they are. Raises ConfigError that lists all flags that are not accepted, with what to type
    instead, and ConfigError for a wrong value.
    """
    # ["--max-model-len", "8k"]: ["--target-context-limit", "8000"]
    translation = _Translation(list(args))
    while translation.remaining:
        translation.translate_next(has_model=_names_model(args))
    return translation.finish()


class _Translation:
    """State of translating a command line word by word."""

    def __init__(self, remaining: list[str]) -> None:
        self.remaining = remaining
        """Words of the command line that are not translated yet."""
        self._our_flags = list[str]()
        self._notes = list[str]()
        self._refused = list[str]()
        self._speculation: dict[str, object] | None = None

    def translate_next(self, has_model: bool) -> None:
        written = _OPTIMIZATION.sub("-O=", self.remaining.pop(0))
        name, equals, value = written.partition("=")
        name = SHORT.get(name, name)
        if name.startswith("--"):
            name = name.replace("_", "-")
        switch = FLAGS.get(name.replace("--no-", "--", 1))
        if name == _SPECULATION or name.startswith(f"{_SPECULATION}."):
            if not equals:
                value = _next_value(name, self.remaining)
            self._speculation = {**(self._speculation or {}), **_speculation_of(name, value)}
        elif name in FLAGS:
            values = [value]
            if not equals:
                values = _values(name, FLAGS[name], self.remaining)
            if name == "--api-key" and len(values) > 1 and not has_model:
                raise ConfigError(
                    f"{name} has {len(values)} values, and no model stands in front of them; say MODEL {name} KEY"
                )
            self._add_flag(name, FLAGS[name], values)
        elif switch is not None and switch.num_values == "none":
            if switch.refused:
                self._notes.append(f"{name}: {_SO_ANYWAY}")
            else:
                self._refused.append(
                    f"{name} is vLLM's, and not taken here; instead: {_LEAVE_OUT}: it is always so here"
                )
        elif equals and name.startswith("--"):
            self._our_flags.append(f"{name}={value}")
        else:
            self._our_flags.append(written)

    def _add_flag(self, name: str, flag: VllmFlag, values: Sequence[str]) -> None:
        try:
            flags, note = _translate_flag(name, flag, values)
        except _NotTaken as error:
            self._refused.append(error.message)
            return
        self._our_flags += flags
        if note:
            self._notes.append(f"{name}: {note}")

    def finish(self) -> tuple[list[str], list[str]]:
        if self._refused:
            raise ConfigError(". ".join(self._refused))
        if self._speculation is not None:
            flags, notes = draft_flags(self._speculation)
            self._our_flags += flags
            self._notes += notes
        return self._our_flags, self._notes


def similar_flags(written: str, our_flags: Sequence[str]) -> list[str]:
    """Return at most two flags that are most similar to the unknown flag `written`, the most similar first. They are
    chosen from `our_flags` and vLLM's flags.
    """
    known = {*our_flags, *FLAGS, _SPECULATION}
    return difflib.get_close_matches(written.replace("_", "-"), known, n=2, cutoff=_SIMILAR)


def _names_model(args: Sequence[str]) -> bool:
    names = {arg.partition("=")[0] for arg in args}
    return not args[0].startswith("-") or not names.isdisjoint(("--model", "--target", "--config"))


def _values(name: str, flag: VllmFlag, remaining: list[str]) -> list[str]:
    if flag.num_values == "none":
        return []
    values = [_next_value(name, remaining)]
    while flag.num_values == "several" and remaining and not remaining[0].startswith("-"):
        values.append(remaining.pop(0))
    return values


def _next_value(name: str, remaining: list[str]) -> str:
    if not remaining or (remaining[0].startswith("-") and not _NUMBER.fullmatch(remaining[0])):
        raise ConfigError(f"{name} has no value; say {name} VALUE")
    return remaining.pop(0)


def _translate_flag(name: str, flag: VllmFlag, values: Sequence[str]) -> tuple[list[str], str]:
    """Return (our flags, note) for one of vLLM's flags with its values. The note may be empty."""
    is_known = bool(values) and all(value in flag.words for value in values)
    if flag.refused and not is_known:
        written = " ".join([name, *values])
        raise _NotTaken(f"{written} is vLLM's, and not taken here; instead: {flag.refused}")
    if "" in map(flag.words.get, values):  # it is so without the flag
        return [], flag.note
    values = [flag.words.get(value, value) for value in values]
    if flag.num_values == "none":
        return list(flag.our_flags), flag.note
    if flag.convert is not None:
        values = [_read(name, flag.convert, value) for value in values]
    if name == "--served-model-name" and len(values) > 1:
        raise ConfigError(
            f"{name} has {len(values)} names, and a model has one here; requests may also name its folder"
        )
    flags = list[str]()
    for value in values:
        for our in flag.our_flags:
            flags += [our, value]
    if flags:
        return flags, ""
    return [], flag.note


def _read(name: str, convert: Callable[[str], str], value: str) -> str:
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{name} is {value!r}, which it cannot be; give a number, or for a list JSON") from None


def _speculation_of(name: str, text: str) -> dict[str, object]:
    # --speculative-config '{"method": "ngram"}' or --speculative-config.method ngram: {"method": "ngram"}
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
