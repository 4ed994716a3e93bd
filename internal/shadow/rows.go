package shadow

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"posthaste/internal/pause"
	"posthaste/sql"
)

// statusEvery is the interval of the reports to the server, which keeps WAL no longer, and of looking whether to end.
const statusEvery = 500 * time.Millisecond

// lastWithin bounds the reading of what is left when the comparison ends.
const lastWithin = 30 * time.Second

// dropWithin bounds the attempts to drop the publication.
const dropWithin = 10 * time.Second

// rows sees the rows of a table.
type rows struct {
	o      Options
	ledger *ledger
	// ahead is how far the clock of Postgres is ahead of this process's.
	ahead time.Duration
}

// table is the quoted name.
func (r *rows) table() string {
	schema, name, _ := strings.Cut(r.o.Table, ".")
	return pgx.Identifier{schema, name}.Sanitize()
}

// check reads no row, and shows whether the table and its columns are there.
func (r *rows) check(ctx context.Context, conn *pgx.Conn) error {
	sent := time.Now()
	var now time.Time
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.clock_timestamp()").Scan(&now); err != nil {
		return fmt.Errorf("ask Postgres for its time: %w", err)
	}
	r.ahead = ahead(sent, now)
	columns := []string{r.o.ID}
	for _, c := range []string{r.o.Key, r.o.OrderBy} {
		if c != "" {
			columns = append(columns, c)
		}
	}
	for i, c := range columns {
		columns[i] = pgx.Identifier{c}.Sanitize()
	}
	_, err := conn.Exec(ctx, "SELECT "+strings.Join(columns, ", ")+" FROM "+r.table()+" LIMIT 0")
	if err != nil {
		return fmt.Errorf("read table %s: %w", r.o.Table, err)
	}
	return nil
}

// slot reads the inserts from the WAL, through a publication that it drops and a slot that ends with its connection.
// started is called when every later commit will be seen.
func (r *rows) slot(ctx context.Context, conn *pgx.Conn, started func()) (err error) {
	name := "posthaste_shadow_" + strings.ToLower(rand.Text()[:8])
	defer func() { err = errors.Join(err, r.drop(ctx, conn, name)) }()
	_, err = conn.Exec(ctx, "CREATE PUBLICATION "+name+" FOR TABLE "+r.table()+
		" WITH (publish = 'insert', publish_via_partition_root = true)")
	if err != nil {
		return fmt.Errorf("publish the inserts of %s (its owner may, with CREATE on the database; or use --poll): %w",
			r.o.Table, err)
	}
	cfg, err := sql.ConnConfig(r.o.URL, r.o.Schema, "shadow")
	if err != nil {
		return err
	}
	cfg.RuntimeParams["replication"] = "database"
	c, err := sql.ConnectReplication(ctx, cfg)
	if err != nil {
		return fmt.Errorf("read the WAL (or use --poll): %w", err)
	}
	defer func() { // which drops the slot
		_ = c.Close(context.WithoutCancel(ctx))
		ended(c)
	}()
	_, err = pglogrepl.CreateReplicationSlot(ctx, c, name, "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{Temporary: true, SnapshotAction: "NOEXPORT_SNAPSHOT"})
	if err != nil {
		return fmt.Errorf("create a temporary slot (or use --poll): %w", err)
	}
	err = pglogrepl.StartReplication(ctx, c, name, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + name + "'"},
	})
	if err != nil {
		return fmt.Errorf("read the WAL: %w", err)
	}
	started()
	w := &wal{rows: r, conn: c, relations: map[uint32]*pglogrepl.RelationMessage{}}
	every := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		if err := w.next(every, false); err != nil {
			return err
		}
	}
	rest, cancel := context.WithTimeout(every, lastWithin)
	defer cancel()
	var end pglogrepl.LSN
	if err := conn.QueryRow(rest, "SELECT pg_catalog.pg_current_wal_lsn()").Scan(&end); err != nil {
		return fmt.Errorf("find the end of the WAL: %w", err)
	}
	for w.reached < end {
		if err := w.next(rest, true); err != nil {
			return err
		}
	}
	return nil
}

// ended waits until the server knows that a call of a closed connection was cancelled.
func ended(c *pgconn.PgConn) {
	select {
	case <-c.CleanupDone():
	case <-time.After(dropWithin):
	}
}

// drop drops the publication by another connection, because conn may be closed, and the server may be restarting.
func (r *rows) drop(ctx context.Context, conn *pgx.Conn, name string) error {
	if conn.IsClosed() {
		ended(conn.PgConn())
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropWithin)
	defer cancel()
	for {
		c, err := connect(ctx, r.o)
		if err == nil {
			_, err = c.Exec(ctx, "DROP PUBLICATION IF EXISTS "+name)
			_ = c.Close(ctx)
		}
		if err == nil {
			return nil
		}
		if pause.For(ctx, statusEvery) != nil {
			return fmt.Errorf("run DROP PUBLICATION IF EXISTS %s: %w", name, err)
		}
	}
}

// wal reads transactions.
type wal struct {
	*rows

	conn      *pgconn.PgConn
	relations map[uint32]*pglogrepl.RelationMessage
	// inserted are the id and the key of each row of the current transaction.
	inserted [][2]string
	// reached is up to where everything was read, told when that was reported.
	reached pglogrepl.LSN
	told    time.Time
}

