package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// Each of these tests is for a case in which an earlier version lost events in a restoration, or published them twice.

// Restored entries are trimmed during the restoration, and the relay is killed. The next leader does not restore the
// trimmed entries again, and does not count them as lost.
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
		n, length := added()
		return testenv.FailIf(n < length+1000, "it is not trimmed yet")
	})
	r.kill()
	r = w.spawn("relay", "--stream-maxlen=500")
	r.waitLogged(`"to":"poll"`)
	if n, _ := added(); n != events {
		t.Errorf("%d entries were added, want %d", n, events)
	}
	w.lostNothing()
}

// Entries are recorded as restored only after they have reached the configured durability. If restored entries are lost
// again, they are restored again.
func TestARestorationIsConfirmed(t *testing.T) {
	t.Parallel()
	const events = 3500
	w := newWorld(t)
	replica := testenv.Redis(t, fmt.Sprintf("replicaof 127.0.0.1 %d", w.redis.Port))
	r := w.relayIn("poll", "--stream-maxlen=0", "--redis-durability=replicas=1")
	testenv.Bulk(t, w.db, events, 10)
	w.waitSettled(events)
	do(t, replica.Client, "replicaof", "127.0.0.1", "1") // the server is not a replica any more
	do(t, w.redis.Client, "flushall")
	w.waitLen("outbox.order", events)
	// The relay has tried to confirm.
	r.waitUnready("restore: outbox.order: confirm")
	if w.unrepaired() == 0 {
		t.Error("what is nowhere but in one memory is noted as restored")
	}
	r.kill()
	must(t, w.redis.Kill())
	forget(t, w.redis, true)
	must(t, w.redis.Start(t.Context()))
	r = w.spawn("relay", "--stream-maxlen=0")
	r.waitLogged(`"to":"poll"`)
	if n := w.missing(); n != 0 || w.unrepaired() != 0 {
		t.Errorf("%d events are missing, %d notes are not done", n, w.unrepaired())
	}
}

// First the gate is lost, then the stream, and nothing is published in between.
func TestAGateIsLostAndThenItsStream(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := w.wrote(testenv.LoadOptions{Total: 200})
		w.oracle.WaitEmpty(t, 20*time.Second)
		do(t, w.redis.Client, "del", w.gate("outbox.order"))
		r.waitLogged("the stream is whole again")
		w.waitMode(mode)
		do(t, w.redis.Client, "del", "outbox.order")
		w.waitWhole()
		w.oracle.Check(t, load, 20*time.Second)
	})
}

// A replay publishes to a stream that was lost. If the relay runs, the replay waits for the restoration. If no relay
// runs, the next one still detects the missing entries.
func TestAReplayHidesNoLoss(t *testing.T) {
	t.Parallel()
	for _, down := range []bool{false, true} {
		t.Run(fmt.Sprintf("relay down %v", down), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.relayIn("poll", "--stream-maxlen=0")
			w.wrote(testenv.LoadOptions{Total: 200})
			w.oracle.WaitEmpty(t, 20*time.Second)
			subject := testenv.Value[string](t, w.db, "SELECT aggregate_id FROM outbox LIMIT 1")
			if down {
				r.kill()
				do(t, w.redis.Client, "flushall")
			} else {
				do(t, w.redis.Client, "del", "outbox.order")
			}
			w.once("replay", "--subject="+subject, "--since=1h", "--rate=0").says(t, 0)
			if down {
				w.spawn("relay", "--stream-maxlen=0")
			}
			w.waitWhole()
			w.lostNothing()
		})
	}
}

// The database is restored to a time before the first publish to a stream, or to one with the epoch of the gates and
// another owner. The relay finds the published events in the stream.
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
			load := w.wrote(testenv.LoadOptions{Total: 100})
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

// The marks of a part are lost, of others not: what of the part is settled is unknown. The relay is not ready until it
// has run the remedy, whether it starts then, runs, or hands over, and no event is lost.
func TestMarksOfAPartAreLost(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		for _, stopped := range []bool{false, true} {
			t.Run(fmt.Sprintf("stopped is %t", stopped), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				r := w.relayIn("poll")
				w.delivers()
				if stopped {
					r.kill()
				}
				w.db.Exec(t, fmt.Sprintf(`DELETE FROM outbox_mark WHERE part IN (-1, 3);
					UPDATE relay_state SET desired_mode = '%s'`, mode))
				load := w.wrote(testenv.LoadOptions{Total: 200, Aggregates: 50, Tag: "late-"})
				if stopped {
					r = w.spawn("relay")
				}
				r.waitUnready("outbox_mark")
				var h readiness
				_, err := r.get("/readyz", &h)
				must(t, err)
				w.db.Exec(t, regexp.MustCompile(`INSERT INTO outbox_mark .*? VALUES \(.*?\)`).
					FindString(strings.Join(h.Reasons, "")))
				w.waitMode(mode)
				w.oracle.MayRepeat = true
				w.oracle.Check(t, load, 30*time.Second)
				r.waitReady("")
			})
		}
	})
}

