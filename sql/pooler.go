package sql

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/pause"
)

// Pooling is how a pooler between a client and Postgres shares the server's sessions.
type Pooling string

// The kinds of Pooling. Without a pooler the client has a session of its own.
const (
	Unpooled           Pooling = ""
	SessionPooling     Pooling = "session"
	TransactionPooling Pooling = "transaction"
	StatementPooling   Pooling = "statement"
)

// PoolingOf finds out how conn reaches the server. It makes a second connection from cfg, the configuration of conn, if
// there is a pooler.
func PoolingOf(ctx context.Context, conn *pgx.Conn, cfg *pgx.ConnConfig) (Pooling, error) {
	if !pooled(conn) {
		return Unpooled, nil
	}
	first, err := backend(ctx, conn)
	if err != nil {
		return "", err
	}
	// The pooler may give each transaction of conn the same session because it is free. A transaction of another
	// connection takes that session now, unless it is reserved for conn, or others have just freed another one.
	other, err := Connect(ctx, cfg)
	if err != nil {
		return "", err
	}
	defer func() { _ = other.Close(context.WithoutCancel(ctx)) }()
	for range poolingRounds {
		again := first
		err := pgx.BeginFunc(ctx, other, func(tx pgx.Tx) error {
			taken, err := backend(ctx, tx)
			if err != nil || taken == first {
				again = 0
				return err
			}
			// Clients of a busy pooler may take their sessions in turns, always in the same order.
			if err := pause.For(ctx, rand.N(2*time.Millisecond)); err != nil { //nolint:gosec // no secret
				return err
			}
			again, err = backend(ctx, conn)
			return err
		})
		if statementPooled(err) {
			return StatementPooling, nil
		}
		if err != nil || again != first {
			return TransactionPooling, err
		}
	}
	return SessionPooling, nil
}

// poolingRounds is how often a session has to look reserved. It looks so by chance in a third of the rounds if others
// use the pooler all the time.
const poolingRounds = 20

// backend returns the process id of the server's process that executes a statement of db.
func backend(ctx context.Context, db DB) (pid uint32, err error) {
	return pid, db.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()").Scan(&pid)
}

// Pooled reports whether a pooler is between the server and pool, which was made from PoolConfig.
func Pooled(ctx context.Context, pool *Pool) (yes bool, err error) {
	err = pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { yes = pooled(c.Conn()); return nil })
	return yes, err
}

// sharing is the key of a connection's data that is there if a pooler is between it and the server.
const sharing = "posthaste.sharing"

func pooled(c *pgx.Conn) bool { return c.PgConn().CustomData()[sharing] != nil }

// statementPooled reports whether err is the answer of a pooler in statement mode to a transaction.
func statementPooled(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && strings.Contains(pg.Message, "statement pooling mode")
}

// PoolingError means that a relay is connected through a pooler that does not give it a session, or that a pooler in
// statement mode has refused a transaction of any command.
type PoolingError struct{ Pooling Pooling }

// StatementRemedy is the remedy of a pooler in statement mode.
const StatementRemedy = "set the pooler's pool_mode to transaction, or for a relay in mode poll to session; " +
	"mode cdc needs a direct connection"

func (e *PoolingError) Error() string {
	if e.Pooling == StatementPooling {
		return "a pooler in statement mode is between this process and Postgres, and refuses transactions: " +
			StatementRemedy
	}
	return fmt.Sprintf("a pooler in %s mode is between this relay and Postgres, and would leave its locks behind: "+
		"use the pooler's session mode (for mode poll), or a direct connection (for every mode)", e.Pooling)
}

// Permanent marks an error that waiting cannot fix.
func (*PoolingError) Permanent() bool { return true }

// connectSession is Connect for a connection that holds advisory locks.
func connectSession(ctx context.Context, cfg *pgx.ConnConfig) (conn *pgx.Conn, pooling Pooling, err error) {
	if conn, err = Connect(ctx, cfg); err != nil {
		return nil, "", err
	}
	pooling, err = PoolingOf(ctx, conn, cfg)
	switch {
	case err != nil:
	case pooling == TransactionPooling, pooling == StatementPooling:
		err = &PoolingError{pooling}
	case pooling == SessionPooling: // the one setting that counts between transactions
		_, err = conn.Exec(ctx, "SELECT pg_catalog.set_config('idle_session_timeout', $1, false)",
			cfg.RuntimeParams["idle_session_timeout"])
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return nil, "", err
	}
	return conn, pooling, nil
}

