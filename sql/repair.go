package sql

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// note is a note of an adoption that a stream must be repaired.
type note struct {
	ID      int64
	Stream  string
	Noticed time.Time
	After   *string
	Since   *time.Time
	Recall  bool
	Back    bool
	Groups  []string
}

// Repairs implements outbox.Store.
func (s *store) Repairs(ctx context.Context, within time.Duration) ([]outbox.Repair, error) {
	list, err := s.repairs(ctx, within)
	if err != nil {
		return nil, fmt.Errorf("list the pending repairs: %w", err)
	}
	return list, nil
}

func (s *store) repairs(ctx context.Context, within time.Duration) ([]outbox.Repair, error) {
	rows, err := s.pool.Query(ctx, query("repair_list"))
	if err != nil {
		return nil, err
	}
	notes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[note])
	if err != nil {
		return nil, err
	}
	var list []outbox.Repair
	at := map[string]int{}
	for _, n := range notes {
		i, known := at[n.Stream]
		if !known {
			i = len(list)
			at[n.Stream] = i
			list = append(list, outbox.Repair{Stream: n.Stream})
		}
		r := &list[i]
		r.IDs, r.Recall = append(r.IDs, n.ID), r.Recall || n.Recall
		r.Back = r.Back || n.Back && s.history > 0 // without history nobody knows what was committed
		if n.After != nil && *n.After == "" {      // all of it is gone
			r.Groups = n.Groups
		}
	}
	err = s.lostRanges(ctx, notes, within, func(n note, from, to int64) {
		r := &list[at[n.Stream]]
		if r.To == 0 || from < r.Missing {
			r.Missing, r.From = from, from
		}
		r.To, r.Groups = max(r.To, to), n.Groups
	})
	if err != nil {
		return nil, err
	}
	for i := range list {
		if err := s.bounds(ctx, &list[i], notes); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// lostRanges calls tell for each note with the marks after which, and up to which, settled events may be lost.
func (s *store) lostRanges(ctx context.Context, notes []note, within time.Duration,
	tell func(n note, from, to int64),
) error {
	if within <= 0 || s.history == 0 {
		return nil
	}
	var of []note
	var streams, after []string
	var since []*time.Time
	var noticed []time.Time
	for _, n := range notes {
		if n.After != nil {
			of, streams, after = append(of, n), append(streams, n.Stream), append(after, *n.After)
			since, noticed = append(since, n.Since), append(noticed, n.Noticed)
		}
	}
	if len(of) == 0 {
		return nil
	}
	rows, err := s.pool.Query(ctx, query("repair_range"), streams, after, since, noticed, within)
	if err != nil {
		return err
	}
	var n int
	var from, to int64
	_, err = pgx.ForEachRow(rows, []any{&n, &from, &to}, func() error {
		tell(of[n-1], from, to)
		return nil
	})
	return err
}

// bounds sets where the comparison of log and stream begins. It reads the marks and the unsettled rows, whose gates
// belong to the new owner after the adoption.
func (s *store) bounds(ctx context.Context, r *outbox.Repair, notes []note) error {
	var since time.Time // the time from which events in the stream matter
	if r.To > 0 {
		counts, err := s.expected(ctx, r)
		if err != nil {
			return err
		}
		// Events that these marks settle were published after the previous mark was written, except those that were
		// delayed then, which were created earlier. (Writers can set the creation time, even wrongly.)
		var before *time.Time
		if err := s.pool.QueryRow(ctx, query("repair_mark_at"), r.Missing).Scan(&before); err != nil {
			return err
		}
		if before != nil {
			since = *before
		}
		for _, c := range counts {
			r.Expected += c.Events
			since = earlier(since, c.Created)
		}
		for _, n := range notes {
			if n.Stream == r.Stream && n.After != nil && *n.After != "" {
				since = earlier(since, time.UnixMilli(idMillis(*n.After)))
			}
		}
	} else {
		r.Missing = 0
	}
	if !r.Recall && !r.Back {
		r.After = entryAt(since)
		return nil
	}
	var newest int64
	if err := s.pool.QueryRow(ctx, query("repair_newest")).Scan(&newest); err != nil {
		return err
	}
	known, err := s.known(ctx, r.Stream)
	if err != nil {
		return err
	}
	if r.To == 0 || known.Before(since) {
		since = known
	}
	r.After = entryAt(since)
	// Entries from that time on were settled later than begin.
	begin := since.Add(-2 * entrySlack)
	var from int64
	if err := s.pool.QueryRow(ctx, query("repair_mark"), begin).Scan(&from); err != nil {
		return err
	}
	r.Back = r.Back && time.Since(begin) < s.history // earlier commits may have been deleted
	if r.To == 0 {
		r.Missing = newest // nothing is missing
	}
	r.From, r.To = min(from, r.Missing), max(r.To, newest)
	return nil
}

// boundsTimeout bounds the queries for the bounds of a repair. If one takes longer, the whole stream is compared.
const boundsTimeout = 5 * time.Second

// expected counts the events that may be missing and returns the creation time of the oldest, the zero time if counting
// takes too long.
func (s *store) expected(ctx context.Context, r *outbox.Repair) ([]counted, error) {
	bounded, cancel := context.WithTimeout(ctx, boundsTimeout)
	defer cancel()
	list, err := (&span{from: r.Missing, to: r.To, part: -1}).count(bounded, s.pool, Selection{Stream: r.Stream})
	if err != nil && ctx.Err() == nil && bounded.Err() != nil {
		return []counted{{}}, nil
	}
	return list, err
}

// known returns a time before which no event was published that is still unsettled, the zero time if reading the
// unsettled rows takes too long.
func (s *store) known(ctx context.Context, stream string) (at time.Time, err error) {
	bounded, cancel := context.WithTimeout(ctx, boundsTimeout)
	defer cancel()
	err = s.pool.QueryRow(bounded, query("repair_since"), stream).Scan(&at)
	if err != nil && ctx.Err() == nil && bounded.Err() != nil {
		return time.Time{}, nil
	}
	return at, err
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// Log implements outbox.Store.
func (s *store) Log(ctx context.Context, r outbox.Repair, visit func(page []outbox.Logged) error) error {
	if r.To == 0 {
		return nil
	}
	log := span{from: r.From, to: r.To, part: -1}
	for at := behindMark(max(r.From, 1)); ; {
		actx, cancel := context.WithTimeout(ctx, lossTimeout)
		items, reached, err := log.list(actx, s.pool, Selection{Stream: r.Stream}, at)
		cancel()
		if err != nil {
			return fmt.Errorf("read the log of %q: %w", r.Stream, err)
		}
		page := make([]outbox.Logged, len(items))
		for i, e := range items {
			page[i] = outbox.Logged{ID: e.id, Mark: e.place.Mark, Part: e.place.Part, Seq: e.place.Seq}
		}
		if len(page) > 0 {
			if err := visit(page); err != nil {
				return err
			}
		}
		if reached == at {
			return nil
		}
		at = reached
	}
}

// Bounds of one call of Events.
const (
	eventsRows  = 1000
	eventsBytes = 4 << 20
)

// Events implements outbox.Store.
func (s *store) Events(ctx context.Context, list []outbox.Logged) ([]*outbox.Event, int, error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	h := History{db: s.pool}
	for _, e := range list[:min(len(list), eventsRows)] {
		h.items = append(h.items, item{
			place: Place{Mark: e.Mark, Part: e.Part, Seq: e.Seq}, id: e.ID, at: time.Now(),
		})
	}
	rows, used, err := h.rows(ctx, eventsRows, eventsBytes)
	if err != nil {
		return nil, 0, fmt.Errorf("read events of the log: %w", err)
	}
	events := make([]*outbox.Event, len(rows))
	for i := range rows {
		events[i] = &rows[i].Event
	}
	return events, used, nil
}

// Owed implements outbox.Store.
func (s *store) Owed(ctx context.Context, stream string, visit func(id uuid.UUID)) error {
	for part := range outbox.Partitions {
		if err := s.owed(ctx, stream, part, visit); err != nil {
			return fmt.Errorf("list the unsettled events of %q: %w", stream, err)
		}
	}
	return nil
}

func (s *store) owed(ctx context.Context, stream string, part int, visit func(id uuid.UUID)) error {
	ctx, cancel := context.WithTimeout(ctx, lossTimeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, query("repair_owed"), part, stream)
	if err != nil {
		return err
	}
	var id uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		visit(id)
		return nil
	})
	return err
}

