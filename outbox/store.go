package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
)

// Mode is how events reach the streams.
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
	// Holder is the display name of the process that leads or led last.
	Holder string
	// Degraded is the reason why events are swept although the stream is desired, otherwise "".
	Degraded string
	// System and Timeline identify the Postgres cluster at the last adoption; zero before the first.
	System   int64
	Timeline int32
	Changed  time.Time
	// Server identifies the process of Postgres by its start time. A copy of its files has another.
	Server string
	// Layout is how streams are named, according to the newest mark. Only the owner changes it.
	Layout
	// Sink names the server that the owner publishes to, "" if it is unknown. See Bind of posthaste/relay/stream.
	Sink string
	// Barrier is a transaction id: transactions committed before the slot's position may be invisible until everything
	// older has ended. 0: everything is visible. The relay's RaiseBarrier writes it.
	Barrier uint64
}

// BarrierUnknown stands for a transaction id that could not be determined: any later id is sufficient.
const BarrierUnknown = math.MaxInt64

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
	// RetrySeq is the number of the row that a retry has inserted, 0 for none. Only the list for block-key has it.
	RetrySeq int64
}

// LeaderSession is the session that holds the leader's lock.
type LeaderSession struct {
	PID int
	// Application, Role and Address are "" where they are not visible.
	Application, Role, Address string
	// Relay is false only for a session that is known not to be a relay's.
	Relay bool
	// Sinkless: its relay does not reach the sink.
	Sinkless bool
}

func (s LeaderSession) String() string {
	return fmt.Sprintf("the session with pid %d (application %q, role %q, address %q)", s.PID, s.Application, s.Role,
		s.Address)
}

// AuditMark is what the audit compares from one time to the next.
type AuditMark struct {
	// LSN is at or after the commit of every row in First, and Flushed is up to where the WAL is on disk and may be
	// streamed. Both are 0 if the server refuses to return them.
	LSN, Flushed LSN
	// First has, for each part with unsettled rows, the number of one of the oldest.
	First map[int16]int64
}

// Pass is a snapshot that was written to the database before its use. All rows that it sees must be settled. After a
// crash, a server may assign ids of transactions again unless it had written them; it does not assign those in a
// written snapshot.
type Pass struct {
	Settled
	// End is the end of the WAL, read after the snapshot was taken: the commits of all transactions that it sees are
	// before it. BeginPass does not read it.
	End LSN
}

// Owed are the rows of one transaction that a Look sees and its starting mark does not settle, including parked rows.
type Owed struct {
	XID  uint64
	Seqs []int64
}

// Look is the result of Marker.Look.
type Look struct {
	Pass
	// Owed is ordered by transaction id.
	Owed []Owed
}

// Marker moves the mark of every part after the stream. It is one session of the server. Scan results are not valid in
// another session, because the server may have crashed in between, so a failed call ends the Marker: close it and open
// another. No call may follow Close. It is not safe for concurrent use.
type Marker interface {
	// Look takes a snapshot and lists the rows that it sees and since does not settle, of transactions below the given
	// id; math.MaxInt64 is above all.
	Look(ctx context.Context, since Settled, below uint64) (Look, error)
	// Move makes to the mark of every part. to sees nothing that the last Look did not see, and everything that since
	// does. Move fails and changes nothing if the newest mark sees something that to does not, because a call of an
	// abandoned Marker may arrive after its successor's. ErrSuperseded: o is no longer the owner, and nothing was
	// changed.
	Move(ctx context.Context, o Owner, to Settled, entries Entries) error
	Close()
}

// Adoption is what an adoption writes.
type Adoption struct {
	// From is the epoch that the state must still have.
	From   int64
	To     Owner
	Holder string
	// Sink is the server that the new owner publishes to; "" if it is unknown.
	Sink string
	// Suspects are the streams that may lack settled events, or whose gate does not know all of their entries.
	Suspects []StreamState
	// Delivered reports whether any event was ever settled; otherwise none can be lost.
	Delivered bool
	// WentBack is set if gates have seen later owners than the table, so that the table is from an earlier time.
	WentBack bool
}

