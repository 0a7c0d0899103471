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
"""Default fraction of a GPU's memory that all workers on that GPU may take together. The rest is for CUDA contexts and
for torch's own memory."""
ContentControlTokens = Literal["allow", "text"]
"""How text that users write is read where it contains the texts of control tokens: allow = as control tokens, text = as
plain text."""


def _check_default_drafter(drafter: Drafter) -> Drafter:
    if drafter.needs_prediction:
        raise ValueError(f"drafts from what a request predicts; say one of {', '.join(DEFAULT_DRAFTERS)}")
    return drafter


DEFAULT_DRAFTERS = [drafter for drafter in Drafter if not drafter.needs_prediction]
"""Drafters that a gateway may have as the default of all requests. Those that need a prediction are left out, since
only a request can bring one."""
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
    """json: each line of the log is one JSON object, with the ids of request and slot if it is about one."""


class WorkerConfig(_ProcessConfig):
    """Settings that draft and target workers have in common."""

    model: str
    """Model folder, GGUF file or hub id. A draft whose drafter is not model needs only a tokenizer: give the target's
    model or one with the same tokenizer and vocabulary; no weights are read."""
    drafter_text: str | None = None
    """Text file (UTF-8) in which the drafters unigram and bigram count tokens and pairs of tokens."""
    port: Port = 0
    """gRPC port; 0 = any free port, which is printed."""
    metrics_port: Port | None = None
    """Port of the Prometheus endpoint; 0 = any free port. Absent = there is no such endpoint."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one, otherwise the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations; auto = float32 on a CPU, the checkpoint's dtype on a GPU."""
    cpu_cores: str | None = None
    """Cores that the process is pinned to, such as 0 or 0,2-3; absent = all cores that it may use."""
    max_slots: Positive = 64
    """Maximum number of slots (choices of requests) that are open at once."""
    kv_cache_tokens: Positive | None = None
    """Number of tokens that the KV cache holds. Absent = as many as fit into kv_cache_fraction of the free memory, but
    no more than max_slots full contexts need. On a CPU a context counts as 4096 tokens at most, and memory is allocated
    only as it is used."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction that the KV cache may take of the memory that is free after the weights are loaded. Absent = 0.1 on a
    CPU; 0.9 on a GPU, for KV cache and captured graphs together; 1 if gpu_memory_utilization is given."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's whole memory that this worker may take for weights, steps and KV cache. If kv_cache_tokens is
    given, the cache has that size instead. Absent = the free memory decides; but workers that `outrider up`, the
    launcher or the chart place together on one GPU share 0.9 of its memory."""
    prefix_caching: bool = True
    """Whether the KV cache of ended prompts and outputs is kept. A later prompt that begins with the same tokens then
    uses the kept keys and values."""
    context_limit: Positive | None = None
    """Maximum number of tokens of prompt and output together; absent = the model's own limit."""
    attention_path: Literal["auto", "fused", "flash", "paged", "dense"] = "auto"
    """The code that computes attention; auto = the fastest path that passes the self-test at load."""
    batch_invariant: bool = False
    """Serve only if a token's logits are the same, bit for bit, in every batch and for every number of draft tokens. A
    device or model for which that does not hold is refused."""
    trust_draft_config: bool = False
    """Serve a draft head, with a warning, even if the probe suggests that its configuration is wrong: another wiring
    predicts the target better than the configured one, or no wiring predicts the target."""
    allow_pickle: bool = False
    """Read a head's weights from .bin and .pt files too. Only tensors are unpickled (torch's weights_only)."""
    quantization: Literal["none", "int8"] = "none"
    """int8: round weights to 8 bits at load, with one scale per output channel. Not needed for a checkpoint that is
    quantised already."""
    unpack_weights: bool = True
    """What happens to a quantised checkpoint for which the device has no kernels: true = its weights are unpacked at
    load, to 2 or 4 bytes each; false = it is refused."""
    max_prefill_tokens: Positive | None = None
    """Maximum number of prompt tokens in one step. A low number keeps long prompts from delaying running requests.
    Absent = 256 on a CPU, 2048 on a GPU."""

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
    """What proposes draft tokens: model = the model itself. The others need no weights, and settings of a model (dtype,
    KV cache, attention_path, quantization, ...) have no effect on them: ngram counts the tokens that followed in the
    sequence, lookup copies what followed there or in recent outputs, unigram and bigram count in drafter_text."""
    drafted_by: Literal["none", "ngram", "lookup"] = "none"
    """Drafter that proposes tokens to the draft model itself: ngram or lookup. Where the draft model draws the proposed
    tokens, it drafts several tokens in one step. This makes drafting faster and does not change the draft tokens. Not
    for draft heads, nor for models that fill blocks."""
    target_model: str | None = None
    """Folder or hub id of the target, for a model that is a draft head (EAGLE-3, Medusa). The tokenizer is read there,
    and so are the embedding and the lm_head if the head's files leave them out. `outrider up` sets it."""

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
        """Whether the drafter is a model. False = it proposes tokens from tables."""
        return self.drafter == "model"


