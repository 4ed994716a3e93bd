package cdc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"posthaste/internal/failpoint"
	"posthaste/outbox"
)

const (
	// chunkRows is how many rows are handed over at once, at most.
	chunkRows = 1000
	// settlePoll is the interval at which a reader with unsettled transactions checks the settled position, and the
	// shortest interval of its reports to the server.
	settlePoll = 100 * time.Millisecond
	// holdOpen is how long the rows of a transaction wait for its COMMIT, which is normally microseconds behind them,
	// before they are handed over without it.
	holdOpen = time.Millisecond
	// positionEvery is how often, at most, a position without rows is handed over.
	positionEvery = 20 * time.Millisecond
	// writeTimeout bounds the writing of a status message: if 39 bytes cannot be sent, the peer is gone.
	writeTimeout = 5 * time.Second
	// closeTimeout bounds the orderly end of a stream.
	closeTimeout = time.Second
)

// errSilent means that the server has not answered in time.
var errSilent = errors.New("the server sends nothing and does not answer")

// session is one replication connection. It belongs to the goroutine in Reader.Run, which alone reads and writes the
// socket.
type session struct {
	r    *Reader
	conn net.Conn
	fe   *pgproto3.Frontend
	in   *gulp
	pid  uint32
	out  chan<- outbox.Chunk
	tick time.Duration

	dec   *decoder
	track tracker
	// publication was read before the caller's last pass over the table. That pass may have missed rows that a later
	// change excludes.
	publication publication

	// chunk collects rows for the next delivery; since is when the oldest row was added.
	chunk outbox.Chunk
	since time.Time
	// mine is how many rows of the transaction being received are in chunk, sent how many were handed over.
	mine, sent int
	// reached: everything committed below it is in chunk or was handed over. offered is the last one handed over.
	reached, offered outbox.LSN
	offeredAt        time.Time

	// received is the highest position received; told and toldAt are the last status.
	received outbox.LSN
	told     outbox.LSN
	toldAt   time.Time
	// heardAt is when the last bytes arrived. asked is set while an answer is outstanding, since askedAt.
	heardAt time.Time
	asked   bool
	askedAt time.Time
	pace    pace
	// broken is set when nothing more can be sent to the server.
	broken bool
}

// startedError carries the error of the started callback through to the end of Run.
type startedError struct{ error }

func newSession(r *Reader, h *pgconn.HijackedConn, in *gulp, out chan<- outbox.Chunk) *session {
	return &session{
		r: r, conn: h.Conn, fe: h.Frontend, in: in, pid: h.PID, out: out,
		tick: min(10*time.Second, r.opt.SenderTimeout/3),
		dec:  newDecoder(r.opt.Schema, table),
		pace: newPace(time.Now()),
	}
}

// run calls started and then streams until ctx ends or something breaks.
func (s *session) run(ctx context.Context, started func(context.Context) error) error {
	if err := s.runStarted(ctx, started); err != nil {
		return err
	}
	// The end of ctx interrupts a waiting read. The interruption must have finished before another deadline is set.
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = s.conn.SetReadDeadline(time.Unix(1, 0))
		close(woken)
	})
	defer func() {
		if !stop() {
			<-woken
		}
	}()
	s.heard(time.Now())
	// The answer contains the server's current position.
	if err := s.status(time.Now(), true); err != nil {
		return err
	}
	for {
		msg, err := s.fe.Receive()
		switch {
		case err == nil:
			err = s.message(ctx, msg)
		case errors.Is(err, errDry):
			err = s.dry(ctx)
		default:
			s.broken = true
		}
		if err != nil {
			return err
		}
	}
}

// runStarted runs the callback and keeps the connection alive meanwhile, without reading: the callback may sweep for a
// long time.
func (s *session) runStarted(ctx context.Context, started func(context.Context) error) error {
	sctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		err := errors.New("started ended without returning") // runtime.Goexit
		defer func() { done <- err }()
		err = started(sctx)
	}()
	t := time.NewTicker(s.tick)
	defer t.Stop()
	for {
		select {
		case err := <-done:
			if err != nil {
				return startedError{err}
			}
			return ctx.Err()
		case now := <-t.C:
			if err := s.status(now, false); err != nil {
				cancel()
				_ = <-done // what it says now follows from the cancellation
				return err
			}
		}
	}
}

// message handles one message of the protocol.
func (s *session) message(ctx context.Context, msg pgproto3.BackendMessage) error {
	switch m := msg.(type) {
	case *pgproto3.CopyData:
		return s.copyData(ctx, m.Data)
	case *pgproto3.ErrorResponse:
		s.broken = true
		return pgconn.ErrorResponseToPgError(m)
	case *pgproto3.NoticeResponse, *pgproto3.ParameterStatus, *pgproto3.NotificationResponse:
		return nil
	case *pgproto3.CopyDone, *pgproto3.CommandComplete, *pgproto3.ReadyForQuery:
		s.broken = true
		return errors.New("the server ended the stream")
	default:
		return fmt.Errorf("unexpected message %T", msg)
	}
}

