package stream

import (
	"context"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Sink is the system that the relay publishes to, as the ports that the relay's parts use. Package posthaste/sink
// implements it for Redis, and posthaste/sink/sinktest tests an implementation. All methods are safe for concurrent
// use; a LanePublisher and its deliveries belong to one goroutine.
//
// A sink has a gate for each stream and source, which is kept with the stream and changes with it in one atomic step. A
// gate records its owner; by lane, the claim, the number of the last batch and the events of the batches that are not
// settled; the events in doubt; and what it has let through, by which it notices that entries are gone.
//
// Each call is bounded by its context. After an error without a meaning of its own, the call may have been executed,
// and may be executed later: every call can be repeated, and one that arrives after a later call publishes nothing. The
// errors that all ports share are outbox.ErrGap if the gate is missing, is of an earlier owner than the caller, or
// lacks something that it has let through; *outbox.FencedError if it is of a later owner, or of another one of the same
// epoch; outbox.ErrMoved if the server is not the bound one; *outbox.StreamError if the failure
// concerns this stream, or those of one node of a cluster.
type Sink interface {
	Servers
	Gates
	Publisher
	Restorer
	Readers
}

// Servers binds the sink to the processes that answer, and excludes leaders for a copy of the database.
type Servers interface {
	// Bind binds the sink to the servers that answer now: one, or those that share the streams. It returns their name,
	// "" if it is unknown. From then on a call that another or a restarted server would execute is refused with
	// ErrMoved, because such a server may lack acknowledged events. With a *StreamError, only some of the servers that
	// share the streams have answered; each other one is bound when it does.
	Bind(ctx context.Context) (server string, err error)
	// Release ends the binding, so that any server is accepted. It does no I/O.
	Release()
	// Alive is the sign of life of a leader or a candidate. If another process signs for source, and is neither m nor
	// of m's server of Postgres, Alive changes nothing and returns its sign. A sign expires in seconds, and later if
	// before, the result of the previous call (nil for none), shows that the other process has signed again since.
	Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (*outbox.Sign, error)
}

// Gates raises and examines gates.
type Gates interface {
	// Look returns the states of streams and of the gates of a source, in the order of streams. It may have to read
	// long in a stream that others write to. Each call to the server has a timeout, so ctx should only bound Look if
	// the caller can continue without an answer. noted has, by stream, an entry that the table knows: a stream without
	// it has lost events, whatever its gate knows. With a *StreamError, the states without an Err are valid.
	// *ForeignError as for Adopt.
	Look(ctx context.Context, source uuid.UUID, streams []string, noted map[string]string) ([]outbox.StreamState, error)
	// Missed counts streams that were found to be gone, as ErrGap is counted. It does no I/O.
	Missed(streams int)
	// Adopt gives the gate of stream the owner o and turns the events that earlier owners left unsettled into the doubt
	// set: they are in the stream, and the next publish of each is suppressed. A gate that does not exist is created.
	// intact: Look has found stream and gate intact, and Adopt changes nothing if that has changed or the gate is
	// older. Errors: ErrGap for that; *FencedError when the gate has seen a later owner; *ForeignError when other
	// databases publish to the stream, and they or this one do not share it.
	Adopt(ctx context.Context, stream string, o outbox.Owner, intact bool) error
	// ForgetDoubt empties the doubt set of stream, except for events that a claim has inherited from an earlier one.
	ForgetDoubt(ctx context.Context, o outbox.Owner, stream string) error
	// Follow gives a new stream the consumer groups of others, from its first entry on. It creates the stream.
	Follow(ctx context.Context, stream string, others []string) error
	// Sharded marks, for consumers that read only some types, that the type base has several streams.
	Sharded(ctx context.Context, base string) error
}

// Publisher publishes under an owner whose gates were raised.
type Publisher interface {
	// Lane opens a lane; it does no I/O. The same lane may be opened once only per owner and claim. The first publish
	// of a claim fences the earlier ones of the part, and puts what they left unsettled in doubt.
	Lane(stream string, o outbox.Owner, l outbox.Lane) outbox.LanePublisher
	// Check returns nil if the gates of all streams still belong to o and are registered, and the streams have
	// everything that the gates have let through; ErrGap or *FencedError otherwise, also if another stream cannot be
	// asked.
	Check(ctx context.Context, o outbox.Owner, streams []string) error
	// Confirm is the barrier before a mark is written: it returns nil only if every gate still has o and the marked
	// batches, and everything published so far to their streams has reached the configured durability. A mark with the
	// number 0 stands for no batch.
	Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error
	// Settled reports to the gates that the rows of the marked batches are settled, also if a later claim has inherited
	// them. A lost call only costs memory.
	Settled(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error
}

// Restorer compares a stream with the table, and restores what the stream has lost. Lost events are published over the
// lane outbox.RestoreLane.
type Restorer interface {
	// Tail lists the events in a stream after an entry, "" for all of it, in order. It omits entries of replays and of
	// other databases. A stream that does not exist is empty.
	Tail(ctx context.Context, stream, after string) ([]outbox.Entry, error)
	// Recall adds events that are in the stream to the doubt set. last is the stream's last known entry, which the gate
	// records; if the stream does not have it any more, later publishes return ErrGap.
	Recall(ctx context.Context, o outbox.Owner, stream string, ids []uuid.UUID, last string) error
	// Regroup creates the groups that a stream lacks, from its first entry on. It creates the stream.
	Regroup(ctx context.Context, stream string, groups []string) error
}

// Readers knows the consumer groups of the streams.
type Readers interface {
	// Groups lists, by stream, the consumer groups of the streams for which Check would succeed. With an error, more
	// streams may be missing.
	Groups(ctx context.Context, o outbox.Owner, streams []string) (map[string][]string, error)
	// Unread lists what consumers may not have processed yet: groups that have not acknowledged everything of source,
	// and streams so young that consumers may not have found them.
	Unread(ctx context.Context, source uuid.UUID, streams []string) ([]outbox.Unread, error)
	// Trim shortens the stream to its configured length. Entries that a consumer group has not acknowledged stay,
	// unless configured otherwise.
	Trim(ctx context.Context, stream string) error
}
