package prove

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
	"posthaste/sql"
)

// foreign reports whether the relay is not ready because the streams belong to another database.
func (r readiness) foreign() bool {
	return slices.ContainsFunc(r.Reasons, func(s string) bool { return strings.HasPrefix(s, "foreign_stream: ") })
}

// copyDatabase is the name of the copy on the same server. The original has the name postgres.
const copyDatabase = "prove_copy"

// databaseCopied starts a relay of a copy of the database, which has one event more, and waits until it is refused. The
// streams must not get that event, and the relay must stay refused without an effect on the original until it is ended.
func databaseCopied(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	server := c.stage.servers.Postgres
	env, err := c.stage.config(ctx, c.relays[0].name, c.config)
	if err != nil {
		return "", nil, err
	}
	env = append(env, "POSTHASTE_POSTGRES_URL="+server.URL(copyDatabase))
	p, err := newProcess("copy", c.logs, env, "relay", "--stream-maxlen=0")
	if err != nil {
		return "", nil, err
	}
	var before int64
	err = func() error {
		err := onServer(ctx, server.URL("template1"), "ALTER DATABASE postgres ALLOW_CONNECTIONS false",
			"SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'postgres'",
			"CREATE DATABASE "+copyDatabase+" TEMPLATE postgres", "ALTER DATABASE postgres ALLOW_CONNECTIONS true")
		if err != nil {
			return err
		}
		c.stage.pool.Reset() // its sessions were ended with the others
		// The slot of the relay's name belongs to the original.
		err = onServer(ctx, server.URL(copyDatabase), "UPDATE relay_state SET desired_mode = 'poll'",
			"INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('cart', 'copy', 'x', '{}')")
		if err != nil {
			return err
		}
		if err = p.start(); err != nil {
			return err
		}
		// The relays of the original have lost their sessions, too, and each of them may adopt once for that.
		since := time.Now()
		return repeat(ctx, func() (bool, error) {
			if epoch, err := c.epoch(ctx); err == nil && epoch != before {
				before, since = epoch, time.Now()
			}
			return p.ready(ctx).foreign() && time.Since(since) >= time.Second, nil
		})
	}()
	injected := err == nil
	return "", func(ctx context.Context) error {
		if after, err := c.epoch(ctx); injected && err == nil && (!p.ready(ctx).foreign() || after > before+1) {
			c.breaks("dishonest", uuid.Nil, "", "a relay of a copy of the database is not refused, or fences the "+
				"original, whose epoch was %d and is %d", before, after)
		}
		p.close()
		return onServer(ctx, server.URL("template1"), "ALTER DATABASE postgres ALLOW_CONNECTIONS true",
			"DROP DATABASE IF EXISTS "+copyDatabase+" WITH (FORCE)")
	}, err
}

// epoch returns the epoch of the relays' last leader.
func (c *campaign) epoch(ctx context.Context) (int64, error) {
	st, err := sql.ReadState(ctx, c.stage.pool, c.config.RelayName)
	return st.Owner.Epoch, err
}

// connect waits up to 10 seconds for a server that starts.
func connect(ctx context.Context, url string) (*pgx.Conn, error) {
	for began := time.Now(); ; {
		conn, err := pgx.Connect(ctx, url)
		if err == nil {
			return conn, nil
		}
		if time.Since(began) > 10*time.Second || pause.For(ctx, 200*time.Millisecond) != nil {
			return nil, errors.New("no connection to Postgres") // the error may quote the URL
		}
	}
}

// onServer runs statements over a new connection.
func onServer(ctx context.Context, url string, statements ...string) error {
	conn, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, text := range statements {
		if _, err := conn.Exec(ctx, text); err != nil {
			return err
		}
	}
	return nil
}

// move is a change from one server to a clone of it, which has followed by logical replication.
type move struct {
	*campaign

	from, to *local.Postgres
}

// moveName is the name of the publication, the subscription and the slot.
const moveName = "prove_move"

// databaseMoved makes a clone of the server a logical replica, and finally moves everything to the clone. The clone's
// transaction ids are lower than those of the original, or higher.
func databaseMoved(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	m := &move{campaign: c, from: c.stage.servers.Postgres}
	what, higher := "lower ids", r.IntN(2) == 0
	if higher {
		what = "higher ids"
	}
	if err := m.begin(ctx, higher); err != nil {
		return what, m.abandon, err
	}
	return what, m.finish, nil
}

