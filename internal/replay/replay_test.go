package replay

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/lab/testenv/commandline"
	"posthaste/sink"
	"posthaste/sql"
)

var must = testenv.Must

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// Of two replays that begin at once, the second uses the time range that the first has recorded, not its own "an hour
// ago": events between the two times would be in neither.
func TestReplayBegunByAnotherMeanwhile(t *testing.T) {
	t.Parallel()
	db, redis := testenv.Postgres(t), testenv.Redis(t)
	db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 'o-' || g, 'order.changed', '{}' FROM generate_series(1, 5) g`)
	db.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode)
		SELECT -1, 1, pg_current_snapshot(), high, now() - interval '1 hour', 'cdc' FROM outbox_high`)
	var runs []*replaying
	for range 2 {
		r := &replaying{
			options: Options{Since: "2h", Rate: "0"},
			config: commandline.Config(t, "--postgres-url="+db.URL, "--redis-url="+redis.URL(),
				"--relay-name="+db.Relay),
			io: cli.IO{Stdout: io.Discard, Stderr: io.Discard},
		}
		t.Cleanup(r.close)
		must(t, errors.Join(r.parse(), r.open(t.Context())))
		if note, err := r.find(t.Context()); err != nil || note != nil {
			t.Fatalf("found %+v, %v", note, err)
		}
		runs = append(runs, r)
	}
	for i, r := range runs {
		note, err := r.begin(t.Context())
		if err != nil || note == nil {
			t.Fatal(note, err)
		}
		if !r.sel.Since.Equal(note.Since) || !r.sel.Until.Equal(note.Until) {
			t.Errorf("run %d replays %s to %s, noted is %s to %s", i, r.sel.Since, r.sel.Until, note.Since, note.Until)
		}
	}
}

// A replay notes a loss as repaired if it has published every event. If the note fails, the same command writes it when
// it runs again.
func TestALossIsBroughtBack(t *testing.T) {
	t.Parallel()
	const refuse = `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE insufficient_privilege; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox_reconcile EXECUTE FUNCTION refuse()`
	for name, c := range map[string]struct {
		before, between string
		total           int64 // is added to that of the selection
		errs            [2]bool
		lacks           int
	}{
		"at once":                    {"SELECT 1", "SELECT 1", 0, [2]bool{false, false}, 0},
		"after a failure":            {refuse, "DROP TRIGGER refuse ON outbox_reconcile", 0, [2]bool{true, false}, 0},
		"some have left the history": {"SELECT 1", "SELECT 1", 1, [2]bool{true, false}, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, redis := testenv.Postgres(t), testenv.Redis(t)
			db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'order', 'o-' || g, 'order.changed', '{}' FROM generate_series(1, 5) g`)
			db.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode)
				SELECT -1, 1, pg_current_snapshot(), high, now() - interval '1 hour', 'cdc' FROM outbox_high`)
			db.Exec(t, `INSERT INTO outbox_reconcile
				(stream, noticed_at, recall, done_at, missing, first_at, last_at, told)
				VALUES ('outbox.order', now(), false, now(), 5, now() - interval '61 minutes',
					now() - interval '59 minutes', true)`)
			db.Exec(t, c.before)
			for i, failed := range c.errs {
				if i == 1 {
					db.Exec(t, c.between)
				}
				r := &replaying{
					options: Options{Since: "2h", Until: "1m", Rate: "0"},
					config: commandline.Config(t, "--postgres-url="+db.URL, "--redis-url="+redis.URL(),
						"--relay-name="+db.Relay),
					io: cli.IO{Stdout: io.Discard, Stderr: io.Discard},
				}
				t.Cleanup(r.close)
				must(t, errors.Join(r.parse(), r.open(t.Context())))
				if i == 0 && c.total > 0 { // as if a row had left since they were counted
					note, err := r.begin(t.Context())
					must(t, err)
					note.Total += c.total
					_, _, err = r.rest(t.Context(), note, false, r.now)
					testenv.Equal(t, "a failure of the first run", err != nil, failed)
					continue
				}
				if err := r.run(t.Context()); (err != nil) != failed {
					t.Errorf("run %d: %v", i, err)
				}
			}
			lacks := testenv.Value[int](t, db,
				"SELECT coalesce(sum(missing), 0)::int FROM outbox_reconcile WHERE replayed_at IS NULL")
			testenv.Equal(t, "missing events that status counts", lacks, c.lacks)
			testenv.Equal(t, "entries", redis.Client.XLen(t.Context(), "outbox.order").Val(), 5)
		})
	}
}

