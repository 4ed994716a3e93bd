// Package poll settles what is owed in the outbox table without the stream: a worker claims one of the table's parts
// (others take other parts), takes a snapshot, and page by page publishes the rows that are visible in it and that the
// part's mark does not hold. After each page it writes a mark; after the last one the snapshot is the mark. A pass that
// was broken off is gone on with, over the same snapshot, by whoever claims the part next. Nothing is locked but the
// part, no transaction is open while Redis is called, and nothing is read that is settled: old transactions do not slow
// it down.
//
// Publishing is safe to repeat although the mark may not be written afterwards: the gate remembers what a claim has
// published and no mark holds yet, and a later claim of the same part does not publish it again. So after anything
// unclear (a lost reply, a lost session) a worker simply claims the part anew.
package poll
