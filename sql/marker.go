package sql

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

// BeginPass takes a snapshot for o.
func (s *Store) BeginPass(ctx context.Context, o outbox.Owner) (outbox.Pass, error) {
	var seen string
	var p outbox.Pass
	err := s.scan(ctx, "begin a pass", "mark_begin", []any{s.name, o.Epoch, o.Nonce[:]}, &seen, &p.High)
	if errors.Is(err, pgx.ErrNoRows) {
		err = outbox.ErrSuperseded
	}
	if err == nil {
		p.Snapshot, err = outbox.ParseSnapshot(seen)
	}
	return p, err
}

// SettleAll makes pass the mark of every part. It waits for sessions that hold a part.
func (s *Store) SettleAll(ctx context.Context, o outbox.Owner, pass outbox.Pass) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := move(ctx, s.pool, s.name, o, pass.Settled, outbox.ModePoll, nil); err != nil {
		return fmt.Errorf("settle a pass: %w", err)
	}
	return nil
}

// errBehind means that a part has no mark, or one that settles something that the new mark does not.
var errBehind = errors.New("a part has a later mark, or none")

// move writes the mark of every part in one transaction, which locks the parts, and waits until the mark is as durable
// as any other commit.
func move(ctx context.Context, db interface {
	DB
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}, name string, o outbox.Owner, to outbox.Settled, mode outbox.Mode, entries outbox.Entries,
) error {
	var b pgx.Batch // one transaction
	b.Queue(query("mark_lock"))
	var owner, moved, replicated bool
	b.Queue(query("mark_move"), name, o.Epoch, o.Nonce[:], snapshotText(to.Snapshot), to.High, string(mode),
		noted(entries)).
		QueryRow(func(row pgx.Row) error { return row.Scan(&owner, &moved, &replicated) })
	switch err := db.SendBatch(ctx, &b).Close(); {
	case err != nil:
		return err
	case !owner:
		return outbox.ErrSuperseded
	case !moved:
		return errBehind
	case replicated:
		_, err := db.Exec(ctx, query("mark_replicated"))
		return err
	}
	return nil
}

// marker is one session. It locks the parts only while it writes, so no other session can write a mark at the same
// time. If a statement arrives late, after its session was abandoned and another one continued, it finds a later mark
// and changes nothing.
type marker struct {
	conn *pgxpool.Conn
	name string
}

// Marker acquires a session from the pool.
func (s *Store) Marker(ctx context.Context) (outbox.Marker, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("open a session for marks: %w", err)
	}
	return &marker{conn: conn, name: s.name}, nil
}

// Look takes a snapshot and lists the rows that it sees and since does not.
func (m *marker) Look(ctx context.Context, since outbox.Settled, below uint64) (outbox.Look, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	l, err := m.look(ctx, since, below)
	if err != nil {
		m.end()
		return outbox.Look{}, fmt.Errorf("find unsettled rows: %w", err)
	}
	return l, nil
}

func (m *marker) look(ctx context.Context, since outbox.Settled, below uint64) (l outbox.Look, err error) {
	rows, err := m.conn.Query(ctx, query("mark_look"), snapshotText(since.Snapshot), since.High,
		strconv.FormatUint(below, 10))
	if err != nil {
		return l, err
	}
	var seen, end *string
	var high *int64
	var xid *uint64
	var seqs []int64
	_, err = pgx.ForEachRow(rows, []any{&seen, &high, &end, &xid, &seqs}, func() (err error) {
		if xid == nil {
			l.High = *high
			if l.Snapshot, err = outbox.ParseSnapshot(*seen); err == nil {
				l.End, err = outbox.ParseLSN(*end)
			}
			return err
		}
		l.Owed = append(l.Owed, outbox.Owed{XID: *xid, Seqs: seqs})
		seqs = nil
		return nil
	})
	slices.SortFunc(l.Owed, func(a, b outbox.Owed) int { return cmp.Compare(a.XID, b.XID) })
	return l, err
}

// snapshotText formats s for Postgres, which has no zero snapshot: for one that sees nothing it returns 1:1:.
func snapshotText(s outbox.Snapshot) string {
	if s.Max() == 0 {
		return "1:1:"
	}
	return s.String()
}

// Move makes to the mark of every part.
func (m *marker) Move(ctx context.Context, o outbox.Owner, to outbox.Settled, entries outbox.Entries) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := move(ctx, m.conn, m.name, o, to, outbox.ModeCDC, entries); err != nil {
		m.end()
		return fmt.Errorf("move the mark: %w", err)
	}
	return nil
}

// Close returns the session to the pool, which replaces it if it has ended.
func (m *marker) Close() { m.conn.Release() }

// end closes the session. Its scan results must not be used in another one.
func (m *marker) end() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = m.conn.Conn().Close(ctx)
}
