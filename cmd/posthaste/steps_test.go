package main

import (
	"bytes"
	"context"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// stepsFile lists every step with an effect outside the process, as recorded. POSTHASTE_TEST_STEPS=write rewrites it.
const stepsFile = "testdata/steps.txt"

// noIO are the methods of the ports that send nothing.
var noIO = map[string]string{
	"Publisher.Lane": "does no I/O", "Servers.Release": "does no I/O", "Gates.Missed": "counts",
	"LanePublisher.Deliver": "does no I/O", "LanePublisher.Settled": "goes with the next publish",
	"Delivery.Skip": "goes with the next publish", "Delivery.Sent": "reads memory",
	"Source.Settled": "goes with the next status",
	"Marks.Marker":   "takes a connection", "Marker.Close": "gives it back",
	"LockSession.Close": "ends a connection", "LockSession.Lost": "is a channel",
	"LanePublisher.Follows": "goes with the next publish",
	"Conn.Close":            "ends a connection", "Conn.Closed": "looks at a field", "Sweeper.Run": "steps of its own",
	"Sweeper.Drain": "steps of its own", "Source.Run": "the reader's own steps",
}

// elsewhere are call sites that the story does not reach, or reaches only by chance, and the reasons. TestCrashPoints
// reaches them in memory.
var elsewhere = map[string]string{
	"claim.ahead Ahead":                   "needs a stream that is blocked",
	"claim.ahead Page":                    "needs a stream that is blocked",
	"claim.unreadable ParkRow":            "needs a row with broken data",
	"claim.unreadable Drop":               "needs a row with broken data",
	"comparison.note Restoring":           "needs a repair that fails, or takes longer than five seconds",
	"comparison.restore Regroup":          "needs groups of a stream that is lost",
	"comparison.unsettled Owed":           "needs a Postgres that has gone back in time",
	"gates.confirm Confirm":               "needs a stream whose repair fails",
	"Sweeper.confirm Confirm":             "needs a durability that is not reached",
	"gates.known NoteStream":              "needs a Postgres that has gone back in time, or chance",
	"leadership.changeLayout FirstLayout": "needs another prefix",
	"leadership.evict Evict":              "needs another walsender on the slot: a freeze brings it about",
	"leadership.evict Status":             "needs another walsender on the slot: a freeze brings it about",
	"reconciler.count Tail":               "needs a loss that is not restored",
	"leadership.tellSink TellSink":        "needs a leader that does not reach the sink",
	"leadership.refused SetActive":        "needs a stream of another database",
	"leadership.layoutWaits SetActive":    "needs a change of the streams per type that waits for a group",
	"watchdog.oversee EndSession":         "needs a session that is no relay's and holds the leader's lock",
	"watchdog.oversee LeaderSession":      "needs a leader that makes no progress for half a minute",
	"slotKeeper.enforce Evict":            "needs an advance that fails",
	"slotKeeper.hidden State":             "needs a transaction that is older than five seconds at a hand-over",
	"slotKeeper.hidden VisibleBelow":      "needs a transaction that is older than five seconds at a hand-over",
	"sweeps.Refresh Parked":               "needs --poison=block-key",
	"worker.final Check":                  "needs a claim that is fenced",
}

// callSites returns the places in relay and relay/sweep that call a port, or the connection of a sweep, as function and
// method. It also returns all functions there.
func callSites(t *testing.T) (sites, functions map[string]bool) {
	t.Helper()
	root := testenv.Root(t)
	list := func(args ...string) []string {
		cmd := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...)
		cmd.Dir = root
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list %v: %v", args, err)
		}
		return strings.Split(strings.TrimSpace(string(out)), "\n")
	}
	exports := map[string]string{}
	for _, line := range list("-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", "./relay", "./relay/sweep") {
		path, file, _ := strings.Cut(line, " ")
		exports[path] = file
	}
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	sites, functions = map[string]bool{}, map[string]bool{}
	for _, dir := range []string{"relay", "relay/sweep"} {
		var files []*ast.File
		for _, name := range list("-f", `{{join .GoFiles "\n"}}`, "./"+dir) {
			f, err := parser.ParseFile(fset, filepath.Join(root, dir, name), nil, parser.SkipObjectResolution)
			must(t, err)
			files = append(files, f)
		}
		info := &types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}}
		_, err := (&types.Config{Importer: imports}).Check("posthaste/"+dir, fset, files, info)
		must(t, err)
		for _, f := range files {
			for _, d := range f.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok {
					functions[nameOf(fn)] = true
					ast.Inspect(fn, func(n ast.Node) bool {
						if sel, ok := n.(*ast.SelectorExpr); ok {
							if m := portMethod(info.Selections[sel]); m != "" && noIO[m] == "" {
								sites[nameOf(fn)+" "+m[strings.Index(m, ".")+1:]] = true
							}
						}
						return true
					})
				}
			}
		}
	}
	return sites, functions
}

