package sql

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

const (
	// countTimeout bounds the counting of one loss, because a long history would load the primary for hours, and each
	// read of the log.
	countTimeout = time.Minute
	// boundsTimeout bounds the queries for the bounds of a repair. If one takes longer, the whole stream is compared.
	boundsTimeout = 5 * time.Second
	// entrySlack is the largest assumed difference between the clocks of Postgres and Redis.
	entrySlack = 5 * time.Minute
)

// suspect is a stream that may lack something, as state_adopt reads it.
type suspect struct {
	Stream string `json:"stream"`
	After  string `json:"after_entry"`
	// Age is how long ago After was given, in ms; nil if that is unknown.
	Age    *int64 `json:"age"`
	Recall bool   `json:"recall"`
	Back   bool   `json:"back"`
	// Missing is the number of missing events if it is known, Told that none is.
	Missing *int64 `json:"missing"`
	Told    bool   `json:"told"`
}

// suspects returns the streams that an adoption must note. Without history nothing can be counted or restored, so only
// the gates' own counts are noted.
func (s *Store) suspects(a outbox.Adoption) []suspect {
	list := []suspect{}
	for _, st := range a.Suspects {
		n := suspect{
			Stream: st.Stream, After: st.Last, Recall: !st.Intact() || st.Missing > 0, Back: st.Unknown,
			Told: !a.Delivered,
		}
		if age := st.Now.UnixMilli() - idMillis(st.Last); st.Last != "" && age >= 0 {
			n.Age = &age
		}
		if s.history == 0 {
			switch unknown := int64(-1); {
			case st.Missing > 0:
				n.Missing = &st.Missing
			case !st.Gate || st.Forgot:
				n.Missing = &unknown
			default:
				n.Told = true
			}
		}
		if n.Recall || !n.Told {
			list = append(list, n)
		}
	}
	return list
}

// pending is the notes of a stream.
type pending struct {
	IDs                 []int64
	Stream              string
	Recall, Back, Begun bool
	Restored            int64
	Groups              []string
	// Newest is the newest mark. Lost is the mark after which events may be missing, nil if none may be. Since is a
	// time that none of them was published before, except delayed ones; nil if it is unknown.
	Newest int64
	Lost   *int64
	Since  *time.Time
}

func (s *Store) Repairs(ctx context.Context, within time.Duration) ([]outbox.Repair, error) {
	notes, err := structs[pending](ctx, s.pool, "list the pending repairs", "reconcile_list", within,
		within > 0 && s.history > 0)
	if err != nil {
		return nil, err
	}
	list := make([]outbox.Repair, len(notes))
	for i, n := range notes {
		list[i] = outbox.Repair{
			IDs: n.IDs, Stream: n.Stream, Recall: n.Recall, Begun: n.Begun, Restored: n.Restored, Groups: n.Groups,
			Back: n.Back && s.history > 0, // without history it is unknown which events were committed
		}
		if err := s.bounds(ctx, &list[i], n); err != nil {
			return nil, fmt.Errorf("find the bounds of the repair of %q: %w", n.Stream, err)
		}
	}
	return list, nil
}

// bounds sets where the comparison of log and stream begins and ends. It reads the marks and the unsettled rows, whose
// gates belong to the new owner after the adoption.
func (s *Store) bounds(ctx context.Context, r *outbox.Repair, n pending) error {
	var since *time.Time // the time from which events in the stream matter, nil if none does
	if n.Lost != nil {
		r.From, r.Missing, r.To = *n.Lost, *n.Lost, n.Newest
		var counts []Selected
		late, err := within(ctx, boundsTimeout, func(ctx context.Context) (err error) {
			counts, err = (&span{from: r.Missing, to: r.To, part: -1}).count(ctx, s.pool, Selection{Stream: r.Stream})
			return err
		})
		if err != nil {
			return err
		}
		since = n.Since
		if late || since == nil {
			since = &time.Time{}
		}
		for _, c := range counts { // delayed events were created earlier; writers can set the time, even wrongly
			r.Expected += c.Events
			since = earlier(since, c.Created)
		}
		r.After = entryAt(*since)
	}
	if !r.Recall && !r.Back {
		return nil
	}
	if n.Lost == nil {
		r.Missing = n.Newest // nothing is missing
	}
	var known time.Time
	var from int64 // entries from known on were settled after this mark
	late, err := within(ctx, boundsTimeout, func(ctx context.Context) error {
		return s.pool.QueryRow(ctx, query("reconcile_since"), r.Stream, since, 2*entrySlack).Scan(&known, &from)
	})
	if err != nil {
		return err
	}
	if late {
		known, from = time.Time{}, 0
	}
	r.After, r.From, r.To = entryAt(known), min(from, r.Missing), n.Newest
	r.Back = r.Back && time.Since(known.Add(-2*entrySlack)) < s.history // earlier commits may have been deleted
	return nil
}

// within calls do with a timeout. late reports that the timeout has ended it.
func within(ctx context.Context, timeout time.Duration, do func(ctx context.Context) error) (late bool, err error) {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = do(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return true, nil
	}
	return false, err
}

