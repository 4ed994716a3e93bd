#!/bin/sh
# Prints, as arguments of go test, the tests that POSTHASTE_TEST_FULL may change, and their packages: those that mention
# it, or the functions full, scale and inMode, and all tests in files where another function does. make test-full runs
# those; make test runs all others unchanged. The arguments are packages to list first.
set -eu
cd "$(dirname "$0")/.."
files=$(git grep -lE 'POSTHASTE_TEST_FULL|\b(full|scale|inMode)(\(| \{|\))' -- '*_test.go')
# shellcheck disable=SC2086 # names of files have no spaces
tests=$(awk '
	FNR == 1 || /^}/ { name = ""; defines = 0 }
	/^func (full|scale|inMode)[[(]/ { defines = 1 }
	match($0, /^func Test[A-Za-z0-9]+\(t /) {
		name = substr($0, 6, RLENGTH - 8)
		all[FILENAME] = all[FILENAME] "\n" name
	}
	/^\/\// || defines { next }
	/POSTHASTE_TEST_FULL|[^A-Za-z.](full|scale|inMode)(\(| \{)/ {
		if (name) some[FILENAME] = some[FILENAME] "\n" name
		else whole[FILENAME]
	}
	END { for (f in all) print f in whole ? all[f] : some[f] }
' $files | grep . | grep -v '^TestFull' | sort -u | paste -sd '|' -)
# shellcheck disable=SC2086
printf -- '-run ^(%s)$ %s\n' "$tests" "$* $(dirname $files | sort -u | sed 's,^,./,' | paste -sd ' ' -)"
