package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin"
	"posthaste/cdc"
	"posthaste/consumer"
	"posthaste/internal/cli"
	"posthaste/outbox"
	"posthaste/sql"
)

// oneShotTimeout bounds what a command that only asks or sets does.
const oneShotTimeout = 15 * time.Second

// withPool runs do with a pool on a migrated schema.
func (e *env) withPool(ctx context.Context, do func(ctx context.Context, pool *pgxpool.Pool) error) error {
	return e.withDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := e.checkSchema(ctx, pool); err != nil {
			return err
		}
		return do(ctx, pool)
	})
}

// checkSchema is sql.CheckSchema with the name of what is missing: often it is there, and called otherwise.
func (e *env) checkSchema(ctx context.Context, pool *pgxpool.Pool) error {
	err := sql.CheckSchema(ctx, pool)
	if errors.Is(err, sql.ErrSchemaMissing) {
		return fmt.Errorf("database %q, --schema=%s: %w", pool.Config().ConnConfig.Database, e.config.Schema, err)
	}
	return err
}

// withDatabase runs do with a pool on whatever is there.
func (e *env) withDatabase(ctx context.Context, do func(ctx context.Context, pool *pgxpool.Pool) error) error {
	ctx, cancel := context.WithTimeout(ctx, oneShotTimeout)
	defer cancel()
	cfg, err := sql.PoolConfig(e.config.PostgresURL, e.config.Schema, "cli")
	if err != nil {
		return cli.Usage(err.Error())
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	return cli.OneLine(do(ctx, pool))
}

func (e *env) slots(pool *pgxpool.Pool) (*cdc.Slots, error) {
	return cdc.NewSlots(cdc.SlotsOptions{Pool: pool, Schema: e.config.Schema, Slot: e.config.Slot, Publication: publication})
}

type migrateCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run migrates.
func (c migrateCmd) Run(ctx context.Context, e *env) error {
	applied, err := sql.Migrate(ctx, e.config.PostgresURL, e.config.Schema, slog.New(slog.DiscardHandler))
	if err != nil {
		return cli.OneLine(err)
	}
	if c.JSON {
		if applied == nil {
			applied = []int64{}
		}
		return e.JSON(map[string]any{"applied": applied})
	}
	if len(applied) == 0 {
		fmt.Fprintln(e.Stdout, "the schema is up to date")
		return nil
	}
	fmt.Fprintf(e.Stdout, "applied %d migrations; the schema is at version %d\n", len(applied), applied[len(applied)-1])
	return nil
}

type modeCmd struct {
	Mode string `arg:"" optional:"" help:"auto, cdc or poll; without it the mode is shown."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// Run shows or sets the mode.
func (c modeCmd) Run(ctx context.Context, e *env) error {
	var mode outbox.Mode
	if c.Mode != "" {
		var err error
		if mode, err = outbox.ParseMode(c.Mode); err != nil {
			return cli.Usage(err.Error())
		}
	}
	return e.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := sql.Register(ctx, pool, e.config.RelayName); err != nil {
			return err
		}
		if mode != "" {
			if err := sql.SetDesired(ctx, pool, e.config.RelayName, mode); err != nil {
				return err
			}
		}
		st, err := sql.ReadState(ctx, pool, e.config.RelayName)
		if err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(map[string]any{"desired": st.Desired, "mode": st.Active})
		}
		_, err = fmt.Fprintf(e.Stdout, "desired %s, active %s\n", st.Desired, st.Active)
		return err
	})
}

func orNone(s string) string {
	if s == "" {
		return "nobody"
	}
	return s
}

type uninstallCmd struct {
	Tables bool `help:"Drop the tables too, with everything in them."`
	Yes    bool `help:"Do not ask."`
	JSON   bool `name:"json" help:"Print JSON."`
}

// uninstalled is what uninstall removed; what was not there counts as removed.
type uninstalled struct {
	Slot        bool `json:"slot"` // false: it is another database's, and stays
	Publication bool `json:"publication"`
	Tables      bool `json:"tables"`
}

// Run removes what posthaste left in the database. It wants no schema of its own version, and none at all: a slot whose tables
// are gone fills the disk as well.
func (c uninstallCmd) Run(ctx context.Context, e *env) error {
	what := fmt.Sprintf("Drop slot %s and publication %s", e.config.Slot, publication)
	if c.Tables {
		what += " and ALL TABLES of posthaste, orders included, in schema " + e.config.Schema
	}
	if err := e.Confirm(ctx, c.Yes, what+"?"); err != nil {
		return err
	}
	return e.withDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		switch err := sql.CheckSchema(ctx, pool); {
		case errors.Is(err, sql.ErrSchemaNewer) && c.Tables:
			return err // it has tables that this version does not know
		case errors.Is(err, sql.ErrSchemaNewer), errors.Is(err, sql.ErrSchemaMissing), sql.SQLState(err) != "":
		case err != nil:
			return err // of the connection
		}
		if pulse, err := sql.ReadPulse(ctx, pool); err == nil && pulse.Led {
			fmt.Fprintln(e.Stderr, "posthaste: a relay runs, and makes the slot and the publication again: stop it, then repeat this")
		}
		done, err := e.uninstall(ctx, pool, c.Tables)
		if err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(done)
		}
		if done.Slot {
			fmt.Fprintf(e.Stdout, "slot %s is gone\n", e.config.Slot)
		} else {
			fmt.Fprintf(e.Stdout, "slot %s is not this database's and stays\n", e.config.Slot)
		}
		fmt.Fprintf(e.Stdout, "publication %s is gone\n", publication)
		if c.Tables {
			fmt.Fprintln(e.Stdout, "the tables are gone")
		}
		return nil
	})
}

func (e *env) uninstall(ctx context.Context, pool *pgxpool.Pool, tables bool) (uninstalled, error) {
	slots, err := e.slots(pool)
	if err != nil {
		return uninstalled{}, err
	}
	var slot *outbox.SlotError
	err = slots.Drop(ctx)
	theirs := errors.As(err, &slot) && slot.Reason == outbox.ReasonSlotForeign
	if err != nil && !theirs {
		return uninstalled{}, err
	}
	if err := sql.Uninstall(ctx, pool, publication, tables); err != nil {
		return uninstalled{}, err
	}
	return uninstalled{Slot: !theirs, Publication: true, Tables: tables}, nil
}

type healthcheckCmd struct {
	Ready bool   `help:"Ask /readyz (can it do its work?) instead of /healthz (does it run?)."`
	Addr  string `help:"Admin address to ask. Default: the admin address of the settings, or of serve."`
}

// Run asks a process on this machine.
func (c healthcheckCmd) Run(ctx context.Context, e *env) error {
	addr := c.Addr
	if addr == "" {
		addr = e.config.AdminAddr
	}
	if addr == "" {
		addr = defaultServeAdmin
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return cli.Usage(fmt.Sprintf("address %q: %v", addr, err))
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // it listens everywhere, here too
	}
	path := "/healthz"
	if c.Ready {
		path = "/readyz"
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	fmt.Fprintf(e.Stdout, "%d %s\n", resp.StatusCode, strings.TrimSpace(string(body)))
	if resp.StatusCode != http.StatusOK {
		return cli.ErrSaid
	}
	return nil
}

type versionCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run prints the version.
func (c versionCmd) Run(e *env) error {
	if c.JSON {
		return e.JSON(map[string]string{"version": version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH})
	}
	_, err := fmt.Fprintf(e.Stdout, "posthaste %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}

type consumeCmd struct {
	Group     string        `help:"Consumer group; a new one starts at the first entry." required:""`
	Stream    []string      `help:"Full stream name; may be repeated. Default: every stream with the prefix." sep:"none"`
	Consumer  string        `help:"Name of this consumer within the group. Default: one that is never used twice."`
	Ordered   bool          `help:"Keep the order per subject over all consumers of the group: one of them at a time reads a stream."`
	ClaimIdle time.Duration `help:"After how long without a sign of life another consumer's entries are taken over." default:"15s"`
}

// Run prints events until a signal.
func (c consumeCmd) Run(ctx context.Context, e *env) error {
	if c.ClaimIdle <= 0 {
		return cli.Usage("--claim-idle must be positive")
	}
	client, err := consumerClient(e.config.RedisURL)
	if err != nil {
		return err
	}
	defer client.Close()
	log := e.config.logger()
	traces := setupTracing(ctx, "posthaste-consumer", log)
	defer traces.shutdown()
	o := consumer.Options{
		Client: client, Group: c.Group, Consumer: c.Consumer, Streams: c.Stream, ClaimIdle: c.ClaimIdle, Ordered: c.Ordered,
		Handler: traces.handler(c.Group, consumer.LineWriter(e.Stdout)), DrainTimeout: e.config.DrainTimeout, Log: log,
	}
	if len(c.Stream) == 0 {
		o.Prefix = e.config.StreamPrefix
	}
	reg := newRegistry()
	o.Metrics = reg
	cons, err := consumer.New(o)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if e.config.AdminAddr == "" {
		return cons.Run(ctx)
	}
	l, err := listen(ctx, e.config.AdminAddr)
	if err != nil {
		return err
	}
	log.Info("consuming", "version", version, "group", c.Group, "admin", l.Addr().String())
	actx, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- httpServer(actx, adminServer(admin.Metrics(reg, cons.Stalled)), l, time.Second) }()
	err = cons.Run(ctx)
	stop()
	return errors.Join(err, <-done)
}

// consumerClient connects as a reader: it blocks for entries, so its timeouts are the library's own.
func consumerClient(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, cli.Usage("the Redis URL cannot be parsed")
	}
	return redis.NewClient(o), nil
}
