package sink_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

func TestParseDurability(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]sink.Durability{
		"none": {}, "aof": {AOF: true}, "replicas=1": {Replicas: 1}, "replicas=12": {Replicas: 12},
	} {
		got, err := sink.ParseDurability(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%s: got %v, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", "replicas", "replicas=", "replicas=0", "replicas=-1", "replicas=x", "replicas=101",
		"AOF", "always",
	} {
		if d, err := sink.ParseDurability(text); err == nil {
			t.Errorf("%q is accepted as %v", text, d)
		}
	}
}

// confirm calls Confirm with a timeout.
func (f *fixture) confirm(o outbox.Owner, within time.Duration) error {
	ctx, cancel := context.WithTimeout(f.Context(), within)
	defer cancel()
	return f.sink.Confirm(ctx, o, firstMark(o))
}

// missed calls Confirm until it reports that the durability was not reached, and returns that error. On a busy machine
// the answer may come too late for the context, which is no success either.
func (f *fixture) missed(o outbox.Owner) *sink.DurabilityError {
	f.Helper()
	var missed *sink.DurabilityError
	testenv.Eventually(f, 20*time.Second, func() error {
		err := f.confirm(o, 600*time.Millisecond)
		switch {
		case err == nil:
			f.Fatal("confirmed what was not reached")
		case !errors.As(err, &missed) || sink.Class(err) != "durability":
			return fmt.Errorf("class %q of %w, want durability", sink.Class(err), err)
		}
		return nil
	})
	return missed
}

// The link to the replica stalls: it stays open and the replica stays connected, so only a WAIT on the connection of
// the write detects it.
func TestWaitKnowsThatTheReplicaIsBehind(t *testing.T) {
	t.Parallel()
	primary := testenv.Redis(t, "repl-diskless-sync-delay 0", "repl-ping-replica-period 1")
	p := testenv.NewLink(t, primary.Addr())
	host, port, _ := strings.Cut(p.Addr(), ":")
	testenv.Redis(t, "replicaof "+host+" "+port)
	f := on(t, primary, sink.Options{Durability: sink.Durability{Replicas: 1}})
	testenv.Eventually(t, 60*time.Second, func() error { return f.sink.Ready(t.Context()) })
	o := f.adopted(1)
	f.Publish(f.lane(o), makeEvent())
	testenv.Eventually(t, 60*time.Second, func() error { return f.confirm(o, 2*time.Second) })

	p.Set(testenv.Trouble{LoseReplies: true})
	f.Publish(f.sink.Lane(stream, o, partLane(1, 1)), makeEvent())
	start := time.Now()
	if missed := f.missed(o); missed.Got != 0 || missed.Want.Replicas != 1 {
		t.Fatalf("missed: %v", missed)
	}
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("waited %v of 600 ms", took)
	}
	// The gate refuses at once, without waiting for replicas.
	wantFenced(t, f.sink.Confirm(t.Context(), f.Owner(1), firstMark(o)), 1)
	p.Set(testenv.Trouble{})
	testenv.Eventually(t, 60*time.Second, func() error { return f.confirm(o, time.Second) })
}

func TestWaitWithoutEnoughReplicas(t *testing.T) {
	t.Parallel()
	f := on(t, testenv.Redis(t), sink.Options{Durability: sink.Durability{Replicas: 2}})
	o := f.adopted(1)
	f.Publish(f.lane(o), makeEvent())
	_ = f.missed(o)
	wantNotReady(t, f.sink.Ready(t.Context()), "replicas")
}

func TestWaitAOF(t *testing.T) {
	t.Parallel()
	f := on(t, testenv.Valkey(t, "appendfsync always"), sink.Options{Durability: sink.Durability{AOF: true}})
	f.Must(f.sink.Ready(t.Context()))
	o := f.adopted(1)
	f.Publish(f.lane(o), makeEvent())
	f.Must(f.confirm(o, 10*time.Second))
	f.do("CONFIG", "SET", "appendfsync", "no") // from now on Redis does not sync
	_ = f.missed(o)
	f.do("CONFIG", "SET", "appendfsync", "everysec")
	testenv.Eventually(t, 20*time.Second, func() error { return f.confirm(o, 3*time.Second) })
	f.do("CONFIG", "SET", "appendonly", "no")
	wantNotReady(t, f.sink.Ready(t.Context()), "aof_off")
	if err := f.confirm(o, time.Second); err == nil {
		t.Error("confirmed without an append-only file")
	}
}

func TestAOFWithoutWaitAOFIsANamedError(t *testing.T) {
	t.Parallel()
	f := on(t, withoutWaitAOF(t), sink.Options{Durability: sink.Durability{AOF: true}})
	err := f.sink.Ready(t.Context())
	wantNotReady(t, err, "no_waitaof")
	for _, word := range []string{"WAITAOF", "Redis 7.2", "replicas=N"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not mention %s", err, word)
		}
	}
	o := f.adopted(1)
	f.Publish(f.lane(o), makeEvent())
	if err := f.confirm(o, time.Second); err == nil {
		t.Error("confirmed what nobody can know")
	}
}

// withoutWaitAOF is a server like Redis before 7.2, whichever the tests are run on.
func withoutWaitAOF(t *testing.T) *testenv.RedisServer {
	t.Helper()
	server := testenv.Redis(t)
	known, err := server.Client.Do(t.Context(), "COMMAND", "INFO", "WAITAOF").Slice()
	if err != nil {
		t.Fatal(err)
	}
	if known[0] == nil {
		return server
	}
	return testenv.Redis(t, `rename-command WAITAOF ""`)
}

func wantNotReady(t testing.TB, err error, reason string) {
	t.Helper()
	var not *sink.NotReadyError
	if !errors.As(err, &not) || not.Reason != reason {
		t.Fatalf("got %v, want reason %s", err, reason)
	}
	if not.Remedy == "" || !strings.Contains(err.Error(), not.Remedy) {
		t.Errorf("no fix in %q", err)
	}
}

func TestReady(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.Must(f.sink.Ready(t.Context()))
	if n := f.server.Client.DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys after a look", n)
	}
	f.do("ACL", "SETUSER", "default", "resetkeys", "~outbox.*", "~{outbox.*}:gate") // no right to the probe's key
	f.Must(f.sink.Ready(t.Context()))
	_ = f.server.Kill()
	wantNotReady(t, f.sink.Ready(t.Context()), "unreachable")
}