// next waits up to statusEvery for a message. ask makes the server say how far the WAL goes.
func (w *wal) next(ctx context.Context, ask bool) error {
	if ask || time.Since(w.told) >= statusEvery {
		s := pglogrepl.StandbyStatusUpdate{WALWritePosition: w.reached, ReplyRequested: ask}
		if err := pglogrepl.SendStandbyStatusUpdate(ctx, w.conn, s); err != nil {
			return fmt.Errorf("report to the server: %w", err)
		}
		w.told = time.Now()
	}
	rctx, cancel := context.WithDeadline(ctx, w.told.Add(statusEvery))
	defer cancel()
	msg, err := w.conn.ReceiveMessage(rctx)
	if pgconn.Timeout(err) && ctx.Err() == nil {
		return nil
	}
	if err == nil {
		err = w.message(msg)
	}
	if err != nil {
		return fmt.Errorf("read the WAL: %w", err)
	}
	return nil
}

func (w *wal) message(msg pgproto3.BackendMessage) error {
	data, ok := msg.(*pgproto3.CopyData)
	if !ok {
		return fmt.Errorf("the server sent %T", msg)
	}
	if data.Data[0] == pglogrepl.PrimaryKeepaliveMessageByteID {
		k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data.Data[1:])
		w.reached = max(w.reached, k.ServerWALEnd)
		if k.ReplyRequested {
			w.told = time.Time{}
		}
		return err
	}
	x, err := pglogrepl.ParseXLogData(data.Data[1:])
	if err != nil {
		return err
	}
	m, err := pglogrepl.Parse(x.WALData)
	switch m := m.(type) {
	case *pglogrepl.RelationMessage:
		w.relations[m.RelationID] = m
		for _, name := range []string{w.o.ID, w.o.Key} {
			has := func(c *pglogrepl.RelationMessageColumn) bool { return c.Name == name }
			if name != "" && !slices.ContainsFunc(m.Columns, has) {
				return fmt.Errorf("it lacks column %q, as it lacks generated ones: use --poll", name)
			}
		}
	case *pglogrepl.BeginMessage:
		w.inserted = w.inserted[:0]
	case *pglogrepl.InsertMessage:
		w.inserted = append(w.inserted, w.of(w.relations[m.RelationID], m.Tuple))
	case *pglogrepl.CommitMessage:
		for _, row := range w.inserted {
			w.ledger.row(row[0], row[1], m.CommitTime.Add(-w.ahead))
		}
		w.reached = m.TransactionEndLSN
	}
	return err
}

// of returns the id and the key of a row.
func (r *rows) of(rel *pglogrepl.RelationMessage, tuple *pglogrepl.TupleData) (row [2]string) {
	for i, c := range rel.Columns {
		switch c.Name {
		case r.o.ID:
			row[0] = strings.ToLower(string(tuple.Columns[i].Data))
		case r.o.Key:
			row[1] = string(tuple.Columns[i].Data)
		}
	}
	return row
}

// Polling sees a row that stays for pollEvery, if its transaction committed at most pollBack after a row with a greater
// value of the order's column.
const (
	pollEvery = 250 * time.Millisecond
	pollBack  = 10 * time.Second
)

// poll reads new rows again and again until ctx ends, and once more then. It cannot see when they were committed.
func (r *rows) poll(ctx context.Context, conn *pgx.Conn, started func()) error {
	// Qualified, a name in ORDER BY is the column's, not that of its text.
	order := "o." + pgx.Identifier{r.o.OrderBy}.Sanitize()
	key := "''"
	if r.o.Key != "" {
		key = "coalesce(o." + pgx.Identifier{r.o.Key}.Sanitize() + "::text, '')"
	}
	var typ, from string
	err := conn.QueryRow(ctx, "SELECT pg_catalog.format_type(a.atttypid, a.atttypmod), coalesce((SELECT "+
		"pg_catalog.max("+order+")::text FROM "+r.table()+" o), '') FROM pg_catalog.pg_attribute a "+
		"WHERE a.attrelid = $1::text::regclass AND a.attname = $2", r.table(), r.o.OrderBy).Scan(&typ, &from)
	if err != nil {
		return fmt.Errorf("read table %s: %w", r.o.Table, err)
	}
	read := fmt.Sprintf("SELECT pg_catalog.lower(o.%s::text), %s, %s::text FROM %s o "+
		"WHERE $1 = '' OR %s > nullif($1, '')::%s ORDER BY %s", pgx.Identifier{r.o.ID}.Sanitize(), key, order,
		r.table(), order, typ, order)
	type past struct {
		at   time.Time
		from string
	}
	seen := []past{{time.Now(), from}}
	started()
	reading := context.WithoutCancel(ctx)
	for last := false; ; {
		for len(seen) > 1 && time.Since(seen[1].at) > pollBack {
			seen = seen[1:]
		}
		found, err := conn.Query(reading, read, seen[0].from)
		if err == nil {
			var row [3]string
			_, err = pgx.ForEachRow(found, []any{&row[0], &row[1], &row[2]}, func() error {
				r.ledger.row(row[0], row[1], time.Now())
				from = row[2]
				return nil
			})
		}
		if err != nil {
			return fmt.Errorf("read table %s: %w", r.o.Table, err)
		}
		if seen[len(seen)-1].from != from {
			seen = append(seen, past{time.Now(), from})
		}
		if last {
			return nil
		}
		last = pause.For(ctx, pollEvery) != nil
	}
}
