// Package model is an exhaustive model of "settle by a mark", the way in which posthaste is going to decide that an
// event is settled (docs/architecture.md says why). It has tests only. They go through every order in which writers,
// relays, Postgres and Redis can act within a budget of faults, and look in each state whether an event is lost, twice
// in its stream, out of order, published although it was not committed, or parked although it is published; and, when
// nothing more can happen, whether everything is settled and no WAL is held back.
//
// The table outbox is a log: a row is never deleted because it is settled. A row is settled if the mark of its part
// holds it: a snapshot in which its transaction has ended, and a number that is not lower than its own. A mark moves in
// two steps. A snapshot is written first, then everything that it sees and the mark does not hold is published or found
// to be, then what was written becomes the mark. The gate in Redis keeps its owner, its lanes, how many entries it has
// let through, and the ids of batches that no mark holds yet.
//
// What the model takes for granted, and what a test against real servers has to show when this is built: a snapshot
// that was written by a transaction that is on disk knows of no id that Postgres gives out again; a streamed
// transaction is on disk; the row that a part is claimed with is locked while a mark, a cursor or a parked event is
// written. What it leaves out: batches of several events, several streams, trimming, and rows that a writer deletes
// before they are published.
//
// A silent gap in the publication is noticed and what it hid is published, behind what was streamed meanwhile: nobody
// can know that it has to wait. No other order is given up.
package model
