// Package poll sweeps the outbox table with SELECT … FOR UPDATE SKIP LOCKED's cousin for ordered queues: a worker
// claims one of the table's parts (skipping those that others have), and in one transaction deletes a batch of its
// rows, publishes them, writes their history and commits. The row locks are the lease: a crash frees them, and there is
// no PROCESSING state and nothing to reap.
//
// Publishing is safe to repeat although the transaction may roll back afterwards: the gate remembers what a claim has
// published and not settled, and a later claim of the same part does not publish it again. So after anything unclear (a
// lost reply, a failed commit) a worker simply claims the part anew.
package poll
