// Package replay publishes delivered events again, out of history.
//
// A replay is named by what it selects, and notes in Redis how far it is: the same options go on where they stopped,
// after a crash too, and each event is published once (package sink keeps the scripts that see to it). Its pages are
// statements of their own, so that it holds no transaction open; events that were published while it began are waited
// for, so that none turns up behind its back. While a server is away it waits, and says so.
//
// cmd/posthaste calls Run, once per process.
package replay
