// Package bench measures the product as it runs in production, beside the limits of the servers measured in the same
// run.
//
// A benchmark (Drain, Growth, Idle, Latency, Orders) takes turns between limits, which are what Postgres and Redis do
// alone, and results, so that both see the same machine. Every measurement has a database, a slot and streams of its
// own, which are removed whatever happens, and ends with a count: events or orders that are missing, repeated or
// unknown make it fail with ErrFound.
//
// cmd/posthaste calls Run, one benchmark per process: it uses the processors that it measures.
package bench
