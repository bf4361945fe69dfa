# The main commands: `make demo`, `make test`, and `make test-quick` during work. Each of them installs what it needs.
# Also: make bench [NAME=channel], make book, make soak, make install [DESTDIR= PREFIX=/usr/local], make clean.

CARGO ?= cargo
PREFIX ?= /usr/local
# Each writes target/bench/NAME.json.
BENCHES = channel memory farm volume daemon ready sockets beside-tcp verbs mpi cache

.PHONY: all build demo test test-quick test-unit test-loom test-sanitize test-fuzz test-vm test-vm-smoke mutants bench soak soak-ring soak-sockets soak-verbs soak-cache soak-volume soak-fuzz lint deny msrv package doc book install clean

all: build

build:
	$(CARGO) build --release --workspace --locked

demo:
	scripts/setup demo
	scripts/demo

test:
	scripts/setup test
	scripts/test

test-quick:
	scripts/setup test
	scripts/test quick

test-unit:
	scripts/unit

test-loom:
	scripts/loom

test-sanitize:
	scripts/sanitize

test-fuzz:
	scripts/fuzz

test-vm: build
	scripts/vm-tests

test-vm-smoke: build
	$(CARGO) test --release -p vmtest --test c_library -- dax --nocapture

# Changes the code that judges input from others, one operator at a time; a test must notice each change (.cargo/mutants.toml).
# Needs `cargo install cargo-mutants`. ARGS="--shard 0/8" runs only a part.
mutants:
	$(CARGO) mutants --package ginnel-fdpass --output target $(ARGS)
	$(CARGO) mutants --package ginnel-ring --output target $(ARGS) -- --lib --test lies --test resume

bench: build
	scripts/setup bench
	set -e; for name in $(or $(NAME),$(BENCHES)); do target/release/bench-$$name; done

# Takes hours: 10^9 messages of each size over a ring (soak-ring), 10^5 changes from TCP to shared memory (10^6 with GINNEL_SOAK_ROUNDS=60)
# beside random programs for two hours (soak-sockets), 10^8 messages over RDMA queue pairs with hostile members and 10,000 kills
# (soak-verbs), 2,000 kills of a cache's server and 3,000 more while clients use it (soak-cache), 3,000 kills of an
# NVMe volume's engine (soak-volume), each fuzz target for five minutes (soak-fuzz), then the long versions of the VM tests.
soak: build soak-ring soak-sockets soak-verbs soak-cache soak-volume soak-fuzz
	GINNEL_SOAK=1 scripts/vm-tests

soak-ring:
	GINNEL_SOAK=1 $(CARGO) test --release -p ginnel-ring --locked --test soak

soak-sockets:
	GINNEL_SOAK=1 $(CARGO) test --release -p programs --locked --test sockets -- load:: cpython:: foreign:: returning:: hostile:: random:: --test-threads=6 --nocapture

soak-verbs:
	GINNEL_SOAK=1 $(CARGO) test --release -p programs --locked --test verbs -- soak:: adversary:: kills:: --nocapture
	GINNEL_SOAK=1 $(CARGO) test --release -p programs --locked --test mpi -- --nocapture

soak-cache:
	GINNEL_SOAK=1 $(CARGO) test --release -p ginnel-cache-store --locked --test kill
	GINNEL_SOAK=1 $(CARGO) test --release -p programs --locked --test cache -- kills:: --nocapture

soak-volume:
	GINNEL_SOAK=1 $(CARGO) test --release -p ginnel-volume --locked --test nvme_kills

soak-fuzz:
	scripts/fuzz all 300

lint:
	@if command -v python3 >/dev/null; then scripts/check-links && scripts/pictures --check; else scripts/skip links "there is no python3"; fi
	scripts/version-check
	scripts/check-python
	scripts/fmt --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	scripts/package quick
	scripts/deny

# Checks the dependencies for licences, duplicates and known vulnerabilities. Needs the network, and cargo-deny (scripts/deny install).
deny:
	scripts/deny all

# Compiles with the oldest promised Rust, if it is installed.
msrv:
	scripts/msrv

# Packages the crates that are published on crates.io, and builds each from its package alone.
package:
	scripts/package

doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# Makes a book of the documentation, target/book/html. Installs mdBook from crates.io into target/mdbook if it is missing.
book:
	scripts/book

install: build
	PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) scripts/install

clean:
	$(CARGO) clean
