// Package bench measures the product as it runs in production, and in the same run the limits of the servers.
//
// A benchmark (Drain, Latency, Orders) alternates between limits, which are the rates of Postgres and
// Redis alone, and results, so that both are measured on the same machine at the same time. Every measurement has a
// database, a slot and streams of its own, which are always removed, and ends with a count: missing, repeated or
// unknown events or orders make it fail with ErrFound.
//
// cmd/posthaste calls Run, one benchmark per process: it uses the processors that it measures.
package bench
