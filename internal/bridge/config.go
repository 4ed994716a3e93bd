package bridge

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// Config is a table and the columns of its events, and the flags of posthaste bridge create. Names are as in the
// catalog, without quotes.
type Config struct {
	Table         string `json:"table" required:"" placeholder:"SCHEMA.NAME" help:"The table whose rows are events."`
	ID            string `json:"id" name:"id" required:"" placeholder:"COL"`
	AggregateType string `json:"aggregate_type" required:"" placeholder:"COL|=literal"`
	AggregateID   string `json:"aggregate_id" required:"" placeholder:"COL" help:"Column of the aggregate's id."`
	EventType     string `json:"event_type" required:"" placeholder:"COL|=literal"`
	Payload       string `json:"payload" required:"" placeholder:"COL"`
	Headers       string `json:"headers,omitempty" placeholder:"COL" help:"Column of the headers, as the payload's."`
	Pending       string `json:"pending,omitempty" placeholder:"CONDITION"`
	OrderBy       string `json:"order_by,omitempty" placeholder:"COL" help:"Column of the order of the waiting rows."`
}

// Check returns an error for values that are wrong in every database.
func (c Config) Check() error {
	schema, name, _ := strings.Cut(c.Table, ".")
	aggregate, isAggregate := strings.CutPrefix(c.AggregateType, "=")
	event, isEvent := strings.CutPrefix(c.EventType, "=")
	switch {
	case schema == "" || name == "":
		return fmt.Errorf("--table %q: want SCHEMA.NAME, as in --table=public.%s", c.Table, c.Table)
	case (c.Pending == "") != (c.OrderBy == ""):
		return errors.New("--pending and --order-by need each other: waiting rows are copied in order")
	case isAggregate && !outbox.IsAggregateType(aggregate):
		return fmt.Errorf("--aggregate-type %q: want 1 to 64 of A-Z a-z 0-9 _ . : - after the =", c.AggregateType)
	case isEvent && utf8.RuneCountInString(event) > 255:
		return errors.New("--event-type: want at most 255 characters after the =")
	}
	return nil
}

// table is a row of queries/table.sql.
type table struct {
	Kind           string
	Own            bool
	Parent         string
	Inherited      bool
	Lacks          []string
	Bridged        string
	Schema, Role   string
	Columns, Types []string

	inSchema, ofTable string
}

// name is the table's name for messages.
func (t *table) name() string { return t.inSchema + "." + t.ofTable }

// quoted is the table's name for statements.
func (t *table) quoted() string { return pgx.Identifier{t.inSchema, t.ofTable}.Sanitize() }

// fits returns an error if the table cannot have the bridge that c describes.
func (t *table) fits(c Config) error {
	switch {
	case t.Own:
		return fmt.Errorf("%s is posthaste's own outbox: a bridge needs another table", t.name())
	case t.Kind != "r" && t.Kind != "p":
		what := map[string]string{"v": "view", "m": "materialized view", "f": "foreign table"}[t.Kind]
		return fmt.Errorf("%s is a %s: a bridge needs the table that rows are inserted into", t.name(), what)
	case t.Parent != "":
		return fmt.Errorf("%s is a partition: use --table=%s", t.name(), t.Parent)
	case t.Inherited:
		return fmt.Errorf("other tables inherit from %s: create a bridge for each of them instead", t.name())
	}
	for _, use := range []struct{ flag, column string }{
		{"id", c.ID},
		{"aggregate-type", c.AggregateType},
		{"aggregate-id", c.AggregateID},
		{"event-type", c.EventType},
		{"payload", c.Payload},
		{"headers", c.Headers},
		{"order-by", c.OrderBy},
	} {
		literal := strings.HasPrefix(use.column, "=") && strings.HasSuffix(use.flag, "-type")
		if use.column == "" || literal {
			continue
		}
		switch typ, ok := t.typeOf(use.column); {
		case !ok:
			return fmt.Errorf("%s has no column %q (--%s); its columns are: %s", t.name(), use.column, use.flag,
				strings.Join(t.Columns, ", "))
		case (use.flag == "payload" || use.flag == "headers") && !slices.Contains(jsonTypes, typ):
			return fmt.Errorf("column %q of %s is %s: --%s needs jsonb, json, or text that is JSON", use.column,
				t.name(), typ, use.flag)
		}
	}
	return nil
}

// free returns an error if this role cannot create a bridge of the table, or there is one.
func (t *table) free() error {
	if t.Bridged != "" {
		return fmt.Errorf("%s has a bridge: to replace it, run first: posthaste bridge drop --table=%s --schema=%s",
			t.name(), t.name(), t.Bridged)
	}
	if len(t.Lacks) == 0 {
		return nil
	}
	role := pgx.Identifier{t.Role}.Sanitize()
	return fmt.Errorf("role %s lacks %s: run GRANT %s TO %s", role, strings.Join(t.Lacks, ", "),
		strings.Join(t.Lacks, " TO "+role+"; GRANT "), role)
}

func (t *table) typeOf(column string) (string, bool) {
	i := slices.Index(t.Columns, column)
	if i < 0 {
		return "", false
	}
	return t.Types[i], true
}
