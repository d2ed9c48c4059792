# Every way to build and check Rouse. `make` alone lists the targets; CONTRIBUTING.md says when to use which.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
# Parts of a run share two cores and one target directory; side by side they would only blur each other's timings.
.NOTPARALLEL:

PYTHON ?= python3
ARGS ?=
RINGS ?= ring1 ring2
SEEDS ?= 20000
STEPS ?= 1000
SECONDS_OF_SOAK ?= 600
# Each waits most of the time, and shares two cores with the control plane.
CLUSTER_TESTS_AT_ONCE ?= 12

# Each part of a gate has a budget: seconds on two idle cores with warm caches. `.ci/timed` prints what they took.
GATE := .ci/timed gate
PART := .ci/timed part

# Tools and Python environments are costly to make and belong to no checkout, so they live outside the tree. What cargo
# builds goes where cargo always puts it, unless CARGO_TARGET_DIR says otherwise.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rouse
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)

# Test runner and linter come as wheels, which bring the programs themselves; where those cannot be had, cargo builds them.
NEXTEST_VERSION := 0.9.148
NEXTEST := $(CACHE)/cargo-nextest-$(NEXTEST_VERSION)/bin/cargo-nextest
DENY_VERSION := 0.20.2
DENY := $(CACHE)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny
ADVISORIES := https://github.com/RustSec/advisory-db

# Helm, with which the chart is checked, from the Go module that testing/helm/go.mod pins. The tests in a
# cluster and on a node render the chart with it.
HELM := $(CACHE)/helm-$(shell sed -n 's|^.*helm.sh/helm/v3 v||p' testing/helm/go.mod | cut -d ' ' -f 1)/helm
export ROUSE_HELM := $(HELM)

ENGINES := gateway/tests/engines
VENV := $(CACHE)/engines-$(shell cat $(ENGINES)/requirements.txt | sha256sum | cut -c1-16)

ADMIN := gateway/tests/admin
ADMIN_VENV := $(CACHE)/admin-$(shell cat $(ADMIN)/requirements.txt | sha256sum | cut -c1-16)
CLIENTS := gateway/tests/clients
GPU := gateway/tests/gpu
CLIENTS_VENV := $(CACHE)/clients-$(shell cat $(CLIENTS)/requirements.txt $(CLIENTS)/package-lock.json | sha256sum | cut -c1-16)

PAGE := testing/page
PAGE_VENV := $(CACHE)/page-$(shell cat $(PAGE)/requirements.txt $(PAGE)/package-lock.json | sha256sum | cut -c1-16)

# One build shape for all tests: `--workspace` always, so that no package is built a second time with other features.
PROFILE ?= default
RUN_TESTS = "$(NEXTEST)" nextest run --workspace --locked --profile $(PROFILE)
PYTEST = -m pytest -q -p no:cacheprovider --timeout 300 --junitxml=target/nextest/pytest/junit.xml

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-14s %s\n", $$1, $$2 }'

.PHONY: run
run: ## Build the gateway and start its embedded demonstration (ARGS="--config FILE" for your own)
	cargo run --locked --profile quick -p rouse-gateway -- $(or $(ARGS),demo)

# ---- tests

.PHONY: test
test: ## Tests of the crates and of the lease in every interleaving; minutes, needs only cargo
	@$(GATE) "make test" 480 $(MAKE) test-crates

.PHONY: test-all
test-all: ## Everything: test, optimised programs held to their figures, chart and package, the images, the cluster, the node, then what needs Python
	@$(GATE) "make test-all" 1425 \
	    $(MAKE) test test-bench test-chart test-images test-cluster test-node-and-clients

# The node's tests wait for kubelets and images, and those of clients for interpreters: side by side they use two thirds of two
# cores, and take as long as the node's alone. What the node's print comes at the end.
.PHONY: test-node-and-clients
test-node-and-clients: programs ## test-node, and beside it test-admin, test-engines and test-clients
	@log=$$(mktemp); $(MAKE) test-node >"$$log" 2>&1 & node=$$!; trap 'kill $$node; rm "$$log"; exit 1' TERM INT; \
	    clients=0; $(MAKE) test-admin test-engines test-clients || clients=$$?; \
	    failed=0; wait $$node || failed=$$?; cat "$$log"; rm "$$log"; exit $$((clients | failed))

