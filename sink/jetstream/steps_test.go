package jetstream_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/sink/jetstream"
)

// stepsFile lists the steps of the sink, as recorded. POSTHASTE_TEST_STEPS=write rewrites it.
const stepsFile = "testdata/steps.txt"

// shop has an outbox with a load, and a server.
type shop struct {
	*testing.T
	db    *testenv.Database
	s     *server
	load  *testenv.Load
	exe   string
	flags []string
	extent
}

func newShop(t *testing.T, tag string, s *server, flags ...string) *shop {
	t.Helper()
	db := testenv.NewServer(t).Database(t) // locks of other tests would delay slots
	return &shop{
		T: t, db: db, s: s, load: testenv.StartLoad(t, db, testenv.LoadOptions{Rate: 100, Writers: 2, Tag: "a b."}),
		exe: testenv.Program(t, tag), flags: append(flags, "--postgres-url="+db.URL, "--relay-name="+db.Relay,
			"--sink-url="+s.url(), "--redis-url=redis://127.0.0.1:1"), // nobody listens there
	}
}

// process is a relay.
type process struct {
	*exec.Cmd
	done chan struct{}
	log  string
}

func (w *shop) relay(env ...string) *process {
	w.Helper()
	args := []string{"relay", "--admin-addr=127.0.0.1:0", "--drain-timeout=3s", "--restore=all"}
	p := &process{
		Cmd: exec.CommandContext(w.Context(), w.exe, append(args, w.flags...)...),
		log: filepath.Join(w.TempDir(), "log"), done: make(chan struct{}),
	}
	p.Env = append(os.Environ(), env...)
	log, err := os.Create(p.log)
	testenv.Must(w, err)
	p.Stdout, p.Stderr = log, log
	testenv.Must(w, p.Start())
	go func() {
		defer close(p.done)
		_ = p.Wait()
		_ = log.Close()
	}()
	w.Cleanup(func() {
		p.kill()
		if text, err := os.ReadFile(p.log); err == nil && w.Failed() {
			w.Logf("relay %d: %s", p.Process.Pid, text[max(0, len(text)-1500):])
		}
	})
	return p
}

func (p *process) kill() {
	_ = p.Process.Kill()
	<-p.done
}

