# Every way to build and check Rouse. `make` alone lists the targets; CONTRIBUTING.md says when to use which.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
# What `time` prints of each part of the tests.
export TIMEFORMAT := == took %lR

# Parts of a run share two cores and one target directory; side by side they would only blur each other's timings.
.NOTPARALLEL:

PYTHON ?= python3
ARGS ?=
RINGS ?= ring1 ring2
SEEDS ?= 200000
STEPS ?= 1000
SECONDS_OF_SOAK ?= 600

# Tools and Python environments are costly to make and belong to no checkout, so they live outside the tree. What cargo
# builds goes where cargo always puts it, unless CARGO_TARGET_DIR says otherwise.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rouse
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)

DENY_VERSION := 0.20.2
DENY := $(CACHE)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny
ADVISORIES := https://github.com/RustSec/advisory-db

ENGINES := gateway/tests/engines
VENV := $(CACHE)/engines-$(shell cat $(ENGINES)/requirements.txt | sha256sum | cut -c1-16)

ADMIN := gateway/tests/admin
ADMIN_VENV := $(CACHE)/admin-$(shell cat $(ADMIN)/requirements.txt | sha256sum | cut -c1-16)
CLIENTS := gateway/tests/clients
CLIENTS_VENV := $(CACHE)/clients-$(shell cat $(CLIENTS)/requirements.txt $(CLIENTS)/package-lock.json | sha256sum | cut -c1-16)

# A filter that matches nothing is a success to cargo; here it is a failure, or a renamed test would never run again.
SOME_TEST_RAN := awk '{ print; fflush() } /test result: ok\. [1-9]/ { ran = 1 } END { if (!ran) print "no test ran"; exit !ran }'

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-14s %s\n", $$1, $$2 }'

.PHONY: run
run: ## Build the gateway and start its embedded demonstration (ARGS="--config FILE" for your own)
	cargo run --locked --profile quick -p rouse-gateway -- $(ARGS)

# ---- tests

.PHONY: test
test: test-crates test-loom ## Tests of the crates and of the lease in every interleaving; minutes, needs only cargo

.PHONY: test-all
test-all: test test-bench test-images test-cluster test-node test-admin test-engines test-clients ## Everything: test, what valgrind counts, the images, the cluster, the node, then what needs Python

# What goes through a stub as well, and what of it cannot.
ROW := passage:: smuggling:: http2:: surface:: waiting:: stream stub_row::
# They put an engine to sleep, and no such order passes a stub.
NOT_IN_A_ROW := asking_wakes_a_model_and_looking_does_not models_are_listed_with_their_states who_waited_is_told_for_what
# Their engine ends, or is killed by its pid; the process that the gateway has is the stub, which lives on.
NOT_IN_A_ROW += a_failure_after_the an_engine_killed_mid_stream an_engine_that_dies_mid_stream \
    a_stream_that_ran_when_the_gateway_was_killed

.PHONY: test-crates
test-crates:
	@echo "== the crates: units, the simulator's seeds, the gateway against engine-sim"
	time cargo test --workspace --locked
	@echo "== streams without the take-over: what serves them is hyper alone"
	export ROUSE_TAKE_OVER=false; \
	    time cargo test --locked -p rouse-gateway --lib serve:: | $(SOME_TEST_RAN); \
	    time cargo test --locked -p rouse-gateway --test it -- stream waiting | $(SOME_TEST_RAN)
	@echo "== gateway and stub in a row: bytes, framing, waits and cancellation, with a stub before each engine"
	export ROUSE_STUB=1; \
	    time cargo test --locked -p rouse-gateway --test it -- $(ROW) $(addprefix --skip ,$(NOT_IN_A_ROW)) \
	        | $(SOME_TEST_RAN); \
	    time cargo test --locked -p rouse-gateway --test timed -- disconnects | $(SOME_TEST_RAN)

# Its own target directory: RUSTFLAGS are part of every crate's fingerprint, and sharing one would rebuild the world twice.
.PHONY: test-loom
test-loom:
	@echo "== the lease and its gate under loom: every interleaving of taking, closing and releasing"
	export RUSTFLAGS="$${RUSTFLAGS:-} --cfg rouse_loom"; \
	    time cargo test --locked --target-dir "$(TARGET)/loom" -p rouse --lib lease::count | $(SOME_TEST_RAN)

# Not at the same speed as what ships, but as many instructions: a count does not mind a busy machine.
INSTRUCTIONS := cargo run --locked --profile counted -p rouse-gateway --features pipe --bin instructions --