# What goes through a stub as well, and what of it cannot.
ROW := passthrough:: smuggling:: http2:: surface:: waiting:: stream stub_row::
# They put an engine to sleep, and no such order passes a stub.
NOT_IN_A_ROW := asking_wakes_a_model_and_looking_does_not models_are_listed_with_their_states responses_say_what_a_request_waited_for
# Their engine ends, or is killed by its pid; the process that the gateway has is the stub, which lives on.
NOT_IN_A_ROW += a_failure_after_the an_engine_killed_mid_stream an_engine_that_dies_mid_stream \
    a_stream_that_ran_when_the_gateway_was_killed
space := $(subst ,, )
alternatives = test(/$(subst $(space),|,$(strip $(1)))/)
IN_A_ROW = (binary(it) & $(call alternatives,$(ROW)) - $(call alternatives,$(NOT_IN_A_ROW)) | binary(timed) & test(disconnects))

.PHONY: test-crates
test-crates: $(NEXTEST)
	@$(PART) "building the tests" 240 $(RUN_TESTS) --no-run
	@$(PART) "the crates: units, the simulator's seeds, loom, the gateway against engine-sim" 200 $(RUN_TESTS)
	@$(PART) "gateway and stub in a row: bytes, framing, waits, cancellation" 60 env ROUSE_STUB=1 $(RUN_TESTS) \
	    -E 'package(rouse-gateway) & $(IN_A_ROW)'

# These programs are optimised as releases are, but for link-time optimisation, which takes an hour. One build serves two ends: the
# program that counts instructions, and the gateway and stub of the cluster tests that hold a promised figure.
OPTIMISED := $(TARGET)/counted
INSTRUCTIONS = "$(OPTIMISED)/instructions"

.PHONY: test-bench
test-bench: $(NEXTEST) ## Optimised programs held to what is recorded and promised: instructions, size, idle memory, a flood of clients (ARGS="--annotate CASE")
	@command -v valgrind >/dev/null || { echo "valgrind is missing, which counts instructions: apt-get install valgrind"; exit 1; }
	@command -v strip >/dev/null || { echo "strip is missing, without which sizes mean nothing: apt-get install binutils"; exit 1; }
	@$(PART) "the optimised programs" 240 $(MAKE) build-counted
	@$(PART) "the programs' size, and memory when idle" 10 gateway/benches/size "$(OPTIMISED)" --check
	@$(PART) "building the test of a flood" 60 $(RUN_TESTS) --test timed --no-run
	@$(PART) "a flood of clients that leave" 10 env ROUSE_OPTIMISED="$(OPTIMISED)" $(RUN_TESTS) --test timed --run-ignored only \
	    -E 'test(/^flood::/)'
	@$(PART) "instructions per request and per event, over pipes in memory" 240 $(INSTRUCTIONS) $(ARGS)

.PHONY: bench-record
bench-record: build-counted ## Record what test-bench counts as what it is held to from now on
	gateway/benches/size "$(OPTIMISED)" --record
	$(INSTRUCTIONS) --record

.PHONY: size
size: ## The size of the shipped programs and their memory when idle (a release build takes a quarter of an hour)
	cargo build --release --locked -p rouse-gateway -p rouse-stub
	gateway/benches/size "$(TARGET)/release"

# What the cluster tests run is built once and kept in the cache; testing/cluster/build says what and how.
.PHONY: cluster
cluster: ## Build the test cluster: etcd and Kubernetes from pinned Go modules, once (RINGS="ring1 ring2")
	testing/cluster/build $(RINGS)

# One control plane for all tests, which are processes: `with-cluster` starts it and says where it is.
.PHONY: test-cluster
test-cluster: $(NEXTEST) $(HELM) ## The cluster tests: a real kube-apiserver on loopback, Pods as processes (ARGS="NAME")
	@$(PART) "Kubernetes for the cluster's tests" 5 $(MAKE) cluster RINGS=ring1
	@$(PART) "building the cluster's tests" 60 $(RUN_TESTS) --test cluster --no-run
	@$(PART) "the optimised programs" 240 $(MAKE) build-counted
	@$(PART) "the cluster: a real control plane, Pods as processes" 525 \
	    env ROUSE_OPTIMISED="$(OPTIMISED)" "$(TARGET)/debug/with-cluster" \
	    $(RUN_TESTS) --test cluster --test-threads $(CLUSTER_TESTS_AT_ONCE) $(ARGS)

