#!/usr/bin/env bash
# Runs the core fault tests on each version of Postgres and of Redis that is supported, and pg_upgrade, and prints a
# table. The Postgres servers are installed from npm into scripts/postgres (Linux on x86-64); Redis and Valkey are those
# that are installed. Arguments choose: postgres-14 … postgres-18, redis, valkey, upgrade; --small leaves out the faults,
# and keeps what talks to a server.
set -euo pipefail
cd "$(dirname "$0")/.."

# What a relay can suffer on any server.
relay='RelayKilledUnderLoad|FrozenLeaderIsReplacedAndPublishesNothingWhenItWakes|TogglesUnderLoad'
# What it can suffer from Postgres, where a version may differ.
of_postgres="$relay|TwoRelaysSweepTogether|PostgresStoppedImmediate|SlotDropped|SlotThatIsLongInTheMakingIsNew|"
of_postgres+='StreamThatStandsStillIsNoticed|HeldBackCommitsKeepTheirOrderOverAChangeOfLeader|'
of_postgres+='StreamingAgainBesideAnOpenTransaction|PostgresForgetsNothingThatWasSettled|'
of_postgres+='ASynchronousStandbyIsPromoted|AnAsynchronousStandbyIsPromotedUnderLoad'
# And from Redis.
of_redis="$relay|ARestartOfRedisIsNoLoss|RedisKilledInTheMiddleOfASync|WhatIsDeletedIsRestored"

postgres=scripts/postgres/node_modules
install_postgres() {
	(cd scripts/postgres && npm ci --loglevel=error)
	local dir
	for dir in $postgres/postgres-*; do
		(cd "$dir" && node scripts/hydrate-symlinks.js >/dev/null)
		# Root runs the server as another user.
		chmod -R a+rX "$dir"
	done
}

# Linking takes longer than some of the tests, so it is done once.
bin=$PWD/bin/versions
build() { # packages
	local package
	mkdir -p "$bin"
	for package in "$@"; do
		go test -c -vet=off -tags nomsgpack,versions -o "$bin/${package##*/}.test" "./$package"
	done
}

run() { # what, package, then arguments
	local what=$1 package=$2 began=$SECONDS status=ok
	shift 2
	echo "=== $what"
	(cd "$package" && "$bin/${package##*/}.test" -test.count=1 -test.timeout=30m -test.parallel=3 "$@") ||
		{ status=FAILED && failed=1; }
	table+="$(printf '%-40s %-8s %4d s' "$what" "$status" $((SECONDS - began)))"$'\n'
}

failed=0 table='' small=''
[ "${1:-}" != --small ] || { small=1 && shift; }
wanted=${*:-postgres-14 postgres-15 postgres-16 postgres-17 postgres-18 redis valkey upgrade}
case $wanted in *postgres-*) install_postgres && build cdc sql ;; esac
case $wanted in *redis* | *valkey*) build sink ;; esac
[ -n "$small" ] || build cmd/posthaste
for server in $wanted; do
	case $server in
	postgres-*)
		export POSTHASTE_TEST_PG_BIN=$PWD/$postgres/$server/native/bin
		what="Postgres ${server#*-}"
		run "$what, slot" cdc
		# The skipped test plans each statement by a role that lacks rights of some versions.
		run "$what, statements" sql -test.skip '^TestNothingPlantedIsCalled$'
		if [ -z "$small" ]; then
			run "$what, faults" cmd/posthaste -test.run "^Test($of_postgres)\$"
			case $server in
			*-1[0-6]) ;;
			*) run "$what, failover slots" cmd/posthaste -test.run '^TestVersions(Failover|DeadStandby)$' ;;
			esac
		fi
		unset POSTHASTE_TEST_PG_BIN
		;;
	redis | valkey)
		POSTHASTE_TEST_REDIS_BIN=$(command -v $server-server)
		export POSTHASTE_TEST_REDIS_BIN
		what=$("$POSTHASTE_TEST_REDIS_BIN" --version | sed -E 's/^([A-Za-z]+).*v=([0-9.]+).*/\1 \2/')
		run "$what, scripts" sink
		[ -n "$small" ] || run "$what, faults" cmd/posthaste -test.run "^Test($of_redis)\$"
		unset POSTHASTE_TEST_REDIS_BIN
		;;
	upgrade)
		run 'pg_upgrade' cmd/posthaste -test.run '^TestVersionsUpgrade$'
		;;
	*)
		echo "test-versions.sh: unknown server: $server" >&2
		exit 2
		;;
	esac
done
printf '\n%s' "$table"
exit $failed
