#!/bin/sh
# Prints, as arguments of go test, the tests that POSTHASTE_TEST_FULL may change, and their packages: all tests in files
# that mention it, or the functions full and scale. make test-full runs those; make test runs all others unchanged. The
# arguments are packages to list first.
set -eu
cd "$(dirname "$0")/.."
files=$(git grep -lE 'POSTHASTE_TEST_FULL|\b(full|scale)(\(| \{|\))' -- '*_test.go')
# shellcheck disable=SC2086 # names of files have no spaces
tests=$(sed -nE 's/^func (Test[A-Za-z0-9]+)\(t .*/\1/p' $files | grep -v '^TestFull' | sort -u | paste -sd '|' -)
# shellcheck disable=SC2086
printf -- '-run ^(%s)$ %s\n' "$tests" "$* $(dirname $files | sort -u | sed 's,^,./,' | paste -sd ' ' -)"