// portMethod returns the selected method if it belongs to a port, otherwise "".
func portMethod(s *types.Selection) string {
	if s == nil || s.Kind() != types.MethodVal {
		return ""
	}
	recv := s.Obj().(*types.Func).Signature().Recv().Type() // declares the method
	if p, ok := recv.(*types.Pointer); ok {
		recv = p.Elem()
	}
	named, ok := recv.(*types.Named)
	if !ok || named.Obj().Pkg() == nil {
		return ""
	}
	switch pkg, name := named.Obj().Pkg().Path(), named.Obj().Name(); {
	case pkg != "posthaste/relay/sweep" && strings.HasPrefix(pkg, "posthaste/") && types.IsInterface(named),
		pkg == "posthaste/relay/sweep" && name == "Conn", pkg == "posthaste/relay/stream" && name == "Delivery":
		return name + "." + s.Obj().Name()
	}
	return ""
}

// nameOf returns a function's name in the form of package failpoint.
func nameOf(fn *ast.FuncDecl) string {
	if fn.Recv == nil {
		return fn.Name.Name
	}
	typ := fn.Recv.List[0].Type
	if p, ok := typ.(*ast.StarExpr); ok {
		typ = p.X
	}
	return typ.(*ast.Ident).Name + "." + fn.Name.Name
}

// steps returns the steps of the file: moment and step.
func steps(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(stepsFile)
	must(t, err)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// site returns the place in the code that takes a step: a function, and the method that it calls.
func site(step string) string {
	fn, rest, _ := strings.Cut(step, " ")
	method, _, _ := strings.Cut(rest, " ")
	return fn + " " + method[strings.LastIndex(method, ".")+1:]
}

// Every place with a step that has an effect outside the process has a failpoint before and after it, and a recorded
// run passed both.
func TestEveryStepHasAFailpoint(t *testing.T) {
	t.Parallel()
	crossed := map[string]bool{}
	list := steps(t)
	for _, s := range list {
		moment, step, _ := strings.Cut(s, " ")
		crossed[site(step)] = true
		if moment == "before" && !slices.Contains(list, "after "+step) {
			t.Errorf("there is nothing after %s", step)
		}
	}
	sites, functions := callSites(t)
	for _, s := range slices.Sorted(maps.Keys(sites)) {
		if !crossed[s] && elsewhere[s] == "" {
			t.Errorf("no failpoint was crossed at %s; if it is a new step: make steps", s)
		}
		if crossed[s] && elsewhere[s] != "" {
			t.Errorf("%s was crossed, and is still listed as not to be", s)
		}
	}
	for s := range elsewhere {
		if !sites[s] {
			t.Errorf("%s is not there any more", s)
		}
	}
	for s := range crossed {
		fn, _, _ := strings.Cut(s, " ")
		if !functions[fn] && fn != "reader" {
			t.Errorf("the file has %s, the code has not: make steps", s)
		}
	}
}

// A program that is built without the tag has no failpoints.
func TestAReleaseHasNoFailpoints(t *testing.T) {
	t.Parallel()
	root := testenv.Root(t)
	for tag, want := range map[string]bool{"": false, "failpoints": true} {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags="+tag, "-f",
			`{{range .GoFiles}}{{$.Dir}}/{{.}}{{"\n"}}{{end}}`, "./cmd/posthaste")
		cmd.Dir = root
		files, err := cmd.Output()
		must(t, err)
		got := false
		for file := range strings.Lines(string(files)) {
			file = strings.TrimSpace(file)
			if !strings.HasPrefix(file, root) {
				continue
			}
			text, err := os.ReadFile(file)
			must(t, err)
			got = got || bytes.Contains(text, []byte(`Getenv("POSTHASTE_FAILPOINT`))
		}
		if got != want {
			t.Errorf("tag %q: failpoints %v", tag, got)
		}
	}
	for _, name := range []string{"Makefile", "Dockerfile"} {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || bytes.Contains(text, []byte("tags=failpoints")) {
			t.Errorf("%s builds with failpoints, %v", name, err)
		}
	}
}

