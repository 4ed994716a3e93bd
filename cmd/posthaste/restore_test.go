package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// These are ways in which a restoration itself once lost events, or published them again.

// What is restored is trimmed meanwhile, and the relay is killed: whoever goes on does not take that for missing, and
// what was trimmed is no loss.
func TestWhatIsRestoredMayBeTrimmed(t *testing.T) {
	t.Parallel()
	const events = 60_000
	w := newWorld(t)
	r := w.relayIn("poll", "--stream-maxlen=500")
	testenv.Bulk(t, w.db, events, 10)
	w.waitSettled(events)
	do(t, w.redis.Client, "flushall")
	added := func() (added, length int64) {
		if info := w.redis.Client.XInfoStream(t.Context(), "outbox.order").Val(); info != nil {
			return info.EntriesAdded, info.Length
		}
		return 0, 0
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		if n, length := added(); n < length+1000 {
			return errors.New("it is not trimmed yet")
		}
		return nil
	})
	r.kill()
	r = w.spawn("relay", "--stream-maxlen=500")
	r.waitLogged(`"to":"poll"`)
	if n, _ := added(); n != events {
		t.Errorf("%d entries were added, want %d", n, events)
	}
	if list := w.losses(); len(list) > 0 {
		t.Errorf("told: %+v", list)
	}
}

// Nothing is noted as restored before it is as durable as is asked for; and what is restored, and lost again, is
// restored again.
func TestARestorationIsConfirmed(t *testing.T) {
	t.Parallel()
	const events = 3500
	w := newWorld(t)
	replica := testenv.Redis(t, fmt.Sprintf("replicaof 127.0.0.1 %d", w.redis.Port))
	r := w.relayIn("poll", "--stream-maxlen=0", "--redis-durability=replicas=1")
	testenv.Bulk(t, w.db, events, 10)
	w.waitSettled(events)
	do(t, replica.Client, "replicaof", "127.0.0.1", "1") // no replica any more
	do(t, w.redis.Client, "flushall")
	w.waitEntries(events)
	r.waitReady(t, http.StatusServiceUnavailable, "restore: outbox.order: confirm") // it has tried
	if w.unrepaired() == 0 {
		t.Error("what is nowhere but in one memory is noted as restored")
	}
	r.kill()
	if err := w.redis.Kill(); err != nil {
		t.Fatal(err)
	}
	forget(t, w.redis, true)
	if err := w.redis.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	r = w.spawn("relay", "--stream-maxlen=0")
	r.waitLogged(`"to":"poll"`)
	if n := w.missing(); n != 0 || w.unrepaired() != 0 {
		t.Errorf("%d events are missing, %d notes are not done", n, w.unrepaired())
	}
}

// The gate is lost, and then the stream, before anything is published in between.
func TestAGateIsLostAndThenItsStream(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 200})
		load.Wait()
		w.oracle.WaitEmpty(t, 20*time.Second)
		do(t, w.redis.Client, "del", w.gate("outbox.order"))
		r.waitLogged("the stream is whole again")
		w.waitMode(mode, 20*time.Second)
		do(t, w.redis.Client, "del", "outbox.order")
		w.waitWhole()
		w.oracle.Check(t, load, 20*time.Second)
	})
}

// A replay publishes to a stream that is gone: while the relay runs it waits for it, and while none does the relay sees
// all the same what is missing.
func TestAReplayHidesNoLoss(t *testing.T) {
	t.Parallel()
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprintf("relay down %v", down), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.relayIn("poll", "--stream-maxlen=0")
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 200})
			load.Wait()
			w.oracle.WaitEmpty(t, 20*time.Second)
			subject := testenv.Value[string](t, w.db, "SELECT aggregate_id FROM outbox LIMIT 1")
			if down {
				r.kill()
				do(t, w.redis.Client, "flushall")
			} else {
				do(t, w.redis.Client, "del", "outbox.order")
			}
			if res := w.once("replay", "--subject="+subject, "--since=1h", "--rate=0"); res.code != 0 {
				t.Errorf("replay: %s %s", res.out, res.errOut)
			}
			if down {
				w.spawn("relay", "--stream-maxlen=0")
			}
			w.waitWhole()
			if list := w.losses(); len(list) > 0 {
				t.Errorf("told: %+v", list)
			}
		})
	}
}

// The database goes back to a time before a stream was published to for the first time, or to one that has the epoch of
// the gates, and another owner: what is in the stream is found there.
func TestADatabaseThatIsOlderThanItsGates(t *testing.T) {
	t.Parallel()
	for name, back := range map[string]string{
		"the stream is not known": `DELETE FROM outbox_stream; UPDATE relay_state SET timeline = 7`,
		"another owner": `DELETE FROM outbox_mark WHERE id > 1;
			UPDATE relay_state SET nonce = decode(md5(random()::text), 'hex')`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.relayIn("poll", "--stream-maxlen=0")
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 100})
			load.Wait()
			w.oracle.WaitEmpty(t, 20*time.Second)
			r.kill()
			w.db.Exec(t, "DELETE FROM outbox_mark WHERE id > 1")
			w.db.Exec(t, back)
			r = w.spawn("relay", "--stream-maxlen=0")
			r.waitLogged(`"to":"poll"`)
			w.oracle.Check(t, load, 20*time.Second)
		})
	}
}

