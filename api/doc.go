// Package api is the public HTTP interface: orders behind the idempotency guard, written with their events in one
// Postgres transaction.
//
// # Wiring
//
//	cfg, _ := sql.OrderPoolConfig(url, schema)           // the caller makes the pool
//	rdb, _ := idem.NewClient(redisURL)                   // no error if the server is down
//	s, err := api.New(api.Options{Pool: pool, Redis: rdb, Logger: log, Registerer: reg})
//	public := api.NewHTTPServer(s.Public())              // sets the time and size limits of the contract
//	admin.Handle("GET /readyz", s.Readyz())              // on the caller's admin mux
//	go s.Run(ctx)                                        // housekeeping until ctx ends
//
// New does no I/O and starts nothing: the process runs and recovers without Postgres and Redis. Close the pool and the
// client after http.Server.Shutdown has returned.
//
// # Steps of a guarded request
//
// First come authentication, rate limit, syntax of the key, body and validation; a failure up to here stores nothing.
// Then the guard replays, waits, refuses or admits. Then one statement runs in its own transaction, which a
// disconnecting client does not cancel. There the unique index on (user_id, idem_key) decides. The reply is sent as
// soon as the transaction has committed; the guard's record is written afterwards.
package api
