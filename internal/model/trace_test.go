package model

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/failpoint"
	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// scene is a scenario with watched relays. Its plan is the transactions of the test, in order, and its failpoint that
// of the first relay. See run.play for the steps of its story.
type scene struct{ name, plan, failpoint, story string }

const frozen = "start, cdc, commit, frozen, start, leads, settled, wake, commit, settled"

var scenes = []scene{
	{
		"toggles and a kill", "A0 B1 A0 B1", "",
		"start, cdc, commit, settled, want poll, poll, commit, settled, commit, want auto, cdc, settled, " +
			"commit, kill, start, settled",
	},
	{
		"killed between publish and mark", "A0 A0", "kill after worker.deliver sink.delivery.Publish eval",
		"start, cdc, commit, died, start, cdc, commit, settled",
	},
	{"frozen before it moves the mark", "A0 A0", "stop before settler.move sql.marker.Move batch", frozen},
	{"frozen before it publishes", "A0 A0", "stop before worker.deliver sink.delivery.Publish eval", frozen},
	{
		"killed in a hand-over", "A0 B1 A0", "kill before leadership.endHandOver sql.Store.SettleAll batch",
		"commit, start, died, commit, start, cdc, commit, settled",
	},
	{
		"claims: one of two sweepers is killed with a claim", "A0 B1 A0 B1",
		"kill after attempt sink.delivery.Publish eval",
		"want poll, start, poll, start, commit, commit, died, settled, commit, settled, commit, settled",
	},
	{
		"claims: a sweeper freezes before it writes its mark", "A0 B1 A0 B1",
		"stop before claim.settle sql.Sweep.Settle batch",
		"want poll, start, poll, commit, frozen, start, leads, commit, settled, wake, commit, settled",
	},
}

// play takes the steps of the story. A relay that is killed, dies, freezes or wakes is the first, one that comes to
// lead the second.
func (r *run) play() {
	r.Helper()
	for step := range strings.SplitSeq(r.story, ", ") {
		switch step {
		case "start":
			r.relay()
		case "cdc", "poll":
			r.mode(step)
		case "want poll", "want auto":
			r.db.Exec(r.T, "UPDATE relay_state SET desired_mode = $1", strings.TrimPrefix(step, "want "))
		case "commit":
			r.commit()
		case "settled":
			r.settled()
		case "kill":
			r.kill(r.live[0])
		case "died":
			r.died(r.live[0])
		case "frozen":
			r.frozen(r.live[0])
		case "wake":
			r.says("before", "wake", 1)
			testenv.Must(r.T, r.live[0].Signal(syscall.SIGCONT))
		case "leads":
			r.leads(r.live[1])
		default:
			r.Fatalf("there is no step %q", step)
		}
	}
}

// A relay never reaches a failpoint at a step that does not exist any more.
func TestFailpointsAreSteps(t *testing.T) {
	t.Parallel()
	steps, err := os.ReadFile("../../cmd/posthaste/testdata/steps.txt")
	testenv.Must(t, err)
	for _, sc := range scenes {
		_, place, _ := strings.Cut(sc.failpoint, " ")
		if place != "" && !slices.Contains(strings.Split(string(steps), "\n"), place) {
			t.Errorf("%s: there is no step %q", sc.name, place)
		}
	}
}

// Relays in processes of their own take only steps that the machine, which is explored exhaustively, allows.
func TestRelaysDoWhatTheModelSays(t *testing.T) {
	t.Parallel()
	if !full {
		t.Log("only with POSTHASTE_TEST_FULL=1: it builds a program, and starts servers and relays")
		return
	}
	program := testenv.Program(t, "failpoints")
	for _, sc := range scenes {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			r := newRun(t, program, sc)
			r.play()
			c := r.record()
			if dir := os.Getenv("POSTHASTE_TEST_TRACES"); dir != "" { // keeps them as testdata
				text, err := json.Marshal(c)
				if err == nil {
					name := strings.NewReplacer(" ", "-", ":", "").Replace(sc.name) + ".json"
					err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
				}
				testenv.Must(t, err)
			}
			if refused := c.refused(t); refused != "" {
				t.Errorf("the machine does not allow this: %s", refused)
			}
		})
	}
}