func (s *session) copyData(ctx context.Context, b []byte) error {
	switch {
	case len(b) >= 25 && b[0] == pglogrepl.XLogDataByteID:
		// WALStart and WALEnd are equal in logical replication, and zero for metadata. They are no identity: the BEGIN
		// of a transaction may carry the position of an earlier COMMIT.
		s.receivedTo(outbox.LSN(binary.BigEndian.Uint64(b[9:])))
		s.pace.got(len(b))
		return s.change(ctx, b[25:])
	case len(b) == 18 && b[0] == pglogrepl.PrimaryKeepaliveMessageByteID:
		return s.keepalive(outbox.LSN(binary.BigEndian.Uint64(b[1:])), b[17] != 0)
	default:
		return undecodable(fmt.Errorf("replication message of %d bytes is neither data nor keepalive", len(b)))
	}
}

func (s *session) receivedTo(p outbox.LSN) {
	if p > s.received {
		s.received = p
	}
}

// change handles one pgoutput message.
func (s *session) change(ctx context.Context, b []byte) error {
	what, err := s.dec.decode(b)
	if err != nil {
		return err
	}
	switch what {
	case announced:
		return s.unchanged(ctx)
	case began:
		s.track.Begin()
		s.mine, s.sent = 0, 0
		// Commits come in order, so everything committed before this transaction is known.
		s.reached = max(s.reached, s.dec.commit)
	case inserted:
		s.add(s.dec.row)
		s.mine++
		return s.deliverFull(ctx)
	case committed:
		s.commit()
		return s.deliverFull(ctx)
	case nothing:
	}
	return nil
}

// unchanged is called when the server announces the table. An error means that the publication has changed, which may
// have hidden rows that were committed before the following ones. A change is visible before the next one can be made,
// so one check at this time is enough.
func (s *session) unchanged(ctx context.Context) error {
	now, err := s.r.published(ctx)
	if err != nil || now == s.publication {
		return err
	}
	return &outbox.SlotError{
		Reason: outbox.ReasonPublication, Err: fmt.Errorf("publication %q was changed", s.r.opt.Publication),
		Remedy: "nothing to do: the relay polls what it may have left out, and streams again",
	}
}

// commit ends the transaction being received.
func (s *session) commit() {
	end := s.dec.end
	s.reached = max(s.reached, end)
	s.receivedTo(end)
	switch {
	case s.mine > 0:
		s.chunk.Rows[len(s.chunk.Rows)-1].End = end
		s.track.Opened(end)
	case s.sent > 0:
		s.add(outbox.Row{Commit: s.dec.commit, XID: s.dec.xid, End: end})
		s.track.Opened(end)
	default:
		s.track.Empty(end)
	}
}

func (s *session) add(row outbox.Row) {
	s.chunk.Bytes += row.Size()
	s.chunk.Rows = append(s.chunk.Rows, row)
}

// keepalive: the server has read up to end and sent everything committed below.
func (s *session) keepalive(end outbox.LSN, reply bool) error {
	s.asked = false
	s.receivedTo(end)
	if !s.track.receiving {
		s.reached = max(s.reached, end)
	}
	s.track.Idle(end)
	if reply {
		return s.status(time.Now(), false)
	}
	return nil
}

// dry is called when everything received is parsed: it delivers, reports, and waits for more.
func (s *session) dry(ctx context.Context) error {
	now := time.Now()
	until := now.Add(s.tick)
	if len(s.chunk.Rows) > 0 {
		if s.since.IsZero() {
			s.since = now
		}
		if hold := s.since.Add(holdOpen); s.track.receiving && now.Before(hold) {
			until = hold
		} else {
			if err := s.deliver(ctx); err != nil {
				return err
			}
			now = time.Now()
			until = now.Add(s.tick)
		}
	} else if at := s.offer(now); at.Before(until) {
		until = at
	}
	at, err := s.housekeep(now)
	if err != nil {
		return err
	}
	if at.Before(until) {
		until = at
	}
	pause := s.pace.pause(now)
	if s.track.receiving {
		pause = min(pause, pauseLeast) // the rest of a transaction is close behind, and rows wait for it
	}
	time.Sleep(pause)
	return s.fill(ctx, until)
}

// fill waits for bytes until the deadline at the latest.
func (s *session) fill(ctx context.Context, until time.Time) error {
	if err := s.conn.SetReadDeadline(until); err != nil {
		return fmt.Errorf("set the read deadline: %w", err)
	}
	// After the deadline is set: either ctx ended before this, or its AfterFunc overwrites the deadline.
	if err := ctx.Err(); err != nil {
		return err
	}
	n, err := s.in.fill()
	if n > 0 {
		s.heard(time.Now())
		return nil
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case err == nil:
		return nil
	default:
		s.broken = true
		return fmt.Errorf("read: %w", err)
	}
}

// heard records that the server has sent something, or could not because this process did not read.
func (s *session) heard(now time.Time) {
	s.heardAt, s.asked = now, false
	s.r.heard.Store(now.UnixNano())
}

