package ops

import (
	"context"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
	"posthaste/sql"
)

// Status is the state of the pipeline, as numbers and names. Assess judges it.
type Status struct {
	// Mode is the active mode: cdc, poll or standby.
	Mode    outbox.Mode `json:"mode"`
	Desired outbox.Mode `json:"desired"`
	Epoch   int64       `json:"epoch"`
	// Leader reports whether the answering process leads; nil if the answer does not come from a relay.
	Leader *bool `json:"leader"`
	// Owner is the process that leads, or led last: host:pid.
	Owner   string  `json:"owner"`
	Backlog Backlog `json:"backlog"`
	// Inflight is how many events the answering relay has routed and not settled; nil if the answer is not a
	// relay's.
	Inflight    *int      `json:"inflight"`
	Slot        Slot      `json:"slot"`
	Dead        int64     `json:"dead"`
	HandoverLSN string    `json:"handover_lsn"`
	Degraded    string    `json:"degraded,omitempty"`
	Source      uuid.UUID `json:"source"`
	// EntrySource is the source field of this database's entries.
	EntrySource string `json:"entry_source"`
	// Compared are the streams that are compared, then those that lack events, then those where the last day's
	// comparisons found something.
	Compared []Compared `json:"reconciled,omitempty"`
	// Phantoms is how many events have no commit in Postgres and are not acknowledged.
	Phantoms int64 `json:"phantoms,omitempty"`
	// Unnoticed is what the leader cannot notice, because the server refuses its identifier or its timeline.
	Unnoticed []string `json:"unnoticed,omitempty"`
	// Repaired is when a stream was last compared with the settled events; nil if none was.
	Repaired  *time.Time `json:"-"`
	ChangedAt time.Time  `json:"changed_at"`
}

// Backlog counts the unsettled events in the outbox.
type Backlog struct {
	Rows int64 `json:"rows"`
	// AtLeast reports that counting ended at Rows: there may be more.
	AtLeast       bool    `json:"at_least,omitempty"`
	OldestSeconds float64 `json:"oldest_seconds"`
}

// wait is a clause: how many events wait.
func (b Backlog) wait() string {
	if b.Rows == 1 && !b.AtLeast {
		return "1 event waits"
	}
	return b.Size() + " events wait"
}

func (b Backlog) Size() string {
	if b.AtLeast {
		return "at least " + humanize.Comma(b.Rows)
	}
	return humanize.Comma(b.Rows)
}

type Slot struct {
	Exists            bool   `json:"exists"`
	Active            bool   `json:"active"`
	Lost              bool   `json:"lost"`
	Reason            string `json:"reason,omitempty"`
	ConfirmedLSN      string `json:"confirmed_lsn"`
	RestartLSN        string `json:"restart_lsn"`
	RetainedBytes     int64  `json:"retained_bytes"`
	ConfirmedLagBytes int64  `json:"confirmed_lag_bytes"`
	MaxKeepBytes      int64  `json:"max_keep_bytes"`
}

// readStatus reads the status from Postgres, and from the relay of this process.
func (s Source) readStatus(ctx context.Context) (Status, error) {
	st, err := sql.ReadState(ctx, s.Pool, s.RelayName)
	if err != nil {
		return Status{}, err
	}
	out := Status{
		Mode: st.Active, Desired: st.Desired, Epoch: st.Owner.Epoch, Owner: st.Holder,
		HandoverLSN: st.Handover.String(), Degraded: st.Degraded, Source: st.Owner.Source,
		EntrySource: outbox.EntrySource(s.RelayName), ChangedAt: st.Changed, Unnoticed: unnoticed(st),
	}
	rows, oldest, err := sql.Backlog(ctx, s.Pool, s.Most)
	if err != nil {
		return out, err
	}
	out.Backlog = Backlog{Rows: rows, AtLeast: s.Most > 0 && rows == s.Most, OldestSeconds: oldest.Seconds()}
	if out.Dead, err = sql.CountDead(ctx, s.Pool); err != nil {
		return out, err
	}
	var reports []outbox.Report
	if reports, out.Repaired, err = sql.Reports(ctx, s.Pool); err != nil {
		return out, err
	}
	for _, r := range reports {
		report := Compared{Report: r}
		if r.Missing != 0 {
			report.Remedy = r.Remedy()
		}
		out.Compared = append(out.Compared, report)
	}
	if _, out.Phantoms, err = sql.Missing(ctx, s.Pool); err != nil {
		return out, err
	}
	slot, err := s.Slots.Status(ctx)
	if err != nil {
		return out, err
	}
	out.Slot = Slot{
		Exists: slot.Exists, Active: slot.Active, Lost: slot.Lost, Reason: slot.Reason,
		ConfirmedLSN: slot.Confirmed.String(), RestartLSN: slot.Restart.String(),
		RetainedBytes: slot.RetainedBytes, ConfirmedLagBytes: slot.ConfirmedLagBytes,
		MaxKeepBytes: slot.MaxKeepBytes,
	}
	if s.Relay != nil {
		mine := s.Relay.Status()
		out.Leader, out.Inflight = &mine.Leader, &mine.Inflight
	}
	return out, nil
}

// SetMode records the desired mode, for a relay that may not have started yet.
func SetMode(ctx context.Context, pool *pgxpool.Pool, name string, mode outbox.Mode) error {
	if err := sql.Register(ctx, pool, name); err != nil {
		return err
	}
	return sql.SetDesired(ctx, pool, name, mode)
}
