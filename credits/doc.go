// Package credits keeps users' balances in Redis and their ledger in Postgres.
//
//	rdb, connections, _ := credits.NewClient(redisURL)     // the caller closes it
//	bank := credits.New(credits.Options{Redis: rdb, Connections: connections, Pool: pool, Logger: log})
//	go bank.Run(ctx)                                       // keeps what it knows of the ledger fresh
//	res, err := bank.Apply(ctx, credits.Op{User: user, ID: op, Fingerprint: fp, Kind: credits.Deduct, Amount: 50})
//	sync := credits.NewSync(credits.SyncOptions{Redis: rdb, Pool: pool, Logger: log})
//	go sync.Run(ctx)                                       // in the relay: from the streams into the ledger
//
// # How it works
//
// Users are spread over 256 buckets; a bucket's keys share a hash tag. One Redis Function changes a balance, appends
// the operation to the bucket's stream and records the outcome under the operation's id, all or nothing. Sync takes the
// streams' entries into the ledger, a batch per transaction, and drops them from the stream after the commit. The
// ledger's transaction also moves the bucket's mark, so an entry that is delivered again is recognized, whatever was
// acknowledged.
//
// # When Redis loses data
//
// Every operation of a bucket has a number. Every process remembers the highest it was told and sends it with each
// call; the mark in the ledger is such a number too. A Redis that is asked to go on from a smaller one has lost
// operations: the function refuses, and closes the bucket for everybody. Sync then applies what is left of the stream,
// raises the epoch in Postgres, counts what is missing, and opens the bucket under the new epoch; accounts of an older
// epoch count as absent and are loaded from the ledger.
//
// What a process knows of the mark is up to a second old. So a server that it connects to for the first time, one that
// was restarted or promoted perhaps, is compared with the marks as they are then, once the ledger has what was on its
// way there, and before anything else is sent to it: buckets of which it lacks something are closed.
//
// An account is loaded only if the ledger has all of it: the loading function looks through the entries that the ledger
// had not yet when it was read, and refuses if one of them is the account's.
package credits
