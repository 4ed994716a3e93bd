package outbox

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Nonce tells two holders of the same number apart.
type Nonce [16]byte

// String returns the nonce in hexadecimal.
func (n Nonce) String() string { return hex.EncodeToString(n[:]) }

// Owner is who may publish: the leadership written in relay_state. Instances that sweep beside the leader act under
// the leader's owner.
type Owner struct {
	// Source identifies the database that the events come from. Each has a gate of its own for each stream.
	Source uuid.UUID
	// Epoch is raised by one at every adoption. It is the fencing token.
	Epoch int64
	// Nonce is new at every adoption.
	Nonce Nonce
}

// The part numbers of the lanes that are no part's.
const (
	// StreamLane is the slot reader's.
	StreamLane = -1
	// RestoreLane is that of an adoption, which publishes again what the sink has lost.
	RestoreLane = -2
)

// Lane is one numbered sequence of batches into one stream: the slot reader's, or one claim of a part.
type Lane struct {
	// Part is StreamLane, RestoreLane or 0 … Partitions-1.
	Part int
	// Claim is the part's counter, raised at every claim; for the other lanes it is 0.
	Claim int64
	// Nonce is new for every claim; for the other lanes it is the owner's.
	Nonce Nonce
}

// Mark says that the rows of a lane's batches up to and including Number are about to be, or were, settled.
type Mark struct {
	Stream string
	Lane   Lane
	Number int64
}

// Receipt is the sink's answer to a delivery that is completely published.
type Receipt struct {
	// Number is the highest batch number the delivery used in its lane.
	Number int64
	// Last is the stream's last entry when the delivery was complete: those of its events are not behind it.
	Last string
	// Suppressed counts the events that were in doubt and therefore not published a second time.
	Suppressed int
}

// StreamState is what is there of a stream.
type StreamState struct {
	Stream string
	// Gate tells whether it has a gate.
	Gate bool
	// Last is the id of the last entry that the gate has let through and the stream still knows of, "" if there is no
	// stream, or that is not known.
	Last string
	// Unknown is set if the table does not know that the stream was published to. Sink.Look does not set it.
	Unknown bool
	// Epoch and Nonce are the gate's owner; 0 and "" without one.
	Epoch int64
	Nonce string
	// Behind is set if there are entries in the stream that the gate has not let through, as far as it knows: it is an
	// older one than the stream.
	Behind bool
	// Forgot is set if it lacks entries that the gate has let through, or that the table knows of: somebody has deleted
	// it, or put it back to an earlier state.
	Forgot bool
	// Now is the time by the sink's clock, which makes the ids of entries.
	Now time.Time
	// Missing is how many events fewer than this process knows of the gate has let through.
	Missing int64
}

// Intact reports whether gate and stream were made by the same publishes: the gate knows what is in the stream and not
// settled.
func (s StreamState) Intact() bool { return s.Gate && !s.Forgot && !s.Behind && !s.Unknown }

// Beyond reports whether the gate has seen a later owner than o, or another one of the same epoch: the table that names
// o has gone back.
func (s StreamState) Beyond(o Owner) bool {
	return s.Epoch > o.Epoch || s.Epoch == o.Epoch && s.Epoch > 0 && s.Nonce != o.Nonce.String()
}

// Unread is what a consumer group has before it in a stream.
type Unread struct {
	// Group is "" if the stream is so young that there may be groups that have not found it.
	Stream, Group string
	// Entries is how many, about; Idle, since when nobody has done anything about it.
	Entries int64
	Idle    time.Duration
}

// Entry is an event in a stream, and its place there.
type Entry struct {
	ID uuid.UUID
	// Millis and Number are the two halves of the entry's id.
	Millis, Number uint64
}

// NewEntry returns the entry of an event that has the id at.
func NewEntry(event uuid.UUID, at string) Entry {
	e := Entry{ID: event}
	e.Millis, e.Number = splitID(at)
	return e
}

// String is the entry's id, as Redis writes it.
func (e Entry) String() string { return fmt.Sprintf("%d-%d", e.Millis, e.Number) }

// SortEntries orders entries by the ids of their events, for FindEntry.
func SortEntries(list []Entry) {
	slices.SortFunc(list, func(a, b Entry) int { return bytes.Compare(a.ID[:], b.ID[:]) })
}

