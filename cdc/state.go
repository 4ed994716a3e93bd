package cdc

import (
	"context"
	"embed"
	"fmt"

	"posthaste/internal/statement"
	"posthaste/outbox"
	"posthaste/sql"
)

//go:embed queries/*.sql
var queryFiles embed.FS

var query = statement.In(queryFiles)

// state is the slot's state in the catalog.
type state struct {
	walLevel string
	version  int // server_version_num
	maxKeep  int64

	present, ours, active   bool
	activePID               int
	walStatus, invalidation string
	confirmed, restart      int64
}

func readState(ctx context.Context, db sql.DB, slot string) (state, error) {
	var s state
	err := db.QueryRow(ctx, query("state"), slot).Scan(&s.walLevel, &s.version, &s.maxKeep,
		&s.present, &s.ours, &s.active, &s.activePID, &s.walStatus, &s.invalidation, &s.confirmed, &s.restart)
	if err != nil {
		return state{}, fmt.Errorf("read the state of slot %q: %w", slot, err)
	}
	return s, nil
}

func (s *state) lost() bool { return s.present && (s.walStatus == "lost" || s.invalidation != "") }

// fault returns the reason why the slot cannot be streamed; "" if it can.
func (s *state) fault() string {
	switch {
	case !s.present && s.walLevel != "logical":
		return outbox.ReasonWALLevel
	case !s.present:
		return outbox.ReasonSlotMissing
	case !s.ours:
		return outbox.ReasonSlotForeign
	case s.lost():
		return outbox.ReasonSlotLost
	}
	return ""
}

// publication is the publication's state in the catalog.
type publication struct {
	present, inserts, others, listed, whole bool
	// version differs after each change.
	version string
}

func readPublication(ctx context.Context, db sql.DB, name, schema string) (publication, error) {
	var p publication
	err := db.QueryRow(ctx, query("publication"), name, schema, table, columnNames[:colHeaders]).
		Scan(&p.present, &p.inserts, &p.others, &p.listed, &p.whole, &p.version)
	if err != nil {
		return publication{}, fmt.Errorf("read the state of publication %q: %w", name, err)
	}
	return p, nil
}

// delivers reports whether every insert into the outbox is published with all its columns.
func (p *publication) delivers() bool { return p.present && p.inserts && p.listed && p.whole }