// The machine allows the recorded steps of relays, and refuses those of relays without a safeguard. docs/proof.md
// describes how to record them again.
func TestWhatRelaysDidOnce(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"allowed", "refused"} {
		files, err := filepath.Glob("testdata/" + kind + "/*.json")
		if err != nil || len(files) == 0 {
			t.Fatalf("there is nothing of it, %v", err)
		}
		for _, name := range files {
			text, err := os.ReadFile(name)
			testenv.Must(t, err)
			var c recording
			testenv.Must(t, json.Unmarshal(text, &c))
			if refused := c.refused(t); (refused != "") != (kind == "refused") {
				t.Errorf("%s: %s", name, refused)
			}
		}
	}
}

// A recording that lacks a step does not match relays that took it.
func TestNoStepCanBeMissing(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/allowed/toggles-and-a-kill.json")
	testenv.Must(t, err)
	for _, step := range []string{
		" sql.Store.Adopt WITH was", " sink.Sink.Adopt ", "leadership.tryGates ", " sql.Sweep.Claim ",
		" sink.delivery.Publish ", " sql.Store.SettleAll ",
	} {
		var c recording
		testenv.Must(t, json.Unmarshal(text, &c))
		for _, moment := range []string{"before", "after"} {
			i := slices.IndexFunc(c.Events, func(e failpoint.Event) bool {
				return e.Moment == moment && strings.Contains(e.Step, step)
			})
			c.Events = slices.Delete(c.Events, i, i+1)
		}
		if c.refused(t) == "" {
			t.Errorf("nobody misses%s", step)
		}
	}
}

// run is a scene on real servers.
type run struct {
	*testing.T
	scene
	program, file string
	db            *testenv.Database
	redis         *testenv.RedisServer
	plan          plan
	base          int64     // the epoch before
	parts         [2]int    // of the table
	names         [2]string // an aggregate in each
	ids           []uuid.UUID
	procs         map[int]int // the relays' indexes, by pid
	live          []*local.Process
	output        *os.File // of the relays
}

func newRun(t *testing.T, program string, sc scene) *run {
	t.Helper()
	r := &run{
		T: t, scene: sc, program: program, db: testenv.NewServer(t).Database(t), redis: testenv.Redis(t),
		plan: parsePlan(sc.plan), procs: map[int]int{},
	}
	var err error
	r.output, err = os.Create(filepath.Join(t.TempDir(), "output"))
	testenv.Must(t, err)
	t.Cleanup(func() {
		r.end()
		_ = r.output.Close()
		if said, err := os.ReadFile(r.output.Name()); t.Failed() {
			t.Logf("%s, %v", said, err)
		}
	})
	n := 0
	for i := 0; n < 2; i++ {
		name := "a" + strconv.Itoa(i)
		part := testenv.Value[int](t, r.db, "SELECT (hashtextextended($1, 0) & 15::bigint)::integer", name)
		if n == 0 || part != r.parts[0] {
			r.names[n], r.parts[n] = name, part
			n++
		}
	}
	// Stream and slot exist before the recording starts.
	first := r.relay()
	r.insert(t.Context(), r.db.Pool, uuid.New(), r.names[0])
	r.mode("cdc")
	r.settled()
	testenv.Must(t, first.Signal(syscall.SIGTERM))
	<-first.Done()
	r.live = nil
	r.base = testenv.Value[int64](t, r.db, "SELECT epoch FROM relay_state")
	r.file = filepath.Join(t.TempDir(), "log")
	clear(r.procs)
	return r
}

// relay starts a relay. The first of the story has the failpoint.
func (r *run) relay() *local.Process {
	r.Helper()
	args := []string{
		"relay", "--postgres-url=" + r.db.URL, "--redis-url=" + r.redis.URL(), "--relay-name=" + r.db.Relay,
		"--admin-addr=127.0.0.1:0", "--sweep-workers=1", "--drain-timeout=3s", "--log-level=debug",
	}
	c := exec.Command(r.program, args...) //nolint:noctx // ended by the test
	c.Env = os.Environ()
	if r.file != "" {
		c.Env = append(c.Env, "POSTHASTE_FAILPOINT_LOG="+r.file)
	}
	if r.file != "" && len(r.live) == 0 && r.failpoint != "" {
		c.Env = append(c.Env, "POSTHASTE_FAILPOINT="+r.failpoint)
	}
	c.Stdout, c.Stderr = r.output, r.output
	p := testenv.Start(r.T, c)
	r.live = append(r.live, p)
	r.procs[p.PID()] = len(r.live)
	return p
}

