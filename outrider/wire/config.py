"""One frozen configuration per process, read once, in `load()`: command line over environment over defaults.

Field `port` of the draft is `--port` on its command line and OUTRIDER_DRAFT_PORT in the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.kinds import DRAFTERS
from outrider.wire.params import AUTO, MAX_DRAFT_TOKENS, MAX_WAIT_BUDGET_MS, DraftTokens, read_draft_tokens
from outrider.wire.tree_shape import TreeShape

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]

MIB = 1 << 20
MAX_CORES = 4096
_CORES = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


class _Settings(BaseSettings):
    """Behaviour only: frozen, unknown keys refused, docstrings as help."""

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
        return (init_settings,)  # `load` reads the environment, in one place


class DraftConfig(_Settings):
    """Settings of `python -m draft_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_")

    model: str
    """Model folder or hub id of the draft; with another drafter than model, of anything that has the target's tokenizer
    and vocabulary, such as the target's own: no weights are read."""
    drafter: Literal["model", "ngram", "lookup", "unigram", "bigram"] = "model"
    """Who guesses. All but model need none: ngram counts what followed in the answer itself, lookup copies what
    followed there or in recent answers, unigram and bigram count in drafter_text. What a model alone has (dtype, KV
    cache, attention_path, quantization, ...) means nothing to them."""
    drafter_text: str | None = None
    """Text file (UTF-8) whose tokens or pairs of tokens are counted: for unigram and bigram, which need it."""
    lookup_min_n: Annotated[int, Field(ge=1, le=64)] = 2
    """Last tokens that must have come before, for lookup to copy what followed them there."""
    lookup_max_n: Annotated[int, Field(ge=1, le=64)] = 8
    """The place where most of them match is copied from; matches longer than this count alike."""
    lookup_corpus_tokens: Annotated[int, Field(ge=0)] = 65536
    """Tokens of ended answers that lookup remembers for later requests of the same cache_salt; 0 = none."""
    host: str = "127.0.0.1"
    """Address to listen on."""
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
    contexts."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the memory that is free once the weights are loaded which the KV cache may take."""
    prefix_caching: bool = True
    """Keep the KV of prompts and answers that have ended, so that a later prompt that begins alike is not fed again."""
    context_limit: Positive | None = None
    """Most tokens of prompt and output; absent = the model's own limit."""
    attention_path: Literal["auto", "fused", "flash", "paged", "dense"] = "auto"
    """How forwards are run; auto = the fastest that passes the self-test at load."""
    batch_invariant: bool = False
    """Serve only if the same tokens give the same logits bit for bit in every batch and at every verify width."""
    quantization: Literal["none", "int8"] = "none"
    """int8: weights rounded to 8 bits at load, one scale per output channel. A checkpoint that is quantised already
    says so itself."""
    max_prefill_tokens: Positive | None = None
    """Prompt tokens fed in one step, so that running requests never wait long; absent = 256 on CPU, 2048 on a GPU."""
    full_logprobs_budget_bytes: Positive = 4 * MIB
    """`auto` sends whole distributions while a step's payload over all its slots stays under this."""
    max_message_bytes: Positive = 64 * MIB
    """Largest gRPC message accepted."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem: every connection is then TLS, and both ends show a certificate of that
    CA. Read again when they change. Absent = no encryption, and whoever reaches the port is believed."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 5.0
    """How long running requests may go on here after SIGTERM, while new ones are sent elsewhere."""
    trace_endpoint: str | None = None
    """OTLP endpoint (gRPC), such as http://collector:4317, that spans are sent to; absent = none are made."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the ids of request and slot where there are any."""

    @field_validator("cpu_cores")
    @classmethod
    def _cores(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cores(value)
        return value

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
        if self.drafter != "model" and self.device.startswith("cuda"):
            raise ValueError(
                f"device is {self.device!r} and drafter {self.drafter!r}, which runs on the CPU; say cpu or auto"
            )
        if self.lookup_min_n > self.lookup_max_n:
            raise ValueError(
                f"lookup_min_n {self.lookup_min_n} is more than lookup_max_n {self.lookup_max_n}; lower the first or "
                "raise the second"
            )
        return self

    @property
    def has_model(self) -> bool:
        return self.drafter == "model"


class TargetConfig(_Settings):
    """Settings of `python -m target_service`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_TARGET_")

    model: str
    """Model folder or hub id of the target."""
    host: str = "127.0.0.1"
    """Address to listen on."""
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
    verification: Literal["block", "token"] = "block"
    """How acceptance by rejection looks at drafts: together, which keeps as many of them on average or more, or one by
    one. Both give exactly the target's law."""
    drafter_text: str | None = None
    """Text file (UTF-8) whose tokens and pairs of tokens are counted: requests may then be drafted for by unigram and
    bigram. ngram and lookup need none."""
    lookup_min_n: Annotated[int, Field(ge=1, le=64)] = 2
    """Last tokens that must have come before, for lookup to copy what followed them there."""
    lookup_max_n: Annotated[int, Field(ge=1, le=64)] = 8
    """The place where most of them match is copied from; matches longer than this count alike."""
    lookup_corpus_tokens: Annotated[int, Field(ge=0)] = 65536
    """Tokens of ended answers that lookup remembers for later requests of the same cache_salt; 0 = none."""
    max_slots: Positive = 64
    """Requests held at once."""
    kv_cache_tokens: Positive | None = None
    """Tokens that the KV cache holds; absent = what fits into kv_cache_fraction of the free memory, at most max_slots
    contexts."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the memory that is free once the weights are loaded which the KV cache may take."""
    prefix_caching: bool = True
    """Keep the KV of prompts and answers that have ended, so that a later prompt that begins alike is not fed again."""
    context_limit: Positive | None = None
    """Most tokens of prompt and output; absent = the model's own limit."""
    attention_path: Literal["auto", "fused", "flash", "paged", "dense"] = "auto"
    """How forwards are run; auto = the fastest that passes the self-test at load."""
    batch_invariant: bool = False
    """Serve only if the same tokens give the same logits bit for bit in every batch and at every verify width."""
    quantization: Literal["none", "int8"] = "none"
    """int8: weights rounded to 8 bits at load, one scale per output channel. A checkpoint that is quantised already
    says so itself."""
    max_prefill_tokens: Positive | None = None
    """Prompt tokens fed in one step, so that running requests never wait long; absent = 256 on CPU, 2048 on a GPU."""
    tensor_parallel: Positive = 1
    """Ranks that the target's weights are split over, each a process with a device of its own."""
    parallel_folder: str | None = None
    """Folder of one's own where ranks that somebody else starts meet this one; absent = it starts them itself."""
    max_parked_bytes: Positive = 256 * MIB
    """Bytes of proposals that may wait for their verify."""
    max_parked_tickets: Positive = 1024
    """Proposals that may wait for their verify."""
    parked_ttl_s: Seconds = 10.0
    """A proposal that no verify asked for is dropped after this."""
    max_message_bytes: Positive = 64 * MIB
    """Largest gRPC message accepted."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem: every connection is then TLS, and both ends show a certificate of that
    CA. Read again when they change. Absent = no encryption, and whoever reaches the port is believed."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 5.0
    """How long running requests may go on here after SIGTERM, while new ones are sent elsewhere."""
    trace_endpoint: str | None = None
    """OTLP endpoint (gRPC), such as http://collector:4317, that spans are sent to; absent = none are made."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the ids of request and slot where there are any."""

    @field_validator("cpu_cores")
    @classmethod
    def _cores(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cores(value)
        return value

    @model_validator(mode="after")
    def _lookup_sizes_in_order(self) -> Self:
        if self.lookup_min_n > self.lookup_max_n:
            raise ValueError(
                f"lookup_min_n {self.lookup_min_n} is more than lookup_max_n {self.lookup_max_n}; lower the first or "
                "raise the second"
            )
        return self


class GatewayConfig(_Settings):
    """Settings of `python -m gateway`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_GATEWAY_")

    target: str | None = None
    """host:port of the target worker; several of one model with commas between."""
    draft: str | None = None
    """host:port of the draft worker, or several with commas between; absent = plain decoding."""
    target_for_draft: str | None = None
    """host:port at which the drafts reach the target, one for each of target; absent = the same as target."""
    registry: str | None = None
    """host:port of the launcher's registry, which says who the workers are; instead of target and draft."""
    model_name: str | None = None
    """Id under which the target is served; absent = the target's model id. Not with registry: the pools say it."""
    host: str = "127.0.0.1"
    """Address to listen on, for HTTP and gRPC."""
    port: Port = 8000
    """HTTP port; 0 takes a free one and prints it."""
    grpc_port: Port = 8001
    """gRPC port; 0 takes a free one and prints it."""
    num_draft_tokens: DraftTokens = AUTO
    """K: tokens drafted a round unless the request says otherwise; auto = what makes the most tokens per second, round
    by round, down to none."""
    drafter: Literal["model", "ngram", "lookup", "unigram", "bigram", "ngram+model", "lookup+model"] = "model"
    """Who drafts unless the request says otherwise: a draft worker, or the target itself from what it has seen, which
    needs none. With +model the draft worker is asked where the target has nothing to say."""
    acceptance: Literal["rejection", "coupled"] = "rejection"
    """Which drafts are kept at temperature > 0 unless the request says otherwise. Both give exactly the target's law;
    with coupled the text is a function of prompt, parameters and seed, whatever the draft does, and no distribution
    travels; with rejection somewhat more drafts are kept."""
    lenience: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 = exact. Below it, under acceptance by rejection and at temperature 0, more drafts are kept and answers are no
    longer exactly the target's; they say so. Above temperature 0 no token comes more than 1 / lenience times as often
    as by the target; at 0 a draft is kept that has at least lenience times the probability of the target's best."""
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A draft with a model ends its proposal, before K, with the token at which the probability that it gives to all of
    them together falls below this; 0 = never. At temperature 0 and under coupled; not for requests that name their K,
    nor for trees."""
    tree: str | None = None
    """Draft trees instead of chains unless the request says otherwise: children by depth such as 4x2x1, or best:12x4,
    the 12 most likely nodes up to a depth of 4. Absent = chains. Not under lenience."""
    draft_logprobs: Literal["auto", "full", "topk"] = "auto"
    """How distributions travel from draft to target at temperature > 0."""
    draft_topk: Positive = 128
    """N of topk."""
    max_running: Positive = 64
    """Answers decoded at once on each target; keep at or under the workers' max_slots."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Answers of a model that may wait for a place; beyond it requests are refused with 429."""
    max_queue_wait_s: Seconds = 0.5
    """Once the queue is expected to take longer than this, requests that find no free place are refused with 429 until
    none has come for a second, so that those let in keep their pace. A burst at an idle model waits as max_queue lets
    it. For batch work, which would rather wait: as long as request_timeout_s."""
    request_timeout_s: Seconds = 600.0
    """Longest life of a request, its time in the queue included."""
    start_timeout_s: Seconds = 120.0
    """How long to wait for the workers at start, and a request for a target when all are gone."""
    round_timeout_s: Seconds = 30.0
    """A worker with work to do that makes no step within 8 times its longest recent one, in 4 s at least and in this at
    most, is treated as lost; its requests go on elsewhere or when it is back."""
    wait_budget_min_ms: Annotated[float, Field(gt=0)] = 5.0
    """Shortest time that the target waits for a proposal before it takes a plain step."""
    wait_budget_max_ms: Annotated[float, Field(gt=0, le=MAX_WAIT_BUDGET_MS)] = 1000.0
    """Longest such time; used until proposal times are known."""
    prefix_cache_scope: Literal["shared", "user"] = "shared"
    """Who shares the workers' cached prefixes: all requests of the same cache_salt, or those of the same user alone, so
    that tenants cannot tell each other's prompts by their timing."""
    max_body_bytes: Positive = 4 * MIB
    """Largest HTTP body, and largest gRPC message of a user. Sixteen of these are held at once, of each API
    key four, and as many gRPC messages more are on their way in."""
    max_message_bytes: Positive = 64 * MIB
    """Largest gRPC message accepted from a worker."""
    chat_template: str | None = None
    """File with a Jinja chat template; absent = the tokenizer's own."""
    api_keys: str | None = None
    """File of hashed API keys and their limits, see `outrider keys`; read again when it changes. Absent = no key is
    asked for."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem for the connections to workers and registry, as at the workers."""
    public_tls_dir: str | None = None
    """Folder with cert.pem and key.pem for users' HTTP and gRPC; with a ca.pem too, users must show a certificate."""
    drain_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 5.0
    """How long running answers may go on after SIGTERM."""
    trace_endpoint: str | None = None
    """OTLP endpoint (gRPC), such as http://collector:4317, that spans are sent to; absent = none are made."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are traced, of those whose caller does not say."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the request's id where there is one."""

    @field_validator("num_draft_tokens", mode="before")
    @classmethod
    def _auto_or_number(cls, value: object) -> object:
        try:
            read = read_draft_tokens(value) if isinstance(value, str) else value
        except ValueError:
            read = None
        if read != AUTO and not (type(read) is int and 0 <= read <= MAX_DRAFT_TOKENS):
            raise ValueError(f"must be auto, or a number from 0 to {MAX_DRAFT_TOKENS}")
        return read

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

    @model_validator(mode="after")
    def _drafts_agree(self) -> Self:
        """As in a request, where the same pairs are refused."""
        if self.lenience < 1.0 and self.acceptance == "coupled":
            raise ValueError(f"lenience is {self.lenience:g} and acceptance coupled, which is exact; leave one out")
        if self.tree is None:
            return self
        if self.lenience < 1.0:
            raise ValueError(f"tree is {self.tree} and lenience {self.lenience:g}, which is of chains; leave one out")
        if self.num_draft_tokens != AUTO:
            raise ValueError(
                f"tree is {self.tree} and num_draft_tokens {self.num_draft_tokens}, which is of chains; leave one out"
            )
        if not DRAFTERS[self.drafter].asks_model:
            raise ValueError(f"tree is {self.tree} and drafter {self.drafter}, which drafts chains; leave one out")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.port and self.port == self.grpc_port:
            raise ValueError(f"port and grpc_port are both {self.port}; HTTP and gRPC need a port each")
        return self

    @model_validator(mode="after")
    def _budgets_end_within_a_round(self) -> Self:
        least_ms, most_ms, round_ms = self.wait_budget_min_ms, self.wait_budget_max_ms, 1e3 * self.round_timeout_s
        if least_ms > most_ms:
            raise ValueError(f"wait_budget_min_ms {least_ms:g} is more than wait_budget_max_ms {most_ms:g}")
        if most_ms > round_ms:
            raise ValueError(
                f"wait_budget_max_ms {most_ms:g} is more than round_timeout_s {self.round_timeout_s:g}: a target that "
                "waits for a proposal would count as lost; lower the first or raise the second"
            )
        return self


Config = TypeVar("Config", DraftConfig, TargetConfig, GatewayConfig)


def load(cls: type[Config], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read `cls` from `argv` (None: no command line) and `environ` (None: the process's own), where empty means absent.

    Raises ConfigError naming the setting, its value and what is allowed. `--help` prints and exits.
    """
    env = os.environ if environ is None else environ
    prefix = str(cls.model_config["env_prefix"])
    known = {f"{prefix}{name}".upper() for name in cls.model_fields}
    for key in env:
        if key.upper().startswith(prefix) and key.upper() not in known:
            raise ConfigError(f"{key} is no setting of {cls.__name__}; known: {', '.join(sorted(known))}")
    values: dict[str, Any] = {name: env[key] for name in cls.model_fields if env.get(key := f"{prefix}{name}".upper())}
    try:
        if argv is not None:
            source: CliSettingsSource[Any] = CliSettingsSource(cls, cli_parse_args=list(argv))
            values.update(source())
        return cls(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            flag, variable = f"--{name.replace('_', '-')}", f"{prefix}{name}".upper()
            raise ConfigError(f"{name} is missing; give {flag} or set {variable}", param=name) from None
        if not name:  # settings that contradict each other
            raise ConfigError(reason(first)) from None
        raise ConfigError(f"{name} is {first.get('input')!r}: {reason(first)}", param=name) from None


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