// atStart are the parameters that every pooler accepts when a connection begins, and those that can be given only then.
var atStart = map[string]bool{
	"application_name": true, "client_encoding": true, "datestyle": true, "timezone": true, "options": true,
	"standard_conforming_strings": true, "replication": true,
}

// setOnConnect changes a configuration of one connection: its parameters are set by a statement after it has begun,
// except those in atStart. A pooler refuses the others.
func setOnConnect(cfg *pgx.ConnConfig) {
	settings := map[string]string{}
	for name, value := range cfg.RuntimeParams {
		if !atStart[strings.ToLower(name)] {
			settings[name] = value
			delete(cfg.RuntimeParams, name)
		}
	}
	wires := map[*pgproto3.Frontend]*wire{}
	cfg.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		v := &wire{r: r, w: w}
		f := pgproto3.NewFrontend(v, v)
		wires[f] = v
		return f
	}
	cfg.AfterConnect = func(ctx context.Context, c *pgconn.PgConn) error {
		made, pooled, err := applySettings(ctx, c, settings)
		if err == nil && pooled {
			c.CustomData()[sharing] = true
			wires[c.Frontend()].share(made)
		}
		clear(wires)
		return err
	}
}

// applySettings executes session.sql, and returns the settings that it made, pairs of name and value.
func applySettings(ctx context.Context, c *pgconn.PgConn, settings map[string]string) (made [][2]string, pooled bool,
	err error,
) {
	object, err := json.Marshal(settings)
	if err != nil {
		return nil, false, err
	}
	pid := strconv.FormatUint(uint64(c.PID()), 10)
	r := c.ExecParams(ctx, query("session"), [][]byte{object, []byte(pid)}, nil, nil, nil).Read()
	for _, row := range r.Rows {
		made, pooled = append(made, [2]string{string(row[0]), string(row[1])}), string(row[2]) == "t"
	}
	return made, pooled, r.Err
}

// wire is what a connection reads from and writes to. It passes everything on, unless the connection is shared: then it
// makes the settings at the beginning of each transaction, and sends the text of a prepared statement with each of its
// executions, because each transaction may have another session, which other programs use as well.
type wire struct {
	r io.Reader
	w io.Writer

	// in is r, nil unless the connection is shared. rest is how many bytes of the current message are unread.
	in   *bufio.Reader
	rest int

	mu sync.Mutex
	// simple makes the settings in front of a simple query, by sets statements; extended does so by two messages each
	// of Parse, Bind and Execute.
	simple   string
	sets     int
	extended []byte
	// prepared are the statements that the client believes to be prepared, by name.
	prepared map[string]pgproto3.Parse
	// busy is set from the first message of a transaction until the server has no transaction.
	busy bool
	// answers are the messages that wait for an answer; true for those that are not the client's.
	answers []bool
}

// share makes w do its work from now on. The connection is idle.
func (w *wire) share(settings [][2]string) {
	w.prepared, w.in = map[string]pgproto3.Parse{}, bufio.NewReader(w.r)
	// A snapshot forbids to change the isolation, so this is a statement of its own.
	const isolation = "SET transaction_isolation = 'read committed'"
	list, calls := []string{isolation}, []string{}
	for _, s := range settings {
		name, value := s[0], s[1]
		if strings.HasPrefix(name, "tcp_") || name == "default_transaction_isolation" {
			continue // of the pooler's connection; see isolation
		}
		literal := "'" + strings.ReplaceAll(value, "'", "''") + "'"
		calls = append(calls, fmt.Sprintf("pg_catalog.set_config('%s', %s, true)", name, literal))
		if name == "search_path" {
			literal = value // a list
		}
		list = append(list, "SET LOCAL "+name+" = "+literal)
	}
	w.simple, w.sets = strings.Join(list, "; ")+"; ", len(list)
	for _, text := range []string{isolation, "SELECT " + strings.Join(calls, ", ")} {
		w.extended = encoded(w.extended, &pgproto3.Parse{Query: text})
		w.extended = encoded(w.extended, &pgproto3.Bind{})
		w.extended = encoded(w.extended, &pgproto3.Execute{})
	}
}

