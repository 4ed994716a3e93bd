// Package replay publishes delivered events again, out of history.
//
// A replay is identified by its selection, and records its progress in Redis: the same options resume where they
// stopped, also after a crash, and each event is published once (package sink has the scripts for that). It reads
// each page in a statement of its own, so that it holds no transaction open. It first waits until events that are
// being published are in history, so that it misses none. If a server is unreachable it waits, and reports that.
//
// Options are those of the command, whose Run cmd/posthaste calls, once per process.
package replay