// says appends a line of the test to the log.
func (r *run) says(moment, step string, values ...any) {
	line, err := json.Marshal(failpoint.Event{Moment: moment, Step: step, Values: values})
	testenv.Must(r, err)
	f, err := os.OpenFile(r.file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	testenv.Must(r, err)
	defer f.Close()
	_, err = f.Write(append(line, '\n'))
	testenv.Must(r, err)
}

type execer interface {
	QueryRow(ctx context.Context, stmt string, args ...any) pgx.Row
}

func (r *run) insert(ctx context.Context, db execer, id uuid.UUID, aggregate string) {
	r.Helper()
	const stmt = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) " +
		"VALUES ($1, 'order', $2, 'one', '{}') RETURNING seq"
	testenv.Must(r, db.QueryRow(ctx, stmt, id, aggregate).Scan(new(int64)))
}

// commit commits the next transaction of the plan.
func (r *run) commit() {
	r.Helper()
	k := slices.IndexFunc(r.plan.events, func(e event) bool { return int(e.of) == len(r.ids) })
	n := int(r.plan.events[k].tx)
	tx, err := r.db.Pool.Begin(r.Context())
	testenv.Must(r, err)
	r.says("before", "insert", n)
	for _, e := range r.plan.events {
		if int(e.tx) == n {
			id := uuid.New()
			r.ids = append(r.ids, id)
			r.insert(r.Context(), tx, id, r.names[e.part])
		}
	}
	r.says("after", "insert", n)
	r.says("before", "commit", n)
	testenv.Must(r, tx.Commit(r.Context()))
	r.says("after", "commit", n)
}

func (r *run) wait(what, query string) {
	r.Helper()
	testenv.Eventually(r.T, 3*time.Minute, func() error {
		var ok bool
		err := r.db.Pool.QueryRow(r.Context(), query).Scan(&ok)
		if err == nil && !ok {
			err = errors.New("not yet: " + what)
		}
		return err
	})
}

func (r *run) settled() {
	r.Helper()
	r.wait("all is settled", "SELECT count(*) = 0 FROM outbox_backlog")
}

func (r *run) mode(mode string) {
	r.Helper()
	r.wait(mode, "SELECT split_part(active_mode, '.', 1) = '"+mode+"' FROM relay_state")
}

// leads waits until a relay has adopted.
func (r *run) leads(c *local.Process) {
	r.Helper()
	testenv.Eventually(r.T, 3*time.Minute, func() error {
		for _, e := range r.events() {
			if e.PID == c.PID() && strings.Contains(e.Step, "leadership.record sql.Store.SetActive") {
				return nil
			}
		}
		return errors.New("the other one does not lead")
	})
}

func (r *run) kill(c *local.Process) {
	r.Helper()
	r.says("before", "kill", 1)
	_ = c.Stop(syscall.SIGKILL, time.Minute)
}

// died waits until a relay has reached its failpoint.
func (r *run) died(c *local.Process) {
	r.Helper()
	late := time.AfterFunc(3*time.Minute, func() { _ = c.Signal(syscall.SIGTERM) })
	<-c.Done()
	if !late.Stop() {
		r.Fatalf("the relay was not killed: %s", r.failpoint)
	}
	r.says("before", "kill", 1)
}

func (r *run) frozen(c *local.Process) {
	r.Helper()
	testenv.Eventually(r.T, 3*time.Minute, func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.PID()))
		if _, rest, _ := bytes.Cut(stat, []byte(") ")); err == nil && !bytes.HasPrefix(rest, []byte("T")) {
			err = errors.New("not frozen")
		}
		return err
	})
	r.says("before", "freeze", 1)
}

func (r *run) end() {
	r.Helper()
	for _, c := range r.live {
		_ = c.Stop(syscall.SIGKILL, time.Minute)
	}
}

func (r *run) events() (list []failpoint.Event) {
	text, err := os.ReadFile(r.file)
	testenv.Must(r, err)
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e failpoint.Event
		testenv.Must(r, json.Unmarshal(lines.Bytes(), &e))
		list = append(list, e)
	}
	return list
}

// row is an event's row in the table.
type row struct {
	Part     int
	XID, Seq int64
}

// notedMark is a row of the marks, of which the test keeps all.
type notedMark struct {
	Epoch         int64
	Part          int
	Settled, Pass string
	Mode          string
	High, Cursor  int64
}

// recording is the record of a run.
type recording struct {
	Plan   string
	Base   int64
	Parts  [2]int
	IDs    []uuid.UUID
	Relays map[int]int // the relays' indexes, by pid
	Rows   []row
	Marks  []notedMark
	Events []failpoint.Event
}