// Restoring implements outbox.Store.
func (s *store) Restoring(ctx context.Context, r outbox.Repair, restored int64) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := s.pool.Exec(ctx, query("repair_progress"), r.IDs[len(r.IDs)-1:], restored, r.Expected, r.Missing)
	if err != nil {
		return fmt.Errorf("note what is restored: %w", err)
	}
	return nil
}

// phantomRows bounds the phantoms of one statement.
const phantomRows = 10_000

// Repaired implements outbox.Store.
func (s *store) Repaired(ctx context.Context, o outbox.Owner, r outbox.Repair, done outbox.Repaired) error {
	now := time.Now()
	for page := range slices.Chunk(done.Phantoms, phantomRows) {
		if err := s.notePhantoms(ctx, r.Stream, now, page); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	var from *int64
	if done.Whole && r.Missing < r.To {
		from = &r.Missing
	}
	var owner bool
	err := s.pool.QueryRow(ctx, query("repair_done"), s.name, o.Epoch, o.Nonce[:], r.IDs, r.Expected,
		r.IDs[len(r.IDs)-1], done.Restored, done.Recalled, from, done.Last, len(done.Phantoms), done.Refused).
		Scan(&owner)
	if err == nil && !owner {
		err = outbox.ErrSuperseded
	}
	if err != nil {
		return fmt.Errorf("note that %q is repaired: %w", r.Stream, err)
	}
	return nil
}

// notePhantoms is idempotent.
func (s *store) notePhantoms(ctx context.Context, stream string, at time.Time, page []outbox.Entry) error {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	ids, entries := make([]uuid.UUID, len(page)), make([]string, len(page))
	for i, p := range page {
		ids[i], entries[i] = p.ID, p.String()
	}
	if _, err := s.pool.Exec(ctx, query("repair_phantoms"), stream, at, ids, entries); err != nil {
		return fmt.Errorf("note phantoms of %q: %w", stream, err)
	}
	return nil
}

// Phantom is an event in a stream whose commit is not in the database, because the database went back in time.
type Phantom struct {
	Stream  string    `json:"stream"`
	Entry   string    `json:"entry"`
	ID      uuid.UUID `json:"id"`
	Noticed time.Time `json:"noticed"`
}

// Phantoms lists at most limit phantoms noticed in the last 30 days: the latest first, then in the order of their
// streams.
func Phantoms(ctx context.Context, db DB, limit int) ([]Phantom, error) {
	rows, err := db.Query(ctx, query("phantom_list"), limit)
	if err != nil {
		return nil, fmt.Errorf("list phantoms: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Phantom])
	if err != nil {
		return nil, fmt.Errorf("list phantoms: %w", err)
	}
	return list, nil
}

// DropStream records that an operator deletes a stream: events settled before are neither restored nor reported as
// lost. It returns the database's source, and whether the stream is known.
func DropStream(ctx context.Context, db DB, stream string) (source uuid.UUID, known bool, err error) {
	err = db.QueryRow(ctx, query("stream_drop"), stream).Scan(&source)
	if errors.Is(err, pgx.ErrNoRows) {
		return source, false, nil
	}
	if err != nil {
		return source, false, fmt.Errorf("note that %q is dropped: %w", stream, err)
	}
	return source, true, nil
}
