# posthaste: two commands matter to a newcomer, `make demo` and `make test`.

GO       ?= go
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS  := -s -w -X main.version=$(VERSION)
# One static binary, without gin's MessagePack, a seventh of it, which nothing uses. The Dockerfile runs the same line; a
# test compares them. Everything else that is compiled has the same tag: no other package takes so long.
BUILD    := CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -tags=nomsgpack -ldflags='$(LDFLAGS)'
export GOFLAGS += -tags=nomsgpack
# The compiler and the tests collect their garbage less often, which saves a sixth of the compiler's time. What is measured
# runs as it does elsewhere.
test compiled check lint: export GOGC ?= 400
LINT     := bin/tools/golangci-lint
BINARY   ?= bin/posthaste
# Two more modules, see their go.mod. Their tests read files outside them, which the test cache does not track, hence
# -count=1.
GRAFANA  := cd grafana && $(GO)
LAB      := cd lab && $(GO)
# Servers that the tests start.
SERVERS  := postgres redis valkey pgbouncer prometheus
# One fuzz target per run: go test accepts only one.
FUZZTIME ?= 60s
BENCH    ?= .
# How often bench-compare measures each version. With fewer than 6, benchstat reports no difference.
ROUNDS   ?= 10

.DEFAULT_GOAL := help
.PHONY: help build demo test compiled test-full test-versions mutations steps test-browser test-languages pictures site proof check lint fmt docs dashboards manifests vulnerabilities release-snapshot module fuzz bench bench-compare bench-peers rules clean

help: ## show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build bin/posthaste, one static binary
	$(BUILD) -o $(BINARY) ./cmd/posthaste

demo: ## see it work on its own servers; with ARGS=--once it exits when done
	@./scripts/ensure.sh postgres redis
	@$(MAKE) --no-print-directory build
	@exec ./bin/posthaste demo $(ARGS)

# Packages whose tests run without the race detector: they start whole programs, hundreds of times, or only compute, and the
# detector would have more than a tenth of their time. What could race in a program is in packages whose own tests run
# under it. Those of internal/bench and internal/demo have whole relays in their own process, at full rate and with the
# mode switched under load; and RACED are tests of the program that run under it.
PLAIN := $(addprefix posthaste/,cmd/posthaste docs internal/model internal/exemplar internal/gendocs internal/mutations internal/traceparent)
RACE   = $(filter-out $(PLAIN),$(shell $(GO) list ./...))
RACED := ^Test(TogglesUnderLoad|TwoRelaysSweepTogether|ARestartOfRedisIsNoLoss|SlotDropped|CreditsEndToEnd)$$

test: ## install what tests need, run every test against real servers
	@./scripts/ensure.sh $(SERVERS) cc # the race detector needs a compiler
	@# Two or three packages at a time, because linking a test is for one core, and three to six tests of each even on two
	@# cores: each starts its own servers and processes, and mostly waits for them. A program with the race detector sleeps
	@# for a second before it ends, by default, and the tests start hundreds. `make check` has all of go vet.
	@# The one that takes longest begins first. The calls of internal/socket are others with the race detector, and the
	@# worlds of relay (TestCrashPoints) are fewer. What comes next is compiled meanwhile, while these tests wait.
	@nice -n 19 $(MAKE) --no-print-directory compiled & \
		$(GO) test -vet=off -p 2 -parallel 6 -timeout 30m -skip '$(RACED)' $(PLAIN) ./internal/socket ./relay; \
		status=$$?; wait; exit $$status
	GORACE=atexit_sleep_ms=10 $(GO) test -race -vet=off -p 3 -parallel 3 -timeout 30m ./sink/jetstream $(RACE)
	$(GO) test -race -vet=off -parallel 5 -timeout 30m -run '$(RACED)' ./cmd/posthaste
	$(GRAFANA) test -count=1 ./...
	$(LAB) test -count=1 ./containers