// storyLines is the number of lines of a story.
const storyLines = 11

// story makes relays take all their steps, a number of times or until ctx ends.
type story struct {
	w *world
	// whole is set if the story must not delete streams. Entries restored to a stream of an earlier number of streams
	// per type come after younger entries in other streams. Then only the order within each stream holds.
	whole bool
	told  chan struct{} // closed at the end
}

// tell starts a story at the line first.
func (w *world) tell(ctx context.Context, first, times int, whole bool) *story {
	s := &story{w: w, whole: whole, told: make(chan struct{})}
	go func() {
		defer close(s.told)
		for n := 0; ctx.Err() == nil && n < times*storyLines; n++ {
			s.line(ctx, (first+n)%storyLines)
		}
	}()
	return s
}

// line makes one change. If it fails, the next pass repeats it.
func (s *story) line(ctx context.Context, n int) {
	w := s.w
	exec := func(stmt string, args ...any) { _, _ = w.db.Pool.Exec(ctx, stmt, args...) }
	rest := func(d time.Duration) {
		select {
		case <-ctx.Done():
		case <-time.After(d):
		}
	}
	slot := "posthaste_" + w.db.Relay
	const evict = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1 AND active"
	insert := func(typ string) {
		exec("INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, 'a', 'one', "+
			"'{}')", uuid.New(), typ)
	}
	refused := func() {
		_ = w.redis.Client.Set(ctx, "outbox.refused", "not a stream", 0).Err()
		insert("refused")
	}
	become := func(mode string) {
		for range 100 {
			var is bool
			const query = "SELECT split_part(active_mode, '.', 1) = $1 FROM relay_state"
			if ctx.Err() != nil || w.db.Pool.QueryRow(ctx, query, mode).Scan(&is) == nil && is {
				return
			}
			rest(100 * time.Millisecond)
		}
	}
	switch n {
	case 0: // until the first audit
		become("cdc")
		rest(7 * time.Second)
	case 1:
		exec("UPDATE relay_state SET desired_mode = 'poll'")
		become("poll")
		refused()
		rest(1500 * time.Millisecond)
	case 2: // the slot of an idle outbox advances
		exec("SELECT pg_logical_emit_message(false, 'story', repeat('x', 6000000))")
		rest(4 * time.Second)
	case 3: // a new stream; and the slot being streamed is advanced
		exec("UPDATE relay_state SET desired_mode = 'auto'")
		become("cdc")
		insert("new" + uuid.NewString())
		refused()
		exec("SELECT pg_logical_emit_message(false, 'story', repeat('x', 6000000))")
		rest(3 * time.Second)
	case 4:
		exec(evict, slot)
		exec("SELECT pg_drop_replication_slot($1)", slot)
		rest(1500 * time.Millisecond)
	case 5:
		if s.whole {
			return
		}
		_ = w.redis.Client.Del(ctx, "outbox.invoice").Err()
		rest(1500 * time.Millisecond)
	case 6:
		_ = w.redis.Client.Del(ctx, w.redis.Client.Keys(ctx, "{outbox.order}:gate*").Val()...).Err()
		rest(1500 * time.Millisecond)
	case 7: // the budget: an open transaction retains WAL, and in the end the slot must be dropped
		if tx, err := w.db.Pool.Begin(ctx); err == nil {
			_, _ = tx.Exec(ctx, "SELECT pg_logical_emit_message(true, 'story', 'it holds the WAL from here on')")
			for range 4 {
				exec("SELECT pg_logical_emit_message(false, 'story', repeat('x', 5000000))")
				rest(400 * time.Millisecond)
			}
			rest(3 * time.Second)
			_ = tx.Rollback(context.WithoutCancel(ctx))
		}
	case 8:
		exec("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid " +
			"FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()")
		rest(time.Second)
	case 9:
		become("cdc")
		exec("ALTER PUBLICATION posthaste DROP TABLE outbox")
		exec(evict, slot)
		rest(2 * time.Second)
	case 10: // an adoption leaves out a stream, whose gate has another type
		gates := w.redis.Client.Keys(ctx, "{outbox.invoice*}:gate:*").Val()
		defer func() { _ = w.redis.Client.Del(context.WithoutCancel(ctx), gates...).Err() }()
		for _, gate := range gates {
			_ = w.redis.Client.Set(ctx, gate, "x", 0).Err()
		}
		exec("UPDATE relay_state SET desired_mode = 'poll'")
		become("poll")
		rest(5 * time.Second)
		exec("UPDATE relay_state SET desired_mode = 'auto'")
	}
}