// Repair is what an adoption must restore in a stream, because the sink or Postgres has lost events that the other
// still has. Nothing newer is published before it is done.
type Repair struct {
	// IDs are the ids of the adoptions' notes that it covers.
	IDs    []int64
	Stream string
	// After is an entry at which the comparison of the stream begins, "" for its beginning.
	After string
	// From and To bound the marks whose events are compared with the stream, From exclusively; To is 0 if nothing is
	// compared. Events that Missing and later marks settled are republished if they are not in the stream.
	From, To, Missing int64
	// Recall is set if unsettled events in the stream must be found, because the gate does not know them.
	Recall bool
	// Back is set if Postgres has gone back in time: events that are only in the stream were published and are not
	// committed.
	Back bool
	// Begun is set if an attempt was ended after it may have published something. Restored is how much that was.
	Begun    bool
	Restored int64
	// Groups are the known consumer groups of the stream, if it has lost something.
	Groups []string
	// Expected is roughly how many events are compared.
	Expected int64
}

// Logged is a settled event.
type Logged struct {
	ID uuid.UUID
	// Mark is the mark that settled it; Part and Seq are its place in the log.
	Mark int64
	Part int16
	Seq  int64
}

// Repaired is the result of a repair.
type Repaired struct {
	// Restored events were republished; Recalled ones were found in the stream.
	Restored, Recalled int64
	// Whole means that all missing events are in the stream again, except Refused events, which it no longer accepts.
	Whole   bool
	Refused int64
	// Phantoms are events in the stream whose commit Postgres has lost.
	Phantoms []Entry
	// Last is the stream's last entry at the end of the repair, "" for an empty stream.
	Last string
}

// Report is what the comparison of a stream has found; or, without a Stream, that Postgres has gone back in time by a
// failover or a restore.
type Report struct {
	Stream  string    `json:"stream,omitempty"`
	Noticed time.Time `json:"noticed_at"`
	// Done is when it finished; nil if it has not, whether or not a relay works on it.
	Done *time.Time `json:"done_at,omitempty"`
	// Expected is roughly how many events are compared.
	Expected int64 `json:"expected"`
	// Restored events were missing in the stream and were published again. Recalled events were found in the stream,
	// so they are not published again.
	Restored int64 `json:"restored"`
	Recalled int64 `json:"recalled"`
	// Missing settled events were not restored, -1 if their number is unknown. They include Refused events, which the
	// stream accepted the first time.
	Missing int64 `json:"missing"`
	Refused int64 `json:"refused"`
	// Phantoms are in the stream although Postgres does not have their commits.
	Phantoms int64 `json:"phantoms"`
	// First and Last are when the first and the last of the missing events were settled; nil if that is unknown.
	First *time.Time `json:"-"`
	Last  *time.Time `json:"-"`
}

// Remedy is the command that restores the missing events, or a hint.
func (r Report) Remedy() string {
	switch {
	case r.Stream == "":
		return "posthaste phantoms names the events whose commits are missing; see docs/recovery.md"
	case r.First == nil || r.Last == nil:
		return "posthaste replay --stream=" + r.Stream +
			" --since=…, from before the loss; without history there is nothing to bring back"
	}
	// Full precision, so that the range includes all of the events.
	const layout = "2006-01-02T15:04:05.999999Z07:00"
	return "posthaste replay --stream=" + r.Stream + " --since=" + r.First.UTC().Format(layout) + " --until=" +
		r.Last.UTC().Format(layout)
}

// Locker opens the connection that holds an instance's locks.
type Locker interface {
	Open(ctx context.Context) (LockSession, error)
}

// LockSession is a separate connection that holds the instance's advisory locks. The server ends a session that was
// idle for 10 s, so the locks are leases. It is not safe for concurrent use.
type LockSession interface {
	// TryLead takes the leader lock if it is free.
	TryLead(ctx context.Context) (bool, error)
	// TryPipe takes the pipe lock if it is free: exclusively to stream or to sweep alone, shared in poll mode.
	TryPipe(ctx context.Context, exclusive bool) (bool, error)
	// DropPipe releases one hold of the pipe lock.
	DropPipe(ctx context.Context, exclusive bool) error
	// TellSink shows other sessions whether this instance reaches the sink.
	TellSink(ctx context.Context, reached bool) error
	// Lost is closed when the session has ended, and with it the locks.
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

// Permanent reports that waiting does not help.
func (*SecondNameError) Permanent() bool { return true }

// TakenNameError means that the outbox in another schema of the database has a relay of this name.
type TakenNameError struct{ Name, Schema string }

func (e *TakenNameError) Error() string {
	return fmt.Sprintf("relay name %q is taken by the outbox in schema %q of this database: use another --relay-name",
		e.Name, e.Schema)
}

// Permanent reports that waiting does not help.
func (*TakenNameError) Permanent() bool { return true }

// ErrSuperseded means that another owner has adopted since: step down.
var ErrSuperseded = errors.New("another relay has taken over")