# What the later steps of `make test` run, except for linking.
compiled:
	@$(GO) list -race -test -export $(RACE) ./cmd/posthaste >/dev/null
	@$(GRAFANA) list -test -export ./... >/dev/null
	@$(LAB) list -test -export ./containers >/dev/null

# The counts of the acceptance list, the two longest packages first; `make test` has run all other tests as they are. Then
# the tests that bound memory or time. Those have the build tag "full" and the name TestFull…, and run alone, in sequence
# and without the race detector, which would distort the figures.
test-full: ## larger counts where there are any, and the memory and timing bounds, serially
	@./scripts/ensure.sh $(SERVERS)
	chosen="$$(./scripts/full-tests.sh ./cmd/posthaste ./relay)" && \
		POSTHASTE_TEST_FULL=1 $(GO) test -vet=off -p 2 -parallel 3 -count=1 -timeout 45m $$chosen
	POSTHASTE_TEST_FULL=1 $(GO) test -tags nomsgpack,full -run '^TestFull' -p 1 -parallel 1 -count=1 -timeout 30m ./...

test-versions: ## core fault tests on Postgres 14 to 18, Redis, Valkey, and pg_upgrade; ARGS="postgres-18 upgrade" selects
	@./scripts/ensure.sh redis valkey node
	@./scripts/test-versions.sh $(ARGS)

mutations: ## take each safeguard out of a copy of the code, and see a test go red; ARGS selects
	@./scripts/ensure.sh postgres redis
	@$(GO) run ./internal/mutations $(ARGS)

# PAIRS is how many second steps are crossed behind each first one; PAIRS=all crosses all pairs that docs/proof.md defines.
PAIRS    ?= 4

steps: ## write down every step that others can see, kill and freeze a relay at each, and at pairs of them
	@./scripts/ensure.sh postgres redis
	POSTHASTE_TEST_STEPS=write $(GO) test -run '^TestWriteSteps$$' -count=1 -timeout 10m ./cmd/posthaste ./sink/jetstream
	POSTHASTE_TEST_STEPS=all POSTHASTE_TEST_PAIRS=$(PAIRS) $(GO) test -count=1 -timeout 0 -v \
		-run '^Test(EveryStepHasAFailpoint|AKillAtEachStep|AFreezeAtEachStep|PairsOfKills)$$' ./cmd/posthaste
	POSTHASTE_TEST_STEPS=all $(GO) test -count=1 -timeout 0 -v -run '^Test(Kills|Freezes)$$' ./sink/jetstream

# The pages run in Debian's chromium, against processes that a Go test starts; node only drives it.
BROWSER := api/admin/console/browser

test-browser: ## the console in a real browser, against real processes
	@./scripts/ensure.sh postgres redis chromium node
	cd $(BROWSER) && npm ci --no-audit --no-fund --loglevel=error
	$(GO) test -tags nomsgpack,browser -run '^TestConsoleInABrowser$$' -count=1 -timeout 5m ./cmd/posthaste

test-languages: ## the Python and Node programs of docs/other-languages.md, against real servers
	@./scripts/ensure.sh postgres redis node python
	cd examples/node && npm ci --no-audit --no-fund --loglevel=error
	$(GO) test -tags nomsgpack,languages -run '^TestOtherLanguages$$' -count=1 -timeout 10m ./docs

site: ## the pages as a site with a search, in bin/site; a link that leads nowhere is an error
	@./scripts/ensure.sh node
	cd docs && npm ci --no-audit --no-fund --loglevel=error && npx --no-install vitepress build
	@echo 'see it at http://localhost:4173: cd docs && npx vitepress preview'

pictures: ## regenerate the console's pictures in docs/img
	@./scripts/ensure.sh postgres redis chromium node
	cd $(BROWSER) && npm ci --no-audit --no-fund --loglevel=error
	POSTHASTE_SCREENSHOTS=$(CURDIR)/docs/img $(GO) test -tags nomsgpack,browser -run '^TestConsoleInABrowser$$' -count=1 -timeout 15m ./cmd/posthaste

