"""The settings of each process: one frozen class, read once by `load` from command line, environment and defaults.

The draft's field `port` is `--port` on its command line and OUTRIDER_DRAFT_PORT in the environment.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.processes.origin import read_host_names, read_origins
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.lookahead_shape import LookaheadShape
from outrider.wire.requests.params import DRAFT_TOKENS, MAX_DRAFT_TOKENS, read_draft_logprobs
from outrider.wire.requests.speculation import (
    AUTO,
    NumDraftTokens,
    check_num_draft_tokens,
    check_what_is_drafted,
    read_num_draft_tokens,
)
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.cores import parse_cores
from outrider.wire.settings.variables import check_names

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]

MIB = 1 << 20
"""Number of bytes in a mebibyte."""
GPU_FRACTION = 0.9
"""Default fraction of a GPU's memory that all its workers take together. CUDA contexts and torch's own memory need the
rest."""
ContentControlTokens = Literal["allow", "text"]
"""How the texts of control tokens are read where they occur in content that users write: allow = as control tokens,
text = as plain text."""


def _check_default_drafter(drafter: Drafter) -> Drafter:
    if drafter.needs_prediction:
        raise ValueError(f"drafts from what a request predicts; say one of {', '.join(DEFAULT_DRAFTERS)}")
    return drafter


DEFAULT_DRAFTERS = [drafter for drafter in Drafter if not drafter.needs_prediction]
"""Drafters that the gateway may use by default: all but those that need a prediction in the request."""
DefaultDrafter = Annotated[
    Drafter,
    AfterValidator(_check_default_drafter),
    WithJsonSchema({"enum": DEFAULT_DRAFTERS, "type": "string"}),
]


class _Settings(BaseSettings):
    """Base of frozen settings. The command line overrides the values given to `load`, and those override environment
    variables. An empty variable counts as absent.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, cli_kebab_case=True, cli_implicit_flags=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True)


class _ProcessConfig(_Settings):
    """Settings of every process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem: every connection between processes is then TLS, and both ends show a
    certificate of that CA. The files are read again when they change. Absent = no encryption, and every peer that
    reaches the port is trusted."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 5.0
    """Seconds that running requests may continue here after SIGTERM, while new ones are sent elsewhere or refused."""
    trace_endpoint: str | None = None
    """OTLP endpoint (gRPC) that receives spans, such as http://collector:4317; absent = no spans are made."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the ids of request and slot where there are any."""