.PHONY: test-bench
test-bench: ## Instructions per request and event, held to what is recorded (ARGS="--annotate CASE" for where they go)
	@command -v valgrind >/dev/null || { echo "valgrind is missing, which counts instructions: apt-get install valgrind"; exit 1; }
	@echo "== instructions per request and per event, over pipes in memory"
	time $(INSTRUCTIONS) $(ARGS)

.PHONY: bench-record
bench-record: ## Record what test-bench counts as what it is held to from now on
	$(INSTRUCTIONS) --record

# What the cluster tests run is built once and kept in the cache; cluster/build says what and how.
.PHONY: cluster
cluster: ## Build the test cluster: etcd and Kubernetes from pinned Go modules, once (RINGS="ring1 ring2")
	cluster/build $(RINGS)

.PHONY: test-cluster
test-cluster: ## The cluster tests: a real kube-apiserver on loopback, Pods as processes (ARGS="NAME")
	@$(MAKE) cluster RINGS=ring1
	@echo "== the test cluster: etcd, kube-apiserver, kube-controller-manager, Pods that are processes; and the gateway's part of it"
	time cargo test --workspace --locked --test cluster -- $(or $(ARGS),--skip alone::)
	$(if $(ARGS),,time cargo test --workspace --locked --test cluster -- alone:: --test-threads 1)

# The gateway, the stub and the engines as they ship, but for link-time optimisation, which takes an hour.
.PHONY: hot-start
hot-start: ## How long requesters wait for sleepers that are there, twenty at once, held to what is promised
	@$(MAKE) cluster RINGS=ring1
	@echo "== hot starts, twenty at once, with optimised builds: a quarter of an hour to build the first time"
	cargo test -p rouse-gateway --locked --profile counted --test cluster -- alone::hot --nocapture

# What goes into its images is what `make test` has built: cargo makes a package's programs for its tests. Asked for by their
# names they would have other features, and all that they stand on would be built again.
.PHONY: test-node
test-node: ## A real kubelet and containerd with our images, which takes root (ARGS="NAME")
	@$(MAKE) cluster
	@echo "== the node: kubelet, containerd and kube-scheduler beside the test cluster, Pods in containers"
	cargo test --workspace --locked --no-run --test it --test node
	images/build "$(TARGET)/debug" "$(TARGET)/debug/images" rouse-stub engine-sim rouse-pause
	time cargo test --workspace --locked --test node -- $(ARGS)

.PHONY: test-engines
test-engines: $(VENV)/.complete ## The gateway against a real llama.cpp server and with the openai SDK, both from PyPI (ARGS="-k NAME")
	@echo "== real engine, real client: llama.cpp's server launched by requests, the openai package while models swap"
	cargo build --locked -p rouse-gateway
	export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway"; \
	    time "$(VENV)/bin/python" -m pytest -rP -p no:cacheprovider $(ENGINES) $(ARGS)

.PHONY: test-admin
test-admin: $(ADMIN_VENV)/.complete ## The admin API held to its own OpenAPI document by schemathesis, from PyPI (ARGS="-k NAME")
	@echo "== the admin API against its own description: the demonstration, and a gateway with a token"
	cargo build --locked -p rouse-gateway
	export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway"; \
	    time "$(ADMIN_VENV)/bin/python" -m pytest -rP -p no:cacheprovider $(ADMIN) $(ARGS)

.PHONY: test-clients
test-clients: $(CLIENTS_VENV)/.complete ## Stock clients from PyPI and npm, directly and through the gateway (ARGS="-k NAME")
	@echo "== stock clients: openai, anthropic, langchain-openai and npm's openai against engine-sim and through the gateway"
	cargo build --locked -p rouse-gateway
	export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway" \
	    ROUSE_NODE="$(CLIENTS_VENV)/bin/node" NODE_PATH="$(CLIENTS_VENV)/node_modules"; \
	    time "$(CLIENTS_VENV)/bin/python" -m pytest -q --durations=5 -p no:cacheprovider $(CLIENTS) $(ARGS)

.PHONY: soak-sim
soak-sim: ## The simulator for longer: SEEDS=200000 STEPS=1000
	ROUSE_SIM_SEEDS=$(SEEDS) ROUSE_SIM_STEPS=$(STEPS) cargo test --locked -p rouse --test sim -- --nocapture | $(SOME_TEST_RAN)

.PHONY: soak
soak: ## The recorded trace of 200 clients for ten minutes instead of one
	ROUSE_SOAK_SECONDS=$(SECONDS_OF_SOAK) cargo test --locked -p rouse-gateway --test it trace -- --nocapture | $(SOME_TEST_RAN)

# ---- images

