#!/usr/bin/env bash
# Every check and every test, on a machine where nothing has been prepared but Rust: `./test.sh`.
#
# Needs no running service: the tests start a Postgres of their own. A major version that this machine lacks comes as
# a package by `pip` or `npm`. Needs python3 for the Python example, and PgBouncer and promtool,
# which root on Debian gets installed. `./test.sh lint` and `./test.sh tests` do one half.
set -euo pipefail
cd "$(dirname "$0")"

# The whole suite runs on this major version; the statements and the harness below them on the others too.
main_major=15
other_majors="14 18"
# Modules of tests/it that hold the statements and core tests.
core_modules="core:: test_cluster"

half=${1:-all}
case $half in all | lint | tests) ;; *)
    echo "usage: ./test.sh [lint|tests]" >&2
    exit 2
    ;;
esac

step() { printf '\n=== [%4d s] %s\n' "$SECONDS" "$*"; }

# Installs a cargo tool unless it is there: have COMMAND PACKAGE@VERSION
have() {
    command -v "$1" >/dev/null && return
    step "installing $2 (once on a machine, some minutes)"
    cargo install --locked "$2" || {
        echo "cannot install $2; it checks the dependencies. Install it by hand and try again." >&2
        exit 1
    }
}

lint() {
    step "format"
    cargo fmt --all --check
    step "clippy"
    cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
    step "documentation"
    RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --all-features --no-deps
    step "licences, sources and duplicates of dependencies"
    have cargo-deny cargo-deny@0.20.2
    # A build fetches what this machine needs; the check is about all machines.
    cargo fetch --quiet --locked
    cargo deny --offline check licenses sources bans
    step "unused dependencies"
    have cargo-machete cargo-machete@0.9.2
    cargo machete
}

# A Python with psycopg for the example worker, kept apart from the machine's.
python_for_examples() {
    local python=$PWD/target/python/bin/python
    if ! "$python" -c 'import psycopg' 2>/dev/null; then
        python3 -m venv target/python
        "$python" -m pip install --quiet 'psycopg[binary]==3.3.9'
    fi
    export POSTHOUSE_TEST_PYTHON=$python
}

# A pooler to test against: PgBouncer, from the distribution.
pooler() {
    if [ -x /usr/sbin/pgbouncer ] || command -v pgbouncer >/dev/null; then return; fi
    step "installing pgbouncer"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer >/dev/null
        # The tests start one of their own.
        service pgbouncer stop >/dev/null 2>&1 || true
    else
        echo "pgbouncer is not installed; the test of poolers needs it (apt, dnf or brew install pgbouncer)" >&2
        exit 1
    fi
}

# Promtool, which reads what a worker serves and the rules in deploy/: part of Prometheus, from the distribution.
prometheus_tool() {
    if command -v promtool >/dev/null; then return; fi
    step "installing prometheus"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null
        # Only its tool is needed.
        service prometheus stop >/dev/null 2>&1 || true
    else
        echo "promtool is not installed; the tests of metrics need it (apt, dnf or brew install prometheus)" >&2
        exit 1
    fi
}

# Runs the tests whose names hold one of the given words; all without words.
run_tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --workspace --all-features --no-fail-fast "$@"
    elif [ "$#" -gt 0 ]; then
        cargo test --all-features --no-fail-fast --test it -- "$@"
    else
        cargo test --workspace --all-features --no-fail-fast --all-targets
    fi
}

tests() {
    step "Python for the examples"
    python_for_examples
    pooler
    prometheus_tool
    step "build"
    cargo build --quiet --workspace --bins --examples --all-features
    step "tests in the documentation"
    cargo test --quiet --workspace --all-features --doc
    for major in $other_majors; do
        step "statements and core tests on PostgreSQL $major"
        # shellcheck disable=SC2086
        POSTHOUSE_TEST_PG_MAJOR=$major run_tests $core_modules
    done
    step "all tests on PostgreSQL $main_major"
    POSTHOUSE_TEST_PG_MAJOR=$main_major run_tests
}

if [ "$half" != tests ]; then lint; fi
if [ "$half" != lint ]; then tests; fi
