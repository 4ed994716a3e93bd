package cdc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/failpoint"
	"posthaste/outbox"
	"posthaste/sql"
)

// table is the table whose inserts are events.
const table = "outbox"

// Options configures NewReader and NewSlots.
type Options struct {
	// URL is the database's DSN, for a reader. It must be a direct connection: poolers do not speak the replication
	// protocol.
	URL string
	// Pool connects to the same database. Required. It is used for single statements and short transactions.
	Pool *pgxpool.Pool
	// Schema is where the outbox table is. Default: public.
	Schema string
	// Slot is the name of the slot. Required. A reader needs an existing logical slot with the plugin pgoutput
	// (Slots.Ensure makes it).
	Slot string
	// Publication is the name of the publication that has the outbox table. Default: posthaste.
	Publication string
	// SenderTimeout is after how long without a message from the reader the server closes the connection
	// (wal_sender_timeout of this connection, whatever the server's setting). A server may be silent for about 2/3 of
	// it, at most 20 s. At least 300 ms. Default: 10 s.
	SenderTimeout time.Duration
	// ChunkBytes is the approximate limit of a reader's chunk in bytes. Default: 4 MiB.
	ChunkBytes int
	// Registerer takes the reader's metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger may be nil.
	Logger *slog.Logger
}

// check sets the defaults.
func (o *Options) check() error {
	o.Schema = cmp.Or(o.Schema, "public")
	o.Publication = cmp.Or(o.Publication, "posthaste")
	o.SenderTimeout = cmp.Or(o.SenderTimeout, 10*time.Second)
	o.ChunkBytes = cmp.Or(o.ChunkBytes, 4<<20)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Logger = o.Logger.With("component", "cdc", "slot", o.Slot)
	switch {
	case o.Pool == nil:
		return errors.New("the slot needs a pool")
	case len(o.Slot) > 63 || !slotName.MatchString(o.Slot):
		return fmt.Errorf("slot name %q: lower-case letters, digits and underscores, at most 63", o.Slot)
	case o.SenderTimeout < 300*time.Millisecond:
		return fmt.Errorf("sender timeout %v is below 300ms", o.SenderTimeout)
	}
	return nil
}

// Reader streams the outbox from a replication slot. It implements outbox.Source. Run may be called repeatedly, but not
// concurrently; the other methods are safe for concurrent use.
type Reader struct {
	opt Options
	cfg *pgx.ConnConfig
	log *slog.Logger

	// closing is how long the server has to release the slot: closeTimeout, except in tests.
	closing time.Duration

	running atomic.Bool
	// settled is the last position passed to Settled. The reader's goroutine reads it.
	settled atomic.Uint64
	// heard is when the server last sent something (Unix ns); zero outside Run.
	heard atomic.Int64
}

var _ outbox.Source = (*Reader)(nil)

var slotName = regexp.MustCompile(`^[a-z0-9_]+$`)

// NewReader checks o and prepares a reader; it does not connect.
func NewReader(o Options) (*Reader, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	cfg, err := replicationConfig(&o)
	if err != nil {
		return nil, err
	}
	r := &Reader{opt: o, cfg: cfg, log: o.Logger, closing: closeTimeout}
	if o.Registerer != nil { // slot gauges belong to the relay
		err = o.Registerer.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "outbox_wire_idle_seconds",
			Help: "Seconds since anything was received over the replication connection; 0 without one. " +
				"Above half a minute the server is silent, or the sink holds the reader back.",
		}, r.wireIdle))
	}
	return r, err
}

// wireIdle returns the seconds since the server was last heard.
func (r *Reader) wireIdle() float64 {
	heard := r.heard.Load()
	if heard == 0 {
		return 0
	}
	return max(0, time.Since(time.Unix(0, heard)).Seconds())
}

// replicationConfig is the configuration of the replication connection. The server formats every value by its settings,
// so those that change the text are pinned, whatever the role or the database has set.
func replicationConfig(o *Options) (*pgx.ConnConfig, error) {
	cfg, err := sql.ConnConfig(o.URL, o.Schema, "cdc")
	if err != nil {
		return nil, err
	}
	for name, value := range map[string]string{
		"replication":        "database",
		"wal_sender_timeout": strconv.FormatInt(o.SenderTimeout.Milliseconds(), 10),
		"client_encoding":    "UTF8",
		"datestyle":          "ISO, MDY",
		"timezone":           "UTC",
	} {
		cfg.RuntimeParams[name] = value
	}
	return cfg, nil
}

// Settled implements outbox.Source.
func (r *Reader) Settled(end outbox.LSN) {
	for {
		old := r.settled.Load()
		if uint64(end) <= old || r.settled.CompareAndSwap(old, uint64(end)) {
			return
		}
	}
}

// Run implements outbox.Source. It returns ctx's error once ctx has ended, the error of started, or an
// *outbox.SlotError. Before it returns, it reports the settled position to the server and waits up to a second until
// the server has released the slot.
func (r *Reader) Run(ctx context.Context, started func(ctx context.Context) error, out chan<- outbox.Chunk) error {
	if !r.running.CompareAndSwap(false, true) {
		return errors.New("the reader is running already")
	}
	defer r.running.Store(false)
	// Positions of an earlier Run do not apply to the database of this one.
	r.settled.Store(0)
	defer r.heard.Store(0)

	s, err := r.open(ctx, out)
	if err != nil {
		return r.explain(ctx, "start replication", err)
	}
	r.log.InfoContext(ctx, "stream opened", "server_pid", s.pid)
	err = s.run(ctx, started)
	s.close()
	err = r.explain(ctx, "stream", err)
	r.log.InfoContext(ctx, "stream closed", "confirmed", s.track.Flushed().String(), "err", err)
	return err
}

// open connects and starts replication.
func (r *Reader) open(ctx context.Context, out chan<- outbox.Chunk) (*session, error) {
	// A copy: the frontend hook is this connection's own. (pgconn insists on a config made by ParseConfig.)
	cfg := r.cfg.Copy()
	in := &gulp{}
	cfg.BuildFrontend = func(src io.Reader, w io.Writer) *pgproto3.Frontend {
		in.src = src // again for each host that is tried
		return pgproto3.NewFrontend(in, w)
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout+5*time.Second)
	defer cancel()
	pub, err := r.published(ctx) // before the caller's last pass over the table
	if err != nil {
		return nil, err
	}
	c, err := sql.ConnectReplication(ctx, cfg)
	if err != nil {
		return nil, err
	}
	// 0/0 resumes at the slot's position. The server raises a lower position to that; a higher one would skip events.
	failpoint.Before("START_REPLICATION")
	err = pglogrepl.StartReplication(ctx, c, r.opt.Slot, 0, pglogrepl.StartReplicationOptions{
		Mode: pglogrepl.LogicalReplication,
		PluginArgs: []string{
			"proto_version '1'", // later versions stream uncommitted work, which would have to be spilled
			"publication_names " + quoteLiteral(pgx.Identifier{r.opt.Publication}.Sanitize()),
		},
	})
	if err != nil {
		_ = c.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	failpoint.After("START_REPLICATION")
	h, err := c.Hijack()
	if err != nil {
		_ = c.Close(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("take over the connection: %w", err)
	}
	in.tap()
	s := newSession(r, h, in, out)
	s.publication = pub
	return s, nil
}

// quoteLiteral quotes a string for the replication grammar, which has no parameters.
func quoteLiteral(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
