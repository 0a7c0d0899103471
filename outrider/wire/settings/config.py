"""One frozen configuration per process, read once, in `load()`: command line over environment over defaults.

Field `port` of the draft is `--port` on its command line and OUTRIDER_DRAFT_PORT in the environment.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
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

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]

MIB = 1 << 20
GPU_FRACTION = 0.9
"""Share of a GPU's memory that workers take: the rest is for CUDA's contexts and what torch takes beside tensors."""
MAX_CORES = 4096
_CLOSE = 0.75
"""difflib's ratio from which one name may be meant by another."""
_OF_A_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)$")
"""Ends of the names of variables that Kubernetes makes for a Service."""
OTHER_VARIABLES = frozenset(
    f"OUTRIDER_{name}"
    for name in (
        # of the SDK, the engine and the launcher
        *("API_KEY", "CACHE_DIR", "LAUNCHER_TLS_DIR"),
        # of compose
        *("BIND", "HTTP_PORT", "GRPC_PORT", "METRICS_BIND", "METRICS_PORT", "CLUSTER_FILE", "CLUSTER_INTERNAL"),
        *("SECRETS_DIR", "STOP_GRACE", "IMAGE_GATEWAY", "IMAGE_WORKER", "GPU_DRAFT", "GPU_TARGET"),
        *("CPUS_DRAFT", "CPUS_TARGET", "CPUS_GATEWAY", "CPUS_HEAD"),
        *("MEMORY_DRAFT", "MEMORY_TARGET", "MEMORY_GATEWAY", "MEMORY_HEAD"),
        # of the workers' image
        *("HEAD", "NODE_CPUS", "NODE_FOLDER", "NODE_LABELS", "OBJECT_STORE_BYTES", "START_TIMEOUT_S"),
        # of the tests
        *("REAL_MODEL",),
    )
)
"""Variables that are no part's settings."""
_CORES = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
ContentControlTokens = Literal["allow", "text"]
"""What control tokens are in what users write."""


def _check_default_drafter(drafter: Drafter) -> Drafter:
    if drafter.needs_prediction:
        raise ValueError(f"drafts from what a request predicts; say one of {', '.join(DEFAULT_DRAFTERS)}")
    return drafter


DEFAULT_DRAFTERS = [drafter for drafter in Drafter if not drafter.needs_prediction]
"""Those that need nothing of a request."""
DefaultDrafter = Annotated[
    Drafter,
    AfterValidator(_check_default_drafter),
    WithJsonSchema({"enum": DEFAULT_DRAFTERS, "type": "string"}),
]


class _Settings(BaseSettings):
    """Frozen values, read from the command line over those given over the environment, where empty means absent."""

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
    """What every process has."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem: every connection between parts is then TLS, and both ends show a
    certificate of that CA. Read again when they change. Absent = no encryption, and whoever reaches the port is
    believed."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 5.0
    """How long running requests may go on here after SIGTERM, while new ones are sent elsewhere or refused."""
    trace_endpoint: str | None = None
    """OTLP endpoint (gRPC), such as http://collector:4317, that spans are sent to; absent = none are made."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the ids of request and slot where there are any."""


