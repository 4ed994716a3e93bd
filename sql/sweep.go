package sql

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// sweepTimeout bounds every call of a Sweep, in case the server has vanished. It is longer than the server's own
// timeouts, which give better errors.
const sweepTimeout = 35 * time.Second

// listRows is how many rows a pass lists at once: about as many as a worker sweeps in a turn, and 20 pages.
const listRows = 20 * 999

// rangeGap is the greatest distance of two numbers of a part that are read as one range: a few times that of a part
// that has its share of all numbers.
const rangeGap = 4 * outbox.Partitions

// Sweep is the connection of one sweep worker. A claim is a transaction that holds the lock of a part's row in
// outbox_part: Claim begins it, Settle commits it and Drop ends it without a mark. Only the holder of a part publishes
// its rows and writes its marks. The server ends a transaction that is idle for 15 s, so a frozen worker loses its
// part. Sweep is not safe for concurrent use.
type Sweep struct {
	conn *pgx.Conn
	name string
}

// OpenSweep connects for the relay called name.
func OpenSweep(ctx context.Context, url, schema, name string) (*Sweep, error) {
	cfg, err := ConnConfig(url, schema, "sweep")
	if err != nil {
		return nil, err
	}
	prepare(cfg)
	maps.Copy(cfg.RuntimeParams, queueSettings)
	cfg.RuntimeParams["idle_in_transaction_session_timeout"] = "15s"
	cfg.RuntimeParams["lock_timeout"] = "2s"
	cfg.RuntimeParams["statement_timeout"] = "30s"
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := Connect(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("open a sweep connection: %w", err)
	}
	return &Sweep{conn: conn, name: name}, nil
}

// Close ends the session, which ends its claim.
func (s *Sweep) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx)
}

// Closed reports whether the connection is gone.
func (s *Sweep) Closed() bool { return s.conn.IsClosed() }

// Partitions lists the parts with unsettled rows or an unfinished pass.
func (s *Sweep) Partitions(ctx context.Context) ([]int, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	return collect(ctx, s.conn, "look for rows", pgx.RowTo[int], "sweep_parts")
}

// Claim takes the first of parts that no other session has, and numbers the claim. ok is false if all of them are held.
// outbox.ErrSuperseded: o is no longer the owner, or has not adopted since the database was promoted.
func (s *Sweep) Claim(ctx context.Context, parts []int, o outbox.Owner) (part int, claim int64, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	var owner bool
	var free *int
	var number *int64
	b := &pgx.Batch{}
	b.Queue("BEGIN")
	b.Queue(query("sweep_claim"), s.name, o.Epoch, o.Nonce[:], parts).
		QueryRow(func(row pgx.Row) error { return row.Scan(&owner, &free, &number) })
	err = s.conn.SendBatch(ctx, b).Close()
	if err == nil && number != nil {
		return *free, *number, true, nil
	}
	if err == nil && !owner {
		err = outbox.ErrSuperseded
	}
	if end := s.Drop(ctx); err == nil {
		err = end
	}
	if err != nil {
		err = fmt.Errorf("claim a part: %w", err)
	}
	return 0, 0, false, err
}

// Drop ends the claim without writing a mark. Events that were parked stay dead.
func (s *Sweep) Drop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	tag, err := s.conn.Exec(ctx, "COMMIT")
	if err == nil && tag.String() != "COMMIT" {
		err = errors.New("it was rolled back")
	}
	if err != nil {
		return fmt.Errorf("end a claim: %w", err)
	}
	return nil
}

func wrapPart(step string, part int, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s part %d: %w", step, part, err)
}

// row reads the row of a statement about a part.
func (s *Sweep) row(ctx context.Context, step string, part int, name string, args []any, to ...any) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	return wrapPart(step, part, s.conn.QueryRow(ctx, query(name), args...).Scan(to...))
}

// snapshotOf returns the snapshot of a pass as text, NULL without one.
func snapshotOf(p *outbox.Pass) *string {
	if p == nil {
		return nil
	}
	text := p.Snapshot.String()
	return &text
}

// Begin resumes the unfinished pass of a claimed part, whichever worker began it, or begins one over the snapshot
// within. If within is nil, or the part's mark sees more than within, the pass covers what is visible now.
func (s *Sweep) Begin(ctx context.Context, part int, within *outbox.Pass) (*outbox.PartPass, error) {
	var high int64
	if within != nil {
		high = within.High
	}
	p := &outbox.PartPass{Part: part}
	err := s.row(ctx, "begin a pass over", part, "sweep_begin", []any{part, snapshotOf(within), high, listRows},
		&p.Mark, &p.Settled, &p.Hi, &p.UnderWay, &p.Seen, &p.High, &p.Seqs)
	if err != nil {
		return nil, err
	}
	p.Full = len(p.Seqs) == listRows
	return p, nil
}