// reached reports whether the process was ended, or frozen.
func (p *process) reached() bool {
	select {
	case <-p.done:
		return true
	default:
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	_, state, _ := bytes.Cut(stat, []byte(") "))
	return err == nil && bytes.HasPrefix(state, []byte("T"))
}

// lines is the number of changes that line can make.
const lines = 6

// line changes something, so that a relay takes steps that it otherwise does not.
func (w *shop) line(n int) {
	nc, name := w.s.client(), jetstream.StreamName(order)
	defer nc.Close()
	ask := func(subject, body string) []byte {
		reply, err := nc.Request("$JS.API."+subject, []byte(body), 5*time.Second)
		testenv.Must(w, err)
		return reply.Data
	}
	switch n % lines {
	case 1: // the gate is lost
		if gate := regexp.MustCompile(`posthaste-gate\.[^"]*`).Find(ask("STREAM.INFO."+name, "")); gate != nil {
			ask("STREAM.PURGE."+name, fmt.Sprintf(`{"filter":%q}`, gate))
		}
	case 2:
		w.db.Exec(w, "UPDATE relay_state SET desired_mode = CASE desired_mode WHEN 'poll' THEN 'auto' ELSE 'poll' END")
	case 3: // a new stream, and a group
		w.db.Exec(w, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "+
			"SELECT id, 'new' || id, 'a', 'one', '{}' FROM gen_random_uuid() id")
		ask("CONSUMER.CREATE."+name+".group", fmt.Sprintf(`{"stream_name":%q,"action":"","config":{"name":"group",`+
			`"durable_name":"group","ack_policy":"explicit","deliver_policy":"all"}}`, name))
	case 4:
		w.begins()
		ask("STREAM.DELETE."+name, "")
	case 5:
		w.begins()
		ask("STREAM.PURGE."+name, "")
	}
}

// begins compares the stream with the table before all of it is lost, and with it every duplicate.
func (w *shop) begins() {
	w.Helper()
	if _, err := w.s.js().StreamInfo(jetstream.StreamName(order)); err == nil && w.extent == all {
		testenv.Must(w, w.s.holds(w.T, w.db, begins))
	}
}

// crosses starts a relay that takes a step, and waits until it is killed or frozen there.
func (w *shop) crosses(action, step string, env ...string) *process {
	w.Helper()
	first := 0
	switch {
	case strings.Contains(step, " Relay.sweepAlong"): // another one leads
		leader := w.relay()
		defer leader.kill()
		testenv.Eventually(w, time.Minute, func() error {
			log, err := os.ReadFile(leader.log)
			return testenv.FailIf(err != nil || !bytes.Contains(log, []byte(`"leading"`)), "it does not lead, %w", err)
		})
	case strings.Contains(step, ".Alive STREAM.CREATE"):
		testenv.Must(w, w.s.js().DeleteStream("POSTHASTE--ALIVE"))
	case strings.Contains(step, ".Recall "):
		first = 1
	case strings.Contains(step, " comparison."): // it restores what a deleted stream had
		first = 4
	}
	p := w.relay(append(env, "POSTHASTE_FAILPOINT="+action+" "+step)...)
	for n := range 3 * lines {
		w.line(first + n)
		for began := time.Now(); time.Since(began) < 4*time.Second; <-time.After(10 * time.Millisecond) {
			if p.reached() {
				return p
			}
		}
	}
	w.Fatalf("%s: not crossed", step)
	return nil
}

// works waits until everything that is committed now is published, and settled.
func (w *shop) works() {
	w.Helper()
	testenv.Eventually(w, time.Minute, func() error {
		return testenv.FailIf(w.load.Committed() == 0, "nothing is committed")
	})
	now := testenv.Value[time.Time](w, w.db, "SELECT clock_timestamp()")
	testenv.Eventually(w, 2*time.Minute, func() error {
		var n int
		const waits = "SELECT count(*) FROM outbox_backlog WHERE created_at < $1"
		err := w.db.Pool.QueryRow(w.Context(), waits, now).Scan(&n)
		return testenv.FailIf(err != nil || n > 0, "%d events wait, %w", n, err)
	})
}

// check lets a relay finish, and compares the stream with the table.
func (w *shop) check() {
	w.Helper()
	w.relay()
	w.load.Stop()
	w.works()
	testenv.Eventually(w, time.Minute, func() error { return w.s.holds(w.T, w.db, w.extent) })
}

// chosen returns few of the steps, at random more of them for the full test, and all for make steps.
// POSTHASTE_TEST_STEP is a regular expression that restricts the latter.
func chosen(t *testing.T, more int, few ...string) []string {
	t.Helper()
	text, err := os.ReadFile(stepsFile)
	testenv.Must(t, err)
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, step := range few {
		if !slices.Contains(all, step) {
			t.Errorf("no relay takes the step %q: make steps", step)
		}
	}
	only := regexp.MustCompile(os.Getenv("POSTHASTE_TEST_STEP"))
	all = slices.DeleteFunc(all, func(step string) bool { return !only.MatchString(step) })
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	switch {
	case os.Getenv("POSTHASTE_TEST_STEPS") == "all":
		return all
	case os.Getenv("POSTHASTE_TEST_FULL") != "":
		return all[:min(more, len(all))]
	}
	return few
}

// perShop is how many steps are tested with one outbox.
const perShop = 20

func inShops(t *testing.T, steps []string, do func(w *shop, step string)) {
	t.Helper()
	var trims, others []string
	for _, step := range steps {
		if strings.Contains(step, ".Trim ") {
			trims = append(trims, step)
		} else {
			others = append(others, step)
		}
	}
	groups := slices.Collect(slices.Chunk(others, perShop))
	for _, some := range slices.AppendSeq(groups, slices.Chunk(trims, perShop)) {
		t.Run(some[0], func(t *testing.T) {
			t.Parallel()
			s := startServer(t, 1)
			s.start()
			w := newShop(t, "failpoints", s)
			if len(trims) > 0 && some[0] == trims[0] {
				w.flags, w.extent = append(w.flags, "--stream-maxlen=50"), ends
			}
			for _, step := range some {
				began := time.Now()
				do(w, step)
				t.Logf("%s: %v", step, time.Since(began).Round(time.Millisecond))
			}
			w.check()
		})
	}
}

// TestKills kills a relay before and after each request that it makes of NATS. The next one continues: each event is
// there once, in order.
func TestKills(t *testing.T) {
	t.Parallel()
	few := []string{
		"after attempt sink/jetstream.delivery.Publish stage",
		"after attempt sink/jetstream.delivery.Publish posthaste-gate",
		"before gates.adopt sink/jetstream.Sink.Adopt posthaste-gate",
		"after gates.adopt sink/jetstream.Sink.Adopt posthaste-gate",
		"after sink sink/jetstream.Sink.Settled posthaste-gate",
		"after comparison.unsettled sink/jetstream.Sink.Recall posthaste-gate",
		"after comparison.publish sink/jetstream.delivery.Publish posthaste-gate",
	}
	inShops(t, chosen(t, 30, few...), func(w *shop, step string) {
		w.crosses("kill", step)
		next := w.relay()
		w.works()
		next.kill()
	})
}

// TestFreezes freezes a relay before and after each request. It resumes after another one has taken over, and the
// server refuses the batch that it then sends.
func TestFreezes(t *testing.T) {
	t.Parallel()
	few := []string{
		"before attempt sink/jetstream.delivery.Publish posthaste-gate",
		"before gates.adopt sink/jetstream.Sink.Adopt posthaste-gate",
	}
	inShops(t, chosen(t, 15, few...), func(w *shop, step string) {
		trace := filepath.Join(w.TempDir(), "trace")
		frozen := w.crosses("stop", step, "POSTHASTE_FAILPOINT_TRACE="+trace)
		// As Postgres does when it finds the connections dead: the lock of the leader is free.
		w.db.Exec(w, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "+
			"application_name LIKE 'posthaste%'")
		next := w.relay()
		w.works()
		testenv.Must(w, frozen.Process.Signal(syscall.SIGCONT))
		_, step, _ = strings.Cut(step, " ")
		testenv.Eventually(w, 20*time.Second, func() error {
			return testenv.FailIf(!testenv.Traced(w, trace)["after "+step], "the request has no answer")
		})
		w.works()
		next.kill()
		frozen.kill()
	})
}

// TestWriteSteps rewrites the file from a run of two relays.
func TestWriteSteps(t *testing.T) {
	if os.Getenv("POSTHASTE_TEST_STEPS") != "write" {
		t.Log("only with POSTHASTE_TEST_STEPS=write")
		return
	}
	s := startServer(t, 1)
	s.start()
	w := newShop(t, "failpoints", s, "--stream-maxlen=50")
	w.extent = ends
	dir := t.TempDir()
	var files []string
	for n := range 2 {
		files = append(files, filepath.Join(dir, fmt.Sprint(n)))
		w.relay("POSTHASTE_FAILPOINT_TRACE=" + files[n])
	}
	for n := range 3 * lines {
		w.line(n)
		<-time.After(5 * time.Second)
	}
	steps := slices.DeleteFunc(slices.Sorted(maps.Keys(testenv.Traced(t, files...))), func(step string) bool {
		return !strings.Contains(step, "sink/jetstream.")
	})
	testenv.Must(t, os.MkdirAll(filepath.Dir(stepsFile), 0o755))
	testenv.Must(t, os.WriteFile(stepsFile, []byte(strings.Join(steps, "\n")+"\n"), 0o600))
}
