package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

type doctorCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// severities of a finding.
const (
	sevOK   = "ok"
	sevWarn = "warn"
	sevFail = "fail"
)

// finding is one thing the doctor looked at.
type finding struct {
	Check    string `json:"check"`
	Severity string `json:"severity"`
	Detail   string `json:"detail"`
	// Mend says what to do about it; empty when all is well.
	Mend string `json:"mend,omitempty"`
}

// doctor looks at everything the relay needs.
type doctor struct {
	config   Config
	desired  outbox.Mode
	findings []finding
}

func (d *doctor) add(severity, check, mend, format string, args ...any) {
	d.findings = append(d.findings, finding{Check: check, Severity: severity, Detail: fmt.Sprintf(format, args...), Mend: mend})
}

// Run prints every finding and fails if the relay could not run safely in the desired mode.
func (c doctorCmd) Run(ctx context.Context, e *env) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	d := &doctor{config: e.config, desired: outbox.ModeAuto}
	d.postgres(ctx)
	d.redis(ctx)
	failed := slices.ContainsFunc(d.findings, func(f finding) bool { return f.Severity == sevFail })
	if c.JSON {
		if err := e.json(map[string]any{"ok": !failed, "findings": d.findings}); err != nil {
			return err
		}
	} else {
		for _, f := range d.findings {
			fmt.Fprintf(e.stdout, "%-5s %-22s %s\n", f.Severity, f.Check, f.Detail)
			if f.Mend != "" {
				fmt.Fprintf(e.stdout, "      %-22s -> %s\n", "", f.Mend)
			}
		}
	}
	if failed {
		return errSaid
	}
	return nil
}

// facts are what one query tells about the server.
type facts struct {
	version                              int
	walLevel                             string
	maxSlots, slots, maxSenders, senders int
	keepMB                               int64
	replication, recovery                bool
	syncSlots                            string
	idleSlot                             string
}