# Gateways have the rights that the chart renders: for their own namespace, or for every one. The gate runs the first of
# both and the soak the second.
.PHONY: test-cluster-chart
test-cluster-chart: ## The cluster tests twice, with the chart's rights for one namespace and for every namespace (ARGS="NAME")
	@env ROUSE_RIGHTS=namespace $(MAKE) test-cluster
	@env ROUSE_RIGHTS=cluster $(MAKE) test-cluster

.PHONY: hot-start
hot-start: PROFILE = soak
hot-start: $(NEXTEST) $(HELM) ## How long requesters wait for sleepers that are there, twenty at once in ten rounds, held to what is promised
	@$(MAKE) cluster build-counted RINGS=ring1
	env ROUSE_SOAK=1 ROUSE_OPTIMISED="$(OPTIMISED)" $(RUN_TESTS) --test cluster --no-capture -E 'test(/^alone::hot/)'

.PHONY: fleet-scale
fleet-scale: PROFILE = soak
fleet-scale: $(NEXTEST) $(HELM) ## A leader with 1,000 models, 5,000 engines and 10 gateways, held to what is promised
	@$(MAKE) cluster build-counted RINGS=ring1
	env ROUSE_SOAK=1 ROUSE_OPTIMISED="$(OPTIMISED)" $(RUN_TESTS) --test cluster --no-capture -E 'test(/^fleet_scale::/)'

# What goes into its images is what the tests have built: cargo makes a package's programs for its tests. Asked for by their
# names they would have other features, and all that they stand on would be built again.
.PHONY: programs
programs: $(NEXTEST)
	@$(PART) "the programs, as the tests have them" 30 $(RUN_TESTS) --test it --no-run

# What all the tests run, in one go; and what `test-bench` runs, whose last crate keeps one core busy for minutes.
.PHONY: build-tests
build-tests: $(NEXTEST)
	@$(PART) "building the tests" 300 $(RUN_TESTS) --lib --bins --test '*' --no-run

.PHONY: build-counted
build-counted:
	cargo build --locked --profile counted -p rouse-gateway -p rouse-stub --features rouse-gateway/pipe \
	    --bin instructions --bin rouse-gateway --bin rouse-stub

.PHONY: tools
tools: $(DENY) $(HELM) $(VENV)/.complete $(ADMIN_VENV)/.complete $(CLIENTS_VENV)/.complete

# Its tests share one node, so they are threads of one process, which has a limit.
.PHONY: test-node
test-node: programs $(HELM) ## A real kubelet and containerd with our images, which takes root (ARGS="NAME")
	@$(PART) "Kubernetes for the node" 5 $(MAKE) cluster
	@$(PART) "building the node's tests" 60 cargo test --workspace --locked --no-run --test node
	@$(PART) "the node's images" 25 images/build "$(TARGET)/debug" "$(TARGET)/debug/images" \
	    rouse-gateway rouse-stub engine-sim rouse-pause
	@$(PART) "the node: kubelet, containerd and kube-scheduler, Pods in containers" 215 \
	    timeout --kill-after 10 900 cargo test --workspace --locked --test node -- $(ARGS)

.PHONY: slot-switches
slot-switches: programs $(HELM) ## How long a switch between models on slots takes, with optimised programs on a real kubelet, held to what is promised
	@$(MAKE) cluster build-counted
	images/build "$(TARGET)/debug" "$(TARGET)/debug/images" rouse-stub engine-sim rouse-pause
	images/build "$(OPTIMISED)" "$(OPTIMISED)/images" rouse-stub
	env ROUSE_OPTIMISED="$(OPTIMISED)" timeout --kill-after 10 900 \
	    cargo test --workspace --locked --test node -- --nocapture slots::switches

.PHONY: test-engines
test-engines: $(VENV)/.complete programs ## The gateway against a real llama.cpp server and with the openai SDK, both from PyPI (ARGS="-k NAME")
	@export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway"; \
	    $(PART) "a real engine and a real client: llama.cpp and the openai package" 60 \
	    "$(VENV)/bin/python" $(PYTEST) $(ENGINES) $(ARGS)