class WorkerConfig(_ProcessConfig):
    """What draft and target share."""

    model: str
    """Model folder, GGUF file or hub id; of a draft with another drafter than model, of anything that has the target's
    tokenizer and vocabulary, such as the target's own: no weights are read."""
    drafter_text: str | None = None
    """Text file (UTF-8) whose tokens and pairs of tokens are counted, for drafting by unigram and bigram, which need
    it."""
    port: Port = 0
    """gRPC port; 0 takes a free one and prints it."""
    metrics_port: Port | None = None
    """Port of the Prometheus endpoint; 0 takes a free one; absent = none."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto (a GPU when there is one)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations; auto = float32 on CPU, the checkpoint's own on a GPU."""
    cpu_cores: str | None = None
    """Cores to stay on, such as 0 or 0,2-3; absent = all that the process was given."""
    max_slots: Positive = 64
    """Requests held at once."""
    kv_cache_tokens: Positive | None = None
    """Tokens that the KV cache holds; absent = what fits into kv_cache_fraction of the free memory, at most max_slots
    contexts, of which a CPU counts 4096 tokens each. On a CPU memory is taken as it is used."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the memory that is free once the weights are loaded which the KV cache may take; absent = 0.1 on a CPU,
    0.9 on a GPU, with captured graphs; with gpu_memory_utilization 1."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's whole memory that this worker may take, weights and steps included, unless kv_cache_tokens says
    the cache; absent = by what is free, or, where `outrider up`, the launcher or the chart places several workers on
    one GPU, this worker's share of 0.9."""
    prefix_caching: bool = True
    """Keep the KV of prompts and answers that have ended, so that a later prompt that begins alike is not fed again."""
    context_limit: Positive | None = None
    """Most tokens of prompt and output; absent = the model's own limit."""
    attention_path: Literal["auto", "fused", "flash", "paged", "dense"] = "auto"
    """How forwards are run; auto = the fastest that passes the self-test at load."""
    batch_invariant: bool = False
    """Serve only if the same tokens give the same logits bit for bit in every batch and at every verify width."""
    trust_draft_config: bool = False
    """Serve a draft head though it explains the target better when wired in another way than its configuration says, or
    not at all; with a warning."""
    allow_pickle: bool = False
    """Read a head's weights from .bin and .pt files, too, as tensors alone (torch's weights_only)."""
    quantization: Literal["none", "int8"] = "none"
    """int8: weights rounded to 8 bits at load, one scale per output channel. A checkpoint that is quantised already
    says so itself."""
    unpack_weights: bool = True
    """Whether a quantised checkpoint that the device has no kernels for is unpacked at load, to 2 or 4 bytes a weight;
    false = refused."""
    max_prefill_tokens: Positive | None = None
    """Prompt tokens fed in one step, so that running requests never wait long; absent = 256 on CPU, 2048 on a GPU."""

    @field_validator("cpu_cores")
    @classmethod
    def _cores(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cores(value)
        return value


class DraftConfig(WorkerConfig):
    """Settings of `python -m draft_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_")

    drafter: Literal["model", "ngram", "lookup", "unigram", "bigram"] = "model"
    """Who guesses. All but model need none: ngram counts what followed in the answer itself, lookup copies what
    followed there or in recent answers, unigram and bigram count in drafter_text. What a model alone has (dtype, KV
    cache, attention_path, quantization, ...) means nothing to them."""
    drafted_by: Literal["none", "ngram", "lookup"] = "none"
    """Who guesses what a model draws, so that it draws several tokens in one pass where the guesses are right: ngram or
    lookup, as for drafter. The proposals are the same. Not for draft heads, nor for models that fill blocks."""
    target_model: str | None = None
    """The target's folder or hub id, for a model that is a draft head (EAGLE-3, Medusa): from there come the tokenizer,
    and the embedding and output rows that the head's files leave out. `outrider up` fills it in."""

    @model_validator(mode="after")
    def _drafter_has_what_it_needs(self) -> Self:
        of_a_text = self.drafter in ("unigram", "bigram")
        if of_a_text and self.drafter_text is None:
            raise ValueError(
                f"drafter is {self.drafter!r} and drafter_text is missing: name a text file to count in, for "
                f"`outrider up` as in --draft {self.drafter}:FILE"
            )
        if self.drafter_text is not None and not of_a_text:
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
        return self.drafter == "model"


class TargetConfig(WorkerConfig):
    """Settings of `python -m target_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_TARGET_")

    tensor_parallel: Positive = 1
    """Ranks that the target's weights are split over, each a process with a device of its own."""
    heads: str | None = None
    """Folder of Medusa's or blockwise heads, by which this target drafts for requests whose drafter is heads."""
    lookahead: str = "5,4,5"
    """W,N,G of the drafter lookahead: a window of W columns is fed beside each step, n-grams of N tokens are made in
    it, and up to G of them are verified at once. A step feeds up to (W + G) (N - 1) - 1 tokens more, at most 64."""
    lookahead_embeddings: str | None = None
    """File (safetensors), or its folder, of look-ahead embeddings that `outrider train-head pass` trained for this
    target, by which it drafts for requests whose drafter is pass."""

    @model_validator(mode="after")
    def _embeddings_are_whole(self) -> Self:
        if self.lookahead_embeddings is not None and self.tensor_parallel > 1:
            raise ValueError(
                f"lookahead_embeddings is {self.lookahead_embeddings!r} and tensor_parallel {self.tensor_parallel}: "
                "they are rows of a whole embedding table; leave one of them out"
            )
        return self

    @field_validator("lookahead")
    @classmethod
    def _lookahead(cls, value: str) -> str:
        LookaheadShape.parse(value)
        return value


class GatewayConfig(_ProcessConfig):
    """Settings of `python -m gateway`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_GATEWAY_")

    target: str | None = None
    """host:port of the target worker; several of one model with commas between, all after a NAME= if their pool has
    one. dns:///host:port: each address of that name is a worker, now and later."""
    draft: str | None = None
    """host:port of the draft worker, or several of one pool with commas between, and pools with semicolons, each after
    a NAME= if it has one; dns:/// as for target. Absent = plain decoding."""
    target_for_draft: str | None = None
    """host:port at which the drafts reach the target, one for each of target; absent = the same as target."""
    registry: str | None = None
    """host:port of the launcher's registry, which says who the workers are; instead of target and draft."""
    model_name: str | None = None
    """Id under which the target is served; absent = the target's model id. Not with registry: the pools say it."""
    port: Port = 8000
    """HTTP port; 0 takes a free one and prints it."""
    grpc_port: Port = 8001
    """gRPC port; 0 takes a free one and prints it."""
    metrics_port: Port | None = None
    """Port of /metrics, /sd, /healthz and /readyz, in plain HTTP and before the first target is there; 0 takes a free
    one and prints it. Absent = they are on the HTTP port, where every client reads them."""
    page: bool = True
    """Serve a page at / of the HTTP port, on which one asks the model and watches the rounds; off = 404."""
    num_draft_tokens: NumDraftTokens = AUTO
    """K: tokens drafted a step unless the request says otherwise; auto = what makes the most tokens per second, step by
    step, down to none."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] = 32
    """Most tokens that a request may have drafted a round, as K or as the nodes of a tree; above it 400."""
    drafter: DefaultDrafter = Drafter.AUTO
    """Who drafts unless the request says otherwise. auto: in each step whoever promises the most tokens, of a draft
    worker and of the target itself, from what it has seen. model: a draft worker alone. ngram and the like: the target
    alone. With +model whichever of the two promises more; with &model both, in one tree; with model&model a draft
    worker of each pool, in one tree."""
    acceptance: Literal["rejection", "coupled"] = "rejection"
    """Which drafts are kept at temperature > 0 unless the request says otherwise. Both give exactly the target's law;
    with coupled the text is a function of prompt, parameters and seed, whatever the draft does, and no distribution
    travels; with rejection somewhat more drafts are kept."""
    tree: str | None = None
    """Draft trees instead of chains unless the request says otherwise: children by depth such as 4x2x1, or best:12x4,
    the 12 most likely nodes up to a depth of 4. Absent = chains."""
    draft_logprobs: str = "auto"
    """How distributions travel from draft to target at temperature > 0: full, topk or topk:N with the N likeliest
    tokens of each (128), or auto: full while a step's payload is small, else topk."""
    max_running: Positive = 64
    """Answers decoded at once on each target; times the number of gateways, keep at or under the workers' max_slots."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Answers of a model that may wait for a place; beyond it requests are refused with 429."""
    max_queue_wait_s: Seconds = 0.5
    """Once the queue is expected to take longer than this, requests that find no free place are refused with 429 until
    none has come for a second, so that those let in keep their pace. A burst at an idle model waits as max_queue lets
    it. For batch work, which would rather wait: as long as request_timeout_s."""
    request_timeout_s: Seconds = 600.0
    """Longest life of a request, its time in the queue included."""
    control_tokens_in_content: ContentControlTokens = "allow"
    """What the texts of control tokens are in messages, calls, tools and documents of chats, unless a key or a request
    says text: those tokens (allow), so that whoever writes a document may end its turn, or text like any other."""
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    """Sampling parameters of HTTP requests that name none: auto = those that the checkpoint's generation_config.json
    states, none (which vLLM calls vllm) = temperature 1 without cut or penalty. Temperature 0 is greedy either way."""
    max_tokens_beyond_context: Literal["clamp", "refuse"] = "clamp"
    """What max_tokens means that is more than the context leaves: what it leaves (clamp), or a 400 (refuse)."""
    max_compile_s: Seconds = 1.0
    """CPU seconds that checking a request's grammar, or rendering its chat template, may take; a request that takes
    more is refused with 400."""
    prefix_cache_scope: Literal["shared", "key", "user"] = "key"
    """Who shares the workers' cached prefixes: requests of one API key (without keys all), of one user of it, or all
    (shared), who then can find out each other's prompts by their timing. Always of the same cache_salt."""
    lookup_scope: Literal["user", "shared"] = "user"
    """Whose ended outputs the drafter lookup copies from: those of the same API key and user (and cache_salt), none for
    a request that names neither, or those of all (shared), of which the number of draft tokens then tells."""
    keep_alive_s: Seconds = 75.0
    """How long an HTTP connection may be idle between two requests: longer than what lies in front keeps its own, which
    is 60 s in common proxies, so that none is closed under a request."""
    stream_ping_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Seconds without an event after which an HTTP stream gets a comment (on /v1/messages a ping), so that nothing in
    between takes it for dead; 0 = none."""
    stream_in_queue: bool = False
    """Begin an HTTP stream while its request is in the queue, so that it is pinged there, too; a request that fails
    there then fails in its stream and not by a status. off = a stream begins once a target has opened its slot."""
    max_body_bytes: Positive = 4 * MIB
    """Largest HTTP body, and largest gRPC message of a user. Sixteen of these are held at once, of each API
    key four, and as many gRPC messages more are on their way in."""
    chat_template: str | None = None
    """File with a Jinja chat template; absent = the tokenizer's own."""
    system_messages: Literal["merge", "as-given"] = "merge"
    """What is done where a chat template refuses messages as they stand: system messages are merged into the first, and
    roles made to alternate; or the request is refused (as-given)."""
    agent_header: Literal["omit", "keep"] = "omit"
    """Whether a line x-anthropic-billing-header at the beginning of a system block stays out of the prompt: a coding
    agent writes it there with another value in each request, so that no prompt would begin like another."""
    max_tools: Annotated[int, Field(ge=1, le=4096)] = 512
    """Tools of a request at most."""
    max_tools_bytes: Positive = 1 * MIB
    """UTF-8 bytes of all tools of a request, written as JSON, at most."""
    api_keys: str | None = None
    """File of hashed API keys and their limits, see `outrider keys`; read again when it changes. Absent = no key is
    asked for."""
    allowed_origins: str | None = None
    """Origins of web pages that may call, with commas between, such as https://app.example; * = any. They get CORS
    headers. Absent = none do, and without api_keys a page may call only where it came from this gateway."""
    allowed_hosts: str | None = None
    """Names by which the gateway may be called without api_keys, with commas between, such as llm.example; * = any.
    Loopback names always are. Absent = any name, unless it listens on a loopback address."""
    public_tls_dir: str | None = None
    """Folder with cert.pem and key.pem for users' HTTP and gRPC; with a ca.pem too, users must show a certificate."""

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: str | None) -> str | None:
        if value is not None:
            read_origins(value)
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, value: str | None) -> str | None:
        if value is not None:
            read_host_names(value)
        return value

    @field_validator("num_draft_tokens", mode="before")
    @classmethod
    def _auto_or_number(cls, value: object) -> object:
        try:
            return read_num_draft_tokens(value) if isinstance(value, str) else check_num_draft_tokens(value)
        except InvalidRequest:
            raise ValueError(f"must be {AUTO}, or a number {DRAFT_TOKENS}") from None

    @model_validator(mode="after")
    def _workers_named_once(self) -> Self:
        if self.target is None and self.registry is None:
            raise ValueError("target and registry are missing: give --target HOST:PORT or --registry HOST:PORT")
        extra = [
            name for name in ("target", "draft", "target_for_draft", "model_name") if getattr(self, name) is not None
        ]
        if self.registry is not None and extra:
            raise ValueError(f"registry and {extra[0]} contradict each other: the registry says it; leave one out")
        return self

    @field_validator("tree")
    @classmethod
    def _tree(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                TreeShape.parse(value)
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        return value

    @field_validator("draft_logprobs")
    @classmethod
    def _encoding(cls, value: str) -> str:
        read_draft_logprobs(value)
        return value

    @model_validator(mode="after")
    def _drafts_agree(self) -> Self:
        """As in a request, where the same pairs are refused."""
        tree = None if self.tree is None else TreeShape.parse(self.tree)
        num_draft_tokens = None if self.num_draft_tokens == AUTO else self.num_draft_tokens
        try:
            check_what_is_drafted(num_draft_tokens, tree, self.drafter, self.max_draft_tokens)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        names = ("port", "grpc_port", "metrics_port")
        for name, other in itertools.combinations(names, 2):
            port = getattr(self, name)
            if port and port == getattr(self, other):
                raise ValueError(f"{name} and {other} are both {port}; each needs one of its own")
        return self


Config = TypeVar("Config", bound=_ProcessConfig)


def load(cls: type[Config], argv: Sequence[str] | None = None, **given: Any) -> Config:
    """Read `cls` from `argv` (None: no command line), the values given, and the environment, the first of them first.

    Raises ConfigError naming the setting, its value and what is allowed. `--help` prints and exits.
    """
    prefix = str(cls.model_config["env_prefix"])
    check_variables(cls)
    if argv is not None:
        given["_cli_parse_args"] = list(argv)
    try:
        return cls(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            flag, variable = f"--{name.replace('_', '-')}", f"{prefix}{name}".upper()
            raise ConfigError(f"{name} is missing; give {flag} or set {variable}", param=name) from None
        if not name:  # settings that contradict each other
            raise ConfigError(reason(first)) from None
        raise ConfigError(f"{name} is {first.get('input')!r}: {reason(first)}", param=name) from None


def read_chat_template(config: GatewayConfig) -> str | None:
    """Return the text of the file `chat_template`, None where none is set. Raises ConfigError."""
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
    """Raise ConfigError for a variable of the process that is no setting of it, or of no part."""
    prefix = str(cls.model_config["env_prefix"])
    ours = {key.upper().removeprefix(prefix).lower(): key for key in os.environ if key.upper().startswith(prefix)}
    for key in ours.values():
        if _is_of_kubernetes(key):
            raise ConfigError(
                f"{key} is {os.environ[key]!r}, which Kubernetes writes for a Service of that name; "
                "say enableServiceLinks: false in the pod's spec"
            )
    for name, key in ours.items():
        if name not in cls.model_fields:
            known = _variables_of(cls)
            raise ConfigError(f"{key} is no setting of the {part_of(cls)}; {meant(key.upper(), known)}")
    _check_other_variables()


def _check_other_variables() -> None:
    """Raise ConfigError for a variable of no part that is nearly one of a part."""
    parts: list[type[BaseSettings]] = [TargetConfig, DraftConfig, GatewayConfig]
    prefixes = tuple(str(part.model_config["env_prefix"]) for part in parts)
    known = set(OTHER_VARIABLES).union(*map(_variables_of, parts))
    for key in os.environ:
        name = key.upper()
        if not name.startswith("OUTRIDER_") or name.startswith(prefixes) or name in known or _is_of_kubernetes(key):
            continue
        rests = [other.removeprefix("OUTRIDER_") for other in known]  # which all have in common, and would be alike by
        close = difflib.get_close_matches(name.removeprefix("OUTRIDER_"), rests, 1, _CLOSE)
        if close:
            raise ConfigError(f"{key} is a setting of no part; did you mean OUTRIDER_{close[0]}?")


def _variables_of(cls: type[BaseSettings]) -> list[str]:
    return [f"{cls.model_config['env_prefix']}{name}".upper() for name in cls.model_fields]


def _is_of_kubernetes(key: str) -> bool:
    """Whether a variable is one that Kubernetes makes for a Service."""
    return bool(_OF_A_SERVICE.search(key)) or os.environ[key].startswith(("tcp://", "udp://", "sctp://"))


def part_of(cls: type[BaseSettings]) -> str:
    """Return which process the settings are of: target, draft or gateway."""
    return str(cls.model_config["env_prefix"]).removeprefix("OUTRIDER_").removesuffix("_").lower()


def meant(written: str, known: Collection[str]) -> str:
    """Return the known name that is most like what was written; all of them where none is."""
    close = difflib.get_close_matches(written, known, 1, _CLOSE)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def reason(detail: Mapping[str, Any]) -> str:
    """Why pydantic refused a value, without its own heading."""
    return str(detail["msg"]).removeprefix("Value error, ")


def parse_cores(text: str) -> frozenset[int]:
    """'0,2-3' -> {0, 2, 3}. Raises ValueError naming the text."""
    cores: set[int] = set()
    for part in text.split(","):
        found = _CORES.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < MAX_CORES:
            raise ValueError(f"cpu cores are {text!r}, must look like 0 or 0,2-3")
        cores.update(range(first, last + 1))
    return frozenset(cores)