# OCI archives of both programs, made of what is built here: no registry is asked for anything.
.PHONY: images
images: ## OCI archives of gateway and stub in target/images (needs buildah, or a running docker)
	cargo build --release --locked -p rouse-gateway -p rouse-stub
	images/build "$(TARGET)/release" "$(TARGET)/images"

# The programs as the other tests have built them: what is tested is the image, and a release build takes ten minutes.
.PHONY: test-images
test-images: ## The images, run with their own files only, read-only and as nobody's root
	@echo "== images: built from this tree's programs, and run"
	cargo build --locked -p rouse-gateway -p rouse-stub
	time images/build "$(TARGET)/debug" "$(TARGET)/debug/images"
	time images/test "$(TARGET)/debug/images"

# ---- measure

# A machine that does nothing else meanwhile, and two cores of it: what others use is seen and marked, not undone.
.PHONY: compare
compare: ## The gateway beside nginx, haproxy and sglang-router: the goals' table and plots (ARGS="--rounds 5 --only saturated")
	loadtests/compare/install $(INSTALL)
	cargo build --release --locked -p rouse-gateway -p rouse-stub -p engine-sim -p rouse-compare
	"$(TARGET)/release/compare" run $(ARGS)

.PHONY: compare-quick
compare-quick: ## The same for a first impression: two short rounds, beside nginx alone
	@$(MAKE) compare INSTALL="--only nginx" ARGS="--rounds 2 --seconds 1 --peers nginx --report-only $(ARGS)"

# ---- what a change must pass besides tests

.PHONY: lint
lint: fmt clippy docs deny ## Formatting, clippy, documentation, dependency rules; all without a warning

.PHONY: fmt
fmt:
	cargo fmt --all --check

.PHONY: clippy
clippy:
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	cargo clippy -p rouse-cluster -p rouse-gateway --test cluster --test node --all-features --locked -- -D warnings

.PHONY: docs
docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

# Advisories live in a repository of their own, which not every build machine can reach. Without it the other checks still
# hold, and the run says what it left out.
.PHONY: deny
deny: $(DENY)
	$(DENY) --locked --workspace check --hide-inclusion-graph bans licenses sources
	@if GIT_TERMINAL_PROMPT=0 timeout 20 git ls-remote --quiet --exit-code $(ADVISORIES) HEAD >/dev/null 2>&1; then \
	    $(DENY) --locked --workspace check advisories; \
	else \
	    echo "advisories: not checked, $(ADVISORIES) cannot be reached from here"; \
	fi

# ---- tools, made once

# A linter that runs for a second needs no optimised build: this takes about a minute instead of several.
$(DENY):
	CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	CARGO_TARGET_DIR="$(CACHE)/cargo-deny-$(DENY_VERSION)/build" \
	    cargo install cargo-deny --version $(DENY_VERSION) --locked --root "$(CACHE)/cargo-deny-$(DENY_VERSION)"
	rm -rf "$(CACHE)/cargo-deny-$(DENY_VERSION)/build"

# The stamp comes last: an interrupted build starts over. GGML_NATIVE=OFF keeps a cache usable on another processor.
$(VENV)/.complete:
	@echo "== Python environment for the engine tests; llama.cpp builds from source, about five minutes, once"
	rm -rf "$(VENV)"
	$(PYTHON) -m venv "$(VENV)"
	CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" \
	    "$(VENV)/bin/pip" install --disable-pip-version-check --progress-bar off --no-deps -r $(ENGINES)/requirements.txt
	touch $@

$(ADMIN_VENV)/.complete:
	@echo "== Python environment for the admin API's tests, once"
	rm -rf "$(ADMIN_VENV)"
	$(PYTHON) -m venv "$(ADMIN_VENV)"
	"$(ADMIN_VENV)/bin/pip" install --disable-pip-version-check --progress-bar off --no-deps -r $(ADMIN)/requirements.txt
	touch $@

# Node comes from PyPI like the rest, so that a machine needs none of its own and every machine has the same.
$(CLIENTS_VENV)/.complete:
	@echo "== Python and node environment for the client tests; about a minute, once"
	rm -rf "$(CLIENTS_VENV)"
	$(PYTHON) -m venv "$(CLIENTS_VENV)"
	"$(CLIENTS_VENV)/bin/pip" install --disable-pip-version-check --progress-bar off --no-deps -r $(CLIENTS)/requirements.txt
	cp $(CLIENTS)/package.json $(CLIENTS)/package-lock.json "$(CLIENTS_VENV)"
	cd "$(CLIENTS_VENV)" && PATH="$(CLIENTS_VENV)/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund
	touch $@