.PHONY: test-admin
test-admin: $(ADMIN_VENV)/.complete programs ## The admin API held to its own OpenAPI document by schemathesis, from PyPI (ARGS="-k NAME")
	@export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway"; \
	    $(PART) "the admin API against its own description" 60 "$(ADMIN_VENV)/bin/python" $(PYTEST) $(ADMIN) $(ARGS)

.PHONY: test-clients
test-clients: $(CLIENTS_VENV)/.complete programs ## Stock clients from PyPI, npm and Java, directly and through the gateway (ARGS="-k NAME")
	@export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway" \
	    ROUSE_NODE="$(CLIENTS_VENV)/bin/node" NODE_PATH="$(CLIENTS_VENV)/node_modules"; \
	    $(PART) "stock clients: openai, anthropic, langchain-openai, npm's openai, Java's HttpClient" 95 \
	    "$(CLIENTS_VENV)/bin/python" $(PYTEST) $(CLIENTS) $(ARGS)

# Not part of `test-all`: it takes a Chromium, which is large.
.PHONY: test-page
test-page: $(PAGE_VENV)/.complete programs ## The page in headless Chromium, with models that take turns (ARGS="--test-name-pattern NAME")
	@$(PART) "the page: swaps, orders, keyboard, accessibility" 90 env ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway" \
	    ROUSE_PAGE_TOOLS="$(PAGE_VENV)" $(PAGE)/run $(ARGS)

.PHONY: record
record: $(PAGE_VENV)/.complete programs ## The pictures and recordings of the documents made anew, in docs/images, of the demonstration as it runs
	env ROUSE_GATEWAY="$(TARGET)/debug/rouse-gateway" ROUSE_PAGE_TOOLS="$(PAGE_VENV)" $(PAGE)/record

# Not part of `test-all`, which runs on machines without a GPU. With ROUSE_GATEWAY and ROUSE_STUB set, the tests run these
# programs and need no cargo.
.PHONY: test-gpu
test-gpu: $(if $(and $(ROUSE_GATEWAY),$(ROUSE_STUB)),,programs) ## The gateway and the stub on a real NVIDIA GPU that nothing else uses; fails without one (ARGS="-k NAME")
	@export PYTHONDONTWRITEBYTECODE=1 ROUSE_GATEWAY="$(or $(ROUSE_GATEWAY),$(TARGET)/debug/rouse-gateway)" \
	    ROUSE_STUB="$(or $(ROUSE_STUB),$(TARGET)/debug/rouse-stub)"; \
	    $(PART) "a real GPU: NVML, memory, and models that take turns" 240 "$(PYTHON)" $(PYTEST) $(GPU) $(ARGS)

# Not part of a gate: it builds the gateway from nothing, as a reader of the pages does.
.PHONY: newcomer
newcomer: ## README and quickstarts followed as they are written, with the time of each step (PARTS="machine cluster"; the second takes root)
	packaging/newcomer $(or $(PARTS),machine cluster)

# What the gate samples, whole: more seeds, longer traces, each write of a leader.
.PHONY: soak
soak: $(NEXTEST) ## Everything exhaustive, whole (SEEDS=20000 STEPS=1000 SECONDS_OF_SOAK=600)
	@$(GATE) "make soak" 7200 $(MAKE) PROFILE=soak soak-sim soak-crates soak-cluster

# Each of the three also alone, with the time limits of a soak.
soak-sim soak-crates soak-cluster: PROFILE = soak

.PHONY: soak-sim
soak-sim: $(NEXTEST) ## The simulator alone, and for as long as wanted (SEEDS=200000 STEPS=1000)
	@$(PART) "simulated worlds" 3000 env ROUSE_SIM_SEEDS=$(SEEDS) ROUSE_SIM_STEPS=$(STEPS) $(RUN_TESTS) \
	    --no-capture -E 'package(rouse) & (binary(sim) | binary(pairing))'

.PHONY: soak-crates
soak-crates: $(NEXTEST)
	@$(PART) "the crates, whole, and the recorded trace" 1500 \
	    env ROUSE_SOAK=1 ROUSE_SOAK_SECONDS=$(SECONDS_OF_SOAK) $(RUN_TESTS) \
	    -E 'not (package(rouse) & (binary(sim) | binary(pairing)))'