// Page reads the next rows of the pass: at most limit rows and about bytes of payload. It may return none although rows
// are listed, because they were deleted or parked since. It reads the same rows again until Settle is called. After
// outbox.ErrPassed and *outbox.UnreadableError, the claim continues.
func (s *Sweep) Page(ctx context.Context, p *outbox.PartPass, limit, bytes int) ([]*outbox.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	p.Page = min(limit, len(p.Seqs))
	if p.Page == 0 {
		return nil, nil
	}
	var events []*outbox.Record
	b := &pgx.Batch{}
	b.Queue("SAVEPOINT page")
	b.Queue(query("sweep_mark"), p.Part).QueryRow(func(row pgx.Row) error {
		var newest int64
		err := row.Scan(&newest)
		if err == nil && newest != p.Mark {
			err = outbox.ErrPassed
		}
		return err
	})
	b.Queue(query("sweep_page"), append([]any{p.Part, bytes}, pageRows(p)...)...).
		Query(func(rows pgx.Rows) (err error) {
			events, err = readPage(rows, p.Page, bytes)
			return err
		})
	b.Queue("RELEASE page") // ends the statement before it, whose snapshot the server would keep
	if err := s.conn.SendBatch(ctx, b).Close(); err != nil {
		return nil, s.back(ctx, wrapPart("sweep", p.Part, err))
	}
	if n := len(events); n > 0 {
		// Rows after the last one may have exceeded the limit of bytes.
		p.Page, _ = slices.BinarySearch(p.Seqs, events[n-1].Seq)
		p.Page++
	}
	return events, nil
}

// pageRows returns the first and the last numbers of the ranges that a page reads, and the snapshots that tell which of
// their rows are of the pass. It costs less to read a few other rows in a range than to look each row up. What Ahead
// lists is of no pass: each row is a range of its own.
func pageRows(p *outbox.PartPass) []any {
	var gap int64
	var seen, settled *string
	if p.Seen != "" {
		gap, seen, settled = rangeGap, &p.Seen, &p.Settled
	}
	var first, last []int64
	for i, seq := range p.Seqs[:p.Page] {
		if i > 0 && seq-p.Seqs[i-1] <= gap {
			last[len(last)-1] = seq
		} else {
			first, last = append(first, seq), append(last, seq)
		}
	}
	return []any{first, last, seen, settled}
}

// Ahead lists unsettled rows of a claimed part that within sees, or that are visible now: those of streams other than
// blocked that sent does not have. They are read with Page, left behind with Next, and stay unsettled. Ahead removes
// from sent what is settled.
func (s *Sweep) Ahead(ctx context.Context, p *outbox.PartPass, within *outbox.Pass, blocked []string,
	sent map[int64]bool,
) (*outbox.PartPass, error) {
	var seqs []int64
	err := s.row(ctx, "look ahead in", p.Part, "sweep_ahead",
		[]any{p.Part, blocked, listRows, snapshotOf(within)}, &seqs)
	if err != nil {
		return nil, err
	}
	listed := map[int64]bool{}
	for _, seq := range seqs {
		listed[seq] = true
	}
	maps.DeleteFunc(sent, func(seq int64, _ bool) bool { return !listed[seq] })
	seqs = slices.DeleteFunc(seqs, func(seq int64) bool { return sent[seq] })
	return &outbox.PartPass{Part: p.Part, Mark: p.Mark, Seqs: seqs}, nil
}

// back undoes the batch of the savepoint if err concerns the data of a row. It returns err, then as an
// *outbox.UnreadableError.
func (s *Sweep) back(ctx context.Context, err error) error {
	err = unreadable(err)
	if errors.As(err, new(*outbox.UnreadableError)) {
		if _, rerr := s.conn.Exec(ctx, "ROLLBACK TO page"); rerr != nil {
			return rerr
		}
	}
	return err
}

// readPage reads the events. The statement estimates sizes from stored sizes; readPage counts the bytes read.
func readPage(rows pgx.Rows, limit, bytes int) ([]*outbox.Record, error) {
	var events []*outbox.Record
	memory := make([]outbox.Record, limit)
	for size := 0; size < bytes && rows.Next(); {
		e := &memory[len(events)]
		err := rows.Scan(&e.Seq, (*[16]byte)(&e.ID), &e.AggregateType, &e.AggregateID, &e.Type, &e.Payload, &e.Headers,
			&e.Time)
		if err != nil {
			return nil, err
		}
		events = append(events, e)
		size += len(e.AggregateID) + len(e.Payload) + len(e.Headers)
	}
	rows.Close()
	return events, rows.Err()
}