// begin makes the clone while no process is connected, and lets it follow.
func (m *move) begin(ctx context.Context, higher bool) error {
	dir, err := os.MkdirTemp(m.stage.dir, "postgres-")
	if err != nil {
		return err
	}
	if err := onServer(ctx, m.stage.postgres, "DROP PUBLICATION IF EXISTS "+moveName,
		"CREATE PUBLICATION "+moveName+" FOR ALL TABLES"); err != nil {
		return err
	}
	if err := m.disconnect(ctx); err != nil {
		return err
	}
	if m.to, err = m.from.Copy(ctx, dir); err != nil {
		return err
	}
	if err := m.to.Start(ctx); err != nil {
		return err
	}
	if err := onServer(ctx, m.to.URL("postgres"), fmt.Sprintf("CREATE SUBSCRIPTION %s CONNECTION '%s' PUBLICATION %s "+
		"WITH (copy_data = false)", moveName, m.from.URL("postgres"), moveName)); err != nil {
		return err
	}
	ahead := m.from
	if higher {
		ahead = m.to
	}
	m.connect(m.from)
	return onServer(ctx, ahead.URL("postgres"),
		"DO $$ BEGIN FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")
}

// disconnect cuts the processes off Postgres, and waits until their sessions have ended.
func (m *move) disconnect(ctx context.Context) error {
	for _, l := range m.stage.linksTo(serverPostgres) {
		l.Set(link.Trouble{Refuse: true})
	}
	return repeat(ctx, func() (bool, error) {
		n, err := m.exec(ctx, "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_stat_activity WHERE "+
			"backend_type = 'client backend' AND application_name <> 'prove' OR application_name LIKE 'posthaste%'")
		return n == 0, err
	})
}

// connect lets all links lead to pg.
func (m *move) connect(pg *local.Postgres) {
	m.stage.ownPostgres.To(pg.Addr())
	for _, l := range m.stage.linksTo(serverPostgres) {
		l.To(pg.Addr())
		l.Set(link.Trouble{})
	}
}

// abandon lets everything continue on the original server.
func (m *move) abandon(ctx context.Context) error {
	if m.to != nil {
		_ = m.to.Stop("immediate")
		_ = os.RemoveAll(m.to.Dir)
	}
	if !m.from.Running() {
		if err := m.from.Start(ctx); err != nil {
			return err
		}
	}
	m.connect(m.from)
	return onServer(ctx, m.from.URL("postgres"), "SELECT pg_catalog.pg_drop_replication_slot(slot_name) "+
		"FROM pg_replication_slots WHERE slot_name = '"+moveName+"' AND NOT active")
}

// finish moves all processes to the clone, as soon as it has everything, and takes over the streams.
func (m *move) finish(ctx context.Context) error {
	if err := m.disconnect(ctx); err != nil {
		return err
	}
	var last string
	if err := m.stage.pool.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text").Scan(&last); err != nil {
		return err
	}
	if err := m.affect(ctx, "SELECT FROM pg_replication_slots WHERE slot_name = $1 AND confirmed_flush_lsn >= "+
		"$2::text::pg_lsn", moveName, last); err != nil {
		return err
	}
	numbers, err := m.sequences(ctx)
	if err != nil {
		return err
	}
	if err := onServer(ctx, m.to.URL("postgres"), append(numbers, "ALTER SUBSCRIPTION "+moveName+" DISABLE",
		"ALTER SUBSCRIPTION "+moveName+" SET (slot_name = NONE)", "DROP SUBSCRIPTION "+moveName)...); err != nil {
		return err
	}
	if err := m.from.Stop("immediate"); err != nil {
		return err
	}
	m.stage.servers.Postgres, m.stage.server = m.to, m.to.Addr()
	m.connect(m.to)
	if err := os.RemoveAll(m.from.Dir); err != nil {
		return err
	}
	return m.takeOver(ctx)
}

// sequences returns statements that set the sequences of the clone as they are in the original: they are not
// replicated.
func (m *move) sequences(ctx context.Context) ([]string, error) {
	rows, err := m.stage.pool.Query(ctx, `SELECT pg_catalog.format('SELECT setval(%L, %s)',
		pg_catalog.format('%I.%I', schemaname, sequencename), last_value)
		FROM pg_sequences WHERE last_value IS NOT NULL`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// takeOver runs posthaste adopt if the relays ask for it, and waits until they publish.
func (m *move) takeOver(ctx context.Context) error {
	_, before, _ := m.pass.Counts()
	return repeat(ctx, func() (bool, error) {
		if slices.ContainsFunc(m.relays, func(p *process) bool { return p.ready(ctx).foreign() }) {
			exe, err := os.Executable()
			if err != nil {
				return false, err
			}
			cmd := exec.CommandContext(ctx, exe, "adopt", "--yes")
			cmd.Env = append(environment(), m.relays[0].env...)
			if out, err := cmd.CombinedOutput(); err != nil {
				return false, fmt.Errorf("adopt: %w: %s", err, out)
			}
		}
		_, read, _ := m.pass.Counts()
		return read > before, nil
	})
}
