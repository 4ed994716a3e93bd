package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
)

// Mode says how events travel.
type Mode string

// The desired modes are ModeAuto, ModeCDC and ModePoll; the active ones ModeCDC, ModePoll and ModeStandby.
const (
	ModeAuto    Mode = "auto"
	ModeCDC     Mode = "cdc"
	ModePoll    Mode = "poll"
	ModeStandby Mode = "standby"
)

// ParseMode reads a desired mode.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case ModeAuto, ModeCDC, ModePoll:
		return m, nil
	}
	return "", fmt.Errorf("mode %q: want auto, cdc or poll", s)
}

// State is the row of relay_state.
type State struct {
	Name     string
	Desired  Mode
	Active   Mode
	Owner    Owner
	Handover LSN
	// Holder names the process that leads or led last, for people.
	Holder string
	// Degraded says why events are swept although the stream is wanted; "" otherwise.
	Degraded string
	// System and Timeline identify the Postgres cluster at the last adoption; zero before the first.
	System   int64
	Timeline int32
	Changed  time.Time
	// Sink names the server that the owner publishes to, "" if that is not known. See Sink.Bind.
	Sink string
	// Barrier is a transaction id: what was committed before the slot's position may be invisible until everything
	// older has ended. 0: everything is visible. See Store.RaiseBarrier.
	Barrier uint64
}

// BarrierUnknown stands for a transaction id that could not be taken: any later one will do.
const BarrierUnknown = math.MaxInt64

// Snapshot is what one statement saw of other transactions.
type Snapshot interface {
	// Visible reports whether the transaction with the 32-bit id xid has ended for everyone who looks from now on.
	Visible(xid uint32) bool
}

// Found is the answer to a question about rows, as seen by one snapshot.
type Found struct {
	// Rows tells for each row that was asked for whether it is, or was, there. A row is known by its number and its id.
	Rows     []bool
	Snapshot Snapshot
}

// Settlement is one published event on its way out of the table.
type Settlement struct {
	ID          uuid.UUID
	AggregateID string
	Seq         int64
	XID         uint32
	Stream      string
	EntryID     string
	// Time is what the entry calls its time; zero if that is when the row was inserted.
	Time time.Time
}

// Dead is a parked event.
type Dead struct {
	ID            uuid.UUID
	Seq           int64
	AggregateType string
	AggregateID   string
	Type          string
	Error         string
	Class         string
	Attempts      int
	CreatedAt     time.Time
	DeadAt        time.Time
	Retrying      bool
	// RetrySeq is the number of the row a retry has put back into the outbox, 0 for none. Only Store.Parked fills it.
	RetrySeq int64
}

// AuditMark is what the audit compares from one time to the next.
type AuditMark struct {
	// LSN is at or behind the commit of every row in First.
	LSN LSN
	// Flushed is how far the WAL is on disk, and may be streamed.
	Flushed LSN
	// First has the lowest seq of each part that has rows.
	First map[int16]int64
}

// Adoption is what Store.Adopt writes.
type Adoption struct {
	// From is the epoch that the state is to have still.
	From   int64
	To     Owner
	Holder string
	// Sink is where the new owner publishes; "" if that is not known.
	Sink string
	// Suspects are the streams that may lack events that were settled.
	Suspects []StreamState
	// WentBack: the gates know of later owners than the table, so that the table is that of an earlier time.
	WentBack bool
}

// Loss is a number of events that were settled and are not in their stream any more; or, with no Stream, a Postgres
// that has gone back in time, by a failover or a restore: what it has forgotten to be settled is published twice.
type Loss struct {
	Stream string
	// Events is how many, -1 if that cannot be known.
	Events int64
	// First and Last are when the first and the last of them were settled; zero if that cannot be known.
	First, Last time.Time
	Noticed     time.Time
}

// Remedy is the command that brings the events back, or what there is to do instead.
func (l Loss) Remedy() string {
	switch {
	case l.Stream == "":
		return "see docs/operations.md, about a failover of Postgres"
	case l.First.IsZero():
		return "posthaste replay --stream=" + l.Stream +
			" --since=…, from before the loss; without history there is nothing to bring back"
	}
	// Times as they are in history, so that the range has all of them.
	const layout = "2006-01-02T15:04:05.999999Z07:00"
	return "posthaste replay --stream=" + l.Stream + " --since=" + l.First.UTC().Format(layout) + " --until=" +
		l.Last.UTC().Format(layout)
}