// FindEntry returns the place of an event in a list that SortEntries has ordered, that of the first if it is there
// several times.
func FindEntry(list []Entry, event uuid.UUID) (int, bool) {
	return slices.BinarySearchFunc(list, event, func(e Entry, id uuid.UUID) int {
		return bytes.Compare(e.ID[:], id[:])
	})
}

// Member is who signs that it leads.
type Member struct {
	// ID is the process, and Server the process of Postgres whose table it is the leader of: in one table there is only
	// one leader.
	ID, Server string
	// Holder names it for people.
	Holder string
}

// Sign is what another one has signed.
type Sign struct {
	Member
	// Text is new whenever it signs.
	Text string
}

// Sink publishes events. All its methods are safe for concurrent use; a LanePublisher and its deliveries belong to one
// goroutine. See package posthaste/sink.
type Sink interface {
	// Bind makes the server that answers now, or those that share the streams now, the ones that everything is
	// published to, and names them; "" if that cannot be known. From then on every call that would be carried out by
	// another one, or by the same after a restart, is refused with ErrMoved: such a server may lack what the last one
	// had acknowledged.
	Bind(ctx context.Context) (server string, err error)
	// Release ends that: whoever answers will do. It does no I/O.
	Release()
	// Alive is the sign of life of a leader, or of one who wants to become it. While another one signs for source, that
	// is neither m nor of m's server of Postgres, it changes nothing and returns that one. before is what the call
	// before has returned, nil if that was nothing.
	Alive(ctx context.Context, source uuid.UUID, m Member, before *Sign) (*Sign, error)
	// Look tells what is there of the streams, and of the gates of a source. It may have to read on and on in a stream
	// that others write to, so ctx is to bound it only if its caller can do without an answer: each call to the server
	// is bounded by itself. noted has, by stream, an entry that the table knows of: a stream that lacks it has
	// forgotten something, whatever its gate knows. *ForeignError as for Adopt.
	Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) ([]StreamState, error)
	// Tail lists the events that are in a stream behind an entry, "" for all of it; not those that a replay has put
	// there, nor those of others who share it.
	Tail(ctx context.Context, stream, after string) ([]Entry, error)
	// Missed counts streams that were found to be gone like ErrGap.
	Missed(streams int)
	// Adopt raises the gate of stream to o and turns what earlier owners left unsettled into the doubt set. Repeating
	// it is harmless. intact: Look has found stream and gate so, and if they are not any more, or the gate is an older
	// one, nothing is done. Errors: ErrGap for that, *FencedError when the gate has seen a later owner, *ForeignError
	// when other databases publish to the stream, and they or this one do not share it.
	Adopt(ctx context.Context, stream string, o Owner, intact bool) error
	// Recall adds events that are in the stream to the doubt set. last is the stream's last entry, as far as is known:
	// the gate takes note of it.
	Recall(ctx context.Context, o Owner, stream string, ids []uuid.UUID, last string) error
	// Lane opens a lane; it does no I/O. The same lane may be opened once only per owner and claim.
	Lane(stream string, o Owner, l Lane) LanePublisher
	// Check returns nil if the gates of all streams still belong to o and are registered, and the streams have what
	// these have let through; ErrGap or *FencedError otherwise.
	Check(ctx context.Context, o Owner, streams []string) error
	// Confirm is the barrier before a mark is written: it returns nil only if every gate still has o and the marked
	// batches, and everything published so far has reached the configured durability.
	Confirm(ctx context.Context, o Owner, marks []Mark) error
	// Settled tells the gates that the marked batches' rows are settled. Losing it costs memory only.
	Settled(ctx context.Context, o Owner, marks []Mark) error
	// ForgetDoubt empties the doubt set of stream.
	ForgetDoubt(ctx context.Context, o Owner, stream string) error
	// Sharded says, for consumers that read only some types, that the type that base names has several streams.
	Sharded(ctx context.Context, base string) error
	// Follow gives a stream that was not published to yet the consumer groups of others, from its first entry on.
	Follow(ctx context.Context, stream string, others []string) error
	// Groups lists, by stream, the consumer groups of those streams that Check finds no fault with. An error leaves out
	// others.
	Groups(ctx context.Context, o Owner, streams []string) (map[string][]string, error)
	// Regroup makes the groups that a stream lacks, from its first entry on.
	Regroup(ctx context.Context, stream string, groups []string) error
	// Unread lists what consumers may still have before them in the streams: groups that have not acknowledged
	// everything of source, and streams so young that consumers may not have found them.
	Unread(ctx context.Context, source uuid.UUID, streams []string) ([]Unread, error)
	// Trim shortens the stream to its configured length, never beyond what a consumer group has not acknowledged
	// unless so configured.
	Trim(ctx context.Context, stream string) error
}

