package cdc

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"posthaste/outbox"
)

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
