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

// Repair is what an adoption puts right in a stream, or has put right, because Redis or Postgres has forgotten what the
// other one knows.
type Repair struct {
	Stream  string    `json:"stream"`
	Noticed time.Time `json:"noticed_at"`
	// Done is when it was done; nil while it is under way, and while no relay is at it.
	Done *time.Time `json:"done_at,omitempty"`
	// Expected is about how many events are compared.
	Expected int64 `json:"expected"`
	// Restored events were missing in the stream, and were published again. Recalled ones were found there, and are not
	// published again. Phantoms are there, and their commits are not in Postgres.
	Restored int64 `json:"restored"`
	Recalled int64 `json:"recalled"`
	Phantoms int64 `json:"phantoms"`
}

// Text says in a few words how far it is, or what came of it.
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

// progress says how far it is.
func (r Repair) progress() string {
	if r.Expected == 0 {
		return humanize.Comma(r.Restored) + " restored so far"
	}
	return fmt.Sprintf("%s restored so far, about %s to compare", humanize.Comma(r.Restored),
		humanize.Comma(r.Expected))
}

// readRepairs reads what is under way, then what was done within a day, the last first.
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

// Repairing is what is under way.
func (s *Status) Repairing() []Repair {
	if i := slices.IndexFunc(s.Repairs, func(r Repair) bool { return r.Done != nil }); i >= 0 {
		return s.Repairs[:i]
	}
	return s.Repairs
}