// LanePublisher numbers the batches of one lane.
type LanePublisher interface {
	// Deliver prepares the publication of events, which all belong to the lane's stream, in order. It does no I/O. The
	// previous delivery must be complete. The caller keeps events unchanged until the delivery is complete.
	Deliver(events []*Event) Delivery
	// Settled remembers that the batches up to number are settled; the next publish tells the gate.
	Settled(number int64)
}

// Delivery is one publication, made safe to repeat by its place in the lane.
type Delivery interface {
	// Publish makes one attempt, bounded by ctx. nil: every event is in the stream (or was skipped) and the receipt is
	// final. *PoisonError: the sink refuses one event for its own sake; retry, or call Skip and publish again. ErrGap,
	// *FencedError: the lane is finished. Anything else is transient: call Publish again.
	Publish(ctx context.Context) (Receipt, error)
	// Skip gives up the event that the last *PoisonError named and, of those behind it, every one for which also
	// (unless it is nil) returns true. It returns the places of the latter.
	Skip(also func(e *Event) bool) []int
}

// ErrGap means that the sink or the caller lost state (a flushed, restored or failed-over server): adopt again, sweep.
var ErrGap = errors.New("the gate has lost its place: adopt again")

// ErrMoved means that the sink was restarted, or that another server has taken its place, which may lack what the last
// one had acknowledged. It is an ErrGap.
var ErrMoved = fmt.Errorf("the sink was restarted, or is another one: %w", ErrGap)

// StreamError means that the sink answers, and that what is wrong concerns one stream: what goes to others passes.
type StreamError struct {
	Stream string
	Err    error
}

func (e *StreamError) Error() string { return e.Err.Error() }

// Unwrap returns the sink's own error.
func (e *StreamError) Unwrap() error { return e.Err }

// Alone reports whether err is about one stream, and others need not wait.
func Alone(err error) bool {
	var stream *StreamError
	return errors.As(err, &stream)
}

// FencedError means that somebody else owns the stream or lane now.
type FencedError struct {
	Stream string
	// Epoch is the gate's epoch.
	Epoch int64
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("stream %q: fenced: the gate is at epoch %d", e.Stream, e.Epoch)
}

// Permanent reports that repeating the call cannot help.
func (*FencedError) Permanent() bool { return true }

// ForeignError means that the stream is another database's, or that of several and not to be published to like this.
type ForeignError struct {
	Stream string
	// Source is the other database's identity, or that of one of several.
	Source string
	// Reason says of the stream what is in the way, Remedy what to do.
	Reason, Remedy string
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("stream %q %s%s%s", e.Stream, e.Reason, RemedyMark, e.Remedy)
}

// RemedyMark stands between what is wrong and what to do in the text of an error.
const RemedyMark = "; remedy: "

// Permanent reports that repeating the call cannot help.
func (*ForeignError) Permanent() bool { return true }

// TwinError means that the relay of a copy of this database's server, or of the one that this is a copy of, is at work.
type TwinError struct{ Holder string }

func (e *TwinError) Error() string {
	return fmt.Sprintf("%s leads for a database with this one's identity, on another server of Postgres%s", e.Holder,
		RemedyMark) + "if that one is the right one, give the copy another Redis, or an identity of its own: UPDATE " +
		"relay_state SET database_oid = 0, and start its relay anew; if this one is, stop that relay for good"
}

// Permanent reports that repeating the call cannot help.
func (*TwinError) Permanent() bool { return true }

// PoisonError means that the sink refuses one event for its own sake: it would take others.
type PoisonError struct {
	// Index is the event's place in the delivery.
	Index int
	// ID is the event's id.
	ID uuid.UUID
	// Class is the error class, as in outbox_publish_errors_total.
	Class string
	// All is set if it is for the sake of the stream, which takes no other event either.
	All bool
	Err error
}

func (e *PoisonError) Error() string { return fmt.Sprintf("event %s is refused: %v", e.ID, e.Err) }

// Unwrap returns the sink's own error.
func (e *PoisonError) Unwrap() error { return e.Err }