# A short one takes a quarter of an hour; docs/proof.md has a long one.
DURATION ?= 10m
SEED     ?= 1

proof: ## a campaign of faults; its result goes into docs/proof.md
	@./scripts/ensure.sh postgres redis
	@$(MAKE) --no-print-directory build
	scripts/proof.sh bin/posthaste $(DURATION) $(SEED)

check: lint rules ## formatting, linters, modules, rules, manifests, generated documents
	$(LAB) test -count=1 ./deploy ./peers
	$(GO) mod tidy -diff
	$(GRAFANA) mod tidy -diff
	$(LAB) mod tidy -diff
	$(GO) mod verify
	$(GO) run ./cmd/posthaste gen-docs --check docs
	@# Releases have these, and nothing else compiles them.
	GOOS=darwin $(BUILD) -o /dev/null ./cmd/posthaste
	GOOS=windows $(BUILD) -o /dev/null ./cmd/posthaste

lint: $(LINT) ## formatting and linters only
	$(LINT) fmt --diff
	$(GO) vet ./...
	$(LINT) run ./...
	cd grafana && ../$(LINT) run ./...
	cd lab && ../$(LINT) run ./...

fmt: $(LINT) ## format every Go file
	$(LINT) fmt

# The linter is built once per pinned version.
$(LINT): scripts/lint.mod scripts/lint.sum
	$(GO) build -modfile=scripts/lint.mod -trimpath -buildvcs=false -ldflags='-s -w' -o $(LINT) github.com/golangci/golangci-lint/v2/cmd/golangci-lint

rules: ## check the Prometheus configuration and rules, and run the rules' tests
	@./scripts/ensure.sh prometheus
	promtool check config grafana/prometheus/prometheus.yml
	promtool check rules --lint=all --lint-fatal grafana/prometheus/rules/*.yml
	promtool test rules grafana/prometheus/tests/*.yml

docs: ## write the generated documents
	$(GO) run ./cmd/posthaste gen-docs docs

dashboards: ## write the Grafana dashboards
	$(GRAFANA) run ./generate dashboards

manifests: ## write the PrometheusRule for Kubernetes; RUNBOOK=https://… is the address of your runbook
	RUNBOOK='$(RUNBOOK)' $(LAB) run ./deploy/generate

vulnerabilities: ## known vulnerabilities in what the binary calls; asks vuln.go.dev
	$(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

release-snapshot: ## what a release would have, in dist; publishes nothing
	rm -rf dist
	scripts/release.sh dist

module: ## rename the module, as in MODULE=example.org/you/posthaste, so that others can import it from there
	@scripts/module.sh '$(MODULE)'

fuzz: ## fuzz every target for FUZZTIME each
	@for dir in $$($(GO) list -f '{{.Dir}}' ./...); do \
		for target in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]+' $$dir/*_test.go 2>/dev/null | sed 's/^func //'); do \
			echo "== $$dir $$target"; (cd $$dir && $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) .) || exit 1; \
		done; \
	done

bench: ## Go benchmarks; BENCH selects. For the whole pipeline: posthaste bench
	@./scripts/ensure.sh $(SERVERS)
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -p 1 ./...

bench-compare: ## this tree against commit BASE, in turns; ARGS="latency --rate=500" selects, ROUNDS repeats
	@./scripts/ensure.sh postgres redis
	@./scripts/bench-compare.sh '$(BASE)' '$(ROUNDS)' $(ARGS)

bench-peers: ## beside what a user would pick instead; ARGS="--rates=1000 --peers=posthaste,batch" selects
	@./scripts/ensure.sh postgres redis
	@$(MAKE) --no-print-directory build
	@$(LAB) build -o ../bin/bench-peers ./peers
	@exec ./bin/bench-peers --posthaste=bin/posthaste $(ARGS)

clean: ## remove what was built
	rm -rf bin dist $(BROWSER)/node_modules examples/node/node_modules docs/node_modules