func (d *doctor) postgres(ctx context.Context) {
	cfg, err := sql.ConnConfig(d.config.PostgresURL, d.config.Schema, "doctor")
	if err != nil {
		d.add(sevFail, "postgres", "correct --postgres-url", "%v", err)
		return
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		d.add(sevFail, "postgres", "start Postgres, or correct --postgres-url", "%v", oneLine(err))
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	f, err := readFacts(ctx, conn)
	if err != nil {
		d.add(sevFail, "postgres", "", "%v", oneLine(err))
		return
	}
	d.add(sevOK, "postgres", "", "version %d, reachable", f.version/10000)
	if f.version < 140000 {
		d.add(sevFail, "postgres version", "use Postgres 14 or later", "version %d lacks idle_session_timeout, on which the locks rest", f.version/10000)
	}
	if f.recovery {
		d.add(sevFail, "primary", "point --postgres-url at the primary", "this server is a standby")
	}
	d.schema(ctx, conn)
	d.stream(f)
	d.retention(f)
	d.slot(ctx, conn)
}

func readFacts(ctx context.Context, conn *pgx.Conn) (f facts, err error) {
	var sync, idle *string
	err = conn.QueryRow(ctx, sql.DoctorFacts()).Scan(&f.version, &f.walLevel, &f.maxSlots, &f.slots, &f.maxSenders, &f.senders,
		&f.keepMB, &f.replication, &f.recovery, &sync, &idle)
	if sync != nil {
		f.syncSlots = *sync
	}
	if idle != nil {
		f.idleSlot = *idle
	}
	return f, err
}

func (d *doctor) schema(ctx context.Context, conn *pgx.Conn) {
	if err := sql.CheckSchema(ctx, conn); err != nil {
		d.add(sevFail, "schema", "posthaste migrate", "%v", err)
		return
	}
	d.add(sevOK, "schema", "", "migrated")
	var names []string
	rows, err := conn.Query(ctx, "SELECT name FROM relay_state")
	if err == nil {
		names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err == nil && len(names) > 0 && names[0] != d.config.RelayName {
		d.add(sevFail, "relay name", "use --relay-name="+names[0], "the table belongs to relay %q", names[0])
	}
	if st, err := sql.ReadState(ctx, conn, d.config.RelayName); err == nil {
		d.desired = st.Desired
		d.add(sevOK, "desired mode", "", "%s", st.Desired)
	}
	var published, mayCreate bool
	if err := conn.QueryRow(ctx, sql.DoctorPublication(), publication).Scan(&published, &mayCreate); err != nil {
		d.add(sevFail, "publication", "", "%v", err)
		return
	}
	if published {
		d.add(sevOK, "publication", "", "%s has the outbox table", publication)
	} else {
		d.add(sevWarn, "publication", "the relay makes it again if it owns the table; else: CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert')",
			"%s is missing or lacks the outbox table: events are swept meanwhile", publication)
	}
	if !mayCreate {
		d.add(sevWarn, "history partitions", "GRANT CREATE ON SCHEMA "+d.config.Schema+" to the relay's role, and make it owner of outbox_history",
			"this role may not create tables: history goes to the default partition")
	}
}

// stream checks what only the stream needs: fatal when the desired mode wants it.
func (d *doctor) stream(f facts) {
	severity := sevFail
	if d.desired == outbox.ModePoll {
		severity = sevWarn
	}
	if f.walLevel != "logical" {
		d.add(severity, "wal_level", "ALTER SYSTEM SET wal_level = logical, and restart Postgres; or posthaste mode poll", "wal_level is %s; the stream needs logical", f.walLevel)
	} else {
		d.add(sevOK, "wal_level", "", "logical")
	}
	if !f.replication {
		d.add(severity, "replication right", "ALTER ROLE … REPLICATION; or posthaste mode poll", "this role may not use replication slots")
	} else {
		d.add(sevOK, "replication right", "", "granted")
	}
	if f.slots >= f.maxSlots {
		d.add(sevWarn, "max_replication_slots", "raise max_replication_slots, or drop slots nobody uses", "%d of %d slots are in use", f.slots, f.maxSlots)
	}
	if f.senders >= f.maxSenders {
		d.add(sevWarn, "max_wal_senders", "raise max_wal_senders", "%d of %d walsenders are in use", f.senders, f.maxSenders)
	}
	if f.syncSlots != "" {
		d.add(sevWarn, "synchronized slots", "watch the standbys named there", "synchronized_standby_slots = %s: a dead standby in it stops the stream (the sweep takes over)", f.syncSlots)
	}
	if f.idleSlot != "" && f.idleSlot != "0" {
		d.add(sevWarn, "idle slot timeout", "set it above the longest time a relay may be down", "idle_replication_slot_timeout = %s s: a slot idle for longer is invalidated (nothing is lost, the sweep takes over)", f.idleSlot)
	}
}

// retention checks what bounds the WAL while no relay runs.
func (d *doctor) retention(f facts) {
	const mend = "ALTER SYSTEM SET max_slot_wal_keep_size to at least twice --wal-budget, and below the free disk space"
	switch keep := f.keepMB << 20; {
	case f.keepMB < 0:
		d.add(sevWarn, "max_slot_wal_keep_size", mend, "unlimited: while no relay runs, nothing keeps the slot from filling the disk")
	case keep < 2*d.config.WALBudget:
		d.add(sevWarn, "max_slot_wal_keep_size", mend, "%s is not well above the WAL budget of %s", humanize.IBytes(uint64(keep)), humanize.IBytes(uint64(d.config.WALBudget)))
	default:
		d.add(sevOK, "max_slot_wal_keep_size", "", "%s, above the WAL budget of %s", humanize.IBytes(uint64(keep)), humanize.IBytes(uint64(d.config.WALBudget)))
	}
}

func (d *doctor) slot(ctx context.Context, conn *pgx.Conn) {
	var plugin, status string
	var database *string
	var retained int64
	err := conn.QueryRow(ctx, sql.DoctorSlot(), d.config.Slot).Scan(&plugin, &database, &status, &retained)
	switch {
	case err != nil:
		d.add(sevOK, "slot", "", "%s does not exist yet; the relay makes it", d.config.Slot)
	case status == "lost":
		d.add(sevWarn, "slot", "nothing to do: the relay drops it and makes a new one", "%s is invalidated", d.config.Slot)
	case plugin != "pgoutput" || database == nil || *database != conn.Config().Database && conn.Config().Database != "":
		d.add(sevFail, "slot", "use another --relay-name, or drop that slot", "%s belongs to something else (plugin %s)", d.config.Slot, plugin)
	case retained > d.config.WALBudget:
		d.add(sevWarn, "slot", "start the relay: it acts on its budget", "%s holds %s of WAL, more than the budget", d.config.Slot, humanize.IBytes(uint64(retained)))
	default:
		d.add(sevOK, "slot", "", "%s holds %s of WAL", d.config.Slot, humanize.IBytes(uint64(max(retained, 0))))
	}
}

func (d *doctor) redis(ctx context.Context) {
	client, err := sink.NewClient(d.config.RedisURL)
	if err != nil {
		d.add(sevFail, "redis", "correct --redis-url", "%v", err)
		return
	}
	defer client.Close()
	s := sink.New(sink.Options{Client: client, Durability: d.config.Durability})
	if err := s.Ready(ctx); err != nil {
		d.add(sevFail, "redis", "", "%v", err)
		return
	}
	info, err := client.InfoMap(ctx, "server", "memory", "persistence").Result()
	if err != nil {
		d.add(sevFail, "redis", "", "%v", err)
		return
	}
	d.add(sevOK, "redis", "", "version %s, reachable and writable, durability %s", info["Server"]["redis_version"], d.config.Durability)
	d.redisMemory(info["Memory"])
	if info["Persistence"]["aof_enabled"] != "1" {
		d.add(sevWarn, "redis persistence", "set appendonly yes", "no append-only file: a restart of Redis loses what was published since its last snapshot")
	} else {
		d.add(sevOK, "redis persistence", "", "append-only file, fsync %s", appendfsync(ctx, client))
	}
}

func appendfsync(ctx context.Context, client *redis.Client) string {
	m, err := client.ConfigGet(ctx, "appendfsync").Result()
	if err != nil || m["appendfsync"] == "" {
		return "unknown"
	}
	return m["appendfsync"]
}

func (d *doctor) redisMemory(memory map[string]string) {
	if policy := memory["maxmemory_policy"]; policy != "noeviction" && policy != "" {
		d.add(sevWarn, "redis eviction", "set maxmemory-policy noeviction", "maxmemory-policy is %s: streams, gates and idempotency keys may vanish", policy)
	} else {
		d.add(sevOK, "redis eviction", "", "noeviction")
	}
	limit, _ := strconv.ParseInt(strings.TrimSpace(memory["maxmemory"]), 10, 64)
	// 374 bytes an entry with a payload of 200 bytes, measured on Redis 7.0.
	need := d.config.StreamMaxlen * 374
	if limit > 0 && d.config.StreamMaxlen > 0 && limit < need {
		d.add(sevWarn, "redis memory", "raise maxmemory, or lower --stream-maxlen", "maxmemory %s is less than one stream of %s entries with 200-byte payloads takes (%s)",
			humanize.IBytes(uint64(limit)), humanize.Comma(d.config.StreamMaxlen), humanize.IBytes(uint64(need)))
	}
}
