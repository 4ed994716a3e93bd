// Package idem is a guard for idempotent writes: of many requests that carry one idempotency key, one does the work
// and every other one gets its result.
//
// The guard lives in Redis and is only an accelerator. The arbiter is the database that the work commits to: the write
// must be protected by a unique index on the key, in the same transaction as its effect. Then nothing that happens to
// Redis or to a process can do the work twice, and the guard adds what the index cannot give cheaply: replay without
// the database, waiting for the attempt that is under way, and load shedding. While Redis is unusable the guard says
// so (Ticket.Degraded) and every request simply goes on to the database.
//
// A record is of one incarnation of the database (Options.Database). A second database on the same Redis does not see
// it, and neither does the same database once it may have lost the commit that the record confirms: a promoted standby,
// a restored backup. The database then answers, and a record is made again.
//
// A request goes through
//
//	d, err := guard.Begin(ctx, idem.Request{Key: idem.NewKey(user, "POST", "/orders", header), Fingerprint: fp})
//	switch d.Outcome {
//	case idem.Replay:   // answer with d.Record
//	case idem.Busy:     // 409, Retry-After d.RetryAfter
//	case idem.Mismatch: // 422: the key was used for another command
//	case idem.Proceed:  // do the work, then d.Ticket.Commit; or d.Ticket.Abort if it certainly did not happen
//	}
//
// A record of a finished operation is a pointer (a status, a reference, a few bytes), not a response: the body is
// rendered again from the referenced row, so a million keys stay small.
//
// Every script touches one declared key (safe in Redis Cluster), takes its time from the server, and may be sent twice
// without harm: an attempt that lost the reply of its acquisition acquires again.
package idem