// stepWorld is a world with a load and a program with failpoints.
type stepWorld struct {
	*world
	load *testenv.Load
	path string
	// shards is the number of streams per type; resharded is set once it has changed.
	shards    int
	resharded bool
}

func newStepWorld(t *testing.T) *stepWorld {
	t.Helper()
	// The world has its own server: WAL of other tests would use up the budget of its slot, and their open transactions
	// would delay every creation of a slot.
	w := worldOf(t, testenv.NewServer(t).Database(t), testenv.Redis(t))
	// The load is large enough for work to be in progress at every step. A larger load would make the test much slower.
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{
		Rate: 40, Tolerant: true, Types: []string{"order", "invoice"}, Writers: 2,
	})
	return &stepWorld{world: w, load: load, path: testenv.Program(t, "failpoints"), shards: 1}
}

// relay starts a relay. POSTHASTE_TEST_LOGS names the directory for its log if the test fails.
func (w *stepWorld) relay(env ...string) *child {
	w.t.Helper()
	return w.spawnAs(w.path, env, "relay", w.flags()...)
}

func (w *stepWorld) flags() []string {
	return []string{"--wal-budget=16MiB", "--drain-timeout=3s", "--restore=all"}
}

// spreading starts posthaste streams spread with a failpoint.
func (w *stepWorld) spreading(env ...string) *child {
	w.t.Helper()
	return w.fork(w.path, env, "streams", append([]string{"spread", perType(w.shards)}, w.flags()...)...)
}

// check lets a relay finish, stops the load, and compares the streams with the committed events.
func (w *stepWorld) check() {
	w.t.Helper()
	w.relay()
	w.load.Stop()
	testenv.Eventually(w.t, time.Minute, func() error {
		_, err := w.db.Pool.Exec(w.t.Context(), "UPDATE relay_state SET desired_mode = 'auto'")
		return err
	})
	w.oracle.Check(w.t, w.load, 2*time.Minute)
	w.waitMode("cdc")
}

// patient is the maximum number of times that a story runs for a relay that has not reached its step. Some steps occur
// only by chance.
const patient = 8

// crosses starts a relay that reaches a step, and waits until it is killed or frozen there.
func (w *stepWorld) crosses(action, step string) *child {
	w.t.Helper()
	leader := w.prepare(step)
	if leader != nil {
		defer leader.kill()
	}
	c := w.reaches(action, step)
	if c == nil {
		w.t.Fatalf("%s: not crossed", step)
	}
	return c
}

// prepare creates the conditions for a relay to reach a step: another relay may have to lead, or the streams to change.
func (w *stepWorld) prepare(step string) (leader *child) {
	w.t.Helper()
	_, _ = w.db.Pool.Exec(w.t.Context(), "UPDATE relay_state SET desired_mode = 'auto'")
	if strings.Contains(step, " Relay.sweepAlong") || strings.Contains(step, " Relay.assist") {
		leader = w.relay()
		w.waitMode("cdc")
	}
	if resharding(step) {
		w.spreads(w.shards)
		before := w.relay()
		w.waitMode("cdc")
		before.kill()
		if w.shards *= 2; w.shards > outbox.Partitions {
			w.shards = 1
		}
		if !spread(step) {
			w.spreads(w.shards)
		}
		w.resharded = !isOnce(step)
	}
	return leader
}

