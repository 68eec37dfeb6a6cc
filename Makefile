# What a newcomer runs: `make run`, then `make test`. CI runs .ci/run, which calls
# both and `make e2e`.

# go.mod requires the oldest Caddy that works; this is the newest, and what is built.
CADDY_VERSION  := v2.11.9
XCADDY_VERSION := v0.4.5
MODULE         := github.com/mcphealth/mcphealth

# The race detector needs a C compiler; without one the tests run all the same.
RACE := $(shell command -v $${CC:-gcc} >/dev/null 2>&1 && echo -race)
SOURCES := $(shell find mcphealth caddymodule cmd internal docs -name '*.go' -not -name '*_test.go' 2>/dev/null) $(wildcard caddymodule/status/*) docs/verdicts.md go.mod go.sum

# In CI, tests with real processes get a second chance; see .ci/again and .ci/gotest.
AGAIN := $(if $(CI),$(CURDIR)/.ci/again,)
GOTEST := $(if $(CI),$(CURDIR)/.ci/gotest,go test)

.PHONY: help run build test newest yaegi adapt suite e2e page traefik traefik-table traefik-overhead reliability operations soak rules accuracy bench scale fuzz flake lint vuln clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

run: build bin/mcp-server ## Caddy with the modules and three small MCP servers, on loopback
	examples/run

build: bin/caddy bin/mcphealth ## bin/caddy (with the modules) and bin/mcphealth

# The module is this folder, and a registry need not know it: "|off" has Go take
# any answer to the question for it as "no", where a comma would end on some.
bin/caddy: $(SOURCES)
	@mkdir -p bin && echo "xcaddy build $(CADDY_VERSION) with this folder's caddymodule"
	@GOWORK=off GOPROXY="$$(go env GOPROXY | cut -d, -f1)|off" go run github.com/caddyserver/xcaddy/cmd/xcaddy@$(XCADDY_VERSION) build $(CADDY_VERSION) \
		--with $(MODULE)/caddymodule --replace $(MODULE)=$(CURDIR) --output bin/caddy >bin/xcaddy.log 2>&1 || { cat bin/xcaddy.log; exit 1; }

bin/mcphealth: $(SOURCES)
	CGO_ENABLED=0 go build -trimpath -o bin/mcphealth ./cmd/mcphealth

bin/mcp-server: $(shell find examples/servers -name '*.go') examples/servers/go.mod
	cd examples/servers && CGO_ENABLED=0 go build -o ../../bin/mcp-server .

test: ## vet and all tests that need Go alone: core, Caddy in process, the interpreter
	go vet ./...
	$(GOTEST) $(RACE) ./...
	$(MAKE) yaegi

yaegi: ## the core in Traefik's interpreter
	cd test/yaegi && go vet ./... && $(GOTEST) -count=1 ./... # the test cache does not see what is interpreted

adapt: ## the golden Caddyfiles
	go test ./caddymodule -run Adapt

# What go.mod becomes in a build with the newest Caddy.
bin/newest.mod: go.mod go.sum Makefile
	@mkdir -p bin && cp go.mod $@ && cp go.sum bin/newest.sum
	go get -modfile=$@ github.com/caddyserver/caddy/v2@$(CADDY_VERSION)
	go mod tidy -modfile=$@

newest: bin/newest.mod ## the tests of the Caddy module with the newest Caddy, compiled as bin/caddy is
	CGO_ENABLED=0 $(GOTEST) -modfile=$(CURDIR)/bin/newest.mod -trimpath -tags=nobadger,nomysql,nopgx -count=1 ./caddymodule

suite: bin/mcphealth bin/caddy ## the public bug cases, against the command and Caddy (Python 3.11)
	PYTHONDONTWRITEBYTECODE=1 python3 test/suite/run.py --open --cmd 'bin/mcphealth probe --json {args} {url}'
	test/suite/judge-caddy

e2e: build ## real Caddy, real MCP servers, real clients (installs from Debian and npm what is missing)
	test/e2e/install
	$(AGAIN) $(MAKE) suite
	cd test/e2e && go vet ./... && $(GOTEST) -timeout 20m -count=1 ./...

page: build ## the status page in a real browser (installs Debian's chromium); screenshots in test/page/shots
	test/page/install
	cd test/page && $(AGAIN) npm test --silent

traefik: ## a real Traefik with the plugin, file and Docker providers (installs Debian's docker.io)
	test/traefik/install
	cd test/traefik && go vet ./... && $(GOTEST) -timeout 30m -count=1 ./...
	test/suite/judge-traefik

reliability: build ## hostile peers, faults on the wire, kills at random, against Caddy and Traefik
	cd test/reliability && go vet ./... && $(GOTEST) -timeout 20m -count=1 ./...

soak: build ## mixed load with random kills, stops, drains and reloads, for half an hour; SOAK_SEED replays one
	cd test/reliability && SOAK=$${SOAK:-30m} RELIABILITY_LONG=1 go test -timeout 90m -count=1 -v -run 'Soak|SessionFlood' ./...

rules: ## Prometheus rules, the Grafana dashboard, metrics (installs Debian's prometheus)
	examples/prometheus/install
	go test -count=1 ./caddymodule -run '^(TestRules|TestDashboard|TestMetricsAreWellFormed|TestMetricNames)$$'

traefik-table: ## measures docs/benchmarks.md: a container recreated under load, all set-ups (12 minutes)
	test/traefik/install
	cd test/traefik && MCPHEALTH_TABLE=$(CURDIR)/docs/benchmarks.md go test -v -run '^TestTable$$' -parallel 3 -timeout 40m -count=1 .

traefik-overhead: ## measures docs/benchmarks.md: what the plugin costs a request, against none and a no-op
	cd test/traefik && MCPHEALTH_OVERHEAD=$(CURDIR)/docs/benchmarks.md go test -v -run '^TestOverhead$$' -timeout 20m -count=1 .

operations: build ## what docs/operations.md shows: HAProxy, nginx, stock Caddy, Docker, Kubernetes, serve under fire
	test/operations/install
	cd test/operations && go vet ./... && $(GOTEST) -timeout 20m -count=1 ./...

traefik-binary = test -x test/e2e/.cache/bin/traefik || go build -C test/traefik/binary -o $(CURDIR)/test/e2e/.cache/bin/traefik github.com/traefik/traefik/v3/cmd/traefik

accuracy: build ## the bug cases judged by Caddy, Traefik, HAProxy and us (installs Debian's haproxy)
	bench/accuracy/install
	$(traefik-binary)
	cd bench && go run ./accuracy -v

bench: build ## what it costs and what it is worth, ours and others in one run; writes docs/benchmarks.md
	bench/install
	$(traefik-binary)
	cd bench && go run . -write ../docs/benchmarks.md $(BENCHFLAGS)

scale: ## many edges, many upstreams: a simulation; draws the curves of docs/scale.md
	cd bench && go run ./fleet -write ../docs

FUZZTIME := 30s
# Instrumenting all of Caddy takes minutes: in CI the Caddyfile is fuzzed by a binary
# without, which tries as many texts and sees less of what they reach.
FUZZED := mcphealth traefikplugin $(if $(CI),,caddymodule)
fuzz: ## the readers of hostile input and of configuration, FUZZTIME each
	@for p in $(FUZZED); do for f in $$(grep -ho 'func Fuzz[A-Za-z0-9]*' $$p/*_test.go | cut -d' ' -f2); do \
		.ci/fuzz go test ./$$p -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) || exit 1; done; done
	$(if $(CI),go test $(RACE) -c -o bin/caddymodule.test ./caddymodule && cd caddymodule && \
		../.ci/fuzz ../bin/caddymodule.test -test.run '^$$' -test.fuzz '^FuzzCaddyfile$$' -test.fuzztime 20s -test.fuzzcachedir $(CURDIR)/bin/fuzz)

FLAKES := $(if $(CI),200,500)
flake: ## the scheduler tests 500 times (200 in CI), the core three times with the race detector
	go test ./mcphealth -run 'Threshold|Interval|Watch|Traffic|Close|Hung|Alarm|Pause|ComesBack|RetryAfter|Listeners|Initial|ErrorRate|LearnedHost' -skip 'WatchedConnection|Relapses' -count=$(FLAKES)
	$(GOTEST) $(RACE) -count=3 ./mcphealth

# Every module with code of ours in it.
MODULES = $(dir $(filter-out test/traefik/binary/%,$(shell git ls-files go.mod '*/go.mod')))

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
lint: ## gofmt, vet and staticcheck, in all modules
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	@for m in $(MODULES); do echo "vet, staticcheck: $$m"; \
		(cd $$m && go vet ./... && go run $(STATICCHECK) ./...) || exit 1; done

# The database of vulnerabilities comes as a Go module, of one day, so that a run
# says the same tomorrow; VULNDB=https://vuln.go.dev asks today's. GO_PATCHED is the
# patch release to build with: what the standard library had before is not ours.
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0
VULNDB_OF   := golang.org/x/vulndb@v0.0.0-20261105234957-e22db6528018
VULNDB       = file://$(shell go mod download -json $(VULNDB_OF) | sed -n 's/.*"Dir": "\(.*\)",/\1/p')/data/osv
GO_PATCHED  := go1.26.11
vuln-data: ## fetches what vuln needs
	GOTOOLCHAIN=$(GO_PATCHED) go version
	go mod download $(VULNDB_OF)

# The root module as it is built, with the newest Caddy: the one that go.mod requires is
# the oldest that works, and has vulnerabilities of its own (docs/reliability.md).
vuln: bin/newest.mod ## known vulnerabilities that our code reaches, in all modules
	@rm -rf bin/newest && mkdir bin/newest && git ls-files -z -co --exclude-standard | xargs -0 cp --parents -t bin/newest
	@cp bin/newest.mod bin/newest/go.mod && cp bin/newest.sum bin/newest/go.sum
	@db="$(VULNDB)"; for m in bin/newest/ $(filter-out ./,$(MODULES)); do echo "govulncheck: $$m"; \
		(cd $$m && GOTOOLCHAIN=$(GO_PATCHED) go run $(GOVULNCHECK) -db "$$db" ./...) || exit 1; done

clean: ## what was built
	rm -rf bin test/e2e/.cache test/traefik/.cache
