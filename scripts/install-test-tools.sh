#!/usr/bin/env bash
# What the tests need: Postgres and Redis servers, Valkey (it has WAITAOF, which Debian 12's Redis lacks), and a C
# compiler for the race detector. Quick, and off the network, when all is there.
set -euo pipefail
exec "$(dirname "$0")/ensure.sh" postgres redis valkey cc
