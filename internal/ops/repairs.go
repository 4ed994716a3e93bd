package ops

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Repair is an open or finished repair of a stream after Redis or Postgres has lost data.
type Repair struct {
	Stream  string    `json:"stream"`
	Noticed time.Time `json:"noticed_at"`
	// Done is when it finished; nil if it has not, whether or not a relay works on it.
	Done *time.Time `json:"done_at,omitempty"`
	// Expected is about how many events are compared.
	Expected int64 `json:"expected"`
	// Restored events were missing in the stream and were published again. Recalled events were found in the stream,
	// so they are not published again. Phantoms are in the stream although Postgres does not have their commits.
	Restored int64 `json:"restored"`
	Recalled int64 `json:"recalled"`
	Phantoms int64 `json:"phantoms"`
}

// Text describes the progress or the result in a few words.
func (r Repair) Text() string {
	if r.Done == nil {
		return r.Stream + ": " + r.progress()
	}
	found := []string{count(r.Restored, "event") + " of " + r.Stream}
	if r.Recalled > 0 {
		found = append(found, humanize.Comma(r.Recalled)+" found there, and not published again")
	}
	if r.Phantoms > 0 {
		found = append(found, count(r.Phantoms, "phantom"))
	}
	return strings.Join(found, ", ")
}

func (r Repair) progress() string {
	if r.Expected == 0 {
		return humanize.Comma(r.Restored) + " restored so far"
	}
	return fmt.Sprintf("%s restored so far, about %s to compare", humanize.Comma(r.Restored),
		humanize.Comma(r.Expected))
}

// readRepairs reads the open repairs, then those that finished within a day, the newest first.
func readRepairs(ctx context.Context, pool *pgxpool.Pool, out *Status) error {
	rows, err := pool.Query(ctx, query("repairs"))
	if err == nil {
		out.Repairs, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Repair])
	}
	if err == nil {
		err = pool.QueryRow(ctx, query("repairs_sum")).Scan(&out.Repaired, &out.Phantoms)
	}
	if err != nil {
		return fmt.Errorf("list what is repaired: %w", err)
	}
	return nil
}

// Repairing returns the open repairs.
func (s *Status) Repairing() []Repair {
	if i := slices.IndexFunc(s.Repairs, func(r Repair) bool { return r.Done != nil }); i >= 0 {
		return s.Repairs[:i]
	}
	return s.Repairs
}
