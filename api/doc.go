// Package api is the public HTTP interface: orders behind the idempotency guard, in one Postgres transaction with the
// events that announce them.
//
// # Wiring
//
//	cfg, _ := sql.OrderPoolConfig(url, schema)           // pool of the caller's
//	rdb, _ := idem.NewClient(redisURL)                   // client of the caller's; a server that is gone is no error
//	s, err := api.New(api.Options{Pool: pool, Redis: rdb, Logger: log, Registerer: reg})
//	public := api.NewHTTPServer(s.Public())              // sets the time and size limits of the contract
//	admin.Handle("GET /readyz", s.Readyz())              // on the caller's admin mux, beside /metrics and /healthz
//	go s.Run(ctx)                                        // housekeeping until ctx ends
//
// New does no I/O and starts nothing: the process runs whether Postgres and Redis are there or not, and recovers with
// them. Close the pool and the client after http.Server.Shutdown has returned.
//
// # What a guarded request goes through
//
// Authentication, rate limit, syntax of the key, body, validation: failures so far store nothing. Then the guard:
// replay, wait, refuse, or go on. Then one statement, detached from the client's connection, a transaction of its
// own in which the unique index on (user_id, idem_key) has the last word. The reply leaves as soon as that has
// committed; the guard's record follows it.
package api