class TargetConfig(WorkerConfig):
    """Settings of `python -m target_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_TARGET_")

    tensor_parallel: Positive = 1
    """Number of ranks over which the target's weights are split. Each rank is a process with a device of its own."""
    heads: str | None = None
    """Folder of Medusa heads or blockwise heads. With them this target drafts for requests whose drafter is heads."""
    lookahead: str = "5,4,5"
    """Sizes W,N,G of the drafter lookahead. Each step also feeds a window of W columns, from which it makes n-grams of
    N tokens, and verifies up to G n-grams. It so feeds up to (W + G) (N - 1) - 1 additional tokens, which may be 64 at
    most."""
    lookahead_embeddings: str | None = None
    """File (safetensors), or its folder, of look-ahead embeddings that `outrider train-head pass` trained for this
    target. With them the target drafts for requests whose drafter is pass."""

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
    """host:port of the target worker; several workers of one model are separated by commas. NAME= before the first
    names their pool. With dns:///host:port every address of that DNS name is a worker, including addresses that are
    added later."""
    draft: str | None = None
    """host:port of the draft worker. Several workers of one pool are separated by commas, and pools by semicolons;
    NAME= before the first worker names a pool. With dns:///host:port every address of that DNS name is a worker. Absent
    = plain decoding, unless the target drafts."""
    target_for_draft: str | None = None
    """host:port at which draft workers reach the target, with one entry for each entry of target. Absent = the same
    addresses as target."""
    registry: str | None = None
    """host:port of the launcher's registry, from which the gateway gets the addresses of its workers. It replaces
    target and draft."""
    model_name: str | None = None
    """Id under which the target is served; absent = the target's model id. With registry it must be absent, since the
    pools have the ids."""
    port: Port = 8000
    """HTTP port; 0 = any free port, which is printed."""
    grpc_port: Port = 8001
    """gRPC port; 0 = any free port, which is printed."""
    metrics_port: Port | None = None
    """Port of /metrics, /sd, /healthz and /readyz, in plain HTTP; it answers even before a target is connected. 0 = any
    free port, which is printed. Absent = these paths are on the HTTP port, where every client can read them."""
    page: bool = True
    """Whether / of the HTTP port shows a page on which users chat with the model and watch the rounds. off = it returns
    404."""
    num_draft_tokens: NumDraftTokens = AUTO
    """K, the number of draft tokens per step, for requests that do not give it. auto = each step verifies as many as
    give the most tokens per second, possibly none."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] = 32
    """Maximum number of draft tokens that a request may ask for in a round, as K or as nodes of a tree. A request for
    more is refused with 400."""
    drafter: DefaultDrafter = Drafter.AUTO
    """What proposes draft tokens, for requests that do not give it. auto: each step uses the drafter, in the target or
    in a draft worker, from which it expects the most accepted tokens. model: a draft worker alone. ngram and similar:
    the target alone. NAME+model: each step uses one of the two. NAME&model: both in one tree. model&model: a draft
    worker of each pool in one tree."""
    acceptance: Literal["rejection", "coupled"] = "rejection"
    """Rule by which draft tokens are accepted at temperature > 0, for requests that do not give it. Both rules keep the
    target's output distribution exactly. coupled: the output depends only on prompt, parameters and seed, not on the
    draft tokens, and no distribution is sent. rejection: somewhat more draft tokens are accepted."""
    tree: str | None = None
    """Shape of draft trees, for requests that do not give it: children by depth such as 4x2x1, or best:12x4, the 12
    most likely nodes up to a depth of 4. Absent = chains instead of trees."""
    draft_logprobs: str = "auto"
    """Which log-probs of each draft token's distribution are sent to the target at temperature > 0. full: those of the
    whole vocabulary. topk or topk:N: those of the N most likely tokens (topk means 128). auto: full if the size of the
    vocabulary times the number of choices that the draft worker samples for is at most 2048, otherwise topk."""
    max_running: Positive = 64
    """Maximum number of choices that each target decodes at once. Multiplied by the number of gateways it should be at
    most the workers' max_slots."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Maximum number of choices that wait in the queue of a model. Requests beyond it are refused with 429."""
    max_queue_wait_s: Seconds = 0.5
    """Expected seconds in the queue above which the gateway counts as overloaded. While it does, a choice that cannot
    start at once is refused with 429, so that admitted requests keep their speed. The overload ends once no request has
    found all places taken for a second. A burst at an idle model may still wait, up to max_queue. For batch work, set
    it as high as request_timeout_s."""
    request_timeout_s: Seconds = 600.0
    """Maximum seconds from a request's arrival to its end, including its time in the queue."""
    control_tokens_in_content: ContentControlTokens = "allow"
    """How the texts of control tokens in messages, calls, tools and documents of chats are read. allow: as control
    tokens, so that the author of a document can end its message. text: as plain text. A key or a request may set text
    for itself."""
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    """Values of sampling parameters that an HTTP request does not give. auto = those of the checkpoint's
    generation_config.json; none (or vllm, as vLLM calls it) = temperature 1, without top_k, top_p, min_p and penalties.
    At temperature 0 decoding is always greedy."""
    max_tokens_beyond_context: Literal["clamp", "refuse"] = "clamp"
    """What happens if prompt and max_tokens together exceed the context. clamp = max_tokens is reduced to what is left;
    refuse = the request is refused with 400."""
    max_compile_s: Seconds = 1.0
    """Maximum CPU seconds for checking a request's grammar, and for rendering its chat template. A request that takes
    longer is refused with 400."""
    prefix_cache_scope: Literal["shared", "key", "user"] = "key"
    """Which requests share cached prefixes in the workers. key: those of one API key, or all requests if there are no
    keys. user: those of one user of a key. shared: all requests; their senders can then find out each other's prompts
    by timing. Only requests with the same cache_salt ever share."""
    lookup_scope: Literal["user", "shared"] = "user"
    """Which ended outputs the drafter lookup copies from. user: those of the same API key, user and cache_salt; a
    request with neither key nor user copies from none. shared: all; the number of draft tokens then reveals something
    about other users' outputs."""
    keep_alive_s: Seconds = 75.0
    """Seconds for which an HTTP connection may be idle between two requests. It should be longer than a proxy in front
    keeps idle connections (60 s in common ones); otherwise a connection may close just as the proxy sends a request."""
    stream_ping_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds without an event after which a comment (on /v1/messages a ping) is sent in an HTTP stream, so that no
    proxy closes it as idle. 0 = none is sent."""
    stream_in_queue: bool = False
    """Whether an HTTP stream begins while its request is still in the queue, so that pings are sent there too. If the
    request then fails in the queue, the error is an event of the stream and not an HTTP status. off = a stream begins
    once a target has opened the request's slot."""
    max_body_bytes: Positive = 4 * MIB
    """Maximum bytes of an HTTP body, and of a gRPC message of a user. At most sixteen bodies or messages of this size
    are in memory at once, four of them of one API key; sixteen more gRPC messages may still be arriving."""
    chat_template: str | None = None
    """File with a Jinja chat template; absent = the tokenizer's own."""
    tool_call_parser: str = "auto"
    """Form in which the model writes tool calls, given as the name of a family of models, such as hermes, qwen3_coder
    or kimi_k2 (vLLM's names are accepted). auto = the form that the chat template shows."""
    reasoning_parser: str = "auto"
    """Form in which the model writes its reasoning, given as the name of a family of models, such as qwen3, mistral or
    openai_gptoss (vLLM's names are accepted). auto = the form that the chat template shows."""
    system_messages: Literal["merge", "as-given"] = "merge"
    """What happens if a chat template refuses the messages of a request. merge = all system messages are merged into
    the first message and the roles are made to alternate; as-given = the request is refused."""
    agent_header: Literal["omit", "keep"] = "omit"
    """Whether a line x-anthropic-billing-header at the beginning of a system block is left out of the prompt (omit). A
    coding agent writes it with another value in each request; if it is kept (keep), no two prompts begin with the same
    tokens."""
    max_tools: Annotated[int, Field(ge=1, le=4096)] = 512
    """Maximum number of tools of a request."""
    max_tools_bytes: Positive = 1 * MIB
    """Maximum bytes (UTF-8) of all tools of a request together, written as JSON."""
    api_keys: str | None = None
    """File of hashed API keys and their limits, which `outrider keys` writes. It is read again when it changes. Absent
    = requests need no key."""
    allowed_origins: str | None = None
    """Origins of web pages that may call the gateway, separated by commas, such as https://app.example; * = any.
    Replies to them have CORS headers. Absent = no page of another origin gets CORS headers, and without api_keys only
    pages that this gateway served may call it."""
    allowed_hosts: str | None = None
    """Host names by which clients may call the gateway if there are no api_keys, separated by commas, such as
    llm.example; * = any. Loopback names are always allowed. Absent = any name is allowed, unless the gateway listens on
    a loopback address."""
    public_tls_dir: str | None = None
    """Folder with cert.pem and key.pem for HTTP and gRPC with users. If it also has a ca.pem, users must show a
    certificate of that CA. Absent = no TLS with users."""

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
    """Return the settings of a process as an instance of class `cls`. Each setting is taken from the command line, or
    else from the keyword arguments `given`, or else from the environment.

    argv: the command line without the program's name; None = there is no command line. With `--help` in it, this prints
    the help and exits. Raises ConfigError with the setting's name, its value and what is allowed.
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
    """Raise ConfigError if an environment variable looks like a misspelt setting, of class `cls` or of another process.
    cls: class of this process's settings.
    """
    check_names(cls, (TargetConfig, DraftConfig, GatewayConfig))


def location_of(detail: Mapping[str, Any]) -> str:
    """Return the name of the setting that an item of pydantic's `ValidationError.errors()` is about, such as
    keys.0.name. It is empty if the error is about several settings.
    """
    return ".".join(map(str, detail["loc"]))


def reason(detail: Mapping[str, Any]) -> str:
    """Return the reason for which pydantic refuses a value, without pydantic's prefix such as "Value error, ".

    detail: an item of pydantic's `ValidationError.errors()`.
    """
    return str(detail["msg"]).removeprefix("Value error, ")