.PHONY: soak-cluster
soak-cluster: $(NEXTEST) $(HELM)
	@$(PART) "Kubernetes for the cluster's tests" 5 $(MAKE) cluster RINGS=ring1
	@$(PART) "building the cluster's tests" 60 $(RUN_TESTS) --test cluster --no-run
	@$(PART) "the optimised programs" 240 $(MAKE) build-counted
	@$(PART) "the cluster, whole" 3900 env ROUSE_SOAK=1 ROUSE_RIGHTS=cluster ROUSE_OPTIMISED="$(OPTIMISED)" \
	    "$(TARGET)/debug/with-cluster" $(RUN_TESTS) --test cluster --test-threads $(CLUSTER_TESTS_AT_ONCE) $(ARGS)

# ---- images

# sboms FOLDER: the list of what is in each program, beside it.
sboms = for program in rouse-gateway rouse-stub; do packaging/sbom $$program --output "$(1)/$$program.cdx.json"; done

# OCI archives of both programs, made of what is built here: no registry is asked for anything.
.PHONY: images
images: ## OCI archives of gateway and stub in target/images (needs buildah, or a running docker)
	cargo build --release --locked -p rouse-gateway -p rouse-stub
	$(call sboms,$(TARGET)/release)
	images/build "$(TARGET)/release" "$(TARGET)/images"

# The programs as the other tests have built them: what is tested is the image, and a release build takes ten minutes.
.PHONY: test-images
test-images: programs ## The images, run with their own files only, read-only and as nobody's root
	@$(call sboms,$(TARGET)/debug)
	@$(PART) "images: built from this tree's programs" 60 images/build "$(TARGET)/debug" "$(TARGET)/debug/images"
	@$(PART) "images: run" 60 images/test "$(TARGET)/debug/images"
	@$(PART) "images: of two architectures" 15 images/check

# ---- the chart and the package

.PHONY: chart
chart: $(HELM) ## Lint and render the chart with each file of charts/values (ARGS=--record writes the manifests that it makes anew)
	HELM="$(HELM)" charts/check $(ARGS)

.PHONY: package
package: ## A Debian package of the gateway in target/packages (a release build takes a quarter of an hour)
	cargo build --release --locked -p rouse-gateway
	rm -f "$(TARGET)"/packages/rouse-gateway_*.deb
	packaging/sbom rouse-gateway --output "$(TARGET)/release/rouse-gateway.cdx.json"
	packaging/debian/build "$(TARGET)/release/rouse-gateway" "$(TARGET)/packages" "$(TARGET)/release/rouse-gateway.cdx.json"
	packaging/debian/check "$(TARGET)"/packages/rouse-gateway_*.deb

.PHONY: test-chart
test-chart: $(HELM) ## The chart linted and rendered, a Debian package built and checked; neither is installed
	@$(MAKE) build-package
	@$(PART) "the chart: rendered with every set of values" 12 env HELM="$(HELM)" charts/check
	@$(PART) "the SBOMs: checked" 6 packaging/check-sbom "$(OPTIMISED)"/rouse-*.cdx.json
	@$(PART) "the package: checked" 4 packaging/debian/check $(PACKAGE)

# Not part of `test-all`: its first run fetches a Debian.
.PHONY: test-package
test-package: build-package ## The Debian package installed where systemd boots as PID 1: starts, restarts, an upgrade, removal (takes root)
	@$(PART) "the package: in a Debian that boots" 20 packaging/debian/boot $(PACKAGE) packaging/debian/boot-check

# It has the optimised program that `test-bench` has built, packed without much compression.
PACKAGE = "$(OPTIMISED)"/packages/rouse-gateway_*.deb
.PHONY: build-package
build-package:
	@$(PART) "the optimised programs" 240 $(MAKE) build-counted
	@$(call sboms,$(OPTIMISED))
	@rm -rf "$(OPTIMISED)/packages"
	@$(PART) "the package: built" 6 env DPKG_DEB_COMPRESSOR_LEVEL=0 \
	    packaging/debian/build "$(OPTIMISED)/rouse-gateway" "$(OPTIMISED)/packages" "$(OPTIMISED)/rouse-gateway.cdx.json"

# ---- measure

# A machine that does nothing else meanwhile, and two cores of it: what others use is seen and marked, not undone.
.PHONY: compare
compare: build-compare ## The gateway beside nginx, haproxy and sglang-router: the goals' table and plots (ARGS="--rounds 5 --only saturated")
	"$(TARGET)/release/compare" run $(ARGS)