// looked are the steps that the machine has.
var looked = []string{
	" sql.Store.Adopt WITH was", " sink.Sink.Adopt ", "leadership.tryGates sql.Store.Gated", " sql.Sweep.Claim ",
	" sql.Sweep.Begin ", " sql.Sweep.Page ", " sql.Sweep.Settle ", " sql.Sweep.Drop ", " sink.delivery.Publish ",
	" sql.Store.BeginPass ", " sql.Store.SettleAll ", " sql.marker.Move ", " sql.marker.Look ",
	" sink.Sink.ForgetDoubt ",
}

// record ends a run and returns its recording.
func (r *run) record() *recording {
	r.Helper()
	r.end()
	c := &recording{Plan: r.scene.plan, Base: r.base, Parts: r.parts, IDs: r.ids, Relays: r.procs}
	for _, e := range r.events() {
		if e.PID == 0 || slices.ContainsFunc(looked, func(step string) bool { return strings.Contains(e.Step, step) }) {
			if strings.Contains(e.Step, " sql.Store.Adopt WITH was") { // its other lines have the place
				e.Values = e.Values[:min(3, len(e.Values))]
			}
			c.Events = append(c.Events, e)
		}
	}
	for _, id := range r.ids {
		var w row
		const query = "SELECT part, xid::text::bigint, seq FROM outbox_rows WHERE id = $1"
		testenv.Must(r, r.db.Pool.QueryRow(r.Context(), query, id).Scan(&w.Part, &w.XID, &w.Seq))
		c.Rows = append(c.Rows, w)
	}
	const marks = "SELECT epoch, part, coalesce(settled::text, ''), coalesce(pass::text, ''), coalesce(mode, ''), " +
		"coalesce(hi, 0), coalesce(cursor, 0) FROM outbox_mark ORDER BY id"
	rows, err := r.db.Pool.Query(r.Context(), marks)
	testenv.Must(r, err)
	var w notedMark
	_, err = pgx.ForEachRow(rows, []any{&w.Epoch, &w.Part, &w.Settled, &w.Pass, &w.Mode, &w.High, &w.Cursor},
		func() error {
			c.Marks = append(c.Marks, w)
			return nil
		})
	testenv.Must(r, err)
	return c
}

// reader converts a recording to operations.
type reader struct {
	*recording
	testing.TB
	used map[int]bool // marks whose operation is known
}

// refused checks a recording against the machine. It returns "" or what the machine does not allow.
func (c *recording) refused(tb testing.TB) string {
	tb.Helper()
	rd := &reader{c, tb, map[int]bool{}}
	w := newWatch(c.Plan)
	for i, e := range c.Events {
		if e.PID == 0 {
			w.ops = append(w.ops, rd.own(i)...)
			continue
		}
		if e.Moment == "before" {
			end := 1 + slices.IndexFunc(c.Events[i+1:], func(o failpoint.Event) bool {
				return o.PID == e.PID && o.Goroutine == e.Goroutine
			})
			if end > 0 {
				end += i + 1
			}
			if o := rd.op(i, end); o != nil {
				w.ops = append(w.ops, o)
			}
		}
	}
	what, most := w.accept()
	tb.Logf("%d operations, %d states at once", len(w.ops), most)
	if what == "" {
		return ""
	}
	for _, o := range w.ops {
		what += fmt.Sprintf("\n%d to %d: %s", o.begin, o.end, o.says)
	}
	return what
}

// own returns the operations of the test itself.
func (r *reader) own(i int) (ops []*op) {
	list := r.Events
	e := list[i]
	if e.Moment != "before" {
		return nil
	}
	n := int(number(e.Values[0]))
	if e.Step == "insert" || e.Step == "commit" {
		n++ // transactions count from 1
	}
	end := i + 2 + slices.IndexFunc(list[i+1:], func(o failpoint.Event) bool { return o.PID == 0 && o.Step == e.Step })
	do := func(end int, apply func(w *watch, s state) []state) {
		ops = append(ops, &op{says: fmt.Sprintf("the test: %s %d", e.Step, n), begin: i + 1, end: end, apply: apply})
	}
	step := func(format string) func(w *watch, s state) []state {
		return func(w *watch, s state) []state { return w.next(s, fmt.Sprintf(format, n)) }
	}
	switch e.Step {
	case "insert":
		do(end, func(w *watch, s state) (list []state) {
			for _, t := range step("transaction %d has its id")(w, s) {
				list = append(list, step("transaction %d writes its rows")(w, t)...)
			}
			return list
		})
	case "commit":
		do(end, step("transaction %d has its commit record"))
		do(end, step("transaction %d is visible"))
	case "kill", "wake":
		do(0, step("relay %d is killed"))
	case "freeze":
		do(0, step("relay %d loses its lock"))
	}
	return ops
}