// Store is the relay's side of Postgres, implemented by posthaste/sql. Every call is bounded by its own timeout, and an
// error leaves nothing half done.
type Store interface {
	// Register makes sure this relay's row exists. Errors: *SecondNameError, and the schema errors of the store.
	Register(ctx context.Context) error
	State(ctx context.Context) (State, error)
	// Adopt writes a new owner, and where it publishes, where the epoch still is from; false if it is not. With it, and
	// only then, it notes what may be lost.
	Adopt(ctx context.Context, a Adoption) (bool, error)
	// CountLosses counts what was noted as perhaps lost, forgets what was not, and returns what it found.
	CountLosses(ctx context.Context) ([]Loss, error)
	// SetActive records what the owner's epoch does now; false if the epoch is not the state's any more.
	SetActive(ctx context.Context, epoch int64, active Mode, handover LSN, degraded string) (bool, error)
	// Streams lists every stream ever published to.
	Streams(ctx context.Context) ([]string, error)
	// Delivered reports whether history has events; true if none is kept.
	Delivered(ctx context.Context) (bool, error)
	// Lost counts the settled events that are known to be lost and were not published again.
	Lost(ctx context.Context) (int64, error)
	// NoteStream records, durably, that stream is about to be published to under epoch.
	NoteStream(ctx context.Context, stream string, epoch int64) error
	// InsertLSN is the end of the WAL written so far.
	InsertLSN(ctx context.Context) (LSN, error)
	// Mark returns an LSN and a transaction id such that everything that could have committed at or before the LSN is
	// visible once VisibleBelow(xid) is true.
	Mark(ctx context.Context) (LSN, uint64, error)
	VisibleBelow(ctx context.Context, xid uint64) (bool, error)
	// RaiseBarrier notes, before the slot is moved or made without a wait for visibility, what has to have ended before
	// it is streamed. It outlives this process: whoever leads next reads it. known: xid was taken after what an unknown
	// barrier stands for, and replaces it. ErrSuperseded if the epoch is not the state's any more: then the slot is not
	// to be moved.
	RaiseBarrier(ctx context.Context, epoch int64, xid uint64, known bool) error
	// LowerBarrier forgets the barrier, if it is not younger than xid.
	LowerBarrier(ctx context.Context, epoch int64, xid uint64) error
	// Lookup tells which of the rows still exist.
	Lookup(ctx context.Context, rows []*Row) (Found, error)
	// Settle deletes the rows, writing history, and tells which it found.
	Settle(ctx context.Context, items []Settlement) (Found, error)
	// DeleteAnywhere deletes, by seq in all parts, rows that Settle should have found and did not. It is the last
	// resort before they are let go.
	DeleteAnywhere(ctx context.Context, items []Settlement) (Found, error)
	// Park moves a row to outbox_dead and tells whether it found it. ErrSuperseded, also if the call arrives late, when
	// o is not the state's owner any more: a later one may have published the row. An adoption waits for a park under
	// way.
	Park(ctx context.Context, o Owner, row *Row, class, reason string, attempts int) (Found, error)
	// Audit takes a mark.
	Audit(ctx context.Context) (AuditMark, error)
	// Backlog counts the rows and tells the age of the oldest.
	Backlog(ctx context.Context) (rows int64, oldest time.Duration, err error)
	// Parked lists the dead events of aggregates, for block-key.
	Parked(ctx context.Context) ([]Dead, error)
	// Housekeep forgets dead events whose retry was published; it returns how many events are parked.
	Housekeep(ctx context.Context) (dead int64, err error)
	// KeepHistory makes the history partitions of today and the next days and drops those past the retention, by the
	// database's clock.
	KeepHistory(ctx context.Context) error
}

// Locker opens the connection that holds an instance's locks.
type Locker interface {
	Open(ctx context.Context) (LockSession, error)
}

// LockSession is a connection of its own with the instance's advisory locks. The server turns them into leases: it ends
// the session when nothing was heard for 10 s. Methods belong to one goroutine.
type LockSession interface {
	// TryLead takes the leader lock if it is free.
	TryLead(ctx context.Context) (bool, error)
	// TryPipe takes the pipe lock if it is free: exclusively for whoever streams or sweeps alone, shared in poll mode.
	TryPipe(ctx context.Context, exclusive bool) (bool, error)
	// DropPipe gives one hold of the pipe lock back.
	DropPipe(ctx context.Context, exclusive bool) error
	// Lost is closed when the session is gone, and with it the locks.
	Lost() <-chan struct{}
	Close()
}

// SecondNameError means that another relay name already owns the table.
type SecondNameError struct{ Name, Existing string }

func (e *SecondNameError) Error() string {
	return fmt.Sprintf("this outbox table belongs to relay %q; a second relay name (%q) on one table is refused: use "+
		"--relay-name=%s, or a separate database",
		e.Existing, e.Name, e.Existing)
}

// Permanent reports that waiting cannot fix it.
func (*SecondNameError) Permanent() bool { return true }

// ErrSuperseded means that somebody else has adopted since: step down.
var ErrSuperseded = errors.New("another relay has taken over")

// Scope is what a sweep works under.
type Scope struct {
	Owner Owner
	// Ensure makes sure that stream is noted and its gate adopted before the first publish.
	Ensure func(ctx context.Context, stream string) error
	// Claimed is called after a part was claimed and before its rows are read: what others parked in it is known then.
	Claimed func(ctx context.Context) error
	// BlockKey asks that events behind a parked one of their aggregate are parked too.
	BlockKey bool
	// Blocked tells which event parked before blocks e, "" for none.
	Blocked func(e *Event) string
	// Published is told what was published and committed.
	Published func(stream string, events []*Event, suppressed int)
	// Parked is told of each event moved to outbox_dead.
	Parked func(e *Event, err error)
	// Outcome is told nil after every batch that was committed and when there is nothing to sweep, and every error in
	// between, whoever is to blame: readiness follows it.
	Outcome func(err error)
}

// Sweeper drains the table with the SKIP LOCKED poller. It is implemented by posthaste/poll.
type Sweeper interface {
	// Run sweeps until ctx ends (then it returns nil) or the scope's ownership does: ErrGap, *FencedError,
	// *ForeignError. Everything else it retries.
	Run(ctx context.Context, s Scope) error
	// Drain makes one pass that reaches, in every part, the highest seq visible when it began.
	Drain(ctx context.Context, s Scope) error
}