.PHONY: compare-quick
compare-quick: ## The same for a first impression: two short rounds, beside nginx alone
	@$(MAKE) compare INSTALL="--only nginx" ARGS="--rounds 2 --seconds 1 --peers nginx --report-only $(ARGS)"

.PHONY: compare-wrk
compare-wrk: INSTALL = --only nginx --wrk
compare-wrk: build-compare ## CPU per request of gateway and stub beside nginx, with wrk as the client (ARGS="--pairs 7 --seconds 5")
	"$(TARGET)/release/compare" wrk $(ARGS)

.PHONY: compare-memory
compare-memory: INSTALL = --only nginx
compare-memory: build-compare ## Memory of an idle connection and of an open stream: gateway, stub, nginx (ARGS="--rounds 3")
	"$(TARGET)/release/compare" memory $(ARGS)

.PHONY: build-compare
build-compare:
	loadtests/compare/install $(INSTALL)
	cargo build --release --locked -p rouse-gateway -p rouse-stub -p engine-sim -p rouse-compare

# ---- what a change must pass besides tests

.PHONY: lint
lint: fmt clippy docs deny ## Formatting, clippy, documentation, dependency rules; all without a warning

.PHONY: fmt
fmt:
	@$(PART) "formatting" 10 cargo fmt --all --check

CLIPPY = cargo clippy --workspace --all-features --locked
# The second call is for the targets that run only when they are asked for: `--all-targets` leaves them out.
.PHONY: clippy
clippy:
	@$(PART) "clippy" 150 $(CLIPPY) --all-targets -- -D warnings
	@$(PART) "clippy, the tests of cluster and node" 60 $(CLIPPY) --test cluster --test node -- -D warnings

.PHONY: docs
docs:
	@$(PART) "documentation" 60 env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

# Advisories live in a repository of their own, which not every build machine can reach. Without it the other checks still
# hold, and the run says what it left out.
.PHONY: deny
deny: $(DENY)
	@$(PART) "dependency rules" 10 "$(DENY)" --locked --workspace check --hide-inclusion-graph bans licenses sources
	@if GIT_TERMINAL_PROMPT=0 timeout 20 git ls-remote --quiet --exit-code $(ADVISORIES) HEAD >/dev/null 2>&1; then \
	    $(DENY) --locked --workspace check advisories; \
	else \
	    echo "advisories: not checked, $(ADVISORIES) cannot be reached from here"; \
	fi

# ---- tools, made once

# tool NAME VERSION PROGRAM: from its wheel. Cargo's own way takes minutes; optimised little, since it runs for seconds.
define tool
	@echo "== $(1) $(2), once"
	rm -rf "$(CACHE)/$(1)-$(2)"
	if ! { $(PYTHON) -m venv "$(CACHE)/$(1)-$(2)" && "$(CACHE)/$(1)-$(2)/bin/pip" install -q --disable-pip-version-check \
	        --no-deps --only-binary :all: astral-dev-toolchain-$(1)==$(2); }; then \
	    CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	    CARGO_TARGET_DIR="$(CACHE)/$(1)-$(2)/build" \
	        cargo install $(1) --version $(2) --locked --root "$(CACHE)/$(1)-$(2)"; \
	    rm -rf "$(CACHE)/$(1)-$(2)/build"; \
	fi
	test -x $@ && touch $@
endef

$(NEXTEST):
	$(call tool,cargo-nextest,$(NEXTEST_VERSION))

$(DENY):
	$(call tool,cargo-deny,$(DENY_VERSION))

$(HELM):
	testing/helm/build "$@"

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

# Chromium is Debian's: a browser that Playwright brings itself comes from no registry.
$(PAGE_VENV)/.complete:
	@echo "== Node environment for the page's tests, once"
	rm -rf "$(PAGE_VENV)"
	$(PYTHON) -m venv "$(PAGE_VENV)"
	"$(PAGE_VENV)/bin/pip" install --disable-pip-version-check --progress-bar off --no-deps -r $(PAGE)/requirements.txt
	cp $(PAGE)/package.json $(PAGE)/package-lock.json "$(PAGE_VENV)"
	cd "$(PAGE_VENV)" && PATH="$(PAGE_VENV)/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund
	touch $@