// housekeep sends a status if one is due and returns when the next is due.
func (s *session) housekeep(now time.Time) (time.Time, error) {
	if s.asked && !now.Before(s.silentAt()) {
		s.broken = true
		return now, errSilent
	}
	if s.statusDue(now) {
		// Without traffic each status requests an answer, which proves that the server is running and contains its
		// position.
		if err := s.status(now, now.Sub(s.heardAt) >= s.tick/2); err != nil {
			return now, err
		}
	}
	next := s.toldAt.Add(s.tick)
	if s.track.Pending() > 0 || s.track.Flushed() > s.told {
		next = now.Add(settlePoll)
	}
	if s.asked {
		if end := s.silentAt(); end.Before(next) {
			next = end
		}
	}
	return next, nil
}

// silentAt is when a server with an outstanding answer counts as silent. It always gets time to answer after a request,
// because this process itself may have been paused.
func (s *session) silentAt() time.Time {
	end := s.heardAt.Add(2 * s.tick)
	if answer := s.askedAt.Add(s.tick / 2); answer.After(end) {
		return answer
	}
	return end
}

// statusDue reads the settled position and reports whether a status is due.
func (s *session) statusDue(now time.Time) bool {
	s.track.Done(outbox.LSN(s.r.settled.Load()))
	since := now.Sub(s.toldAt)
	return since >= s.tick || (s.track.Flushed() > s.told && since >= settlePoll)
}

// status tells the server what was received and what is settled.
func (s *session) status(now time.Time, reply bool) error {
	s.track.Done(outbox.LSN(s.r.settled.Load()))
	flush := s.track.Flushed()
	m := encodeStatus(max(s.received, flush), flush, now, reply)
	if err := s.conn.SetWriteDeadline(now.Add(writeTimeout)); err != nil {
		return fmt.Errorf("set the write deadline: %w", err)
	}
	failpoint.Before("status")
	if _, err := s.conn.Write(m[:]); err != nil {
		s.broken = true
		return fmt.Errorf("send the status: %w", err)
	}
	failpoint.After("status")
	s.told, s.toldAt = flush, now
	if reply && !s.asked {
		s.asked, s.askedAt = true, now
	}
	return nil
}

// deliverFull delivers the chunk if it has reached its limits, even in the middle of a transaction, which bounds the
// memory of large transactions.
func (s *session) deliverFull(ctx context.Context) error {
	if len(s.chunk.Rows) < chunkRows && s.chunk.Bytes < s.r.opt.ChunkBytes {
		return nil
	}
	return s.deliver(ctx)
}

// deliver delivers the chunk. While the receiver is busy the socket is not read, so the server waits as well. Status
// messages continue, because the server closes a connection that is idle for wal_sender_timeout.
func (s *session) deliver(ctx context.Context) error {
	c := s.take()
	select {
	case s.out <- c:
		return nil
	default:
	}
	t := time.NewTicker(min(settlePoll, s.tick))
	defer t.Stop()
	for {
		select {
		case s.out <- c:
			// This process did not read in the meantime.
			s.heardAt, s.asked = time.Now(), false
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case now := <-t.C:
			if !s.statusDue(now) {
				continue
			}
			if err := s.status(now, false); err != nil {
				return err
			}
		}
	}
}

// take empties the chunk. The receiver owns the old array, so the next rows get a new one, as large as the last chunk
// was full.
func (s *session) take() outbox.Chunk {
	c := s.chunk
	c.Position = s.reached
	s.offered, s.offeredAt = s.reached, time.Now()
	s.sent += s.mine
	s.mine = 0
	s.since = time.Time{}
	s.chunk = outbox.Chunk{Rows: make([]outbox.Row, 0, min(chunkRows, 2*len(c.Rows)))}
	return c
}

// offer delivers a position that moved without rows, if the receiver has room and enough time has passed since the last
// one. It returns when to try again.
func (s *session) offer(now time.Time) time.Time {
	if s.reached <= s.offered || s.track.receiving {
		return now.Add(s.tick)
	}
	if at := s.offeredAt.Add(positionEvery); now.Before(at) {
		return at
	}
	select {
	case s.out <- outbox.Chunk{Position: s.reached}:
		s.offered = s.reached
	default:
	}
	s.offeredAt = now
	return now.Add(s.tick)
}

// close ends the stream. If the connection may still work, it reports the settled position, requests the end of the
// copy and waits a moment for it, after which the slot is free.
func (s *session) close() {
	defer func() { _ = s.conn.Close() }()
	if s.broken {
		return
	}
	now := time.Now()
	if s.status(now, false) != nil || s.conn.SetDeadline(now.Add(s.r.closing)) != nil {
		return
	}
	s.fe.Send(&pgproto3.CopyDone{})
	if s.fe.Flush() != nil {
		return
	}
	s.in.untap()
	for {
		msg, err := s.fe.Receive()
		if err != nil {
			return
		}
		// Other data was in transit and is delivered again.
		switch msg.(type) {
		case *pgproto3.ReadyForQuery, *pgproto3.ErrorResponse:
			s.fe.Send(&pgproto3.Terminate{})
			_ = s.fe.Flush()
			return
		}
	}
}
