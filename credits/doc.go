// Package credits keeps users' balances in Redis and their ledger in Postgres.
//
//	rdb, connections, _ := credits.NewClient(redisURL)     // the caller closes it
//	bank := credits.New(credits.Options{Redis: rdb, Connections: connections, Pool: pool, Logger: log})
//	go bank.Run(ctx)                                       // refreshes its copy of the marks
//	res, err := bank.Apply(ctx, credits.Op{User: user, ID: op, Fingerprint: fp, Kind: credits.Deduct, Amount: 50})
//	sync := credits.NewSync(credits.SyncOptions{Redis: rdb, Pool: pool, Logger: log})
//	go sync.Run(ctx)                                       // in the relay: writes the streams to the ledger
//
// # How it works
//
// Users are spread over 256 buckets; a bucket's keys share a hash tag. One Redis Function changes a balance, appends
// the operation to the bucket's stream and records the outcome under the operation's id, in one atomic step. Sync
// writes the streams' entries to the ledger, a batch per transaction, and drops them from the stream after the commit.
// The ledger's transaction also moves the bucket's mark. If an entry is read again, the ledger recognizes it.
//
// # When Redis loses data
//
// The operations of a bucket are numbered. Every process keeps the highest number that it has received and sends it
// with each call; the mark in the ledger is such a number too. If a caller sends a number higher than the last one in
// Redis, Redis has lost operations. Then the function refuses the call and closes the bucket for all processes. Sync
// writes the remaining entries of the stream to the ledger, raises the epoch in Postgres, counts the missing
// operations, and opens the bucket with the new epoch. Accounts of an older epoch count as absent and are loaded from
// the ledger.
//
// The mark that a process knows is up to a second old. So when a process first connects to a server, which may have
// been restarted or promoted, it compares the server with the current marks before it sends anything else. The
// comparison waits until all entries that a sync has taken from a stream are in the ledger. Buckets of which the server
// lacks operations are closed.
//
// An account is loaded only if the ledger has all its operations: the loading function scans the entries that were not
// in the ledger when it was read, and refuses if one of them belongs to the account.
package credits