class WorkerConfig(_ProcessConfig):
    """Settings that draft and target workers have in common."""

    model: str
    """Model folder, GGUF file or hub id. For a draft whose drafter is not model: one with the target's tokenizer and
    vocabulary, such as the target's own; no weights are read."""
    drafter_text: str | None = None
    """Text file (UTF-8) in which tokens and pairs of tokens are counted; the drafters unigram and bigram need it."""
    port: Port = 0
    """gRPC port; 0 takes a free one and prints it."""
    metrics_port: Port | None = None
    """Port of the Prometheus endpoint; 0 takes a free one; absent = none."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto (a GPU when there is one)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations; auto = float32 on CPU, the checkpoint's own on a GPU."""
    cpu_cores: str | None = None
    """Cores that the process is pinned to, such as 0 or 0,2-3; absent = all cores that it may use."""
    max_slots: Positive = 64
    """Slots (choices of requests) that are open at once."""
    kv_cache_tokens: Positive | None = None
    """Tokens that the KV cache holds; absent = what fits into kv_cache_fraction of the free memory, at most max_slots
    contexts, which count 4096 tokens each on a CPU. On a CPU memory is allocated as it is used."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction that the KV cache may take of the memory that is free after the weights are loaded. Absent = 0.1 on a
    CPU; 0.9 on a GPU, captured graphs included; 1 with gpu_memory_utilization."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's whole memory that this worker may take, for weights, steps and KV cache (unless
    kv_cache_tokens gives the cache's size). Absent = by the free memory; where `outrider up`, the launcher or the chart
    places several workers on one GPU, this worker's part of 0.9."""
    prefix_caching: bool = True
    """Keep the KV cache of ended prompts and outputs, so that a later prompt that begins alike is not computed
    again."""
    context_limit: Positive | None = None
    """Most tokens of prompt and output; absent = the model's own limit."""
    attention_path: Literal["auto", "fused", "flash", "paged", "dense"] = "auto"
    """How forwards compute attention; auto = the fastest path that passes the self-test at load."""
    batch_invariant: bool = False
    """Serve only if the same tokens give the same logits bit for bit in every batch and at every verify width."""
    trust_draft_config: bool = False
    """Serve a draft head, with a warning, even if another wiring than its configuration's predicts the target better,
    or none predicts it."""
    allow_pickle: bool = False
    """Read a head's weights from .bin and .pt files too, as tensors alone (torch's weights_only)."""
    quantization: Literal["none", "int8"] = "none"
    """int8: round weights to 8 bits at load, with one scale per output channel. Not needed for a checkpoint that is
    quantised already."""
    unpack_weights: bool = True
    """Whether a quantised checkpoint for which the device has no kernels is unpacked at load, to 2 or 4 bytes a weight;
    false = it is refused."""
    max_prefill_tokens: Positive | None = None
    """Most prompt tokens in one step, so that running requests do not wait long; absent = 256 on a CPU, 2048 on a
    GPU."""

    @field_validator("cpu_cores")
    @classmethod
    def _check_cores(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cores(value)
        return value


class DraftConfig(WorkerConfig):
    """Settings of `python -m draft_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_")

    drafter: Literal["model", "ngram", "lookup", "unigram", "bigram"] = "model"
    """What proposes draft tokens. model is the model itself; the others need none: ngram counts the tokens that
    followed in the sequence itself, lookup copies those that followed there or in recent outputs, unigram and bigram
    count in drafter_text. Settings of a model (dtype, KV cache, attention_path, quantization, ...) have no effect on
    those."""
    drafted_by: Literal["none", "ngram", "lookup"] = "none"
    """A drafter for the draft model itself, ngram or lookup: where its tokens are those that the model draws, the model
    drafts several tokens in one step. The draft tokens do not change. Not for draft heads, nor for models that fill
    blocks."""
    target_model: str | None = None
    """The target's folder or hub id, for a model that is a draft head (EAGLE-3, Medusa): the tokenizer is read there,
    and the embedding and output rows that the head's files leave out. `outrider up` sets it."""

    @model_validator(mode="after")
    def _check_drafter(self) -> Self:
        needs_text = self.drafter in ("unigram", "bigram")
        if needs_text and self.drafter_text is None:
            raise ValueError(
                f"drafter is {self.drafter!r} and drafter_text is missing: name a text file to count in, for "
                f"`outrider up` as in --draft {self.drafter}:FILE"
            )
        if self.drafter_text is not None and not needs_text:
            raise ValueError(
                f"drafter_text is {self.drafter_text!r} and drafter {self.drafter!r}, which reads none; leave it out, "
                "or say unigram or bigram"
            )
        if self.drafter != "model" and self.drafted_by != "none":
            raise ValueError(
                f"drafted_by is {self.drafted_by!r} and drafter {self.drafter!r}, which asks no model; leave one out"
            )
        if self.drafter != "model" and self.device.startswith("cuda"):
            raise ValueError(
                f"device is {self.device!r} and drafter {self.drafter!r}, which runs on the CPU; say cpu or auto"
            )
        return self

    @property
    def has_model(self) -> bool:
        """Whether the drafter is a model."""
        return self.drafter == "model"


class TargetConfig(WorkerConfig):
    """Settings of `python -m target_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_TARGET_")

    tensor_parallel: Positive = 1
    """Ranks that the target's weights are split over, each a process with a device of its own."""
    heads: str | None = None
    """Folder of Medusa's or blockwise heads, with which this target drafts for requests whose drafter is heads."""
    lookahead: str = "5,4,5"
    """W,N,G of the drafter lookahead: each step also feeds a window of W columns, in which n-grams of N tokens are
    made, and verifies up to G of them. A step feeds up to (W + G) (N - 1) - 1 tokens more, at most 64."""
    lookahead_embeddings: str | None = None
    """File (safetensors), or its folder, of look-ahead embeddings that `outrider train-head pass` trained for this
    target, with which it drafts for requests whose drafter is pass."""

    @model_validator(mode="after")
    def _check_embeddings(self) -> Self:
        if self.lookahead_embeddings is not None and self.tensor_parallel > 1:
            raise ValueError(
                f"lookahead_embeddings is {self.lookahead_embeddings!r} and tensor_parallel {self.tensor_parallel}: "
                "they are rows of a whole embedding table; leave one of them out"
            )
        return self

    @field_validator("lookahead")
    @classmethod
    def _check_lookahead(cls, value: str) -> str:
        LookaheadShape.parse(value)
        return value


class GatewayConfig(_ProcessConfig):
    """Settings of `python -m gateway`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_GATEWAY_")

    target: str | None = None
    """host:port of the target worker, or of several of one model, separated by commas; before them NAME= if their pool
    has a name. dns:///host:port: each address of that name is a worker, now and later."""
    draft: str | None = None
    """host:port of the draft worker, or of several of one pool, separated by commas, and pools by semicolons, each
    after NAME= if it has a name; dns:/// as for target. Absent = plain decoding."""
    target_for_draft: str | None = None
    """host:port at which the drafts reach the target, one for each of target; absent = the same as target."""
    registry: str | None = None
    """host:port of the launcher's registry, from which the gateway gets its workers; instead of target and draft."""
    model_name: str | None = None
    """Id under which the target is served; absent = the target's model id. Not with registry, whose pools have it."""
    port: Port = 8000
    """HTTP port; 0 takes a free one and prints it."""
    grpc_port: Port = 8001
    """gRPC port; 0 takes a free one and prints it."""
    metrics_port: Port | None = None
    """Port of /metrics, /sd, /healthz and /readyz, in plain HTTP and before the first target is connected; 0 takes a
    free one and prints it. Absent = they are on the HTTP port, where every client can read them."""
    page: bool = True
    """Serve a page at / of the HTTP port, on which one prompts the model and watches the rounds; off = 404."""
    num_draft_tokens: NumDraftTokens = AUTO
    """K: draft tokens a step, unless the request gives it; auto = as many as make the most tokens per second, step by
    step, down to none."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] = 32
    """Most draft tokens that a request may have in a round, as K or as nodes of a tree; a request for more gets 400."""
    drafter: DefaultDrafter = Drafter.AUTO
    """What proposes draft tokens, unless the request gives it. auto: in each step the drafter, of a draft worker and of
    the target itself, from which most accepted tokens are expected by its past rounds. model: a draft worker alone.
    ngram and the like: the target alone. With +model: the one of the two from which more is expected; with &model: both
    in one tree; with model&model: a draft worker of each pool in one tree."""
    acceptance: Literal["rejection", "coupled"] = "rejection"
    """Rule by which draft tokens are accepted at temperature > 0, unless the request gives it. Both keep the
    target's output distribution exactly. With coupled the output is a function of prompt, parameters and seed, whatever
    is drafted, and no distribution is sent. With rejection somewhat more draft tokens are accepted."""
    tree: str | None = None
    """Shape of draft trees in place of chains, unless the request gives it: children by depth such as 4x2x1, or
    best:12x4, the 12 most likely nodes up to a depth of 4. Absent = chains."""
    draft_logprobs: str = "auto"
    """How distributions are sent from draft to target at temperature > 0: full; topk or topk:N, the N most likely
    tokens of each (128); or auto: full while a step's payload is small, else topk."""
    max_running: Positive = 64
    """Choices decoded at once on each target; times the number of gateways, keep at or under the workers' max_slots."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Choices of a model that may wait in the queue; further requests are refused with 429."""
    max_queue_wait_s: Seconds = 0.5
    """Once the queue is expected to take longer than this, requests that cannot start at once are refused with 429
    until none has arrived for a second, so that admitted requests keep their speed. A burst at an idle model waits as
    max_queue allows. For batch work, which would rather wait: as long as request_timeout_s."""
    request_timeout_s: Seconds = 600.0
    """Most seconds from a request's arrival to its end, its time in the queue included."""
    control_tokens_in_content: ContentControlTokens = "allow"
    """How the texts of control tokens in messages, calls, tools and documents of chats are read, unless a key or a
    request sets text: as those tokens (allow), so that a document's author can end its message, or as plain text."""
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    """Sampling parameters that an HTTP request does not give: auto = those of the checkpoint's generation_config.json,
    none (vLLM's word: vllm) = temperature 1 without cut or penalty. Temperature 0 is greedy either way."""
    max_tokens_beyond_context: Literal["clamp", "refuse"] = "clamp"
    """What happens to max_tokens that exceed what the context leaves: reduced to that (clamp), or 400 (refuse)."""
    max_compile_s: Seconds = 1.0
    """CPU seconds that checking a request's grammar, or rendering its chat template, may take; a request that takes
    more is refused with 400."""
    prefix_cache_scope: Literal["shared", "key", "user"] = "key"
    """Which requests share the workers' cached prefixes: those of one API key (without keys all), of one user of a key,
    or all (shared), whose senders can then find out each other's prompts by timing. Always of the same cache_salt."""
    lookup_scope: Literal["user", "shared"] = "user"
    """Which ended outputs the drafter lookup copies from: those of the same API key and user (and cache_salt), none for
    a request with neither; or all (shared), which the number of draft tokens then reveals in part."""
    keep_alive_s: Seconds = 75.0
    """Seconds that an HTTP connection may be idle between two requests. Longer than a proxy in front keeps it, 60 s in
    common ones, so that no connection closes just as a request is sent."""
    stream_ping_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds without an event after which an HTTP stream gets a comment (on /v1/messages a ping), so that no proxy
    closes it as idle; 0 = none."""
    stream_in_queue: bool = False
    """Begin an HTTP stream while its request is in the queue, so that it is pinged there too; a request that fails
    there then fails in its stream and not by a status. off = a stream begins once a target has opened its slot."""
    max_body_bytes: Positive = 4 * MIB
    """Largest HTTP body, and largest gRPC message of a user, in bytes. Memory holds sixteen at once, four of each API
    key, and as many gRPC messages more that are being received."""
    chat_template: str | None = None
    """File with a Jinja chat template; absent = the tokenizer's own."""
    tool_call_parser: str = "auto"
    """Form in which the model writes tool calls, by the name of a family of models, such as hermes, qwen3_coder or
    kimi_k2 (vLLM's names are accepted); auto = that which the chat template shows."""
    reasoning_parser: str = "auto"
    """Form in which the model writes its reasoning, by the name of a family of models, such as qwen3, mistral or
    openai_gptoss (vLLM's names are accepted); auto = that which the chat template shows."""
    system_messages: Literal["merge", "as-given"] = "merge"
    """What happens where a chat template refuses the messages as given: system messages are merged into the first, and
    roles made to alternate; or the request is refused (as-given)."""
    agent_header: Literal["omit", "keep"] = "omit"
    """Whether a line x-anthropic-billing-header at the beginning of a system block stays out of the prompt: a coding
    agent writes it there with another value in each request, so that no two prompts would begin alike."""
    max_tools: Annotated[int, Field(ge=1, le=4096)] = 512
    """Most tools of a request."""
    max_tools_bytes: Positive = 1 * MIB
    """Most UTF-8 bytes of all tools of a request, written as JSON."""
    api_keys: str | None = None
    """File of hashed API keys and their limits, see `outrider keys`; read again when it changes. Absent = requests need
    no key."""
    allowed_origins: str | None = None
    """Origins of web pages that may call, separated by commas, such as https://app.example; * = any. They get CORS
    headers. Absent = none do, and without api_keys a page may call only if it came from this gateway."""
    allowed_hosts: str | None = None
    """Names by which the gateway may be called without api_keys, separated by commas, such as llm.example; * = any.
    Loopback names are always allowed. Absent = any name, unless the gateway listens on a loopback address."""
    public_tls_dir: str | None = None
    """Folder with cert.pem and key.pem for users' HTTP and gRPC; with a ca.pem too, users must show a certificate."""

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: str | None) -> str | None:
        if value is not None:
            read_origins(value)
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: str | None) -> str | None:
        if value is not None:
            read_host_names(value)
        return value

    @field_validator("num_draft_tokens", mode="before")
    @classmethod
    def _check_num_draft_tokens(cls, value: object) -> object:
        try:
            if isinstance(value, str):
                return read_num_draft_tokens(value)
            return check_num_draft_tokens(value)
        except InvalidRequest:
            raise ValueError(f"must be {AUTO}, or a number {DRAFT_TOKENS}") from None

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.target is None and self.registry is None:
            raise ValueError("target and registry are missing: give --target HOST:PORT or --registry HOST:PORT")
        if self.registry is None:
            return self
        for name in ("target", "draft", "target_for_draft", "model_name"):
            if getattr(self, name) is not None:
                raise ValueError(f"registry and {name} contradict each other: the registry says it; leave one out")
        return self

    @field_validator("tree")
    @classmethod
    def _check_tree(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                TreeShape.parse(value)
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        return value

    @field_validator("draft_logprobs")
    @classmethod
    def _check_draft_logprobs(cls, value: str) -> str:
        read_draft_logprobs(value)
        return value

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        # A request with these values would be refused too.
        tree = None
        if self.tree is not None:
            tree = TreeShape.parse(self.tree)
        num_draft_tokens = None
        if self.num_draft_tokens != AUTO:
            num_draft_tokens = self.num_draft_tokens
        try:
            check_what_is_drafted(num_draft_tokens, tree, self.drafter, self.max_draft_tokens)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        names = ("port", "grpc_port", "metrics_port")
        for name, other in itertools.combinations(names, 2):
            port = getattr(self, name)
            if port and port == getattr(self, other):
                raise ValueError(f"{name} and {other} are both {port}; each needs one of its own")
        return self


Config = TypeVar("Config", bound=_ProcessConfig)


def load(cls: type[Config], argv: Sequence[str] | None = None, **given: Any) -> Config:
    """Return settings as an instance of class `cls`. Each is taken from the command line, otherwise from the given
    values, otherwise from the environment.

    argv: the command line without the program; None = no command line. Raises ConfigError with the setting's name, its
    value and what is allowed. With `--help` in argv, print the help and exit.
    """
    prefix = str(cls.model_config["env_prefix"])
    check_variables(cls)
    if argv is not None:
        given["_cli_parse_args"] = list(argv)
    try:
        return cls(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = location_of(first)
        if first["type"] == "missing":
            flag = f"--{name.replace('_', '-')}"
            variable = f"{prefix}{name}".upper()
            raise ConfigError(f"{name} is missing; give {flag} or set {variable}", param=name) from None
        if not name:  # settings that contradict each other
            raise ConfigError(reason(first)) from None
        raise ConfigError(f"{name} is {first.get('input')!r}: {reason(first)}", param=name) from None


def read_chat_template(config: GatewayConfig) -> str | None:
    """Return the content of the file that the setting `chat_template` names; None = the setting is absent. Raises
    ConfigError if the file cannot be read.
    """
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError as error:
        why = str(error)
    raise ConfigError(
        f"chat_template is {config.chat_template!r}, which cannot be read: {why}; give a template in Jinja",
        param="chat_template",
    )


def check_variables(cls: type[BaseSettings]) -> None:
    """Check that no environment variable is a misspelt setting, of class `cls` or another process. Raises ConfigError;
    see `variables.check_names`.
    """
    check_names(cls, (TargetConfig, DraftConfig, GatewayConfig))


def location_of(detail: Mapping[str, Any]) -> str:
    """Return the name of the setting that an error of pydantic is about, such as keys.0.name. It is empty if the error
    is about several settings.

    detail: an item of pydantic's `ValidationError.errors()`.
    """
    return ".".join(map(str, detail["loc"]))


def reason(detail: Mapping[str, Any]) -> str:
    """Return the reason that an error of pydantic gives, without pydantic's prefix such as "Value error, ".

    detail: an item of pydantic's `ValidationError.errors()`.
    """
    return str(detail["msg"]).removeprefix("Value error, ")