// reaches is crosses for a step that may not occur, without its conditions. In that case it returns nil.
func (w *stepWorld) reaches(action, step string) *child {
	w.t.Helper()
	var c *child
	if env := "POSTHASTE_FAILPOINT=" + action + " " + step; spread(step) {
		c = w.spreading(env)
	} else {
		c = w.fork(w.path, []string{env}, "relay", w.flags()...)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	s := w.tell(ctx, line(step), patient, w.resharded)
	defer func() { cancel(); <-s.told }()
	if strings.Contains(step, " leadership.standDown ") {
		// The mode in the database may be left over from the previous relay, and a relay that has not started
		// completely would end by the signal.
		c.started()
		c.becomes("leader")
		c.waitLogged(`"to":"stream"`)
		c.signal(syscall.SIGTERM)
	}
	for {
		select {
		case <-c.done:
			st, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
			if !ok || action != "kill" || st.Signal() != syscall.SIGKILL {
				w.t.Fatalf("%s: not crossed: %v: %s", step, c.cmd.ProcessState, c.output())
			}
			return c
		case <-time.After(20 * time.Millisecond):
		case <-s.told:
			c.kill()
			return nil
		}
		if action == "stop" && frozen(c.cmd.Process.Pid) {
			return c
		}
	}
}

// spread reports whether posthaste streams spread takes a step, and not a relay.
func spread(step string) bool {
	return slices.ContainsFunc([]string{
		"leadership.changeLayout", "leadership.settleAll", "leadership.unread",
	}, func(part string) bool { return strings.Contains(step, " "+part) })
}

// resharding reports whether a step belongs to a change of the streams per type.
func resharding(step string) bool {
	return spread(step) || strings.Contains(step, " gates.follow") ||
		strings.Contains(step, " gates.adopt sink.Sink.Sharded")
}

// frozen reports whether a process is stopped.
func frozen(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return bytes.HasPrefix(rest, []byte("T"))
}

// scenes has lines of the story, and the steps that they make relays take.
var scenes = map[int][]string{
	1: {
		"slotKeeper.follow", "leadership.undoubted", "leadership.poll", "claim.park sql.Sweep.Park",
		"Relay.sweepAlong", "Relay.assist",
	},
	3:  {"slotKeeper.act", "worker.park", "router.meet"},
	4:  {"streaming.run cdc.Reader.Run status", "streaming.run cdc.Reader.Run START_REPLICATION"},
	5:  {"comparison.", "leadership.suspect", "reconciler.", "gates.adopt sink.Sink.Sharded"},
	7:  {"slotKeeper.enforce", "slotKeeper.advance"},
	9:  {"slotKeeper.ensure cdc.Slots.Ensure ALTER", "streaming.run cdc.Reader.Run SELECT"},
	10: {"gates.back"},
}

// line returns the line at which a story must start to reach a step soon.
func line(step string) int {
	for n, texts := range scenes {
		if slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(step, " "+text) }) {
			return n
		}
	}
	return 0
}

