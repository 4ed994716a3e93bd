package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/bridge"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

// Severities of a finding.
const (
	SeverityOK   = "ok"
	SeverityWarn = "warn"
	SeverityFail = "fail"
)

// Finding is the result of one check.
type Finding struct {
	Check    string `json:"check"`
	Severity string `json:"severity"`
	Detail   string `json:"detail"`
	// Remedy describes what to do; empty if all is well.
	Remedy string `json:"remedy,omitempty"`
}

// DoctorOptions are the servers that the doctor checks, and the settings it compares them with.
type DoctorOptions struct {
	PostgresURL string
	// Redis and Guard are the connections to Redis and to the guard's own Redis. Redis is nil if its URL is invalid,
	// Guard if the guard uses Redis.
	Redis, Guard *redis.UniversalOptions
	// NATS, if not nil, checks servers of NATS, which events are published to instead.
	NATS            func(ctx context.Context) error
	Schema          string
	RelayName, Slot string
	Publication     string
	// WALBudget is in bytes, StreamMaxlen in entries. History is how long delivered events are kept.
	WALBudget    int64
	StreamMaxlen int64
	History      time.Duration
	Durability   sink.Durability
	// SharedStreams reports whether other databases may publish to the same streams.
	SharedStreams bool
	// Restore is how far back the relay restores what Redis loses; 0: not at all.
	Restore time.Duration
	// WriterOnly: PostgresURL belongs to a process that only writes, like serve. The rights that a relay needs are
	// then not checked.
	WriterOnly bool
}

// Diagnosis has all findings.
type Diagnosis struct {
	// OK is false if the relay could not run safely in the desired mode.
	OK       bool      `json:"ok"`
	Findings []Finding `json:"findings"`
}

// Verdict is the diagnosis in one line, which names the failed checks.
func (d Diagnosis) Verdict() string {
	var failed []string
	warned := 0
	for _, f := range d.Findings {
		switch f.Severity {
		case SeverityFail:
			failed = append(failed, f.Check)
		case SeverityWarn:
			warned++
		}
	}
	switch warnings := CountOf(int64(warned), "warning"); {
	case len(failed) > 0:
		return fmt.Sprintf("%s, %s: the relay cannot run safely before this is fixed: %s",
			CountOf(int64(len(failed)), "problem"), warnings, strings.Join(failed, ", "))
	case warned > 0:
		return "no problems, " + warnings + ": the relay can run"
	}
	return "all is well"
}

// Diagnose checks everything the relay needs. It makes its own connections, changes nothing, and always returns a
// diagnosis: an unreachable server is a finding. ctx bounds its duration.
func Diagnose(ctx context.Context, o DoctorOptions) Diagnosis {
	d := &doctor{config: o, desired: outbox.ModeAuto}
	d.postgres(ctx)
	if o.NATS != nil {
		d.nats(ctx)
	} else {
		d.redis(ctx)
	}
	failed := slices.ContainsFunc(d.findings, func(f Finding) bool { return f.Severity == SeverityFail })
	return Diagnosis{OK: !failed, Findings: d.findings}
}

// half returns a context that ends after half of ctx's remaining time, so that one server that hangs leaves time to
// check the other.
func half(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(end)/2)
}

// mayRead is the remedy if the role may not read posthaste's tables.
const mayRead = "let this role read posthaste's tables (scripts/roles.sql)"

type doctor struct {
	config   DoctorOptions
	desired  outbox.Mode
	findings []Finding
	// names are the streams in Postgres, and source its identity; nil if it is unknown.
	names  []string
	source uuid.UUID
	// shop reports whether Postgres has the tables of the shop, credits whether the ledger has entries.
	shop, credits bool
}

func (d *doctor) add(severity, check, remedy, format string, args ...any) {
	d.findings = append(d.findings,
		Finding{Check: check, Severity: severity, Detail: fmt.Sprintf(format, args...), Remedy: remedy})
}

func (d *doctor) ok(check, format string, args ...any) { d.add(SeverityOK, check, "", format, args...) }

func (d *doctor) warn(check, remedy, format string, args ...any) {
	d.add(SeverityWarn, check, remedy, format, args...)
}

func (d *doctor) fail(check, remedy, format string, args ...any) {
	d.add(SeverityFail, check, remedy, format, args...)
}

// facts are the server's properties, read by one query.
type facts struct {
	version                              int
	walLevel                             string
	maxSlots, slots, maxSenders, senders int
	keepMB                               int64
	replication, recovery                bool
	syncSlots                            string
	idleSlot                             string
	encoding                             string
	readOnly                             bool
}

