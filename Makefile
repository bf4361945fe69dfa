# The two commands for everybody: `make demo` and `make test`. Each does its own set-up.
# Also: make bench [NAME=channel], make soak, make install [DESTDIR= PREFIX=/usr/local], make clean.

CARGO ?= cargo
PREFIX ?= /usr/local
# Each writes target/bench/NAME.json.
BENCHES = channel memory farm volume
# VM tests share the machine; one at a time.
VMTEST = $(CARGO) test --release -p vmtest --no-fail-fast -- --test-threads=1 --nocapture

.PHONY: all build demo test test-unit test-loom test-sanitize test-fuzz test-vm bench soak lint doc install clean

all: build

build:
	$(CARGO) build --release --workspace --locked

demo:
	scripts/setup demo
	scripts/demo

test:
	scripts/setup test
	scripts/test

test-unit:
	$(CARGO) test --workspace --exclude vmtest --locked --no-fail-fast

test-loom:
	scripts/loom

test-sanitize:
	scripts/sanitize

test-fuzz:
	scripts/fuzz

test-vm: build
	$(VMTEST)

bench: build
	scripts/setup bench
	set -e; for name in $(or $(NAME),$(BENCHES)); do target/release/bench-$$name; done

soak: build
	GINNEL_SOAK=1 $(VMTEST)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

install: build
	PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) scripts/install

clean:
	$(CARGO) clean