// Settle writes the mark that settles the last page, whose rows are all published or parked, and ends the claim.
// entries are the newest entries that Redis returned for it. outbox.ErrSuperseded: o is no longer the owner, and
// nothing is settled. After any other error the outcome is unknown, and the caller must close the session.
func (s *Sweep) Settle(ctx context.Context, p *outbox.PartPass, o outbox.Owner, entries outbox.Entries) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	settled, hi := p.Settled, p.Hi
	var pass *string
	var high, cursor *int64
	if p.Ends() {
		settled, hi = p.Seen, p.High
	} else {
		pass, high, cursor = &p.Seen, &p.High, &p.Seqs[p.Page-1]
	}
	var owner, replicated bool
	var mark *int64
	b := &pgx.Batch{}
	b.Queue(query("sweep_settle"), s.name, o.Epoch, o.Nonce[:], p.Part, p.Mark, settled, hi, pass, high, cursor,
		noted(entries)).QueryRow(func(row pgx.Row) error { return row.Scan(&owner, &mark, &replicated) })
	b.Queue("COMMIT")
	err := s.conn.SendBatch(ctx, b).Close()
	switch {
	case err != nil:
	case !owner:
		err = outbox.ErrSuperseded
	case mark == nil:
		err = outbox.ErrPassed
	case replicated:
		_, err = s.conn.Exec(ctx, query("mark_replicated"))
	}
	if err != nil {
		return wrapPart("settle a page of", p.Part, err)
	}
	p.Mark = *mark
	p.Turn()
	return nil
}

// noted returns the entries that a mark stores, NULL for none.
func noted(entries outbox.Entries) any {
	if len(entries) == 0 {
		return nil
	}
	return entries
}

// Park records events of the last page in outbox_dead, all or none, which settles them. It skips events that were
// deleted since. outbox.ErrSuperseded as from Settle.
func (s *Sweep) Park(ctx context.Context, p *outbox.PartPass, o outbox.Owner, events []outbox.Refused) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	b := &pgx.Batch{}
	for _, r := range events {
		b.Queue(query("sweep_park"), s.name, o.Epoch, o.Nonce[:], p.Part, r.Event.Seq, storable(r.Err.Error()), r.Class,
			r.Attempts, true).QueryRow(func(row pgx.Row) error {
			var owner bool
			err := row.Scan(&owner, new(*uuid.UUID), new(*string), new(*string))
			if err == nil && !owner {
				err = outbox.ErrSuperseded
			}
			if err != nil {
				return fmt.Errorf("move event %s to outbox_dead: %w", r.Event.ID, err)
			}
			return nil
		})
	}
	return wrapPart("move dead events of", p.Part, s.conn.SendBatch(ctx, b).Close())
}

// ParkRow parks the next row of the pass without reading it, because reading it failed with cause. It returns the
// identifying columns, or nil if the row was deleted since. The parked row keeps the payload if the server can copy it.
// outbox.ErrSuperseded as from Settle.
func (s *Sweep) ParkRow(ctx context.Context, p *outbox.PartPass, o outbox.Owner, cause error) (*outbox.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	e, err := s.parkRow(ctx, p, o, cause, true)
	if errors.As(err, new(*outbox.UnreadableError)) {
		e, err = s.parkRow(ctx, p, o, cause, false)
	}
	if err != nil {
		return nil, wrapPart("move a dead row of", p.Part, err)
	}
	return e, nil
}

func (s *Sweep) parkRow(ctx context.Context, p *outbox.PartPass, o outbox.Owner, cause error,
	payload bool,
) (*outbox.Record, error) {
	var owner bool
	var id *uuid.UUID
	var typ, aggregate *string
	b := &pgx.Batch{}
	b.Queue("SAVEPOINT page")
	b.Queue(query("sweep_park"), s.name, o.Epoch, o.Nonce[:], p.Part, p.Seqs[0], storable(cause.Error()),
		"unreadable", 1, payload).QueryRow(func(row pgx.Row) error { return row.Scan(&owner, &id, &typ, &aggregate) })
	err := s.back(ctx, s.conn.SendBatch(ctx, b).Close())
	switch {
	case err != nil:
		return nil, err
	case !owner:
		return nil, outbox.ErrSuperseded
	case id == nil:
		return nil, nil
	}
	return &outbox.Record{ID: *id, Seq: p.Seqs[0], AggregateType: *typ, AggregateID: *aggregate}, nil
}

// Reached reports whether every row of the part that pass sees is settled, by any worker.
func (s *Sweep) Reached(ctx context.Context, part int, pass outbox.Pass) (ok bool, err error) {
	err = s.row(ctx, "look for rows of", part, "sweep_reached", []any{part, pass.Snapshot.String()}, &ok)
	return ok, err
}

// storable makes the text of an error storable in a database of any encoding.
func storable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == 0 || r > unicode.MaxASCII {
			return '?'
		}
		return r
	}, text)
}

// unreadable makes err an *outbox.UnreadableError if it concerns the data of a row.
func unreadable(err error) error {
	code := SQLState(err)
	memory := code == pgerrcode.OutOfMemory
	// Classes 22 (data exception) and 54 (program limit) as a whole: a later Postgres may add codes to them.
	if memory || strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54") || code == pgerrcode.DataCorrupted {
		return &outbox.UnreadableError{OutOfMemory: memory, Err: err}
	}
	return err
}