// chosen returns all steps of a kind for make steps, and otherwise a few. The choice depends only on
// POSTHASTE_TEST_SEED. POSTHASTE_TEST_STEP is a regular expression that restricts the steps.
func chosen(t *testing.T, few int, which func(step string) bool) (list []string, random *rand.Rand) {
	t.Helper()
	if !full() && os.Getenv("POSTHASTE_TEST_STEPS") != "all" {
		t.Log("only with POSTHASTE_TEST_FULL=1, or by make steps")
		return nil, nil
	}
	seed := uint64(17)
	if s, err := strconv.ParseUint(os.Getenv("POSTHASTE_TEST_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("POSTHASTE_TEST_SEED=%d", seed)
	random = rand.New(rand.NewPCG(seed, 2))
	only := regexp.MustCompile(os.Getenv("POSTHASTE_TEST_STEP"))
	list = slices.DeleteFunc(steps(t), func(s string) bool { return !which(s) || !only.MatchString(s) })
	random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	if os.Getenv("POSTHASTE_TEST_STEPS") != "all" {
		list = list[:min(few, len(list))]
	}
	return list, random
}

// once are steps that only the first relay of a database takes, and those that a change of the streams per type takes
// if it finds a stream deleted.
var once = []string{
	"Register INSERT INTO relay_state", "Register UPDATE relay_state", "gates.adopt sink.Sink.Sharded",
}

// isOnce reports whether a step needs its own world.
func isOnce(step string) bool {
	return slices.ContainsFunc(once, func(text string) bool { return strings.Contains(step, text) })
}

// isNew reports whether a step needs a stream that has never existed. A world has only a few possible numbers of
// streams.
func isNew(step string) bool { return strings.Contains(step, " gates.follow sink.") }

// perWorld is how many steps are tested in one world, one after the other. Creating a world takes longer than testing a
// step.
const perWorld = 12

func anyStep(string) bool { return true }

// inWorlds runs do for each step, several in a world, and compares the streams with the committed events at the end.
func inWorlds(t *testing.T, list []string, do func(w *stepWorld, step string)) {
	t.Helper()
	var chunks [][]string
	var changing, others []string
	for _, step := range list {
		switch {
		case isOnce(step), isNew(step):
			chunks = append(chunks, []string{step})
		case resharding(step):
			changing = append(changing, step)
		default:
			others = append(others, step)
		}
	}
	chunks = slices.AppendSeq(chunks, slices.Chunk(changing, perWorld))
	chunks = slices.AppendSeq(chunks, slices.Chunk(others, perWorld))
	for _, chunk := range chunks {
		t.Run(chunk[0], func(t *testing.T) {
			t.Parallel()
			w := newStepWorld(t)
			for _, step := range chunk {
				began := time.Now()
				do(w, step)
				t.Logf("%s: %v", step, time.Since(began).Round(time.Millisecond))
			}
			w.check()
		})
	}
}

// A relay is killed before and after each step, and another one continues.
func TestAKillAtEachStep(t *testing.T) {
	t.Parallel()
	list, _ := chosen(t, 12, anyStep)
	inWorlds(t, list, func(w *stepWorld, step string) {
		w.crosses("kill", step)
		next := w.relay()
		w.waitWorks(next)
		next.kill()
	})
}

// A relay is frozen before and after each step, and resumes after another one has done its work.
func TestAFreezeAtEachStep(t *testing.T) {
	t.Parallel()
	list, _ := chosen(t, 0, anyStep) // all steps only with make steps
	inWorlds(t, list, func(w *stepWorld, step string) {
		zombie := w.crosses("stop", step)
		next := w.relay()
		w.waitWorks(next)
		zombie.signal(syscall.SIGCONT)
		w.waitCommitted(w.load, w.load.Committed()+30)
		next.kill()
		zombie.kill()
	})
}

// waitWorks waits until a relay leads, and everything that was committed before is settled.
func (w *stepWorld) waitWorks(next *child) {
	w.t.Helper()
	var before time.Time
	testenv.Eventually(w.t, time.Minute, func() error {
		return w.db.Pool.QueryRow(w.t.Context(), "SELECT clock_timestamp()").Scan(&before)
	})
	testenv.Eventually(w.t, 2*time.Minute, func() error {
		if err := ready(next, "leader"); err != nil {
			return err
		}
		var owed int
		err := w.db.Pool.QueryRow(w.t.Context(), "SELECT count(*) FROM outbox_backlog WHERE created_at < $1",
			before).Scan(&owed)
		return testenv.FailIf(err != nil || owed > 0, "%d events wait, %w", owed, err)
	})
}

// The statements and methods that only read, by their first words, and the functions by which a SELECT changes data.
var (
	reads = []string{
		"SELECT", "SET LOCAL", "begin", "rollback", "info", "pipeline info", "pipeline hmget", "eval_ro",
		"pipeline eval_ro",
	}
	readMethods = []string{
		"Sink.Look", "Sink.Tail", "Sink.Check", "store.Audit", "store.KeepHistory WITH", "store.Repairs",
		"Sweep.Begin", "marker.Look",
	}
	writes = []string{
		"pg_create_logical_replication_slot(", "pg_drop_replication_slot(", "pg_replication_slot_advance(",
		"pg_terminate_backend(", "advisory",
	}
)

// leaves reports whether a relay that is killed at a step leaves a different state than one that is killed at the step
// before. That is so only after a step that writes. A kill before a step, or after a read, leaves the state of the
// previous write.
func leaves(step string) bool {
	moment, step, _ := strings.Cut(step, " ")
	_, call, _ := strings.Cut(step, " ")
	_, what, _ := strings.Cut(call, " ")
	has := func(list []string, in func(text, part string) bool) bool {
		return slices.ContainsFunc(list, func(part string) bool { return in(call, part) || in(what, part) })
	}
	return moment == "after" &&
		(has(writes, strings.Contains) || !has(reads, strings.HasPrefix) && !has(readMethods, strings.Contains))
}

// A relay is killed at a step that leaves a new state, and the next one at a step that it takes because of that state.
// A relay that is not killed determines those steps first. POSTHASTE_TEST_PAIRS is how many of them are tested for each
// first step, or all.
func TestPairsOfKills(t *testing.T) {
	t.Parallel()
	list, random := chosen(t, 4, func(step string) bool { return leaves(step) && !isOnce(step) })
	each := 1
	if s := os.Getenv("POSTHASTE_TEST_PAIRS"); s == "all" {
		each = math.MaxInt
	} else if n, err := strconv.Atoi(s); err == nil {
		each = n
	}
	for _, first := range list {
		seed := random.Uint64()
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			w := newStepWorld(t)
			seconds := slices.DeleteFunc(w.successor(first), func(step string) bool { return !leaves(step) })
			rand.New(rand.NewPCG(seed, 3)).Shuffle(len(seconds), func(i, j int) {
				seconds[i], seconds[j] = seconds[j], seconds[i]
			})
			t.Logf("the next relay takes %d steps that leave something", len(seconds))
			for i, second := range seconds[:min(each, len(seconds))] {
				if i > 0 && isNew(first) {
					w.check()
					w = newStepWorld(t)
				}
				w.crosses("kill", first)
				if w.reaches("kill", second) != nil {
					t.Logf("crossed: %s, %s", first, second)
				} else { // the relay of successor took it by chance
					t.Logf("not come about: %s, %s", first, second)
				}
			}
			w.check()
		})
	}
}