func earlier(a *time.Time, b time.Time) *time.Time {
	if a == nil || b.Before(*a) {
		return &b
	}
	return a
}

// entryAt returns an entry id that is before all entries of a time, whatever the clocks' difference; "" for the
// beginning.
func entryAt(t time.Time) string {
	if ms := t.Add(-entrySlack).UnixMilli(); ms > 0 {
		return fmt.Sprintf("%d-0", ms)
	}
	return ""
}

// idMillis returns the time in an entry id in milliseconds, math.MaxInt64 if it is out of range.
func idMillis(id string) int64 {
	ms, _, _ := strings.Cut(id, "-")
	n, err := strconv.ParseInt(ms, 10, 64)
	if err != nil {
		return math.MaxInt64
	}
	return n
}

func (s *Store) Log(ctx context.Context, r outbox.Repair, visit func(page []outbox.Logged) error) error {
	return s.log(ctx, r.Stream, span{from: r.From, to: r.To, part: -1}, func(items []item) error {
		page := make([]outbox.Logged, len(items))
		for i, e := range items {
			page[i] = outbox.Logged{ID: e.id, Mark: e.place.Mark, Part: e.place.Part, Seq: e.place.Seq}
		}
		return visit(page)
	})
}

// log passes the events of a stream to visit, page by page.
func (s *Store) log(ctx context.Context, stream string, log span, visit func(page []item) error) error {
	for at := behindMark(max(log.from, 1)); at.Mark <= log.to; {
		actx, cancel := context.WithTimeout(ctx, countTimeout)
		page, reached, err := log.list(actx, s.pool, Selection{Stream: stream}, at)
		cancel()
		if err != nil {
			return fmt.Errorf("read the log of %q: %w", stream, err)
		}
		if len(page) > 0 {
			err = visit(page)
		}
		if err != nil || reached == at {
			return err
		}
		at = reached
	}
	return nil
}

// Bounds of one call of Events.
const (
	eventsRows  = 1000
	eventsBytes = 4 << 20
)

func (s *Store) Events(ctx context.Context, list []outbox.Logged) ([]*outbox.Record, int, error) {
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
	events := make([]*outbox.Record, len(rows))
	for i := range rows {
		events[i] = &rows[i].Record
	}
	return events, used, nil
}

func (s *Store) Owed(ctx context.Context, stream string, visit func(id uuid.UUID)) error {
	for part := range outbox.Partitions {
		if err := s.owed(ctx, stream, part, visit); err != nil {
			return fmt.Errorf("list the unsettled events of %q: %w", stream, err)
		}
	}
	return nil
}

func (s *Store) owed(ctx context.Context, stream string, part int, visit func(id uuid.UUID)) error {
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	rows, err := s.pool.Query(ctx, query("reconcile_unsettled"), part, stream)
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

func (s *Store) Restoring(ctx context.Context, r outbox.Repair, restored int64) error {
	_, err := s.exec(ctx, "note what is restored", "reconcile_progress", r.IDs[len(r.IDs)-1:], restored, r.Expected,
		r.Missing)
	return err
}

// phantomRows bounds the phantoms of one statement.
const phantomRows = 10_000

func (s *Store) Repaired(ctx context.Context, o outbox.Owner, r outbox.Repair, done outbox.Repaired) error {
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
	return owned(ctx, s.pool, fmt.Sprintf("note that %q is repaired", r.Stream), "reconcile_done", []any{
		s.name, o.Epoch, o.Nonce[:], r.IDs, r.Expected, r.IDs[len(r.IDs)-1], done.Restored, done.Recalled, from,
		done.Last, len(done.Phantoms), done.Refused,
	})
}

// notePhantoms is idempotent.
func (s *Store) notePhantoms(ctx context.Context, stream string, at time.Time, page []outbox.Entry) error {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	ids, entries := make([]uuid.UUID, len(page)), make([]string, len(page))
	for i, p := range page {
		ids[i], entries[i] = p.ID, p.String()
	}
	_, err := exec(ctx, s.pool, fmt.Sprintf("note phantoms of %q", stream), "phantom_insert", stream, at, ids, entries)
	return err
}

// uncounted is a note whose missing events are not reported.
type uncounted struct {
	ID      int64
	Stream  string
	Noticed time.Time
	After   string
	Since   *time.Time
	Missing *int64
	// Restored is the mark after which everything except Refused events was republished; nil if no repair ran.
	Restored *int64
	Refused  int64
}

func (s *Store) CountMissing(ctx context.Context, tail tailOf) (list []outbox.Report, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*countTimeout)
	defer cancel()
	notes, err := structs[uncounted](ctx, s.pool, "read what may be missing", "reconcile_uncounted")
	if err != nil {
		return nil, err
	}
	for _, n := range notes {
		r := outbox.Report{Stream: n.Stream, Noticed: n.Noticed, Refused: n.Refused}
		var late bool
		if n.Missing != nil {
			r.Missing = *n.Missing
		} else if late, err = within(ctx, countTimeout, func(ctx context.Context) error {
			return s.countMissing(ctx, &r, n, tail)
		}); late { // the range may cover all of it
			r.Missing = -1
		}
		if err == nil {
			err = s.pool.QueryRow(ctx, query("reconcile_counted"), n.ID, r.Missing, r.First, r.Last).Scan(&r.Missing)
		}
		if err != nil {
			return list, fmt.Errorf("count what is missing in %q: %w", n.Stream, err)
		}
		if r.Missing != 0 {
			list = append(list, r)
		}
	}
	_, err = exec(ctx, s.pool, "delete old reports", "reconcile_expire", s.history)
	return list, err
}