// Redis is put back to a backup from before the last thousand events, while a relay runs.
func TestABackupOfRedisIsRestored(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 800})
		w.waitSettled(500)
		data, backup := filepath.Join(w.redis.Dir, "appendonlydir"), filepath.Join(t.TempDir(), "backup")
		if err := w.redis.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(backup, os.DirFS(data)); err != nil {
			t.Fatal(err)
		}
		for _, restore := range []bool{false, true} {
			if restore {
				w.waitSettled(w.settled() + 1000)
				err := errors.Join(w.redis.Kill(), os.RemoveAll(data), os.CopyFS(data, os.DirFS(backup)))
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := w.redis.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		w.waitCommitted(load, load.Committed()+300)
		load.Stop()
		w.oracle.Check(t, load, 30*time.Second)
		w.restored(500) // some of the thousand were in the backup, and not settled
	})
}

// A stream is deleted, or put back to an older copy, and somebody else adds an entry: it is younger than all that is
// lost. With a relay and without one, with the gate and without it.
func TestAYoungerEntryHidesNoLoss(t *testing.T) {
	t.Parallel()
	const stream = "outbox.order"
	for name, c := range map[string]struct{ back, gate, down bool }{
		"deleted":                          {},
		"put back":                         {back: true},
		"deleted while nobody leads":       {down: true},
		"put back while nobody leads":      {down: true, back: true},
		"deleted with its gate":            {down: true, gate: true},
		"put back with its gate":           {down: true, gate: true, back: true},
		"put back with its gate, and live": {gate: true, back: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inModes(t, func(t *testing.T, mode string) {
				w := newWorld(t)
				r := w.relayIn(mode, "--stream-maxlen=0")
				load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 400})
				w.waitSettled(200)
				keys := []string{stream}
				if c.gate {
					keys = append(keys, w.gate(stream))
				}
				var copies []string
				for _, key := range keys {
					copies = append(copies, w.redis.Client.Dump(t.Context(), key).Val())
				}
				w.waitSettled(w.settled() + 300)
				if c.down {
					r.kill()
				}
				var added *redis.StringCmd
				_, err := w.redis.Client.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
					for i, key := range keys {
						p.Del(t.Context(), key)
						if c.back {
							p.Restore(t.Context(), key, 0, copies[i])
						}
					}
					added = p.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: []any{"somebody", "else"}})
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				if c.down {
					r = w.spawn("relay", "--stream-maxlen=0")
				}
				r.waitLogged("the stream is whole again")
				w.waitCommitted(load, load.Committed()+200)
				load.Stop()
				do(t, w.redis.Client, "xdel", stream, added.Val())
				w.oracle.Check(t, load, 30*time.Second)
				w.restored(100)
			})
		})
	}
}

// waitGroups waits until a relay has noted the groups of a stream.
func (w *world) waitGroups(stream string, want ...string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		const noted = "SELECT groups FROM outbox_stream WHERE stream = $1"
		if got := testenv.Value[[]string](w.t, w.db, noted, stream); !slices.Equal(got, want) {
			return fmt.Errorf("noted are %q, want %q", got, want)
		}
		return nil
	})
}

// Streams are lost while the consumers of a group are away, and are trimmed to less than it has before it: the group
// comes back before what is restored, and all of that is there for it, also if the relay is killed in the middle and
// everything is lost once more. A group that somebody has destroyed does not come back.
func TestGroupsComeBackWithWhatIsRestored(t *testing.T) {
	t.Parallel()
	const stream = "outbox.order"
	for name, c := range map[string]struct {
		mode   string
		lose   []any
		events int
		killed bool
	}{
		"flushed":          {mode: "poll", lose: []any{"flushall"}, events: 3000},
		"deleted":          {mode: "cdc", lose: []any{"del", stream}, events: 3000},
		"killed meanwhile": {mode: "poll", lose: []any{"flushall"}, events: 60_000, killed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			client, ctx := w.redis.Client, t.Context()
			r := w.relayIn(c.mode, "--stream-maxlen=200")
			for _, group := range []string{"away", "destroyed"} {
				do(t, client, "xgroup", "create", stream, group, "0", "mkstream")
			}
			testenv.Bulk(t, w.db, c.events, 10)
			w.waitSettled(int64(c.events))
			w.waitGroups(stream, "away", "destroyed")
			do(t, client, "xgroup", "destroy", stream, "destroyed")
			w.waitGroups(stream, "away")
			do(t, client, c.lose...)
			if c.killed {
				testenv.Eventually(t, 30*time.Second, func() error {
					if client.XLen(ctx, stream).Val() < 1000 {
						return errors.New("nothing is restored yet")
					}
					return nil
				})
				r.kill()
				do(t, client, c.lose...)
				r = w.spawn("relay", "--stream-maxlen=200")
			}
			r.waitLogged("the stream is whole again")
			// Streams are trimmed in the order of their names: when a later one was, this one was.
			w.db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'zz', 'a', 'zz.made', '{}' FROM generate_series(1, 1000)`)
			testenv.Eventually(t, 30*time.Second, func() error {
				info := client.XInfoStream(ctx, "outbox.zz").Val()
				if info == nil || info.EntriesAdded < 1000 || info.Length > 500 {
					return errors.New("it is not trimmed yet")
				}
				return nil
			})
			client.XGroupCreate(ctx, stream, "away", "0") // as a consumer does when it comes back
			read := map[any]bool{}
			for {
				got, err := client.XReadGroup(ctx, &redis.XReadGroupArgs{
					Group: "away", Consumer: "c", Streams: []string{stream, ">"}, Count: 1000, Block: -1,
				}).Result()
				if errors.Is(err, redis.Nil) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, m := range got[0].Messages {
					read[m.Values["id"]] = true
				}
			}
			if len(read) != c.events {
				t.Errorf("the group reads %d events of %d", len(read), c.events)
			}
			if groups := client.XInfoGroups(ctx, stream).Val(); len(groups) != 1 {
				t.Errorf("groups: %+v", groups)
			}
		})
	}
}
