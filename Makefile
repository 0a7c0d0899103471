# `make help` lists what there is. Each target works from a clean clone: `setup` makes .venv when it is missing.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto
PROTOS := $(wildcard proto/outrider/v1/*.proto)
TOOLS = aiperf guidellm vllm
KITS = right fast
help: ## this list
	@sed -n 's/^\([a-z% -]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|'
	@echo 'programs, each with --help: $(PROGRAMS)'

setup: $(STAMP) ## the virtual environment with everything, torch included; a no-op when nothing changed
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is `$(PYTHON) -V 2>&1`, Outrider needs Python 3.11 or later; say make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Set-up, once, into $(VENV): minutes, by your network. 2.3 GB with torch's build for CPUs, 6.1 GB with CUDA's"
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[engine,ray,trace,certs,dev]'
	@touch $@

demo up: $(STAMP) ## the whole system once, and the proof that the text is the target's own; or until Ctrl-C
	$(BIN)/outrider $@ $(ARGS)

chat: $(STAMP) ## a small chat model (98 MB, fetched once), which drafts from its own text, until Ctrl-C
	@file=`$(BIN)/python -m models.chat.fetch` && $(BIN)/outrider up --target "$$file" --no-draft $(ARGS)

check: $(STAMP) ## format, lint, types, names, import rules, dashboards, fresh stubs; and how dense the code is, as a report
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/measures/names.toml --cache-dir .mypy_cache/names
	$(BIN)/lint-imports
	$(BIN)/python -m tests.watching.dashboards
	@fresh=`mktemp -d` && trap 'rm -rf "$$fresh"' EXIT && \
		$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS) && \
		diff -qr $$fresh/outrider/v1 outrider/v1 -x __pycache__ -x __init__.py || \
			{ echo "stubs in outrider/v1 are stale; run make proto" >&2; exit 1; }
	@$(BIN)/python -m tests.measures.prose --total

# Three processes keep two cores busy while tests wait. Without bytecode each would write the asserts of all tests anew.
test: $(STAMP) ## the tests; one: make test ARGS='-n 0 tests/e2e/test_tls.py'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## the long proofs
	$(BIN)/python -m pytest -m slow $(ARGS)

test-oldest: ## the tests with the oldest versions that are supported, on Python 3.11
	$(MAKE) test PYTHON=python3.11 VENV=.work/oldest CONSTRAINTS=constraints-oldest.txt
test-newest: ## the tests on Python 3.13
	$(MAKE) test PYTHON=python3.13 VENV=.work/newest

bench-%: $(STAMP) ## one benchmark: make bench-default ARGS=--help; `make bench` lists them
	$(BIN)/python -m benchmarks $* $(ARGS)

# Programs of their own, each with --help: make chaos ARGS='--minutes 10'. What they need is in their descriptions.
MODULES = bench:benchmarks peers:benchmarks.peers.install chaos:tests.chaos fuzz:tests.fuzz hostile:tests.hostile \
	mutants:tests.mutants laws:tests.law.table paths:tests.paths cluster-test:tests.cluster.run \
	compose-test:tests.compose check-kubernetes:tests.kubernetes dashboards-check:tests.watching \
	check-alerts:deploy.prometheus stops:tests.stops openai-table:tests.openai_table \
	architectures:tests.architectures_table lines:tests.measures.lines prose:tests.measures.prose \
	mirror:tests.measures.mirror trees:tests.measures.trees tool-forms:tests.tool_forms real-model:models.real.make \
	gpu-wheels:benchmarks.gpu.wheels
PROGRAMS := $(foreach row,$(MODULES),$(firstword $(subst :, ,$(row))))
$(PROGRAMS): $(STAMP)
	$(BIN)/python -m $(patsubst $@:%,%,$(filter $@:%,$(MODULES))) $(ARGS)

proto: $(STAMP) ## outrider/v1, after a change under proto/
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
env-example chart-schema: $(STAMP) ## what is written from the settings: .env.example, settings.yml, the chart's schema
	$(BIN)/python -m deploy.env_example > .env.example
	$(BIN)/python -m deploy.compose_settings > deploy/docker/settings.yml
	$(BIN)/python -m deploy.chart_schema > deploy/helm/outrider/values.schema.json

gpu-right gpu-fast: $(STAMP) ## on a machine with a GPU: what is right, how fast it is; python3 -m benchmarks.gpu right
	$(BIN)/python -m benchmarks.gpu $(@:gpu-%=%) $(ARGS)
gpu-rehearse: $(STAMP) ## both on the CPU, at sizes whose figures say nothing: make gpu-rehearse KITS=right
	for kit in $(KITS); do $(BIN)/python -m benchmarks.gpu $$kit --rehearse $(ARGS) || exit 1; done
rolling-test: $(STAMP) ## a fleet, replaced part by part under streams
	$(BIN)/python -m tests.rolling
	$(BIN)/python -m tests.rolling.workers

real-test: $(STAMP) ## all tests of the model of real-model: ten minutes
	$(BIN)/python -m pytest -n 0 -m 'slow or not slow' tests/real $(ARGS)
real-head: real-model ## an EAGLE-3 head for it, within an hour of two cores; interrupted, it goes on from there
	sh models/real/head.sh $(BIN) $(ARGS)

# Environments of their own under .work, each from a file of requirements.
define apart
.work/$(1)/.done: $(2)
	$$(PYTHON) -m venv .work/$(1)
	.work/$(1)/bin/python -m pip install --quiet --only-binary :all: -r $$<
	alone=$(2:.txt=.alone.txt); test ! -f $$$$alone || .work/$(1)/bin/python -m pip install --quiet --no-deps -r $$$$alone
	@touch $$@
endef
LISTS := $(filter-out %.alone.txt,$(wildcard tests/clients/*.txt tests/tools/*.txt))
$(foreach file,$(LISTS),$(eval $(call apart,clients/$(basename $(notdir $(file))),$(file))))
$(eval $(call apart,page,tests/page/requirements.txt))
$(eval $(call apart,mkdocs,docs/site/requirements.txt))
.work/clients/npm/.done: tests/clients/npm/package.json tests/clients/npm/package-lock.json .work/clients/coding/.done
	sh tests/clients/npm/install.sh $(CURDIR)/.work/clients && touch $@
clients: $(STAMP) $(patsubst %,.work/clients/%/.done,openai3 openai2 layers lmeval coding npm) ## libraries and agents
	$(BIN)/python -m tests.clients $(ARGS)
tools: $(STAMP) $(TOOLS:%=.work/clients/%/.done) ## the field's load generators (5 GB) against the demo pair
	OUTRIDER_TOOLS=.work/clients $(BIN)/python -m pytest -n 0 tests/tools $(ARGS)
page-test: $(STAMP) .work/page/.done ## the page in a real Chromium on the demo pair; its pictures for the docs
	$(BIN)/python -m tests.page $(ARGS)

docs: $(STAMP) .work/mkdocs/.done ## the site in .work/site; fails on a dead link, anchor, path or symbol
	$(BIN)/python -m tests.measures.documents
	sh docs/site/build.sh .work/mkdocs/bin/mkdocs

release: ## wheel, source archive, chart, images, bill of materials into dist/; ARGS=--no-images
	PYTHON=$(PYTHON) sh deploy/release.sh $(ARGS)

.PHONY: help setup demo up chat check test test-slow test-oldest test-newest proto env-example chart-schema gpu-right \
	gpu-fast gpu-rehearse rolling-test real-test real-head clients tools page-test docs release $(PROGRAMS)