// tailOf is the method Tail of the sink.
type tailOf = func(ctx context.Context, stream, after string) ([]outbox.Entry, error)

// countMissing adds the refused events, and the settled events of the log that are not in the stream and were not
// restored. If it fails, the report has at least their whole range.
func (s *Store) countMissing(ctx context.Context, r *outbox.Report, n uncounted, tail tailOf) error {
	log := span{part: -1}
	var first, last *time.Time
	err := s.pool.QueryRow(ctx, query("reconcile_range"), n.Stream, n.After, n.Since, n.Noticed).Scan(&log.from,
		&log.to, &first, &last)
	if err != nil || first == nil || last == nil {
		return err
	}
	if n.Restored != nil { // a restored event that is missing again may have been trimmed
		log.to = min(log.to, *n.Restored)
		if n.Refused > 0 {
			addMissing(r, n.Refused, *first, *last)
		}
	}
	if log.to <= log.from {
		return nil
	}
	counts, err := log.count(ctx, s.pool, Selection{Stream: n.Stream})
	if err != nil || len(counts) == 0 {
		return err
	}
	after := ""
	if n.After != "" { // the first event may have been published earlier than that, but not before it was created
		after = entryAt(*earlier(&counts[0].Created, time.UnixMilli(idMillis(n.After))))
	}
	have, err := tail(ctx, n.Stream, after)
	if err == nil {
		outbox.SortEntries(have)
		err = s.log(ctx, n.Stream, log, func(page []item) error {
			for _, e := range page {
				if _, there := outbox.FindEntry(have, e.id); !there {
					addMissing(r, 1, e.at, e.at)
				}
			}
			return nil
		})
	}
	if err != nil {
		addMissing(r, 0, *first, *last)
	}
	return err
}

// addMissing adds events that were settled between first and last.
func addMissing(r *outbox.Report, events int64, first, last time.Time) {
	r.Missing += events
	r.First = earlier(r.First, first)
	if r.Last == nil || last.After(*r.Last) {
		r.Last = &last
	}
}

func (s *Store) Missing(ctx context.Context) (missing, phantoms int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return Missing(ctx, s.pool)
}

// Missing counts the settled events that streams are known to lack, and the phantoms that no operator has acknowledged.
func Missing(ctx context.Context, db DB) (missing, phantoms int64, err error) {
	err = scan(ctx, db, "count missing events and phantoms", "reconcile_missing", nil, &missing, &phantoms)
	return missing, phantoms, err
}

// Reports lists the reports of streams that are being compared, that lack events, or whose comparison within the last
// day has found something: in this order, the newest first. last is when any stream was last compared.
func Reports(ctx context.Context, db DB) (list []outbox.Report, last *time.Time, err error) {
	const what = "list what was compared"
	if list, err = structs[outbox.Report](ctx, db, what, "reconcile_reports"); err == nil {
		err = scan(ctx, db, what, "reconcile_last", nil, &last)
	}
	return list, last, err
}

// BroughtBack notes that every event of a stream that was settled between from and to was republished; stream "" means
// all streams.
func BroughtBack(ctx context.Context, db DB, from, to time.Time, stream string) error {
	_, err := exec(ctx, db, "note what was restored", "reconcile_replayed", from, to, stream)
	return err
}

// Phantom is an event in a stream whose commit is not in the database, because the database went back in time.
type Phantom struct {
	Stream  string    `json:"stream"`
	Entry   string    `json:"entry"`
	ID      uuid.UUID `json:"id"`
	Noticed time.Time `json:"noticed"`
	// Acked is when an operator acknowledged it; nil if none did.
	Acked *time.Time `json:"acknowledged,omitempty"`
}

// Phantoms lists at most limit phantoms, acknowledged or not, noticed in the last 30 days: the latest first, then in
// the order of their streams.
func Phantoms(ctx context.Context, db DB, limit int) ([]Phantom, error) {
	return structs[Phantom](ctx, db, "list phantoms", "phantom_list", limit)
}

// AckPhantoms ends the notice of all phantoms, and that the database has gone back in time. It returns these phantoms,
// in the order of Phantoms, and whether it has ended the latter.
func AckPhantoms(ctx context.Context, db DB) (list []Phantom, back bool, err error) {
	if list, err = structs[Phantom](ctx, db, "acknowledge phantoms", "phantom_ack"); err != nil {
		return nil, false, err
	}
	rows, err := exec(ctx, db, "acknowledge that the database has gone back", "reconcile_ack")
	return list, rows > 0, err
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