// encoded appends a message that is known to be valid.
func encoded(to []byte, m pgproto3.FrontendMessage) []byte {
	to, err := m.Encode(to)
	if err != nil {
		panic(err) // longer than 1 GiB
	}
	return to
}

// Write takes complete messages.
func (w *wire) Write(b []byte) (int, error) {
	if w.in == nil {
		return w.w.Write(b)
	}
	out, err := w.translate(b)
	if err != nil {
		return 0, err
	}
	if n, err := w.w.Write(out); err != nil {
		return n, err
	}
	return len(b), nil
}

func (w *wire) translate(b []byte) (out []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(b) > 0 {
		if len(b) < 5 || len(b) < 1+int(binary.BigEndian.Uint32(b[1:])) {
			return nil, errors.New("an incomplete message was to be sent")
		}
		n := 1 + int(binary.BigEndian.Uint32(b[1:]))
		if out, err = w.message(out, b[:n]); err != nil {
			return nil, err
		}
		b = b[n:]
	}
	return out, nil
}

// message appends what is sent for m.
func (w *wire) message(out, m []byte) ([]byte, error) {
	switch m[0] {
	case 'Q':
		var q pgproto3.Query
		if err := q.Decode(m[5:]); err != nil || w.busy {
			return append(out, m...), err
		}
		w.busy, q.String = true, w.simple+q.String
		w.awaits(true, w.sets)
		return encoded(out, &q), nil
	case 'P':
		var p pgproto3.Parse
		if err := p.Decode(m[5:]); err != nil {
			return nil, err
		}
		name := p.Name
		p.Name = ""
		w.prepared[name] = p
		out = w.begin(out)
		w.awaits(false, 1)
		return encoded(out, &p), nil
	case 'B':
		var bind pgproto3.Bind
		if err := bind.Decode(m[5:]); err != nil {
			return nil, err
		}
		out = w.begin(out)
		if bind.PreparedStatement != "" {
			p := w.prepared[bind.PreparedStatement]
			out = encoded(out, &p)
			bind.PreparedStatement = ""
			w.awaits(true, 1)
		}
		w.awaits(false, 1)
		return encoded(out, &bind), nil
	case 'D': // of a statement: just parsed, see pgconn
		w.awaits(false, 1)
		if m[5] == 'S' {
			return encoded(out, &pgproto3.Describe{ObjectType: 'S'}), nil
		}
	case 'C':
		w.awaits(false, 1)
		if m[5] == 'S' {
			delete(w.prepared, string(m[6:len(m)-1]))
			return encoded(out, &pgproto3.Close{ObjectType: 'S'}), nil
		}
	case 'E':
		w.awaits(false, 1)
	}
	return append(out, m...), nil
}

// begin appends the settings if no transaction has begun.
func (w *wire) begin(out []byte) []byte {
	if w.busy {
		return out
	}
	w.busy = true
	w.awaits(true, 6)
	return append(out, w.extended...)
}

func (w *wire) awaits(own bool, n int) {
	for range n {
		w.answers = append(w.answers, own)
	}
}

// Read returns what the client reads: every message but the answers to messages that are not the client's.
func (w *wire) Read(b []byte) (int, error) {
	if w.in == nil {
		return w.r.Read(b)
	}
	for w.rest == 0 {
		head, err := w.in.Peek(5)
		if err == nil && head[0] == 'Z' {
			head, err = w.in.Peek(6)
		}
		if err != nil {
			return 0, err
		}
		n := 1 + int(binary.BigEndian.Uint32(head[1:]))
		if !w.swallows(head) {
			w.rest = n
		} else if _, err := w.in.Discard(n); err != nil {
			return 0, err
		}
	}
	n, err := w.in.Read(b[:min(len(b), w.rest)])
	w.rest -= n
	return n, err
}

// swallows reports whether the message that begins with head is the answer to a message that is not the client's.
func (w *wire) swallows(head []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch head[0] {
	case 'N', 'S', 'A': // notices, parameters, notifications
		return false
	case 'Z':
		w.busy, w.answers = head[5] != 'I', nil
	case 'E': // the server ignores the other messages
		w.answers = nil
	}
	if len(w.answers) == 0 {
		return false
	}
	own := w.answers[0]
	if strings.IndexByte("123nTCIs", head[0]) >= 0 { // the last message of an answer
		w.answers = w.answers[1:]
	}
	return own
}
