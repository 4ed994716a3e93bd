// Package model is an exhaustive model of "settle by a mark", the way in which posthaste decides that an event is
// settled (docs/architecture.md says why). It has tests only. They go through every order in which writers,
// relays, Postgres and Redis can act within a budget of faults, and look in each state whether an event is lost, twice
// in its stream, out of order, published although it was not committed, or parked although it is published; and, when
// nothing more can happen, whether everything is settled and no WAL is held back.
//
// TestRelaysDoWhatTheModelSays holds what relays have really done against the same machine, step by step.
//
// The table outbox is a log: a row is never deleted because it is settled. A row is settled if the mark of its part
// holds it: a snapshot in which its transaction has ended, and a number that is not lower than its own.
//
// A sweep takes a snapshot and publishes what it sees and the mark does not; then the snapshot is the mark. For a
// hand-over the snapshot is written first, all parts are swept up to it, and it becomes the mark of every part. A
// stream constructs its mark: it takes a snapshot with a list of what that sees and the mark does not, and leaves out
// each transaction that it has not published as a whole. What it still has not published when it has come to the end of
// the WAL as of then, it has missed.
//
// A snapshot that is not written is used only in the session that took it. Every write of a mark asks for the owner,
// and for the server that the owner has adopted; whoever does not know whether it was done adopts anew. A relay may go
// on with new sessions after Postgres has crashed, or another server has been promoted, until it knows that its lock is
// lost. The gate in Redis keeps its owner, its lanes, how many entries it has let through, and the ids of batches that
// no mark holds yet.
//
// What the model takes for granted, and what a test against real servers has to show: a snapshot that was written by a
// transaction that is on disk knows of no id that Postgres gives out again; a streamed transaction is on disk; the
// session that writes the mark of a part has the part locked, for as long as the server works on its statement.
// What it leaves out: batches of several events, several streams, trimming, and rows that a writer deletes before they
// are published.
//
// When Redis or Postgres has gone back, an adoption compares the stream with what is settled before anything else is
// published. That a stream is not whole yet is said by its gate here; posthaste writes it into outbox_repair, in the
// transaction that raises the epoch.
//
// A silent gap in the publication is noticed and what it hid is published, behind what was streamed meanwhile: nobody
// can know that it has to wait. An event that was parked and is retried is published behind what came after it. No
// other order is given up.
package model