func (d *doctor) postgres(whole context.Context) {
	ctx, cancel := half(whole)
	defer cancel()
	cfg, err := sql.ConnConfig(d.config.PostgresURL, d.config.Schema, "doctor")
	if err != nil {
		d.fail("postgres", "correct --postgres-url", "%v", err)
		return
	}
	cfg.RuntimeParams["lock_timeout"] = strconv.FormatInt(lockTimeout.Milliseconds(), 10)
	continues := cfg.OnPgError
	cfg.OnPgError = func(c *pgconn.PgConn, err *pgconn.PgError) bool {
		return continues(c, err) && err.Code != pgerrcode.LockNotAvailable // see unlessClosed
	}
	conn, err := sql.Connect(ctx, cfg)
	if err != nil {
		problem, remedy := sql.Explain(err)
		if problem == "" { // such as a file of the password
			problem, remedy = OneLine(err), "correct --postgres-url"
		}
		d.fail("postgres", remedy, "%s", problem)
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	f, err := readFacts(ctx, conn, d.config.Slot)
	if err != nil {
		d.fail("postgres", "retry; if it persists, see the log of Postgres", "%v", OneLine(err))
		return
	}
	d.ok("postgres", "version %d, reachable", f.version/10000)
	d.transport(ctx, conn)
	pooling, err := sql.PoolingOf(ctx, conn, cfg)
	if f.version < 140000 {
		d.fail("postgres version", "use Postgres 14 or later",
			"version %d lacks idle_session_timeout, on which the locks rest", f.version/10000)
	}
	if f.recovery {
		d.fail("primary", "point --postgres-url at the primary", "this server is a standby")
	}
	if f.encoding != "UTF8" {
		d.warn("encoding", "CREATE DATABASE ... ENCODING 'UTF8', and move the tables there",
			"the database's encoding is %s: an event with text that UTF-8 cannot represent cannot be published",
			f.encoding)
	}
	if f.readOnly {
		d.fail("read only", "ALTER SYSTEM, DATABASE or ROLE … RESET default_transaction_read_only",
			"default_transaction_read_only is on: Postgres refuses every write")
	}
	d.commits(ctx, conn)
	migrated := false
	checks := []func(){
		func() { migrated = d.schema(ctx, conn) },
		func() { d.pooler(pooling, err) },
		func() { d.stream(f) },
		func() {
			if !d.config.WriterOnly && !f.recovery {
				d.refusals(ctx, conn)
			}
		},
		func() { d.retention(f) },
		func() { d.slot(ctx, conn) },
	}
	tables := []func(){
		func() { d.leader(ctx, conn) },
		func() { d.log(ctx, conn) },
		func() { d.capacity(ctx, conn, f) },
		func() { d.shop, _ = sql.HasLine(ctx, conn, sql.LineShop) },
		func() { d.ledger(ctx, conn) },
		func() { d.bridges(ctx, conn) },
	}
	answered := d.unlessClosed(conn, checks) && (!migrated || d.unlessClosed(conn, tables))
	d.locks(whole, conn, cfg, answered)
}

// bridges names the bridges that do not copy the rows of their tables.
func (d *doctor) bridges(ctx context.Context, conn *pgx.Conn) {
	list, err := bridge.List(ctx, conn)
	if err != nil {
		d.warn("bridge", "let this role read pg_catalog", "%v", OneLine(err))
	}
	for _, b := range list {
		if b.Fault != "" {
			d.fail("bridge", "correct it, or: posthaste bridge drop --table="+cmp.Or(b.Now, b.Table)+
				", then posthaste bridge create", "the rows of %s are not copied: %s", b.Table, b.Fault)
		} else {
			d.ok("bridge", "each row inserted into %s is copied", b.Now)
		}
	}
}

// pooler reports what a pooler between this process and Postgres permits. A process that only writes works with any
// that permits transactions.
func (d *doctor) pooler(pooling sql.Pooling, err error) {
	const check, direct = "pooler", "give the relay a direct connection"
	found := fmt.Sprintf("a pooler in %s mode is between this process and Postgres", pooling)
	switch {
	case err != nil:
		d.warn(check, "retry, or give the pooler more connections",
			"a pooler is between this process and Postgres, and its mode cannot be found out: %v", OneLine(err))
	case pooling == sql.Unpooled:
	case pooling == sql.StatementPooling:
		severity := SeverityFail
		if d.config.WriterOnly { // most of its work is single statements
			severity = SeverityWarn
		}
		d.add(severity, check, sql.StatementRemedy, "%s, and refuses transactions", found)
	case d.config.WriterOnly:
		d.ok(check, "%s", found)
	case pooling == sql.TransactionPooling:
		d.fail(check, direct+", or the pooler's session mode for mode poll",
			"%s: serve and commands work, a relay does not", found)
	case d.desired == outbox.ModePoll:
		d.ok(check, "%s: mode poll works, cdc needs a direct connection", found)
	default:
		d.fail(check, direct+", or: posthaste mode poll", "%s: cdc needs a direct connection", found)
	}
}

// leader names a session that holds the leader's lock but does not belong to a relay.
func (d *doctor) leader(ctx context.Context, conn *pgx.Conn) {
	s, err := sql.LeaderSession(ctx, conn)
	if err != nil {
		d.warn("leader", "let this role read pg_locks", "%v", OneLine(err))
	} else if s.PID != 0 && !s.Relay {
		d.fail("leader", fmt.Sprintf("SELECT pg_catalog.pg_terminate_backend(%d)", s.PID),
			"no relay can lead: the leader's lock is held by %s, which is no relay", s)
	}
}

func readFacts(ctx context.Context, conn *pgx.Conn, slot string) (f facts, err error) {
	err = conn.QueryRow(ctx, query("doctor_facts")).Scan(&f.version, &f.walLevel, &f.maxSlots, &f.maxSenders, &f.keepMB,
		&f.replication, &f.recovery, &f.syncSlots, &f.idleSlot, &f.encoding, &f.readOnly)
	if err != nil {
		return f, err
	}
	if err = conn.QueryRow(ctx, query("doctor_used"), slot).Scan(&f.slots, &f.senders); sql.Withheld(err) {
		err = nil
	}
	return f, err
}

func (d *doctor) schema(ctx context.Context, conn *pgx.Conn) (migrated bool) {
	if err := sql.CheckSchema(ctx, conn); err != nil {
		remedy := mayRead
		switch {
		case errors.Is(err, sql.ErrSchemaMissing):
			remedy = "posthaste migrate; or correct --schema, which is " + d.config.Schema
		case errors.Is(err, sql.ErrSchemaNewer):
			remedy = "use the version that migrated it, or a later one"
		}
		d.fail("schema", remedy, "%v", OneLine(err))
		return false
	}
	d.ok("schema", "migrated")
	var names []string
	rows, err := conn.Query(ctx, "SELECT name FROM relay_state")
	if err == nil {
		names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err == nil && len(names) > 0 && names[0] != d.config.RelayName {
		d.fail("relay name", "use --relay-name="+names[0], "the table belongs to relay %q", names[0])
	}
	if err := sql.CheckRelayName(ctx, conn, d.config.RelayName); err != nil {
		d.fail("relay name", "use another --relay-name", "%v", OneLine(err))
	}
	if st, err := sql.ReadState(ctx, conn, d.config.RelayName); err == nil {
		d.desired, d.source = st.Desired, st.Owner.Source
		d.ok("desired mode", "%s", st.Desired)
	}
	if !d.config.WriterOnly {
		d.restores()
	}
	d.rights(ctx, conn)
	return true
}

// restores reports what could not be restored if Redis lost it.
func (d *doctor) restores() {
	switch {
	case d.config.History == 0:
		d.warn("history", "set --history to the time within which a loss is noticed and dealt with",
			"off: events that Redis loses after they were settled can be neither counted nor restored, and what "+
				"Postgres loses in a failover cannot be named")
	case d.config.Restore == 0:
		d.warn("restore", "set --restore, to 1h for example",
			"off: events that Redis loses after they were settled are counted, and an operator must replay them, "+
				"after newer ones")
	}
}

// rights reports the rights that the role lacks. The owner of the tables has all but the last.
func (d *doctor) rights(ctx context.Context, conn *pgx.Conn) {
	var lacks, hiding, creators string
	var published, publication, statistics bool
	err := conn.QueryRow(ctx, query("doctor_rights")).Scan(&lacks, &publication, &statistics, &hiding)
	if err == nil {
		err = conn.QueryRow(ctx, query("doctor_publication"), d.config.Publication).Scan(&published)
	}
	if err == nil {
		err = conn.QueryRow(ctx, query("doctor_creators")).Scan(&creators)
	}
	if err != nil {
		d.fail("rights", "run it as the relay's role", "cannot be read: %v", OneLine(err))
		return
	}
	if d.config.WriterOnly {
		lacks, publication, statistics = "", true, true // these concern the relay's role
	}
	if lacks != "" {
		d.fail("table rights", "run the relay as the owner of the tables, or grant them to this role",
			"this role lacks %s", lacks)
	}
	if creators != "" {
		d.fail("schema rights",
			"REVOKE CREATE ON SCHEMA "+d.config.Schema+" FROM "+creators+"; or a schema of its own (--schema)",
			"%s may create in schema %s: functions made there could be called with the relay's rights",
			creators, d.config.Schema)
	}
	if hiding != "" {
		d.fail("row security", "ALTER TABLE … DISABLE ROW LEVEL SECURITY, or give this role BYPASSRLS",
			"row security hides rows of %s from this role; the relay refuses to run like that", hiding)
	}
	switch {
	case published && publication:
		d.ok("publication", "%s has the outbox table", d.config.Publication)
	case published:
		d.warn("publication", "GRANT CREATE ON DATABASE to the relay's role, and make it owner of outbox",
			"%s has the outbox table; if it is dropped, this role cannot create it again", d.config.Publication)
	case publication:
		d.warn("publication", "nothing to do: the relay creates it again",
			"%s is missing or lacks the outbox table: the relay polls until it is there", d.config.Publication)
	default:
		d.warn("publication", "CREATE PUBLICATION "+d.config.Publication+
			" FOR TABLE outbox WITH (publish = 'insert'), as the owner of outbox",
			"%s is missing or lacks the outbox table: the relay polls until it is there, and this role cannot "+
				"create it", d.config.Publication)
	}
	if !statistics {
		d.warn("statistics right", "GRANT pg_read_all_stats to the relay's role",
			"this role cannot see which transaction of another role holds back the WAL")
	}
}

// stream checks what only streaming needs. Its findings are failures if the desired mode is cdc or auto.
func (d *doctor) stream(f facts) {
	severity := SeverityFail
	if d.desired == outbox.ModePoll {
		severity = SeverityWarn
	}
	if f.walLevel != "logical" {
		d.add(severity, "wal_level",
			"ALTER SYSTEM SET wal_level = logical, and restart Postgres; or posthaste mode poll",
			"wal_level is %s; the stream needs logical", f.walLevel)
	} else {
		d.ok("wal_level", "logical")
	}
	switch {
	case f.replication:
		d.ok("replication right", "granted")
	case !d.config.WriterOnly:
		d.add(severity, "replication right", "ALTER ROLE … REPLICATION; or posthaste mode poll",
			"this role may not use replication slots")
	}
	if f.slots >= f.maxSlots {
		d.add(severity, "max_replication_slots", "drop a slot that is not used (SELECT slot_name FROM "+
			"pg_replication_slots WHERE NOT active), or raise max_replication_slots, and restart Postgres",
			"no slot is free for the relay: others use %d of %d", f.slots, f.maxSlots)
	}
	if f.senders >= f.maxSenders {
		d.add(severity, "max_wal_senders", "raise max_wal_senders, and restart Postgres",
			"no walsender is free for the relay: others use %d of %d", f.senders, f.maxSenders)
	}
	if f.syncSlots != "" {
		d.warn("synchronized slots", "monitor the standbys named there",
			"synchronized_standby_slots = %s: a dead standby in it stops the stream (the relay polls)", f.syncSlots)
	}
	if f.idleSlot != "" && f.idleSlot != "0" {
		d.warn("idle slot timeout", "set it above the longest time a relay may be down",
			"idle_replication_slot_timeout = %s s: a slot idle for longer is invalidated "+
				"(nothing is lost, the relay polls)", f.idleSlot)
	}
}

// retention checks the bound of the WAL while no relay runs.
func (d *doctor) retention(f facts) {
	const remedy = "ALTER SYSTEM SET max_slot_wal_keep_size to at least twice --wal-budget, " +
		"and below the free disk space"
	switch keep := f.keepMB << 20; {
	case f.keepMB < 0:
		d.warn("max_slot_wal_keep_size", remedy,
			"unlimited: while no relay runs, nothing keeps the slot from filling the disk")
	case keep < 2*d.config.WALBudget:
		d.warn("max_slot_wal_keep_size", remedy,
			"%s is not well above the WAL budget of %s", Size(keep), Size(d.config.WALBudget))
	default:
		d.ok("max_slot_wal_keep_size", "%s, above the WAL budget of %s", Size(keep), Size(d.config.WALBudget))
	}
}

func (d *doctor) slot(ctx context.Context, conn *pgx.Conn) {
	var plugin, status string
	var database *string
	var retained int64
	err := conn.QueryRow(ctx, query("doctor_slot"), d.config.Slot).Scan(&plugin, &database, &status, &retained)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		d.ok("slot", "%s does not exist yet; the relay creates it", d.config.Slot)
	case sql.Withheld(err) && !d.config.WriterOnly:
		// refusals has reported it
	case err != nil:
		d.warn("slot", "ask the primary", "cannot be read: %v", OneLine(err))
	case status == "lost":
		d.warn("slot", "nothing to do: the relay drops it and creates a new one", "%s is invalidated", d.config.Slot)
	case plugin != "pgoutput" || database == nil || *database != conn.Config().Database && conn.Config().Database != "":
		d.fail("slot", "use another --relay-name, or drop that slot",
			"%s belongs to something else (plugin %s)", d.config.Slot, plugin)
	case muchWAL(retained, d.config.WALBudget):
		d.warn("slot", "start the relay: it acts on its budget", "%s holds %s of WAL; the budget is %s",
			d.config.Slot, Size(retained), Size(d.config.WALBudget))
	default:
		d.ok("slot", "%s holds %s of WAL", d.config.Slot, Size(retained))
	}
}