// successor returns the steps that a relay takes until it publishes, after another relay was killed at a step.
func (w *stepWorld) successor(first string) []string {
	w.t.Helper()
	w.crosses("kill", first)
	file := filepath.Join(w.t.TempDir(), "steps")
	next := w.relay("POSTHASTE_FAILPOINT_TRACE=" + file)
	w.waitWorks(next)
	next.kill()
	return slices.Sorted(maps.Keys(testenv.Traced(w.t, file)))
}

// TestWriteSteps rewrites the file from a run of the story by two relays. It omits steps that occur by chance. The end
// of a transaction that is rolled back has no effect, so it is not a step.
func TestWriteSteps(t *testing.T) {
	if os.Getenv("POSTHASTE_TEST_STEPS") != "write" {
		t.Log("only with POSTHASTE_TEST_STEPS=write")
		return
	}
	all := slices.DeleteFunc(slices.Sorted(maps.Keys(crossings(t))), func(s string) bool {
		_, step, _ := strings.Cut(s, " ")
		return elsewhere[site(step)] != "" || strings.HasSuffix(s, " rollback")
	})
	must(t, os.MkdirAll(filepath.Dir(stepsFile), 0o755))
	must(t, os.WriteFile(stepsFile, []byte(strings.Join(all, "\n")+"\n"), 0o600))
}

// crossings returns the steps that two relays take in a story, and then with other numbers of streams per type.
func crossings(t *testing.T) map[string]bool {
	t.Helper()
	dir := t.TempDir()
	w := newStepWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var files []string
	start := func() *child {
		files = append(files, filepath.Join(dir, strconv.Itoa(len(files))))
		return w.relay("POSTHASTE_FAILPOINT_TRACE=" + files[len(files)-1])
	}
	first, second := start(), start()
	s := w.tell(ctx, 0, 2, false)
	<-s.told
	first.stop()
	second.stop()
	w.shards = 2
	files = append(files, filepath.Join(dir, "spread"))
	<-w.spreading("POSTHASTE_FAILPOINT_TRACE=" + files[len(files)-1]).done
	w.waitShards(2)
	third := start()
	w.waitMode("cdc")
	w.waitCommitted(w.load, w.load.Committed()+30)
	s.line(w.t.Context(), 5)
	w.waitMode("cdc")
	third.stop()
	return testenv.Traced(t, files...)
}