func number(v any) float64 {
	n, _ := v.(float64)
	return n
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

// named returns the events in a list of ids in hex.
func (r *reader) named(ids string) (events []int8) {
	for ; len(ids) >= 32; ids = ids[32:] {
		for e, id := range r.IDs {
			if strings.ReplaceAll(id.String(), "-", "") == ids[:32] {
				events = append(events, int8(e))
			}
		}
	}
	return events
}

// holds returns the events that a mark holds, and all of its part.
func (r *reader) holds(part int, settled string, hi int64, pass string, high, cursor int64) (held, of set) {
	sees := func(text string, xid int64) bool {
		if text == "" {
			return false
		}
		s, err := outbox.ParseSnapshot(text)
		testenv.Must(r, err)
		return s.Sees(uint64(xid))
	}
	for e, row := range r.Rows {
		if part >= 0 && row.Part != part {
			continue
		}
		of = of.with(int8(e))
		if sees(settled, row.XID) && row.Seq <= hi || row.Seq <= cursor && row.Seq <= high && sees(pass, row.XID) {
			held = held.with(int8(e))
		}
	}
	return held, of
}

// taken returns a mark that an operation wrote. It returns each mark once.
func (r *reader) taken(is func(w *notedMark) bool) *notedMark {
	for i := range r.Marks {
		if w := &r.Marks[i]; !r.used[i] && is(w) {
			r.used[i] = true
			return w
		}
	}
	return nil
}

// op is a relay's request in line i, answered in line end, or 0 if it was not.
func (r *reader) op(i, end int) *op {
	list := r.Events
	e := list[i]
	relay, v := r.Relays[e.PID], e.Values
	who := fmt.Sprintf("relay %d ", relay)
	o := &op{says: fmt.Sprintf("relay %d: %s %.200v", relay, e.Step, v), begin: i + 1, end: end}
	var reply []any
	failed := false
	if end > 0 && len(list[end-1].Values) == 2 {
		reply, _ = list[end-1].Values[0].([]any)
		failed = text(list[end-1].Values[1]) != ""
	}
	o.says += fmt.Sprintf(" -> %v", reply)
	answer := ""
	if len(reply) > 0 {
		answer = text(reply[0])
	}
	is := func(step string) bool { return strings.Contains(e.Step, step) }
	if failed && is(" eval") && strings.Contains(text(list[end-1].Values[1]), "NOSCRIPT") {
		return nil
	}
	known := end > 0 && !failed
	switch {
	case is(" sql.Store.Adopt WITH was"):
		epoch := int64(number(v[2]))
		step := fmt.Sprintf(": epoch %d,", epoch-r.Base)
		o.apply = either(who, step)
		if slices.ContainsFunc(list[i:], func(n failpoint.Event) bool {
			return n.PID == e.PID && strings.Contains(n.Step, "sink.Sink.Adopt") && n.Moment == "before" &&
				text(n.Values[4]) == strconv.FormatInt(epoch, 10)
		}) {
			o.apply = func(w *watch, s state) []state { return w.next(s, who, step) }
		}
	case is(" sink.Sink.Adopt "):
		epoch, err := strconv.ParseInt(text(v[4]), 10, 64)
		testenv.Must(r, err)
		o.apply = func(w *watch, s state) (list []state) {
			if s.rd.gate.epoch == int8(epoch-r.Base) {
				list = append(list, s)
			} else if answer == "OK" || !known {
				list = slices.DeleteFunc(w.next(s, who+"raises the gate"), func(t state) bool {
					return t.rd.gate.epoch != int8(epoch-r.Base)
				})
			}
			if answer != "OK" {
				list = append(list, s)
			}
			return list
		}
	case is("leadership.tryGates sql.Store.Gated"):
		o.apply = func(w *watch, s state) []state { return w.next(s, who+"looks: missing") }
		if !known {
			o.apply = either(who + "looks: missing")
		}
	case is(" sql.Sweep.Claim "):
		return r.claim(i, o)
	case is(" sink.delivery.Publish "):
		lane := int8(streamLane)
		if text(v[6]) != "s" {
			lane = int8(slices.IndexFunc(r.Parts[:], func(p int) bool { return strconv.Itoa(p) == text(v[6]) }))
		}
		events := r.named(text(v[13]))
		if answer == "OK" {
			o.apply = publish(relay, lane, events, int(number(reply[1])-number(reply[2])), false)
		} else if known {
			o.apply = publish(relay, lane, events, 0, true)
		} else {
			o.apply = func(w *watch, s state) (list []state) {
				for fresh := range len(events) + 1 {
					list = append(list, publish(relay, lane, events, fresh, false)(w, s)...)
				}
				return append(list, s)
			}
		}
	case is(" sql.Sweep.Settle "):
		part, settled, hi := int(number(v[3])), text(v[5]), int64(number(v[6]))
		pass, high, cursor := text(v[7]), int64(number(v[8])), int64(number(v[9]))
		step := who + "has swept part " + strconv.Itoa(slices.Index(r.Parts[:], part))
		if pass != "" {
			step = who + "writes cursor"
		}
		held, of := r.holds(part, settled, hi, pass, high, cursor)
		o.apply = not(step)
		if r.taken(func(w *notedMark) bool {
			return w.Epoch == int64(number(v[1])) && w.Part == part && w.Settled == settled && w.High == hi &&
				w.Pass == pass && w.Cursor == cursor
		}) != nil {
			o.apply = marked(step, held, of)
		}
	case is(" sql.Store.BeginPass "):
		o.apply = func(_ *watch, s state) []state { return []state{s} }
		epoch := int64(number(v[1]))
		if w := r.taken(func(w *notedMark) bool { return w.Epoch == epoch && w.Settled == "" }); w != nil {
			seen, _ := r.holds(-1, w.Pass, 1<<62, "", 0, 0)
			o.apply = func(m *watch, s state) (list []state) {
				list = m.next(s, who+"writes a pass")
				if p := s.procs[relay-1]; p.pass == (bound{s.pg.snapshot(), s.pg.seq}) || p.cleared {
					list = append(list, s) // the same again
				}
				return slices.DeleteFunc(list, func(t state) bool {
					for e := range r.Rows {
						xid, _, there := m.row(&t.pg, int8(e))
						if there && seen.has(int8(e)) != t.pg.snapshot().sees(xid) || !there && seen.has(int8(e)) {
							return true
						}
					}
					return false
				})
			}
		}
	case is(" sql.Store.SettleAll "), is(" sql.marker.Move "):
		settled, hi, mode := text(v[3]), int64(number(v[4])), text(v[5])
		step := who + "moves the mark"
		if mode == "poll" {
			step = who + "makes one mark of the pass"
		}
		held, of := r.holds(-1, settled, hi, "", 0, 0)
		o.apply = not(step)
		if r.taken(func(w *notedMark) bool {
			return w.Epoch == int64(number(v[1])) && w.Part == -1 && w.Settled == settled && w.Mode == mode
		}) != nil {
			o.apply = marked(step, held, of)
		}
	case is(" sql.marker.Look "):
		o.apply = either(who + "looks: owed")
	case is(" sink.Sink.ForgetDoubt "):
		o.apply = func(w *watch, s state) []state {
			list := w.next(s, who+"forgets the doubt")
			if s.rd.gate.doubt == 0 || answer != "OK" {
				list = append(list, s)
			}
			return list
		}
	default:
		return nil
	}
	return o
}

// claim is the claim of a part with the snapshot of its pass, which the next statement takes.
func (r *reader) claim(i int, o *op) *op {
	list := r.Events
	e := list[i]
	var own []int
	for k := i + 1; k < len(list) && len(own) < 4; k++ {
		if list[k].PID == e.PID && list[k].Goroutine == e.Goroutine {
			own = append(own, k)
		}
	}
	begun := func(n int, step string) bool { return len(own) > n && strings.Contains(list[own[n]].Step, step) }
	if !begun(1, " sql.Sweep.Begin ") && !begun(1, " sql.Sweep.Page ") || begun(3, " sql.Sweep.Drop ") {
		return nil // another relay has it, or there is nothing to do
	}
	part := slices.Index(r.Parts[:], int(number(list[own[1]].Values[0])))
	step := fmt.Sprintf("relay %d claims part %d,", r.Relays[e.PID], part)
	o.end = 0
	o.apply = either(step)
	if len(own) > 3 {
		o.end = own[2] + 1
		o.apply = func(w *watch, s state) []state { return w.next(s, step) }
	}
	return o
}