// Contradictory options are a usage error, before any connection.
func TestOptionsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	for want, o := range map[string]Options{
		"say what to replay":       {Rate: "0"},
		"--all selects everything": {Rate: "0", All: true, Since: "1h"},
		`--id "x" is not a UUID`:   {Rate: "0", ID: "x"},
		`--since "yesterday"`:      {Rate: "0", Since: "yesterday"},
		`--until "-1h"`:            {Rate: "0", Since: "2h", Until: "-1h"},
		`--rate "fast"`:            {Rate: "fast", All: true},
		"--to: want":               {Rate: "0", All: true, To: "a b"},
		"want a stream's name":     {Rate: "0", All: true, To: strings.Repeat("s", 201)},
		"--to outbox.order:gate":   {Rate: "0", All: true, To: "outbox.order:gate"},
		"--to dead.outbox.order:":  {Rate: "0", All: true, To: "dead.outbox.order"},
	} {
		var usage *cli.UsageError
		err := o.Run(t.Context(), app.Config{}, cli.IO{Stdout: io.Discard, Stderr: io.Discard})
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
}

// The same selection has the same name at any rate; another selection or database has another.
func TestNameIsTheQuestion(t *testing.T) {
	t.Parallel()
	name := func(database uuid.UUID, o Options) string {
		r := &replaying{options: o}
		must(t, r.parse())
		return r.name(database)
	}
	subject, empty := "o-1", ""
	one := uuid.New()
	same := name(one, Options{All: true, Rate: "0"})
	if got := name(one, Options{All: true, Rate: "5/s", JSON: true, Restart: true}); got != same {
		t.Error("how a replay runs changes its name")
	}
	seen := map[string]bool{same: true}
	for _, other := range []string{
		name(uuid.New(), Options{All: true, Rate: "0"}),
		name(one, Options{All: true, Rate: "0", To: "side"}), name(one, Options{All: true, Rate: "0", Type: "t"}),
		name(one, Options{All: true, Rate: "0", Stream: "s"}), name(one, Options{Since: "1h", Rate: "0"}),
		name(one, Options{Since: "1h", Until: "1m", Rate: "0"}), name(one, Options{Subject: &subject, Rate: "0"}),
		name(one, Options{Subject: &empty, Rate: "0"}), name(one, Options{ID: one.String(), Rate: "0"}),
	} {
		if seen[other] {
			t.Errorf("two questions have the name %s", other)
		}
		seen[other] = true
	}
}

// The command that repeats a finished replay has every option that selects events, and its rate.
func TestRestartIsNamed(t *testing.T) {
	t.Parallel()
	subject := "it's"
	for want, o := range map[string]Options{
		"to run it again, up to now: posthaste replay --all --restart": {All: true, Rate: "1000/s"},
		"to run it again, up to now: posthaste replay --since=24h --subject='it'\\''s' --type=t --stream=s --to=side " +
			"--rate=0 --restart": {Since: "24h", Subject: &subject, Type: "t", Stream: "s", To: "side", Rate: "0"},
		"to run it again: posthaste replay --until=1h --id=" + uuid.Nil.String() + " --json --restart": {
			Until: "1h", ID: uuid.Nil.String(), Rate: "1000/s", JSON: true,
		},
	} {
		var out, errOut strings.Builder
		r := &replaying{options: o, io: cli.IO{Stdout: &out, Stderr: &errOut}}
		must(t, r.finished(sink.ReplayNote{}))
		said := out.String()
		if o.JSON {
			said = errOut.String()
		}
		if !strings.HasSuffix(said, want+"\n") {
			t.Errorf("%q, want %q", said, want)
		}
	}
}

func TestPlaces(t *testing.T) {
	t.Parallel()
	entries := []sink.ReplayEntry{}
	for _, p := range []sql.Place{
		{Mark: 1, Part: 15, Seq: 9},
		{Mark: 10, Part: 2, Seq: 8},
		{Mark: 10, Part: 10, Seq: 1},
		{Mark: 10, Part: 10, Seq: 2},
	} {
		if back, err := parsePlace(place(p)); err != nil || back != p {
			t.Errorf("%+v is read as %+v, %v", p, back, err)
		}
		entries = append(entries, sink.ReplayEntry{Place: place(p)})
	}
	for done, want := range map[string]int{
		"": 4, entries[0].Place: 3, entries[2].Place: 1, entries[3].Place: 0,
	} {
		if rest, err := behind(entries, done); err != nil || len(rest) != want {
			t.Errorf("behind %q there are %d entries, %v; want %d", done, len(rest), err, want)
		}
	}
	for _, bad := range []string{"x", "1", "1.2", "1.2.3.4", "0.1.2", "1.99999.2", "1.-1.2", "1..2"} {
		if _, err := parsePlace(bad); err == nil || !strings.Contains(err.Error(), "--restart") {
			t.Errorf("%q is no place: %v", bad, err)
		}
	}
}

func TestFinalErrors(t *testing.T) {
	t.Parallel()
	for _, err := range []error{sink.ErrReplayGone, sink.ErrReplayMoved, sink.ErrReplayTaken, sql.ErrSchemaMissing} {
		if !final(err) {
			t.Errorf("%v is repeated", err)
		}
	}
	if final(io.ErrUnexpectedEOF) {
		t.Error("a lost connection is final")
	}
}