// Redis is restored from a backup made before the last thousand events, while a relay runs.
func TestABackupOfRedisIsRestored(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w, _, load := underLoad(t, mode, 800, "--stream-maxlen=0")
		w.waitSettled(500)
		data, backup := filepath.Join(w.redis.Dir, "appendonlydir"), filepath.Join(t.TempDir(), "backup")
		had := w.length("outbox.order")
		must(t, w.redis.Kill())
		must(t, os.CopyFS(backup, os.DirFS(data)))
		for _, restore := range []bool{false, true} {
			if restore {
				w.waitSettled(had + 1000)
				err := errors.Join(w.redis.Kill(), os.RemoveAll(data), os.CopyFS(data, os.DirFS(backup)))
				must(t, err)
			}
			must(t, w.redis.Start(t.Context()))
		}
		w.waitCommitted(load, load.Committed()+300)
		w.ended(load)
		w.restored(500) // some of the thousand were in the backup and not settled
	})
}

// A stream is deleted, or replaced with an older copy, and another client adds an entry, which is younger than all lost
// entries. The test runs with and without a relay, and with and without the gate.
func TestAYoungerEntryHidesNoLoss(t *testing.T) {
	t.Parallel()
	const stream = "outbox.order"
	for name, c := range map[string]struct {
		mode             string
		back, gate, down bool
	}{
		"deleted":                          {mode: "cdc"},
		"put back":                         {mode: "poll", back: true},
		"deleted while nobody leads":       {mode: "poll", down: true},
		"put back while nobody leads":      {mode: "cdc", down: true, back: true},
		"deleted with its gate":            {mode: "cdc", down: true, gate: true},
		"put back with its gate":           {mode: "poll", down: true, gate: true, back: true},
		"put back with its gate, and live": {mode: "cdc", gate: true, back: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inMode(t, c.mode, func(t *testing.T, mode string) {
				w, r, load := underLoad(t, mode, 400, "--stream-maxlen=0")
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
				must(t, err)
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

// A restored event is traced to its new entry, which is younger than the mark that settled it. An event whose entry was
// not lost is traced to that entry.
func TestTraceOfARestoredEvent(t *testing.T) {
	t.Parallel()
	const stream = "outbox.order"
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.relayIn(mode, "--stream-maxlen=0")
		traced := func(id, entry string) {
			t.Helper()
			w.once("trace", id).says(t, 0, stream+" "+entry)
		}
		committed := 0
		for i := range 3 {
			load := w.wrote(testenv.LoadOptions{Total: 50, Tag: fmt.Sprintf("%d-", i)})
			committed += load.Committed()
			w.waitSettled(int64(committed))
			if i < 2 {
				do(t, w.redis.Client, "del", stream)
				w.waitWhole()
				testenv.Eventually(t, 20*time.Second, func() error {
					n := w.unrepaired()
					return testenv.FailIf(n > 0, "%d repairs are not done", n)
				})
			}
		}
		all := w.oracle.Entries(t, "order")
		for _, n := range []int{0, 60, len(all) - 1} {
			traced(all[n].ID, all[n].EntryID)
		}
	})
}

// waitGroups waits until a relay has recorded the groups of a stream.
func (w *world) waitGroups(stream string, want ...string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		const noted = "SELECT groups FROM outbox_stream WHERE stream = $1"
		got := testenv.Value[[]string](w.t, w.db, noted, stream)
		return testenv.FailIf(!slices.Equal(got, want), "noted are %q, want %q", got, want)
	})
}

// Streams are lost while the consumers of a group are disconnected, after the streams were trimmed up to the group's
// position. The group is recreated before the restored entries, so it reads all of them. That also holds if the relay
// is killed during the restoration and everything is lost once more. A group that was destroyed on purpose is not
// recreated.
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
					return testenv.FailIf(client.XLen(ctx, stream).Val() < 1000, "nothing is restored yet")
				})
				r.kill()
				do(t, client, c.lose...)
				r = w.spawn("relay", "--stream-maxlen=200")
			}
			r.waitLogged("the stream is whole again")
			// Streams are trimmed in the order of their names: if a later stream was trimmed, so was this one.
			w.db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'zz', 'a', 'zz.made', '{}' FROM generate_series(1, 1000)`)
			testenv.Eventually(t, 30*time.Second, func() error {
				info := client.XInfoStream(ctx, "outbox.zz").Val()
				return testenv.FailIf(info == nil || info.EntriesAdded < 1000 || info.Length > 500,
					"it is not trimmed yet")
			})
			client.XGroupCreate(ctx, stream, "away", "0") // as a reconnecting consumer does
			read := map[any]bool{}
			for {
				got, err := client.XReadGroup(ctx, &redis.XReadGroupArgs{
					Group: "away", Consumer: "c", Streams: []string{stream, ">"}, Count: 1000, Block: -1,
				}).Result()
				if errors.Is(err, redis.Nil) {
					break
				}
				must(t, err)
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

// A stream is deleted while no relay runs, its consumer creates the group again, and an operator retries a dead event.
// The retry is refused until the relay has restored the stream, and no event is lost.
func TestDeadRetryWaitsForALostStream(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		client := w.redis.Client
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		w.waitSettled(200)
		w.ended(load)
		r.kill()
		first := client.XRangeN(t.Context(), "outbox.order", "-", "+", 1).Val()[0]
		w.gaveUp("outbox.order", "mailer", first.ID, first.Values)
		do(t, client, "del", "outbox.order")
		do(t, client, "xgroup", "create", "outbox.order", "mailer", "0", "mkstream")
		refused := w.once("dead", "retry", "--all")
		result{refused.code, refused.out + refused.errOut, ""}.says(t, 1, consumer.ErrUnrestored.Error())
		w.spawn("relay", "--stream-maxlen=0")
		w.waitWhole()
		w.oracle.Check(t, load, 30*time.Second)
		w.once("dead", "retry", "--all").says(t, 0)
	})
}
